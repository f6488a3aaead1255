package telemetry

import (
	"maps"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kvgate/internal/version"
	"kvgate/pool"
)

// Options configure [New].
type Options struct {
	// Table is shown when the metrics are read. Without one there are no metrics of endpoints.
	Table *pool.Table
	// Now is the table's clock; required with Table.
	Now func() pool.Instant
	// Sources says how discovery is doing when the metrics are read. Without it there are no metrics of discovery.
	Sources func() []Source
	// Usage says what the gateway itself has in use when the metrics are read. Without it there are no metrics of that.
	Usage func() Usage
	// StaleAfter is the age at which a load is no longer shown; nil: however old.
	StaleAfter func() time.Duration
	// MaxModels bounds how many names that clients made up become values of the model label (default 1000). Names that
	// are configured or served are always shown.
	MaxModels int
	// KeepUnserved is how long a name that is no longer served keeps its series after its last request (default 1 hour).
	KeepUnserved time.Duration
	// Native gives histograms native buckets besides the advised ones, for scrapers that ask for them.
	Native bool
}

const (
	defaultMaxModels    = 1000
	defaultKeepUnserved = time.Hour
	maxLabelBytes       = 256
)

// Metrics are kvgate's own metrics, on a registry of their own. Observe and the methods that count may be called by any
// goroutine; they take no lock and allocate nothing once a pool and model have been seen.
type Metrics struct {
	opts     Options
	registry *prometheus.Registry

	requests, tokens, attempts, bytesIn, bytesOut, scrapes           *prometheus.CounterVec
	duration, firstToken, perToken, queue, decision, ratio, overhead *prometheus.HistogramVec
	scrapeDuration                                                   prometheus.Histogram
	reloadOK, reloadAt, draining                                     prometheus.Gauge
	folded                                                           prometheus.Counter

	// Handles, so that counting a request hashes a few short strings and no label sets. Readers load the maps without a
	// lock; writers copy them under mu. They grow with configured and served names and at most MaxModels others.
	models    atomic.Pointer[map[modelKey]*modelSeries]
	pools     atomic.Pointer[map[string]*poolSeries]
	endpoints atomic.Pointer[map[string]*endpointSeries]
	mu        sync.Mutex // serialises writers of the maps and of the lists in their values
	made      int        // names that clients made up and that have series; under mu

	generation atomic.Uint32 // counts sweeps

	tenants tenants
}

type modelKey struct{ pool, model string }

// modelSeries are the handles of one pool and model.
type modelSeries struct {
	duration, firstToken, perToken prometheus.Observer
	input, output, cached          prometheus.Counter
	outcomes                       atomic.Pointer[[]outcomeCounter]
	used                           atomic.Uint32 // the generation of the latest request
}

type outcomeCounter struct {
	outcome string
	code    int
	n       prometheus.Counter
}

type poolSeries struct {
	queue, decision   prometheus.Observer
	ratio, overhead   prometheus.Observer
	bytesIn, bytesOut prometheus.Counter
}

type endpointSeries struct {
	attempts, scrapes atomic.Pointer[[]outcomeCounter]
	missing           bool // not in the table at the last sweep; under mu
}

// gcShare are the runtime's metrics that say how much of the processor time goes into collecting garbage.
var gcShare = regexp.MustCompile(`^/cpu/classes/(gc/total|total):cpu-seconds$`)

