//go:build !race

package proxy

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/valyala/fasthttp"
)

// From the socket to a whole request in memory, and watching, nothing is allocated in
// steady state, but the one byte that fasthttp waits for the next request with.
func TestEdgeAllocations(t *testing.T) {
	t.Run("check head", func(t *testing.T) {
		lim := newEdge(edgeOptions{}, nil).limits
		n := testing.AllocsPerRun(100, func() {
			var hi headInfo
			if n, rej := checkHead(twelveFields, &lim, &hi); n == 0 || rej != nil {
				t.Fatal(rej)
			}
		})
		if n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
	t.Run("watch", func(t *testing.T) {
		c, w := watchedPair(t)
		var g goneCounter
		if n := testing.AllocsPerRun(100, func() { h := w.watch(c, &g); h.stop() }); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
	for _, size := range []int{1 << 10, 16 << 10, 256 << 10} {
		// The whole way: request over a socket, body read, answer.
		var e *edgeServer
		var g goneCounter
		e = startEdge(t, edgeOptions{}, serverOptions{handler: func(ctx *fasthttp.RequestCtx) {
			var body requestBody
			if rej := readBody(ctx, e.budget, &body); rej != nil {
				writeRejection(ctx, rej)
				return
			}
			h := e.watch.watch(ctx.Conn(), &g)
			h.stop()
			if len(body.bytes()) != size {
				ctx.SetStatusCode(500)
			}
			body.release()
		}})
		c, err := net.Dial("tcp4", e.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		raw := bytes.Replace(twelveFields, []byte("Content-Length: 1024"), fasthttp.AppendUint([]byte("Content-Length: "), size), 1)
		raw = append(raw, make([]byte, size)...)
		br := bufio.NewReader(c)
		var b [1024]byte
		n := testing.AllocsPerRun(200, func() {
			if _, err := c.Write(raw); err != nil {
				t.Fatal(err)
			}
			n, err := br.Read(b[:])
			if err != nil && err != io.EOF || !bytes.HasPrefix(b[:n], []byte("HTTP/1.1 200")) {
				t.Fatalf("%q, %v", b[:n], err)
			}
		})
		if n > 1.5 { // the collector may empty a pool
			t.Errorf("%d bytes: %v allocations per request", size, n)
		}
	}
}
