package proxy

import (
	"errors"
	"net"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// reservedDescriptors is how many file descriptors client connections leave to
// everything else: scrapes, the admin listener, logs, configuration.
const reservedDescriptors = 128

// A listener accepts clients for the HTTP server, which would end its service at the
// first error of Accept that is no timeout. It waits out what passes by itself, keeps
// the number of connections below its limit, and hands out *clientConns.
type listener struct {
	net.Listener // accepts TCP or TLS connections
	edge         *edge
	open         atomic.Int64
	accepted     atomic.Uint64
	refused      atomic.Uint64
	errors       atomic.Uint64
	closed       chan struct{}
	closing      atomic.Bool
}

func newListener(ln net.Listener, e *edge) *listener {
	return &listener{Listener: ln, edge: e, closed: make(chan struct{})}
}

// stats returns the number of connections open now, and of those accepted, refused
// for want of room, and lost to errors of Accept since the start.
func (l *listener) stats() (open int64, accepted, refused, errors uint64) {
	return l.open.Load(), l.accepted.Load(), l.refused.Load(), l.errors.Load()
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	pause := 5 * time.Millisecond
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			if !passing(err) {
				return nil, err
			}
			l.errors.Add(1)
			if l.edge.onAcceptError != nil {
				l.edge.onAcceptError(err)
			}
			select {
			case <-time.After(pause):
			case <-l.closed:
				return nil, net.ErrClosed
			}
			pause = min(2*pause, time.Second)
			continue
		}
		pause = 5 * time.Millisecond
		if l.open.Add(1) > int64(l.edge.connections) {
			l.open.Add(-1)
			l.refused.Add(1)
			if l.edge.onRefuse != nil {
				l.edge.onRefuse()
			}
			turnAway(c)
			continue
		}
		l.accepted.Add(1)
		cc := newClientConn(c, l.edge, l.release)
		cc.learnPeer()
		return cc, nil
	}
}

func (l *listener) release() { l.open.Add(-1) }

// Close implements net.Listener.
func (l *listener) Close() error {
	if !l.closing.Swap(true) {
		close(l.closed)
	}
	return l.Listener.Close()
}

// passing reports whether Accept may work again after err: the process or the system
// is out of something, the peer was gone again, or a firewall rule said no.
func passing(err error) bool {
	var ne net.Error
	return exhausted(err) || errors.As(err, &ne) && ne.Timeout() ||
		isAny(err, syscall.ECONNABORTED, syscall.EPROTO, syscall.EPERM, syscall.ECONNRESET, syscall.EINTR)
}

// exhausted reports whether err means that the process or the system is out of descriptors, memory or ports.
func exhausted(err error) bool {
	return isAny(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL)
}

func isAny(err error, list ...error) bool {
	for _, e := range list {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

const turnedAway = `{"error":{"message":"too many connections","type":"rate_limit_error","param":null,"code":"saturated"}}`

var turnedAwayAnswer = []byte("HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: " +
	strconv.Itoa(len(turnedAway)) + "\r\n\r\n" + turnedAway)

// turnAway answers 429 and closes. A new connection's send buffer takes the answer
// at once, so this doesn't hold up Accept. TLS connections, whose handshake would, are
// only closed.
func turnAway(c net.Conn) {
	defer c.Close()
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	if tc.SetDeadline(time.Now().Add(100*time.Millisecond)) != nil {
		return
	}
	if _, err := tc.Write(turnedAwayAnswer); err != nil {
		return
	}
	if tc.CloseWrite() != nil {
		return
	}
	// What has been sent already is read, for closing over unread input would reset
	// the connection and might take the answer back.
	_ = tc.SetReadDeadline(time.Now().Add(time.Millisecond))
	var drop [4096]byte
	for range 16 {
		if _, err := tc.Read(drop[:]); err != nil {
			return
		}
	}
}