// New returns metrics that count from zero.
func New(o Options) *Metrics {
	if o.MaxModels == 0 {
		o.MaxModels = defaultMaxModels
	}
	if o.KeepUnserved == 0 {
		o.KeepUnserved = defaultKeepUnserved
	}
	if o.Table != nil && o.Now == nil {
		panic("BUG: telemetry.Options.Now is required with Table")
	}
	m := &Metrics{opts: o, registry: prometheus.NewRegistry()}
	m.models.Store(&map[modelKey]*modelSeries{})
	m.pools.Store(&map[string]*poolSeries{})
	m.endpoints.Store(&map[string]*endpointSeries{})

	counters := func(d *Definition) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: d.Name, Help: d.Help}, d.Labels)
		m.registry.MustRegister(v)
		return v
	}
	histograms := func(d *Definition) *prometheus.HistogramVec {
		ho := prometheus.HistogramOpts{Name: d.Name, Help: d.Help, Buckets: d.Buckets}
		if o.Native {
			ho.NativeHistogramBucketFactor, ho.NativeHistogramMaxBucketNumber, ho.NativeHistogramMinResetDuration = 1.1, 100, time.Hour
		}
		v := prometheus.NewHistogramVec(ho, d.Labels)
		m.registry.MustRegister(v)
		return v
	}
	gauge := func(d *Definition) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: d.Name, Help: d.Help})
		m.registry.MustRegister(g)
		return g
	}
	m.requests, m.tokens, m.attempts = counters(Requests), counters(Tokens), counters(Attempts)
	m.tenants.requests, m.tenants.tokens = counters(TenantRequests), counters(TenantTokens)
	m.tenants.series.Store(&map[string]*tenantSeries{})
	m.SetTenants(nil, 0)
	m.bytesIn, m.bytesOut, m.scrapes = counters(RequestBytes), counters(ResponseBytes), counters(Scrapes)
	m.duration, m.firstToken, m.perToken = histograms(RequestDuration), histograms(TimeToFirstToken), histograms(TimePerOutputToken)
	m.overhead = histograms(Overhead)
	m.queue, m.decision, m.ratio = histograms(QueueDuration), histograms(DecisionDuration), histograms(PredictionRatio)
	m.reloadOK, m.reloadAt, m.draining = gauge(ReloadSuccessful), gauge(ReloadTimestamp), gauge(Draining)
	m.folded = counters(LabelsFolded).WithLabelValues()
	m.scrapeDuration = histograms(ScrapeDuration).WithLabelValues().(prometheus.Histogram)

	v := version.Get()
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: BuildInfo.Name, Help: BuildInfo.Help}, BuildInfo.Labels)
	info.WithLabelValues(v.Version, v.Revision, v.GoVersion).Set(1)
	m.registry.MustRegister(info, collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(collectors.GoRuntimeMetricsRule{Matcher: gcShare})), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if o.Table != nil {
		m.registry.MustRegister(newTableCollector(&o))
	}
	if o.Sources != nil {
		m.registry.MustRegister(newSourceCollector(o.Sources))
	}
	if o.Usage != nil {
		registerUsage(m.registry, o.Usage)
	}
	return m
}

// Registry is where other parts of the gateway may register metrics that are in [Definitions].
func (m *Metrics) Registry() *prometheus.Registry { return m.registry }

// Handler serves the metrics page.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4,
		Timeout:             30 * time.Second,
		ErrorHandling:       promhttp.ContinueOnError, // one bad family must not hide the others
	})
}

// Observe implements [Sink]: it counts one finished request.
func (m *Metrics) Observe(r *Record) {
	s := m.series(r)
	s.count(m, r)
	m.observeTenant(r)
	for i := range r.Attempts {
		a := &r.Attempts[i]
		e := m.endpoint(a.Endpoint)
		count(m, &e.attempts, a.Outcome, 0, func(outcome string, _ int) prometheus.Counter {
			return m.attempts.WithLabelValues(strings.Clone(a.Endpoint), outcome)
		})
	}
	if r.Pool == "" {
		return // such requests have no timings that anybody could act on
	}
	p := m.pool(r.Pool)
	p.bytesIn.Add(float64(max(0, r.BytesIn)))
	p.bytesOut.Add(float64(max(0, r.BytesOut)))
	if r.Decided {
		p.queue.Observe(r.QueueSeconds)
		p.decision.Observe(r.DecisionSeconds)
		if r.OverheadSeconds > 0 {
			p.overhead.Observe(r.OverheadSeconds)
		}
		if r.PredictedSeconds > 0 && r.AnsweredSeconds > 0 && r.Status < 400 {
			p.ratio.Observe(r.AnsweredSeconds / r.PredictedSeconds)
		}
	}
	s.duration.Observe(r.DurationSeconds)
	if r.TTFTSeconds > 0 && r.Status < 400 {
		s.firstToken.Observe(r.TTFTSeconds)
	}
	if !r.UsageKnown {
		return
	}
	s.input.Add(float64(max(0, r.InputTokens)))
	s.output.Add(float64(max(0, r.OutputTokens)))
	if r.CachedKnown {
		s.cached.Add(float64(max(0, r.CachedTokens)))
	}
	if after := r.DurationSeconds - r.TTFTSeconds; r.TTFTSeconds > 0 && r.OutputTokens > 1 && after > 0 {
		s.perToken.Observe(after / float64(r.OutputTokens-1))
	}
}

