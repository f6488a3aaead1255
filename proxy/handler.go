// Package proxy is the data path: it takes a request from a client, has a policy choose an endpoint for it, and relays
// the answer, byte by byte as it comes.
//
// It writes both of its ends itself. Requests go to endpoints over connections of its own, since a general HTTP client
// can neither say whether a failed request was executed nor be interrupted; answers are written to the client's
// connection directly, so that a cut stream looks cut. fasthttp accepts connections and reads the first head of each.
//
// It imports fasthttp and nothing else of the network but net and crypto/tls; it must not import config, discovery,
// metrics or admin.
package proxy

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"go.uber.org/zap"

	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/internal/quota"
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// Timeouts bound the waits of one attempt. Zero is no limit where the comment says so.
type Timeouts struct {
	Connect      time.Duration // TCP and TLS; default 2 s
	FirstToken   time.Duration // from the request's last byte written to a streamed answer's first one; 0: no limit
	Idle         time.Duration // between two pieces of a streamed answer; 0: no limit
	Total        time.Duration // of an attempt; 0: no limit
	EndpointIdle time.Duration // age above which an unused connection is not used again; default 4 s (uvicorn closes at 5)
}

// Retry says when another endpoint may be tried.
type Retry struct {
	MaxAttempts      int     // endpoints tried per request, the first included; default 2, at most scoring.MaxTried+1
	BudgetRatio      float64 // retries running, as a share of active requests; default 0.2
	BudgetMin        int     // … and however few are active; default 3
	ReplayUnanswered bool    // also when the request was written and the connection died without a byte of answer
}

// PoolOptions are how the requests of one pool are handled. They don't change once they are part of Routes.
type PoolOptions struct {
	Name     string
	Policy   *scoring.Policy // required
	Timeouts Timeouts
	Retry    Retry
	Health   HealthOptions
	TLS      *tls.Config // to endpoints whose URL is https; nil there: the system's CAs
	// APIKey is sent to the endpoints as a bearer token in place of the client's Authorization.
	APIKey string
	// DropAuthorization keeps a client's Authorization from endpoints, as Routes.Auth does: it was for the gateway.
	DropAuthorization bool
	// Admission has requests wait here while every endpoint has enough to do; nil: they go on at once.
	Admission *AdmissionOptions

	// Adapters loads adapters that no endpoint has; nil: nobody does. AdapterWait is how long a request waits for that.
	Adapters    Adapters
	AdapterWait time.Duration

	admitter *admitter // of Admission
}

// Routes are everything of the configuration that requests are handled by. They are immutable: a reload makes new ones,
// and requests that are running keep the ones they began with.
type Routes struct {
	// Auth, if set, knows who may come in; without it everybody may. It is set before the Routes are used.
	Auth Authorizer
	// Names resolves what clients ask for; nil looks it up among what is served.
	Names *names.Resolver
	// ModelHeaders has endpoints told the model in X-Gateway-Model-Name and X-Gateway-Base-Model-Name.
	ModelHeaders bool
	// Quotas, if set, limit what may be used.
	Quotas *Quotas
	// NeedUsage has endpoints tell the usage of every stream, whether the client asked for it or not. It doesn't see more.
	NeedUsage bool
	// NeedPrefix has prompts hashed for Record.Prefix also where the policy doesn't ask for it.
	NeedPrefix bool

	pools   map[string]*PoolOptions
	special map[special]*PoolOptions
}

// A special is the requests of one pool that a rule has its own options for.
type special struct {
	rule int32
	pool string
}

// NewRoutes checks pools and fills in defaults.
func NewRoutes(pools []PoolOptions) (*Routes, error) {
	r := &Routes{pools: make(map[string]*PoolOptions, len(pools)), special: map[special]*PoolOptions{}}
	for _, p := range pools {
		if err := p.prepare(); err != nil {
			return nil, err
		}
		if r.pools[p.Name] != nil {
			return nil, fmt.Errorf("pool %s is there twice", p.Name)
		}
		r.pools[p.Name] = &p
	}
	return r, nil
}

// prepare checks p and fills in defaults.
func (p *PoolOptions) prepare() error {
	if p.Policy == nil {
		return fmt.Errorf("pool %s: no policy", p.Name)
	}
	def(&p.Timeouts.Connect, 2*time.Second)
	def(&p.Timeouts.EndpointIdle, 4*time.Second)
	def(&p.Retry.MaxAttempts, 2)
	p.Retry.MaxAttempts = min(p.Retry.MaxAttempts, scoring.MaxTried+1)
	p.Health = p.Health.withDefaults()
	return nil
}

