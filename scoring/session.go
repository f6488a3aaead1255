package scoring

import (
	"sync/atomic"

	"kvgate/pool"
)

func init() {
	RegisterScorer(Info{
		"session",
		"Keeps a session on the endpoint that served it last, as long as that can; before that on its first choice under rendezvous hashing, so that gateways agree. Requests without a session like all alike.",
		"1 for the endpoint that has the session, or its first choice if none has; else 0",
	}, func() Scorer { return &session{words: make([]atomic.Uint64, sessionSets*sessionWays)} })
}

// session remembers the endpoint of each session in a table of fixed size, oldest out first. An entry is
// hash | epoch | slot: a session of an endpoint that left or restarted is nobody's.
type session struct{ words []atomic.Uint64 }

const (
	sessionSets = 1 << 14
	sessionWays = 8 // 131,072 sessions, 1 MiB
)

func (s *session) set(req *Request) (words []atomic.Uint64, key uint64) {
	h := mix(req.Target.Hash, req.Session)
	i := h % sessionSets * sessionWays
	return s.words[i : i+sessionWays], max(h&^ownerMask, ownerMask+1)
}

func (s *session) Score(req *Request, c *Candidates, out []float64) {
	if req.Session == 0 {
		for i := range out {
			out[i] = 1
		}
		return
	}
	words, key := s.set(req)
	holder := uint64(0)
	for i := range words {
		if w := words[i].Load(); w&^ownerMask == key {
			holder = w
			break
		}
	}
	first, highest, held := 0, uint64(0), false
	for i := range out {
		r := c.Row(i)
		out[i] = 0
		if holder != 0 && owner(r) == holder&ownerMask {
			out[i], held = 1, true
		}
		if h := pool.Rendezvous(r.Endpoint.IDHash, key); h >= highest {
			first, highest = i, h
		}
	}
	if !held && len(out) > 0 {
		out[first] = 1
	}
}

// Chosen implements [ChoiceObserver].
func (s *session) Chosen(req *Request, r *pool.Row) {
	if req.Session == 0 {
		return
	}
	words, key := s.set(req)
	entry := key | owner(r)
	if words[0].Load() == entry {
		return
	}
	// Move to the front; the last falls out. Two writers at once may drop a session, which falls back to rendezvous.
	prev := entry
	for i := range words {
		w := words[i].Load()
		words[i].Store(prev)
		if w&^ownerMask == key || w == 0 {
			return
		}
		prev = w
	}
}
