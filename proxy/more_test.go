package proxy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// What follows the first request of a connection is read within one wait of the poller, without a try to read before it. No
// byte that comes at any moment may be overlooked: requests in pieces, several at once, and while an answer is on its way.
func TestRequestsThatFollow(t *testing.T) {
	m := newMock(t, func(c *call) { c.json(200, fmt.Sprintf(`{"n":%d}`, len(c.body))) })
	g := newGate(t, []*mock{m})
	request := post(chatPath, plainBody)
	answered := func(c *client, n int) {
		t.Helper()
		for range n {
			if a := c.read(); a.StatusCode != 200 {
				t.Fatalf("status %d, %s", a.StatusCode, a.body)
			}
		}
	}
	t.Run("in two pieces", func(t *testing.T) {
		c := g.dial()
		c.send(request)
		answered(c, 1)
		for i := 1; i < len(request); i += 1 + len(request)/97 {
			c.send(request[:i])
			time.Sleep(100 * time.Microsecond) // the pieces may come apart or together
			c.send(request[i:])
			answered(c, 1)
		}
	})
	t.Run("several at once", func(t *testing.T) {
		c := g.dial()
		c.send(request)
		answered(c, 1)
		for n := 2; n < 40; n++ { // some longer than the buffer
			c.send(strings.Repeat(request, n))
			answered(c, n)
		}
	})
	t.Run("the next while an answer is under way", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 8 {
			c := g.dial()
			wg.Go(func() {
				for range 300 {
					if _, err := c.Conn.Write([]byte(request)); err != nil {
						t.Error(err)
						return
					}
				}
			})
			wg.Go(func() {
				for i := range 300 {
					r, err := http.ReadResponse(c.br, nil)
					if err != nil || r.StatusCode != 200 {
						t.Errorf("answer %d: %v", i, err)
						return
					}
					b := make([]byte, r.ContentLength)
					if _, err := r.Body.Read(b); len(b) > 0 && err != nil && err.Error() != "EOF" {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
	t.Run("a large body after small ones", func(t *testing.T) {
		c := g.dial()
		large := post(chatPath, `{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("long ", 100_000)+`"}]}`)
		for range 3 {
			c.send(request)
			answered(c, 1)
			c.send(large)
			answered(c, 1)
			c.send(large + request)
			answered(c, 2)
		}
	})
}

// What is no request is refused as the first one would be, and counted.
func TestRefusalsThatFollow(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	for i, bad := range []string{"GET / HTTP/9.9\r\n\r\n", "POST " + chatPath + " HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "\x16\x03\x01"} {
		c := g.dial()
		c.send(post(chatPath, plainBody))
		if a := c.read(); a.StatusCode != 200 {
			t.Fatal(a.StatusCode)
		}
		c.send(bad)
		a := c.read()
		if a.StatusCode != 400 || !a.Close || !strings.Contains(a.body, `"bad_request"`) {
			t.Errorf("%q: status %d, close %v, %s", bad, a.StatusCode, a.Close, a.body)
		}
		if n, err := c.Conn.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Error("the connection is left open")
		}
		g.outcome(2*i+2, "bad_request")
	}
}

// A client that goes is noticed at once, also if its end comes together with its last request, so that reading that request
// doesn't show it.
func TestEndsThatFollow(t *testing.T) {
	for _, ignore := range []bool{false, true} {
		m := newMock(t, func(c *call) { c.json(200, "{}") })
		g := newGate(t, []*mock{m}, withOptions(func(_ *Options, o *ServerOptions) { o.IgnoreHalfClose = ignore }))
		for i := range 60 {
			c := g.dial()
			c.send(post(chatPath, plainBody))
			if a := c.read(); a.StatusCode != 200 {
				t.Fatal(a.StatusCode)
			}
			if i%3 > 0 {
				c.send(post(chatPath, plainBody))
			}
			if i%3 > 1 {
				c.read()
			}
			if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}
		end := time.Now().Add(10 * time.Second)
		for g.s.Usage().Connections > 0 {
			if time.Now().After(end) {
				t.Fatalf("half-closing ignored %v: %d connections are open whose clients have gone", ignore, g.s.Usage().Connections)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// Connections that wait for their next request don't hold a shutdown up.
func TestShutdownEndsWhatWaits(t *testing.T) {
	m := newMock(t, func(c *call) { c.json(200, "{}") })
	g := newGate(t, []*mock{m})
	for range 50 {
		c := g.dial()
		c.send(post(chatPath, plainBody))
		if a := c.read(); a.StatusCode != 200 {
			t.Fatal(a.StatusCode)
		}
	}
	began := time.Now()
	if d := g.s.Shutdown(context.Background()); d.Cut != 0 {
		t.Errorf("%+v", d)
	}
	if took := time.Since(began); took > 5*time.Second { // of 10 that requests may take
		t.Errorf("it took %v", took)
	}
	if n := g.s.Usage().Connections; n != 0 {
		t.Errorf("%d connections are open", n)
	}
}

// The end of an answer is seen when it comes together with its last bytes, and when it comes alone, by every framing: reading
// them doesn't show it, and what was not looked for must be told of.
func TestAnswersThatEndTheConnection(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
	const event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"
	chunk := fmt.Sprintf("%x\r\n%s\r\n", len(event), event)
	f := func(name, first, last, want string) {
		t.Run(name, func(t *testing.T) {
			var n atomic.Int64
			m := newMock(t, func(c *call) {
				c.done = true
				c.raw(first)
				if n.Add(1)%2 == 0 {
					time.Sleep(200 * time.Microsecond) // so that the next bytes come while the gateway waits for them
				}
				c.raw(last)
				if n.Load()%3 == 0 {
					time.Sleep(200 * time.Microsecond)
				}
				c.conn.Close()
			})
			g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) { o.Health.ConsecutiveFailures = 1 << 20 }))
			for i := range 150 {
				began := time.Now()
				a := g.do(streamBody)
				if a.StatusCode != 200 || !strings.Contains(a.body, want) {
					t.Fatalf("status %d, %q", a.StatusCode, a.body)
				}
				if took := time.Since(began); took > 15*time.Second { // one that is missed takes 20
					t.Fatalf("answer %d took %v: %q, %+v", i, took, a.body, g.sink.wait(t, i+1)[i])
				}
			}
		})
	}
	f("by closing", head+"\r\n"+event, event, event+event)
	f("cut short", head+"Transfer-Encoding: chunked\r\n\r\n"+chunk, chunk, `"code":"endpoint_reset"`)
	f("cut within a chunk", head+"Transfer-Encoding: chunked\r\n\r\n"+chunk, chunk[:9], `"code":"endpoint_reset"`)
	f("closed after its end", head+"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk, chunk+"0\r\n\r\n", event+event)
}
