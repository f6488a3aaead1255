package policies

import (
	"fmt"
	"slices"
	"time"

	"kvgate/admission"
	"kvgate/pool"
	"kvgate/scoring"
)

// Product makes a policy of kvgate's own code: a real table, fed by scrapes, and a real scoring policy that books on it. name
// is what tables show; make describes the policy, once per gateway.
func Product(name, doc string, make func() scoring.Config) Policy {
	return Policy{Name: name, Doc: doc, New: func(f *Fleet) (Router, error) { return newProduct(f, make(), nil) }}
}

// Admitting is Product with requests that wait for room, as o says.
func Admitting(name, doc string, o Admission) Policy {
	return Policy{Name: name, Doc: doc, New: func(f *Fleet) (Router, error) { return newProduct(f, scoring.Config{}, &o) }}
}

// Admission is how requests wait.
type Admission struct {
	admission.Options
	scoring.Limits
}

// Auto is the product's default policy.
var Auto = Product("auto", "kvgate's default: least cost in prefill tokens", func() scoring.Config { return scoring.Config{} })

type product struct {
	f       *Fleet
	table   *pool.Table
	policy  *scoring.Policy
	ends    []*pool.Endpoint // by replica
	replica map[*pool.Endpoint]int
	specs   []pool.Spec
	served  *pool.Served
	names   []string // of adapters; 0 is the base model
	prefix  []uint64
	due     []dueClear // pending tokens to be cleared by prediction, in order of time

	queue  *admission.Queue // nil: nothing waits
	limits scoring.Limits
}

type dueClear struct {
	at time.Duration
	b  *pool.Booking
	of uint64
}

type productCall struct {
	booking  pool.Booking
	decision scoring.Decision
	sent     time.Duration
	first    time.Duration
	request  scoring.Request
	waiter   admission.Waiter
	queued   bool
}

const simModel = "m"

// indexBytes is enough for the prefixes of some dozens of replicas, and quicker to clear than the product's default.
const indexBytes = 16 << 20

func newProduct(f *Fleet, c scoring.Config, a *Admission) (Router, error) {
	if c.Rand == nil {
		c.Rand = f.Rand.Uint64N
	}
	if c.StaleAfter == 0 {
		// As the gateway's default: a load is stale when a few scrapes in a row are missing.
		c.StaleAfter = max(10*time.Second, 3*f.Options.ScrapeEvery)
	}
	if c.Index == nil {
		c.Index = scoring.NewIndex(indexBytes)
	}
	pol, err := scoring.New(c)
	if err != nil {
		return nil, err
	}
	p := &product{f: f, policy: pol, replica: make(map[*pool.Endpoint]int), names: []string{simModel}}
	p.table = pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{simModel}}}, pool.Options{})
	p.ends = make([]*pool.Endpoint, len(f.Engines))
	for i := range p.ends {
		p.specs = append(p.specs, pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 10000+i)})
	}
	now := pool.Instant(simEpoch) - 1
	p.served = &pool.Served{Models: []pool.Model{{ID: simModel, MaxModelLen: 1 << 20}}, At: now}
	for a := 1; a <= f.Workload.Adapters; a++ {
		p.names = append(p.names, fmt.Sprintf("adapter-%d", a))
		p.served.Models = append(p.served.Models, pool.Model{ID: p.names[a], Parent: simModel})
	}
	if a != nil {
		p.limits = a.Limits
		p.queue = admission.New(a.Options, p)
	}
	return p, p.Changed(time.Duration(now))
}

// Changed implements [Member].
func (p *product) Changed(now time.Duration) error {
	var up []pool.Spec
	for i, s := range p.specs {
		if p.f.Up[i] {
			up = append(up, s)
		}
	}
	if _, _, err := p.table.SetEndpoints("p", up, pool.Instant(now)); err != nil {
		return err
	}
	s := p.table.Load()
	for i := range s.Rows {
		e := s.Rows[i].Endpoint
		replica := slices.IndexFunc(p.specs, func(s pool.Spec) bool { return s.URL == e.URL })
		p.ends[replica], p.replica[e] = e, replica
		p.table.SetServed(e, p.served)
	}
	return nil
}

// blockTokens of the prefixes that policies are given: coarser ids of a trace are cut into blocks of the size that the
// gateway hashes.
const blockTokens = 64

func (p *product) Route(q *Call, now time.Duration) int {
	p.clearDue(now)
	s := p.table.Load()
	tokens := q.In
	if e := p.f.Options.EstimateError; e > 0 {
		tokens = max(1, int(float64(tokens)*(1-e+2*e*p.f.Rand.Float64())))
	}
	c := new(productCall)
	c.request = scoring.Request{
		Target:       s.TargetString(p.names[q.Adapter]),
		PromptTokens: int32(tokens),
		MaxTokens:    int32(min(q.MaxTokens, 1<<30)),
		Session:      q.Session,
		Stream:       p.streams(q),
	}
	if p.policy.NeedsPrefix() {
		c.request.Prefix, c.request.BlockTokens = p.hashes(q), blockTokens
	}
	q.state = c
	if p.queue == nil || p.queue.Waiting() == 0 && p.policy.Room(&c.request, s, pool.Instant(now), &p.limits) == scoring.Free {
		return p.choose(q, now)
	}
	// As the gateway does, which lets the queue decide as soon as somebody waits.
	_, need := p.policy.Tokens(&c.request)
	c.request.Prefix = slices.Clone(c.request.Prefix)
	c.queued = true
	c.waiter = admission.Waiter{Owner: q, Tenant: q.Tenant, Class: q.Class, Lane: c.request.Target.Hash, Tokens: int64(need)}
	if p.queue.Enter(&c.waiter, pool.Instant(now)) {
		p.queue.Dispatch(pool.Instant(now))
	}
	return Held
}

