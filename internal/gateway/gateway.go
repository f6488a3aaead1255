// Package gateway makes one gateway out of a configuration: table, discovery, scrapers, policies, data path and admin
// listener, started in order, reloaded as a whole, and drained at the end. Everything it starts has ended when Run
// returns, so that tests start and stop gateways within their process. It must not import cli.
package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/discovery"
	"kvgate/internal/adapters"
	"kvgate/internal/admin"
	"kvgate/internal/auth"
	"kvgate/internal/names"
	"kvgate/internal/quota"
	"kvgate/internal/tracing"
	"kvgate/internal/version"
	"kvgate/metrics"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// Options are what a gateway needs besides its configuration. The zero value works.
type Options struct {
	// Load reads the configuration again, for Reload and for the watch on the file. nil: neither.
	Load func() (*config.Config, error)
	// WatchEvery is how often the file is looked at (default 2s); negative: never.
	WatchEvery time.Duration
	// StartTimeout is how long the start waits for a first look at the endpoints before it listens all the same
	// (default 10s).
	StartTimeout time.Duration
	// LogOutput is where the log goes unless the configuration names a file (default standard error).
	LogOutput io.Writer
	// Sink gets every finished request, after the gateway's own books.
	Sink telemetry.Sink
	// Recent is how many requests /debug/decisions remembers (default 4096).
	Recent int
	// Cut ends what is left of the drain at once. nil: never.
	Cut context.Context
	// Rand is handed to the policies; see scoring.Config.
	Rand func(n uint64) uint64
	// Listeners are open sockets for clients and AdminListener is one for the admin listener, from whoever started this
	// process. Without them Run opens listen and admin.listen. Run and Close close them.
	Listeners     []net.Listener
	AdminListener net.Listener
}

// A Gateway is one gateway. Make it with New and call Run once.
type Gateway struct {
	o     Options
	log   *zap.Logger
	logs  *logs
	start time.Time

	table     *pool.Table
	metrics   *telemetry.Metrics
	recent    *telemetry.Recent
	explainer *explainer
	tracer    *tracing.Tracer // nil: nothing is traced
	handler   *proxy.Handler
	server    *proxy.Server
	scrapers  *metrics.Manager
	discovery *discovery.Manager
	adapters  *adapters.Manager
	admin     *admin.Server

	syncing   sync.Mutex // serialises syncScrapers
	reloading sync.Mutex // serialises reloads; guards learners and lastBad
	learners  map[string]*scoring.Learner
	index     *scoring.Index               // of prompt prefixes, of all pools
	saved     map[[3]string]*savedEndpoint // of a state file, of endpoints not seen yet; under taking
	savedAt   time.Time                    // when that was written
	taking    sync.Mutex                   // serialises takeUpState
	tokens    *tokens                      // guarded by reloading
	serving   bool                         // Run has begun and not ended; guarded by reloading
	ring      atomic.Pointer[auth.Tokens]  // in use; nil: none
	limiter   *quota.Limiter               // of the configuration in use, or before it; guarded by reloading
	store     *store                       // in use; nil: none; guarded by reloading
	usage     usageSink
	record    recordSink
	captures  captures
	lastBad   string                        // what a reload complained of, so that a watch says it once
	running   *config.Config                // that it was started with: what needs a restart is as it says
	cfg       atomic.Pointer[config.Config] // in use
	decides   atomic.Pointer[decider]       // in use

	states   states
	beats    atomic.Uint64
	draining atomic.Bool
	started  atomic.Bool   // the data listener is open
	ready    chan struct{} // closed then
	closing  sync.Once
	drained  proxy.Drained

	mu              sync.Mutex // guards what follows
	addr, adminAddr string
}

// A Result is how a gateway ended.
type Result struct {
	proxy.Drained
	Forced bool // Options.Cut ended the drain
}

