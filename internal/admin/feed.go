package admin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/internal/version"
	"kvgate/pool"
	"kvgate/telemetry"
)

const (
	feedDecisions = 50  // newest requests in one message; the others can be asked for
	feedAdapters  = 16  // adapters named of one endpoint
	feedModels    = 64  // names of models told of one pool
	historyPoints = 300 // seconds of history that a new viewer gets
	windowSeconds = 60  // over which figures are taken
)

// A LiveView is what a viewer is told: everything in a whole message, what is new in the others. It is what GET /debug/live
// streams, and what kvgate top shows. What is unknown is null.
type LiveView struct {
	At        time.Time      `json:"at"`
	Whole     bool           `json:"whole"`
	Gateway   LiveGateway    `json:"gateway"`
	Figures   LiveFigures    `json:"figures"`             // of all pools together
	Pools     []LivePool     `json:"pools"`               // all, in the order of the configuration
	Endpoints []LiveEndpoint `json:"endpoints,omitempty"` // in a whole message; in the others see Changed
	Changed   [][2]any       `json:"changed,omitempty"`   // in the others: pairs of an index into Endpoints and a LiveEndpoint
	Ages      []int          `json:"ages"`                // by endpoint: tenths of a second since its scrape; -1: never
	History   []LivePoint    `json:"history"`             // by the second; in a whole message up to five minutes
	Requests  []DecisionView `json:"requests"`            // the newest, oldest first
	Waiting   []WaitingView  `json:"waiting,omitempty"`   // where requests wait for admission, or have been refused
}

// A LiveGateway is the gateway itself.
type LiveGateway struct {
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	Missing   []string  `json:"missing"` // what keeps it from being ready
	Snapshot  uint64    `json:"snapshot_version"`
	InFlight  int       `json:"in_flight"`
	Requests  uint64    `json:"requests"` // since the start
	Names     int       `json:"names"`    // models and adapters that clients may ask for
	Actions   bool      `json:"actions"`  // there is a token for actions
	LogLevel  string    `json:"log_level,omitempty"`
}

// A LivePool is one pool, with figures over the last minute.
type LivePool struct {
	Name   string   `json:"name"`
	Policy string   `json:"policy,omitempty"`
	Models []string `json:"models"` // base models, at most 64
	// Adapters is how many adapters can be asked for besides.
	Adapters int `json:"adapters"`
	LiveFigures
}

// LiveFigures are taken over the last minute, or as much of it as is remembered.
type LiveFigures struct {
	RequestsPerSecond     float64  `json:"requests_per_second"`
	ErrorRatio            *float64 `json:"error_ratio"` // of requests, those that ended in anything but ok and client_gone
	TTFTP50               *float64 `json:"ttft_p50_seconds"`
	TTFTP99               *float64 `json:"ttft_p99_seconds"`
	OutputTokensPerSecond *float64 `json:"output_tokens_per_second"` // null where no answer told, of those that ended
	InputTokensPerSecond  *float64 `json:"input_tokens_per_second"`
	PrefixHitRatio        *float64 `json:"prefix_hit_ratio"`  // of prompt tokens, those that the servers say they had cached; else what was expected
	AdapterHitRatio       *float64 `json:"adapter_hit_ratio"` // of requests for adapters, those sent where it was believed to be loaded
	PredictionRatio       *float64 `json:"prediction_ratio"`  // median of actual over predicted time to first token
}

// A LivePoint is one second of all pools: when (Unix), requests ended, of them failed, p50 and p99 of TTFT in seconds or
// null, output tokens, input tokens.
type LivePoint [7]any

