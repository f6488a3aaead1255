//go:build !race

package proxy

import (
	"bytes"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// instant is a model server that allocates nothing: it answers each request of requestBytes with the same bytes.
func instant(t testing.TB, reply string) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	out := []byte(reply)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 64<<10)
				n := 0
				for {
					m, err := c.Read(b[n:])
					if err != nil {
						return
					}
					n += m
					if bytes.HasSuffix(b[:n], []byte("}")) {
						n = 0
						if _, err := c.Write(out); err != nil {
							return
						}
					}
				}
			}()
		}
	}()
	return ln
}

var loopBuffer [64 << 10]byte

// loop sends request and reads the answer, which ends with end, n times.
func loop(t testing.TB, c net.Conn, request, end []byte, n int) {
	b := loopBuffer[:]
	for range n {
		if _, err := c.Write(request); err != nil {
			t.Fatal(err)
		}
		for m := 0; ; {
			k, err := c.Read(b[m:])
			if err != nil {
				t.Fatal(err, string(b[:m]))
			}
			if m += k; bytes.HasSuffix(b[:m], end) {
				break
			}
		}
	}
}

func instantGate(t testing.TB, reply string, opts ...gateOption) *client {
	ln := instant(t, reply)
	p, err := scoring.New(scoring.Config{})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, nil, append(opts, withPool(func(o *PoolOptions) { o.Policy = p }), withOptions(func(o *Options, _ *ServerOptions) { o.Sink = nil }))...)
	if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://" + ln.Addr().String()}}, g.now()); err != nil {
		t.Fatal(err)
	}
	return g.dial()
}

// A small request in steady state costs next to no garbage.
func TestAllocationsPerRequest(t *testing.T) {
	f := func(name, reply, body, end string, want float64) {
		t.Run(name, func(t *testing.T) {
			c := instantGate(t, reply)
			request := []byte(post(chatPath, body))
			loop(t, c.Conn, request, []byte(end), 500)
			var before, after runtime.MemStats
			const n = 2000
			runtime.ReadMemStats(&before)
			loop(t, c.Conn, request, []byte(end), n)
			runtime.ReadMemStats(&after)
			per := float64(after.Mallocs-before.Mallocs) / n
			t.Logf("%.2f allocations, %.0f bytes per request", per, float64(after.TotalAlloc-before.TotalAlloc)/n)
			if per > want {
				t.Errorf("%.2f allocations per request; want %.1f at most", per, want)
			}
		})
	}
	f("plain", plainReply, plainBody, "}", 3)
	f("stream", streamReply, streamBody, "0\r\n\r\n", 3)
}

func BenchmarkPlain(b *testing.B) {
	c := instantGate(b, plainReply)
	request := []byte(post(chatPath, plainBody))
	loop(b, c.Conn, request, []byte("}"), 100)
	b.ReportAllocs()
	for b.Loop() {
		loop(b, c.Conn, request, []byte("}"), 1)
	}
}

// The goroutine of a client's connection serves a whole request, books and all, on 4 KB of stack. One step that needs more
// would make it 8 KB for as long as the connection lives.
func TestStackPerStream(t *testing.T) {
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
			go func() { // the first request gets its answer, the second the beginning of a stream
				defer c.Close()
				b := make([]byte, 4<<10)
				for i, out := range []string{plainReply, streamReply[:strings.Index(streamReply, "\n\n")+4]} {
					for n := 0; n == 0 || b[n-1] != '}'; {
						m, err := c.Read(b[n:])
						if err != nil {
							return
						}
						n += m
					}
					if _, err := c.Write([]byte(out)); err != nil || i == 1 {
						break
					}
				}
				_, _ = c.Read(b)
			}()
		}
	}()
	p, err := scoring.New(scoring.Config{Index: scoring.NewIndex(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, nil, withPool(func(o *PoolOptions) { o.Policy = p }), withOptions(func(o *Options, _ *ServerOptions) {
		o.Sink = telemetry.Sinks{telemetry.New(telemetry.Options{}), &telemetry.AccessLog{Logger: zap.NewNop(), Off: true}, telemetry.NewRecent(100)}
	}))
	if _, _, err := g.table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://" + ln.Addr().String()}}, g.now()); err != nil {
		t.Fatal(err)
	}
	open := func(n int) {
		for range n {
			c := g.dial()
			loop(t, c.Conn, []byte(post(chatPath, plainBody)), []byte("}"), 1)
			loop(t, c.Conn, []byte(post(chatPath, streamBody)), []byte("\n\n\r\n"), 1)
		}
	}
	inuse := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.StackInuse
	}
	open(20)
	before := inuse()
	const n = 300
	open(n)
	per := float64(inuse()-before) / n
	t.Logf("%.0f bytes of stack per stream, the model server's end included", per)
	// 4 KB here and 2 or 4 at the other end.
	if per > 9<<10 {
		t.Errorf("%.0f bytes of stack per stream; want at most %d", per, 9<<10)
	}
}

// A stream that is silent holds no buffer of either end, nor the head of its request.
func TestSilentStreamsHoldNoBuffer(t *testing.T) {
	release := make(chan struct{})
	m := newMock(t, func(c *call) {
		if !bytes.Contains(c.body, []byte("stream")) {
			c.json(200, "{}")
			return
		}
		c.sse()
		for _, s := range []string{"first", "second", "third"} {
			c.token(s)
			time.Sleep(10 * time.Millisecond) // so that the next finds the gateway waiting
		}
		<-release
		c.conn.Close()
		c.done = true
	})
	g := newGate(t, []*mock{m})
	defer close(release)
	for follows := range 2 { // as the first request of a connection, and as one that follows
		c := g.dial()
		for range follows {
			c.send(post(chatPath, plainBody)).read()
		}
		c.send(post(chatPath, streamBody))
		c.readTo("third\"}}]}\n\n")
	}
	eventually(t, "two streams without a buffer", func() bool {
		n := 0
		for i := range g.h.shards {
			g.h.shards[i].mu.Lock()
			for x := g.h.shards[i].first; x != nil; x = x.next {
				if x.bytesOut > 0 && x.conn != nil && x.conn.in == nil && x.client.in == nil && x.out == nil && x.head == nil {
					n++
				}
			}
			g.h.shards[i].mu.Unlock()
		}
		return n == 2
	})
}