// New builds a gateway. It opens no listener and talks to nobody until Run. Without Run, Close releases it.
func New(cfg *config.Config, o Options) (*Gateway, error) {
	o.StartTimeout = cmp.Or(o.StartTimeout, 10*time.Second)
	o.WatchEvery = cmp.Or(o.WatchEvery, 2*time.Second)
	o.Recent = cmp.Or(o.Recent, 4096)
	if o.LogOutput == nil {
		o.LogOutput = os.Stderr
	}
	if o.Cut == nil {
		o.Cut = context.Background()
	}
	l, err := newLogs(&cfg.Log, o.LogOutput)
	if err != nil {
		return nil, err
	}
	g := &Gateway{
		o: o, log: l.logger, logs: l, start: time.Now(),
		learners: make(map[string]*scoring.Learner),
		ready:    make(chan struct{}),
		index:    scoring.NewIndex(int(cfg.Limits.PrefixIndexBytes)),
	}
	b, err := g.build(cfg)
	if err != nil {
		return nil, err
	}
	g.running = cfg
	g.useTokens(b.tokens)
	g.useQuotas(b)
	g.cfg.Store(cfg)
	g.decides.Store(b.decider())
	// A page of observations is published at a time: with many endpoints, each by itself would copy the table too often.
	g.table = pool.NewTable(b.pools, pool.Options{PublishEvery: publishEvery})
	g.metrics = telemetry.New(telemetry.Options{Table: g.table, Now: g.now, StaleAfter: g.staleAfter, Native: cfg.Metrics.NativeHistograms, Sources: g.sources, Usage: func() telemetry.Usage { return g.server.Usage() }})
	g.metrics.SetTenants(namedTenants(cfg), cfg.Metrics.Tenants)
	g.metrics.SetReload(true, time.Now())
	g.metrics.RegisterRecorded(g.record.counts)
	g.captures.init(cfg.Debug.Capture)
	g.metrics.RegisterCapture(g.captures.running.Load)
	g.recent = telemetry.NewRecent(o.Recent)
	g.explainer = newExplainer(cfg.Debug.ExplainShare, g.log)
	g.logs.explanation = g.explainer.get
	if g.scrapers, err = metrics.NewManager(g.table, b.scrape); err != nil {
		return nil, err
	}
	g.newAdapters()
	sinks := telemetry.Sinks{g.metrics, g.logs, g.recent, &g.usage, &g.record, g.adapters}
	if o.Sink != nil {
		sinks = append(sinks, o.Sink)
	}
	if g.tracer, err = newTracer(cfg.Tracing, g.log); err != nil {
		return nil, err
	}
	if g.tracer != nil {
		sinks = append(sinks, g.tracer)
	}
	if err := g.newDataPath(cfg, b, sinks); err != nil {
		return nil, err
	}
	g.adapters.Configure(b.adapters)
	g.metrics.Registry().MustRegister(telemetry.NewAdmissionCollector(g.admissionState))
	if g.discovery, err = g.newDiscovery(g.apply); err != nil {
		g.Close()
		return nil, err
	}
	ao := admin.Options{
		Table: g.table, Now: g.now, Metrics: g.metrics.Handler(), Recent: g.recent, Names: g.names, StaleAfter: g.staleAfter, Unseen: g.isUnseen, Missing: g.missing,
		Config: g.showConfig, Explain: g.Explain, Learned: g.learned, Explanation: g.explainer.get, InFlight: g.handler.Active, Waiting: g.waitingRequests,
		Policy: func(pool string) string {
			if p := g.decides.Load().policies[pool]; p != nil {
				return p.Name()
			}
			return ""
		},
		Token: func() string { return g.cfg.Load().Admin.Token.Reveal() }, Drain: g.drainEndpoint,
		SetLogLevel: g.setLogLevel, Capture: g.capture, LogLevel: func() string { return g.logs.level.Level().String() },
		Sources: func() any { return g.discovery.Status() }, Adapters: func() any { return map[string]any{"adapters": g.adapters.Status()} }, MaxBodyBytes: int64(cfg.Limits.BodyBytes), Log: g.log,
	}
	if o.Load != nil {
		ao.Reload = func(context.Context) (admin.ReloadResult, error) { return g.Reload("request") }
	}
	g.admin = admin.New(ao)
	return g, nil
}

