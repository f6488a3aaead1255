package quota

import "time"

// An Op moves an arrival time in a store. Increments and windows are in nanoseconds.
type Op struct {
	ID     string
	Tag    uint64 // the same for all that one request is charged to, so that a store may keep them in one place
	Kind   Kind
	Inc    int64
	Window int64
}

// A Store counts for several gateways. It is safe for concurrent use.
type Store interface {
	// Take does all of ops or none. tats, which has their number, gets how far each arrival time lies ahead of the store's
	// clock after it, in nanoseconds. refused is the number of the op that does not fit, -1 if all do; tats then holds how
	// far ahead they lie without it. It returns within its timeout, and at once while the store is known to be away.
	Take(ops []Op, tats []int64) (refused int, err error)
	// Add moves arrival times, either way, whatever there is. It does not wait.
	Add(ops []Op)
}

// takeShared does with the store what has been done here, and takes back what has been done here if the store refuses.
func (l *Limiter) takeShared(ch *Charge, now int64) *Refusal {
	ops := make([]Op, len(ch.items))
	tats := make([]int64, len(ch.items))
	for i := range ch.items {
		ops[i] = ch.items[i].op()
	}
	refused, err := l.store.Take(ops, tats)
	switch {
	case err != nil && !l.closed:
		return nil // what this gateway counts itself holds all the same
	case err != nil:
		ch.undo(now)
		return &Refusal{Unchecked: true, Wait: time.Second}
	}
	for i := range tats {
		ch.items[i].tat = now + tats[i]
	}
	if refused < 0 {
		return nil
	}
	it := ch.items[refused]
	n := ch.cost.of(it.kind)
	r := refusal(it.b, it.kind, n, now+tats[refused], tats[refused]+it.inc-int64(it.b.limit.Window), now)
	for i := range ch.items { // the arrival times are those without it already
		ch.items[i].tat += ch.items[i].inc
	}
	ch.undo(now)
	return r
}

func (it *item) op() Op {
	return Op{it.b.id, it.b.tag, it.kind, it.inc, int64(it.b.limit.Window)}
}

// addShared corrects in the store what was corrected here.
func (l *Limiter) addShared(ch *Charge) {
	ops := make([]Op, 0, len(ch.items))
	for i := range ch.items {
		if ch.items[i].inc != 0 {
			ops = append(ops, ch.items[i].op())
		}
	}
	l.store.Add(ops)
}
