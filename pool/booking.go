package pool

import "sync/atomic"

// A Booking is what one request holds on one endpoint, from the choice until its end. The zero value holds nothing; a
// Booking is used again after End and must not be copied. Every method may be called by any goroutine at any time, and
// each effect happens exactly once: a late timer that clears an earlier use of the same Booking does nothing.
type Booking struct {
	state    atomic.Uint64 // generation<<2 | pendingHeld<<1 | held
	endpoint atomic.Pointer[Endpoint]
	memory   atomic.Pointer[AdapterMemory]
	slot     atomic.Pointer[adapterSlot]
	rank     atomic.Pointer[rankTokens]
	pending  atomic.Int64
	kv       atomic.Int64
}

const (
	bookingHeld    = 1
	bookingPending = 2
	bookingStep    = 4
)

// A Claim is what a request asks to hold on an endpoint.
type Claim struct {
	PendingTokens int64  // uncached prompt tokens to prefill before its first token
	KVTokens      int64  // prompt plus expected output
	Rank          int32  // number of the data-parallel engine, from 1; 0 is none
	Adapter       uint64 // HashName of the adapter; 0 for the base model
	At            Instant
}

// Version is the number of bookings ever made on the row's endpoint. Read it before reading [Row.Booked].
func (r *Row) Version() uint64 { return r.live.version.Load() }

// TryBook books c on the row's endpoint into b if no other booking was made since version was read, and reports whether
// it did. A decision that lost the race looks again, so that a burst spreads though every request of it read the same
// table. b must be free.
func (r *Row) TryBook(b *Booking, version uint64, c Claim) bool {
	if !r.live.version.CompareAndSwap(version, version+1) {
		return false
	}
	b.fill(r.Endpoint, c)
	return true
}

// Book books c on the row's endpoint into b whatever happened since.
func (r *Row) Book(b *Booking, c Claim) {
	r.live.version.Add(1)
	b.fill(r.Endpoint, c)
}

func (b *Booking) fill(e *Endpoint, c Claim) {
	st := b.state.Load()
	if st&(bookingHeld|bookingPending) != 0 {
		panic("BUG: booking is in use")
	}
	live := e.live
	live.requests.Add(1)
	live.tokens.Add(c.KVTokens<<kvShift + c.PendingTokens)
	live.intakeTokens.Add(c.PendingTokens)
	var s *adapterSlot
	if c.Adapter != 0 {
		m := e.Adapters()
		s = m.place(c.Adapter, c.At)
		b.memory.Store(m)
	}
	var rank *rankTokens
	if r := e.Ranks(); c.Rank > 0 && int(c.Rank) <= r.Len() {
		rank = &r.tokens[c.Rank-1]
		rank.v.Add(c.KVTokens<<kvShift + c.PendingTokens)
	}
	b.rank.Store(rank)
	b.slot.Store(s)
	b.endpoint.Store(e)
	b.pending.Store(c.PendingTokens)
	b.kv.Store(c.KVTokens)
	b.state.Store(st + bookingStep + bookingHeld + bookingPending)
}

// Endpoint returns the endpoint booked last, or nil.
func (b *Booking) Endpoint() *Endpoint { return b.endpoint.Load() }

// PendingTokens is what was booked as pending, whether or not it has been cleared.
func (b *Booking) PendingTokens() int64 { return b.pending.Load() }

// Generation names this use of the booking, for [Booking.FirstTokenOf].
func (b *Booking) Generation() uint64 { return b.state.Load() / bookingStep }

// Held reports whether the booking holds anything.
func (b *Booking) Held() bool { return b.state.Load()&bookingHeld != 0 }

// FirstToken clears the pending tokens: the endpoint has prefilled the prompt.
func (b *Booking) FirstToken() { b.FirstTokenOf(b.Generation()) }

// FirstTokenOf is FirstToken for the use of the booking that generation names; it does nothing after that use has ended.
func (b *Booking) FirstTokenOf(generation uint64) {
	for {
		st := b.state.Load()
		if st/bookingStep != generation || st&bookingPending == 0 {
			return
		}
		// Read before the swap: after it, End may hand the booking to another request.
		e, pending, slot, rank := b.endpoint.Load(), b.pending.Load(), b.slot.Load(), b.rank.Load()
		if b.state.CompareAndSwap(st, st&^bookingPending) {
			e.live.tokens.Add(-pending)
			if rank != nil {
				rank.v.Add(-pending)
			}
			if slot != nil {
				slot.started.Add(1)
			}
			return
		}
	}
}

// End releases everything the booking holds. Calling it again does nothing.
func (b *Booking) End() {
	for {
		st := b.state.Load()
		if st&bookingHeld == 0 {
			return
		}
		e, pending, kv, slot, memory := b.endpoint.Load(), b.pending.Load(), b.kv.Load(), b.slot.Load(), b.memory.Load()
		rank := b.rank.Load()
		if !b.state.CompareAndSwap(st, st&^(bookingHeld|bookingPending)) {
			continue
		}
		held := kv << kvShift
		if st&bookingPending != 0 {
			held += pending
		}
		e.live.tokens.Add(-held)
		if rank != nil {
			rank.v.Add(-held)
		}
		if slot != nil {
			if st&bookingPending == 0 {
				slot.started.Add(-1)
			}
			memory.release(slot)
		}
		e.live.requests.Add(-1) // last: a drained endpoint may be dropped as soon as this is 0
		return
	}
}
