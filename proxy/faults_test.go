package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/pool"
	"kvgate/scoring"
)

// docs/failures.md lists what can fail and names the test of each. Those here have no better place.

// onlyTo is a gate whose requests all have the choice between an address and a mock that works.
func onlyTo(t *testing.T, address string, f func(*PoolOptions)) (*gate, *mock) {
	t.Helper()
	good := newMock(t, chat)
	p, err := scoring.New(scoring.Config{Name: "round_robin"})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, []*mock{good}, withPool(func(o *PoolOptions) { o.Policy = p; f(o) }))
	if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: good.url()}, {Pool: "p", URL: "http://" + address}}, g.now()); err != nil {
		t.Fatal(err)
	}
	return g, good
}

// An endpoint that takes no connections in time costs its requests that time, and no answer.
func TestConnectTimeout(t *testing.T) {
	g, good := onlyTo(t, fullListener(t), func(o *PoolOptions) { o.Timeouts.Connect = 100 * time.Millisecond })
	moved := 0
	for i := range 6 {
		if a := g.do(plainBody); a.StatusCode != 200 {
			t.Fatalf("%d %s", a.StatusCode, a.body)
		}
		r := g.sink.wait(t, i+1)[i]
		if len(r.Attempts) == 2 {
			moved++
			if r.Attempts[0].Outcome != "endpoint_connect" {
				t.Errorf("the first attempt ended with %s", r.Attempts[0].Outcome)
			}
		}
	}
	if moved == 0 || good.requests.Load() != 6 {
		t.Errorf("%d of 6 requests moved on; the good endpoint got %d", moved, good.requests.Load())
	}
}

// A kept connection that is reset after a request was written on it may have carried it: the request is sent again only
// where that is switched on.
func TestResetOnReuse(t *testing.T) {
	for _, replay := range []bool{false, true} {
		var first atomic.Bool
		serve := func(c *call) {
			if c.n == 2 && !first.Swap(true) {
				c.reset()
				return
			}
			chat(c)
		}
		m := newMock(t, serve)
		other := newMock(t, chat)
		g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) { o.Retry.ReplayUnanswered = replay }))
		if a := g.do(plainBody); a.StatusCode != 200 {
			t.Fatal(a.StatusCode)
		}
		g.mocks = append(g.mocks, other)
		g.announce()
		var statuses []int
		for !first.Load() && len(statuses) < 20 { // whichever of the two is chosen
			statuses = append(statuses, g.do(plainBody).StatusCode)
		}
		want := 502
		if replay {
			want = 200
		}
		if got := statuses[len(statuses)-1]; got != want || !first.Load() {
			t.Errorf("replay %v: %v; want %d at last", replay, statuses, want)
		}
		if m.conns.Load() != 1 {
			t.Errorf("%d connections; the second request was to come on the first one's", m.conns.Load())
		}
	}
}

// vLLM sends the head of a stream before the first token: the wait for that goes on, and what comes of it is a 504, not a
// cut stream.
func TestHeadWithoutToken(t *testing.T) {
	m := newMock(t, func(c *call) { c.sse(); c.waitClosed(10 * time.Second) })
	g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) { o.Timeouts.FirstToken = 200 * time.Millisecond }))
	a := g.do(streamBody)
	if a.StatusCode != 504 || a.err != nil || !strings.Contains(a.body, `"code":"endpoint_timeout"`) {
		t.Errorf("%d %v %s", a.StatusCode, a.err, a.body)
	}
	select {
	case <-m.closed:
	case <-time.After(10 * time.Second):
		t.Error("the endpoint goes on computing")
	}
}

// Any byte shows that an endpoint lives, a comment too.
func TestCommentsKeepAStreamAlive(t *testing.T) {
	m := newMock(t, func(c *call) {
		c.sse()
		c.token("a")
		for range 8 {
			time.Sleep(100 * time.Millisecond)
			c.chunk(": ping\n\n")
		}
		c.finish()
	})
	g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) { o.Timeouts.Idle = 400 * time.Millisecond }))
	if a := g.do(streamBody); a.err != nil || strings.Count(a.body, ": ping\n\n") != 8 || !strings.HasSuffix(a.body, "[DONE]\n\n") {
		t.Errorf("%v %q", a.err, a.body)
	}
}

