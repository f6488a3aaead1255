//go:build !unix

package proxy

// A socket reads a connection.
type socket struct{ c *clientConn }

func (s *socket) tryWrite(int, []byte) int { return 0 }

func (s *socket) serveMore(*Handler) waitEnd { return waitAgain }

func (s *socket) plain() bool { return false }

func (s *socket) init(c *clientConn) { s.c = c }

// read reads into p, or into a new input buffer of the connection if p is nil.
func (s *socket) read(p []byte) (int, error) {
	if p == nil {
		s.c.in = getBodyBuffer(s.c.inputClass())
		p = s.c.in.b
	}
	return s.c.Conn.Read(p)
}
