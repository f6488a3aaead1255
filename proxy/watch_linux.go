package proxy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A watcher learns from the kernel when clients go. It is one edge-triggered epoll
// set for all connections, next to the runtime's own, that asks for EPOLLRDHUP
// alone: it never reads, so it takes no byte from the server, it isn't blind behind
// pipelined bytes, and it sees the end of a TLS connection as that of any other. The
// set is itself waited for by the runtime's poller: one goroutine, no thread.
//
// A connection is added once, at its first request, and leaves the set when its
// descriptor is closed. Between requests an event only sets a mark. Events carry
// tokens, not descriptors: one that comes late, for a descriptor that was closed and
// is another connection's now, finds nobody.
type watcher struct {
	file   *os.File // the epoll set
	events uint32
	done   chan struct{}

	mu    sync.Mutex
	next  uint64
	conns map[uint64]hanger // by token
}

// newWatcher starts a watcher. ignoreHalfClose: a client that only shuts down its
// sending side has not gone.
func newWatcher(ignoreHalfClose bool) (*watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("epoll set: %w", err)
	}
	w := &watcher{
		file:   os.NewFile(uintptr(fd), "epoll"),
		events: unix.EPOLLRDHUP | unix.EPOLLET,
		done:   make(chan struct{}),
		conns:  map[uint64]hanger{},
	}
	if ignoreHalfClose {
		w.events = unix.EPOLLET // EPOLLHUP and EPOLLERR always come
	}
	rc, err := w.file.SyscallConn()
	if err != nil {
		w.file.Close()
		return nil, fmt.Errorf("epoll set: %w", err)
	}
	go w.run(rc)
	return w, nil
}

func (w *watcher) run(rc syscall.RawConn) {
	defer close(w.done)
	events := make([]unix.EpollEvent, 128)
	for {
		n := 0
		err := rc.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events, 0)
			return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
		})
		if err != nil {
			return // closed
		}
		for i := range max(n, 0) {
			token := uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32
			w.mu.Lock()
			c := w.conns[token]
			delete(w.conns, token)
			w.mu.Unlock()
			if c != nil {
				c.hangUp()
			}
		}
	}
}

// registerClient adds c to the set.
func (w *watcher) registerClient(c *clientConn) bool {
	return w.register(&c.watched, c, c.Conn, w.events)
}

// registerEndpoint adds c to the set.
func (w *watcher) registerEndpoint(c *endpointConn) bool {
	return w.register(&c.watched, c, c.Conn, unix.EPOLLRDHUP|unix.EPOLLET)
}

// register has h told when conn's peer goes. It reports whether that worked; if not, its going is noticed when writing to
// it fails. Called with s locked.
func (w *watcher) register(s *watchState, h hanger, conn net.Conn, events uint32) bool {
	rc := rawConn(conn)
	if rc == nil {
		return false
	}
	w.mu.Lock()
	w.next++
	s.token = w.next
	w.conns[w.next] = h
	w.mu.Unlock()
	ev := unix.EpollEvent{Events: events, Fd: int32(uint32(s.token)), Pad: int32(uint32(s.token >> 32))}
	ok := false
	set, err := w.file.SyscallConn()
	if err == nil {
		// Control pins both descriptors: neither can be closed and reused meanwhile.
		err = set.Control(func(epfd uintptr) {
			err := rc.Control(func(fd uintptr) {
				ok = unix.EpollCtl(int(epfd), unix.EPOLL_CTL_ADD, int(fd), &ev) == nil
			})
			ok = ok && err == nil
		})
	}
	if ok = ok && err == nil; !ok {
		w.unregister(s)
	}
	return ok
}

// unregister forgets s. The kernel takes a descriptor out of the set when it is closed.
func (w *watcher) unregister(s *watchState) {
	w.mu.Lock()
	delete(w.conns, s.token)
	w.mu.Unlock()
}

// close ends the watcher's goroutine and waits for it.
func (w *watcher) close() {
	w.file.Close()
	<-w.done
}
