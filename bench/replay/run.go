package replay

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/bench/policies"
	"kvgate/internal/modelsim"
	"kvgate/scoring"
)

// Options say what is simulated.
type Options struct {
	Policies []string // see [Policy]; none: the recorded one
	Replicas []int    // none: as many as there were
	Server   modelsim.Profile
	Speed    float64 // of the traffic, against the recorded one; default 1
	// AdapterSlots is how many adapters fit into a batch, and HostAdapters how many stay in a server's memory besides; 0: as
	// recorded, and enough.
	AdapterSlots, HostAdapters int
	SLOTTFT, SLOTPOT           time.Duration // see policies.Options
	ScrapeEvery                time.Duration // default 1 s
	Seed                       uint64
	// Recorded is how many endpoints there were, where the recording doesn't say.
	Recorded int
	// Progress is told what is being done. May be nil.
	Progress func(string)
}

// A Run is one policy on one fleet.
type Run struct {
	Policy   string
	Replicas int
	*policies.Result
}

// A Replay simulates a recording.
type Replay struct {
	r       *Recording
	w       *policies.Workload // without what does not fit
	indices []int              // in r, of w.Requests
	o       Options
	TooLong int // requests that fit into no server

	asRecorded *Run // what Compare simulated last
}

// New returns a Replay, which fails if the recording says too little and the options don't say it either.
func New(r *Recording, o Options) (*Replay, error) {
	o.Speed = cmp.Or(o.Speed, 1)
	o.ScrapeEvery = cmp.Or(o.ScrapeEvery, time.Second)
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	o.Recorded = cmp.Or(o.Recorded, r.Fleet.Endpoints)
	if len(o.Replicas) == 0 {
		if o.Recorded == 0 {
			return nil, fmt.Errorf("%s doesn't say how many endpoints there were; want --replicas", r.Name)
		}
		o.Replicas = []int{o.Recorded}
	}
	if len(o.Policies) == 0 {
		o.Policies = []string{cmp.Or(r.Fleet.Policy, "auto")}
	}
	for _, name := range o.Policies {
		if _, err := Policy(name); err != nil {
			return nil, err
		}
	}
	p := &Replay{r: r, o: o}
	w := *r.Workload
	w.Requests = nil
	if w.Adapters > 0 {
		w.MaxLoras = cmp.Or(o.AdapterSlots, r.Fleet.AdapterSlots, 4)
		w.MaxCPULoras = max(cmp.Or(o.HostAdapters, 32), w.MaxLoras)
	}
	for i, q := range r.Workload.Requests {
		if q.In+q.Out+2*max(w.BlockTokens, 16) > o.Server.KVTokens {
			p.TooLong++
			continue
		}
		p.indices = append(p.indices, i)
		w.Requests = append(w.Requests, q)
	}
	if len(w.Requests) < 2 || w.Requests[len(w.Requests)-1].At <= w.Requests[0].At {
		return nil, fmt.Errorf("%s: %d of %d requests fit into the KV cache of %d tokens; want a larger one: --kv-tokens", r.Name, len(w.Requests), len(r.Workload.Requests), o.Server.KVTokens)
	}
	p.w = &w
	return p, nil
}

// Replicas are the sizes of fleets that are compared, and Policies the policies.
func (p *Replay) Replicas() []int { return p.o.Replicas }

// Policies are the policies that are compared.
func (p *Replay) Policies() []string { return p.o.Policies }

// PolicyNames are the names that [Policy] knows, without weights.
func PolicyNames() []string {
	var out []string
	for _, n := range scoring.PolicyNames() {
		if n != "weighted" {
			out = append(out, n)
		}
	}
	for _, r := range policies.Rivals {
		if !slices.Contains(out, r.Name) {
			out = append(out, r.Name)
		}
	}
	return out
}