// When so few endpoints are healthy that the rest can't carry the load, ejections are lifted; and when none is, all are
// tried.
func TestPanicMode(t *testing.T) {
	var broken sync.Map
	serve := func(c *call) {
		if _, bad := broken.Load(c.m); bad {
			c.json(500, `{"error":{"message":"boom"}}`)
			return
		}
		chat(c)
	}
	mocks := []*mock{newMock(t, serve), newMock(t, serve), newMock(t, serve), newMock(t, serve)}
	g := newGate(t, mocks, withPool(func(o *PoolOptions) { o.Health = HealthOptions{BasePause: time.Minute} }))
	row := func(m *mock) *pool.Row {
		for i, rows := 0, g.table.Load().Rows; i < len(rows); i++ {
			if rows[i].Endpoint.Address == m.ln.Addr().String() {
				return &rows[i]
			}
		}
		t.Fatal("no such endpoint")
		return nil
	}
	for _, m := range mocks[:3] { // three of four fail
		broken.Store(m, true)
	}
	ejected := func() (n int) {
		for _, r := range g.table.Load().Rows {
			if r.EjectedUntil() > g.now() {
				n++
			}
		}
		return n
	}
	for range 200 {
		g.do(plainBody)
		if n := ejected(); n > 1 { // a third of four, and never so many that fewer than half are left
			t.Fatalf("%d of 4 are ejected", n)
		}
	}
	if ejected() != 1 {
		t.Fatalf("%d ejected; want 1", ejected())
	}
	// Two more go down: one of four is healthy, and the ejected one is better tried than spared.
	var up []*mock
	for _, m := range mocks {
		if row(m).EjectedUntil() > g.now() {
			continue
		}
		if up = append(up, m); len(up) <= 2 {
			g.table.SetState(row(m).Endpoint, pool.Unreachable, true, g.now())
		}
	}
	eventually(t, "the ejection to be lifted", func() bool { return ejected() == 0 })
	// Nobody is left: then everybody is asked.
	broken.Clear()
	for _, m := range mocks {
		g.table.SetState(row(m).Endpoint, pool.Unreachable, true, g.now())
	}
	if a := g.do(plainBody); a.StatusCode != 200 {
		t.Errorf("with all down as far as is known: %d %s", a.StatusCode, a.body)
	}
}

// An answer whose head is larger than the limit is no answer.
func TestLargeResponseHead(t *testing.T) {
	m := newMock(t, func(c *call) {
		c.json(200, okBody, "X-Big: "+strings.Repeat("x", 10<<10))
		c.done = true
	})
	g := newGate(t, []*mock{m}, withOptions(func(o *Options, _ *ServerOptions) { o.Limits.ResponseHeaderBytes = 8 << 10 }))
	if a := g.do(plainBody); a.StatusCode != 502 || !strings.Contains(a.body, `"endpoint_reset"`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	g.outcome(1, "endpoint_reset")
}

// Nothing that a client writes chooses the address that a request is sent to.
func TestRequestsGoToEndpointsAlone(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	go func() {
		for {
			c, err := other.Accept()
			if err != nil {
				return
			}
			t.Error("a client led the gateway elsewhere")
			c.Close()
		}
	}()
	evil := other.Addr().String()
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	body := fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(plainBody), plainBody)
	for _, raw := range []string{
		"POST /v1/chat/completions HTTP/1.1\r\nHost: " + evil + "\r\n" + body,
		"POST http://" + evil + "/v1/chat/completions HTTP/1.1\r\nHost: " + evil + "\r\n" + body,
		"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nX-Forwarded-Host: " + evil + "\r\nForwarded: host=" + evil + "\r\n" + body,
		"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nX-Gateway-Destination-Endpoint: " + evil + "\r\nX-Prefiller-Host-Port: " + evil + "\r\n" + body,
	} {
		before := m.requests.Load()
		if a := g.dial().send(raw).read(); a.StatusCode != 200 || m.requests.Load() != before+1 {
			t.Errorf("%q: %d, %d requests at the endpoint", raw, a.StatusCode, m.requests.Load()-before)
		}
		if h := m.lastCall().req.Host; h != m.ln.Addr().String() {
			t.Errorf("the endpoint was called %s", h)
		}
		if strings.Contains(m.lastCall().head, "Prefiller") || strings.Contains(m.lastCall().head, "Destination") {
			t.Errorf("a header that steers routing went on: %s", m.lastCall().head)
		}
	}
}

// When the gateway itself is out of descriptors or ports, no endpoint is blamed, and clients are told to wait.
func TestOutOfDescriptorsForEndpoints(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	if a := g.do(plainBody); a.StatusCode != 200 {
		t.Fatal(a.StatusCode)
	}
	x := newExchange(g.h)
	for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS} {
		f := x.connectFailure(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", errno)})
		if f.outcome != Saturated || f.retryAfterSeconds == 0 || f.unexecuted {
			t.Errorf("%v: %v; want saturated, and no other endpoint", errno, f)
		}
	}
	if f := x.connectFailure(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}); f.outcome != EndpointConnect || !f.unexecuted {
		t.Errorf("refused: %v", f)
	}
}

