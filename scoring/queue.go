package scoring

import (
	"math"

	"kvgate/pool"
)

func init() {
	RegisterScorer(Info{
		"queue",
		"Prefers endpoints with little before this request: requests of ours that have not ended, and foreign ones that wait in the server.",
		"(max − q) / (max − min), 1 if all are equal; q = booked requests + foreign waiting",
	}, func() Scorer { return queue{} })
}

type queue struct{}

func (queue) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		r := c.Row(i)
		out[i] = math.NaN()
		if c.Fresh(i) && r.Load.Known.Has(pool.KnowsWaiting) {
			out[i] = float64(c.Booked(i).Requests) + float64(r.Foreign.Waiting)
		}
	}
	fillLoads(c, out)
	spread(out)
}

// fillLoads replaces unknown loads by our own bookings on top of the largest foreign load that is known: an endpoint that
// nobody has looked at is believed to be as loaded by others as the most loaded one.
func fillLoads(c *Candidates, out []float64) {
	foreign := 0.0
	for i, v := range out {
		if v == v {
			foreign = max(foreign, v-float64(c.Booked(i).Requests))
		}
	}
	for i, v := range out {
		if v != v {
			out[i] = float64(c.Booked(i).Requests) + foreign
		}
	}
}