// Policy returns the policy of that name: one of kvgate's own, its weights such as queue=2+prefix=3, or a rival of
// kvgate bench policies.
func Policy(name string) (policies.Policy, error) {
	if strings.Contains(name, "=") {
		weights := map[string]float64{}
		for part := range strings.SplitSeq(name, "+") {
			scorer, text, _ := strings.Cut(part, "=")
			n, ok := scoring.ScorerName(scorer)
			v, err := strconv.ParseFloat(text, 64)
			if !ok || err != nil || !(v > 0) || math.IsInf(v, 0) {
				return policies.Policy{}, fmt.Errorf("policy %q: %q is not a scorer and its weight; want such as queue=2+prefix=3; kvgate scorers lists them", name, part)
			}
			weights[n] = v
		}
		return policies.Product(name, "", func() scoring.Config { return scoring.Config{Weights: weights} }), nil
	}
	if slices.Contains(scoring.PolicyNames(), name) && name != "weighted" {
		return policies.Product(name, "", func() scoring.Config { return scoring.Config{Name: name} }), nil
	}
	for _, r := range policies.Rivals {
		if r.Name == name {
			return r, nil
		}
	}
	return policies.Policy{}, fmt.Errorf("policy %q is unknown; want one of %s, or weights such as queue=2+prefix=3", name, strings.Join(PolicyNames(), ", "))
}

// options of a run on n replicas.
func (p *Replay) options(n int) policies.Options {
	return policies.Options{
		Servers: []modelsim.Profile{p.o.Server}, Replicas: n, Rate: p.w.Rate() * p.o.Speed, ScrapeEvery: p.o.ScrapeEvery, Seed: p.o.Seed + 1,
		SLOTTFT: p.o.SLOTTFT, SLOTPOT: p.o.SLOTPOT,
	}
}

func (p *Replay) run(name string, o policies.Options) (*Run, error) {
	pol, err := Policy(name)
	if err != nil {
		return nil, err
	}
	p.o.Progress(fmt.Sprintf("%s on %d", name, o.Replicas))
	r, err := policies.Run(p.w, pol, o)
	if err != nil {
		return nil, err
	}
	return &Run{name, o.Replicas, r}, nil
}

// Runs simulates every policy on every fleet.
func (p *Replay) Runs(ctx context.Context) (out []*Run, err error) {
	for _, name := range p.o.Policies {
		for _, n := range p.o.Replicas {
			if err := ctx.Err(); err != nil {
				return out, err
			}
			if r := p.asRecorded; r != nil && r.Policy == name && r.Replicas == n && p.o.Speed == 1 {
				out = append(out, r)
				continue
			}
			r, err := p.run(name, p.options(n))
			if err != nil {
				return out, err
			}
			out = append(out, r)
		}
	}
	return out, nil
}

// maxFleet bounds the search for a fleet.
const maxFleet = 1024

// A Capacity is the smallest fleet on which a policy holds the SLO.
type Capacity struct {
	Policy   string
	Replicas int  // 0: no fleet of up to 1024 does
	Run      *Run // on it
	// Below is how many of the requests, 0..1, are within the SLO at most with one endpoint less; 0: there is no smaller fleet.
	Below float64
}

// FindCapacity looks for the smallest fleet with which want of the requests, 0..1, are within the SLO. More endpoints are taken
// to serve no worse.
func (p *Replay) FindCapacity(ctx context.Context, policy string, want float64) (*Capacity, error) {
	c := &Capacity{Policy: policy}
	share := map[int]float64{}
	holds := func(n int) (bool, error) {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		o := p.options(n)
		o.StopBelow = want
		r, err := p.run(policy, o)
		if err != nil {
			return false, err
		}
		share[n] = r.Attainment
		return !r.Stopped && r.Attainment >= want, nil
	}
	low, high := 0, p.o.Replicas[0]
	for {
		ok, err := holds(high)
		if err != nil {
			return nil, err
		}
		if ok {
			break
		}
		if low = high; low >= maxFleet {
			return c, nil
		}
		high = min(maxFleet, max(high+1, high*3/2))
	}
	for high-low > 1 {
		mid := (low + high) / 2
		ok, err := holds(mid)
		if err != nil {
			return nil, err
		}
		if ok {
			high = mid
		} else {
			low = mid
		}
	}
	c.Replicas, c.Below = high, share[high-1]
	if high > 1 {
		r, err := p.run(policy, p.options(high-1))
		if err != nil {
			return nil, err
		}
		c.Below = r.Attainment
	}
	var err error
	c.Run, err = p.run(policy, p.options(high))
	return c, err
}

