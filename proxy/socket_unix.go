//go:build unix

package proxy

import (
	"io"
	"net"
	"syscall"
)

// A socket reads a connection. A plain one is read without a buffer waiting for it: the
// buffer is got when there is something to put into it, so that idle connections need none.
type socket struct {
	c   *clientConn
	raw syscall.RawConn // nil: not a plain socket
	try func(fd uintptr) bool

	dst []byte // nil: get a buffer
	n   int
	err error

	// See serveWaiting.
	more    func(fd uintptr) bool
	handler *Handler
	end     waitEnd
	drained bool // the last read took all there was
}

func (s *socket) init(c *clientConn) {
	s.c = c
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		if raw, err := tc.SyscallConn(); err == nil {
			s.raw, s.try, s.more = raw, s.tryRead, s.serveWaiting
		}
	}
}

// plain reports whether serveMore does anything.
func (s *socket) plain() bool { return s.raw != nil }

// read reads into p, or into a new input buffer of the connection if p is nil.
func (s *socket) read(p []byte) (int, error) {
	if s.raw == nil {
		if p == nil {
			s.c.in = getBodyBuffer(s.c.inputClass())
			p = s.c.in.b
		}
		return s.c.Conn.Read(p)
	}
	s.dst = p
	err := s.raw.Read(s.try)
	s.dst = nil
	if err != nil {
		return 0, err
	}
	return s.n, s.err
}

// tryWrite writes what the socket takes at once and returns how much that was.
func (s *socket) tryWrite(fd int, p []byte) int {
	for {
		n, err := writeNow(fd, p)
		if err != syscall.EINTR {
			return max(n, 0)
		}
	}
}

// serveMore serves requests until something has to be waited for other than the next request.
func (s *socket) serveMore(h *Handler) waitEnd {
	s.handler, s.end = h, waitAgain
	// What comes of the read, a deadline or an error, is for nextHead to find.
	_ = s.raw.Read(s.more)
	return s.end
}

// serveWaiting waits for requests and serves them, within one read of the runtime's poller. Such a read forgets no readiness
// that is reported while it lasts, so that there is no need to try to read before waiting: a read that left room in its
// buffer has taken all there was, and what comes later is reported. But for the end of the input, which may be reported
// together with bytes: that is what the watch tells of.
func (s *socket) serveWaiting(fd uintptr) (done bool) {
	c := s.c
	defer func() { c.fd = 0 }()
	for {
		for c.r < c.w && c.scanHead() {
			if c.fail != nil {
				s.end = waitRefused
				return true
			}
			if c.phase != inHead && (c.phase != inBody || c.left > int64(c.w-c.r)) {
				s.end = waitRead
				return true
			}
			c.waited()
			c.fd = int(fd)
			closing := s.handler.serve(c)
			c.fd = 0
			switch {
			case closing:
				s.end = waitClose
				return true
			case c.phase != inHead || !c.wait():
				return true
			}
			if c.r == c.w && s.drained && !c.edge.ignoreHalfClose {
				return !c.pause()
			}
		}
		s.dst = c.room()
		ok := s.tryRead(fd)
		s.dst = nil
		switch {
		case !ok:
			return !c.pause()
		case s.n == 0:
			return true // the end, which the next read finds as well
		}
		c.w += s.n
		s.drained = c.w < len(c.in.b)
	}
}

// tryRead reports whether there was an end to reading: something was read, or an error.
func (s *socket) tryRead(fd uintptr) bool {
	p := s.dst
	if p == nil {
		s.c.in = getBodyBuffer(s.c.inputClass())
		p = s.c.in.b
	}
	for {
		s.n, s.err = readNow(int(fd), p)
		if s.err != syscall.EINTR {
			break
		}
	}
	if s.n > 0 {
		s.err = nil
		return true
	}
	s.n = 0
	if s.dst == nil {
		putBodyBuffer(s.c.in)
		s.c.in = nil
	}
	switch s.err {
	case syscall.EAGAIN:
		return false
	case nil:
		s.err = io.EOF
	}
	return true
}
