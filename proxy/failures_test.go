package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/pool"
)

// ended closes the gate and checks that the last record has the outcome.
func (g *gate) outcome(n int, want string) {
	g.t.Helper()
	r := g.sink.wait(g.t, n)[n-1]
	if r.Outcome != want {
		g.t.Errorf("outcome %s (%s); want %s", r.Outcome, r.Error, want)
	}
}

// B3: load is counted from the choice, not from the answer's head.
func TestBookingsCoverTheWholeRequest(t *testing.T) {
	release := make(chan struct{})
	slow := func(c *call) { <-release; chat(c) }
	mocks := []*mock{newMock(t, slow), newMock(t, slow), newMock(t, slow)}
	g := newGate(t, mocks)
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { g.do(plainBody) })
	}
	eventually(t, "all requests to arrive", func() bool {
		return mocks[0].requests.Load()+mocks[1].requests.Load()+mocks[2].requests.Load() == 30
	})
	for i, m := range mocks {
		if n := m.requests.Load(); n < 8 || n > 12 {
			t.Errorf("mock %d got %d of 30; want 10 or so", i, n)
		}
	}
	// B6: discovery saying the same again changes no count.
	g.announce()
	g.booked(30)
	close(release)
	wg.Wait()
	g.booked(0)
}

// T2, T3: every piece goes out before the next is made, cut anywhere, and bytes are the same.
func TestStreamIsFlushedPieceByPiece(t *testing.T) {
	next := make(chan struct{})
	pieces := []string{"data: {\"cho", "ices\":[{\"delta\":{}}]}\n", "\n: comment\n\n", "data: x", "\n\ndata: [DONE]\n\n"}
	m := newMock(t, func(c *call) {
		c.sse()
		for _, p := range pieces {
			<-next
			c.chunk(p)
		}
		c.chunk("")
	})
	g := newGate(t, []*mock{m})
	c := g.dial().send(post(chatPath, streamBody))
	var r *http.Response
	for _, p := range pieces {
		next <- struct{}{}
		if r == nil {
			r = c.head()
		}
		b := make([]byte, len(p))
		if _, err := io.ReadFull(r.Body, b); err != nil || string(b) != p {
			t.Fatalf("got %q, %v; want %q", b, err, p)
		}
	}
	if b, err := io.ReadAll(r.Body); err != nil || len(b) != 0 {
		t.Errorf("then %q, %v", b, err)
	}
}

// T6: an error as JSON to a streamed request keeps its type, status and body; odd fields and headers survive (D1, T8).
func TestAnswersPassUnchanged(t *testing.T) {
	big := strings.Repeat("x", 32<<10)
	m := newMock(t, func(c *call) {
		c.json(422, `{"detail":[{"msg":"no"}],"n":1e2}`, "X-Big: "+big, "Server: uvicorn", "X-Kvgate-Endpoint: fake", "Connection: x-gone", "X-Gone: 1")
	})
	g := newGate(t, []*mock{m})
	a := g.do(streamBody, "X-Big: "+big)
	if a.StatusCode != 422 || a.body != `{"detail":[{"msg":"no"}],"n":1e2}` || a.Header.Get("Content-Type") != "application/json" || a.Header.Get("X-Big") != big ||
		a.Header.Get("Server") != "uvicorn" || a.Header.Get("X-Kvgate-Endpoint") != "" || a.Header.Get("X-Gone") != "" {
		t.Errorf("%d %v %q", a.StatusCode, a.Header, a.body)
	}
	if m.lastCall().req.Header.Get("X-Big") != big {
		t.Error("a large request header did not arrive")
	}
	g.outcome(1, "endpoint_status")
	if ep := g.h.endpoints.all()[0]; ep.health.failures.Load() != 0 {
		t.Error("a 422 counts against the endpoint")
	}
}

