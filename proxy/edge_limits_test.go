package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// A body may take its time as long as it comes at a rate, and no longer.
func TestEdgeBodyTimeout(t *testing.T) {
	e := startEdge(t, edgeOptions{bodyTimeout: time.Second, bodyRate: 64}, serverOptions{})
	f := func(name string, want int, piece int, pause time.Duration) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, _ := dialEdge(t, e.addr)
			defer c.Close()
			io.WriteString(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 512\r\n\r\n")
			stop := make(chan struct{})
			defer close(stop)
			go func() {
				for sent := 0; sent < 512; sent += piece {
					select {
					case <-stop:
						return
					case <-time.After(pause):
						io.WriteString(c, strings.Repeat("x", piece))
					}
				}
			}()
			got, _ := readAnswers(t, c, 1)
			if len(got) != 1 || got[0].status != want {
				t.Errorf("got %v, want %d", got, want)
			}
		})
	}
	f("steady", 200, 64, 200*time.Millisecond) // 1.6 s in all, more than bodyTimeout
	f("trickle", 408, 1, 100*time.Millisecond)
	f("silence", 408, 1, time.Hour)
}

// A client that is still uploading when it is refused can read why.
func TestEdgeLingers(t *testing.T) {
	e := startEdge(t, edgeOptions{bodyBytes: 1 << 20}, serverOptions{})
	f := func(name, head string, chunked bool) {
		t.Helper()
		c, _ := dialEdge(t, e.addr)
		defer c.Close()
		io.WriteString(c, head)
		piece := strings.Repeat("x", 64<<10)
		if chunked {
			piece = fmt.Sprintf("%x\r\n%s\r\n", len(piece), piece)
		}
		for range 128 {
			if _, err := io.WriteString(c, piece); err != nil {
				t.Errorf("%s: upload was cut off: %v", name, err)
				return
			}
		}
		if got, closed := readAnswers(t, c, 1); len(got) != 1 || got[0].status != 413 || !closed || !strings.Contains(got[0].body, `"code":"too_large"`) || !strings.Contains(got[0].body, "limit of ") {
			t.Errorf("%s: got %+v, closed %v", name, got, closed)
		}
	}
	f("declared", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 104857600\r\n\r\n", false)
	f("chunked", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", true)
}

// 100 Continue is said when the handler wants the body, and not before.
func TestEdgeExpect(t *testing.T) {
	var e *edgeServer
	e = startEdge(t, edgeOptions{bodyBytes: 1 << 20}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
		if string(ctx.Path()) == "/no" {
			writeError(ctx, 404, "not_found", "no such path")
			if asClientConn(ctx.Conn()).bodyLeft() {
				ctx.SetConnectionClose()
			}
			return
		}
		e.echo(ctx)
	}})
	f := func(path, length string, want string) {
		t.Helper()
		c, br := dialEdge(t, e.addr)
		defer c.Close()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %s\r\n\r\n", path, length)
		line, _ := br.ReadString('\n')
		if got := strings.TrimSpace(line); got != want {
			t.Fatalf("%s, %s bytes: first line %q, want %q", path, length, got, want)
		}
		if !strings.Contains(want, "100") {
			rest, err := io.ReadAll(br)
			if err != nil || !strings.Contains(string(rest), "Connection: close") {
				t.Errorf("%s: %q, %v; want the connection closed", path, rest, err)
			}
			return
		}
		br.ReadString('\n')
		io.WriteString(c, "hello")
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || string(b) != "hello" {
			t.Errorf("%s: %d %q", path, resp.StatusCode, b)
		}
	}
	f("/yes", "5", "HTTP/1.1 100 Continue")
	f("/no", "5", "HTTP/1.1 404 Not Found")
	f("/yes", "1048577", "HTTP/1.1 413 Request Entity Too Large")
}

