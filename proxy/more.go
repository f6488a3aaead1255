package proxy

import (
	"net"
	"sync"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"kvgate/telemetry"
)

// Serve takes a connection over from the HTTP server, with its first request. It is a fasthttp.RequestHandler.
//
// fasthttp accepts connections, answers what is no request, and closes those that never send one. What comes after the first
// head is read and answered here, in a goroutine with a small stack, which a stream keeps for as long as it runs: the server
// would parse every head again, look whether there is something to read before waiting for it, and write an answer of its
// own that nobody gets, for a fifth of the time that a small request takes (docs/adr/0008).
func (h *Handler) Serve(ctx *fasthttp.RequestCtx) {
	c := asClientConn(ctx.Conn())
	if c == nil {
		panic("BUG: the server was not given connections of our listener")
	}
	h.following.add(c)
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) { go h.follow(c) }) // the server keeps its context until this returns
}

// A waitEnd says why serveMore of a socket has ended.
type waitEnd uint8

const (
	waitAgain   waitEnd = iota // there may be something to skip, the end to find, or a deadline to set anew
	waitRead                   // a head is there, and its body isn't yet
	waitRefused                // what came is not to be let through
	waitClose                  // the connection ends after an answer
)

// follow serves the request whose head c has, and those that follow it, and closes c.
func (h *Handler) follow(c *clientConn) {
	defer func() {
		if v := recover(); v != nil { // a bug here is not to cost more than the connection
			h.panicked(v)
		}
		_ = c.Close()
		h.following.remove(c)
	}()
	closing := h.serve(c)
	for !closing && c.wait() {
		end := waitAgain
		if c.sock.plain() && c.phase == inHead {
			end = c.sock.serveMore(h)
		}
		if end == waitAgain {
			if !c.wait() || c.nextHead() != nil {
				return
			}
			if c.fail != nil {
				end = waitRefused
			}
		}
		c.waited()
		switch end {
		case waitClose:
			return
		case waitRefused:
			h.refuse(c)
			return
		}
		closing = h.serve(c)
	}
}

// refuse answers what c is not to let through.
func (h *Handler) refuse(c *clientConn) {
	rej := c.fail
	if !rej.quiet {
		b := appendStatusLine(nil, rej.status, nil)
		b = append(b, "Content-Type: application/json\r\nConnection: close\r\n"...)
		b = appendRejection(b, rej)
		if _, err := c.send(b); err != nil {
			h.log.Debug("a refusal was not taken", zap.Error(err))
		}
	}
	h.observeRejection(&telemetry.Record{ClientAddr: c.peerText()}, rej)
}

// following are the connections that have been taken over from the HTTP server.
type following struct {
	mu    sync.Mutex
	conns map[*clientConn]struct{}
	wg    sync.WaitGroup
}

func (f *following) add(c *clientConn) {
	f.wg.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conns == nil {
		f.conns = map[*clientConn]struct{}{}
	}
	f.conns[c] = struct{}{}
}

func (f *following) remove(c *clientConn) {
	f.mu.Lock()
	delete(f.conns, c)
	f.mu.Unlock()
	f.wg.Done()
}

// end ends the connections that wait for a request, and those that begin to.
func (f *following) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		c.end()
	}
}
