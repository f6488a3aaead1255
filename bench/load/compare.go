package load

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// A Comparison is B beside A, from pairs of requests that both answered.
type Comparison struct {
	A      string `json:"a"`
	B      string `json:"b"`
	Pairs  int    `json:"pairs"`  // both answered
	Left   int    `json:"left"`   // pairs of which one was not
	Blocks int    `json:"blocks"` // stretches of time that intervals are made from
	Rows   []Row  `json:"rows"`
	// FailedA and FailedB are shares, 0..1.
	FailedA       float64 `json:"failed_a_ratio"`
	FailedB       float64 `json:"failed_b_ratio"`
	FailedVerdict string  `json:"failed_verdict"`
}

// A Row is one figure of the comparison. [Low, High] holds the ratio of B to A with 99 % confidence; both are 0 where there is
// too little to tell.
type Row struct {
	Metric  string  `json:"metric"`
	A       float64 `json:"a_seconds"`
	B       float64 `json:"b_seconds"`
	Ratio   float64 `json:"ratio"`
	Low     float64 `json:"low"`
	High    float64 `json:"high"`
	Verdict string  `json:"verdict"`
}

// fewestBlocks is the least that an interval can be made from.
const fewestBlocks = 4

const (
	tooFew       = "too few to tell"
	noDifference = "no difference seen"
)

// A datum is a value and the block that it lies in.
type datum struct {
	value float64
	block int
}

// quantile of sorted data, each counted as often as its block; q < 0 is the mean.
func quantile(data []datum, times []int, q float64) float64 {
	total, sum := 0, 0.0
	for _, d := range data {
		total += times[d.block]
		sum += d.value * float64(times[d.block])
	}
	if total == 0 {
		return 0
	}
	if q < 0 {
		return sum / float64(total)
	}
	rank := int(math.Ceil(q * float64(total)))
	for _, d := range data {
		if rank -= times[d.block]; rank <= 0 {
			return d.value
		}
	}
	return data[len(data)-1].value
}

// interval estimates f, a function of how often each block counts, with 99 % confidence: blocks are drawn with
// replacement, whole, since requests near each other are alike, and the deviation of what comes out is widened by Student's
// t for their number. ok is false where there are too few.
func interval(blocks int, f func(times []int) float64) (low, high float64, ok bool) {
	times := make([]int, blocks)
	for i := range times {
		times[i] = 1
	}
	at := f(times)
	if blocks < fewestBlocks || math.IsNaN(at) || math.IsInf(at, 0) {
		return 0, 0, false
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	const draws = 400
	sum, squares := 0.0, 0.0
	for range draws {
		clear(times)
		for range blocks {
			times[rnd.IntN(blocks)]++
		}
		v := f(times)
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return 0, 0, false
		}
		sum += v - at
		squares += (v - at) * (v - at)
	}
	n := float64(blocks)
	deviation := math.Sqrt(max(0, squares/draws-sum/draws*sum/draws) * n / (n - 1))
	w := studentT995(blocks-1) * deviation
	return at - w, at + w, true
}

// studentT995 is the 99.5 % quantile of Student's t with n degrees of freedom (Abramowitz and Stegun, 26.7.5, to the third
// order: 2 % low at 4, exact beyond 10).
func studentT995(n int) float64 {
	const z = 2.575829
	v, z2 := float64(n), z*z
	return z + z*(z2+1)/(4*v) + z*(5*z2*z2+16*z2+3)/(96*v*v) + z*(3*z2*z2*z2+19*z2*z2+17*z2-15)/(384*v*v*v)
}

// row compares sorted data of A and B.
func row(metric string, a, b []datum, blocks int, q float64) Row {
	all := make([]int, blocks)
	for i := range all {
		all[i] = 1
	}
	w := Row{Metric: metric, A: quantile(a, all, q), B: quantile(b, all, q), Verdict: tooFew}
	w.Ratio = w.B / w.A
	low, high, ok := interval(blocks, func(times []int) float64 { return math.Log(quantile(b, times, q) / quantile(a, times, q)) })
	if !ok {
		return w
	}
	w.Low, w.High = math.Exp(low), math.Exp(high)
	switch {
	case low > 0:
		w.Verdict = fmt.Sprintf("slower by %.0f %%", 100*(w.Ratio-1))
	case high < 0:
		w.Verdict = fmt.Sprintf("faster by %.0f %%", 100*(1-w.Ratio))
	default:
		w.Verdict = noDifference
	}
	return w
}