// What clients declare costs nothing; what they send is bounded in all.
func TestEdgeBudget(t *testing.T) {
	started := make(chan struct{}, 64)
	finish := make(chan struct{})
	var e *edgeServer
	e = startEdge(t, edgeOptions{}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
		var body requestBody
		defer body.release()
		if string(ctx.Path()) == "/held" {
			started <- struct{}{}
		}
		if rej := readBody(ctx, e.budget, &body); rej != nil {
			writeRejection(ctx, rej)
			return
		}
		started <- struct{}{}
		<-finish
	}})
	e.budget.limit = 5 << 20
	var conns []net.Conn
	for range 20 {
		c, _ := dialEdge(t, e.addr)
		defer c.Close()
		io.WriteString(c, "POST /held HTTP/1.1\r\nHost: h\r\nContent-Length: 31457280\r\n\r\nx")
		conns = append(conns, c)
	}
	for range 20 {
		<-started
	}
	waitFor(t, "bodies to be begun", func() bool { return e.budget.usedBytes() == 20*firstBodyBytes })
	for _, c := range conns {
		c.Close()
	}
	waitFor(t, "memory to be given back", func() bool { return e.budget.usedBytes() == 0 })

	post := fmt.Sprintf("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", 3<<20) + strings.Repeat("x", 3<<20)
	c, _ := dialEdge(t, e.addr)
	defer c.Close()
	go io.WriteString(c, post)
	<-started
	got, closed := e.exchange(t, post, 1)
	if len(got) != 1 || got[0].status != 429 || !closed || got[0].header.Get("Retry-After") == "" || !strings.Contains(got[0].body, `"code":"saturated"`) {
		t.Errorf("over the budget: got %+v, closed %v", got, closed)
	}
	close(finish)
	if got, _ := readAnswers(t, c, 1); len(got) != 1 || got[0].status != 200 {
		t.Errorf("within the budget: got %+v", got)
	}
	waitFor(t, "memory to be given back", func() bool { return e.budget.usedBytes() == 0 })
}

// A budget of a size has room for a body of that size, however it comes, and none for a larger one; a body that is too
// large is called that, not one too many.
func TestEdgeBudgetOfOneBody(t *testing.T) {
	for _, limit := range []int{1 << 10, 4 << 10, 100_000, 1<<20 + 1, 5 << 20, 33 << 20} {
		e := startEdge(t, edgeOptions{bodyBytes: int64(limit)}, serverOptions{})
		e.budget.limit = int64(limit)
		for _, n := range []int{1, limit / 2, limit*3/4 + 1, limit - 1, limit, limit + 1} {
			body := strings.Repeat("x", n)
			want := 200
			if n > limit {
				want = 413
			}
			var chunks strings.Builder
			for rest := body; len(rest) > 0; {
				piece := rest[:min(len(rest), 1<<20)]
				rest = rest[len(piece):]
				chunks.WriteString(fmt.Sprintf("%x\r\n%s\r\n", len(piece), piece))
			}
			for framing, raw := range map[string]string{
				"length": fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, body),
				"chunks": "Transfer-Encoding: chunked\r\n\r\n" + chunks.String() + "0\r\n\r\n",
			} {
				got, _ := e.exchange(t, "POST / HTTP/1.1\r\nHost: h\r\n"+raw, 1)
				if len(got) != 1 || got[0].status != want || want == 200 && got[0].body != body {
					t.Errorf("budget %d, body of %d by %s: %d answers; want one with status %d", limit, n, framing, len(got), want)
					for _, a := range got {
						t.Logf("status %d", a.status)
					}
				}
				waitFor(t, "memory to be given back", func() bool { return e.budget.usedBytes() == 0 })
			}
		}
	}
}

func TestBodyClasses(t *testing.T) {
	for _, n := range []int64{0, 1, 2048, 2049, 2560, 2561, 4096, 4097, 65535, 65536, 65537, 3 << 20, 32<<20 + 1, 1 << 26, 1<<26 + 1} {
		c := bodyClass(n)
		if size := int64(classBytes(c)); size < n || c > 0 && int64(classBytes(c-1)) >= n || c > 0 && size > n+n/4+1 {
			t.Errorf("%d bytes get class %d, which has %d", n, c, size)
		}
	}
	if classBytes(minInputClass) != 4<<10 || classBytes(maxInputClass) != 64<<10 || classBytes(maxBodyClass) != 64<<20 || classBytes(doubled) != 2*classBytes(0) {
		t.Error("the named classes have other sizes")
	}
}

func TestListenerLimit(t *testing.T) {
	var refused atomic.Int32
	e := startEdge(t, edgeOptions{connections: 2, onRefuse: func() { refused.Add(1) }}, serverOptions{})
	var conns []net.Conn
	get := "GET / HTTP/1.1\r\nHost: h\r\n\r\n"
	for range 2 {
		c, _ := dialEdge(t, e.addr)
		defer c.Close()
		io.WriteString(c, get)
		if got, _ := readAnswers(t, c, 1); len(got) != 1 || got[0].status != 200 {
			t.Fatalf("within the limit: %v", got)
		}
		conns = append(conns, c)
	}
	got, closed := e.exchange(t, get, 1)
	if len(got) != 1 || got[0].status != 429 || !closed || refused.Load() != 1 {
		t.Errorf("over the limit: %v, closed %v, %d refused", got, closed, refused.Load())
	}
	conns[0].Close()
	waitFor(t, "a place", func() bool { return e.ln.open.Load() == 1 })
	if got, _ := e.exchange(t, get, 1); len(got) != 1 || got[0].status != 200 {
		t.Errorf("after one has left: %v", got)
	}
	if _, accepted, n, _ := e.ln.stats(); accepted != 3 || n != 1 {
		t.Errorf("%d accepted, %d refused; want 3 and 1", accepted, n)
	}
}