// Fault 1, A1: an answer cut off after it began looks cut off: an error event, no [DONE], no last chunk.
func TestCutStream(t *testing.T) {
	cuts := map[string]func(*call){
		"reset":         (*call).reset,
		"closed":        func(c *call) { c.done = true; c.conn.Close() },
		"in a chunk":    func(c *call) { c.raw("20\r\ndata: {\"cho"); c.done = true; c.conn.Close() },
		"bad chunk":     func(c *call) { c.raw("zz\r\nabc"); c.done = true },
		"idle too long": func(c *call) { c.waitClosed(10 * time.Second) },
	}
	for _, api := range []struct{ path, want string }{
		{chatPath, `data: {"error":{"message":`},
		{"/v1/messages", "event: error\ndata: {\"type\":\"error\""},
		{"/v1/responses", "event: error\ndata: {\"type\":\"error\""},
	} {
		for name, cut := range cuts {
			t.Run(name+api.path, func(t *testing.T) {
				m := newMock(t, func(c *call) { c.sse(); c.token("a"); c.chunk("data: {\"half"); cut(c) })
				g := newGate(t, []*mock{m, newMock(t, m.serve)}, withPool(func(o *PoolOptions) { o.Timeouts.Idle = 200 * time.Millisecond }))
				a := g.dial().send(post(api.path, `{"model":"m","stream":true,"messages":[],"input":"x"}`)).read()
				if name == "bad chunk" && a.StatusCode == 502 {
					return // it came with the first bytes, so nothing had been sent yet
				}
				if a.StatusCode != 200 || a.err == nil {
					t.Errorf("status %d, end %v; want 200 and a cut", a.StatusCode, a.err)
				}
				i := strings.Index(a.body, "half")
				if i < 0 || !strings.Contains(a.body[i:], "\n\n"+api.want) || strings.Contains(a.body, "[DONE]") {
					t.Errorf("body %q; want an error event at its end", a.body)
				}
				want := "endpoint_reset"
				if name == "idle too long" {
					want = "endpoint_timeout"
				}
				g.outcome(1, want)
				if api.path != "/v1/messages" && !strings.Contains(a.body, want) {
					t.Errorf("body %q; want code %s", a.body, want)
				}
				if n := m.requests.Load() + g.mocks[1].requests.Load(); n != 1 {
					t.Errorf("sent %d times", n)
				}
			})
		}
	}
}

// A body with a length that comes short, or an answer without a byte.
func TestCutAnswers(t *testing.T) {
	f := func(name string, serve func(*call), status int, outcome string) {
		t.Run(name, func(t *testing.T) {
			m := newMock(t, serve)
			g := newGate(t, []*mock{m})
			a := g.do(plainBody)
			if a.StatusCode != status || status == 200 && a.err == nil {
				t.Errorf("status %d, %v; want %d", a.StatusCode, a.err, status)
			}
			if status == 502 && (!strings.Contains(a.body, `"code":"`+outcome+`"`) || strings.Contains(a.body, "127.0.0.1")) {
				t.Errorf("body %s", a.body)
			}
			g.outcome(1, outcome)
			if n := m.requests.Load(); n != 1 {
				t.Errorf("executed %d times", n)
			}
		})
	}
	f("short", func(c *call) {
		c.raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
		c.reset()
	}, 200, "endpoint_reset")
	f("no byte of the body", func(c *call) {
		c.raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
		c.done = true
		c.conn.Close()
	}, 502, "endpoint_reset")
	f("nothing", func(c *call) { c.done = true; c.conn.Close() }, 502, "endpoint_reset")
	f("garbage", func(c *call) { c.raw("SSH-2.0-x\r\n"); c.done = true }, 502, "endpoint_reset")
	f("half a head", func(c *call) { c.raw("HTTP/1.1 200 OK\r\nContent-"); c.done = true; c.conn.Close() }, 502, "endpoint_reset")
}

