package metrics

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// Options configure a [Manager]. Zero values stand for the defaults.
type Options struct {
	// Interval is how often a page is read to begin with, and after a failure (default 1s). From there it moves between
	// MinInterval (default a quarter of it), where load comes from elsewhere or KV space is short, and MaxInterval (default
	// four times it). All three the same make it fixed. A page that names adapters is read each ModelsInterval at least,
	// unless MinInterval is longer.
	Interval, MinInterval, MaxInterval time.Duration
	// MaxBackoff bounds the interval between attempts on an endpoint that fails (default 5s).
	MaxBackoff time.Duration
	// ModelsInterval is how often GET /v1/models is asked for (default 1.25s: adapters that come and go must be known
	// within 2s); SlowModelsInterval (default 5s) where the page says that there can be no adapters.
	ModelsInterval, SlowModelsInterval time.Duration
	// Timeout is for one page or list from connect to the last byte (default 1s).
	Timeout time.Duration
	// MaxPageBytes bounds a page, decompressed (default 4 MiB).
	MaxPageBytes int64

	// Pools holds what differs from pool to pool.
	Pools map[string]PoolOptions

	// Now is the clock that the table's readers use. Required.
	Now func() pool.Instant
	// Wall is the time of day, which some servers' values are compared with (default time.Now).
	Wall func() time.Time

	// OnState is called when an endpoint's state changes, OnScrape after every attempt to read a page. They are called
	// from the goroutines that scrape, for one endpoint never twice at once, and must return soon.
	OnState  func(e *pool.Endpoint, from, to State, err error)
	OnScrape func(e *pool.Endpoint, s Scrape)
	// OnRefused is called when an endpoint begins to refuse its list of models for want of a key, and with nil when it no
	// longer does; from where OnState is called.
	OnRefused func(e *pool.Endpoint, err error)
}

// PoolOptions are what reading the endpoints of one pool takes.
type PoolOptions struct {
	APIKey string      // sent to the servers as a bearer token; "" for none
	TLS    *tls.Config // for https endpoints; nil for the system's roots
	Custom *Mapping    // what the dialect `custom` means in this pool

	custom *Dialect // compiled
}

func (o *Options) fill() error {
	if o.Now == nil {
		return errors.New("metrics: Options.Now is missing; want the clock of the table's readers")
	}
	o.Interval = cmp.Or(o.Interval, time.Second)
	o.MinInterval = min(cmp.Or(o.MinInterval, o.Interval/4), o.Interval)
	o.MaxInterval = max(cmp.Or(o.MaxInterval, 4*o.Interval), o.Interval)
	o.MaxBackoff = max(cmp.Or(o.MaxBackoff, 5*time.Second), o.Interval)
	o.ModelsInterval = cmp.Or(o.ModelsInterval, 1250*time.Millisecond)
	o.SlowModelsInterval = cmp.Or(o.SlowModelsInterval, 5*time.Second)
	o.Timeout = cmp.Or(o.Timeout, time.Second)
	o.MaxPageBytes = cmp.Or(o.MaxPageBytes, 4<<20)
	if o.Wall == nil {
		o.Wall = time.Now
	}
	pools := make(map[string]PoolOptions, len(o.Pools))
	for name, p := range o.Pools {
		if p.Custom != nil {
			d, err := p.Custom.compile()
			if err != nil {
				return fmt.Errorf("pool %s: %w", name, err)
			}
			p.custom = d
		}
		pools[name] = p
	}
	o.Pools = pools
	return nil
}

// A Manager scrapes a set of endpoints, each by a goroutine of its own. Its methods may be called by any goroutine.
type Manager struct {
	table *pool.Table

	mu        sync.Mutex
	opts      *Options
	scrapers  map[*pool.Endpoint]*scraper
	addresses map[string]bool // of the endpoints
	floor     atomic.Int64    // see scraper
	wg        sync.WaitGroup
	stopped   bool
}