// A LiveEndpoint is one endpoint. Its fields are those of [pool.EndpointView] in brief.
type LiveEndpoint struct {
	ID      string   `json:"id"`
	Pool    string   `json:"pool"`
	URL     string   `json:"url"`
	Dialect string   `json:"dialect,omitempty"`
	Healthy bool     `json:"healthy"`
	State   []string `json:"state"`
	Error   string   `json:"error,omitempty"`

	KV          *float64 `json:"kv_cache_utilization"`
	KVCapacity  *int64   `json:"kv_capacity_tokens"`
	KVHeadroom  *int64   `json:"kv_headroom_tokens"` // free after bookings and foreign load
	Requests    int64    `json:"booked_requests"`
	Pending     int64    `json:"pending_tokens"`
	Booked      int64    `json:"booked_kv_tokens"`
	Running     *int32   `json:"running"`
	Waiting     *int32   `json:"waiting"`
	Foreign     *int32   `json:"foreign_requests"`
	MaxAdapters *int32   `json:"max_adapters"`
	// Adapters are those believed to be on the endpoint, most used first.
	Adapters     []LiveAdapter     `json:"adapters,omitempty"`
	MoreAdapters int               `json:"more_adapters,omitempty"`
	Engines      []pool.EngineView `json:"engines,omitempty"` // where there are several
	PrefillRate  *float64          `json:"prefill_tokens_per_second"`
}

// A LiveAdapter is an adapter on an endpoint.
type LiveAdapter struct {
	Name     string `json:"name"`
	InFlight int    `json:"in_flight"` // of our requests
}

// A feed makes messages. It belongs to one goroutine.
type feed struct {
	s         *Server
	endpoints []*pool.Endpoint // in the order that viewers know
	rows      [][]byte         // as they were told last
	told      []facts          // what they were made from
	names     map[uint64]string
	namesAge  int
	seen      uint64 // the newest request taken in
	stats     stats
	view      LiveView // of the last advance
}

func newFeed(s *Server) *feed { return &feed{s: s} }

// advance takes in what has happened until now and returns the message that tells of it. Viewers who know other endpoints
// must be sent everything: then the message is a whole one.
func (f *feed) advance(now time.Time) []byte {
	snap, at := f.s.o.Table.Load(), f.s.o.Now()
	v := &f.view
	*v = LiveView{At: now.UTC().Truncate(time.Millisecond), Requests: []DecisionView{}, Gateway: f.gateway(snap)}
	f.requests(now)
	v.Figures = f.stats.figures(now.Unix(), func(string) bool { return true })
	v.Pools = f.pools(snap)
	v.History = f.stats.history(now.Unix(), 1)
	if f.s.o.Waiting != nil {
		v.Waiting = f.s.o.Waiting()
	}
	same := len(f.endpoints) == len(snap.Rows)
	for i := range snap.Rows {
		same = same && f.endpoints[i] == snap.Rows[i].Endpoint
	}
	if !same {
		f.endpoints, f.rows, f.told = make([]*pool.Endpoint, len(snap.Rows)), make([][]byte, len(snap.Rows)), make([]facts, len(snap.Rows))
	}
	if f.namesAge--; f.namesAge < 0 || !same {
		f.namesAge = 10
		f.names = make(map[uint64]string)
		for t := range snap.Targets() {
			if t.Adapter {
				f.names[t.Hash] = t.Name
			}
		}
	}
	v.Ages = make([]int, len(snap.Rows))
	msg := []byte(`{"changed":[`)
	for i := range snap.Rows {
		r := &snap.Rows[i]
		if v.Ages[i] = -1; r.ScrapedAt != 0 {
			v.Ages[i] = int(max(0, at.Sub(r.ScrapedAt)) / (100 * time.Millisecond))
		}
		now := f.factsOf(r, at)
		if f.endpoints[i] == r.Endpoint && f.told[i].same(&now) {
			continue // Fast path: of most endpoints there is nothing new.
		}
		f.told[i] = now
		row, err := json.Marshal(f.endpoint(r, at))
		if err != nil {
			panic("BUG: " + err.Error())
		}
		if f.endpoints[i] = r.Endpoint; !bytes.Equal(row, f.rows[i]) {
			f.rows[i] = row
			if msg[len(msg)-1] == ']' {
				msg = append(msg, ',')
			}
			msg = append(append(strconv.AppendInt(append(msg, '['), int64(i), 10), ','), row...)
			msg = append(msg, ']')
		}
	}
	if !same {
		return f.whole()
	}
	return f.rest(append(msg, "],"...), v)
}

