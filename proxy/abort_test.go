package proxy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"kvgate/pool"
)

// An abortPhase is where a request is when its client goes. A new place in which requests wait gets a line in abortPhases.
type abortPhase struct {
	name  string
	serve func(*call) // of every endpoint
	reads int         // bytes of the answer's body that the client waits for before it goes; 0: none
	apis  string      // words of abortAPIs it makes sense for
	only  []gateOption
	// behind is what the client has pipelined behind its request.
	behind string
}

// silence is an endpoint that computes, and notices when it is told to stop.
func silence(c *call) { c.waitClosed(20 * time.Second) }

var abortPhases = []abortPhase{
	{name: "before the head", serve: silence, apis: "stream plain"},
	{name: "pipelined bytes behind", serve: silence, apis: "stream plain", behind: post(chatPath, plainBody) + "POST /v1/ch"},
	{name: "after the head alone", serve: func(c *call) { c.sse(); silence(c) }, apis: "stream"},
	{name: "silent stream", serve: func(c *call) { c.sse(); c.token("a"); silence(c) }, reads: 50, apis: "stream"},
	{name: "silent stream, bytes behind", serve: func(c *call) { c.sse(); c.token("a"); silence(c) }, reads: 50, apis: "stream", behind: "POST /v1/ch"},
	{name: "within a body", serve: func(c *call) {
		c.raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n" + strings.Repeat(" ", 100))
		silence(c)
	}, reads: 50, apis: "plain"},
}

var abortAPIs = []struct{ name, kind, path, body string }{
	{"chat, streamed", "stream", chatPath, streamBody},
	{"chat", "plain", chatPath, plainBody},
	{"completions, streamed", "stream", "/v1/completions", `{"model":"m","prompt":"x","stream":true}`},
	{"completions", "plain", "/v1/completions", `{"model":"m","prompt":"x"}`},
	{"responses, streamed", "stream", "/v1/responses", `{"model":"m","input":"x","stream":true}`},
	{"responses", "plain", "/v1/responses", `{"model":"m","input":"x"}`},
	{"messages, streamed", "stream", "/v1/messages", `{"model":"m","messages":[],"max_tokens":5,"stream":true}`},
	{"messages", "plain", "/v1/messages", `{"model":"m","messages":[],"max_tokens":5}`},
	{"embeddings", "plain", "/v1/embeddings", `{"model":"m","input":"x"}`},
	{"rerank", "plain", "/v1/rerank", `{"model":"m","query":"x","documents":["y"]}`},
}