const (
	publishEvery = 20 * time.Millisecond
	sweepEvery   = 10 * time.Second
)

func (g *Gateway) newDataPath(cfg *config.Config, b *parts, sink telemetry.Sink) (err error) {
	g.handler, err = proxy.New(proxy.Options{
		Table: g.table, Routes: b.routes, Now: g.now, Sink: sink, Log: g.log,
		Limits: proxy.Limits{
			InFlightBodyBytes:   int64(cfg.Limits.InFlightBodyBytes),
			EndpointConnections: cfg.Limits.EndpointConnections,
			ResponseHeaderBytes: int(cfg.Limits.ResponseHeaderBytes),
		},
		Forwarded: cfg.Headers.Forwarded, ReplaceRequestID: cfg.Headers.RequestID == "replace",
		OnReached: g.onReached,
		OnDoubt:   func(e *pool.Endpoint) { g.scrapers.ReadModels(e) },
		Explainer: g.explainer,
		Trace:     g.tracer != nil, TraceRatio: traceRatio(cfg.Tracing),
		DebugHeaders: cfg.Debug.Headers, DebugHeader: cfg.Debug.RequestHeader,
	})
	if err != nil {
		return err
	}
	so := proxy.ServerOptions{
		HeaderBytes: int(cfg.Limits.HeaderBytes), BodyBytes: int64(cfg.Limits.BodyBytes), ExtensionBytes: int(cfg.Limits.ChunkExtensionBytes),
		HeaderTimeout: cfg.Timeouts.Header, BodyTimeout: cfg.Timeouts.Body, WriteTimeout: cfg.Timeouts.Write,
		KeepAlive: cfg.Timeouts.KeepAlive, Connections: cfg.Limits.Connections, IgnoreHalfClose: cfg.Limits.HalfClose == "waiting",
		DrainDelay: cfg.Drain.Delay, DrainTimeout: some(cfg.Drain.Timeout),
		OnAcceptError: func(err error) { g.log.Warn("cannot accept connections for a moment", zap.Error(err)) },
	}
	if b.certs != nil {
		so.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if g.server, err = proxy.NewServer(g.handler, so); err != nil {
		g.handler.Close()
		return err
	}
	if b.certs != nil {
		g.server.SetCertificates(b.certs)
	}
	return nil
}

// now is the clock of everything in this gateway: monotonic, and never the zero Instant.
func (g *Gateway) now() pool.Instant { return pool.Instant(time.Since(g.start)) + 1 }

// staleAfter is the age at which a load is no longer believed.
func (g *Gateway) staleAfter() time.Duration { return g.cfg.Load().Scrape.StaleAfter }

// Table returns the table that requests are decided on.
func (g *Gateway) Table() *pool.Table { return g.table }

// Ready is closed when the gateway accepts requests.
func (g *Gateway) Ready() <-chan struct{} { return g.ready }

// Addr is the host:port that clients connect to, "" before Ready.
func (g *Gateway) Addr() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.addr
}

// Beats grows every 20 ms while the gateway runs and its table can be written: one that stands still is stuck.
func (g *Gateway) Beats() uint64 { return g.beats.Load() }

// AdminAddr is the host:port of the admin listener, "" before it listens.
func (g *Gateway) AdminAddr() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.adminAddr
}

