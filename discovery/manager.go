package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
)

// Options set up a [Manager].
type Options struct {
	// Apply takes the complete set of a pool's targets: sorted, without duplicates, and only when it has changed. Calls
	// do not overlap. It is not called for pools that are gone. It must not call the Manager.
	Apply func(pool string, targets []Target)

	// Pace is the least time between two rounds of Apply: changes that come faster are handed over together. Default
	// 100 ms.
	Pace time.Duration

	Env Env
	Log *zap.Logger // nil logs nothing
}

// A Manager runs the sources of all pools. Its methods may be called concurrently.
type Manager struct {
	opt    Options
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // sources and the loop
	dirty  chan struct{}  // capacity 1: something is to be applied

	setting  sync.Mutex // serialises SetPools and Close
	applying sync.Mutex // held while Apply runs and while pools change; taken before mu

	mu      sync.Mutex
	pools   map[string]*poolState
	handing bool          // Apply is at work
	changed chan struct{} // closed and replaced when a source has reported or a set was applied
}

type poolState struct {
	name    string
	dialect string
	sources []*running // by kind
	dirty   bool
	applied []Target
	ever    bool // applied was handed over, so that an empty first set is too
}

// running is a source at work. Its fields below mu's line are guarded by Manager.mu.
type running struct {
	pool     string
	kind     Kind
	settings any
	cancel   context.CancelFunc
	done     chan struct{}

	stopped  bool
	targets  []Target
	reported bool // since it was started
	success  time.Time
	failure  time.Time
	err      error
	failures int    // in a row
	failed   uint64 // in all
}

// A Status is how one source is doing.
type Status struct {
	Pool        string    `json:"pool"`
	Source      string    `json:"source"`
	Targets     int       `json:"targets"`               // in the last set that it found
	LastSuccess time.Time `json:"last_success,omitzero"` // zero: never
	LastError   string    `json:"last_error,omitempty"`  // of the failure since; empty when all is well
	FailedAt    time.Time `json:"last_failure,omitzero"` // zero: never
	Failures    int       `json:"failures_in_a_row"`     // 0 when all is well
	Failed      uint64    `json:"failures"`              // since it was started with these settings
}

// New returns a Manager without pools; it must be closed.
func New(opt Options) (*Manager, error) {
	if opt.Apply == nil {
		return nil, errors.New("discovery: Options.Apply is missing")
	}
	if opt.Pace <= 0 {
		opt.Pace = 100 * time.Millisecond
	}
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	m := &Manager{
		opt: opt, dirty: make(chan struct{}, 1), changed: make(chan struct{}),
		pools: make(map[string]*poolState),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.wg.Go(m.loop)
	return m, nil
}

// SetPools starts the sources of new pools, stops those of pools that are gone, and leaves alone those whose settings
// are as before. A source with new settings takes over what the old one had found until it has found something itself.
func (m *Manager) SetPools(pools []config.Pool) {
	m.setting.Lock()
	defer m.setting.Unlock()

	m.applying.Lock()
	m.mu.Lock()
	if m.ctx.Err() != nil {
		m.mu.Unlock()
		m.applying.Unlock()
		return
	}
	var stopped []*running
	next := make(map[string]*poolState, len(pools))
	for i := range pools {
		p := &pools[i]
		s := m.pools[p.Name]
		if s == nil {
			s = &poolState{name: p.Name}
		}
		delete(m.pools, p.Name)
		next[p.Name] = s
		s.dialect = p.Dialect
		stopped = append(stopped, m.setSources(s, &p.Discovery)...)
		if s.told() { // a round for nothing would hold up what is found in the next moment
			m.touch(s)
		}
	}
	for _, s := range m.pools {
		stopped = append(stopped, s.sources...)
	}
	m.pools = next
	for _, r := range stopped {
		r.stopped = true
		r.cancel()
	}
	m.announce()
	m.mu.Unlock()
	m.applying.Unlock()

	for _, r := range stopped {
		<-r.done
	}
}

// setSources gives s the sources that d asks for and returns those it had and no longer has. m.mu is held.
func (m *Manager) setSources(s *poolState, d *config.Discovery) (stopped []*running) {
	before := s.sources
	s.sources = nil
	for _, k := range kinds {
		i := slices.IndexFunc(before, func(r *running) bool { return r.kind.Name == k.Name })
		settings, used := k.settings(d)
		switch {
		case i >= 0 && used && reflect.DeepEqual(before[i].settings, settings):
			s.sources = append(s.sources, before[i])
			continue
		case i >= 0:
			stopped = append(stopped, before[i])
		}
		if used {
			r := &running{pool: s.name, kind: k, settings: settings, done: make(chan struct{})}
			if i >= 0 {
				r.targets, r.success = before[i].targets, before[i].success
			}
			s.sources = append(s.sources, r)
			m.start(r)
		}
	}
	return stopped
}

func (m *Manager) start(r *running) {
	ctx, cancel := context.WithCancel(m.ctx)
	r.cancel = cancel
	m.wg.Go(func() {
		defer close(r.done)
		defer cancel()
		source := r.kind.open(r.settings, m.opt.Env)
		const shortest, longest = time.Second, time.Minute
		for pause := shortest; ; pause = min(2*pause, longest) {
			err := guarded(ctx, source, func(t []Target, err error) { m.report(r, t, err) })
			if ctx.Err() != nil {
				return
			}
			m.report(r, nil, cmp.Or(err, errors.New("the source ended")))
			if !sleep(ctx, jitter(pause)) {
				return
			}
		}
	})
}

// guarded runs the source. What it reads comes from outside: a panic over that must not end the process.
func guarded(ctx context.Context, s Source, report func([]Target, error)) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return s.Run(ctx, report)
}

