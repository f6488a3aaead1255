package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"kvgate/pool"
)

// anyLoad draws a load in which each field may be unknown.
func anyLoad(r *rand.Rand) pool.Load {
	l := idle()
	l.Running, l.Waiting, l.KVCacheUtilization = r.Int32N(50), r.Int32N(10), r.Float64()
	for _, a := range []string{"a0", "a1", "a2", "a3"} {
		if r.IntN(3) == 0 {
			l.Adapters = append(l.Adapters, a)
		}
	}
	l.Known &^= pool.Fields(r.Uint32())
	return l
}

// candidates prepares what scorers get.
func candidates(t testing.TB, p *Policy, req *Request, s *pool.Snapshot) *Candidates {
	t.Helper()
	sc := new(scratch)
	sc.prepare(p, req, s, second0+1)
	if err := sc.candidates.gather(nil); err != nil && len(s.Rows) > 0 {
		t.Fatal(err)
	}
	return &sc.candidates
}

// TestScorerConformance holds for every registered scorer, so a new one is tested by being registered.
func TestScorerConformance(t *testing.T) {
	for _, e := range scorers {
		t.Run(e.Name, func(t *testing.T) {
			if e.Doc == "" || e.Formula == "" {
				t.Error("doc or formula is missing")
			}
			scorer := e.make()
			p := newPolicy(t, Config{Weights: map[string]float64{e.Name: 1}, Index: NewIndex(1 << 20)})
			r := rand.New(rand.NewPCG(1, 2))
			for round := range 50 {
				s := newTable(t, 1+r.IntN(20), func(int) pool.Load { return anyLoad(r) }).Load()
				for i := range s.Rows {
					if r.IntN(2) == 0 {
						var b pool.Booking
						s.Rows[i].Book(&b, pool.Claim{PendingTokens: r.Int64N(9000), KVTokens: r.Int64N(500_000), Adapter: pool.HashName("a1"), At: 5})
					}
				}
				req := prompt(s, text(round, 2000))
				req.Target = s.TargetString([]string{"m", "a1"}[round%2])
				req.Session = uint64(round % 3)
				p.index.insert(req, &s.Rows[0], blockScale{perByte: 0.25, most: 499})
				c := candidates(t, p, req, s)
				out := make([]float64, c.Len())
				for i := range out {
					out[i] = math.NaN()
				}
				scorer.Score(req, c, out)
				for i, v := range out {
					if !(v >= 0 && v <= 1) {
						t.Fatalf("score %v of %d; want every element in 0..1", v, i)
					}
				}
				// Order does not matter.
				perm := r.Perm(len(out))
				q := *c
				q.index, q.booked, q.cached = make([]int32, len(perm)), make([]pool.Booked, len(perm)), make([]int32, len(perm))
				for i, j := range perm {
					q.index[i], q.booked[i], q.cached[i] = c.index[j], c.booked[j], c.cached[j]
				}
				again := make([]float64, len(out))
				scorer.Score(req, &q, again)
				for i, j := range perm {
					if again[i] != out[j] {
						t.Fatalf("endpoint %d scores %v, and %v in another order", j, out[j], again[i])
					}
				}
				if !raceDetector {
					if n := testing.AllocsPerRun(5, func() { scorer.Score(req, c, out) }); n != 0 {
						t.Fatalf("%v allocations", n)
					}
				}
			}
			scorer.Score(&Request{Target: &pool.Target{}}, &Candidates{p: p, snapshot: &pool.Snapshot{}}, nil) // an empty table

			// What is unknown is not better than what is known to be loaded.
			s := newTable(t, 2, func(i int) pool.Load {
				if i == 0 {
					return pool.Load{}
				}
				l := idle()
				l.Running, l.Waiting, l.KVCacheUtilization = 50, 20, 0.9
				return l
			}).Load()
			c := candidates(t, p, request(s, "m", 100), s)
			out := make([]float64, 2)
			scorer.Score(request(s, "m", 100), c, out)
			if out[0] > out[1] {
				t.Errorf("an unknown endpoint scores %v, a loaded one %v", out[0], out[1])
			}
		})
	}
}

func TestScorerNames(t *testing.T) {
	f := func(given, want string) {
		t.Helper()
		if got, _ := ScorerName(given); got != want {
			t.Errorf("ScorerName(%q) = %q; want %q", given, got, want)
		}
	}
	f("kv_cache", "kv_cache")
	f("kvCache", "kv_cache")
	f("kv-cache-utilization-scorer", "kv_cache")
	f("loraAffinity", "lora_affinity")
	f("lora-affinity-scorer", "lora_affinity")
	f("runningRequests", "running_requests")
	f("predictedLatency", "predicted_latency")
	f("queue-scorer", "queue")
	f("prefix-cache-scorer", "prefix")
	f("session-affinity-scorer", "session")
	f("no-hit-lru-scorer", "lru")
	f("speed", "")
	f("", "")
}