// A Seen is what clients saw, over the requests of which it is known.
type Seen struct {
	Requests                            int // with a time to the first token
	TTFTMean, TTFTP50, TTFTP90, TTFTP99 time.Duration
	TPOTP50, TPOTP99                    time.Duration
	E2EP50, E2EP99                      time.Duration
	HitRatio                            float64 // -1: unknown

	// What calibration goes by: what little else was going on when the luckiest tenth of the requests were served.
	prefillRate float64       // new prompt tokens per second until the first token, the 90th percentile; 0: unknown
	tokenTime   time.Duration // the 10th percentile; 0: unknown
}

// minNewTokens is how many new prompt tokens it takes for their time to be more than that of a step.
const minNewTokens = 512

type bag struct {
	ttft, tpot, e2e []time.Duration
	rate            []float64
}

func (b *bag) seen() Seen {
	s := Seen{Requests: len(b.ttft), HitRatio: -1}
	for _, d := range b.ttft {
		s.TTFTMean += d / time.Duration(len(b.ttft))
	}
	s.TTFTP50, s.TTFTP90, s.TTFTP99 = quantile(b.ttft, .5), quantile(b.ttft, .9), quantile(b.ttft, .99)
	s.TPOTP50, s.TPOTP99 = quantile(b.tpot, .5), quantile(b.tpot, .99)
	s.E2EP50, s.E2EP99 = quantile(b.e2e, .5), quantile(b.e2e, .99)
	s.prefillRate, s.tokenTime = quantile(b.rate, .9), quantile(b.tpot, .1)
	return s
}

// quantile sorts v and returns its q-quantile by nearest rank; 0 of nothing.
func quantile[T cmp.Ordered](v []T, q float64) (zero T) {
	if len(v) == 0 {
		return zero
	}
	slices.Sort(v)
	return v[min(len(v)-1, int(q*float64(len(v))))]
}

// add takes in a request of which measured says what is known. fresh are the tokens of its prompt that were computed.
func (b *bag) add(measured *Measured, ttft, tpot, e2e time.Duration, fresh int64) {
	if measured.Failed {
		return
	}
	if measured.TTFT > 0 {
		b.ttft = append(b.ttft, ttft)
		if fresh >= minNewTokens {
			b.rate = append(b.rate, float64(fresh)/ttft.Seconds())
		}
	}
	if measured.TPOT > 0 {
		b.tpot = append(b.tpot, tpot)
	}
	if measured.E2E > 0 {
		b.e2e = append(b.e2e, e2e)
	}
}

// A Comparison is what was measured beside what is simulated of the same requests, policy and fleet.
type Comparison struct {
	Policy              string
	Replicas            int
	Measured, Simulated Seen
}

