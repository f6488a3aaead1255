package scoring

var powerOfTwo = policyEntry{
	Info{"power_of_two", "Draws two endpoints at random and takes the one with fewer requests.", "argmin requests of two drawn without replacement"},
	func(p *Policy, _ *Request, c *Candidates) int {
		n := uint64(c.Len())
		if n == 1 {
			return 0
		}
		a, b := p.rand(n), p.rand(n-1)
		if b >= a {
			b++
		}
		// A tie goes to the first drawn, which is as likely to be either.
		if requestLoad(c, int(b)) < requestLoad(c, int(a)) {
			return int(b)
		}
		return int(a)
	},
}
