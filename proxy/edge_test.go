package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// edgeServer is a server made of the edge alone.
type edgeServer struct {
	addr   string
	ln     *listener
	srv    *fasthttp.Server
	budget *budget
	watch  *watcher
}

func startEdge(t testing.TB, o edgeOptions, so serverOptions) *edgeServer {
	t.Helper()
	w, err := newWatcher(o.ignoreHalfClose)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &edgeServer{addr: tcp.Addr().String(), ln: newListener(tcp, newEdge(o, w)), budget: newBudget(64 << 20), watch: w}
	if so.log == nil {
		so.log = zap.NewNop()
	}
	if so.handler == nil {
		so.handler = e.echo
	}
	e.srv = newServer(so)
	done := make(chan error, 1)
	go func() { done <- e.srv.Serve(e.ln) }()
	t.Cleanup(func() {
		e.srv.Shutdown()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		w.close()
	})
	return e
}

// echo answers with the body it read.
func (e *edgeServer) echo(ctx *fasthttp.RequestCtx) {
	var body requestBody
	defer body.release()
	if rej := readBody(ctx, e.budget, &body); rej != nil {
		writeRejection(ctx, rej)
		return
	}
	ctx.Response.Header.Set("X-Target", string(ctx.RequestURI()))
	ctx.SetBody(body.bytes())
}

// exchange sends raw and reads n responses, fewer if the connection ends.
func (e *edgeServer) exchange(t testing.TB, raw string, n int) (answers []answer, closed bool) {
	t.Helper()
	c, err := net.Dial("tcp4", e.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go io.WriteString(c, raw)
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	return readAnswers(t, c, n)
}

type answer struct {
	status int
	body   string
	header http.Header
}

func readAnswers(t testing.TB, c net.Conn, n int) (answers []answer, closed bool) {
	t.Helper()
	br := bufio.NewReader(c)
	for range n {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			return answers, true
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("cut answer: %v", err)
		}
		answers = append(answers, answer{resp.StatusCode, string(b), resp.Header})
		closed = resp.Close
	}
	return answers, closed
}

