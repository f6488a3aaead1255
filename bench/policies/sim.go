package policies

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"kvgate/internal/modelsim"
)

// A Router sends each request to a replica and hears what a streaming proxy hears of it.
type Router interface {
	// Route returns the replica for q.
	Route(q *Call, now time.Duration) int
	// FirstToken and Done are called for requests that this router sent.
	FirstToken(q *Call, now time.Duration)
	Done(q *Call, now time.Duration)
	// Scrape is called with what replica's metrics page says, at the pace of Options.ScrapeEvery.
	Scrape(replica int, l Page, now time.Duration)
}

// A Page is what a scrape of a simulated engine shows.
type Page struct {
	Running, Waiting   int
	KVCacheUtilization float64
	KVTokens           int
	AdaptersRunning    []int32
	AdaptersInFlight   []int32 // running or waiting
	MaxLoras           int
	Stats              modelsim.Stats
	StartTime          float64 // of the process, in seconds; a restart changes it
}

// A Call is a request under way.
type Call struct {
	*Request
	Index   int
	Replica int
	Gateway int
	Foreign bool // sent by someone else, whom the policy under test doesn't see
	Refused bool // by the router
	arrived time.Duration
	engine  modelsim.Request
	state   any // the router's own
}

// Fleet is what the routers of a run stand in front of.
type Fleet struct {
	Engines  []*modelsim.Engine
	Workload *Workload
	Rand     *rand.Rand
	Options  Options
	Up       []bool // replicas that discovery names now

	// What a [Waiter] does with a request that it had wait.
	send   func(q *Call, replica int, now time.Duration)
	refuse func(q *Call)
}

// Held is what Route returns of a request that waits, or has waited and is on its way already.
const Held = -2

// A Waiter is a Router that has requests wait.
type Waiter interface {
	Router
	// Pump is called after everything that may have made room.
	Pump(now time.Duration)
	Waiting() int
}

// A Member is a [Router] that wants to know when Fleet.Up has changed.
type Member interface{ Changed(now time.Duration) error }

// Options describe a run.
type Options struct {
	Profiles    []string           // one per replica; one name is repeated for Replicas
	Servers     []modelsim.Profile // in place of Profiles: servers that have no name
	Replicas    int                // default 8
	Gateways    int                // default 1; requests go to one at random
	Rate        float64            // requests per second; 0 keeps the recorded one
	ScrapeEvery time.Duration
	Seed        uint64
	WarmUp      float64 // share of requests at the start that don't count; default 0.1
	// ForeignShare is the part of requests that least-requests routing elsewhere sends, unseen by the policy under test.
	ForeignShare float64
	// NotStreamed hides first tokens from the routers.
	NotStreamed bool
	// EstimateError scales every token estimate that the product's router sees by a factor drawn from 1±EstimateError.
	EstimateError float64
	// MaxBatchTokens overrides the profile's.
	MaxBatchTokens int
	// At these shares of the run, when positive: replica 0 leaves (it ends what it has), replica 1 is started anew with
	// empty caches while its requests go on, and the last replica joins.
	Leave, Restart, Join float64
	// StopBelow ends the run as soon as SLO attainment can no longer reach it. 0 runs to the end.
	StopBelow float64
	// SLOTTFT and SLOTPOT are the bounds of the SLO where others are wanted than those every study uses.
	SLOTTFT, SLOTPOT time.Duration
	// Each is called at the end for every request that counts and was served. May be nil.
	Each func(o Outcome)
}

// An Outcome is what the client of one request saw.
type Outcome struct {
	Index           int // in Workload.Requests
	TTFT, TPOT, E2E time.Duration
	Cached          int // prompt tokens found in the prefix cache
}

func (o Options) withDefaults() Options {
	if o.Replicas == 0 {
		o.Replicas = 8
	}
	if len(o.Profiles) == 0 {
		o.Profiles = []string{modelsim.DefaultProfile}
	}
	if o.Gateways == 0 {
		o.Gateways = 1
	}
	if o.ScrapeEvery == 0 {
		o.ScrapeEvery = 50 * time.Millisecond
	}
	if o.WarmUp == 0 {
		o.WarmUp = 0.1
	}
	if o.SLOTPOT == 0 {
		o.SLOTPOT = sloTPOT
	}
	return o
}

