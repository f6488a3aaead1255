package modelsim

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Dialect is which server's surface a Server imitates where they differ; the
// engine behind it is vLLM's in all of them.
type Dialect string

// The dialects.
const (
	DialectVLLM   Dialect = "vllm"     // vLLM 0.26, Python front end
	DialectVLLM08 Dialect = "vllm-0.8" // vLLM 0.8.1: gpu_cache_usage_perc, no engine label
	DialectSGLang Dialect = "sglang"   // SGLang 0.5.15 with --enable-metrics --enable-cache-report --page-size 16
)

// Options configures a Server. The zero value serves one 8B model on an H100, on
// a free port of the loopback interface.
type Options struct {
	Profile string // default DefaultProfile

	// Models are the names of the base model; answers to a request without one
	// and metrics carry the first. Default meta-llama/Llama-3.1-8B-Instruct.
	Models []string
	// Adapters are servable from the start. MaxLoras (default 4 with Adapters,
	// else 0: adapters off) is how many fit in a batch, MaxCPULoras (default
	// MaxLoras) how many stay in host memory. Of SGLang they are
	// max_loras_per_batch and max_loaded_loras (default no limit).
	Adapters              []string
	MaxLoras, MaxCPULoras int
	// NoRuntimeLoRA removes the routes that load and unload adapters.
	NoRuntimeLoRA bool
	// AdapterRoot is where adapters can be loaded from; what a call asks for elsewhere isn't found. "": anywhere.
	AdapterRoot string

	// Speedup divides every time of the engine model; default 1. At 10, steps
	// of an 8B model last 1 to 5 ms.
	Speedup float64
	// Seed changes the drawn answer lengths and the filler words.
	Seed uint64

	// Listen is host:port, default 127.0.0.1:0. A host that is not loopback is
	// refused unless AllowRemote.
	Listen      string
	AllowRemote bool
	// ControlListen adds a listener for /sim/… alone, which stays up when the
	// main one refuses; empty for none.
	ControlListen string

	// Overrides of the profile, zero for its value.
	KVTokens, MaxSequences, MaxBatchTokens, MaxModelTokens int

	// MeanOutputTokens is the mean of the answer lengths drawn where a request
	// sets no limit; default 256.
	MeanOutputTokens int
	// EndsEarly draws a length for every request and takes its limit as a bound,
	// as people's answers do; without it a request with a limit uses it up.
	// ignore_eos in a request does the same for that request.
	EndsEarly bool

	// KeepAlive closes connections idle for that long; default 5 s, uvicorn's.
	KeepAlive time.Duration
	// RequestIDHeaders echoes X-Request-Id in answers.
	RequestIDHeaders bool
	// APIKey, if set, is required as bearer token under /v1, and only there.
	APIKey string
	// Dialect defaults to DialectVLLM.
	Dialect Dialect
	// MaxQueued is SGLang's max_queued_requests: one that finds as many waiting
	// is refused. 0: no limit, which vLLM always has.
	MaxQueued int

	// OnRequest, if set, sees each inference request's head and body as they
	// came in. It runs in the request's goroutine.
	OnRequest func(r *http.Request, body []byte)
}

// Server is a fake model server: one engine behind vLLM's HTTP surface. Its
// methods may be called from any goroutine.
type Server struct {
	opt            Options
	engineOptions  EngineOptions
	surface        *surface
	maxModelTokens int
	addr           string

	proc     atomic.Pointer[process] // never nil
	faults   faultSet
	serving  sync.WaitGroup // the goroutines that accept; added to under mu
	sequence atomic.Uint64  // makes ids

	mu      sync.Mutex // serialises starts and stops; guards what follows
	http    *http.Server
	ln      net.Listener // nil while the port refuses
	control *http.Server
	closed  bool
	closing chan struct{}
	timers  map[*time.Timer]struct{} // pending restarts and re-openings

	conns  connSet
	counts counters

	abortMu sync.Mutex
	aborts  []Abort
}

type counters struct {
	requests, executed, completed, aborted, errored atomic.Uint64
}

