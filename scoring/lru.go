package scoring

import (
	"math"
	"sync/atomic"

	"kvgate/pool"
)

func init() {
	RegisterScorer(Info{
		"lru",
		"Prefers the endpoint whose last request from this policy is longest ago.",
		"(newest − last) / (newest − oldest) over the numbers of the choices, 1 if all are equal or never chosen",
	}, func() Scorer { return &lru{last: make([]atomic.Uint64, math.MaxUint16+1)} })
}

type lru struct {
	count atomic.Uint64
	last  []atomic.Uint64 // by Endpoint.Slot: the number of the choice that took it last
}

func (s *lru) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		out[i] = float64(s.last[c.Row(i).Slot].Load())
	}
	spread(out)
}

// Chosen implements [ChoiceObserver].
func (s *lru) Chosen(_ *Request, r *pool.Row) { s.last[r.Slot].Store(s.count.Add(1)) }