// server is the profile of replica i.
func (o *Options) server(i int) (modelsim.Profile, error) {
	if len(o.Servers) > 0 {
		return o.Servers[i%len(o.Servers)], nil
	}
	return modelsim.ProfileByName(o.Profiles[i%len(o.Profiles)])
}

// A Policy makes routers: one per gateway.
type Policy struct {
	Name, Doc string
	New       func(f *Fleet) (Router, error)
	// shared policies have perfect or common knowledge: one router serves all gateways.
	shared bool
}

// Run replays w under p and returns what its clients saw.
func Run(w *Workload, p Policy, o Options) (*Result, error) {
	o = o.withDefaults()
	rnd := rand.New(rand.NewPCG(o.Seed, 0x73696d))
	f := &Fleet{Workload: w, Rand: rnd, Options: o, Up: slices.Repeat([]bool{true}, o.Replicas)}
	f.Up[o.Replicas-1] = o.Join == 0
	s := &sim{fleet: f, options: o, calls: make([]Call, len(w.Requests))}
	f.send = s.send
	f.refuse = func(q *Call) {
		q.Refused = true
		s.ended(q, false)
	}
	for i := range o.Replicas {
		prof, err := o.server(i)
		if err != nil {
			return nil, err
		}
		e, err := modelsim.NewEngine(modelsim.EngineOptions{
			Profile:           prof,
			MaxBatchTokens:    o.MaxBatchTokens,
			PromptBlockTokens: w.BlockTokens,
			MaxLoras:          w.MaxLoras,
			MaxCPULoras:       w.MaxCPULoras,
			AdapterHostLoad:   adapterHostLoad,
			AdapterDiskLoad:   adapterDiskLoad,
			Hooks: modelsim.Hooks{
				FirstToken: func(r *modelsim.Request, at time.Duration) { s.firstToken(&s.calls[r.ID], at) },
				Finished:   func(r *modelsim.Request, at time.Duration) { s.finished(&s.calls[r.ID], at) },
			},
		})
		if err != nil {
			return nil, err
		}
		f.Engines = append(f.Engines, e)
	}
	for range o.Gateways {
		if p.shared && len(s.routers) > 0 {
			s.routers = append(s.routers, s.routers[0])
			continue
		}
		r, err := p.New(f)
		if err != nil {
			return nil, fmt.Errorf("policy %s: %w", p.Name, err)
		}
		s.routers = append(s.routers, r)
	}
	return s.run()
}

type sim struct {
	fleet    *Fleet
	options  Options
	routers  []Router
	calls    []Call
	foreign  []int // in flight of others, by replica
	next     []time.Duration
	slo      []time.Duration // TTFT bound of each request
	starts   []float64       // of each replica's process
	counted  int             // requests that count
	failed   int             // of them, beyond the SLO
	finish   int
	warm     int
	stop     bool
	maxFails int
	kv       struct { // utilization of the KV caches, by scrapes
		sum, most float64
		n         int
	}
	err error
}

// SLO: time to first token below max(2 s, 3 times the request's own unloaded, uncached prefill), and time per output
// token below 100 ms.
const (
	sloTTFT     = 2 * time.Second
	sloPrefills = 3
	sloTPOT     = 100 * time.Millisecond

	adapterHostLoad = 30 * time.Millisecond
	adapterDiskLoad = 500 * time.Millisecond

	simEpoch      = time.Second // virtual time starts here: a zero instant means "never"
	maxVirtualRun = 1000 * time.Hour
)