// Nothing of a body, nor what an endpoint writes about one, gets into logs or records.
func TestBodiesAreNotLogged(t *testing.T) {
	const planted = "planted-7d1f"
	core, logs := observer.New(zap.DebugLevel)
	answer := func(c *call) {
		c.json(503, `{"error":{"message":"the prompt `+planted+` is refused","type":"`+planted+` x","code":"overloaded"}}`)
	}
	m := newMock(t, answer)
	g := newGate(t, []*mock{m, newMock(t, func(c *call) { answer(c) })}, withOptions(func(o *Options, _ *ServerOptions) { o.Log = zap.New(core) }),
		withPool(func(o *PoolOptions) { o.Health = HealthOptions{ConsecutiveFailures: 1} }))
	n := 0
	try := func(body string, want int) {
		t.Helper()
		n++
		if a := g.do(body); a.StatusCode != want {
			t.Errorf("%s: %d %s; want %d", body, a.StatusCode, a.body, want)
		}
	}
	try(`{"`+planted+`":1,"`+planted+`":2,"model":"m","messages":[]}`, 400)
	try(`{"model":"m","messages":[],"max_tokens":"`+planted+`"}`, 400)
	try(`{"model":"m","messages":[],"stream":"`+planted+`"}`, 400)
	try(`{"model":"m","messages":[],`+planted+`}`, 400)
	try(`{"model":"m","messages":["`+planted+`"]}`+planted, 400)
	try(strings.Replace(plainBody, "hello there", planted, 1), 503)
	for _, k := range []string{"500", `"` + planted + ` y"`, "503"} {
		m.setServe(func(c *call) {
			c.sse()
			if k == "500" {
				c.token("a")
			}
			c.event(`{"error":{"message":"` + planted + `","type":"` + planted + ` z","code":` + k + `}}`)
			c.chunk("")
		})
		g.mocks[1].setServe(m.serve)
		try(strings.Replace(streamBody, "hello there", planted, 1), 200)
	}
	m.setServe(func(c *call) { c.raw("HTTP/1.1 200 " + planted + "\x01\r\n\r\n"); c.done = true })
	g.mocks[1].setServe(m.serve)
	try(plainBody, 502)
	for _, r := range g.sink.wait(t, n) {
		if strings.Contains(fmt.Sprint(r), planted) {
			t.Errorf("record: %+v", r)
		}
		if r.Error == "" && r.Status != 503 { // which is passed on as it came
			t.Errorf("no error in %+v", r)
		}
	}
	for _, l := range logs.All() {
		if text := fmt.Sprint(l.Message, l.ContextMap()); strings.Contains(text, planted) {
			t.Errorf("logged: %s", text)
		}
	}
}

// How many requests a drain has cut off is what their clients would say.
func TestDrainCountsWhatItCuts(t *testing.T) {
	started := make(chan struct{})
	var once sync.Once
	m := newMock(t, func(c *call) {
		c.sse()
		c.token("a")
		if strings.Contains(string(c.body), "finishes") {
			<-started
			time.Sleep(50 * time.Millisecond) // about when the drain's time is over
			c.finish()
			return
		}
		c.waitClosed(20 * time.Second)
	})
	g := newGate(t, []*mock{m}, withOptions(func(_ *Options, s *ServerOptions) { s.DrainTimeout = 50 * time.Millisecond }))
	const n = 60
	var clients []*client
	for i := range n {
		body := streamBody
		if i%2 == 0 {
			body = strings.Replace(streamBody, "hello", "finishes", 1)
		}
		clients = append(clients, g.dial().send(post(chatPath, body)))
	}
	eventually(t, "all streams to run", func() bool { return m.requests.Load() == n })
	done := make(chan Drained)
	go func() {
		once.Do(func() { close(started) })
		done <- g.s.Shutdown(t.Context())
	}()
	cut, whole := 0, 0
	for _, c := range clients {
		r := c.head()
		b, err := io.ReadAll(r.Body)
		switch {
		case err == nil && strings.HasSuffix(string(b), "[DONE]\n\n"):
			whole++
		case errors.Is(err, io.ErrUnexpectedEOF) && strings.Contains(string(b), `"code":"draining"`):
			cut++
		default:
			t.Errorf("%v %q", err, b)
		}
	}
	if d := <-done; d.Cut != cut || d.Finished != whole || cut+whole != n {
		t.Errorf("%+v; the clients saw %d cut and %d whole", d, cut, whole)
	}
}

// The clients' port serves the API, and nothing of the gateway's or the servers' own.
func TestDataPortServesTheAPIAlone(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	for _, path := range []string{
		"/metrics", "/health", "/-/ready", "/-/reload", "/debug/pprof/", "/debug/snapshot", "/v1/load_lora_adapter", "/sim/faults",
		"/sleep", "/v1/../metrics", "/v1/chat/completions/..%2f..%2f..%2fmetrics", "//metrics", "/%6detrics",
	} {
		for _, method := range []string{"GET", "POST"} {
			a := g.dial().send(method + " " + path + " HTTP/1.1\r\nHost: gate\r\nContent-Length: 2\r\n\r\n{}").read()
			if a.StatusCode != 404 && a.StatusCode != 405 && a.StatusCode != 400 {
				t.Errorf("%s %s: %d %s", method, path, a.StatusCode, a.body)
			}
		}
	}
	if n := m.requests.Load(); n != 0 {
		t.Errorf("%d requests reached the endpoint", n)
	}
}