// SetSpecial has requests that a rule of Names decides on, by its number, handled as p says in p's pool. It is for the time
// before r is used.
func (r *Routes) SetSpecial(rule int, p PoolOptions) error {
	if err := p.prepare(); err != nil {
		return err
	}
	r.special[special{int32(rule), p.Name}] = &p
	return nil
}

// Limits bound what the handler holds. Zero fields mean their defaults.
type Limits struct {
	InFlightBodyBytes   int64 // of all requests together; default 512 MiB
	EndpointConnections int   // per endpoint; default 4096
	ResponseHeaderBytes int   // default 64 KiB
	Requests            int   // being handled at a time; default no limit
}

// Options are what a Handler is made of.
type Options struct {
	Table  *pool.Table         // required
	Routes *Routes             // required
	Now    func() pool.Instant // the clock that the table's instants are of; required
	Sink   telemetry.Sink      // gets every finished request; nil: nobody
	Log    *zap.Logger         // nil: nothing is logged
	Limits Limits

	Forwarded        string // append, replace or off: see config; "" is append
	ReplaceRequestID bool   // don't take a client's X-Request-Id
	DebugHeaders     bool   // X-Kvgate-* and Server-Timing on every answer
	DebugHeader      string // request header that asks for them; "": none

	// Trace has requests take part in distributed traces, and Record.Trace filled in; TraceRatio is the share of requests
	// sampled, 0..1, where the caller doesn't say.
	Trace      bool
	TraceRatio float64
	// Explainer keeps explanations of some decisions; nil: nobody does.
	Explainer Explainer
	// OnDoubt is told when an endpoint turned out not to be as the table has it: it takes no connection, or doesn't have a
	// model that it was believed to have. It is to be looked at again, soon. It must not block. May be nil.
	OnDoubt func(*pool.Endpoint)
	// OnReached is told when an endpoint that was down in the table answered a request. It must not block. nil: the table
	// is.
	OnReached func(*pool.Endpoint)
}

// A Handler handles the requests of all clients. It is safe for concurrent use.
type Handler struct {
	opts      Options
	log       *zap.Logger
	limits    Limits
	forwarded forwardedMode
	table     *pool.Table
	routes    atomic.Pointer[Routes] // never nil
	endpoints endpoints
	admitters admitters
	capturer  atomic.Pointer[Capturer] // nil: nobody looks
	stored    storedResponses
	budget    *budget
	memory    *memoryGuard
	watch     *watcher // nil: nobody is told when clients go

	following following

	shards   [activeShards]activeShard
	nextSlot atomic.Uint32
	retrying atomic.Int64 // requests in a second or later attempt
	draining atomic.Bool  // answers close their connections
	refusing atomic.Bool  // new requests are refused
	panics   atomic.Uint64
	cut      atomic.Int64 // requests that a drain has ended

	exchanges sync.Pool
	healthMu  sync.Mutex      // ejections are decided one at a time
	ctx       context.Context // ends when the handler is closed
	stop      context.CancelFunc
	wg        sync.WaitGroup
}

// New returns a handler. Close ends what it starts.
func New(o Options) (*Handler, error) {
	switch {
	case o.Table == nil:
		return nil, errors.New("proxy: no table")
	case o.Routes == nil:
		return nil, errors.New("proxy: no routes")
	case o.Now == nil:
		return nil, errors.New("proxy: no clock")
	}
	h := &Handler{opts: o, log: o.Log, limits: o.Limits, table: o.Table}
	h.ctx, h.stop = context.WithCancel(context.Background())
	if h.log == nil {
		h.log = zap.NewNop()
	}
	switch o.Forwarded {
	case "", "append":
	case "replace":
		h.forwarded = forwardedReplace
	case "off":
		h.forwarded = forwardedOff
	default:
		return nil, fmt.Errorf("proxy: forwarded %q; want append, replace or off", o.Forwarded)
	}
	def(&h.limits.InFlightBodyBytes, 512<<20)
	def(&h.limits.EndpointConnections, 4096)
	def(&h.limits.ResponseHeaderBytes, 64<<10)
	h.memory = newMemoryGuard()
	if room := h.memory.bodies(h.limits.InFlightBodyBytes); room < h.limits.InFlightBodyBytes {
		h.log.Warn("GOMEMLIMIT leaves less memory for request bodies than is configured",
			zap.Int64("limit_bytes", h.memory.limit), zap.Int64("in_flight_body_bytes", room), zap.Int64("configured_bytes", h.limits.InFlightBodyBytes))
		h.limits.InFlightBodyBytes = room
	}
	h.budget = newBudget(h.limits.InFlightBodyBytes)
	h.stored.init()
	h.SetRoutes(o.Routes)
	h.table.OnPublish(h.roomMade)
	h.exchanges.New = func() any { return newExchange(h) }
	h.wg.Go(h.tend)
	return h, nil
}