// flakyListener fails before it accepts.
type flakyListener struct {
	net.Listener
	errs []error
}

func (l *flakyListener) Accept() (net.Conn, error) {
	if len(l.errs) > 0 {
		err := l.errs[0]
		l.errs = l.errs[1:]
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: err}
	}
	return l.Listener.Accept()
}

func TestListenerRidesOutErrors(t *testing.T) {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var seen []error
	ln := newListener(&flakyListener{tcp, []error{syscall.EMFILE, syscall.ECONNABORTED, syscall.ENFILE}}, newEdge(edgeOptions{onAcceptError: func(err error) { seen = append(seen, err) }}, nil))
	peer, err := net.Dial("tcp4", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if len(seen) != 3 || !errors.Is(seen[0], syscall.EMFILE) {
		t.Errorf("ridden out: %v", seen)
	}
	ln.Listener.(*flakyListener).errs = []error{errors.New("out of order")}
	if _, err := ln.Accept(); err == nil {
		t.Error("an error that doesn't pass was ridden out")
	}
	// Closing ends the wait for better times.
	ln.Listener.(*flakyListener).errs = []error{syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE}
	ended := make(chan error)
	go func() { _, err := ln.Accept(); ended <- err }()
	ln.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A panic costs one request, and nothing that a client sent gets into the log.
func TestEdgePanicAndSecrets(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	var panics, rejected atomic.Int32
	e := startEdge(t, edgeOptions{}, serverOptions{
		log:      zap.New(core),
		handler:  func(ctx *fasthttp.RequestCtx) { panic("BUG: as the test wants it") },
		onPanic:  func(any) { panics.Add(1) },
		onReject: func(*fasthttp.RequestCtx, *rejection) { rejected.Add(1) },
	})
	got, closed := e.exchange(t, "GET / HTTP/1.1\r\nHost: h\r\n\r\n", 1)
	if len(got) != 1 || got[0].status != 500 || !closed || !strings.Contains(got[0].body, `"code":"internal"`) || panics.Load() != 1 {
		t.Errorf("panic: %+v, closed %v, %d counted", got, closed, panics.Load())
	}
	if logs.FilterMessage("panic in a handler").Len() != 1 {
		t.Error("the panic isn't logged")
	}
	for _, raw := range []string{
		"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer sk-SECRET\x00\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: h\r\nAuth SECRET: x\r\n\r\n",
		"GET /\x7fSECRET HTTP/1.1\r\nHost: h\r\n\r\n",
		"SECRET / HTTP/1.1\r\nHost: h\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: SECRET\r\n\r\n",
	} {
		got, closed := e.exchange(t, raw, 1)
		if len(got) != 1 || got[0].status/100 != 4 || !closed || strings.Contains(got[0].body, "SECRET") {
			t.Errorf("%q: %+v, closed %v", raw, got, closed)
		}
	}
	if rejected.Load() != 5 {
		t.Errorf("%d rejections counted, want 5", rejected.Load())
	}
	for _, l := range logs.All() {
		if s := fmt.Sprint(l.Message, l.ContextMap()); strings.Contains(s, "SECRET") {
			t.Errorf("logged: %.200s", s)
		}
	}
}

// An idle connection holds no buffers.
func TestEdgeIdleMemory(t *testing.T) {
	e := startEdge(t, edgeOptions{connections: 1 << 16}, serverOptions{})
	const conns = 400
	body := strings.Repeat("x", 20<<10)
	raw := fmt.Sprintf("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	memory := func() uint64 {
		var m runtime.MemStats
		for range 3 { // pools are emptied by the second
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := memory()
	for range conns {
		c, err := net.Dial("tcp4", e.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, raw)
		resp, err := http.ReadResponse(bufio.NewReaderSize(c, 16), nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
	}
	per := int64(memory()-before) / conns
	t.Logf("%d bytes of heap and stack per idle connection, its client's side included", per)
	if per > 24<<10 {
		t.Errorf("%d bytes per idle connection", per)
	}
}

// Chunk extensions are bounded, all those of a body together.
func TestEdgeChunkExtensions(t *testing.T) {
	e := startEdge(t, edgeOptions{extensionBytes: 100}, serverOptions{})
	for n, want := range map[int]int{48: 200, 51: 400} {
		chunk := "1;" + strings.Repeat("e", n) + "\r\nx\r\n"
		got, _ := e.exchange(t, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk+chunk+"0\r\n\r\n", 1)
		if len(got) != 1 || got[0].status != want {
			t.Errorf("twice %d bytes: %v; want %d", n, got, want)
		}
	}
}