// Compare simulates what was recorded as it was. It returns nil where it is not known what served it, or how.
func (p *Replay) Compare() (*Comparison, error) {
	policy := cmp.Or(p.r.Fleet.Policy, "auto")
	if _, err := Policy(policy); err != nil || p.o.Recorded == 0 || p.r.Measured == nil {
		return nil, nil
	}
	c := &Comparison{Policy: policy, Replicas: p.o.Recorded}
	o := p.options(p.o.Recorded)
	o.Rate = p.w.Rate() // whatever speed is asked for
	var measured, simulated bag
	var in, cached int64
	o.Each = func(s policies.Outcome) {
		m := &p.r.Measured[p.indices[s.Index]]
		was, is := m.In, m.In // all of the prompt, where it isn't known what of it was new
		if m.Cached >= 0 {
			was, is = m.In-m.Cached, int64(p.w.Requests[s.Index].In-s.Cached)
		}
		measured.add(m, m.TTFT, m.TPOT, m.E2E, was)
		simulated.add(m, s.TTFT, s.TPOT, s.E2E, is)
		if m.Cached >= 0 {
			in += m.In
			cached += m.Cached
		}
	}
	r, err := p.run(policy, o)
	if err != nil {
		return nil, err
	}
	p.asRecorded = r
	c.Measured, c.Simulated = measured.seen(), simulated.seen()
	if in > 0 {
		c.Measured.HitRatio = float64(cached) / float64(in)
	}
	c.Simulated.HitRatio = r.HitRatio
	if c.Measured.Requests == 0 && len(measured.e2e) == 0 {
		return nil, nil
	}
	return c, nil
}

// Off is by what factor the simulation is off in the time to the first token, 1 or more: the worst of mean and median. It is 0
// where nothing is known of it.
func (c *Comparison) Off() float64 {
	worst := 0.0
	for _, v := range [][2]time.Duration{{c.Measured.TTFTMean, c.Simulated.TTFTMean}, {c.Measured.TTFTP50, c.Simulated.TTFTP50}} {
		if v[0] > 0 && v[1] > 0 {
			f := v[1].Seconds() / v[0].Seconds()
			worst = max(worst, f, 1/f)
		}
	}
	return worst
}

// A Calibration says how much slower than their profile the servers are, from what was recorded: 1 is as fast.
type Calibration struct {
	Prefill float64 `json:"prefill"`
	Decode  float64 `json:"decode"`
}

const (
	calibrations        = 8      // rounds
	calibrationRequests = 20_000 // the first ones, that a round simulates: more would take minutes and tell no more
)

// Calibrate finds the factors by which servers differ from their profile, by those requests that were served while little else
// went on: with them, simulating what was recorded on what served it gives them the measured tokens per second of new prompt,
// and the measured time per output token. It changes the servers that are simulated from then on.
func (p *Replay) Calibrate() (Calibration, error) {
	base := p.o.Server
	p.o.Progress("what was recorded, to calibrate")
	some, w := *p, *p.w
	w.Requests = w.Requests[:min(len(w.Requests), calibrationRequests)]
	some.w, some.o.Progress = &w, func(string) {}
	c := Calibration{1, 1}
	best, least := c, math.Inf(1)
	for range calibrations {
		some.o.Server = base.Scaled(c.Prefill, c.Decode)
		seen, err := some.Compare()
		if err != nil {
			return c, err
		}
		if seen == nil || min(seen.Measured.prefillRate, seen.Simulated.prefillRate) == 0 || seen.Measured.tokenTime == 0 {
			return c, fmt.Errorf("%s tells too little to calibrate servers with: it takes streamed requests whose tokens are known, some with %d new prompt tokens or more, and how many endpoints there were (--recorded-replicas)", p.r.Name, minNewTokens)
		}
		prefill := seen.Simulated.prefillRate / seen.Measured.prefillRate
		decode := seen.Measured.tokenTime.Seconds() / seen.Simulated.tokenTime.Seconds()
		if off := math.Abs(math.Log(prefill)) + math.Abs(math.Log(decode)); off < least {
			best, least = c, off
		}
		c.Prefill = min(50, max(0.005, c.Prefill*prefill))
		c.Decode = min(50, max(0.005, c.Decode*decode))
	}
	p.o.Server, p.asRecorded = base.Scaled(best.Prefill, best.Decode), nil
	return best, nil
}

// Server is the profile that is simulated.
func (p *Replay) Server() *modelsim.Profile { return &p.o.Server }
