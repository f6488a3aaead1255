package adapters

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/telemetry"
)

// PoolOptions are how the adapters of one pool are managed.
type PoolOptions struct {
	Pool     string
	Registry []Adapter
	Plan     PlanOptions
	// LoadTimeout is how long one load or unload may take (default 1 min).
	LoadTimeout time.Duration
	// DryRun has decisions logged and counted, and nothing done.
	DryRun bool
	APIKey string      // of the endpoints
	TLS    *tls.Config // for https endpoints; nil for the system's roots
}

// Options are what a [Manager] needs.
type Options struct {
	Table *pool.Table         // required
	Now   func() pool.Instant // the table's clock; required
	Log   *zap.Logger         // nil: nothing is logged
	// Changed is called when requests that wait for an adapter should look again. It must not block.
	Changed func()
	// Relist has an endpoint's list of models read again. It must not block. May be nil.
	Relist func(*pool.Endpoint)
	// Metrics count what is done. May be nil.
	Metrics *telemetry.AdapterMetrics
	// Every is how often it is looked whether there is something to do that nobody waits for (default 1 s).
	Every time.Duration
}

// A Manager manages the adapters of all pools. It is safe for concurrent use.
type Manager struct {
	o   Options
	log *zap.Logger
	ctx context.Context
	end context.CancelFunc
	wg  sync.WaitGroup

	mu    sync.Mutex // serialises writers of pools
	pools atomic.Pointer[map[string]*Pool]
}

// NewManager returns a manager of no pools.
func NewManager(o Options) *Manager {
	if o.Table == nil || o.Now == nil {
		panic("BUG: adapters.Options needs a Table and Now")
	}
	o.Every = cmp.Or(o.Every, time.Second)
	m := &Manager{o: o, log: o.Log}
	if m.log == nil {
		m.log = zap.NewNop()
	}
	if m.o.Changed == nil {
		m.o.Changed = func() {}
	}
	m.ctx, m.end = context.WithCancel(context.Background())
	m.pools.Store(&map[string]*Pool{})
	return m
}

// Close ends what runs and waits for it.
func (m *Manager) Close() {
	m.end()
	m.wg.Wait()
	for _, p := range *m.pools.Load() {
		p.client.Load().close()
	}
}

// Configure makes pools the ones that are managed. What is known of adapters that stay is kept.
func (m *Manager) Configure(pools []PoolOptions) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, next := *m.pools.Load(), make(map[string]*Pool, len(pools))
	for _, o := range pools {
		o.LoadTimeout = cmp.Or(o.LoadTimeout, time.Minute)
		p := old[o.Pool]
		if p == nil {
			p = &Pool{m: m, name: o.Pool, kick: make(chan struct{}, 1), planner: NewPlanner(nil, o.Plan), errors: make(map[string]string)}
			p.configure(o)
			ctx, cancel := context.WithCancel(m.ctx)
			p.cancel = cancel
			m.wg.Go(func() { p.run(ctx) })
		} else {
			p.configure(o)
		}
		next[o.Pool] = p
	}
	for name, p := range old {
		if next[name] == nil {
			p.cancel()
		}
	}
	m.pools.Store(&next)
}

// Pool returns the manager's part for a pool; nil if it isn't managed.
func (m *Manager) Pool(name string) *Pool { return (*m.pools.Load())[name] }

// Observe implements telemetry.Sink: it learns what is asked for.
func (m *Manager) Observe(r *telemetry.Record) {
	if r.Adapter == "" {
		return
	}
	if p := (*m.pools.Load())[r.Pool]; p != nil {
		if n := (*p.used.Load())[r.Adapter]; n != nil {
			n.Add(1)
		}
	}
}

// A Pool manages the adapters of one pool.
type Pool struct {
	m      *Manager
	name   string
	cancel context.CancelFunc
	kick   chan struct{} // capacity 1: something is to be decided
	client atomic.Pointer[client]
	used   atomic.Pointer[map[string]*atomic.Int64] // requests since the last look, by adapter

	mu      sync.Mutex
	o       PoolOptions
	planner *Planner
	errors  map[string]string // why an adapter was last not loaded
	epochs  map[string]uint32 // of endpoints
}

func (p *Pool) configure(o PoolOptions) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.o = o
	p.planner.Configure(o.Registry, o.Plan)
	used := make(map[string]*atomic.Int64, len(o.Registry))
	for _, a := range o.Registry {
		used[a.Name] = new(atomic.Int64)
	}
	p.used.Store(&used)
	if c := p.client.Swap(newClient(o.APIKey, o.TLS)); c != nil {
		c.close()
	}
	p.wake()
}