func (s *sim) run() (*Result, error) {
	w, o, rnd := s.fleet.Workload, s.options, s.fleet.Rand
	n := len(s.fleet.Engines)
	s.foreign = make([]int, n)
	s.next = make([]time.Duration, n)
	s.slo = make([]time.Duration, len(w.Requests))
	s.warm = int(o.WarmUp * float64(len(w.Requests)))
	s.counted = len(w.Requests) - s.warm
	s.maxFails = int((1 - o.StopBelow) * float64(s.counted))
	scale := 1.0
	if o.Rate > 0 {
		scale = w.Rate() / o.Rate
	}
	// Each gateway scrapes each replica at its own phase.
	scrapes := make([]time.Duration, o.Gateways*n)
	for i := range scrapes {
		scrapes[i] = simEpoch + time.Duration(rnd.Int64N(int64(o.ScrapeEvery)))
	}
	s.starts = slices.Repeat([]float64{1}, n)
	turn := func(share float64) int { // the request before which it happens; 0 is never
		return int(share * float64(len(w.Requests)))
	}
	arrive := func(i int) time.Duration {
		return simEpoch + time.Duration(float64(w.Requests[i].At)*scale)
	}
	for i := range n {
		s.next[i] = math.MaxInt64
	}
	for i := 0; s.finish < len(w.Requests) && !s.stop; {
		at, replica := slices.Min(s.next), -1
		for j, t := range s.next {
			if t == at {
				replica = j
			}
		}
		kind := 0
		if i < len(w.Requests) {
			if t := arrive(i); t <= at {
				at, kind = t, 1
			}
		} else if at == math.MaxInt64 && s.waiting() == 0 {
			return nil, fmt.Errorf("workload %s: %d of %d requests never end", w.Name, len(w.Requests)-s.finish, len(w.Requests))
		}
		scrape := slices.Min(scrapes)
		if scrape < at {
			at, kind = scrape, 2
		}
		if at > maxVirtualRun {
			return nil, fmt.Errorf("workload %s: no end in sight at %v", w.Name, at)
		}
		switch kind {
		case 0:
			s.advance(replica, at)
		case 2:
			k := slices.Index(scrapes, scrape)
			s.advance(k%n, at)
			s.scrape(k/n, k%n, at)
			scrapes[k] += o.ScrapeEvery
		case 1:
			// A step that ends now ends before the arrival, so that the router hears of it.
			for j := range s.next {
				if s.next[j] <= at {
					s.advance(j, at)
				}
			}
			if i > 0 {
				if i == turn(o.Restart) {
					s.fleet.Engines[1].ResetPrefixCache()
					s.starts[1]++
				}
				if i == turn(o.Leave) || i == turn(o.Join) {
					s.fleet.Up[0] = o.Leave == 0 || i < turn(o.Leave)
					s.fleet.Up[n-1] = o.Join == 0 || i >= turn(o.Join)
					for _, r := range s.routers {
						if m, ok := r.(Member); ok {
							if err := m.Changed(at); err != nil {
								return nil, err
							}
						}
					}
				}
			}
			if err := s.submit(i, at); err != nil {
				return nil, err
			}
			i++
		}
		s.pump(at)
		if s.err != nil {
			return nil, s.err
		}
	}
	return s.result(), nil
}

// waiting is how many requests wait with their routers.
func (s *sim) waiting() (n int) {
	for _, r := range s.routers {
		if w, ok := r.(Waiter); ok {
			n += w.Waiting()
		}
	}
	return n
}

// pump has routers send what they may.
func (s *sim) pump(now time.Duration) {
	for _, r := range s.routers {
		if w, ok := r.(Waiter); ok {
			w.Pump(now)
		}
	}
}

func (s *sim) advance(replica int, to time.Duration) {
	e := s.fleet.Engines[replica]
	e.Advance(to)
	s.schedule(replica)
}

func (s *sim) schedule(replica int) {
	if t, ok := s.fleet.Engines[replica].NextEvent(); ok {
		s.next[replica] = t
	} else {
		s.next[replica] = math.MaxInt64
	}
}

