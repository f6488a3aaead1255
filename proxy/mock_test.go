package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"kvgate/internal/names"
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// A mock is a model server that does what its script says, connection by connection, and counts what reaches it.
type mock struct {
	t        testing.TB
	ln       net.Listener
	requests atomic.Int64 // whole requests received
	conns    atomic.Int64
	open     atomic.Int64
	closed   chan time.Time // when a client closed its connection while a request was being served

	mu    sync.Mutex
	serve func(*call)
	last  *call
	live  map[net.Conn]bool
	wg    sync.WaitGroup
	idle  atomic.Int64 // nanoseconds after which it closes idle connections; 0: never
}

// A call is one request as the mock sees it.
type call struct {
	m    *mock
	conn net.Conn
	br   *bufio.Reader
	n    int64 // its number, from 1
	req  *http.Request
	head string // as it came
	body []byte
	done bool // close the connection
}

func newMock(t testing.TB, serve func(*call)) *mock {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return startMock(t, ln, serve)
}

func startMock(t testing.TB, ln net.Listener, serve func(*call)) *mock {
	m := &mock{t: t, ln: ln, serve: serve, live: map[net.Conn]bool{}, closed: make(chan time.Time, 4096)}
	m.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			m.conns.Add(1)
			m.mu.Lock()
			m.live[c] = true
			m.mu.Unlock()
			m.wg.Go(func() { m.run(c) })
		}
	})
	t.Cleanup(m.kill)
	return m
}

// kill stops the mock and resets its connections.
func (m *mock) kill() {
	m.ln.Close()
	m.mu.Lock()
	for c := range m.live {
		if tc, ok := c.(*net.TCPConn); ok {
			tc.SetLinger(0)
		}
		c.Close()
	}
	m.mu.Unlock()
	m.wg.Wait()
}

func (m *mock) url() string { return "http://" + m.ln.Addr().String() }

func (m *mock) run(c net.Conn) {
	m.open.Add(1)
	defer func() {
		c.Close()
		m.open.Add(-1) // whoever sees this may rely on the connection being closed
		m.mu.Lock()
		delete(m.live, c)
		m.mu.Unlock()
	}()
	br := bufio.NewReaderSize(c, 64<<10)
	for {
		if d := m.idle.Load(); d > 0 {
			c.SetReadDeadline(time.Now().Add(time.Duration(d)))
		}
		var head bytes.Buffer
		for !bytes.HasSuffix(head.Bytes(), []byte("\r\n\r\n")) {
			b, err := br.ReadByte()
			if err != nil {
				return
			}
			head.WriteByte(b)
		}
		c.SetReadDeadline(time.Time{})
		req, err := http.ReadRequest(bufio.NewReader(io.MultiReader(bytes.NewReader(head.Bytes()), br)))
		if err != nil {
			m.t.Errorf("mock got a bad request %q: %v", head.String(), err)
			return
		}
		// net/http's body reads from a buffer of its own, so take the bytes directly.
		body := make([]byte, max(0, req.ContentLength))
		if _, err := io.ReadFull(br, body); err != nil {
			return
		}
		cl := &call{m: m, conn: c, br: br, n: m.requests.Add(1), req: req, head: head.String(), body: body}
		m.mu.Lock()
		m.last = cl
		serve := m.serve
		m.mu.Unlock()
		serve(cl)
		if cl.done || strings.EqualFold(req.Header.Get("Connection"), "close") {
			return
		}
	}
}

func (m *mock) setServe(f func(*call)) {
	m.mu.Lock()
	m.serve = f
	m.mu.Unlock()
}

func (m *mock) lastCall() *call {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// raw writes s as it is.
func (c *call) raw(s string) {
	if _, err := io.WriteString(c.conn, s); err != nil {
		c.done = true
	}
}

// json answers with a JSON body.
func (c *call) json(status int, body string, fields ...string) {
	c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", status, lines(fields), len(body), body))
}

func lines(fields []string) string {
	var b strings.Builder
	for _, f := range fields {
		b.WriteString(f + "\r\n")
	}
	return b.String()
}

// sse begins a stream.
func (c *call) sse(fields ...string) {
	c.raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + lines(fields) + "Transfer-Encoding: chunked\r\n\r\n")
}