func (s *modelSeries) count(m *Metrics, r *Record) {
	if g := m.generation.Load(); s.used.Load() != g {
		s.used.Store(g)
	}
	count(m, &s.outcomes, r.Outcome, r.Status, func(outcome string, code int) prometheus.Counter {
		c := "other" // what no server should send must not become series
		if code >= 100 && code <= 599 {
			c = strconv.Itoa(code)
		}
		return m.requests.WithLabelValues(strings.Clone(r.Pool), m.label(r), outcome, c)
	})
}

// count adds one to the counter of outcome and code in list, making it if it is the first. The list is short: outcomes
// are a closed list and come with few codes each.
func count(m *Metrics, list *atomic.Pointer[[]outcomeCounter], outcome string, code int, make func(string, int) prometheus.Counter) {
	if l := list.Load(); l != nil { // Fast path: seen before.
		for i := range *l {
			if c := &(*l)[i]; c.code == code && c.outcome == outcome {
				c.n.Inc()
				return
			}
		}
	}
	m.mu.Lock() // Slow path: once for each outcome. Another goroutine may have made it meanwhile: the vector has one counter for both.
	defer m.mu.Unlock()
	outcome = strings.Clone(outcome)
	c := make(outcome, code)
	c.Inc()
	var old []outcomeCounter
	if l := list.Load(); l != nil {
		old = *l
	}
	next := append(old[:len(old):len(old)], outcomeCounter{outcome, code, c})
	list.Store(&next)
}

