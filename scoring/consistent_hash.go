package scoring

import (
	"math"

	"kvgate/pool"
)

var consistentHash = policyEntry{
	Info{
		consistentHashName,
		"Sends what begins alike, or belongs to one session, to one endpoint, as long as that has at most 1.25 times the mean load.",
		"first under rendezvous order of hash(session, else the prompt's first blocks) with requests + 1 ≤ ⌈1.25 · mean⌉",
	},
	func(p *Policy, req *Request, c *Candidates) int {
		key := hashKey(req)
		if key == 0 {
			return leastRequests.pick(p, req, c)
		}
		total := 1.0
		for i := range c.index {
			total += requestLoad(c, i)
		}
		// Consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018, with ε = 0.25 as KubeAI has it.
		limit := math.Ceil(boundedLoad * total / float64(c.Len()))
		best, highest, found := 0, uint64(0), false
		for i := range c.index {
			if requestLoad(c, i)+1 > limit {
				continue
			}
			if h := pool.Rendezvous(c.Row(i).Endpoint.IDHash, key); !found || h > highest {
				best, highest, found = i, h, true
			}
		}
		if !found { // fractions of weights can leave nobody below the limit
			return leastRequests.pick(p, req, c)
		}
		return best
	},
}

const (
	boundedLoad = 1.25
	// hashBlocks is how many blocks from the start of a prompt decide where consistent_hash sends it.
	hashBlocks = 2
)

// hashKey is what consistent hashing hashes; 0 when the request has nothing to hash.
func hashKey(req *Request) uint64 {
	switch {
	case req.Session != 0:
		return req.Session ^ req.Target.Hash
	case len(req.Prefix) > 0:
		return req.Prefix[min(len(req.Prefix), hashBlocks)-1]
	}
	return req.adapter()
}