// chunk sends s as one chunk; "" is the last one.
func (c *call) chunk(s string) { c.raw(fmt.Sprintf("%x\r\n%s\r\n", len(s), s)) }

// event sends s as the data of an event in a chunk.
func (c *call) event(s string) { c.chunk("data: " + s + "\n\n") }

// token sends a chat chunk.
func (c *call) token(s string) {
	c.event(fmt.Sprintf(`{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":%q}}]}`, s))
}

// finish ends a stream properly.
func (c *call) finish() {
	c.event(`{"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":4}}}`)
	c.event("[DONE]")
	c.chunk("")
}

// waitClosed waits until the peer closes, and reports when. The connection can't be used after.
func (c *call) waitClosed(timeout time.Duration) bool {
	c.done = true
	c.conn.SetReadDeadline(time.Now().Add(timeout))
	_, err := c.br.ReadByte()
	if err == nil || isTimeout(err) {
		return false
	}
	c.m.closed <- time.Now()
	return true
}

// reset closes the connection with RST.
func (c *call) reset() {
	c.done = true
	if tc, ok := c.conn.(*net.TCPConn); ok {
		tc.SetLinger(0)
	}
	c.conn.Close()
}

const okBody = `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`

// chat answers like an instant model server, streamed if asked.
func chat(c *call) {
	if bytes.Contains(c.body, []byte(`"stream":true`)) {
		c.sse()
		for _, s := range []string{"one", "two", "three"} {
			c.token(s)
		}
		c.finish()
		return
	}
	c.json(200, okBody)
}

// A gate is a whole data path before some mocks.
type gate struct {
	t      testing.TB
	h      *Handler
	s      *Server
	table  *pool.Table
	addr   string
	mocks  []*mock
	o      PoolOptions
	routes []func(*Routes) // what else they hold
	others []*PoolOptions  // pools besides p
	served chan error
	sink   *recordSink
	start  time.Time
	down   bool
}

// recordSink keeps copies of records.
type recordSink struct {
	mu  sync.Mutex
	all []telemetry.Record
}

func (s *recordSink) Observe(r *telemetry.Record) {
	c := *r
	c.RequestID, c.Method, c.Path, c.Model, c.ClientAddr = strings.Clone(r.RequestID), strings.Clone(r.Method), strings.Clone(r.Path), strings.Clone(r.Model), strings.Clone(r.ClientAddr)
	c.Attempts = append([]telemetry.Attempt(nil), r.Attempts...)
	c.Tenant = strings.Clone(r.Tenant)
	s.mu.Lock()
	s.all = append(s.all, c)
	s.mu.Unlock()
}

// wait returns the records once there are n.
func (s *recordSink) wait(t testing.TB, n int) []telemetry.Record {
	t.Helper()
	var all []telemetry.Record
	eventually(t, fmt.Sprintf("%d records", n), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		all = append(all[:0], s.all...)
		return len(all) >= n
	})
	return all
}

// eventually waits for ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited 20s for %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

type gateOption func(*gate, *Options, *ServerOptions)

func withPool(f func(*PoolOptions)) gateOption {
	return func(g *gate, _ *Options, _ *ServerOptions) { f(&g.o) }
}

func withOptions(f func(*Options, *ServerOptions)) gateOption {
	return func(_ *gate, o *Options, s *ServerOptions) { f(o, s) }
}

func withNames(o names.Options) gateOption {
	return func(g *gate, _ *Options, _ *ServerOptions) {
		g.t.Helper()
		r, err := names.New(o)
		if err != nil {
			g.t.Fatal(err)
		}
		g.routes = append(g.routes, func(routes *Routes) { routes.Names = r })
	}
}

