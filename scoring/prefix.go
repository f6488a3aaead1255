package scoring

func init() {
	RegisterScorer(Info{
		"prefix",
		"Prefers endpoints that hold the start of the prompt in their prefix cache.",
		"cached tokens / prompt tokens",
	}, func() Scorer { return prefix{} })
}

type prefix struct{}

func (prefix) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		out[i] = min(1, float64(c.Cached(i))/float64(c.PromptTokens()))
	}
}