func TestEdgeServesBodies(t *testing.T) {
	e := startEdge(t, edgeOptions{bodyBytes: 1 << 20}, serverOptions{})
	big := strings.Repeat("x", 1<<20)
	f := func(name, raw string, want ...string) {
		t.Helper()
		got, _ := e.exchange(t, raw, len(want))
		var bodies []string
		for _, a := range got {
			if a.status == 200 {
				bodies = append(bodies, a.body)
			} else {
				bodies = append(bodies, fmt.Sprint(a.status))
			}
		}
		if strings.Join(bodies, "|") != strings.Join(want, "|") {
			t.Errorf("%s: got %.200q, want %.200q", name, bodies, want)
		}
	}
	post := func(body string) string {
		return fmt.Sprintf("POST /v1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	chunked := func(parts ...string) string {
		var b strings.Builder
		b.WriteString("POST /v1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
		for _, p := range parts {
			fmt.Fprintf(&b, "%x;ext=\"a b\"\r\n%s\r\n", len(p), p)
		}
		b.WriteString("0\r\nX-T: 1\r\nY: 2\r\n\r\n")
		return b.String()
	}
	f("small", post("hello"), "hello")
	f("empty", post(""), "")
	f("no body", "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "")
	f("pipelined", post("one")+post("two")+chunked("th", "ree")+post("four"), "one", "two", "three", "four")
	f("empty lines", "\r\n\r\n"+post("one")+"\r\n"+post("two"), "one", "two")
	f("chunked", chunked("hel", "lo"), "hello")
	f("limit", post(big), big)
	f("limit, chunked", chunked(big[:1<<19], big[1<<19:]), big)
	f("limit and one", post(big+"x"), "413")
	f("limit and one, chunked", chunked(big, "x"), "413")
	f("bad after good", post("one")+"POST /v1 HTTP/1.1\nHost: a\r\n\r\n", "one", "400")
	f("upper, then nothing after a refusal", "POST /v1 HTTP/9.9\r\nHost: a\r\n\r\n"+post("two"), "400")
	if n := e.budget.usedBytes(); n != 0 {
		t.Errorf("%d budget bytes left over", n)
	}
}

// Requests cut at every byte are read like whole ones.
func TestEdgePieces(t *testing.T) {
	raw := "\r\nPOST http://a/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX: y\r\n\r\nhello" +
		"POST /y HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\nHost: a\r\n\r\n3;x=1\r\nabc\r\n2\r\nde\r\n0\r\nT: v\r\n\r\n" +
		"GET /z HTTP/1.1\r\nHost: a\r\n\r\n"
	want := "POST /x HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n[hello]" +
		"POST /y HTTP/1.1\r\nHost: a\r\n\r\n[abcde]" +
		"GET /z HTTP/1.1\r\nHost: a\r\n\r\n[]"
	for _, skip := range []bool{false, true} {
		raw, want := raw, want
		if skip {
			// Without its body being asked for, a client that waits for that isn't read on.
			raw = strings.Replace(raw, "Expect: 100-continue\r\n", "", 1)
			want = strings.NewReplacer("[hello]", "[]", "[abcde]", "[]").Replace(want)
		}
		for cut := range len(raw) {
			if got, _ := throughEdge(t, skip, raw[:cut], raw[cut:]); got != want {
				t.Fatalf("cut at %d, skip %v:\n got %q\nwant %q", cut, skip, got, want)
			}
		}
		pieces := make([]string, len(raw))
		for i := range raw {
			pieces[i] = raw[i : i+1]
		}
		if got, _ := throughEdge(t, skip, pieces...); got != want {
			t.Fatalf("byte by byte, skip %v:\n got %q\nwant %q", skip, got, want)
		}
	}
}

// throughEdge sends pieces, a read each, through a clientConn and returns the heads and,
// in brackets, the bodies that come out of it until the end or a refusal. skip: the
// bodies aren't read.
func throughEdge(t testing.TB, skip bool, pieces ...string) (string, *rejection) {
	t.Helper()
	c := newClientConn(&scriptedConn{pieces: pieces}, newEdge(edgeOptions{}, nil), func() {})
	b := newBudget(1 << 30)
	var out bytes.Buffer
	p := make([]byte, 50)
	for range 1 << 20 {
		n, err := c.Read(p)
		out.Write(p[:n])
		if err == nil {
			if len(c.head) > 0 || c.fail != nil {
				continue
			}
			c.takeHead(nil)
			var body requestBody
			if !skip {
				if rej := c.readBody(b, &body); rej != nil {
					if body.bytes() != nil || b.usedBytes() != 0 {
						t.Fatal("a refused body is still held")
					}
					return out.String(), rej
				}
			}
			fmt.Fprintf(&out, "[%s]", body.bytes())
			body.release()
			body.release()
			if b.usedBytes() != 0 {
				t.Fatal("a body's budget is not given back")
			}
			if c.r == c.w && c.in != nil {
				t.Fatal("an empty input buffer is not given back")
			}
			continue
		}
		got := out.String()
		if c.failSaid {
			got = got[:len(got)-1]
		}
		if rej, ok := errors.AsType[*rejection](err); ok {
			return got, rej
		}
		if err != io.EOF {
			t.Fatalf("read ended with %v", err)
		}
		return got, nil
	}
	t.Fatal("reading doesn't end")
	return "", nil
}

// scriptedConn is a connection whose reads return the pieces one by one, then EOF.
type scriptedConn struct {
	net.Conn
	pieces []string
}

func (c *scriptedConn) Read(p []byte) (int, error) {
	for len(c.pieces) > 0 && c.pieces[0] == "" {
		c.pieces = c.pieces[1:]
	}
	if len(c.pieces) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.pieces[0])
	c.pieces[0] = c.pieces[0][n:]
	return n, nil
}

func (c *scriptedConn) Write(p []byte) (int, error) { return len(p), nil }

func (c *scriptedConn) SetReadDeadline(time.Time) error  { return nil }
func (c *scriptedConn) SetWriteDeadline(time.Time) error { return nil }

type goneCounter struct{ n atomic.Int32 }

func (g *goneCounter) clientGone() { g.n.Add(1) }

// waitFor waits until cond holds, and fails t if it doesn't in a time no machine is
// too slow for.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// watchedPair is a clientConn with a real socket under it.
func watchedPair(t testing.TB) (*clientConn, *watcher) {
	t.Helper()
	w, err := newWatcher(false)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := newListener(tcp, newEdge(edgeOptions{}, w))
	peer, err := net.Dial("tcp4", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close(); c.Close(); ln.Close(); w.close() })
	return c.(*clientConn), w
}

func dialEdge(t testing.TB, addr string) (net.Conn, *bufio.Reader) {
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		t.Error(err)
		panic(err)
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	return c, bufio.NewReader(c)
}
