package scoring

import "math"

func init() {
	RegisterScorer(Info{
		"kv_cache",
		"Prefers endpoints whose KV cache is little used, after our bookings.",
		"1 − min(1, (booked + foreign KV tokens) / capacity)",
	}, func() Scorer { return kvCache{} })
}

type kvCache struct{}

func (kvCache) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		used, capacity, known := c.KV(i)
		if out[i] = 1 - min(1, used/capacity); !known {
			out[i] = math.NaN()
		}
	}
	fillUnknown(out)
}
