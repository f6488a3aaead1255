package scoring

func init() {
	RegisterScorer(Info{
		"lora_affinity",
		"Prefers endpoints that hold the request's adapter, then those with a slot free for it. A request for a base model likes all alike.",
		"1 if resident; 0.8 if not and a slot is free; 0.6 if requests for it wait for a slot there; else 0",
	}, func() Scorer { return loraAffinity{} })
}

type loraAffinity struct{}

func (loraAffinity) Score(req *Request, c *Candidates, out []float64) {
	for i := range out {
		out[i] = 1
		if req.adapter() == 0 {
			continue
		}
		switch v := viewAdapter(c.Row(i), req.Target, c.Fresh(i)); {
		case v.resident && !v.full():
		case !v.full():
			out[i] = 0.8
		case v.inFlight:
			out[i] = 0.6
		default:
			out[i] = 0
		}
	}
}