// B5, T1, fault 28: a client that goes is noticed in every phase and API, also over TLS, the endpoint is told, nothing stays
// booked, and nobody is blamed. With -v
// the test prints how long it took.
func TestAbortLatencies(t *testing.T) {
	times := 3
	if testing.Verbose() {
		times = 20
	}
	cert, ca := certificate(t, "gate")
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "phase\tAPI\tmedian\tmost")
	var all []time.Duration
	for _, over := range []string{"", " over TLS"} {
		for _, p := range abortPhases {
			for _, api := range abortAPIs {
				if !strings.Contains(p.apis, api.kind) || over != "" && !strings.HasPrefix(api.name, "chat") {
					continue
				}
				t.Run(p.name+over+"/"+api.name, func(t *testing.T) {
					m := newMock(t, p.serve)
					opts := p.only
					if over != "" {
						opts = append(slices.Clip(opts), withOptions(func(_ *Options, s *ServerOptions) { s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}} }))
					}
					g := newGate(t, []*mock{m}, opts...)
					var took []time.Duration
					for i := range times {
						c := g.dial()
						if over != "" {
							c.Conn = tls.Client(c.Conn, &tls.Config{RootCAs: ca, ServerName: "127.0.0.1"})
							c.br = newReader(c.Conn)
						}
						c.send(post(api.path, api.body) + p.behind)
						eventually(t, "the request to arrive", func() bool { return m.requests.Load() == int64(i+1) })
						if p.reads > 0 {
							if _, err := io.ReadFull(c.head().Body, make([]byte, p.reads)); err != nil {
								t.Fatal(err)
							}
						}
						left := time.Now()
						c.Close()
						select {
						case at := <-m.closed:
							took = append(took, at.Sub(left))
						case <-time.After(10 * time.Second):
							t.Fatal("the endpoint was not told")
						}
					}
					g.booked(0)
					for _, r := range g.sink.wait(t, times) {
						if r.Outcome != "client_gone" {
							t.Errorf("outcome %s: %s", r.Outcome, r.Error)
						}
					}
					if n := g.h.endpoints.all()[0].health.failures.Load(); n != 0 {
						t.Errorf("%d failures are held against the endpoint", n)
					}
					slices.Sort(took)
					all = append(all, took...)
					fmt.Fprintf(w, "%s%s\t%s\t%v\t%v\n", p.name, over, api.name, micros(took[times/2]), micros(took[times-1]))
					if took[times-1] > 2*time.Second {
						t.Errorf("it took %v; want a second at most", took[times-1])
					}
				})
			}
		}
	}
	for _, p := range abortUnreached {
		t.Run(p.name, func(t *testing.T) {
			g := p.gate(t)
			var took []time.Duration
			for i := range times {
				c := g.dial()
				c.send(post(chatPath, plainBody))
				p.there(g)
				left := time.Now()
				c.Close()
				for len(g.sink.wait(t, 0)) <= i {
					time.Sleep(50 * time.Microsecond)
				}
				took = append(took, time.Since(left))
				g.outcome(i+1, "client_gone")
				g.booked(p.others)
			}
			slices.Sort(took)
			all = append(all, took...)
			fmt.Fprintf(w, "%s\tchat\t%v\t%v\n", p.name, micros(took[times/2]), micros(took[times-1]))
		})
	}
	slices.Sort(all)
	if len(all) > 0 {
		fmt.Fprintf(w, "all %d\t\t%v\t%v\n", len(all), micros(all[len(all)/2]), micros(all[len(all)-1]))
	}
	w.Flush()
	t.Logf("from the client's close to the end of the endpoint's work:\n%s", table.String())
}

func micros(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }

// abortUnreached are the phases in which no endpoint has the request yet, so that what is timed is until the request has
// ended: gate makes the gateway, there waits until the one request is in that phase, others says how many more are booked.
var abortUnreached = []struct {
	name   string
	gate   func(*testing.T) *gate
	there  func(*gate)
	others int64
}{
	{"waiting for admission", func(t *testing.T) *gate { // one request at a time, and it does not end
		release := make(chan struct{})
		g := newGate(t, []*mock{newMock(t, held(release))}, admitting(1))
		c := g.dial().send(post(chatPath, plainBody))
		g.booked(1)
		t.Cleanup(func() {
			close(release)
			c.read()
		})
		return g
	}, func(g *gate) { g.waiting(1) }, 1},
	{"connecting", func(t *testing.T) *gate { // to an endpoint whose backlog is full
		g := newGate(t, nil, withPool(func(o *PoolOptions) { o.Timeouts.Connect = time.Minute }))
		if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://" + fullListener(t)}}, g.now()); err != nil {
			t.Fatal(err)
		}
		return g
	}, func(g *gate) { g.booked(1) }, 0},
	{"connecting with TLS", func(t *testing.T) *gate { // to an endpoint that says nothing in the handshake
		g := newGate(t, []*mock{mute(t)}, withPool(func(o *PoolOptions) {
			o.Timeouts.Connect = time.Minute
			o.TLS = &tls.Config{ServerName: "x"}
		}))
		return g
	}, func(g *gate) { eventually(g.t, "the handshake", func() bool { return g.mocks[0].open.Load() == 1 }) }, 0},
}

// mute is an endpoint that accepts connections and never says a word.
func mute(t *testing.T) *mock {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return startMock(t, &muteListener{ln}, func(*call) { t.Error("a request came through TLS") })
}

// A muteListener's connections yield nothing that was sent, until they end.
type muteListener struct{ net.Listener }

func (l *muteListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return muteConn{c}, nil
}

type muteConn struct{ net.Conn }

func (c muteConn) Read(p []byte) (int, error) {
	_, err := io.Copy(io.Discard, c.Conn)
	if err == nil {
		err = io.EOF
	}
	return 0, err
}