// SetRoutes has requests that begin from now on handled by r.
func (h *Handler) SetRoutes(r *Routes) {
	h.admitters.serve(h, r)
	h.routes.Store(r)
}

// Close ends the handler's goroutines and closes idle connections to endpoints. No request may be running.
func (h *Handler) Close() {
	h.stop()
	h.wg.Wait()
	for _, ep := range h.endpoints.all() {
		ep.conns.expire(time.Time{}, true)
	}
}

// Requests in flight are kept in lists, so that a drain can end them, by shards, so that they don't wait for each other.
const activeShards = 16

type activeShard struct {
	mu    sync.Mutex
	first *exchange
	n     int
	_     [64]byte
}

// enter puts x among the active requests.
func (h *Handler) enter(x *exchange) {
	s := &h.shards[x.shard]
	s.mu.Lock()
	x.next, x.prev = s.first, nil
	if s.first != nil {
		s.first.prev = x
	}
	s.first = x
	s.n++
	s.mu.Unlock()
}

// leave takes x out again. When it has returned, no drain will cancel x.
func (h *Handler) leave(x *exchange) {
	s := &h.shards[x.shard]
	s.mu.Lock()
	if x.prev != nil {
		x.prev.next = x.next
	} else {
		s.first = x.next
	}
	if x.next != nil {
		x.next.prev = x.prev
	}
	x.next, x.prev = nil, nil
	s.n--
	s.mu.Unlock()
}

// Active returns the number of requests in flight.
func (h *Handler) Active() int {
	n := 0
	for i := range h.shards {
		h.shards[i].mu.Lock()
		n += h.shards[i].n
		h.shards[i].mu.Unlock()
	}
	return n
}

// cancelAll ends every request in flight.
func (h *Handler) cancelAll(cause cancelCause) {
	for i := range h.shards {
		h.shards[i].mu.Lock()
		for x := h.shards[i].first; x != nil; x = x.next {
			x.lease.cancel(cause)
		}
		h.shards[i].mu.Unlock()
	}
}

// An exchange is one request on its way through the gateway, with the memory that takes: it is used again for another
// one. It belongs to the goroutine that serves the client's connection, except for lease and the list links.
type exchange struct {
	h          *Handler
	shard      uint32
	next, prev *exchange // of the shard's list
	lease      lease

	client    *clientConn
	caller    *caller.Caller // who the request is from; nil with authentication off
	tenant    string         // its tenant, "" without one
	class     caller.Class   // its priority class
	route     openai.Route
	facts     requestFacts
	head      *buffer // memory of facts; nil once an answer is under way
	path      []byte  // of the target, up to the query
	pathBuf   []byte  // its memory once an answer is under way
	debug     bool
	began     time.Time // when the request's head had been read
	requestID []byte
	idBuf     [maxRequestIDBytes]byte

	body        requestBody
	bodyLen     int
	spliced     []byte          // the body with something else in it; nil: body as it is
	splicedBuf  *bodyBuffer     // its memory
	splicedHeld int64           // bytes of the budget for it
	addUsage    bool            // endpoints are asked for usage, though the client didn't
	named       names.Route     // what the model's name stands for
	charged     quota.Charge    // to the limits that the request has
	quotaAt     int64           // when
	peek        *openai.Request // nil once an answer is under way
	name        []byte          // the model's name at the endpoints
	model       []byte          // as the client wrote it; memory of the exchange
	wantsStream bool
	routes      *Routes
	pool        *PoolOptions
	prefix      []uint64 // memory of query.Prefix
	query       scoring.Request
	decision    scoring.Decision
	pinned      *pool.Endpoint // where the stored response is that this is about; nil: anywhere
	snapshot    *pool.Snapshot
	booking     pool.Booking
	wait        waiting // for admission

	attempt        int
	attemptsBefore int // of them, on models that the request has fallen back from
	attempts       [scoring.MaxTried + 1]telemetry.Attempt
	attemptAt      time.Time
	retryTaken     bool // a place in the retry budget is held
	deadline       time.Time
	sentAt         time.Time // when the request had been written
	conn           *endpointConn
	resp           response
	held           *heldAnswer // of an earlier attempt, to fall back on
	relaying       relaying
	relayMore      func(fd uintptr) bool // relaySome
	part           []byte                // the beginning of an answer that was not held after all; nil: there is no such
	partBody       bodyReader            // what reads on behind it

	rewriter   *openai.Rewriter // nil: the answer goes as it comes
	stream     *openai.Stream   // nil until there is a stream to read
	json       *openai.JSONScan // likewise
	scanning   bool             // one of them reads along
	inStream   *failure         // what the endpoint said went wrong within an answer that was relayed whole
	firstToken time.Time
	timer      *time.Timer // clears pending tokens of a request that shows no first token
	timerAt    atomic.Int64
	timerGen   atomic.Uint64

	out        *writer
	vec        [2][]byte
	vec3       [3][]byte
	bufs       net.Buffers
	chunkedOut bool
	watching   bool // the client's going is noticed
	told       bool // the last event of a stream has been written to the client
	committed  bool // bytes of an answer are on their way to the client
	closing    bool // the client's connection ends after this answer
	bytesOut   int64
	status     int // sent
	deciding   time.Duration
	readAt     time.Time     // when the request had been read; zero: not yet
	dialing    time.Duration // waited for connections to be made
	explained  uint64        // see Explainer
	trace      traced

	rec telemetry.Record
}