// report takes what a source has found, or why it could not.
func (m *Manager) report(r *running, targets []Target, err error) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.stopped {
		return
	}
	log := m.opt.Log.With(zap.String("pool", r.pool), zap.String("source", r.kind.Name))
	r.reported = true
	if err != nil {
		r.err, r.failure = err, now
		r.failed++
		said := "discovery fails; the last set holds"
		if targets != nil {
			said = "discovery finds something amiss"
			r.targets, r.success = targets, now
			m.touch(m.pools[r.pool])
		}
		if r.failures++; r.failures == 1 { // repeats are counted, not logged
			log.Warn(said, zap.Error(err), zap.Int("targets", len(r.targets)))
		}
	} else {
		if r.failures > 0 {
			log.Info("discovery works again", zap.Int("failures", r.failures), zap.Int("targets", len(targets)))
		}
		r.err, r.failures = nil, 0
		r.targets, r.success = targets, now
		m.touch(m.pools[r.pool])
	}
	m.announce()
}

// touch marks a pool for the loop. m.mu is held.
func (m *Manager) touch(s *poolState) {
	s.dirty = true
	select {
	case m.dirty <- struct{}{}:
	default:
	}
}

// announce wakes those who wait. m.mu is held.
func (m *Manager) announce() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// loop hands changed sets over: at once when it has been quiet, else in rounds that are Pace apart.
func (m *Manager) loop() {
	for {
		select {
		case <-m.dirty:
		case <-m.ctx.Done():
			return
		}
		m.apply()
		if !sleep(m.ctx, m.opt.Pace) {
			return
		}
	}
}

func (m *Manager) apply() {
	m.applying.Lock()
	defer m.applying.Unlock()

	type change struct {
		pool    string
		targets []Target
	}
	var changes []change
	m.mu.Lock()
	for _, s := range m.pools {
		if !s.dirty || !s.told() {
			continue
		}
		s.dirty = false
		if t := s.merge(); !s.ever || !reflect.DeepEqual(t, s.applied) {
			s.applied, s.ever = t, true
			changes = append(changes, change{s.name, slices.Clone(t)})
		}
	}
	m.handing = len(changes) > 0
	m.mu.Unlock()

	slices.SortFunc(changes, func(a, b change) int { return strings.Compare(a.pool, b.pool) })
	for _, c := range changes {
		m.opt.Apply(c.pool, c.targets)
	}

	m.mu.Lock()
	m.handing = false
	m.announce()
	m.mu.Unlock()
}

// told reports whether any source has ever found a set. Until then there is nothing to hand over: "not known" is not
// "none".
func (s *poolState) told() bool {
	return slices.ContainsFunc(s.sources, func(r *running) bool { return !r.success.IsZero() })
}

// merge unites the sets of a pool's sources. What two of them name is taken from the first.
func (s *poolState) merge() []Target {
	var out []Target
	for _, r := range s.sources {
		for _, t := range r.targets {
			t.Pool, t.Dialect = s.name, cmp.Or(t.Dialect, s.dialect)
			out = append(out, t)
		}
	}
	slices.SortStableFunc(out, byIdentity)
	return slices.CompactFunc(out, func(a, b Target) bool { return byIdentity(a, b) == 0 })
}

func byIdentity(a, b Target) int {
	return cmp.Or(strings.Compare(a.URL, b.URL), strings.Compare(a.SourceID, b.SourceID))
}

// Wait returns when every source has reported once, be it a failure, and what they found has been applied; or the
// error of ctx.
func (m *Manager) Wait(ctx context.Context) error {
	for {
		m.mu.Lock()
		changed, ready := m.changed, !m.handing
		for _, s := range m.pools {
			ready = ready && !(s.dirty && s.told())
			for _, r := range s.sources {
				ready = ready && r.reported
			}
		}
		m.mu.Unlock()
		if ready {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Status returns how each source is doing, by pool and kind.
func (m *Manager) Status() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Status
	for _, s := range m.pools {
		for _, r := range s.sources {
			st := Status{
				Pool: r.pool, Source: r.kind.Name, Targets: len(r.targets),
				LastSuccess: r.success, FailedAt: r.failure, Failures: r.failures, Failed: r.failed,
			}
			if r.err != nil {
				st.LastError = r.err.Error()
			}
			out = append(out, st)
		}
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(strings.Compare(a.Pool, b.Pool), strings.Compare(a.Source, b.Source))
	})
	return out
}

// Close stops all sources and waits for them. Nothing is applied afterwards.
func (m *Manager) Close() {
	m.setting.Lock()
	defer m.setting.Unlock()
	m.cancel()
	m.wg.Wait()
}
