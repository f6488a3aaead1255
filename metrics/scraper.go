package metrics

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// A State is what scraping makes of an endpoint: a closed list.
type State string

// The states.
const (
	StateUnknown    State = "unknown"    // not scraped yet
	StateUp         State = "up"         // its page is read and understood
	StateAsleep     State = "asleep"     // it says that its weights are offloaded, or its page must not be touched because of that
	StateUnmeasured State = "unmeasured" // no page of it is read in time and understood: it is known by our own requests alone
	StateDown       State = "down"       // it takes no connections
)

// A Scrape is the outcome of one scrape, for counting.
type Scrape struct {
	Fault     Fault // FaultNone if it went well
	Took      time.Duration
	PageBytes int64 // decompressed
	Skipped   int   // series that were dropped: not understood, NaN, infinite or negative
	Anomalies int   // numbers out of their range
}

// A scraper reads one endpoint in the background. Everything in it belongs to its goroutine.
type scraper struct {
	opts     *Options
	table    *pool.Table
	endpoint *pool.Endpoint
	spec     specKey
	locator  locator
	cancel   context.CancelFunc
	again    chan struct{} // asks for the list of models; holds one
	floor    *atomic.Int64 // nanoseconds that each interval takes at least, for there being so many endpoints

	source    *source               // nil until located
	state     atomic.Pointer[State] // never nil; written by the scraper's goroutine, read when a scraper replaces it
	failures  int                   // scrapes in a row
	lost      error                 // in this step: why there was no connection to the endpoint
	heard     bool                  // in this step: there was one
	losses    int                   // steps in a row without a connection
	interval  time.Duration
	adapters  []string // of the page read last
	loraOff   bool     // the page says that the server takes no adapters
	models    []pool.Model
	modelsAt  pool.Instant // when they were last published; 0 for never
	epoch     uint32       // of the endpoint when they were
	refused   atomic.Bool  // the list of models, for want of a key
	pageDue   pool.Instant
	modelsDue pool.Instant
	modelsGot pool.Instant // when the list was last asked for
	jitters   uint64
}

// specKey is what a scraper must be started anew for.
type specKey struct{ metricsURL, dialect string }

func keyOf(e *pool.Endpoint) specKey { return specKey{e.Spec().MetricsURL, e.Spec().Dialect} }

func newScraper(t *pool.Table, e *pool.Endpoint, o *Options, c *client, taken func(string) bool, floor *atomic.Int64) *scraper {
	s := &scraper{
		opts: o, table: t, endpoint: e, spec: keyOf(e), interval: o.Interval,
		locator: locator{client: c, base: e.URL, metricsURL: e.Spec().MetricsURL, taken: taken},
		jitters: e.IDHash,
		again:   make(chan struct{}, 1),
		floor:   floor,
	}
	s.state.Store(new(StateUnknown))
	switch name := e.Spec().Dialect; name {
	case "", Auto:
	case Custom:
		s.locator.dialect = o.Pools[e.Pool].custom
	default:
		s.locator.dialect = Lookup(name)
	}
	return s
}

// run scrapes until ctx ends.
func (s *scraper) run(ctx context.Context) {
	// A start together must not become scrapes together.
	defer s.locator.close()
	timer := time.NewTimer(s.jitter(min(s.opts.Interval/10, 50*time.Millisecond), 1))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.again:
			s.modelsDue = min(s.modelsDue, s.modelsGot.Add(modelsAtLeast))
			timer.Reset(max(0, min(s.pageDue, s.modelsDue).Sub(s.opts.Now())))
			continue
		case <-timer.C:
		}
		wait := s.guarded(ctx)
		if wait >= keepIdle {
			s.locator.close()
		}
		timer.Reset(wait)
	}
}

// guarded is step. What that reads comes from outside: a panic over it must not end the process.
func (s *scraper) guarded(ctx context.Context) (wait time.Duration) {
	defer func() {
		if v := recover(); v != nil {
			s.source = nil // looked for anew
			s.table.Observe(s.endpoint, pool.Observation{Before: s.endpoint.Booked(), At: s.opts.Now(), Err: fmt.Errorf("panic: %v", v)})
			wait = s.opts.MaxInterval
		}
	}()
	return s.step(ctx)
}

// jitter spreads d evenly over (1-share)·d to d, by the endpoint's ID and how often it was called.
func (s *scraper) jitter(d time.Duration, share float64) time.Duration {
	s.jitters = pool.Rendezvous(s.endpoint.IDHash, s.jitters+1)
	return d - time.Duration(share*float64(d)*float64(s.jitters>>11)/(1<<53))
}

// modelsAtLeast is how far apart two readings of the list of models are, however often it is asked for.
const modelsAtLeast = 100 * time.Millisecond

// jitterShare is how much shorter than its length an interval may be.
const jitterShare = 0.2

