package scoring

func init() {
	RegisterScorer(Info{
		"predicted_latency",
		"Prefers endpoints with the shortest time to the first token, predicted from prefill rates learned online.",
		"(max − t) / (max − min), 1 if all are equal; t = (pending + new tokens) / prefill rate",
	}, func() Scorer { return predictedLatency{} })
}

type predictedLatency struct{}

func (predictedLatency) Score(_ *Request, c *Candidates, out []float64) {
	waiting := c.p.learn.meanNewTokens()
	most := 0.0 // foreign tokens waiting where that is known
	for i := range out {
		if c.Fresh(i) {
			most = max(most, float64(c.Row(i).Foreign.Waiting)*waiting)
		}
	}
	for i := range out {
		r := c.Row(i)
		foreign := most // unknown is not better than the worst that is known
		if c.Fresh(i) {
			foreign = float64(r.Foreign.Waiting) * waiting
		}
		ahead := float64(c.Booked(i).PendingTokens) + foreign
		slowness, _ := r.Learned()
		out[i] = (ahead + float64(c.PromptTokens()-c.Cached(i))) * first(float64(slowness), 1)
	}
	spread(out)
}
