package scoring

import "math"

func init() {
	RegisterScorer(Info{
		"running_requests",
		"Prefers endpoints with few requests, running or waiting, whoever sent them.",
		"(max − n) / (max − min), 1 if all are equal; n = booked requests + foreign requests",
	}, func() Scorer { return runningRequests{} })
}

type runningRequests struct{}

func (runningRequests) Score(_ *Request, c *Candidates, out []float64) {
	for i := range out {
		n, known := c.Requests(i)
		if out[i] = float64(n - c.Booked(i).Requests); !known {
			out[i] = math.NaN()
		}
	}
	fillLoads(out)
	for i := range out {
		out[i] += float64(c.Booked(i).Requests)
	}
	spread(out)
}