// streams reports whether q's first token is seen.
func (p *product) streams(q *Call) bool { return !p.f.Options.NotStreamed && !q.NotStreamed }

// choose books q on a replica, which it returns; -1 if there is none.
func (p *product) choose(q *Call, now time.Duration) int {
	c := q.state.(*productCall)
	d, err := p.policy.Choose(&c.request, p.table.Load(), pool.Instant(now), &c.booking)
	if err != nil {
		return -1
	}
	c.decision, c.sent = d, now
	if !p.streams(q) {
		due := dueClear{now + p.policy.PredictFirstToken(&d), &c.booking, c.booking.Generation()}
		i := len(p.due)
		for i > 0 && p.due[i-1].at > due.at {
			i--
		}
		p.due = append(p.due[:i], append([]dueClear{due}, p.due[i:]...)...)
	}
	return p.replica[d.Endpoint]
}

// Start implements admission.Starter.
func (p *product) Start(w *admission.Waiter, now pool.Instant) admission.Answer {
	q := w.Owner.(*Call)
	c := q.state.(*productCall)
	s := p.table.Load()
	c.request.Target = s.TargetString(c.request.Target.Name)
	switch p.policy.Room(&c.request, s, now, &p.limits) {
	case scoring.Free:
		c.request.SlotFree = true
	case scoring.NoSlot:
		return admission.Stuck
	default:
		return admission.NoRoom
	}
	p.f.send(q, p.choose(q, time.Duration(now)), time.Duration(now))
	return admission.Started
}

// Refuse implements admission.Starter.
func (p *product) Refuse(w *admission.Waiter, _ admission.Reason, _ time.Duration) {
	p.f.refuse(w.Owner.(*Call))
}

// Pump implements Waiter.
func (p *product) Pump(now time.Duration) {
	if p.queue != nil {
		p.clearDue(now)
		p.queue.Dispatch(pool.Instant(now))
	}
}

// Waiting implements Waiter.
func (p *product) Waiting() int {
	if p.queue == nil {
		return 0
	}
	return p.queue.Waiting()
}

// hashes returns q's prefix in blocks of blockTokens.
func (p *product) hashes(q *Call) []uint64 {
	size := p.f.Workload.BlockTokens
	p.prefix = p.prefix[:0]
	if size >= blockTokens {
		for _, id := range q.Blocks {
			for j := range size / blockTokens {
				p.prefix = append(p.prefix, mix(id+uint64(j)))
			}
		}
		return p.prefix
	}
	per := blockTokens / size
	for i := per - 1; i < len(q.Blocks); i += per {
		p.prefix = append(p.prefix, q.Blocks[i]) // ids are chained: the last one of a group stands for all
	}
	return p.prefix
}

func (p *product) clearDue(now time.Duration) {
	n := 0
	for n < len(p.due) && p.due[n].at <= now {
		p.due[n].b.FirstTokenOf(p.due[n].of)
		n++
	}
	p.due = p.due[n:]
}

func (p *product) FirstToken(q *Call, now time.Duration) {
	c := q.state.(*productCall)
	c.first = now
	c.booking.FirstToken()
	p.policy.FirstToken(&c.decision, now-c.sent)
}

func (p *product) Done(q *Call, now time.Duration) {
	c := q.state.(*productCall)
	u := scoring.Usage{PromptTokens: int32(q.In), CachedTokens: -1, OutputTokens: int32(q.Out)}
	if c.first > 0 {
		u.Duration = now - c.first
	}
	p.policy.End(&c.decision, u)
	c.booking.End()
	if c.queued {
		p.queue.Settle(q.Tenant, q.Class, int64(q.In+q.Out)-c.waiter.Tokens)
	}
	q.state = nil
}

func (p *product) Scrape(replica int, page Page, now time.Duration) {
	p.clearDue(now)
	e := p.ends[replica]
	if !p.f.Up[replica] {
		return
	}
	l := &pool.Load{
		Known: pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity,

		Running:               int32(page.Running),
		Waiting:               int32(page.Waiting),
		KVCacheUtilization:    page.KVCacheUtilization,
		KVCacheUtilizationMax: page.KVCacheUtilization,
		KVCapacityTokens:      int64(page.KVTokens),
		StartTime:             page.StartTime * 10,
		PromptTokens:          float64(page.Stats.PromptTokens),
		GenerationTokens:      float64(page.Stats.GeneratedTokens),
		PrefixQueryTokens:     float64(page.Stats.PrefixQueryTokens),
		PrefixHitTokens:       float64(page.Stats.PrefixHitTokens),
		Preemptions:           float64(page.Stats.Preemptions),
	}
	if page.MaxLoras > 0 {
		l.Known |= pool.KnowsAdapters | pool.KnowsMaxAdapters
		l.MaxAdapters = int32(page.MaxLoras)
		for _, a := range page.AdaptersInFlight {
			l.Adapters = append(l.Adapters, p.names[a])
		}
	}
	p.table.Observe(e, pool.Observation{Load: l, At: pool.Instant(now), Before: e.Booked()})
}