// Run serves until ctx ends, and then drains: readiness fails at once, after drain.delay nothing new is accepted, and
// what still runs after drain.timeout is cut off. It returns when everything has ended.
func (g *Gateway) Run(ctx context.Context) (Result, error) {
	defer g.Close()
	cfg, v := g.cfg.Load(), version.Get()
	g.log.Info("starting", zap.String("version", v.Version), zap.String("revision", v.Revision), zap.String("config", cfg.File()),
		zap.String("hash", cfg.Hash()), zap.Int("pools", len(cfg.Pools)))
	for _, w := range cfg.Warnings() {
		g.log.Warn("configuration", zap.String("problem", w.Error()))
	}

	var running sync.WaitGroup
	defer running.Wait()
	failed := make(chan error, 2+len(g.o.Listeners))
	serve := func(run func() error) {
		running.Go(func() {
			if err := run(); err != nil {
				failed <- err
			}
		})
	}
	// The admin listener first: whoever waits for readiness can ask what is missing.
	adminLn, err := g.listenAdmin(cfg)
	if err != nil {
		return Result{}, err
	}
	err = g.tryToListen(cfg)
	if err == nil {
		// Only now: until then another gateway may be at work with the same files.
		err = errors.Join(g.startUsage(), g.startRecord())
	}
	if err != nil {
		_ = adminLn.Close()
		return Result{}, err
	}
	g.mu.Lock()
	g.adminAddr = adminLn.Addr().String()
	g.mu.Unlock()
	serve(func() error { return g.admin.Serve(adminLn) })
	defer func() {
		wait, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		g.captures.end() // or it would be waited for
		g.admin.Shutdown(wait)
	}()

	loops, stop := context.WithCancel(context.Background())
	defer stop()
	shared := make(map[pool.SharedName]bool)
	running.Go(func() {
		g.every(loops, publishEvery, func() {
			g.table.Flush(g.now())
			g.takeUpState()
			g.warnShared(shared)
			g.beats.Add(1)
		})
	})
	running.Go(func() { g.every(loops, sweepEvery, func() { g.metrics.Sweep(g.table.Load(), sweepEvery) }) })

	running.Go(g.index.FaultIn)
	g.loadState()
	g.startTokens()
	g.reloading.Lock() // a reload may have come first, and what it set up is to stay
	g.discovery.SetPools(g.cfg.Load().Pools)
	g.reloading.Unlock()
	if !g.awaitFirstTable(ctx) {
		return Result{}, nil // told to stop before it began
	}
	g.table.Flush(g.now())
	g.takeUpState()
	lns, err := g.listen(cfg)
	if err != nil {
		return Result{}, err
	}
	g.mu.Lock()
	g.addr = lns[0].Addr().String()
	g.mu.Unlock()
	for _, ln := range lns {
		serve(func() error { return g.server.Serve(ln) })
	}
	g.started.Store(true)
	close(g.ready)
	g.logListening()
	if g.o.Load != nil && g.o.WatchEvery > 0 {
		running.Go(func() { g.watch(loops) })
	}

	select {
	case <-ctx.Done():
	case err = <-failed:
		g.log.Error("a listener failed", zap.Error(err))
	}
	return g.drain(), err
}

// logListening says that requests are taken, and whether there is anybody to send them to.
func (g *Gateway) logListening() {
	s, now := g.table.Load(), g.now()
	up := 0
	for i := range s.Rows {
		if r := &s.Rows[i]; r.Healthy(now) && !g.isUnseen(r.Endpoint) {
			up++
		}
	}
	fields := []zap.Field{
		zap.String("listen", g.Addr()), zap.String("admin", g.AdminAddr()),
		zap.Int("endpoints", len(s.Rows)), zap.Int("endpoints_up", up), zap.Strings("models", g.modelNames(s, 20)),
	}
	if missing := g.missing(); len(missing) > 0 {
		g.log.Warn("listening, not ready", append(fields, zap.Strings("missing", missing))...)
		return
	}
	g.log.Info("ready", fields...)
}

// drain ends the data path as Run promises.
func (g *Gateway) drain() Result {
	g.draining.Store(true)
	g.metrics.SetDraining()
	g.log.Info("draining", zap.Int("running", g.handler.Active()), zap.Duration("delay_seconds", g.cfg.Load().Drain.Delay))
	progress, stop := context.WithCancel(context.Background())
	var told sync.WaitGroup
	told.Go(func() {
		g.every(progress, 5*time.Second, func() { g.log.Info("waiting for requests to end", zap.Int("running", g.handler.Active())) })
	})
	g.close(g.o.Cut)
	stop()
	told.Wait()
	if err := g.saveState(); err != nil {
		g.log.Warn("state not saved; the next start knows nothing", zap.String("file", g.cfg.Load().State.File), zap.Error(err))
	}
	r := Result{Drained: g.drained, Forced: g.o.Cut.Err() != nil}
	g.log.Info("stopped", zap.Int("finished", r.Finished), zap.Int("cut", r.Cut), zap.Bool("forced", r.Forced))
	return r
}