func newExchange(h *Handler) *exchange {
	x := &exchange{h: h, shard: h.nextSlot.Add(1) % activeShards, named: names.Route{Rule: -1}}
	x.relayMore = x.relaySome
	return x
}

// serve handles the request whose head c has. It reports whether the connection is to be closed.
func (h *Handler) serve(c *clientConn) (closing bool) {
	x := h.exchanges.Get().(*exchange)
	var f *failure
	defer func() { // always runs, exactly once
		if v := recover(); v != nil {
			f = h.panicked(v)
		}
		closing = x.end(f)
	}()
	x.begin(c)
	f = x.handle()
	return
}

// handle is the way of a request. It returns why the request did not end well.
func (x *exchange) handle() *failure {
	if f := x.read(); f != nil {
		return f
	}
	switch x.route.Kind {
	case openai.KindModelList, openai.KindModel:
		return x.answerModels()
	}
	if x.route.Kind == openai.KindStored {
		if f := x.resolveStored(); f != nil {
			return f
		}
		return x.serve()
	}
	x.resolveName()
	for {
		f := x.useTarget()
		if f == nil {
			f = x.serve()
		}
		if f == nil || !x.fallBack(f) {
			return f
		}
	}
}

// serve has the request served by the pool that it was resolved to.
func (x *exchange) serve() *failure {
	if f := x.charge(); f != nil {
		return f
	}
	if f := x.admit(); f != nil {
		return f
	}
	if f := x.splice(); f != nil {
		return f
	}
	var f *failure
	for {
		if none := x.choose(); none != nil {
			return cmp.Or(f, none) // why the last attempt failed says more than that there is nobody left
		}
		ep := x.h.endpoints.get(x.decision.Endpoint)
		f = x.forward(ep)
		x.attempted(ep, f)
		if f == nil || !x.mayRetry(f) {
			return f
		}
		if f.adapterGone {
			if again := x.admitAgain(); again != nil {
				return again
			}
		}
	}
}

// begin takes the facts of the request that cost nothing.
func (x *exchange) begin(c *clientConn) {
	x.client = c
	x.began = time.Now()
	x.peek = peekPool.Get().(*openai.Request)
	x.lease.reset()
	x.head = getBuffer(len(c.whole))
	head := x.head.b[:len(c.whole)]
	c.takeHead(head)
	q := &x.facts
	q.read(head)
	x.closing = q.closing || x.h.draining.Load()
	x.debug = x.h.opts.DebugHeaders
	x.path = q.target
	if i := bytes.IndexByte(q.target, '?'); i >= 0 {
		x.path = q.target[:i]
	}
	x.routes = x.h.routes.Load()
	x.findHeaders()
	x.h.enter(x)
}

