package scoring

var randomPolicy = policyEntry{
	Info{"random", "Takes any endpoint that can serve the request, each as likely as the others.", "uniform"},
	func(p *Policy, _ *Request, c *Candidates) int { return int(p.rand(uint64(c.Len()))) },
}
