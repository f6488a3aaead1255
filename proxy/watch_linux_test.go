package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// goneChan is a notifier that says so once.
type goneChan chan struct{}

func (g goneChan) clientGone() { close(g) }

const watchedPost = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"

// A client that leaves while the handler runs is noticed, however it leaves and
// whatever it has sent behind its request.
func TestWatchNoticesClientGone(t *testing.T) {
	cert := selfSigned(t)
	entered := make(chan struct{}, 1)
	verdict := make(chan bool, 1)
	var e *edgeServer
	handler := func(ctx *fasthttp.RequestCtx) {
		gone := make(goneChan)
		h := e.watch.watch(ctx.Conn(), gone)
		defer h.stop()
		entered <- struct{}{}
		select {
		case <-gone:
			verdict <- true
		case <-time.After(20 * time.Second):
			verdict <- false
		}
	}
	e = startEdge(t, edgeOptions{headTimeout: 200 * time.Millisecond, idleTimeout: 200 * time.Millisecond, bodyTimeout: 200 * time.Millisecond}, serverOptions{handler: handler})
	f := func(name, raw string, wrap func(net.Conn) net.Conn, leave func(net.Conn)) {
		t.Helper()
		c, err := net.Dial("tcp4", e.addr)
		if err != nil {
			t.Fatal(err)
		}
		conn := c
		if wrap != nil {
			conn = wrap(c)
		}
		if _, err := io.WriteString(conn, raw); err != nil {
			t.Fatal(err)
		}
		<-entered
		select {
		case <-verdict:
			t.Errorf("%s: taken for gone before it left", name)
			return
		case <-time.After(300 * time.Millisecond): // longer than every timeout of reading
		}
		start := time.Now()
		leave(conn)
		if !<-verdict {
			t.Errorf("%s: not noticed", name)
		}
		t.Logf("%s: noticed after %v", name, time.Since(start).Round(10*time.Microsecond))
		c.Close()
	}
	fin := func(c net.Conn) { c.Close() }
	rst := func(c net.Conn) { c.(*net.TCPConn).SetLinger(0); c.Close() }
	half := func(c net.Conn) { c.(*net.TCPConn).CloseWrite() }
	f("FIN", watchedPost, nil, fin)
	f("RST", watchedPost, nil, rst)
	f("half-close", watchedPost, nil, half)
	f("FIN behind pipelined bytes", watchedPost+"POST /next", nil, fin)
	f("RST behind a pipelined request", watchedPost+watchedPost, nil, rst)

	// Under TLS the same, with a listener of its own.
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := newServer(serverOptions{handler: handler, log: zap.NewNop()})
	done := make(chan error, 1)
	go func() {
		done <- srv.Serve(newListener(tls.NewListener(tcp, &tls.Config{Certificates: []tls.Certificate{cert}}), newEdge(edgeOptions{}, e.watch)))
	}()
	plain := e.addr
	e.addr = tcp.Addr().String()
	f("FIN under TLS", watchedPost, func(c net.Conn) net.Conn {
		tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
		if err := tc.Handshake(); err != nil {
			t.Fatal(err)
		}
		return tc
	}, fin)
	e.addr = plain
	srv.Shutdown()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A client may half-close and wait, if the configuration says so.
func TestWatchIgnoresHalfClose(t *testing.T) {
	var gone goneCounter
	release := make(chan struct{})
	entered := make(chan struct{})
	var e *edgeServer
	e = startEdge(t, edgeOptions{ignoreHalfClose: true}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
		h := e.watch.watch(ctx.Conn(), &gone)
		defer h.stop()
		close(entered)
		<-release
	}})
	c, err := net.Dial("tcp4", e.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, watchedPost)
	<-entered
	c.(*net.TCPConn).CloseWrite()
	time.AfterFunc(100*time.Millisecond, func() { close(release) })
	got, _ := readAnswers(t, c, 1)
	if len(got) != 1 || got[0].status != 200 || gone.n.Load() != 0 {
		t.Errorf("half-closed client: answers %v, %d alarms", got, gone.n.Load())
	}
}