// series returns the handles that r is counted on.
func (m *Metrics) series(r *Record) *modelSeries {
	models := *m.models.Load()
	if s := models[modelKey{r.Pool, r.Model}]; s != nil {
		return s
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	models = *m.models.Load()
	if s := models[modelKey{r.Pool, r.Model}]; s != nil {
		return s
	}
	key := modelKey{strings.Clone(r.Pool), m.newLabel(r)}
	if s := models[key]; s != nil {
		return s
	}
	s := &modelSeries{}
	s.used.Store(m.generation.Load())
	if key.pool != "" {
		s.duration = m.duration.WithLabelValues(key.pool, key.model)
		s.firstToken = m.firstToken.WithLabelValues(key.pool, key.model)
		s.perToken = m.perToken.WithLabelValues(key.pool, key.model)
		s.input = m.tokens.WithLabelValues(key.pool, key.model, "input")
		s.output = m.tokens.WithLabelValues(key.pool, key.model, "output")
		s.cached = m.tokens.WithLabelValues(key.pool, key.model, "cached")
	} else if key.model != "" && key.model != OtherModel {
		m.made++
	}
	next := maps.Clone(models)
	next[key] = s
	m.models.Store(&next)
	return s
}

// newLabel is the model label of a request whose name has no series yet. The caller holds mu.
func (m *Metrics) newLabel(r *Record) string {
	switch {
	case r.Pool == "" && (m.made >= m.opts.MaxModels || len(r.Model) > maxLabelBytes):
		m.folded.Inc()
		return OtherModel
	case len(r.Model) > maxLabelBytes:
		return OtherModel
	}
	return strings.ToValidUTF8(strings.Clone(r.Model), "\ufffd")
}

// label is the model label that r's series was made with. The caller holds mu.
func (m *Metrics) label(r *Record) string {
	name := strings.ToValidUTF8(r.Model, "\ufffd")
	if _, ok := (*m.models.Load())[modelKey{r.Pool, name}]; ok {
		return strings.Clone(name)
	}
	return OtherModel
}

func (m *Metrics) pool(name string) *poolSeries {
	if p := (*m.pools.Load())[name]; p != nil {
		return p
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	name = strings.Clone(name)
	p := &poolSeries{
		queue: m.queue.WithLabelValues(name), decision: m.decision.WithLabelValues(name), ratio: m.ratio.WithLabelValues(name), overhead: m.overhead.WithLabelValues(name),
		bytesIn: m.bytesIn.WithLabelValues(name), bytesOut: m.bytesOut.WithLabelValues(name),
	}
	next := maps.Clone(*m.pools.Load())
	next[name] = p
	m.pools.Store(&next)
	return p
}

func (m *Metrics) endpoint(id string) *endpointSeries {
	if e := (*m.endpoints.Load())[id]; e != nil {
		return e
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	endpoints := *m.endpoints.Load()
	if e := endpoints[id]; e != nil {
		return e
	}
	id = strings.Clone(id)
	e := &endpointSeries{}
	next := maps.Clone(endpoints)
	next[id] = e
	m.endpoints.Store(&next)
	return e
}

// ObserveScrape counts one scrape of an endpoint's metrics page. The result is "ok" or a word for what went wrong, from a
// closed list.
func (m *Metrics) ObserveScrape(endpoint string, took time.Duration, result string) {
	count(m, &m.endpoint(endpoint).scrapes, result, 0, func(result string, _ int) prometheus.Counter {
		return m.scrapes.WithLabelValues(endpoint, result)
	})
	m.scrapeDuration.Observe(took.Seconds())
}

// SetReload notes an attempt to load the configuration; a zero time says that what was read is in use already. The names are those that Prometheus uses for its own.
func (m *Metrics) SetReload(ok bool, at time.Time) {
	if !ok {
		m.reloadOK.Set(0)
		return
	}
	m.reloadOK.Set(1)
	if at.IsZero() { // what was loaded is in use already
		return
	}
	m.reloadAt.Set(float64(at.UnixMilli()) / 1000)
}

// SetDraining notes that the gateway has begun to stop.
func (m *Metrics) SetDraining() { m.draining.Set(1) }

// Sweep deletes the series of endpoints and names that the table no longer has. Call it every interval from one goroutine.
//
// The table is read here, after it was stored, and an endpoint must be missing twice: in the other order, or at once, a
// request that still uses the old table would bring its series back for good. One that finishes later than that does,
// until the sweep after the next.
func (m *Metrics) Sweep(s *pool.Snapshot, interval time.Duration) {
	live := make(map[string]bool, len(s.Rows))
	for i := range s.Rows {
		live[s.Rows[i].Endpoint.ID] = true
	}
	g := m.generation.Add(1)
	keep := max(2, uint32(m.opts.KeepUnserved/max(interval, time.Millisecond)))
	m.tenants.sweep(g, keep)

	m.mu.Lock()
	defer m.mu.Unlock()
	endpoints := maps.Clone(*m.endpoints.Load())
	changed := false
	for id, e := range endpoints {
		gone := !live[id]
		if gone && e.missing {
			delete(endpoints, id)
			changed = true
		}
		e.missing = gone
	}
	if changed {
		old := *m.endpoints.Load()
		m.endpoints.Store(&endpoints)
		for id := range old {
			if endpoints[id] == nil {
				m.attempts.DeletePartialMatch(prometheus.Labels{LabelEndpoint: id})
				m.scrapes.DeletePartialMatch(prometheus.Labels{LabelEndpoint: id})
			}
		}
	}

	var forgotten []modelKey
	for key, ms := range *m.models.Load() {
		if key.pool != "" && g-ms.used.Load() >= keep && s.TargetString(key.model) == nil {
			forgotten = append(forgotten, key)
		}
	}
	if forgotten == nil {
		return
	}
	models := maps.Clone(*m.models.Load())
	for _, key := range forgotten {
		delete(models, key)
	}
	m.models.Store(&models)
	for _, key := range forgotten {
		labels := prometheus.Labels{LabelPool: key.pool, LabelModel: key.model}
		for _, v := range []interface {
			DeletePartialMatch(prometheus.Labels) int
		}{m.requests, m.tokens, m.duration, m.firstToken, m.perToken} {
			v.DeletePartialMatch(labels)
		}
	}
}