// step does what is due and returns how long until the next thing is.
func (s *scraper) step(ctx context.Context) time.Duration {
	if ctx.Err() != nil {
		return 0
	}
	s.lost, s.heard = nil, false
	if s.opts.Now() >= s.pageDue {
		wait := s.scrape(ctx)
		s.pageDue = s.due(wait)
	}
	if now := s.opts.Now(); now >= s.modelsDue && ctx.Err() == nil {
		s.modelsGot = now
		wait := s.readModels(ctx)
		s.modelsDue = s.due(wait)
	}
	if ctx.Err() == nil {
		s.reached()
	}
	return max(time.Millisecond, min(s.pageDue, s.modelsDue).Sub(s.opts.Now()))
}

// Scrapes fall due on ticks, the same for all endpoints: what is due together wakes the process once, and a process that
// is woken for each scrape spends more on that than on scraping. Longer ticks would make
// requests wait behind what a tick brings.
const (
	longestTick  = 16 * time.Millisecond
	shortestTick = 4 * time.Millisecond
	ticksOfWait  = 12 // at least so many ticks make an interval, so that endpoints stay spread
)

// due is when to do again what is wanted again after wait: a little sooner, so as not to fall due with all others.
func (s *scraper) due(wait time.Duration) pool.Instant {
	wait = s.jitter(s.affordable(wait), jitterShare)
	at := s.opts.Now().Add(wait)
	for tick := longestTick; tick >= shortestTick; tick /= 4 {
		if wait >= ticksOfWait*tick {
			return at - at%pool.Instant(tick)
		}
	}
	return at
}

// affordable is wait, or what there is time for with so many endpoints.
func (s *scraper) affordable(wait time.Duration) time.Duration {
	return max(wait, min(time.Duration(s.floor.Load()), s.opts.MaxInterval))
}

// lostAfter is how many steps in a row an endpoint that was there takes no connection until it is down: one can fail for a
// server that is busy, or that is being replaced at its address.
const lostAfter = 2

// reached draws from this step's connections whether the endpoint is there. Only those to its own address count: a page may
// be somewhere else.
func (s *scraper) reached() {
	switch {
	case s.heard:
		s.losses = 0
		switch {
		case s.source != nil && s.source.page == nil: // a dialect without a page
			s.enter(StateUnmeasured, nil)
		case *s.state.Load() == StateDown:
			s.pageDue = 0 // which tells what it is now
		}
	case s.lost != nil:
		// Whoever has no list of models is asked for one seldom, but this must be settled.
		s.modelsDue = min(s.modelsDue, s.opts.Now().Add(s.opts.ModelsInterval))
		if s.losses++; s.losses >= lostAfter || *s.state.Load() == StateUnknown {
			s.enter(StateDown, s.lost)
			if s.source != nil && s.source.page == nil {
				s.source = nil // what comes up may be another server
			}
		}
	}
}

// contact notes what asking url told of the endpoint being there.
func (s *scraper) contact(url string, err error) {
	e, failed := errors.AsType[*Error](err)
	if failed {
		url = e.URL
	}
	switch {
	case !strings.HasPrefix(url, s.endpoint.URL+"/") && !errors.Is(err, errAsleep) && !errors.Is(err, errRouter):
	case failed && e.Fault.Unconnected():
		s.lost = err
	default:
		s.heard = true
	}
}

// scrape reads the page, tells the table, and returns when to do so again.
func (s *scraper) scrape(ctx context.Context) time.Duration {
	before, start := s.endpoint.Booked(), s.opts.Now()
	var err error
	if s.source == nil {
		s.source, err = s.locator.locate(ctx)
	} else if s.source.page != nil {
		err = s.locator.read(ctx, s.source)
	}
	if ctx.Err() != nil {
		return 0
	}
	now := s.opts.Now()
	if s.source != nil && s.source.page == nil {
		return s.opts.MaxInterval // the list of models tells whether it is there
	}
	if s.source != nil {
		s.contact(s.source.url, err)
	} else {
		s.contact("", err)
	}
	o := pool.Observation{Before: before, At: now, Took: now.Sub(start), Err: err}
	report := Scrape{Fault: faultOf(err), Took: o.Took}
	switch {
	case err == nil:
		raw := s.source.read(s.opts.Wall())
		o.Load = raw.Load()
		report.PageBytes, report.Skipped, report.Anomalies = s.source.page.bytes, s.source.page.skipped, raw.Anomalies
	case untouched(err):
		// It is there, and that is all we may know.
		o.Load = (&Raw{Dialect: s.source.dialect.Name}).Load()
	}
	if s.opts.OnScrape != nil {
		s.opts.OnScrape(s.endpoint, report)
	}
	restarted := s.table.Observe(s.endpoint, o)
	if o.Load == nil {
		return s.failed(err)
	}
	s.failures = 0
	switch {
	case o.Load.Sleeping, errors.Is(err, errAsleep):
		s.enter(StateAsleep, err)
	case errors.Is(err, errRouter):
		s.enter(StateUnmeasured, err)
	default:
		s.enter(StateUp, nil)
	}
	s.loraOff = o.Load.Known.Has(pool.KnowsMaxAdapters) && o.Load.MaxAdapters == 0
	if restarted || !equalStrings(s.adapters, o.Load.Adapters) {
		s.modelsDue = 0
	}
	s.adapters = o.Load.Adapters
	return s.pace(o)
}