// Close ends what New has started, cutting requests off. Run calls it.
func (g *Gateway) Close() {
	cut, cancel := context.WithCancel(context.Background())
	cancel()
	g.close(cut)
}

// close drains until cut ends and releases everything; only the first call does.
func (g *Gateway) close(cut context.Context) {
	g.closing.Do(func() {
		g.captures.end()
		g.drained = g.server.Shutdown(cut)
		if g.discovery != nil {
			g.discovery.Close()
		}
		g.adapters.Close()
		g.scrapers.Stop()
		g.handler.Close()
		g.closeTokens()
		g.closeTracer()
		g.closeQuotas()
		g.closeUsage()
		g.closeRecord()
		g.closeListeners()
	})
}

// every calls fn at intervals until ctx ends.
func (g *Gateway) every(ctx context.Context, interval time.Duration, fn func()) {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			fn()
		case <-ctx.Done():
			return
		}
	}
}

// missing lists what keeps the gateway from being ready.
func (g *Gateway) missing() []string {
	if g.draining.Load() {
		return []string{"draining"}
	}
	var out []string
	if !g.started.Load() {
		out = append(out, "starting")
		if w := g.unseen(); len(w) > 0 {
			out = append(out, "waiting for a first look at "+strings.Join(w, ", "))
		}
	}
	out = append(out, g.authMissing()...)
	s, now := g.table.Load(), g.now()
	counts := make(map[string]int)
	for i := range s.Rows {
		r := &s.Rows[i]
		switch {
		case g.isUnseen(r.Endpoint):
			counts["unknown"]++
		case r.State&(pool.Unroutable|pool.Unreachable) == 0: // where all are ejected, they are tried
			return out
		default:
			counts[r.States(now)[0]]++
		}
	}
	if g.waitsForEndpoints() {
		return out // requests wait here for the first one
	}
	if len(s.Rows) == 0 {
		out = append(out, "no endpoint is known")
		for _, st := range g.discovery.Status() {
			if st.LastError != "" {
				out = append(out, "pool "+st.Pool+": "+st.Source+": "+st.LastError)
			}
		}
		return out
	}
	var states []string
	for _, st := range slices.Sorted(maps.Keys(counts)) {
		states = append(states, fmt.Sprintf("%d %s", counts[st], st))
	}
	return append(out, fmt.Sprintf("no endpoint is up (of %d: %s); kvgate endpoints says why", len(s.Rows), strings.Join(states, ", ")))
}

// apply takes a pool's endpoints from discovery.
func (g *Gateway) apply(name string, targets []discovery.Target) {
	added, removed, err := g.table.SetEndpoints(name, targets, g.now())
	if err != nil {
		g.log.Error("endpoints not taken over", zap.String("pool", name), zap.Error(err))
		return
	}
	for _, e := range added {
		g.log.Info("endpoint added", zap.String(telemetry.FieldEndpoint, e.ID), zap.String("url", e.URL))
	}
	for _, e := range removed {
		g.log.Info("endpoint removed", zap.String(telemetry.FieldEndpoint, e.ID), zap.Int64("running", e.Booked().Requests))
	}
	g.syncScrapers()
}

// syncScrapers has exactly the table's endpoints scraped.
func (g *Gateway) syncScrapers() {
	g.syncing.Lock() // discovery and reloads come at the same time, and the later table is to have the last word
	defer g.syncing.Unlock()
	s := g.table.Load()
	endpoints := make([]*pool.Endpoint, len(s.Rows))
	for i := range s.Rows {
		endpoints[i] = s.Rows[i].Endpoint
	}
	g.states.keep(endpoints)
	if err := g.scrapers.Sync(endpoints); err != nil {
		g.log.Error("some endpoints are not scraped", zap.Error(err))
	}
}