// cost is what auto thinks of row i.
func costs(p *Policy, req *Request, s *pool.Snapshot, now pool.Instant) []float32 {
	out := make([]float32, len(s.Rows))
	for i, e := range p.Explain(req, s, now).Endpoints {
		out[i] = e.Cost
	}
	return out
}

func TestMoreLoadIsNeverPreferred(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 300 {
		s := newTable(t, 2, func(int) pool.Load { return anyLoad(r) }).Load()
		p := newPolicy(t, Config{})
		req := request(s, []string{"m", "a1"}[r.IntN(2)], 1+r.Int32N(50_000))
		before := costs(p, req, s, second0+1)
		var b pool.Booking
		s.Rows[0].Book(&b, pool.Claim{PendingTokens: r.Int64N(100_000), KVTokens: r.Int64N(400_000)})
		after := costs(p, req, s, second0+1)
		if after[0] < before[0] || after[1] != before[1] {
			t.Fatalf("costs %v became %v by a booking on the first", before, after)
		}
		b.FirstToken() // less is pending
		if again := costs(p, req, s, second0+1); again[0] > after[0] {
			t.Fatalf("costs %v became %v by a first token on the first", after, again)
		}
		b.End()
	}
	// More KV in use by others, all else equal.
	last := float32(-1)
	for kv := 0.0; kv <= 1; kv += 0.05 {
		s := newTable(t, 1, func(int) pool.Load { l := idle(); l.Running, l.KVCacheUtilization = 5, kv; return l }).Load()
		c := costs(newPolicy(t, Config{}), request(s, "m", 1000), s, second0+1)[0]
		if c < last {
			t.Fatalf("cost %v at KV use %.2f is less than %v at less use", c, kv, last)
		}
		last = c
	}
}

func TestOrderOfRowsDoesNotMatter(t *testing.T) {
	// The same loads in two orders of rows: the same endpoints are chosen, apart from ties.
	loads := make([]pool.Load, 8)
	for i := range loads {
		loads[i] = idle()
		loads[i].Running, loads[i].KVCacheUtilization = int32(i+1), float64(i+1)/20
	}
	for _, c := range []Config{{}, {Name: "least_requests"}, {Weights: map[string]float64{"kv_cache": 1, "running_requests": 1}}} {
		for shift := range 8 {
			s := newTable(t, 8, func(i int) pool.Load { return loads[(i+shift)%8] }).Load()
			p := newPolicy(t, c)
			var b pool.Booking
			if got := choose(t, p, request(s, "m", 100), s, &b); (got+shift)%8 != 0 {
				t.Errorf("%s, rows shifted by %d: chose load %d; want the least, 0", p.Name(), shift, (got+shift)%8)
			}
		}
	}
}

func TestRoundRobinDoesNotFavourTheNeighbourOfAFilteredEndpoint(t *testing.T) {
	s := newTable(t, 4, nil).Load()
	s.Rows[1].Endpoint.SetEjectedUntil(second0 + aSecond)
	p := newPolicy(t, Config{Name: "round_robin"})
	counts := make([]int, 4)
	var b pool.Booking
	for range 300 {
		counts[choose(t, p, request(s, "m", 1), s, &b)]++
		b.End()
	}
	if counts[0] != 100 || counts[2] != 100 || counts[3] != 100 {
		t.Errorf("shares %v; want 100 for each that is healthy", counts)
	}
}

func TestConsistentHashStaysAndIsBounded(t *testing.T) {
	s := newTable(t, 8, nil).Load()
	p := newPolicy(t, Config{Name: "consistent_hash"})
	var b pool.Booking
	for session := uint64(1); session < 100; session++ {
		req := request(s, "m", 10)
		req.Session = session
		first := choose(t, p, req, s, &b)
		b.End()
		if got := choose(t, p, req, s, &b); got != first {
			t.Fatalf("session %d moved", session)
		}
		b.End()
	}
	req := request(s, "m", 10)
	req.Session = 1
	bookings := make([]pool.Booking, 80)
	for i := range bookings {
		choose(t, p, req, s, &bookings[i])
	}
	for i := range s.Rows {
		if n := s.Rows[i].Booked().Requests; n > 13 { // ⌈1.25 · 10⌉
			t.Errorf("endpoint %d holds %d of 80; want at most 13", i, n)
		}
	}
}