// F1, fault 4: a connection that the endpoint has closed while it was idle is never used again; one that is open is.
func TestStaleConnections(t *testing.T) {
	var closes atomic.Bool
	enough := make(chan struct{}, 8)
	m := newMock(t, func(c *call) {
		ends := closes.Load()
		chat(c)
		if ends { // after the answer, when it is told: never in the moment in which nobody can know
			<-enough
			c.done = true
		}
	})
	g := newGate(t, []*mock{m})
	const n = 8
	for i := range n {
		closes.Store(i%2 == 1)
		if a := g.do(plainBody); a.StatusCode != 200 {
			t.Fatalf("request %d: %d %s", i, a.StatusCode, a.body)
		}
		cs := &g.h.endpoints.all()[0].conns
		idle := func() *endpointConn {
			cs.mu.Lock()
			defer cs.mu.Unlock()
			if len(cs.idle) != 1 {
				return nil
			}
			return cs.idle[0]
		}
		eventually(t, "the connection to be idle", func() bool { return idle() != nil })
		if closes.Load() {
			enough <- struct{}{}
			// The end of a connection takes its time on a busy machine, on loopback too. The check is what a request does.
			eventually(t, "the gateway's side to know of the end", func() bool { c := idle(); return c == nil || !c.live() })
		}
	}
	if got := m.requests.Load(); got != n {
		t.Errorf("%d requests were executed %d times", n, got)
	}
	if got := m.conns.Load(); got != n/2 {
		t.Errorf("%d connections were used; want %d, each for two requests", got, n/2)
	}
}

