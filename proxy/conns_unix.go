//go:build unix

package proxy

import (
	"io"
	"syscall"
	"time"
)

// canTryRead: tryRead can wait without a buffer.
const canTryRead = true

// peek looks at the next byte of an idle connection without taking it: there must be none.
func (c *endpointConn) peek(fd uintptr) {
	c.alive = nothingToRead(int(fd))
}

// trySendRead looks whether the connection is alive and writes c.out, and after that reads.
func (c *endpointConn) trySendRead(fd uintptr) (done bool) {
	if c.out == nil {
		return c.tryRead(fd)
	}
	if c.alive = !c.used; c.used {
		c.peek(fd)
	}
	if !c.alive {
		return true
	}
	for {
		var n int
		var err error
		if len(c.body) > 0 {
			n, err = writeBothNow(int(fd), c.out, c.body)
		} else {
			n, err = writeNow(int(fd), c.out)
		}
		if n <= 0 && err == syscall.EINTR {
			continue
		}
		if c.wrote = max(n, 0); c.wrote < len(c.out)+len(c.body) {
			return true // for who can wait to go on with, or to find the error
		}
		c.out = nil
		c.wroteAt = time.Now()
		return false
	}
}

// tryRead reads what is there into a new buffer. Where nothing is, it takes none: a connection that waits for its
// endpoint holds no memory.
func (c *endpointConn) tryRead(fd uintptr) (done bool) {
	in := getBuffer(c.size)
	for {
		n, err := readNow(int(fd), in.b)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			in.release()
			return false
		case err != nil:
			in.release()
			c.readErr = err
		case n == 0:
			in.release()
			c.readErr = io.EOF
		default:
			c.in, c.readN = in, n
			c.resize(n == len(in.b))
		}
		return true
	}
}

// relaySome reads and relays what is there, and reports false if there will be more and somebody will tell of it: in that
// case, and within one read of the runtime's poller, there is no need to look for it before waiting.
func (x *exchange) relaySome(fd uintptr) (done bool) {
	c, r := x.conn, &x.relaying
	for looked := false; ; looked = true {
		c.dropInput()
		if !c.tryRead(fd) {
			x.armRead(c, r.until)
			if looked || c.watched.mayWait(true) {
				return false
			}
			continue // it has gone meanwhile: look again
		}
		if c.readErr != nil {
			r.err, r.ended = c.readErr, true
			return true
		}
		c.r, c.w = 0, c.readN
		drained := c.readN < len(c.in.b)
		if x.pump(); c.r == c.w {
			c.dropInput() // a stream that is silent holds no buffer
		}
		switch {
		case r.ended, c.r < c.w: // the rest of a line, which is for who reads on behind it
			return true
		case drained:
			if x.armRead(c, r.until); c.watched.mayWait(true) {
				return false
			}
		}
	}
}
