package scoring

import "math"

// pickWeighted takes the candidate with the largest weighted sum of scores, any of those that are tied.
func pickWeighted(p *Policy, req *Request, c *Candidates) int {
	n := c.Len()
	if cap(c.totals) < n {
		c.scores, c.totals = make([]float64, n+n/4), make([]float64, n+n/4)
	}
	out, total := c.scores[:n], c.totals[:n]
	clear(total)
	for i := range p.scorers {
		s := &p.scorers[i]
		s.Score(req, c, out)
		if c.rec != nil {
			c.rec.scores(c, s, out)
		}
		for j, v := range out {
			total[j] += s.weight * v
		}
	}
	for i := range total {
		if !c.Fresh(i) {
			total[i] *= staleScore
		}
	}
	if c.rec != nil {
		c.rec.totals(c, total)
	}
	best, highest, ties := 0, math.Inf(-1), uint64(0)
	for i, v := range total {
		// Sums of the same scores in the same order are equal to the last bit, so this finds true ties only.
		switch {
		case v > highest:
			best, highest, ties = i, v, 1
		case v == highest:
			if ties++; p.rand(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

// runnerUp is the candidate with the largest total besides pick; -1 if there is none.
func runnerUp(c *Candidates, pick int) int {
	second := -1
	for i, v := range c.totals[:c.Len()] {
		if i != pick && (second < 0 || v > c.totals[second]) {
			second = i
		}
	}
	return second
}

// staleScore is what is left of the total of an endpoint whose load is unknown or stale: it ranks below its fresh peers
// unless they are much worse off.
const staleScore = 0.25

// spread turns loads in out into scores by min-max: the least loaded gets 1, the most loaded 0, all get 1 when they are
// equal. Elements that are NaN are unknown and get the score of the worst that is known; 0.5 if none is known.
func spread(out []float64) {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, v := range out {
		if v == v {
			lo, hi = min(lo, v), max(hi, v)
		}
	}
	for i, v := range out {
		switch {
		case v != v && math.IsInf(lo, 1):
			out[i] = 0.5
		case hi == lo:
			out[i] = 1
		case v != v:
			out[i] = 0
		default:
			out[i] = (hi - v) / (hi - lo)
		}
	}
}

// fillUnknown gives elements that are NaN the lowest score that is known; 0.5 if none is known.
func fillUnknown(out []float64) {
	lo := math.Inf(1)
	for _, v := range out {
		if v == v {
			lo = min(lo, v)
		}
	}
	if math.IsInf(lo, 1) {
		lo = 0.5
	}
	for i, v := range out {
		if v != v {
			out[i] = lo
		}
	}
}
