package scoring

import (
	"math"

	"kvgate/pool"
)

func init() {
	RegisterScorer(Info{
		"queue",
		"Prefers endpoints with little before this request: prompts of ours without a first token yet, and foreign requests that wait in the server.",
		"(max − q) / (max − min), 1 if all are equal; q = pending tokens + foreign waiting × mean prompt",
	}, func() Scorer { return queue{} })
}

type queue struct{}

func (queue) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		r := c.Row(i)
		out[i] = math.NaN()
		if c.Fresh(i) && r.Load.Known.Has(pool.KnowsWaiting) {
			out[i] = float64(r.Foreign.Waiting) * c.p.learn.meanNewTokens()
		}
	}
	fillLoads(out)
	for i := range out {
		out[i] += float64(c.Booked(i).PendingTokens)
	}
	spread(out)
}

// fillLoads replaces foreign loads that are unknown by the largest that is known: an endpoint that nobody has looked at is
// believed to be as loaded by others as the most loaded one.
func fillLoads(out []float64) {
	most := 0.0
	for _, v := range out {
		if v == v {
			most = max(most, v)
		}
	}
	for i, v := range out {
		if v != v {
			out[i] = most
		}
	}
}
