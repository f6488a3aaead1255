package scoring

import "math"

func init() {
	RegisterScorer(Info{
		"kv_headroom",
		"Prefers endpoints with the most KV cache left after this request's own need; 0 where it does not fit now.",
		"max(0, capacity − used − need) / capacity; need = prompt + expected output",
	}, func() Scorer { return kvHeadroom{} })
}

type kvHeadroom struct{}

func (kvHeadroom) Score(_ *Request, c *Candidates, out []float64) {
	need := float64(c.NeedTokens())
	for i := range out {
		used, capacity, known := c.KV(i)
		if out[i] = max(0, capacity-used-need) / capacity; !known {
			out[i] = math.NaN()
		}
	}
	fillUnknown(out)
}