func (p *Pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// ErrNotLoaded says that an adapter is not going to be loaded.
var ErrNotLoaded = errors.New("the adapter could not be loaded")

// Want has an adapter loaded that no endpoint has, once for however many ask. It does not block. An error says that it is no
// use to wait: loading it has failed wherever it was tried.
func (p *Pool) Want(t *pool.Target) error {
	now := p.m.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.DryRun {
		return fmt.Errorf("%w: dry run", ErrNotLoaded)
	}
	if !p.planner.Ask(t.Name, now) || p.planner.Hopeless(t.Name, now, p.endpoints(now)) {
		if why := p.errors[t.Name]; why != "" {
			return fmt.Errorf("%w: %s", ErrNotLoaded, why)
		}
		return ErrNotLoaded
	}
	p.wake()
	return nil
}

// Short notes that a request found no room where its adapter is.
func (p *Pool) Short(t *pool.Target) {
	p.mu.Lock()
	p.planner.Short(t.Name)
	p.mu.Unlock()
}

// run decides and acts until ctx ends.
func (p *Pool) run(ctx context.Context) {
	tick := time.NewTicker(p.m.o.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.kick:
		}
		p.step(ctx)
	}
}

// step decides once, and begins what was decided: for each endpoint one thing after the other.
func (p *Pool) step(ctx context.Context) {
	now := p.m.o.Now()
	p.mu.Lock()
	for name, n := range *p.used.Load() {
		if k := n.Swap(0); k > 0 {
			p.planner.Used(name, float64(k))
		}
	}
	actions := p.planner.Plan(now, p.endpoints(now))
	dry := p.o.DryRun
	p.mu.Unlock()
	byEndpoint := make(map[string][]Action)
	for _, a := range actions {
		byEndpoint[a.Endpoint] = append(byEndpoint[a.Endpoint], a)
	}
	for id, list := range byEndpoint {
		row := p.row(id)
		p.m.wg.Go(func() {
			for _, a := range list {
				p.do(ctx, row, a, dry)
			}
		})
	}
}

// endpoints are the pool's rows as the planner sees them. The caller holds mu.
func (p *Pool) endpoints(now pool.Instant) []Endpoint {
	s := p.m.o.Table.Load()
	i := s.Pool(p.name)
	if i < 0 {
		return nil
	}
	rows := s.PoolRows(i)
	eps := make([]Endpoint, len(rows))
	epochs := make(map[string]uint32, len(rows))
	for k := range rows {
		r := &rows[k]
		e := &eps[k]
		e.ID, e.Hash = r.Endpoint.ID, r.Endpoint.IDHash
		e.Ready, e.Known = r.Healthy(now), r.Served != nil
		if r.Served != nil {
			for j := range r.Served.Models {
				if m := &r.Served.Models[j]; m.Parent != "" {
					e.Has = append(e.Has, m.ID)
				}
			}
		}
		if r.Load.Known.Has(pool.KnowsMaxAdapters) {
			e.Slots = int(r.Load.MaxAdapters)
		}
		b := r.Booked()
		rate := cmp.Or(r.Endpoint.PrefillTokensPerSecond.Load(), 20_000) // scoring's prior
		e.Busy = min(1, float64(b.PendingTokens)/rate)
		if r.KVCapacity > 0 {
			e.Busy = max(e.Busy, min(1, float64(b.KVTokens)/float64(r.KVCapacity)))
		}
		memory := r.Endpoint.Adapters()
		e.InFlight = func(name string) int {
			u, _ := memory.Use(pool.HashName(name))
			return u.InFlight
		}
		epochs[e.ID] = r.Endpoint.Epoch()
		if was, ok := p.epochs[e.ID]; ok && was != epochs[e.ID] {
			p.planner.Restarted(e.ID)
		}
	}
	p.epochs = epochs
	return eps
}

// row is the endpoint's row; nil if it has left.
func (p *Pool) row(id string) *pool.Row {
	s := p.m.o.Table.Load()
	for i := range s.Rows {
		if s.Rows[i].Endpoint.ID == id {
			return &s.Rows[i]
		}
	}
	return nil
}

// do carries out an action, and tells the planner how it went.
func (p *Pool) do(ctx context.Context, r *pool.Row, a Action, dry bool) {
	verb := "load"
	if a.Unload {
		verb = "unload"
	}
	fields := []zap.Field{zap.String("adapter", a.Adapter.Name), zap.String(telemetry.FieldEndpoint, a.Endpoint), zap.String("why", a.Why)}
	if dry {
		p.m.log.Info("would "+verb+" adapter", fields...)
		p.done(a, Skipped, nil)
		return
	}
	began := time.Now()
	var err error
	switch {
	case r == nil:
		err = &ServerError{Fault: AtEndpoint, Message: "the endpoint has left"}
	case a.Unload:
		err = p.unload(ctx, r, a.Adapter)
	default:
		err = p.load(ctx, r, a.Adapter)
	}
	if ctx.Err() != nil {
		return
	}
	fault := NoFault
	if err != nil {
		fault = AtEndpoint
		if e, ok := errors.AsType[*ServerError](err); ok {
			fault = e.Fault
		}
		p.m.log.Warn("adapter not "+verb+"ed", append(fields, zap.Error(err))...)
	} else {
		p.m.log.Info("adapter "+verb+"ed", append(fields, zap.Duration("took", time.Since(began)))...)
	}
	if x := p.m.o.Metrics; x != nil {
		x.Observe(p.name, verb, a.Why, err == nil, time.Since(began))
	}
	p.done(a, fault, err)
}