// Fault: what an endpoint sends unasked is not the answer to the next request.
func TestUnsolicitedBytes(t *testing.T) {
	m := newMock(t, func(c *call) {
		c.json(200, okBody)
		if c.n == 1 {
			c.json(200, `{"evil":true}`)
		}
	})
	g := newGate(t, []*mock{m})
	for range 5 {
		if a := g.do(plainBody); a.body != okBody {
			t.Fatalf("got %s", a.body)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// F2, F3: what was surely not executed moves on once; what may have been is not repeated.
func TestRetries(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	f := func(name string, first func(*call), moves bool, status int, opts ...gateOption) {
		t.Run(name, func(t *testing.T) {
			var firstCalls, secondCalls atomic.Int64
			var turn atomic.Int64
			serve := func(c *call) {
				if turn.Add(1) == 1 {
					firstCalls.Add(1)
					first(c)
					return
				}
				secondCalls.Add(1)
				chat(c)
			}
			g := newGate(t, []*mock{newMock(t, serve), newMock(t, serve)}, opts...)
			body := plainBody
			if strings.Contains(name, "stream") {
				body = streamBody
			}
			a := g.do(body)
			if a.StatusCode != status || a.err != nil {
				t.Errorf("status %d %q %v; want %d", a.StatusCode, a.body, a.err, status)
			}
			if got := secondCalls.Load() == 1; got != moves || firstCalls.Load() != 1 {
				t.Errorf("moved on: %v; want %v (first %d)", got, moves, firstCalls.Load())
			}
			r := g.sink.wait(t, 1)[0]
			if want := 1 + secondCalls.Load(); int64(len(r.Attempts)) != want {
				t.Errorf("%d attempts recorded; want %d", len(r.Attempts), want)
			}
			if moves && r.Attempts[0].Endpoint == r.Attempts[1].Endpoint {
				t.Error("the same endpoint twice")
			}
			g.booked(0)
		})
	}
	f("503", func(c *call) { c.json(503, `{"error":"loading model"}`) }, true, 200)
	f("429", func(c *call) { c.json(429, `{"error":"overloaded","error_type":"overloaded"}`, "Retry-After: 2") }, true, 200)
	f("404 of a model", func(c *call) {
		c.json(404, "{\"error\":{\"message\":\"The model `m` does not exist.\",\"type\":\"NotFoundError\",\"param\":\"model\",\"code\":404}}")
	}, true, 200)
	f("404 of a path", func(c *call) { c.json(404, `{"detail":"Not Found"}`) }, false, 404)
	f("500", func(c *call) { c.json(500, `{"error":{"message":"boom"}}`) }, false, 500)
	f("400", func(c *call) { c.json(400, `{"error":{"message":"bad"}}`) }, false, 400)
	f("closed unanswered", func(c *call) { c.done = true; c.conn.Close() }, false, 502)
	f("closed unanswered, replay on", func(c *call) { c.done = true; c.conn.Close() }, true, 200, withPool(func(o *PoolOptions) { o.Retry.ReplayUnanswered = true }))
	f("retries off", func(c *call) { c.json(503, `{}`) }, false, 503, withPool(func(o *PoolOptions) { o.Retry.MaxAttempts = 1 }))
	f("full queue in a stream", func(c *call) {
		c.sse()
		c.event(`{"error":{"object":"error","message":"The request queue is full.","type":"ServiceUnavailable","param":null,"code":503}}`)
		c.event("[DONE]")
		c.chunk("")
	}, true, 200)
	f("client's error in a stream", func(c *call) {
		c.sse()
		c.event(`{"error":{"message":"too long","type":"BadRequestError","code":400}}`)
		c.event("[DONE]")
		c.chunk("")
	}, false, 200)
	f("first_token timeout of a stream", func(c *call) { c.waitClosed(10 * time.Second) }, false, 504,
		withPool(func(o *PoolOptions) { o.Timeouts.FirstToken = 150 * time.Millisecond }))

	t.Run("refused", func(t *testing.T) {
		g := newGate(t, []*mock{newMock(t, chat), newMock(t, chat)})
		specs := []pool.Spec{{Pool: "p", URL: "http://" + dead.Addr().String()}}
		for _, m := range g.mocks {
			specs = append(specs, pool.Spec{Pool: "p", URL: m.url()})
		}
		if _, _, err := g.table.SetEndpoints("p", specs, g.now()); err != nil {
			t.Fatal(err)
		}
		for range 50 {
			if a := g.do(plainBody); a.StatusCode != 200 {
				t.Fatalf("status %d %s", a.StatusCode, a.body)
			}
		}
		ejected := 0
		for _, r := range g.table.Load().Rows {
			if r.EjectedUntil() > g.now() {
				ejected++
				if r.Endpoint.Address != dead.Addr().String() {
					t.Errorf("%s is ejected", r.Endpoint.ID)
				}
			}
		}
		if ejected != 1 {
			t.Errorf("%d endpoints ejected; want the dead one", ejected)
		}
	})
}

// The client gets the endpoint's own refusal where nobody else can take the request.
func TestRefusalWithoutAlternative(t *testing.T) {
	m := newMock(t, func(c *call) { c.json(503, `{"error":"busy"}`, "Retry-After: 7") })
	g := newGate(t, []*mock{m})
	a := g.do(plainBody)
	if a.StatusCode != 503 || a.body != `{"error":"busy"}` || a.Header.Get("Retry-After") != "7" {
		t.Errorf("%d %q %v", a.StatusCode, a.body, a.Header)
	}
	g2 := newGate(t, []*mock{m, newMock(t, m.serve)})
	a = g2.do(plainBody)
	if a.StatusCode != 503 || a.body != `{"error":"busy"}` {
		t.Errorf("both busy: %d %q", a.StatusCode, a.body)
	}
	if len(g2.sink.wait(t, 1)[0].Attempts) != 2 {
		t.Error("the other endpoint was not tried")
	}
}

// A refusal that is too long to be looked into, or takes its time, goes to the client as it is.
func TestLongRefusals(t *testing.T) {
	big := strings.Repeat("no ", 100_000)
	slow := make(chan struct{})
	for name, serve := range map[string]func(*call, int){
		"long, chunked": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n", status))
			for i := 0; i < len(big); i += 10_000 {
				c.chunk(big[i : i+10_000])
			}
			c.chunk("")
		},
		"long, with a length": func(c *call, status int) { c.json(status, big) },
		"long, up to the close": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.0 %d X\r\n\r\n%s", status, big))
			c.done = true
		},
		"slow, with a length": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", status, len(big), big[:100]))
			<-slow
			c.raw(big[100:])
		},
		"slow from the first byte": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n", status))
			<-slow
			c.chunk(big)
			c.chunk("")
		},
		"slow within a chunk's size": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n%x", status, len(big)))
			<-slow
			c.raw("\r\n" + big + "\r\n0\r\n\r\n")
		},
		"slow and short": func(c *call, status int) {
			c.raw(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: 4\r\n\r\nno", status))
			<-slow
			c.raw(" !")
		},
	} {
		for _, status := range []int{404, 429, 503} {
			t.Run(fmt.Sprint(name, status), func(t *testing.T) {
				t.Parallel()
				m := newMock(t, func(c *call) { serve(c, status) })
				g := newGate(t, []*mock{m})
				a := g.do(plainBody)
				want := big
				if name == "slow and short" {
					want = "no !"
				}
				if a.StatusCode != status || a.body != want || a.err != nil {
					t.Errorf("%d, %d bytes, %v; want %d, %d bytes", a.StatusCode, len(a.body), a.err, status, len(want))
				}
				g.outcome(1, "endpoint_status")
			})
		}
	}
	go func() {
		time.Sleep(heldTimeout + 500*time.Millisecond) // what is tested is what happens after it
		close(slow)
	}()
}