// A client that only shuts down its sending side counts as gone, unless the options say otherwise.
func TestHalfClose(t *testing.T) {
	for _, ignored := range []bool{false, true} {
		release := make(chan struct{})
		m := newMock(t, func(c *call) { <-release; chat(c) })
		g := newGate(t, []*mock{m}, withOptions(func(_ *Options, s *ServerOptions) { s.IgnoreHalfClose = ignored }))
		c := g.dial()
		c.send(post(chatPath, plainBody))
		eventually(t, "the request to arrive", func() bool { return m.requests.Load() == 1 })
		if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if ignored {
			close(release)
			if a := c.read(); a.StatusCode != 200 {
				t.Errorf("ignored: %d", a.StatusCode)
			}
			g.outcome(1, "ok")
			continue
		}
		g.outcome(1, "client_gone")
		close(release)
	}
}

// readTo reads an answer until its body, as far as it has come, ends in last.
func (c *client) readTo(last string) {
	c.t.Helper()
	body, got := c.head().Body, ""
	for buf := make([]byte, 1024); !strings.HasSuffix(got, last); {
		n, err := body.Read(buf)
		if got += string(buf[:n]); err != nil {
			c.t.Fatalf("%v after %q", err, got)
		}
	}
}

// Clients that have a stream's last event have the answer, and need not wait for what ends the body: that is a normal end,
// whoever closes first, and however.
func TestClientGoesAfterTheLastEvent(t *testing.T) {
	const usage = `"usage":{"input_tokens":7,"output_tokens":3}`
	for _, api := range []struct{ name, path, body, last, want string }{
		{"chat", chatPath, streamBody, "data: [DONE]\n\n", "ok"},
		{"chat, no end yet", chatPath, streamBody, `data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n", "client_gone"},
		{
			"responses", "/v1/responses", `{"model":"m","input":"x","stream":true}`,
			`data: {"type":"response.completed","response":{"id":"r","status":"completed",` + usage + "}}\n\n", "ok",
		},
		{
			"messages", "/v1/messages", `{"model":"m","messages":[],"max_tokens":5,"stream":true}`,
			"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", "ok",
		},
		{"an error at the end", chatPath, streamBody, `data: {"error":{"message":"no","type":"server_error","code":500}}` + "\n\ndata: [DONE]\n\n", "endpoint_status"},
	} {
		for _, reset := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/reset %v", api.name, reset), func(t *testing.T) {
				m := newMock(t, func(c *call) {
					c.sse()
					c.token("a")
					c.chunk(api.last)
					silence(c)
				})
				g := newGate(t, []*mock{m})
				c := g.dial().send(post(api.path, api.body))
				c.readTo(api.last)
				if reset {
					if err := c.Conn.(*net.TCPConn).SetLinger(0); err != nil {
						t.Fatal(err)
					}
				}
				c.Close()
				<-m.closed // the endpoint is told all the same
				r := g.sink.wait(t, 1)[0]
				if r.Outcome != api.want || r.Attempts[0].Outcome != api.want {
					t.Errorf("outcome %s (%s), of the attempt %s; want %s", r.Outcome, r.Error, r.Attempts[0].Outcome, api.want)
				}
				if api.want == "ok" && r.Error != "" {
					t.Errorf("error %q", r.Error)
				}
				g.booked(0)
			})
		}
	}
}

// The same where its going shows only when what follows can't be written any more.
func TestWriteFailsAfterTheLastEvent(t *testing.T) {
	left := make(chan struct{})
	m := newMock(t, func(c *call) {
		c.sse()
		c.token("a")
		c.event("[DONE]")
		<-left
		for !c.done { // until the gateway has closed, too
			c.chunk(": still here\n\n")
			time.Sleep(time.Millisecond)
		}
	})
	g := newGate(t, []*mock{m}, withOptions(func(_ *Options, s *ServerOptions) { s.IgnoreHalfClose = true }))
	c := g.dial().send(post(chatPath, streamBody))
	c.readTo("[DONE]\n\n")
	c.Close()
	close(left)
	if r := g.sink.wait(t, 1)[0]; r.Outcome != "ok" || r.Error != "" {
		t.Errorf("outcome %s (%s); want ok", r.Outcome, r.Error)
	}
	g.booked(0)
}