// Watching doesn't disturb keep-alive and pipelining, and no alarm reaches a request
// it isn't for: 32 clients send requests one by one, in pipelined pairs, and leave in
// mid-flight; every answer must be the client's own, and only those that left may be
// taken for gone.
func TestWatchNoSideEffects(t *testing.T) {
	var alarms, falseAlarms atomic.Int32
	var e *edgeServer
	e = startEdge(t, edgeOptions{}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
		var body requestBody
		if rej := readBody(ctx, e.budget, &body); rej != nil {
			writeRejection(ctx, rej)
			return
		}
		n := &taggedGone{alarms: &alarms}
		h := e.watch.watch(ctx.Conn(), n)
		// Long enough for an abort to fall into it.
		time.Sleep(time.Millisecond)
		ctx.Response.Header.Set("X-Stays", "1")
		ctx.SetBody(body.bytes())
		body.release()
		stays := strings.Contains(string(ctx.Response.Body()), "stays")
		h.stop()
		if n.gone.Load() && stays {
			falseAlarms.Add(1)
		}
		n.stopped.Store(true)
	}})
	post := func(body string) string {
		return fmt.Sprintf("POST /v1 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	var right, wrong, left atomic.Int32
	var wg sync.WaitGroup
	for g := range 32 {
		wg.Go(func() {
			c, br := dialEdge(t, e.addr)
			for i := range 60 {
				want := fmt.Sprintf(`{"g":%d,"i":%d,"x":"stays"}`, g, i)
				answers := 1
				switch {
				case i%10 == 9:
					io.WriteString(c, post(fmt.Sprintf(`{"g":%d,"leaves":1}`, g)))
					time.Sleep(time.Duration(i%3) * 500 * time.Microsecond)
					if g%2 == 0 {
						c.(*net.TCPConn).SetLinger(0)
					}
					c.Close()
					left.Add(1)
					c, br = dialEdge(t, e.addr)
					continue
				case i%7 == 3:
					io.WriteString(c, post(want)+post(want))
					answers = 2
				default:
					io.WriteString(c, post(want))
				}
				for range answers {
					resp, err := http.ReadResponse(br, nil)
					if err != nil {
						wrong.Add(1)
						break
					}
					b, _ := io.ReadAll(resp.Body)
					if string(b) == want {
						right.Add(1)
					} else {
						wrong.Add(1)
					}
				}
			}
			c.Close()
		})
	}
	wg.Wait()
	if wrong.Load() != 0 || falseAlarms.Load() != 0 {
		t.Errorf("%d wrong answers, %d false alarms", wrong.Load(), falseAlarms.Load())
	}
	waitFor(t, "connections to end", func() bool { return e.ln.open.Load() == 0 })
	e.watch.mu.Lock()
	defer e.watch.mu.Unlock()
	if n := len(e.watch.conns); n != 0 {
		t.Errorf("%d connections still registered", n)
	}
	t.Logf("%d right answers, %d aborts, %d noticed in time", right.Load(), left.Load(), alarms.Load())
}

// taggedGone checks that it isn't called after stop has returned.
type taggedGone struct {
	alarms        *atomic.Int32
	gone, stopped atomic.Bool
}

func (g *taggedGone) clientGone() {
	if g.stopped.Load() {
		panic("called after stop")
	}
	g.gone.Store(true)
	g.alarms.Add(1)
}

// A watch that begins after the client has left says so at once.
func TestWatchAfterTheFact(t *testing.T) {
	left := make(chan struct{})
	noticed := make(chan bool, 1)
	var e *edgeServer
	e = startEdge(t, edgeOptions{}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
		<-left
		gone := make(goneChan)
		h := e.watch.watch(ctx.Conn(), gone)
		defer h.stop()
		select {
		case <-gone:
			noticed <- true
		case <-time.After(20 * time.Second):
			noticed <- false
		}
	}})
	c, _ := dialEdge(t, e.addr)
	io.WriteString(c, watchedPost)
	c.Close()
	close(left)
	if !<-noticed {
		t.Error("not noticed")
	}
}

func selfSigned(t testing.TB) tls.Certificate {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tm := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tm, tm, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: k}
}

func BenchmarkWatch(b *testing.B) {
	c, w := watchedPair(b)
	var n goneCounter
	b.ReportAllocs()
	for b.Loop() {
		h := w.watch(c, &n)
		h.stop()
	}
}
