package scoring

var roundRobin = policyEntry{
	Info{"round_robin", "Takes the endpoints that can serve the request in turn.", "position = turn mod candidates"},
	func(p *Policy, _ *Request, c *Candidates) int {
		// The turn is spread over the rows that are left, not over all of them with the next one standing in for one that
		// was filtered: that neighbour would get a double share.
		return int(p.turn.Add(1) % uint64(c.Len()))
	},
}