// ServerStats is a Server's state.
type ServerStats struct {
	Engine    Stats
	StartedAt time.Time
	Listening bool

	Requests  uint64 // inference requests whose head arrived
	Executed  uint64 // of those, handed to the engine
	Completed uint64 // answered in full
	Aborted   uint64 // given up because the client left
	Errored   uint64 // refused, or cut by a fault

	InFlight    int // calls the engine works on
	Connections int // open client connections
}

// Abort is one request that ended because its client left.
type Abort struct {
	RequestID string
	Path      string
	Stream    bool
	ArrivedAt time.Time
	At        time.Time // when the server saw the client gone
	Generated int       // tokens by then
}

// New starts a server. It answers when New returns.
func New(opt Options) (*Server, error) {
	prof, err := ProfileByName(opt.Profile)
	if err != nil {
		return nil, err
	}
	if len(opt.Models) == 0 {
		opt.Models = []string{"meta-llama/Llama-3.1-8B-Instruct"}
	}
	if opt.MaxLoras == 0 && len(opt.Adapters) > 0 {
		opt.MaxLoras = 4
	}
	if opt.Speedup == 0 {
		opt.Speedup = 1
	}
	if !(opt.Speedup > 0 && opt.Speedup <= math.MaxFloat64) { // nor NaN
		return nil, fmt.Errorf("speedup %g; want above 0", opt.Speedup)
	}
	if opt.Listen == "" {
		opt.Listen = "127.0.0.1:0"
	}
	if opt.MeanOutputTokens == 0 {
		opt.MeanOutputTokens = 256
	}
	if opt.KeepAlive == 0 {
		opt.KeepAlive = 5 * time.Second
	}
	if opt.Dialect == "" {
		opt.Dialect = DialectVLLM
	}
	shown := surfaces[opt.Dialect]
	if shown == nil {
		return nil, fmt.Errorf("dialect %q is unknown; want one of %v", opt.Dialect, Dialects())
	}
	hostLoras := max(opt.MaxCPULoras, opt.MaxLoras)
	if shown == &sglangSurface && opt.MaxCPULoras == 0 {
		hostLoras = math.MaxInt
	} else {
		opt.MaxCPULoras = hostLoras
	}
	if opt.MaxQueued < 0 || opt.MaxQueued > 0 && shown != &sglangSurface {
		return nil, fmt.Errorf("max queued %d with dialect %s; want 0, or a limit with %s", opt.MaxQueued, opt.Dialect, DialectSGLang)
	}
	for _, addr := range []string{opt.Listen, opt.ControlListen} {
		if err := checkLoopback(addr); addr != "" && err != nil && !opt.AllowRemote {
			return nil, err
		}
	}
	s := &Server{
		opt: opt,
		engineOptions: EngineOptions{
			Profile: prof, KVTokens: opt.KVTokens, MaxSequences: opt.MaxSequences, MaxBatchTokens: opt.MaxBatchTokens,
			MaxLoras: opt.MaxLoras, MaxCPULoras: hostLoras,
		},
		surface: shown,
		closing: make(chan struct{}),
		timers:  make(map[*time.Timer]struct{}),
	}
	s.maxModelTokens = prof.MaxModelTokens
	if opt.KVTokens > 0 {
		s.maxModelTokens = min(s.maxModelTokens, opt.KVTokens)
	}
	if opt.MaxModelTokens > 0 {
		s.maxModelTokens = opt.MaxModelTokens
	}
	s.conns.keepAlive.Store(int64(opt.KeepAlive))
	p, err := s.newProcess()
	if err != nil {
		return nil, err
	}
	s.proc.Store(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.listen(opt.Listen); err != nil {
		p.end()
		return nil, err
	}
	if opt.ControlListen != "" {
		ln, err := net.Listen("tcp", opt.ControlListen)
		if err != nil {
			s.stopListening(true)
			p.end()
			return nil, err
		}
		mux := http.NewServeMux()
		mux.HandleFunc("/sim/", s.serveControl)
		s.control = &http.Server{Handler: mux, Addr: ln.Addr().String(), ReadHeaderTimeout: 10 * time.Second}
		s.serving.Go(func() { s.control.Serve(ln) })
	}
	return s, nil
}

// ErrNotLoopback is the error of [New] for an address that other machines reach, without [Options].AllowRemote.
var ErrNotLoopback = errors.New("not a loopback address, so others could reach it")

func checkLoopback(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("listen %q: %w", addr, err)
	}
	if ip, err := netip.ParseAddr(host); host == "localhost" || err == nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("listen %q: %w", addr, ErrNotLoopback)
}

