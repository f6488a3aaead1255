package pool

import "slices"

// AddServed notes that e serves m from now on, which its own list will say when it is read next. An endpoint whose list is
// not known is left alone.
func (t *Table) AddServed(e *Endpoint, m Model, now Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	en := t.lookup(e)
	if en == nil {
		return
	}
	delete(en.hidden, m.ID)
	if en.row.Served == nil || slices.ContainsFunc(en.row.Served.Models, func(o Model) bool { return o.ID == m.ID }) {
		return
	}
	en.row.Served = &Served{Models: append(slices.Clone(en.row.Served.Models), m), At: now}
	en.names = en.metricsOnlyNames(false)
	t.publish(now, true)
}

// RemoveServed has e get no more requests for the model called id, which it has lost or is about to lose: until its own
// list has been read without it, whatever lists and pages that were under way say.
func (t *Table) RemoveServed(e *Endpoint, id string, now Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	en := t.lookup(e)
	if en == nil || en.row.Served == nil {
		return
	}
	if en.hidden == nil {
		en.hidden = make(map[string]bool)
	}
	en.hidden[id] = true
	en.row.Served = &Served{Models: en.visible(en.row.Served.Models), At: en.row.Served.At}
	en.names = en.metricsOnlyNames(false)
	t.publish(now, true)
}

// visible is models without those that are hidden.
func (e *entry) visible(models []Model) []Model {
	if len(e.hidden) == 0 {
		return models
	}
	return slices.DeleteFunc(slices.Clone(models), func(m Model) bool { return e.hidden[m.ID] })
}

// seen takes in that the endpoint's own list is models.
func (e *entry) seen(models []Model) {
	for id := range e.hidden {
		if !slices.ContainsFunc(models, func(m Model) bool { return m.ID == id }) {
			delete(e.hidden, id)
		}
	}
}