// read evaluates the page that was read last.
func (src *source) read(wall time.Time) *Raw {
	raw := src.dialect.raw(src.page, float64(wall.UnixMilli())/1000)
	if !raw.StartTime.Known { // llama.cpp says it beside the page
		if v, err := strconv.ParseFloat(src.header.Get("Process-Start-Time-Unix"), 64); err == nil && v > 0 {
			raw.StartTime = known(v)
		}
	}
	return raw
}

func equalStrings(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// Numbers that decide how often a page is worth reading.
const (
	shortHeadroom   = 0.8 // KV utilization from which free space may run out before the next scrape
	calmGrowth      = 1.5 // how fast the interval grows while bookings explain what is seen
	renderAllowance = 20  // a page that takes t to come isn't asked for more often than each 20·t: servers render it on the loop that streams
	relocateAfter   = 3   // faults of the page in a row before it is looked for again
)

// pace chooses the interval: short where others send load too or space is short, growing where our bookings explain
// what the page says.
func (s *scraper) pace(o pool.Observation) time.Duration {
	l := o.Load
	n, ok := l.Requests()
	foreign := ok && int64(n) > max(o.Before.Requests, s.endpoint.Booked().Requests)
	switch {
	case foreign || l.Waiting > 0 || l.KVCacheUtilizationMax > shortHeadroom:
		s.interval = s.opts.MinInterval
	default:
		s.interval = time.Duration(min(float64(s.opts.MaxInterval), calmGrowth*float64(s.interval)))
	}
	wait := max(s.interval, min(renderAllowance*o.Took, s.opts.MaxInterval))
	if a := &s.source.dialect.Adapters; !s.loraOff && (a.Info != nil || a.Named != nil) {
		// An adapter that comes or goes on the page must be known within 2 s.
		wait = min(wait, max(s.opts.ModelsInterval, s.opts.MinInterval))
	}
	return wait
}

// failed notes a failure and returns when to try again: soon at first, then less and less often.
func (s *scraper) failed(err error) time.Duration {
	s.failures++
	s.interval = s.opts.Interval
	if faultOf(err).reachable() && s.failures >= relocateAfter {
		s.source = nil
	}
	// One slow or broken answer of a server that was up is no change of state, and whether it is down is seen elsewhere.
	if s.lost == nil && (*s.state.Load() != StateUp || s.failures > 1) {
		s.enter(StateUnmeasured, err)
	}
	wait := s.opts.Interval
	for i := 1; i < s.failures && wait < s.opts.MaxBackoff; i++ {
		wait *= 2
	}
	return min(wait, s.opts.MaxBackoff)
}

func (s *scraper) enter(to State, err error) {
	from := *s.state.Load()
	// A request may have found it there in the meantime.
	changed := s.table.SetState(s.endpoint, pool.Unreachable, to == StateDown, s.opts.Now())
	if from == to && (to != StateDown || !changed) {
		return
	}
	if from == to {
		from = StateUp
	}
	s.table.SetState(s.endpoint, pool.Unmeasured, to == StateUnmeasured, s.opts.Now())
	s.state.Store(&to)
	if s.opts.OnState != nil {
		s.opts.OnState(s.endpoint, from, to, err)
	}
}

// modelsWithoutList is how often a server that has no list of models is asked whether it has one now.
const modelsWithoutList = 30 * time.Second

// modelsURL is where e lists its models; src may be nil.
func modelsURL(e *pool.Endpoint, src *source) string {
	if src != nil && src.dialect.Props {
		return e.URL + "/models" // llama.cpp: the same list, and sure not to wake it
	}
	return e.URL + "/v1/models"
}

// readModels reads the list of models, tells the table if it changed, and returns when to do so again.
func (s *scraper) readModels(ctx context.Context) time.Duration {
	url := modelsURL(s.endpoint, s.source)
	models, err := s.locator.models(ctx, url)
	if ctx.Err() != nil {
		return 0
	}
	s.contact(url, err)
	if refused := faultOf(err) == FaultUnauthorized; refused != s.refused.Load() && (refused || err == nil) {
		s.refused.Store(refused)
		if s.opts.OnRefused != nil {
			s.opts.OnRefused(s.endpoint, err)
		}
	}
	s.table.SetServedError(s.endpoint, err)
	if err != nil {
		if f := faultOf(err); f.reachable() {
			return modelsWithoutList
		}
		return s.opts.ModelsInterval
	}
	if s.modelsAt == 0 || s.epoch != s.endpoint.Epoch() || !sameModels(s.models, models) {
		now := s.opts.Now()
		s.epoch, s.models, s.modelsAt = s.endpoint.Epoch(), models, now
		s.table.SetServed(s.endpoint, &pool.Served{Models: models, At: now})
	}
	if s.loraOff {
		return max(s.opts.ModelsInterval, s.opts.SlowModelsInterval)
	}
	return s.opts.ModelsInterval
}
