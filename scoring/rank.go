package scoring

import (
	"math"
	"sort"

	"kvgate/pool"
)

// rankKey stands for a block on one engine of an endpoint.
func rankKey(hash uint64, rank int) uint64 { return mix(hash, 0x72616e6b00000000|uint64(rank)) }

// chooseRank picks one of ranks, the data-parallel engines of r's endpoint, as auto picks an endpoint: each has a queue and
// a KV cache of its own. It returns the number of the engine from 1, and how many tokens of the prompt that one is believed
// to have cached, of the first blocks that the endpoint has. blocks is 0 without an index.
func (p *Policy) chooseRank(c *Candidates, r *pool.Row, ranks *pool.Ranks, blocks int) (rank int32, cached int32) {
	w := &p.cost
	n := ranks.Len()
	capacity := float32(r.KVCapacity)
	if capacity == 0 {
		_, learned := r.Learned()
		capacity = learnedOr(learned)
	}
	capacity /= float32(n)
	// What was scraped of an engine tells ours and others' work together, as the endpoint's numbers do.
	foreign := float32(0)
	if total, ok := r.Load.Requests(); ok && total > 0 && r.Fresh(c.now, p.staleAfter) {
		foreign = float32(r.Foreign.Requests) / float32(total)
	}
	var m match
	m.at(r)
	best, ties := float32(math.MaxFloat32), uint64(0)
	for i := range n {
		b := ranks.Booked(i)
		pending, used := float32(b.PendingTokens), float32(b.KVTokens)
		for j := range r.Load.Engines {
			if e := &r.Load.Engines[j]; foreign > 0 && e.ID == rankNames[i] {
				pending += foreign * float32(e.Waiting) * float32(p.learn.meanNewTokens())
				used += foreign * float32(e.KVCacheUtilization) * capacity
			}
		}
		here := int32(0)
		if blocks > 0 {
			// Tails are forgotten before heads, so this engine holds the blocks up to some number.
			k := sort.Search(blocks, func(k int) bool { return !p.index.fresh(rankKey(c.req.Prefix[k], i), &m) })
			here = p.index.believe(c.scale.tokens(k))
		}
		cost := pending + (1+w.OwnWork)*float32(c.prompt-here) + w.KV*used
		if over := used + float32(c.need) - w.Guard*capacity; over > 0 {
			cost += w.Overflow * over
		}
		switch {
		case cost < best:
			best, ties, rank, cached = cost, 1, int32(i+1), here
		case cost == best:
			if ties++; p.rand(ties) == 0 {
				rank, cached = int32(i+1), here
			}
		}
	}
	return rank, cached
}

// rankNames are the names of engines, so that none is made in a decision.
var rankNames = func() (names [64]string) {
	for i := range names {
		names[i] = string([]byte{'0' + byte(i/10), '0' + byte(i%10)})
		if i < 10 {
			names[i] = names[i][1:]
		}
	}
	return names
}()

// fresh reports whether m's endpoint holds what hash stands for.
func (x *Index) fresh(hash uint64, m *match) bool {
	key := tag(hash)<<(slotBits+epochBits) | m.owner
	b := x.bucket(hash)
	for i := range b {
		if w := b[i].Load(); w>>ownerShift == key {
			return m.age(w) <= m.limit
		}
	}
	return false
}

// insertRank notes that req's prompt was sent to the engine of r's endpoint with that number, from 1.
func (x *Index) insertRank(req *Request, r *pool.Row, rank int32, sc blockScale) {
	var m match
	m.at(r)
	for k, hash := range req.Prefix {
		stamp := (m.clock - uint64(sc.tokens(k+1))/stampTokens) & stampMask
		x.put(rankKey(hash, int(rank-1)), m.owner, stamp)
	}
}
