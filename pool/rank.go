package pool

import (
	"slices"
	"strconv"
	"sync/atomic"
)

// maxRanks bounds the engines of an endpoint that bookings are kept apart for.
const maxRanks = 64

// Ranks is what is booked on each data-parallel engine of an endpoint whose server lets us name the engine that a request is
// for. Engines are numbered from 0.
type Ranks struct{ tokens []rankTokens }

// rankTokens has a cache line of its own, as counters have.
type rankTokens struct {
	v atomic.Int64 // as counters.tokens
	_ [cacheLine - 8]byte
}

// Len is the number of engines.
func (r *Ranks) Len() int {
	if r == nil {
		return 0
	}
	return len(r.tokens)
}

// Booked is what is booked on engine i; it does not count requests.
func (r *Ranks) Booked(i int) Booked {
	t := r.tokens[i].v.Load()
	return Booked{PendingTokens: t & (1<<kvShift - 1), KVTokens: t >> kvShift}
}

// Ranks returns what is booked on e's engines; nil where requests can't be sent to one of them, or there is only one.
func (e *Endpoint) Ranks() *Ranks { return e.ranks.Load() }

// namesRanks reports whether requests can name the engine that they are for. vLLM (since 0.11.1) and SGLang read
// X-data-parallel-rank; with vLLM's hybrid balancing a page shows global ranks that this server may not have.
func (l *Load) namesRanks() bool {
	n := len(l.Engines)
	if n < 2 || n > maxRanks || l.Dialect != "vllm" && l.Dialect != "sglang" {
		return false
	}
	for i := range l.Engines {
		if !slices.ContainsFunc(l.Engines, func(e EngineLoad) bool { return e.ID == strconv.Itoa(i) }) {
			return false
		}
	}
	return true
}

// observeRanks keeps the counters of e's engines, as many as l shows. Bookings on ones that are gone end on those.
func (e *Endpoint) observeRanks(l *Load) {
	n := 0
	if l.namesRanks() {
		n = len(l.Engines)
	}
	switch {
	case n == e.Ranks().Len():
	case n == 0:
		e.ranks.Store(nil)
	default:
		e.ranks.Store(&Ranks{make([]rankTokens, n)})
	}
}