func (s *sim) submit(i int, now time.Duration) error {
	q := &s.fleet.Workload.Requests[i]
	c := &s.calls[i]
	*c = Call{Request: q, Index: i, arrived: now}
	c.engine = modelsim.Request{ID: uint64(i), PromptTokens: q.In, OutputTokens: q.Out, Blocks: q.Blocks, Adapter: q.Adapter}
	e := s.fleet.Engines[0]
	if s.slo[i] = s.options.SLOTTFT; s.slo[i] == 0 {
		s.slo[i] = max(sloTTFT, sloPrefills*e.PrefillTime(q.In, 0, q.Adapter > 0))
	}
	if s.options.ForeignShare > 0 && s.fleet.Rand.Float64() < s.options.ForeignShare {
		c.Foreign = true
		c.Replica = s.fleet.argmin(func(r int) float64 { return float64(s.foreign[r]) })
		s.foreign[c.Replica]++
	} else {
		c.Gateway = s.fleet.Rand.IntN(len(s.routers))
		replica := s.routers[c.Gateway].Route(c, now)
		if replica == Held { // it may be on its way already
			return s.err
		}
		c.Replica = replica
	}
	s.send(c, c.Replica, now)
	return s.err
}

// send gives c to a replica.
func (s *sim) send(c *Call, replica int, now time.Duration) {
	c.Replica = replica
	if replica < 0 || replica >= len(s.fleet.Engines) {
		s.err = fmt.Errorf("request %d was sent to replica %d of %d", c.Index, replica, len(s.fleet.Engines))
		return
	}
	if err := s.fleet.Engines[replica].Submit(&c.engine, now); err != nil {
		s.err = fmt.Errorf("request %d of %d tokens: %w", c.Index, c.In, err)
		return
	}
	s.schedule(replica)
}

func (s *sim) firstToken(c *Call, at time.Duration) {
	if !c.Foreign && !s.options.NotStreamed && !c.NotStreamed {
		s.routers[c.Gateway].FirstToken(c, at)
	}
}

func (s *sim) finished(c *Call, at time.Duration) {
	if c.Foreign {
		s.foreign[c.Replica]--
	} else {
		s.routers[c.Gateway].Done(c, at)
	}
	s.ended(c, s.met(c))
}

// ended counts a request, which met its SLO or did not.
func (s *sim) ended(c *Call, met bool) {
	s.finish++
	if c.Index >= s.warm && !met {
		s.failed++
		s.stop = s.stop || s.options.StopBelow > 0 && s.failed > s.maxFails
	}
}

func (s *sim) met(c *Call) bool {
	return c.ttft() < s.slo[c.Index] && c.tpot() < s.options.SLOTPOT
}

// ttft is what the client sees: the wait for admission is part of it.
func (c *Call) ttft() time.Duration { return c.engine.FirstTokenAt - c.arrived }

// waited is how long c waited for admission.
func (c *Call) waited() time.Duration { return c.engine.SubmittedAt - c.arrived }

func (c *Call) tpot() time.Duration {
	if c.Out < 2 {
		return 0
	}
	return (c.engine.FinishedAt - c.engine.FirstTokenAt) / time.Duration(c.Out-1)
}

func (s *sim) scrape(gateway, replica int, now time.Duration) {
	e := s.fleet.Engines[replica]
	st := e.Stats()
	u := st.KVUtilization()
	s.kv.sum += u
	s.kv.most = max(s.kv.most, u)
	s.kv.n++
	p := Page{
		Running:            st.Running,
		Waiting:            st.Waiting,
		KVCacheUtilization: u,
		KVTokens:           e.KVTokens(),
		MaxLoras:           s.fleet.Workload.MaxLoras,
		Stats:              st,
		StartTime:          s.starts[replica],
	}
	if p.MaxLoras > 0 {
		p.AdaptersRunning, p.AdaptersInFlight = e.AppendAdapters(nil, nil)
	}
	s.routers[gateway].Scrape(replica, p, now)
}

// argmin returns a replica that is up with the least cost, ties at random.
func (f *Fleet) argmin(cost func(int) float64) int {
	best, at, ties := math.Inf(1), -1, 0
	for i := range f.Engines {
		if !f.Up[i] {
			continue
		}
		switch c := cost(i); {
		case at < 0, c < best:
			best, at, ties = c, i, 1
		case c == best:
			if ties++; f.Rand.IntN(ties) == 0 {
				at = i
			}
		}
	}
	return at
}

// anyUp returns a replica that is up, uniformly.
func (f *Fleet) anyUp() int {
	for {
		if i := f.Rand.IntN(len(f.Engines)); f.Up[i] {
			return i
		}
	}
}