// F4: a client's mistakes neither open nor close a breaker; B10: an endpoint that was busy or ejected comes back.
func TestHealth(t *testing.T) {
	var status atomic.Int64
	status.Store(400)
	flip := func(c *call) { c.json(int(status.Load()), `{"x":1}`) }
	m := newMock(t, flip)
	other := newMock(t, chat)
	g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) {
		o.Health = HealthOptions{BasePause: 150 * time.Millisecond, MaxPause: 300 * time.Millisecond}
	}))
	for range 50 {
		g.do(plainBody)
	}
	e := g.table.Load().Rows[0].Endpoint
	if e.EjectedUntil() != 0 {
		t.Fatal("400s ejected it")
	}
	for i := range 10 { // alone, it is never ejected
		status.Store(500 - 100*int64(i%2))
		g.do(plainBody)
	}
	if e.EjectedUntil() != 0 {
		t.Fatal("the only endpoint was ejected")
	}
	g.mocks = append(g.mocks, other)
	g.announce()
	for i := 0; e.EjectedUntil() <= g.now() && i < 200; i++ {
		status.Store(500 - 100*int64(i%2))
		g.do(plainBody)
	}
	if e.EjectedUntil() <= g.now() {
		t.Fatal("500, 400, 500, 400… did not eject it")
	}
	status.Store(200)
	before := m.requests.Load()
	eventually(t, "the endpoint to come back", func() bool { g.do(plainBody); return m.requests.Load() > before })
	eventually(t, "the failures to be forgiven", func() bool {
		g.do(plainBody)
		return g.h.endpoints.get(e).health.failures.Load() == 0
	})
}

// F6: nobody there is 503 at once.
func TestNoEndpoints(t *testing.T) {
	g := newGate(t, nil)
	a := g.do(plainBody)
	if a.StatusCode != 503 || !strings.Contains(a.body, `"code":"no_endpoints"`) || a.Header.Get("Retry-After") == "" {
		t.Errorf("%d %v %s", a.StatusCode, a.Header, a.body)
	}
}

// A model that nobody serves is told from one that isn't known yet: while a pool has endpoints, or is to have some, and none
// has said what it serves, an unknown name may be theirs, and clients are asked to try again.
func TestModelNotKnownYet(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	f := func(when, name string, want int) {
		t.Helper()
		a := g.do(`{"model":"` + name + `","messages":[]}`)
		if a.StatusCode != want || want == 503 && (a.Header.Get("Retry-After") == "" || !strings.Contains(a.body, `"no_endpoints"`)) {
			t.Errorf("%s: %q: %d %s; want %d", when, name, a.StatusCode, a.body, want)
		}
	}
	f("all known", "n", 404)
	specs := []pool.PoolSpec{{Name: "p", Models: []string{"m"}}, {Name: "q"}}
	routes, err := NewRoutes([]PoolOptions{g.o, {Name: "q", Policy: g.o.Policy}})
	if err != nil {
		t.Fatal(err)
	}
	g.h.SetRoutes(routes)
	g.table.SetPools(specs, g.now())
	f("a pool without endpoints", "n", 503)
	f("a pool without endpoints", "m", 200)
	added, _, err := g.table.SetEndpoints("q", []pool.Spec{{Pool: "q", URL: m.url()}}, g.now())
	if err != nil {
		t.Fatal(err)
	}
	f("one that nobody has looked at", "n", 503)
	f("one that nobody has looked at", "m", 200)
	g.table.SetServed(added[0], &pool.Served{Models: []pool.Model{{ID: "n"}}, At: g.now()})
	g.table.Flush(g.now())
	f("looked at", "n", 200)
	f("looked at", "x", 404)
}