func newGate(t testing.TB, mocks []*mock, opts ...gateOption) *gate {
	t.Helper()
	g := &gate{t: t, mocks: mocks, sink: &recordSink{}, served: make(chan error, 1), start: time.Now()}
	g.o = PoolOptions{Name: "p", Timeouts: Timeouts{Connect: 2 * time.Second, FirstToken: 20 * time.Second, Idle: 20 * time.Second, Total: time.Minute, EndpointIdle: 4 * time.Second}}
	var log *zap.Logger
	if testing.Verbose() {
		log = zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel))
	}
	o := Options{Now: g.now, Sink: g.sink, Log: log}
	so := ServerOptions{DrainTimeout: 10 * time.Second}
	for _, f := range opts {
		f(g, &o, &so)
	}
	if g.o.Policy == nil {
		p, err := scoring.New(scoring.Config{Name: "least_requests"})
		if err != nil {
			t.Fatal(err)
		}
		g.o.Policy = p
	}
	g.table = pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	g.announce()
	all := []PoolOptions{g.o}
	for _, o := range g.others {
		o.Policy = g.o.Policy
		all = append(all, *o)
	}
	routes, err := NewRoutes(all)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range g.routes {
		f(routes)
	}
	o.Table, o.Routes = g.table, routes
	if g.h, err = New(o); err != nil {
		t.Fatal(err)
	}
	if g.s, err = NewServer(g.h, so); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.addr = ln.Addr().String()
	go func() { g.served <- g.s.Serve(ln) }()
	t.Cleanup(g.close)
	return g
}

func (g *gate) now() pool.Instant { return pool.Instant(time.Since(g.start)) + 1 }

func (g *gate) announce() {
	g.t.Helper()
	var specs []pool.Spec
	scheme := "http://"
	if g.o.TLS != nil {
		scheme = "https://"
	}
	for _, m := range g.mocks {
		specs = append(specs, pool.Spec{Pool: "p", URL: scheme + m.ln.Addr().String()})
	}
	if _, _, err := g.table.SetEndpoints("p", specs, g.now()); err != nil {
		g.t.Fatal(err)
	}
}

func (g *gate) close() {
	if g.down {
		return
	}
	g.down = true
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	g.s.Shutdown(ctx)
	if err := <-g.served; err != nil {
		g.t.Errorf("Serve: %v", err)
	}
	g.h.Close()
	g.booked(0)
	if n := g.h.budget.usedBytes(); n != 0 {
		g.t.Errorf("%d body bytes are still held", n)
	}
	if n := g.h.retrying.Load(); n != 0 {
		g.t.Errorf("%d retries are still counted", n)
	}
}

// booked waits until n requests are booked in all, and for nothing else to be when n is 0.
func (g *gate) booked(n int64) {
	g.t.Helper()
	eventually(g.t, fmt.Sprintf("%d bookings", n), func() bool {
		var sum pool.Booked
		for _, r := range g.table.Load().Rows {
			b := r.Booked()
			sum.Requests += b.Requests
			sum.PendingTokens += b.PendingTokens
			sum.KVTokens += b.KVTokens
		}
		return sum.Requests == n && (n != 0 || sum == (pool.Booked{}))
	})
}

// A client is a connection to the gate.
type client struct {
	t testing.TB
	net.Conn
	br *bufio.Reader
}

func (g *gate) dial() *client {
	g.t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	return &client{g.t, c, bufio.NewReader(c)}
}

func post(path, body string, fields ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", path, lines(fields), len(body), body)
}

const (
	chatPath   = "/v1/chat/completions"
	plainBody  = `{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":10}`
	streamBody = `{"model":"m","messages":[{"role":"user","content":"hello there"}],"stream":true}`
)

func newReader(c net.Conn) *bufio.Reader { return bufio.NewReader(c) }

func (c *client) send(s string) *client {
	c.t.Helper()
	if _, err := io.WriteString(c.Conn, s); err != nil {
		c.t.Fatal(err)
	}
	return c
}

// A reply is a response read whole.
type reply struct {
	*http.Response
	body string
	err  error // of reading the body
}

// head reads a response's head.
func (c *client) head() *http.Response {
	c.t.Helper()
	r, err := http.ReadResponse(c.br, nil)
	if err != nil {
		c.t.Fatalf("reading an answer: %v", err)
	}
	return r
}

func (c *client) read() reply {
	c.t.Helper()
	r := c.head()
	b, err := io.ReadAll(r.Body)
	return reply{r, string(b), err}
}

// do sends one request on a new connection.
func (g *gate) do(body string, fields ...string) reply {
	g.t.Helper()
	c := g.dial()
	defer c.Close()
	return c.send(post(chatPath, body, fields...)).read()
}

// What an instant server sends.
const (
	plainReply  = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 15:16:22 GMT\r\nserver: uvicorn\r\ncontent-length: 207\r\ncontent-type: application/json\r\n\r\n" + okBody
	streamReply = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n" +
		"50\r\ndata: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"created\":123}\n\n\r\n" + "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