func (p *Pool) done(a Action, fault Fault, err error) {
	p.mu.Lock()
	p.planner.Done(a, fault, p.m.o.Now())
	if !a.Unload {
		delete(p.errors, a.Adapter.Name)
		if err != nil {
			p.errors[a.Adapter.Name] = a.Endpoint + ": " + err.Error()
		}
	}
	p.mu.Unlock()
	if fault != Skipped {
		p.wake()
		p.m.o.Changed()
	}
}

func (p *Pool) load(ctx context.Context, r *pool.Row, a *Adapter) error {
	p.mu.Lock()
	timeout := p.o.LoadTimeout
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := p.client.Load().load(ctx, r.Endpoint.URL, r.Load.Dialect, a.Name, a.Source); err != nil {
		return err
	}
	// It is known here at once, and the list will say the same.
	p.m.o.Table.AddServed(r.Endpoint, pool.Model{ID: a.Name, Parent: cmp.Or(a.Base, baseOf(r))}, p.m.o.Now())
	p.relist(r.Endpoint)
	return nil
}

// baseOf is the base model that an endpoint serves.
func baseOf(r *pool.Row) string {
	if r.Served != nil {
		for _, m := range r.Served.Models {
			if m.Parent == "" {
				return m.ID
			}
		}
	}
	return r.Endpoint.Pool
}

// leaveEvery is how often it is looked whether the last request for an adapter that is to go has ended.
const leaveEvery = 20 * time.Millisecond

// unload takes an adapter off an endpoint: first no request goes there for it any more, then those that run end, then it goes.
func (p *Pool) unload(ctx context.Context, r *pool.Row, a *Adapter) error {
	p.mu.Lock()
	timeout := p.o.LoadTimeout
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	p.m.o.Table.RemoveServed(r.Endpoint, a.Name, p.m.o.Now())
	defer p.relist(r.Endpoint)
	hash := pool.HashName(a.Name)
	t := time.NewTicker(leaveEvery)
	defer t.Stop()
	for {
		if u, _ := r.Endpoint.Adapters().Use(hash); u.InFlight == 0 {
			break
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			p.m.o.Table.AddServed(r.Endpoint, pool.Model{ID: a.Name, Parent: cmp.Or(a.Base, baseOf(r))}, p.m.o.Now())
			return &ServerError{Fault: AtEndpoint, Message: "requests for it don't end"}
		}
	}
	if err := p.client.Load().unload(ctx, r.Endpoint.URL, r.Load.Dialect, a.Name); err != nil {
		p.m.o.Table.AddServed(r.Endpoint, pool.Model{ID: a.Name, Parent: cmp.Or(a.Base, baseOf(r))}, p.m.o.Now()) // it is still there
		return err
	}
	r.Endpoint.Adapters().Forget(hash)
	return nil
}

func (p *Pool) relist(e *pool.Endpoint) {
	if p.m.o.Relist != nil {
		p.m.o.Relist(e)
	}
}

// A Status describes one adapter, for people.
type Status struct {
	Pool    string   `json:"pool"`
	Name    string   `json:"name"`
	Source  string   `json:"source"`
	Base    string   `json:"base,omitempty"`
	Pin     bool     `json:"pin,omitempty"`
	Min     int      `json:"min_replicas,omitempty"`
	Max     int      `json:"max_replicas,omitempty"`
	On      []string `json:"on"`      // endpoints that have it
	Loading []string `json:"loading"` // endpoints on which it is being loaded
	// RequestsPerSecond is how often it is asked for, over minutes; Running how many requests for it are in flight, over seconds.
	RequestsPerSecond float64 `json:"requests_per_second"`
	Running           float64 `json:"running"`
	Error             string  `json:"error,omitempty"` // why it was last not loaded
	DryRun            bool    `json:"dry_run,omitempty"`
}

// Status describes every adapter of the registry, by pool and in its order.
func (m *Manager) Status() (all []Status) {
	pools := *m.pools.Load()
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		all = append(all, pools[name].status()...)
	}
	return all
}

func (p *Pool) status() (all []Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	eps := p.endpoints(p.m.o.Now())
	for _, a := range p.planner.list {
		s := Status{
			Pool: p.name, Name: a.Name, Source: a.Source, Base: a.Base, Pin: a.Pin, Min: a.Min, Max: a.Max,
			On: []string{}, Loading: []string{}, RequestsPerSecond: a.rate, Running: a.running, Error: p.errors[a.Name], DryRun: p.o.DryRun,
		}
		for i := range eps {
			if slices.Contains(eps[i].Has, a.Name) {
				s.On = append(s.On, eps[i].ID)
			}
			if w := p.planner.where[eps[i].ID]; w != nil {
				if _, ok := w.loading[a.Name]; ok {
					s.Loading = append(s.Loading, eps[i].ID)
				}
			}
		}
		all = append(all, s)
	}
	return all
}