// findHeaders looks for the client's fields that mean something to the handler itself.
func (x *exchange) findHeaders() {
	x.requestID = nil
	if !x.h.opts.ReplaceRequestID {
		if id, _ := x.facts.first(fRequestID); validRequestID(id) {
			x.requestID = id
		}
	}
	if x.requestID == nil {
		x.requestID = appendRequestID(x.idBuf[:0])
	}
	if name := x.h.opts.DebugHeader; name != "" {
		if v := x.Field(name); string(v) == "1" || string(v) == "true" {
			x.debug = true
		}
	}
	if x.h.opts.Trace {
		parent, n := x.facts.first(fTraceparent)
		if n > 1 {
			parent = nil // whose trace it is can't be said
		}
		x.trace.TraceContext, x.trace.continued = telemetry.NewTrace(parent, x.h.opts.TraceRatio)
	}
}

// releaseHead gives the memory of the head back. What is still needed of it is copied.
func (x *exchange) releaseHead() {
	if x.head == nil {
		return
	}
	x.path = append(x.pathBuf[:0], x.path...)
	x.pathBuf = x.path
	if len(x.requestID) > 0 && &x.requestID[0] != &x.idBuf[0] {
		x.requestID = append(x.idBuf[:0], x.requestID...)
	}
	q := &x.facts
	q.target, q.raw, q.host, q.contentType, q.contentEncoding, q.marked = nil, nil, nil, nil, nil, 0
	x.head.release()
	x.head = nil
}

func (x *exchange) headRequest() bool { return x.facts.method == "HEAD" }

// read finds the route and reads the body.
func (x *exchange) read() *failure {
	route, ok := openai.FindRoute(bytesOf(x.facts.method), x.path)
	x.route = route
	if !ok {
		x.unreadBody()
		if route.Allow != "" {
			return &failure{outcome: MethodNotAllowed, allow: route.Allow, message: "method not allowed here; use " + route.Allow}
		}
		return &failure{outcome: NotFound, message: noSuchPath(bytesOf(x.facts.method), x.path)}
	}
	if x.h.refusing.Load() {
		x.unreadBody()
		return &failure{outcome: ShuttingDown, message: "the gateway is shutting down; try again", retryAfterSeconds: 1, closing: true}
	}
	if f := x.authenticate(); f != nil {
		x.unreadBody()
		return f
	}
	if f := x.checkContent(); f != nil {
		x.unreadBody()
		return f
	}
	if rej := x.client.readBody(x.h.budget, &x.body); rej != nil {
		f := &failure{outcome: outcomeOf(rej.code), message: rej.reason, closing: true}
		if f.outcome == Saturated {
			f.retryAfterSeconds = 1
		}
		return f
	}
	x.bodyLen, x.readAt = x.body.n, time.Now()
	var err error
	switch route.Kind {
	case openai.KindJSON:
		err = openai.Peek(route.API, x.body.bytes(), x.peek)
	case openai.KindMultipart:
		err = openai.PeekMultipart(route.API, text(x.facts.contentType), x.body.bytes(), x.peek)
	}
	x.wantsStream = x.peek.Stream
	x.capture()
	if err != nil {
		f := &failure{outcome: BadRequest, message: err.Error()}
		if be, ok := errors.AsType[*openai.BodyError](err); ok {
			f.message, f.param, f.err = be.Message, be.Field, errors.New(be.LogText())
		}
		return f
	}
	return nil
}

// unreadBody has the connection closed after the answer if there is much of a body that nobody is going to read.
func (x *exchange) unreadBody() {
	if x.client.bodyLeft() {
		x.closing = true
	}
}

// checkContent refuses bodies in a form that can't be looked into.
func (x *exchange) checkContent() *failure {
	if ce := x.facts.contentEncoding; len(ce) > 0 && !equalFold(ce, "identity") {
		return &failure{outcome: UnsupportedMediaType, message: "compressed request bodies are not supported; send it without Content-Encoding", closing: true}
	}
	return nil
}

func (x *exchange) usePool(name string) *failure {
	x.pool = x.routes.pools[name]
	if x.named.Rule >= 0 {
		if p := x.routes.special[special{x.named.Rule, name}]; p != nil {
			x.pool = p
		}
	}
	if x.pool == nil { // the table and the routes are changed one after the other
		return &failure{outcome: NoEndpoints, message: "the model is being set up; try again", retryAfterSeconds: 1}
	}
	return nil
}

