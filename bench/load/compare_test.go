package load

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// twins is a run of pairs whose times drift alike, as servers' do; B is slower by a factor.
func twins(pairs int, seed uint64, factor float64) *run {
	r := &run{o: New()}
	r.o.Targets = []Target{{Name: "A"}, {Name: "B"}}
	rnd := rand.New(rand.NewPCG(seed, 1))
	drift := 0.0
	for i := range pairs {
		drift = 0.9*drift + 0.1*rnd.NormFloat64()
		for t := range 2 {
			ms := 100 * math.Exp(drift+0.3*rnd.NormFloat64())
			if t == 1 {
				ms *= factor
			}
			at := time.Duration(2*i+t) * time.Second
			s := sample{target: t, pair: i, measured: true, intended: at, sent: at, output: 11}
			s.first = at + time.Duration(ms*1e6)
			s.last = s.first + time.Duration(ms*1e6)
			s.end = s.last
			r.samples = append(r.samples, s)
		}
	}
	return r
}

// Of two targets that are alike, no difference is seen but by the chance of 1 %; of 20 %, one is, and its size is right.
func TestCompare(t *testing.T) {
	seen, rows, inside := 0, 0, 0
	const runs = 20
	for seed := range uint64(runs) {
		c := twins(400, seed, 1).compare()
		if c.Pairs != 400 || c.Left != 0 || c.Blocks != 40 || len(c.Rows) != 9 {
			t.Fatalf("%+v", c)
		}
		for _, w := range c.Rows {
			rows++
			if w.Verdict != noDifference {
				seen++
			}
		}
		c = twins(400, seed, 1.2).compare()
		w := c.Rows[0]
		if w.Low < 1.2 && 1.2 < w.High {
			inside++
		}
		if !strings.HasPrefix(w.Verdict, "slower by") {
			t.Errorf("seed %d: %+v; want it to be seen", seed, w)
		}
	}
	if seen*100 > rows*4 {
		t.Errorf("a difference was seen in %d of %d figures where there is none", seen, rows)
	}
	if inside < runs*9/10 {
		t.Errorf("the interval held the truth in %d of %d runs", inside, runs)
	}
}

func TestCompareOfLittle(t *testing.T) {
	for _, pairs := range []int{0, 1, 12} {
		c := twins(pairs, 1, 3).compare()
		for _, w := range c.Rows {
			if w.Verdict != tooFew || w.Interval() != "?" {
				t.Errorf("%d pairs: %+v", pairs, w)
			}
		}
		if c.Pairs != pairs || c.FailedVerdict != tooFew {
			t.Errorf("%+v", c)
		}
	}
}

// Pairs count as pairs: what failed, was cut short or has no partner is left out of times, and failures are compared.
func TestCompareFailures(t *testing.T) {
	r := twins(200, 1, 1)
	for i := range r.samples {
		if s := &r.samples[i]; s.target == 1 && s.pair%2 == 0 {
			s.failure = "status 503"
		}
	}
	r.samples = append(r.samples, sample{target: 0, pair: 1000})
	c := r.compare()
	if c.Pairs != 100 || c.Left != 101 || c.FailedA != 0 || c.FailedB != 0.5 || c.FailedVerdict != "50.0 points more" {
		t.Errorf("%+v", c)
	}
}

func TestStudentT(t *testing.T) {
	for n, want := range map[int]float64{3: 5.841, 5: 4.032, 9: 3.250, 39: 2.708} {
		if got := studentT995(n); math.Abs(got-want) > 0.04*want {
			t.Errorf("%d degrees of freedom: %.3f; want %.3f", n, got, want)
		}
	}
}

func TestQuantile(t *testing.T) {
	var data []datum
	for i := range 100 {
		data = append(data, datum{float64(i + 1), i % 2})
	}
	f := func(want, q float64, times ...int) {
		t.Helper()
		if got := quantile(data, times, q); got != want {
			t.Errorf("%g of %v: %g; want %g", q, times, got, want)
		}
	}
	f(50, 0.5, 1, 1)
	f(99, 0.99, 1, 1)
	f(50.5, -1, 1, 1)
	f(50, 0.5, 0, 1) // 2, 4, … 100
	f(49, 0.5, 3, 0) // 1, 3, … 99
	f(100, 1, 1, 1)  // the largest
	f(0, 0.5, 0, 0)  // of nothing
	if !slices.IsSortedFunc(data, func(a, b datum) int { return int(a.value - b.value) }) {
		t.Error("data were changed")
	}
}
