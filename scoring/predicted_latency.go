package scoring

import (
	"math"

	"kvgate/pool"
)

func init() {
	RegisterScorer(Info{
		"predicted_latency",
		"Prefers endpoints with the shortest time to the first token, predicted from prefill rates learned online.",
		"(max − t) / (max − min), 1 if all are equal; t = (pending + new tokens) × slowness",
	}, func() Scorer { return predictedLatency{} })
}

type predictedLatency struct{}

func (predictedLatency) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		out[i] = math.NaN()
		if c.Fresh(i) && c.Row(i).Load.Known.Has(pool.KnowsWaiting) {
			out[i] = float64(c.Row(i).Foreign.Waiting) * c.p.learn.meanNewTokens()
		}
	}
	fillLoads(out)
	for i := range out {
		slowness, _ := c.Row(i).Learned()
		work := out[i] + float64(c.Booked(i).PendingTokens) + float64(c.PromptTokens()-c.Cached(i))
		out[i] = work * first(float64(slowness), 1)
	}
	spread(out)
}