// Fault 38: retries stay within their budget when everything fails.
func TestRetryBudget(t *testing.T) {
	refuse := func(c *call) { time.Sleep(50 * time.Millisecond); c.json(503, `{}`) }
	mocks := []*mock{newMock(t, refuse), newMock(t, refuse), newMock(t, refuse)}
	g := newGate(t, mocks)
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() { g.do(plainBody) })
	}
	wg.Wait()
	total := mocks[0].requests.Load() + mocks[1].requests.Load() + mocks[2].requests.Load()
	if total > 100+60 {
		t.Errorf("100 requests were sent %d times", total)
	}
	for _, r := range g.sink.wait(t, 100) {
		if len(r.Attempts) > 2 {
			t.Fatalf("%d attempts", len(r.Attempts))
		}
	}
}

// Fault 34: a panic costs one request.
func TestPanic(t *testing.T) {
	m := newMock(t, func(c *call) {
		if c.n == 1 {
			c.json(404, `{"error":{"message":"The model does not exist.","code":"model_not_found"}}`)
			return
		}
		chat(c)
	})
	g := newGate(t, []*mock{m}, withOptions(func(o *Options, _ *ServerOptions) { o.OnDoubt = func(*pool.Endpoint) { panic("boom") } }))
	c := g.dial()
	a := c.send(post(chatPath, plainBody)).read()
	if a.StatusCode != 500 || !strings.Contains(a.body, `"code":"internal"`) || strings.Contains(a.body, "boom") || !a.Close || g.h.Panics() != 1 {
		t.Errorf("%d %q, close %v, %d panics", a.StatusCode, a.body, a.Close, g.h.Panics())
	}
	g.outcome(1, "internal")
	g.booked(0)
	if a := g.do(plainBody); a.StatusCode != 200 {
		t.Errorf("then %d", a.StatusCode)
	}
}

// Early answer while uploading (fault of net/http and fasthttp alike): the 413 arrives though the body isn't taken.
func TestEarlyAnswer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1024)
				c.Read(b)
				io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
				time.Sleep(3 * time.Second) // takes nothing of the body
			}()
		}
	}()
	g := newGate(t, nil)
	if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://" + ln.Addr().String()}}, g.now()); err != nil {
		t.Fatal(err)
	}
	a := g.do(`{"model":"m","messages":[],"x":"` + strings.Repeat("y", 20<<20) + `"}`)
	if a.StatusCode != 413 || a.body != "big" {
		t.Errorf("%d %q", a.StatusCode, a.body)
	}
	g.booked(0)
}

// D4: bodies from 1 KB to 32 MB arrive as they were, with a length and chunked; one byte more is 413.
func TestBodies(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	make := func(n int) string {
		const frame = `{"model":"m","messages":[],"x":""}`
		return `{"model":"m","messages":[],"x":"` + strings.Repeat("z", n-len(frame)) + `"}`
	}
	for _, n := range []int{1 << 10, 8<<10 - 1, 32769, 128 << 10, 4 << 20, 32 << 20} {
		body := make(n)
		if a := g.do(body); a.StatusCode != 200 || string(m.lastCall().body) != body {
			t.Errorf("%d bytes: status %d, equal %v", n, a.StatusCode, string(m.lastCall().body) == body)
		}
		if n > 4<<20 {
			continue
		}
		c := g.dial()
		c.send("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")
		c.send(fmt.Sprintf("%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n", n/2, body[:n/2], n-n/2, body[n/2:]))
		if a := c.read(); a.StatusCode != 200 || string(m.lastCall().body) != body {
			t.Errorf("%d bytes, chunked: status %d", n, a.StatusCode)
		}
	}
	if a := g.do(make(32<<20 + 1)); a.StatusCode != 413 {
		t.Errorf("one byte too many: %d", a.StatusCode)
	}
}