// choose books an endpoint for the next attempt.
func (x *exchange) choose() *failure {
	if x.wait.started {
		x.wait.started = false // it was chosen when there was room
		x.attemptAt = time.Now()
		x.chosen()
		return nil
	}
	now := x.h.opts.Now()
	x.explain(x.snapshot, now)
	began := time.Now()
	snapshot := x.snapshot
	if x.attempt > 0 {
		// A decision is made on one snapshot, and so is the target it is made for.
		snapshot = x.h.table.Load()
		t := snapshot.Target(x.name)
		if t == nil && x.query.Target != nil {
			t = snapshot.TargetString(x.query.Target.Name)
		}
		if t == nil {
			return &failure{outcome: NoEndpoints, message: msgNoEndpoints, retryAfterSeconds: 1}
		}
		x.query.Target = t
	}
	var d scoring.Decision
	var err error
	if x.pinned != nil {
		d, err = x.choosePinned(now)
	} else {
		d, err = x.pool.Policy.Choose(&x.query, snapshot, now, &x.booking)
	}
	x.attemptAt = time.Now()
	x.deciding += x.attemptAt.Sub(began)
	if err != nil { // the decision before, if there was one, stays: it is what the request is accounted for
		return undecided(err)
	}
	x.decision, x.snapshot = d, snapshot
	x.chosen()
	return nil
}

// chosen begins the attempt that the decision is for.
func (x *exchange) chosen() {
	x.deadline = after(x.attemptAt, x.pool.Timeouts.Total)
	x.watchClient()
	if !x.wantsStream {
		x.predictFirstToken()
	}
}

// watchClient has the lease cancelled when the client goes. It is ended in end.
func (x *exchange) watchClient() {
	if x.client != nil && !x.watching {
		x.watching = true
		x.client.edge.watch.watch(x.client, &x.lease)
	}
}

// undecided says why there is no endpoint for the request.
func undecided(err error) *failure {
	if errors.Is(err, scoring.ErrTooLong) {
		return &failure{outcome: BadRequest, err: err, code: "context_length_exceeded", param: "messages", message: "the prompt is longer than the context of the model; shorten it"}
	}
	return &failure{outcome: NoEndpoints, message: msgNoEndpoints, err: err, retryAfterSeconds: 1}
}

const msgNoEndpoints = "no model server can take the request now; try again later"

// predictFirstToken has the booking's pending tokens cleared when the prompt has most likely been prefilled, since an
// answer that isn't streamed doesn't show it.
func (x *exchange) predictFirstToken() {
	d := x.pool.Policy.PredictFirstToken(&x.decision)
	x.timerGen.Store(x.booking.Generation())
	x.timerAt.Store(int64(x.decision.Claim.At.Add(d)))
	if x.timer == nil {
		x.timer = time.AfterFunc(d, func() {
			// A run that was late for an earlier request comes before its time for this one.
			if gen := x.timerGen.Load(); int64(x.h.opts.Now()) >= x.timerAt.Load() {
				x.booking.FirstTokenOf(gen)
				x.h.roomMade()
			}
		})
		return
	}
	x.timer.Reset(d)
}

// forwardBody is the body that endpoints get.
func (x *exchange) forwardBody() []byte {
	if x.spliced != nil {
		return x.spliced
	}
	return x.body.bytes()
}

func (x *exchange) fillRequestHead(h *requestHead, ep *endpoint) {
	q := &x.facts
	*h = requestHead{
		method:      bytesOf(q.method),
		target:      q.target,
		raw:         q.raw,
		marks:       q.marks[:q.marked],
		lookThrough: q.more || q.nominates || x.h.opts.DebugHeader != "",
		host:        ep.Address,
		apiKey:      x.pool.APIKey,
		dropAuth:    x.pool.DropAuthorization || x.caller != nil,
		requestID:   x.requestID,
		rank:        x.decision.Rank,
		forwarded:   x.h.forwarded,
		clientIP:    x.client.ip(),
		clientHost:  q.host,
		https:       x.client.https(),
		debugHeader: x.h.opts.DebugHeader,
		length:      len(x.forwardBody()),
		hasBody:     q.method == "POST" || q.method == "PUT" || q.method == "PATCH",
		plain:       x.rewrites(),
	}
	if x.h.opts.Trace {
		x.trace.attempt = x.attempt
		h.trace = &x.trace
	}
	if x.routes.ModelHeaders {
		h.told = x.query.Target
	}
}

// panicked accounts for a panic: it costs one request.
func (h *Handler) panicked(v any) *failure {
	h.panics.Add(1)
	h.log.Error("panic while handling a request", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return &failure{outcome: Internal, message: "internal error", err: fmt.Errorf("panic: %v", v), closing: true}
}

// Panics returns how many requests have ended in a panic.
func (h *Handler) Panics() uint64 { return h.panics.Load() }

// text makes a string of bytes that stay as they are while it is used.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
