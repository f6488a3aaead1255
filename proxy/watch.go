package proxy

import (
	"net"
	"sync"
	"time"
)

// A goneNotifier is told that a client has gone. clientGone is called at most once
// per watch, from another goroutine or from within watch itself, with the watch
// locked: it must not block and must not call watch or stop.
type goneNotifier interface{ clientGone() }

// A hanger is told once that the peer of a connection has gone: closed it, or shut down its sending side.
type hanger interface{ hangUp() }

// watchState is a connection's part in the watch.
type watchState struct {
	mu         sync.Mutex
	registered bool
	gone       bool
	token      uint64
	notify     goneNotifier // nil: no request is being served
	waits      bool         // for input: who wants that to end expires its read deadline
	ended      bool         // it is to wait for no other
}

// wait notes that c waits for its next request, and reports false if it is not to any more.
func (c *clientConn) wait() bool {
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waits = !s.ended
	return s.waits
}

// waited ends wait.
func (c *clientConn) waited() {
	c.watched.mu.Lock()
	c.watched.waits = false
	c.watched.mu.Unlock()
}

// pause reports whether c, which waits, may do so without looking for input: it will be told of it, of the client's going,
// and of the server's end. The deadline is set first, since whoever tells does so by it.
func (c *clientConn) pause() bool {
	now := c.ended
	if c.ended = (time.Time{}); now.IsZero() {
		now = time.Now()
	}
	if c.armRead(now) != nil {
		return false
	}
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.registered && !s.gone && !s.ended
}

// end ends c's waiting for its next request, if that is what it does, and has it not wait again.
func (c *clientConn) end() {
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if s.waits {
		_ = c.Conn.SetReadDeadline(expired)
	}
}

// waitsNoMore reports whether c is not to wait for another request.
func (c *clientConn) waitsNoMore() bool {
	c.watched.mu.Lock()
	defer c.watched.mu.Unlock()
	return c.watched.ended
}

// A watchHandle ends a watch. The zero value ends nothing.
type watchHandle struct{ c *clientConn }

// watch has n told when conn's client closes or resets the connection, which the
// HTTP server can't see while it runs a handler. If that has happened already, n is
// told before watch returns. One watch per connection at a time. The first watch of
// a connection costs a system call; later ones a lock and two stores.
//
// stop must be called before the handler returns or, for a streamed response, when
// its body is closed.
func (w *watcher) watch(conn net.Conn, n goneNotifier) watchHandle {
	c := asClientConn(conn)
	if c == nil || w == nil {
		return watchHandle{}
	}
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.registered {
		s.registered = w.registerClient(c)
	}
	if s.gone {
		n.clientGone()
		return watchHandle{}
	}
	s.notify = n
	return watchHandle{c}
}

// stop ends the watch. When it has returned, the notifier isn't running and will not
// be called again. The caller must hold no lock that clientGone takes.
func (h watchHandle) stop() {
	if h.c == nil {
		return
	}
	s := &h.c.watched
	s.mu.Lock()
	s.notify = nil
	s.mu.Unlock()
}

// hangUp records that the client has gone and tells whoever watches.
func (c *clientConn) hangUp() {
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goes(c.Conn)
	if n := s.notify; n != nil {
		s.notify = nil
		n.clientGone()
	}
}

// hangUp records that the endpoint has closed its side, and has who waits for more of it read to the end.
func (c *endpointConn) hangUp() {
	s := &c.watched
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goes(c.Conn)
}

// goes notes that the peer of conn has gone. The caller holds mu.
func (s *watchState) goes(conn net.Conn) {
	s.gone = true
	if s.waits {
		_ = conn.SetReadDeadline(expired)
	}
}

// mayWait reports whether somebody will tell of the peer's going. From now on that ends waiting, if set.
func (s *watchState) mayWait(waits bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waits = waits
	return s.registered && !s.gone
}

// forget takes the connection out of the watch.
func (s *watchState) forget(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notify = nil
	if s.registered {
		s.registered = false
		w.unregister(s)
	}
}
