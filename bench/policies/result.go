package policies

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"kvgate/internal/modelsim"
)

// A Result is what the clients of one run saw, without the warm-up.
type Result struct {
	Policy, Workload string
	Requests         int
	Rate             float64 // requests per second offered
	Attainment       float64 // share within the SLO, 0..1
	Stopped          bool    // the run ended early: attainment is an upper bound and latencies are not complete

	TTFTMean, TTFTP50, TTFTP90, TTFTP99 time.Duration
	TPOTP99, E2EP99                     time.Duration
	SmallP99, LargeP99                  time.Duration // TTFT of prompts up to largePrompt, and of longer ones
	HitRatio                            float64       // prompt tokens found in prefix caches, 0..1
	Preemptions                         uint64
	AdapterHostLoads, AdapterDiskLoads  uint64
	Shares                              []float64 // requests per replica, 0..1
	KVMean, KVMost                      float64   // utilization of KV caches over time, and the highest of any, 0..1

	Groups []Group // by tenant and class, where there are such
}

// A Group is what one tenant's clients saw, or those of one class.
type Group struct {
	Name              string // of the tenant, or the class
	Offered, Refused  int
	Tokens            int64            // of the requests that were served
	TTFT              [4]time.Duration // mean, p50, p90, p99, from the request's arrival
	Served            [4]time.Duration // the same from when it was sent on
	Waited            [4]time.Duration
	OutputTokenSecond float64 // output tokens per second, of all that was served
}

func (s *sim) result() *Result {
	r := &Result{
		Workload: s.fleet.Workload.Name,
		Requests: s.counted,
		Rate:     s.options.Rate,
		Stopped:  s.stop,
		Shares:   make([]float64, len(s.fleet.Engines)),
	}
	if r.Rate == 0 {
		r.Rate = s.fleet.Workload.Rate()
	}
	var ttft, tpot, e2e, small, large []time.Duration
	var sum time.Duration
	for i := s.warm; i < len(s.calls); i++ {
		c := &s.calls[i]
		if c.engine.State != modelsim.StateFinished {
			continue
		}
		ttft = append(ttft, c.ttft())
		if c.In <= largePrompt {
			small = append(small, c.ttft())
		} else {
			large = append(large, c.ttft())
		}
		tpot = append(tpot, c.tpot())
		e2e = append(e2e, c.engine.FinishedAt-c.arrived)
		sum += c.ttft()
		r.Shares[c.Replica]++
		if s.options.Each != nil {
			s.options.Each(Outcome{i, c.ttft(), c.tpot(), c.engine.FinishedAt - c.arrived, c.engine.CachedTokens})
		}
	}
	r.KVMean, r.KVMost = s.kv.sum/float64(max(1, s.kv.n)), s.kv.most
	r.Groups = s.groups()
	r.Attainment = 1 - float64(s.failed)/float64(max(1, s.counted))
	if n := len(ttft); n > 0 {
		r.TTFTMean = sum / time.Duration(n)
		for i := range r.Shares {
			r.Shares[i] /= float64(n)
		}
	}
	r.TTFTP50, r.TTFTP90, r.TTFTP99 = quantile(ttft, .5), quantile(ttft, .9), quantile(ttft, .99)
	r.SmallP99, r.LargeP99 = quantile(small, .99), quantile(large, .99)
	r.TPOTP99, r.E2EP99 = quantile(tpot, .99), quantile(e2e, .99)
	var hits, queries uint64
	for _, e := range s.fleet.Engines {
		st := e.Stats()
		hits += st.PrefixHitTokens
		queries += st.PrefixQueryTokens
		r.Preemptions += st.Preemptions
		r.AdapterHostLoads += st.AdapterHostLoads
		r.AdapterDiskLoads += st.AdapterDiskLoads
	}
	if queries > 0 {
		r.HitRatio = float64(hits) / float64(queries)
	}
	return r
}

// largePrompt is the length, in tokens, from which a prompt holds up others for seconds.
const largePrompt = 32768

// groups sums up by tenant and by class, and over all under the name "all".
func (s *sim) groups() []Group {
	type bag struct {
		g                   Group
		ttft, served, waits []time.Duration
		first, last         time.Duration
	}
	bags := make(map[string]*bag)
	for i := s.warm; i < len(s.calls); i++ {
		c := &s.calls[i]
		if c.Request == nil { // the run was stopped before it came
			break
		}
		for _, name := range []string{"all", c.Tenant, c.Class.String()} {
			if name == "" || c.Foreign {
				continue
			}
			b := bags[name]
			if b == nil {
				b = &bag{g: Group{Name: name}, first: c.arrived}
				bags[name] = b
			}
			b.g.Offered++
			b.last = c.arrived
			if c.engine.State != modelsim.StateFinished {
				b.g.Refused++
				continue
			}
			b.g.Tokens += int64(c.In + c.Out)
			b.g.OutputTokenSecond += float64(c.Out)
			b.ttft = append(b.ttft, c.ttft())
			b.served = append(b.served, c.ttft()-c.waited())
			b.waits = append(b.waits, c.waited())
		}
	}
	var out []Group
	for _, b := range bags {
		sum := func(d []time.Duration) (q [4]time.Duration) {
			for _, v := range d {
				q[0] += v / time.Duration(len(d))
			}
			q[1], q[2], q[3] = quantile(d, .5), quantile(d, .9), quantile(d, .99)
			return q
		}
		b.g.TTFT, b.g.Served, b.g.Waited = sum(b.ttft), sum(b.served), sum(b.waits)
		b.g.OutputTokenSecond /= max(1e-9, (b.last - b.first).Seconds())
		out = append(out, b.g)
	}
	slices.SortFunc(out, func(a, b Group) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// quantile sorts d and returns its q-quantile by nearest rank; 0 of nothing.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

// Capacity is the highest rate, in requests per second, at which attainment is at least want, found by bisection to 1 %
// of the rate. hint is a first guess; 0 starts from the recorded rate. Attainment is taken to fall with the rate.
func Capacity(w *Workload, p Policy, o Options, want, hint float64) (float64, error) {
	ok := func(rate float64) (bool, error) {
		o := o
		o.Rate, o.StopBelow = rate, want
		r, err := Run(w, p, o)
		if err != nil {
			return false, err
		}
		return !r.Stopped && r.Attainment >= want, nil
	}
	rate := hint
	if rate == 0 {
		rate = w.Rate()
	}
	good, err := ok(rate)
	if err != nil {
		return 0, err
	}
	// Bracket by steps that grow, since a hint is usually near.
	lo, hi, step := rate, rate, 1.15
	for tries := 0; good; tries++ {
		lo, hi = hi, hi*step
		if good, err = ok(hi); err != nil {
			return 0, err
		}
		if step = min(step*1.2, 2); tries > 60 {
			return 0, fmt.Errorf("policy %s: %s is met at every rate up to %.0f/s", p.Name, w.Name, hi)
		}
	}
	for tries := 0; lo == hi; tries++ {
		lo /= step
		if good, err = ok(lo); err != nil {
			return 0, err
		}
		if !good {
			hi = lo
		}
		if step = min(step*1.2, 2); tries > 60 {
			return 0, fmt.Errorf("policy %s does not reach %.0f %% on %s at any rate", p.Name, 100*want, w.Name)
		}
	}
	for hi/lo > 1.01 {
		mid := (lo + hi) / 2
		good, err := ok(mid)
		if err != nil {
			return 0, err
		}
		if good {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo, nil
}