// fullListener returns the address of a listener that nobody can connect to, for its backlog is full.
func fullListener(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	if err := setBacklog(ln, 0); err != nil {
		t.Skip("no way to fill a listener's backlog here:", err)
	}
	for range 16 {
		d := net.Dialer{Timeout: 100 * time.Millisecond}
		c, err := d.Dial("tcp", ln.Addr().String())
		if err != nil {
			return ln.Addr().String()
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Skip("the backlog does not fill")
	return ""
}

// setBacklog makes the listener's queue of connections that nobody has accepted as short as it gets.
func setBacklog(ln net.Listener, n int) error {
	rc, err := ln.(*net.TCPListener).SyscallConn()
	if err != nil {
		return err
	}
	var lerr error
	err = rc.Control(func(fd uintptr) { lerr = syscall.Listen(int(fd), n) })
	return errors.Join(err, lerr)
}

// Fault 29: a client that takes nothing of its answer does not keep the endpoint busy for ever.
func TestSlowReader(t *testing.T) {
	m := newMock(t, func(c *call) {
		c.sse()
		for !c.done {
			c.event(`{"choices":[{"delta":{"content":"` + strings.Repeat("x", 8000) + `"}}]}`)
		}
		m := c.m
		m.closed <- time.Now()
	})
	g := newGate(t, []*mock{m}, withOptions(func(_ *Options, s *ServerOptions) { s.WriteTimeout = 150 * time.Millisecond }))
	c := g.dial()
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		tc.SetReadBuffer(4 << 10)
	}
	c.send(post(chatPath, streamBody))
	select {
	case <-m.closed:
	case <-time.After(15 * time.Second):
		t.Fatal("the endpoint is still sending")
	}
	g.outcome(1, "client_gone")
	g.booked(0)
}

// Faults 8 and 9: an error within a 200 goes through as it came, and counts against the endpoint if it is its fault.
func TestErrorWithinAStream(t *testing.T) {
	code := atomic.Int64{}
	m := newMock(t, func(c *call) {
		c.sse()
		c.token("a")
		c.event(fmt.Sprintf(`{"error":{"message":"x","type":"t","code":%d}}`, code.Load()))
		c.event("[DONE]")
		c.chunk("")
	})
	g := newGate(t, []*mock{m})
	for i, want := range map[int64]int32{400: 0, 500: 1} {
		code.Store(i)
		a := g.do(streamBody)
		if a.StatusCode != 200 || a.err != nil || !strings.HasSuffix(a.body, "data: [DONE]\n\n") || !strings.Contains(a.body, fmt.Sprint(i)) {
			t.Errorf("%d %v %q", a.StatusCode, a.err, a.body)
		}
		ep := g.h.endpoints.all()[0]
		eventually(t, "the failure to be judged", func() bool { return ep.health.failures.Load() >= want })
		if i == 400 && ep.health.failures.Load() > 1 {
			t.Error("a client's error counts against the endpoint")
		}
	}
	for _, r := range g.sink.wait(t, 2) {
		if r.Outcome != "endpoint_status" || r.Error == "" || r.Status != 200 {
			t.Errorf("%s %d %q", r.Outcome, r.Status, r.Error)
		}
	}
}

// An ejected endpoint that still refuses connections stays out, and comes back once it takes them.
func TestProbe(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close()
	good := newMock(t, chat)
	core, log := observer.New(zap.InfoLevel)
	g := newGate(t, []*mock{good}, withPool(func(o *PoolOptions) {
		o.Health = HealthOptions{BasePause: 50 * time.Millisecond, MaxPause: 100 * time.Millisecond}
	}), withOptions(func(o *Options, _ *ServerOptions) { o.Log = zap.New(core) }))
	if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: good.url()}, {Pool: "p", URL: "http://" + addr}}, g.now()); err != nil {
		t.Fatal(err)
	}
	var bad *pool.Endpoint
	for _, r := range g.table.Load().Rows {
		if r.Endpoint.Address == addr {
			bad = r.Endpoint
		}
	}
	eventually(t, "the ejection", func() bool { g.do(plainBody); return bad.EjectedUntil() > g.now() })
	ep := g.h.endpoints.get(bad)
	eventually(t, "probes that fail", func() bool { return ep.health.ejections.Load() >= 3 })
	if bad.EjectedUntil() <= g.now() {
		t.Error("it was readmitted though it refuses connections")
	}
	// Nor is one that is down, however few are left: there is nothing to readmit.
	setDown := func(down bool) {
		for _, r := range g.table.Load().Rows {
			g.table.SetState(r.Endpoint, pool.Unreachable, down || r.Endpoint == bad, g.now())
		}
	}
	setDown(true)
	probed := ep.health.ejections.Load()
	eventually(t, "more probes", func() bool { return ep.health.ejections.Load() >= probed+2 })
	if bad.EjectedUntil() <= g.now() {
		t.Error("it was readmitted though it is down")
	}
	setDown(false)
	if ln, err = net.Listen("tcp", addr); err != nil {
		t.Skip("the port is taken by now:", err)
	}
	back := startMock(t, ln, chat)
	eventually(t, "the ejection to end", func() bool { return bad.EjectedUntil() <= g.now() })
	g.table.SetState(bad, pool.Unreachable, false, g.now())
	var changes []string
	for _, e := range log.All() {
		if f := e.ContextMap(); f["from"] != nil {
			changes = append(changes, fmt.Sprintf("%s: %s to %s", e.Message, f["from"], f["to"]))
		}
	}
	if want := []string{"endpoint ejected: up to ejected", "endpoint readmitted: down,ejected to down"}; !slices.Equal(changes, want) {
		t.Errorf("the log says %q; want %q", changes, want)
	}
	eventually(t, "the endpoint to get requests again", func() bool { g.do(plainBody); return back.requests.Load() > 0 })
	eventually(t, "the ejections to be forgiven", func() bool { g.do(plainBody); return ep.health.ejections.Load() == 0 })
}