// rest appends v to the beginning of an object. Rows are put before it by hand, since they have been encoded already.
func (f *feed) rest(begin []byte, v *LiveView) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return append(begin, b[1:]...)
}

// whole is the message for a viewer who knows nothing, as of the last advance.
func (f *feed) whole() []byte {
	v := f.view
	v.Whole = true
	v.History = f.stats.history(v.At.Unix(), historyPoints)
	v.Requests = f.last(0)
	return f.rest(append(append([]byte(`{"endpoints":[`), bytes.Join(f.rows, []byte(","))...), "],"...), &v)
}

func (f *feed) gateway(snap *pool.Snapshot) LiveGateway {
	o := &f.s.o
	g := LiveGateway{Version: version.Get().Version, StartedAt: f.s.started.UTC(), Missing: []string{}, Snapshot: snap.Version, Actions: f.s.token() != ""}
	if o.Missing != nil {
		g.Missing = append(g.Missing, o.Missing()...)
	}
	if o.InFlight != nil {
		g.InFlight = o.InFlight()
	}
	if o.Recent != nil {
		g.Requests = o.Recent.Total()
	}
	if o.LogLevel != nil {
		g.LogLevel = o.LogLevel()
	}
	for range snap.Targets() {
		g.Names++
	}
	return g
}

// requests takes in the requests that have ended since the last time.
func (f *feed) requests(now time.Time) {
	r := f.s.o.Recent
	if r == nil {
		return
	}
	// Of more requests than are remembered those that are stand for the others.
	weight := 1.0
	told := f.seen
	if gone := r.Total() - f.seen; told > 0 && gone > uint64(r.Size()) {
		weight = float64(gone) / float64(r.Size())
	}
	oldest := now.Unix() - historyPoints
	f.seen = r.Since(f.seen, func(rr *telemetry.RecentRecord) {
		if rr.At.Unix() > oldest {
			f.stats.add(rr.At.Unix(), &rr.Record, weight)
		}
	})
	f.view.Requests = f.last(told)
}

// last are the newest requests that were taken in, those after number, oldest first.
func (f *feed) last(number uint64) []DecisionView {
	out := []DecisionView{}
	if f.s.o.Recent == nil {
		return out
	}
	last := f.s.o.Recent.Last(2*feedDecisions, nil)
	for i := range last { // newest first
		if n := last[i].Number; n > number && n <= f.seen && len(out) < feedDecisions {
			out = append(out, ViewDecision(&last[i]))
		}
	}
	slices.Reverse(out)
	return out
}

func (f *feed) pools(snap *pool.Snapshot) []LivePool {
	out := make([]LivePool, len(snap.Pools))
	for i := range snap.Pools {
		p := &out[i]
		p.Name, p.Models = snap.Pools[i].Name, []string{}
		if f.s.o.Policy != nil {
			p.Policy = f.s.o.Policy(p.Name)
		}
		p.LiveFigures = f.stats.figures(f.view.At.Unix(), func(pool string) bool { return pool == p.Name })
	}
	for t := range snap.Targets() {
		if p := &out[t.Pool]; t.Adapter {
			p.Adapters++
		} else if len(p.Models) < feedModels {
			p.Models = append(p.Models, t.Name)
		}
	}
	for i := range out {
		slices.Sort(out[i].Models)
	}
	return out
}

