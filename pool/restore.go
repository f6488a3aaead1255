package pool

import (
	"fmt"
	"time"
)

// Table makes a table that is as v describes one, and the instant that v was taken at: a saved view can be decided on
// again. What a view does not hold stays unknown.
func (v *View) Table() (t *Table, now Instant, err error) {
	now = Instant(24 * time.Hour) // scrapes lie before it
	var pools []PoolSpec
	specs := make(map[string][]Spec)
	for i := range v.Endpoints {
		e := &v.Endpoints[i]
		if specs[e.Pool] == nil {
			pools = append(pools, PoolSpec{Name: e.Pool})
		}
		name := e.ID
		if len(name) > len(e.Pool) && name[:len(e.Pool)+1] == e.Pool+"/" {
			name = name[len(e.Pool)+1:]
		}
		// IDs tell endpoints apart, so that one address may be there twice.
		specs[e.Pool] = append(specs[e.Pool], Spec{Pool: e.Pool, URL: e.URL, SourceID: e.ID, Name: name, Dialect: e.Dialect})
	}
	t = NewTable(pools, Options{})
	for _, p := range pools {
		if _, _, err := t.SetEndpoints(p.Name, specs[p.Name], now); err != nil {
			return nil, 0, err
		}
	}
	s := t.Load()
	byID := make(map[string]int, len(s.Rows))
	for i := range s.Rows {
		byID[s.Rows[i].Endpoint.ID] = i
	}
	for i := range v.Endpoints {
		e := &v.Endpoints[i]
		row, ok := byID[e.ID]
		if !ok {
			return nil, 0, fmt.Errorf("endpoint %q of pool %q: the two do not fit; want an id that begins with the pool", e.ID, e.Pool)
		}
		e.restore(t, &s.Rows[row], now)
	}
	return t, now, nil
}

// restore gives row's endpoint everything that e tells of it.
func (e *EndpointView) restore(t *Table, row *Row, now Instant) {
	ep := row.Endpoint
	if age := e.Load.ScrapeAgeSeconds; age != nil {
		// Not ours yet: bookings come later, and the view says itself what is foreign.
		at := max(1, now-Instant(*age*float64(time.Second)))
		t.Observe(ep, Observation{Load: e.Load.load(e.Dialect), At: at})
	}
	if len(e.Models) > 0 {
		served := &Served{At: now}
		for _, id := range e.Models {
			m := Model{ID: id}
			for _, a := range e.ServableAdapters {
				if a.ID == id {
					m.Parent = a.Base
				}
			}
			served.Models = append(served.Models, m)
		}
		t.SetServed(ep, served)
	}
	rate := 0.0
	take(&rate, e.PrefillTokensPerSecond)
	ep.Relearn(rate, e.Learned)
	ep.Remember(e.PlacedAdapters, now, true)
	ep.live.requests.Store(e.Booked.Requests)
	ep.live.tokens.Store(e.Booked.KVTokens<<kvShift + e.Booked.PendingTokens)
	if f := e.Load.Foreign; f != nil {
		t.mu.Lock()
		if en := t.lookup(ep); en != nil {
			en.row.Foreign = Foreign(*f)
			t.publish(now, false)
		}
		t.mu.Unlock()
	}
	for _, st := range e.State {
		switch st {
		case "draining":
			t.SetState(ep, Draining, true, now)
		case "down":
			t.SetState(ep, Unreachable, true, now)
		case "unmeasured":
			t.SetState(ep, Unmeasured, true, now)
		case "asleep", "sleeping": // the latter until 0.1
			t.SetState(ep, Sleeping, true, now)
		case "not_ready":
			t.SetState(ep, NotReady, true, now)
		case "ejected":
			ep.SetEjectedUntil(now + Instant(time.Hour))
		case "busy":
			ep.SetBusyUntil(now + Instant(time.Hour))
		}
	}
}

// load is the Load that v shows.
func (v *LoadView) load(dialect string) *Load {
	l := *unknownLoad
	l.Dialect = dialect
	set := func(f Fields, known bool) {
		if known {
			l.Known |= f
		}
	}
	take(&l.KVCacheUtilization, v.KVCacheUtilization)
	take(&l.KVCacheUtilizationMax, v.KVCacheUtilizationMax)
	take(&l.KVCapacityTokens, v.KVCapacityTokens)
	take(&l.Waiting, v.Waiting)
	take(&l.Running, v.Running)
	take(&l.MaxAdapters, v.MaxAdapters)
	take(&l.AdapterSlotsUsed, v.AdapterSlotsUsed)
	set(KnowsKVCacheUtilization, v.KVCacheUtilization != nil)
	set(KnowsKVCapacity, v.KVCapacityTokens != nil)
	set(KnowsWaiting, v.Waiting != nil)
	set(KnowsRunning, v.Running != nil)
	set(KnowsMaxAdapters, v.MaxAdapters != nil)
	set(KnowsAdapterSlots, v.AdapterSlotsUsed != nil)
	set(KnowsAdapters, v.Adapters != nil)
	l.Adapters = v.Adapters
	for _, e := range v.Engines {
		el := EngineLoad{ID: e.ID}
		take(&el.Waiting, e.Waiting)
		take(&el.Running, e.Running)
		take(&el.KVCacheUtilization, e.KVCacheUtilization)
		take(&el.KVCapacityTokens, e.KVCapacityTokens)
		for f, known := range map[Fields]bool{
			KnowsWaiting: e.Waiting != nil, KnowsRunning: e.Running != nil,
			KnowsKVCacheUtilization: e.KVCacheUtilization != nil, KnowsKVCapacity: e.KVCapacityTokens != nil,
		} {
			if known {
				el.Known |= f
			}
		}
		l.Engines = append(l.Engines, el)
	}
	return &l
}

func take[T any](to *T, v *T) {
	if v != nil {
		*to = *v
	}
}