func (r *run) compare() *Comparison {
	c := &Comparison{A: r.o.Targets[0].Name, B: r.o.Targets[1].Name}
	type key struct{ pair, turn int }
	pairs := map[key]*[2]*sample{}
	for i := range r.samples {
		s := &r.samples[i]
		if s.failure == interrupted {
			continue
		}
		k := key{s.pair, s.turn}
		if pairs[k] == nil {
			pairs[k] = new([2]*sample)
		}
		pairs[k][s.target] = s
	}
	var both []*[2]*sample // both asked
	for _, p := range pairs {
		if p[0] != nil && p[1] != nil {
			both = append(both, p)
		} else {
			c.Left++
		}
	}
	slices.SortFunc(both, func(a, b *[2]*sample) int {
		return cmp.Or(cmp.Compare(min(a[0].intended, a[1].intended), min(b[0].intended, b[1].intended)), cmp.Compare(a[0].pair, b[0].pair))
	})
	block := r.blocks(both, c)
	var failed [2][]datum
	data := map[string]*[2][]datum{"time to first token": {}, "time per output token": {}, "whole request": {}}
	for i, p := range both {
		for t, s := range p {
			v := 0.0
			if s.failure != "" {
				v = 1
			}
			failed[t] = append(failed[t], datum{v, block(i)})
		}
		if p[0].failure != "" || p[1].failure != "" {
			c.Left++
			continue
		}
		c.Pairs++
		add := func(metric string, f func(*sample) time.Duration) {
			a, b := f(p[0]), f(p[1])
			if a > 0 && b > 0 {
				d := data[metric]
				d[0], d[1] = append(d[0], datum{a.Seconds(), block(i)}), append(d[1], datum{b.Seconds(), block(i)})
			}
		}
		if p[0].first > 0 && p[1].first > 0 {
			add("time to first token", (*sample).ttft)
		}
		add("time per output token", (*sample).tpot)
		add("whole request", (*sample).all)
	}
	for _, metric := range []string{"time to first token", "time per output token", "whole request"} {
		d := data[metric]
		if len(d[0]) == 0 {
			continue
		}
		for t := range d {
			slices.SortFunc(d[t], func(a, b datum) int { return cmp.Compare(a.value, b.value) })
		}
		for _, q := range []struct {
			name   string
			q      float64
			fewest int // ten values beyond the quantile
		}{{"mean", -1, 1}, {"p50", 0.5, 20}, {"p90", 0.9, 100}, {"p99", 0.99, 1000}} {
			if len(d[0]) >= q.fewest {
				c.Rows = append(c.Rows, row(metric+", "+q.name, d[0], d[1], c.Blocks, q.q))
			}
		}
	}
	c.failures(&failed)
	return c
}

// failures compares shares by their difference: a ratio to none would say nothing.
func (c *Comparison) failures(failed *[2][]datum) {
	all := make([]int, c.Blocks)
	for i := range all {
		all[i] = 1
	}
	c.FailedA, c.FailedB = quantile(failed[0], all, -1), quantile(failed[1], all, -1)
	low, high, ok := interval(c.Blocks, func(times []int) float64 { return quantile(failed[1], times, -1) - quantile(failed[0], times, -1) })
	switch {
	case !ok:
		c.FailedVerdict = tooFew
	case low > 0:
		c.FailedVerdict = fmt.Sprintf("%.1f points more", 100*(c.FailedB-c.FailedA))
	case high < 0:
		c.FailedVerdict = fmt.Sprintf("%.1f points fewer", 100*(c.FailedA-c.FailedB))
	default:
		c.FailedVerdict = noDifference
	}
}

// blocks returns the block of each pair: a pair of slices, or one of up to 40 stretches of at least five pairs that follow
// each other.
func (r *run) blocks(both []*[2]*sample, c *Comparison) func(i int) int {
	if r.o.Slice > 0 {
		number := map[int]int{}
		for _, p := range both {
			n := p[0].pair >> 28
			if _, ok := number[n]; !ok {
				number[n] = len(number)
			}
		}
		c.Blocks = max(1, len(number))
		return func(i int) int { return number[both[i][0].pair>>28] }
	}
	c.Blocks = max(1, min(40, len(both)/5))
	return func(i int) int { return i * c.Blocks / max(1, len(both)) }
}
