package scoring

var leastRequests = policyEntry{
	Info{"least_requests", "Takes the endpoint with the fewest requests: ours now, and foreign ones as of the last scrape.", "argmin (requests + 1) / weight"},
	func(p *Policy, _ *Request, c *Candidates) int {
		best, ties := 0, uint64(0)
		least := 0.0
		for i := range c.index {
			n := requestLoad(c, i)
			switch {
			case ties == 0 || n < least:
				best, least, ties = i, n, 1
			case n == least:
				// Every one of k ties is kept with probability 1/k.
				if ties++; p.rand(ties) == 0 {
					best = i
				}
			}
		}
		return best
	},
}

// staleRequests is how many requests an endpoint whose load is unknown or stale is believed to have from others: enough to
// rank it below its fresh peers, too little to keep it out for ever.
const staleRequests = 4

// requestLoad is the load of candidate i in requests.
func requestLoad(c *Candidates, i int) float64 {
	n := c.booked[i].Requests
	r := c.Row(i)
	if c.Fresh(i) {
		n += int64(r.Foreign.Requests)
	} else {
		n += staleRequests
	}
	if r.Weight == 1 {
		return float64(n)
	}
	return float64(n+1)/float64(r.Weight) - 1
}