// listen opens the port; s.mu must be held.
func (s *Server) listen(addr string) error {
	var ln net.Listener
	var err error
	for range 50 { // after a cut, the port may be busy for a moment
		if ln, err = net.Listen("tcp", addr); err == nil || s.addr == "" {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	s.ln = ln
	if s.addr == "" { // the same ever after
		s.addr = ln.Addr().String()
	}
	if s.http == nil {
		s.http = &http.Server{
			Handler:           http.HandlerFunc(s.serve),
			ConnState:         s.conns.changed,
			MaxHeaderBytes:    1 << 20,
			ReadHeaderTimeout: 30 * time.Second,
			IdleTimeout:       -1, // connSet does it, so that it can change
			ErrorLog:          discardLog,
		}
		s.conns.setCut(false)
	}
	srv := s.http
	s.serving.Go(func() { srv.Serve(ln) })
	return nil
}

// stopListening closes the port and, if cut, every connection; s.mu must be held.
func (s *Server) stopListening(cut bool) {
	if s.ln != nil {
		s.ln.Close()
		s.ln = nil
	}
	if cut && s.http != nil {
		s.conns.setCut(true)
		s.http.Close()
		s.http = nil
	}
}

// Addr is the host:port the server listens on, the same across restarts.
func (s *Server) Addr() string { return s.addr }

// URL is http:// and Addr.
func (s *Server) URL() string { return "http://" + s.addr }

// ControlAddr is the host:port of the control listener, "" without one.
func (s *Server) ControlAddr() string {
	if s.control == nil {
		return ""
	}
	return s.control.Addr
}

// Close cuts all connections, stops the engine and waits for every goroutine of
// the server, or for ctx.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
		s.faults.clear()
		for t := range s.timers {
			t.Stop()
		}
		s.stopListening(true)
		if s.control != nil {
			s.control.Close()
		}
		s.proc.Load().end()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.serving.Wait()
		s.conns.wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close %s: handlers still run: %w", s.addr, ctx.Err())
	}
}

// Stats returns a consistent view of the engine and the counters beside it.
func (s *Server) Stats() ServerStats {
	p := s.proc.Load()
	p.mu.Lock()
	st := ServerStats{Engine: p.eng.Stats(), StartedAt: p.started, InFlight: len(p.calls)}
	p.mu.Unlock()
	s.mu.Lock()
	st.Listening = s.ln != nil
	s.mu.Unlock()
	st.Requests, st.Executed, st.Completed = s.counts.requests.Load(), s.counts.executed.Load(), s.counts.completed.Load()
	st.Aborted, st.Errored = s.counts.aborted.Load(), s.counts.errored.Load()
	st.Connections = s.conns.count()
	return st
}

// maxAborts bounds the record of aborts; older ones are forgotten.
const maxAborts = 4096

// Aborts returns the requests given up because their client left, oldest first.
func (s *Server) Aborts() []Abort {
	s.abortMu.Lock()
	defer s.abortMu.Unlock()
	return slices.Clone(s.aborts)
}

func (s *Server) recordAbort(a Abort) {
	s.counts.aborted.Add(1)
	s.abortMu.Lock()
	defer s.abortMu.Unlock()
	if len(s.aborts) >= maxAborts {
		s.aborts = slices.Delete(s.aborts, 0, maxAborts/2)
	}
	s.aborts = append(s.aborts, a)
}

// Fill loads background requests that keep about fraction (0..1) of the KV cache
// in use until the server restarts or closes: a server that others keep busy.
func (s *Server) Fill(fraction float64) error {
	if fraction < 0 || fraction > 1 {
		return fmt.Errorf("fill %g; want 0 to 1", fraction)
	}
	if fraction > 0 {
		s.proc.Load().addFill(fraction)
	}
	return nil
}