// NewManager returns a Manager that feeds t. It scrapes nothing until Sync.
func NewManager(t *pool.Table, o Options) (*Manager, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	return &Manager{
		table: t, opts: &o,
		scrapers:  make(map[*pool.Endpoint]*scraper),
		addresses: make(map[string]bool),
	}, nil
}

// pagesPerSecond is how many pages are read in a second, all endpoints together, and how many lists of models, as far as
// that takes no interval beyond Options.MaxInterval. A page of 20 KB takes about 0.2 ms, so that reading stays below a
// tenth of a core. Bookings tell most of what pages do: with pages 5 s old they lose next to nothing (docs/routing.md).
const pagesPerSecond = 250

// Sync makes endpoints the set that is scraped: it starts what is new, also where an endpoint's dialect or metrics URL
// has changed, and stops what is gone without waiting for it. An endpoint with an unknown dialect, or with `custom` in a
// pool that doesn't say what it means, isn't scraped, and is part of the error.
func (m *Manager) Sync(endpoints []*pool.Endpoint) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped {
		return errors.New("metrics: the manager has been stopped")
	}
	var errs []error
	keep := make(map[*pool.Endpoint]bool, len(endpoints))
	addresses := make(map[string]bool, len(endpoints))
	for _, e := range endpoints {
		keep[e] = true
		addresses[hostPort(e.URL)] = true
	}
	m.addresses = addresses
	m.floor.Store(int64(len(endpoints)) * int64(time.Second) / pagesPerSecond)
	for e, s := range m.scrapers {
		if !keep[e] || s.spec != keyOf(e) {
			s.cancel()
			delete(m.scrapers, e)
		}
	}
	for _, e := range endpoints {
		if m.scrapers[e] != nil {
			continue
		}
		if err := m.opts.check(e); err != nil {
			errs = append(errs, err)
			continue
		}
		m.start(e, nil)
	}
	return errors.Join(errs...)
}

// check reports why e can't be scraped.
func (o *Options) check(e *pool.Endpoint) error {
	switch d := e.Spec().Dialect; {
	case d == Custom && o.Pools[e.Pool].custom == nil:
		return fmt.Errorf("endpoint %s: dialect custom, but the pool doesn't say which series it means", e.ID)
	case d != "" && d != Auto && d != Custom && Lookup(d) == nil:
		return fmt.Errorf("endpoint %s: unknown dialect %q; known dialects: %v", e.ID, d, Names())
	}
	return nil
}

// start begins to scrape e. Where before did so until now, what it made of e goes on to hold.
func (m *Manager) start(e *pool.Endpoint, before *scraper) {
	s := newScraper(m.table, e, m.opts, newClient(m.opts.Pools[e.Pool], m.opts), m.taken, &m.floor)
	if before != nil {
		s.state.Store(before.state.Load())
		s.refused.Store(before.refused.Load())
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	m.scrapers[e] = s
	m.wg.Go(func() {
		defer cancel()
		s.run(ctx)
	})
}

// ReadModels has e's list of models read again soon, since something it said was not so. It does not block.
func (m *Manager) ReadModels(e *pool.Endpoint) {
	m.mu.Lock()
	s := m.scrapers[e]
	m.mu.Unlock()
	if s == nil {
		return
	}
	select {
	case s.again <- struct{}{}:
	default: // it is on its way
	}
}

// taken reports whether an endpoint has the address.
func (m *Manager) taken(hostPort string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.addresses[hostPort]
}

// Configure replaces the options and starts all scrapers anew with them. What the table knows stays. On an error
// nothing changes.
func (m *Manager) Configure(o Options) error {
	if err := o.fill(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped {
		return errors.New("metrics: the manager has been stopped")
	}
	m.opts = &o
	for e, s := range m.scrapers {
		s.cancel()
		delete(m.scrapers, e)
		if m.opts.check(e) == nil {
			m.start(e, s)
		}
	}
	return nil
}

// Stop ends all scraping and waits for it.
func (m *Manager) Stop() {
	m.mu.Lock()
	m.stopped = true
	for e, s := range m.scrapers {
		s.cancel()
		delete(m.scrapers, e)
	}
	m.mu.Unlock()
	m.wg.Wait()
}