func TestSessionSurvivesItsEndpoint(t *testing.T) {
	s := newTable(t, 4, nil).Load()
	p := newPolicy(t, Config{Weights: map[string]float64{"session": 10, "queue": 1}})
	var b pool.Booking
	for session := uint64(1); session < 50; session++ {
		req := request(s, "m", 10)
		req.Session = session
		first := choose(t, p, req, s, &b)
		b.End()
		s.Rows[first].Endpoint.SetEjectedUntil(second0 + aSecond)
		second := choose(t, p, req, s, &b)
		b.End()
		if second == first {
			t.Fatal("it went to an ejected endpoint")
		}
		s.Rows[first].Endpoint.SetEjectedUntil(0)
		if got := choose(t, p, req, s, &b); got != second {
			t.Fatalf("session %d went back to %d; its cache is on %d by now", session, got, second)
		}
		b.End()
	}
}

func TestStaleRanksBelowFreshAndIsNotLost(t *testing.T) {
	for _, c := range []Config{{}, {Name: "least_requests"}, {Weights: map[string]float64{"queue": 1, "kv_cache": 1, "running_requests": 1}}} {
		tab := newTable(t, 2, nil)
		now := second0 + 60*aSecond
		l := idle()
		l.Running, l.KVCacheUtilization = 3, 0.1
		scrape(tab, tab.Load().Rows[1].Endpoint, l, now)
		s := tab.Load()
		p := newPolicy(t, c)
		var b pool.Booking
		d, err := p.Choose(request(s, "m", 100), s, now, &b)
		if err != nil || s.RowOf(d.Endpoint.Slot) != 1 || d.Stale {
			t.Errorf("%s: chose the stale endpoint (%v) before a fresh one with three requests", p.Name(), err)
		}
		b.End()
		// Not for ever, though: a fresh peer that drowns is worse.
		var load [40]pool.Booking
		for i := range load {
			s.Rows[1].Book(&load[i], pool.Claim{PendingTokens: 5000, KVTokens: 10_000})
		}
		if d, _ = p.Choose(request(s, "m", 100), s, now, &b); s.RowOf(d.Endpoint.Slot) != 0 || !d.Stale {
			t.Errorf("%s: a stale endpoint gets nothing while its peer has 40 requests", p.Name())
		}
		b.End()
		// All stale: bookings decide.
		if d, _ = p.Choose(request(s, "m", 100), s, now+60*aSecond, &b); s.RowOf(d.Endpoint.Slot) != 0 {
			t.Errorf("%s: all stale: bookings were not heeded", p.Name())
		}
	}
}

func TestUnknownKVCapacityIsLearned(t *testing.T) {
	s := newTable(t, 1, func(int) pool.Load {
		l := idle()
		l.Known &^= pool.KnowsKVCapacity
		l.KVCapacityTokens, l.KVCacheUtilization = 0, 0.5
		return l
	}).Load()
	r := &s.Rows[0]
	if used, capacity, known := kvUse(r, 0, true); !known || used <= 0 || math.IsInf(capacity, 0) || capacity <= 0 {
		t.Errorf("used %v of %v, known %v; want half of something", used, capacity, known)
	}
	p := newPolicy(t, Config{})
	var load, b pool.Booking
	r.Book(&load, pool.Claim{KVTokens: 50_000})
	for range 300 {
		d, err := p.Choose(request(s, "m", 10), s, second0+1, &b)
		if err != nil {
			t.Fatal(err)
		}
		p.End(&d, Usage{PromptTokens: 10, CachedTokens: -1, OutputTokens: 10})
		b.End()
	}
	if _, learned := r.Learned(); learned < 90_000 || learned > 110_000 {
		t.Errorf("learned a capacity of %v from 50,000 booked tokens at half; want about 100,000", learned)
	}
}

func TestSlowStart(t *testing.T) {
	s := newTable(t, 2, func(int) pool.Load { l := idle(); l.Running = 2; return l }).Load()
	p := newPolicy(t, Config{})
	s.Rows[0].Endpoint.Readmit(second0)
	now := costs(p, request(s, "m", 100), s, second0+1)
	half := costs(p, request(s, "m", 100), s, second0+5*aSecond)
	end := costs(p, request(s, "m", 100), s, second0+10*aSecond)
	if !(now[0] > half[0] && half[0] > end[0]) || end[0] != end[1] {
		t.Errorf("costs after recovery %v, %v, %v; want a handicap that falls to nothing", now, half, end)
	}
}