// OOM kills the process as the kernel would: every connection is cut, the port
// refuses. After down it starts anew, at 0 only when Restart is called.
func (s *Server) OOM(down time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.stopListening(true)
	s.proc.Load().end()
	if down > 0 {
		s.after(down, func() {
			if s.ln == nil {
				s.startAnew()
			}
		})
	}
}

// Restart ends the process, if it runs, and starts another on the same port:
// caches, responses, counters and the adapters loaded at run time are gone.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("server is closed")
	}
	s.stopListening(true)
	s.proc.Load().end()
	return s.startAnew()
}

// startAnew starts a process and listens; s.mu must be held.
func (s *Server) startAnew() error {
	p, err := s.newProcess()
	if err != nil {
		return err
	}
	s.proc.Store(p)
	return s.listen(s.addr)
}

// Refuse closes the port but leaves the open connections; after d it opens
// again, at 0 only when Accept is called.
func (s *Server) Refuse(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.stopListening(false)
	if d > 0 {
		s.after(d, func() { s.accept() })
	}
}

// Accept opens the port again after Refuse.
func (s *Server) Accept() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accept()
}

func (s *Server) accept() error {
	if s.closed || s.ln != nil {
		return nil
	}
	return s.listen(s.addr)
}

// after runs f with s.mu held unless the server closes before; s.mu must be held.
func (s *Server) after(d time.Duration, f func()) {
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.timers, t)
		if !s.closed {
			f()
		}
	})
	s.timers[t] = struct{}{}
}

// SetKeepAlive changes how long an idle connection stays open.
func (s *Server) SetKeepAlive(d time.Duration) { s.conns.keepAlive.Store(int64(d)) }

// Sleep puts the engine to sleep as POST /sleep does: level 1 keeps the weights
// in host memory, 2 discards them. Running requests are aborted.
func (s *Server) Sleep(level int) {
	p := s.proc.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sleep = min(max(level, 1), 2)
	for c := range p.calls {
		p.abortLocked(c)
	}
	p.eng.SetPaused(true, p.now())
	p.eng.ResetPrefixCache()
	p.nudge()
}

// Wake ends Sleep.
func (s *Server) Wake() {
	p := s.proc.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sleep = 0
	p.eng.SetPaused(false, p.now())
	p.nudge()
}

// connSet tracks the client connections and closes those idle for too long, as
// uvicorn does. The close may cross a request on its way in; that race is real.
type connSet struct {
	keepAlive atomic.Int64 // time.Duration

	mu       sync.Mutex
	open     map[net.Conn]*time.Timer // nil timer while active
	handlers int                      // running, hijacked ones included
	cut      bool                     // close every connection that appears
	changing sync.Cond                // open or handlers went down
}

func (c *connSet) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = make(map[net.Conn]*time.Timer)
	}
	if t := c.open[conn]; t != nil {
		t.Stop()
	}
	switch state {
	case http.StateNew, http.StateActive:
		c.open[conn] = nil
		if c.cut {
			conn.Close()
		}
	case http.StateIdle:
		c.open[conn] = time.AfterFunc(time.Duration(c.keepAlive.Load()), func() { conn.Close() })
	case http.StateClosed, http.StateHijacked:
		delete(c.open, conn)
		c.broadcast()
	}
}

// setCut closes all connections, and new ones too until it is called with false.
func (c *connSet) setCut(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if cut {
		for conn := range c.open {
			conn.Close()
		}
	}
}

func (c *connSet) enter() {
	c.mu.Lock()
	c.handlers++
	c.mu.Unlock()
}

func (c *connSet) leave() {
	c.mu.Lock()
	c.handlers--
	c.broadcast()
	c.mu.Unlock()
}

func (c *connSet) broadcast() {
	if c.changing.L != nil {
		c.changing.Broadcast()
	}
}

func (c *connSet) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open)
}

// wait blocks until no connection is open and no handler runs.
func (c *connSet) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changing.L = &c.mu
	for len(c.open)+c.handlers > 0 {
		c.changing.Wait()
	}
}