func (g *Gateway) onScrape(e *pool.Endpoint, s metrics.Scrape) {
	g.metrics.ObserveScrape(e.ID, s.Took, cmp.Or(string(s.Fault), "ok"))
}

func (g *Gateway) onState(e *pool.Endpoint, from, to metrics.State, err error) {
	if before := g.states.set(e, to); before == to {
		return
	} else if before != "" {
		from = before
	}
	log := g.log.Info
	if to == metrics.StateDown {
		log = g.log.Warn
	}
	was, is := g.statesAround(e, from, to)
	log("endpoint "+string(to), zap.String(telemetry.FieldEndpoint, e.ID), zap.String("from", was), zap.String("to", is), zap.Error(err))
}

// statesAround is everything that held of e before scraping changed what it says of it, and what holds now: it may be
// ejected or draining, too.
func (g *Gateway) statesAround(e *pool.Endpoint, from, to metrics.State) (was, is string) {
	s, now := g.table.Load(), g.now()
	for i := range s.Rows {
		if s.Rows[i].Endpoint != e {
			continue
		}
		row := s.Rows[i]
		words := func(st metrics.State) string {
			row.State &^= pool.Unreachable | pool.Sleeping | pool.Unmeasured
			switch st {
			case metrics.StateUnknown:
				return string(st)
			case metrics.StateDown:
				row.State |= pool.Unreachable
			case metrics.StateAsleep:
				row.State |= pool.Sleeping
			case metrics.StateUnmeasured:
				row.State |= pool.Unmeasured
			}
			return row.StateWords(now)
		}
		return words(from), words(to)
	}
	return string(from), string(to)
}

// onRefused logs that e does not tell its models for want of a key, or that it does again.
func (g *Gateway) onRefused(e *pool.Endpoint, err error) {
	if err == nil {
		g.log.Info("list of models accepted again", zap.String(telemetry.FieldEndpoint, e.ID))
		return
	}
	g.log.Warn("list of models refused", zap.String(telemetry.FieldEndpoint, e.ID), zap.Error(err))
}

// warnShared logs each name that two pools serve, once.
func (g *Gateway) warnShared(told map[pool.SharedName]bool) {
	for _, sh := range g.table.Load().Shared {
		if !told[sh] && len(told) < 1000 {
			told[sh] = true
			g.log.Warn("two pools serve the same name; the first gets all of its requests", zap.String(telemetry.FieldModel, sh.Name),
				zap.String(telemetry.FieldPool, sh.Pool), zap.String("other", sh.Other))
		}
	}
}

// onReached takes in that an endpoint that was down answered a request.
func (g *Gateway) onReached(e *pool.Endpoint) {
	if g.table.SetState(e, pool.Unreachable, false, g.now()) {
		g.onState(e, metrics.StateDown, metrics.StateUp, nil)
	}
}

// isUnseen reports whether e has not been looked at yet.
func (g *Gateway) isUnseen(e *pool.Endpoint) bool { return g.states.get(e) == "" }

// names resolves the names of requests, as configured now.
func (g *Gateway) names() *names.Resolver { return g.decides.Load().names }

// modelNames are at most n names that clients may ask for, base models first.
func (g *Gateway) modelNames(s *pool.Snapshot, n int) []string {
	var ids []string
	for _, m := range admin.Models(s, g.names()).Models {
		ids = append(ids, m.ID)
	}
	return ids[:min(n, len(ids))]
}

var errNoReload = errors.New("this gateway was started without a file to reload")

// states is what scraping last said of each endpoint.
type states struct {
	mu sync.Mutex
	m  map[*pool.Endpoint]metrics.State
}

// set returns what was there before; "" if nothing was.
func (s *states) set(e *pool.Endpoint, st metrics.State) (before metrics.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = make(map[*pool.Endpoint]metrics.State)
	}
	before = s.m[e]
	s.m[e] = st
	return before
}

func (s *states) get(e *pool.Endpoint) metrics.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m[e]
}

func (s *states) keep(endpoints []*pool.Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.m {
		if !slices.Contains(endpoints, e) {
			delete(s.m, e)
		}
	}
}
