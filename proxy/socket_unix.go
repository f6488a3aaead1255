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
}

func (s *socket) init(c *clientConn) {
	s.c = c
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		if raw, err := tc.SyscallConn(); err == nil {
			s.raw, s.try = raw, s.tryRead
		}
	}
}

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

// tryRead reports whether there was an end to reading: something was read, or an error.
func (s *socket) tryRead(fd uintptr) bool {
	p := s.dst
	if p == nil {
		s.c.in = getBodyBuffer(s.c.inputClass())
		p = s.c.in.b
	}
	for {
		s.n, s.err = syscall.Read(int(fd), p)
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