// Requests that are pipelined are answered in order, errors and refusals among them.
func TestPipelining(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	c := g.dial().send(post(chatPath, plainBody) + post(chatPath, `{"model":"none","messages":[]}`) + post(chatPath, streamBody) +
		"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" + post(chatPath, plainBody) + "BAD\r\n\r\n")
	for i, want := range []int{200, 404, 200, 200, 200, 400} {
		if a := c.read(); a.StatusCode != want || a.err != nil {
			t.Errorf("answer %d: %d %v %q; want %d", i, a.StatusCode, a.err, a.body, want)
		}
	}
	if _, err := c.br.ReadByte(); err != io.EOF {
		t.Errorf("then %v; want the end", err)
	}
}

// An endpoint that takes no connection is looked at again at once, wherever it may not be ejected.
func TestRefusedConnectionRaisesDoubt(t *testing.T) {
	up, dead := newMock(t, chat), newMock(t, chat)
	var doubted atomic.Int64
	g := newGate(t, []*mock{up, dead}, withOptions(func(o *Options, _ *ServerOptions) {
		o.OnDoubt = func(e *pool.Endpoint) {
			if e.URL == dead.url() {
				doubted.Add(1)
			}
		}
	}))
	dead.kill()
	for range 8 {
		if a := g.do(plainBody); a.StatusCode != 200 {
			t.Errorf("answer %d", a.StatusCode)
		}
	}
	if doubted.Load() == 0 {
		t.Error("nobody was told")
	}
}