func (f *feed) endpoint(r *pool.Row, at pool.Instant) LiveEndpoint {
	v := f.s.viewRow(r, at)
	v.Load = v.Now()
	e := LiveEndpoint{
		ID: v.ID, Pool: v.Pool, URL: v.URL, Dialect: v.Dialect, Healthy: v.Healthy, State: v.State, Error: v.Error,
		KV: rounded(v.Load.KVCacheUtilization, 3), KVCapacity: v.Load.KVCapacityTokens,
		Requests: v.Booked.Requests, Pending: v.Booked.PendingTokens, Booked: v.Booked.KVTokens,
		Running: v.Load.Running, Waiting: v.Load.Waiting, MaxAdapters: v.Load.MaxAdapters,
		PrefillRate: significant(v.PrefillTokensPerSecond),
	}
	if r.KVCapacity > 0 && v.Load.Known {
		free := max(0, int64(r.KVCapacity)-v.Booked.KVTokens-int64(r.Foreign.KVTokens))
		e.KVHeadroom = &free
	}
	if v.Load.Foreign != nil {
		e.Foreign = &v.Load.Foreign.Requests
	}
	if len(v.Load.Engines) > 1 {
		e.Engines = v.Load.Engines
	}
	f.adapters(r, v.Load.Adapters, &e)
	return e
}

// facts are what a row is made from, as far as it changes.
type facts struct {
	load     *pool.Load
	served   *pool.Served
	booked   pool.Booked
	foreign  pool.Foreign
	capacity int32
	state    pool.State
	flags    [4]bool // ejected, busy, not looked at yet, scraped
	failures int     // scrapes in a row
	rate     float64
}

func (f *feed) factsOf(r *pool.Row, at pool.Instant) facts {
	x := facts{load: r.Load, served: r.Served, booked: r.Booked(), foreign: r.Foreign, capacity: r.KVCapacity, state: r.State}
	x.flags = [4]bool{r.EjectedUntil() > at, r.BusyUntil() > at, f.s.o.Unseen != nil && f.s.o.Unseen(r.Endpoint), r.ScrapedAt != 0}
	x.failures, _ = f.s.o.Table.LastError(r.Endpoint)
	if rate := significant(new(r.Endpoint.PrefillTokensPerSecond.Load())); rate != nil {
		x.rate = *rate
	}
	return x
}

// same reports whether a row made from o would be that made from x.
func (x *facts) same(o *facts) bool {
	a, b := x.load, o.load
	x.load, o.load = nil, nil
	equal := *x == *o
	x.load, o.load = a, b
	return equal && a != nil && (a == b || a.Known == b.Known && a.Running == b.Running && a.Waiting == b.Waiting && a.Dialect == b.Dialect &&
		math.Abs(a.KVCacheUtilization-b.KVCacheUtilization) < 0.0005 && a.KVCapacityTokens == b.KVCapacityTokens &&
		a.MaxAdapters == b.MaxAdapters && slices.Equal(a.Adapters, b.Adapters) && slices.Equal(a.Engines, b.Engines))
}

// adapters lists what is believed to be loaded on r: what its server names, and what we sent there.
func (f *feed) adapters(r *pool.Row, told []string, e *LiveEndpoint) {
	r.Endpoint.Adapters().Each(func(hash uint64, inFlight int, _ pool.Instant) bool {
		if name := f.names[hash]; name != "" {
			e.Adapters = append(e.Adapters, LiveAdapter{name, inFlight})
		}
		return true
	})
	for _, name := range told {
		if !slices.ContainsFunc(e.Adapters, func(a LiveAdapter) bool { return a.Name == name }) {
			e.Adapters = append(e.Adapters, LiveAdapter{Name: name})
		}
	}
	slices.SortFunc(e.Adapters, func(a, b LiveAdapter) int {
		return cmp.Or(cmp.Compare(b.InFlight, a.InFlight), strings.Compare(a.Name, b.Name))
	})
	if more := len(e.Adapters) - feedAdapters; more > 0 {
		e.Adapters, e.MoreAdapters = e.Adapters[:feedAdapters], more
	}
}

// rounded is v with that many decimals, so that noise is no news.
func rounded(v *float64, decimals int) *float64 {
	if v == nil {
		return nil
	}
	p := math.Pow10(decimals)
	return new(math.Round(*v*p) / p)
}

// significant is v with two significant digits.
func significant(v *float64) *float64 {
	if v == nil || *v <= 0 {
		return nil
	}
	return rounded(v, 1-int(math.Floor(math.Log10(*v))))
}