func TestRatesTellFastFromSlowAndEqualFromNoise(t *testing.T) {
	s := newTable(t, 4, nil).Load()
	p := newPolicy(t, Config{})
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 4000 {
		var b pool.Booking
		row := &s.Rows[i%4]
		d := Decision{Endpoint: row.Endpoint, Row: row, Claim: pool.Claim{PendingTokens: 1000 + r.Int64N(8000)}}
		rate := 45_000.0 * (0.8 + 0.4*r.Float64())
		if i%4 == 3 {
			rate /= 3
		}
		row.Book(&b, d.Claim)
		p.FirstToken(&d, time.Duration((baseSeconds+float64(d.Claim.PendingTokens)/rate)*1e9))
		b.End()
	}
	for i := range 4 {
		slowness, _ := s.Rows[i].Learned()
		if i < 3 && slowness != 1 || i == 3 && (slowness < 2 || slowness > 4) {
			t.Errorf("endpoint %d: slowness %v; want 1 for the equal ones, about 3 for the last", i, slowness)
		}
	}
}

func TestLearnedBytesPerTokenAndOutput(t *testing.T) {
	s := newTable(t, 1, nil).Load()
	p := newPolicy(t, Config{})
	var b pool.Booking
	req := &Request{Target: s.TargetString("m"), PromptBytes: 9000}
	for range 600 {
		d, err := p.Choose(req, s, second0+1, &b)
		if err != nil {
			t.Fatal(err)
		}
		p.End(&d, Usage{PromptTokens: 3000, CachedTokens: -1, OutputTokens: 40})
		b.End()
	}
	d, _ := p.Choose(req, s, second0+1, &b)
	if d.PromptTokens < 2900 || d.PromptTokens > 3100 || d.OutputTokens < 38 || d.OutputTokens > 50 {
		t.Errorf("expects %d prompt and %d output tokens; want about 3,000 and 40", d.PromptTokens, d.OutputTokens)
	}
	b.End()
	req.MaxTokens, req.N = 10, 3
	if d, _ = p.Choose(req, s, second0+1, &b); d.OutputTokens != 30 {
		t.Errorf("expects %d output tokens of three answers of at most 10; want 30", d.OutputTokens)
	}
	// Names without end take no memory.
	for i := range 100_000 {
		p.learn.adopt(pool.HashName(fmt.Sprint("model", i)))
	}
}

func TestExplainIsChoose(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	everyPolicy(t, func(t *testing.T, c Config) {
		if c.Name == "round_robin" || c.Name == "random" || c.Name == "power_of_two" {
			t.Skip("the next choice is another one")
		}
		for round := range 40 {
			s := newTable(t, 6, func(int) pool.Load { return anyLoad(r) }).Load()
			c.Rand = func(uint64) uint64 { return 0 }
			c.Index = NewIndex(1 << 20)
			p := newPolicy(t, c)
			req := prompt(s, text(round, 3000))
			p.index.insert(req, &s.Rows[2], blockScale{perByte: 0.25, most: 749})
			req.Target = s.TargetString([]string{"m", "a1"}[round%2])
			// Half of the endpoints have done something, so that every way through the costs is taken.
			held := make([]pool.Booking, len(s.Rows))
			for i := range s.Rows {
				row := &s.Rows[i]
				switch r.IntN(8) {
				case 0, 1:
					row.Book(&held[i], pool.Claim{PendingTokens: r.Int64N(9000), KVTokens: r.Int64N(500_000), At: 5})
				case 2:
					row.Endpoint.SetLearned(1+r.Float32(), 300_000)
				case 3:
					row.Endpoint.Readmit(second0 - pool.Instant(r.Int64N(2e10)))
				case 4:
					row.Endpoint.SetBusyUntil(second0 + 2)
				}
			}
			before := s.Rows[0].Booked()
			e := p.Explain(req, s, second0+1)
			if s.Rows[0].Booked() != before {
				t.Fatal("Explain booked")
			}
			var b pool.Booking
			d, err := p.Choose(req, s, second0+1, &b)
			if err != nil || d.Endpoint.ID != e.Chosen {
				t.Fatalf("Explain chose %s, Choose %s (%v)\n%s", e.Chosen, d.Endpoint.ID, err, e)
			}
			for _, x := range e.Endpoints {
				if x.Terms == nil {
					continue
				}
				if sum := x.Terms.Sum(); math.Abs(float64(sum-x.Cost)) > 0.001*float64(x.Cost)+16 { // beside a tier, costs are 8 apart
					t.Fatalf("%s: terms add up to %v; cost is %v\n%s", x.ID, sum, x.Cost, e)
				}
				if x.Chosen && math.Abs(float64(x.Cost-d.Cost)) > 1e-5*float64(x.Cost) {
					t.Fatalf("chosen at cost %v; explained as %v", d.Cost, x.Cost)
				}
			}
			b.End()
		}
	})
}
