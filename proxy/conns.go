package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"kvgate/pool"
)

// A cancelCause says who ended a request before its time.
type cancelCause uint8

const (
	notCancelled cancelCause = iota
	cancelledByClient
	cancelledByDrain
)

// A lease is what a request in flight can be woken by, whatever it is waiting for. cancel may be called by any goroutine
// at any time; it touches a connection only while the lease holds it, by expiring its deadline, and never closes it, so
// that it can't hit one that has gone back to the pool.
type lease struct {
	mu    sync.Mutex
	cause cancelCause
	conn  net.Conn           // the connection the request reads from or writes to
	stop  context.CancelFunc // ends the dial or the wait the request is in
}

// expired is a deadline that has passed.
var expired = time.Unix(1, 0)

// clientGone implements goneNotifier.
func (l *lease) clientGone() { l.cancel(cancelledByClient) }

// cancel wakes the request and has it end for cause. Only the first cause counts.
func (l *lease) cancel(cause cancelCause) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != notCancelled {
		return
	}
	l.cause = cause
	if l.conn != nil {
		_ = l.conn.SetDeadline(expired)
	}
	if l.stop != nil {
		l.stop()
	}
}

// cancelled returns why the request was cancelled.
func (l *lease) cancelled() cancelCause {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// reset makes the lease ready for the next request. Nobody else may know of it any more.
func (l *lease) reset() { l.cause, l.conn, l.stop = notCancelled, nil, nil }

// waiting has stop called when the request is cancelled. It reports false if it has been already.
func (l *lease) waiting(stop context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != notCancelled {
		return false
	}
	l.stop = stop
	return true
}

// waited ends waiting.
func (l *lease) waited() {
	l.mu.Lock()
	l.stop = nil
	l.mu.Unlock()
}

// attach gives the lease c to expire. It reports false if the request has been cancelled already.
func (l *lease) attach(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != notCancelled {
		return false
	}
	l.conn = c
	return true
}

// detach takes the connection back. It reports whether it is as it was: cancel did not expire its deadline.
func (l *lease) detach() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = nil
	return l.cause == notCancelled
}

// deadline sets the read or write deadline of the connection, unless the request has been cancelled.
func (l *lease) deadline(write bool, t time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.cause != notCancelled || l.conn == nil:
	case write:
		_ = l.conn.SetWriteDeadline(t)
	default:
		_ = l.conn.SetReadDeadline(t)
	}
}

// An endpointConn is one connection to an endpoint. It belongs to one request at a time, or to the idle list.
type endpointConn struct {
	net.Conn
	tcp    syscall.RawConn // of the TCP connection; nil: it can't be checked and isn't kept
	plain  bool            // Conn is the TCP connection itself
	config *tls.Config     // what it was dialled with

	idleSince time.Time
	dialTook  time.Duration // for the request that had it dialled; then 0
	used      bool          // it has carried a request before
	watch     *watcher      // tells watched of the endpoint's going; nil: nobody does
	watched   watchState
	readArmed time.Time // deadlines set on Conn; they are renewed only when they are due or too late

	// Input that has been read and not yet used: in.b[r:w]. in is nil while there is none, so that a connection which
	// waits holds no buffer.
	in   *buffer
	r, w int
	size int // class of the next buffer

	// For the callbacks below, which are made once so that calling them allocates nothing.
	checkAlive func(fd uintptr)
	alive      bool
	readSome   func(fd uintptr) bool
	readN      int
	readErr    error
	sendRead   func(fd uintptr) bool
	out, body  []byte // to be written before reading
	wrote      int
	wroteAt    time.Time // when all of out had been
	lateErr    error     // of a read whose caller wanted to know about writing
}

func newEndpointConn(c net.Conn, config *tls.Config) *endpointConn {
	ec := &endpointConn{Conn: c, config: config}
	if _, ok := c.(*net.TCPConn); ok {
		ec.plain = canTryRead
	}
	ec.tcp = rawConn(c)
	ec.checkAlive = ec.peek
	ec.readSome = ec.tryRead
	ec.sendRead = ec.trySendRead
	return ec
}

// live reports whether an idle connection can carry a request: its peer has neither closed nor reset it, nor sent what
// nobody has asked for, which would be taken for the answer to the next request (response-queue poisoning).
func (c *endpointConn) live() bool {
	if c.tcp == nil || c.r != c.w {
		return false
	}
	c.alive = false
	return c.tcp.Control(c.checkAlive) == nil && c.alive
}

// errStale says that a kept connection was dead, or held bytes that nobody had asked for. Nothing has been written to it.
var errStale = errors.New("the kept connection is dead")

// send writes out and body to a plain connection and, if all of it could be written at once, waits for the beginning of the
// answer: fill finds that, or why there is none. It returns how much was written, and errStale if the connection was.
//
// All of this is one read to the runtime's poller, which forgets no readiness that is reported while it lasts. So it takes no
// attempt to read before there can be anything to read.
func (c *endpointConn) send(out, body []byte) (wrote int, err error) {
	c.alive, c.out, c.body, c.wrote, c.readN, c.readErr = false, out, body, 0, 0, nil
	c.wroteAt = time.Time{}
	err = c.tcp.Read(c.sendRead)
	c.out, c.body = nil, nil
	switch {
	case err != nil && c.wrote == 0: // the deadline had passed
		return 0, err
	case !c.alive:
		return 0, errStale
	case c.wroteAt.IsZero():
		return c.wrote, nil
	case err != nil:
		c.lateErr = err
	default:
		c.r, c.w = 0, c.readN
		c.lateErr = c.readErr
	}
	return c.wrote, nil
}

// fill reads more input behind what there is. It returns an error and no bytes, or bytes and no error.
func (c *endpointConn) fill() error {
	if err := c.lateErr; err != nil {
		c.lateErr = nil
		return err
	}
	if c.r == c.w && c.in != nil {
		c.dropInput()
	}
	if c.in == nil && c.plain {
		c.readN, c.readErr = 0, nil
		if err := c.tcp.Read(c.readSome); err != nil {
			return err
		}
		c.r, c.w = 0, c.readN
		return c.readErr
	}
	switch {
	case c.in == nil:
		c.in = getBuffer(c.size)
		c.r, c.w = 0, 0
	case c.w == len(c.in.b) && c.r > 0:
		c.w = copy(c.in.b, c.in.b[c.r:c.w])
		c.r = 0
	case c.w == len(c.in.b):
		bigger := getBuffer(c.w + 1)
		copy(bigger.b, c.in.b)
		c.in.release()
		c.in = bigger
	}
	n, err := c.Conn.Read(c.in.b[c.w:])
	c.w += n
	c.resize(n == len(c.in.b))
	if n > 0 {
		return nil
	}
	if c.r == c.w {
		c.dropInput()
	}
	return err
}

// resize chooses the size of the next buffer by whether the last one was filled.
func (c *endpointConn) resize(filled bool) {
	switch {
	case filled && c.size < maxBufferBytes:
		c.size = max(c.size, minBufferBytes) * bufferStep
	case !filled:
		c.size = minBufferBytes
	}
}

func (c *endpointConn) dropInput() {
	if c.in != nil {
		c.in.release()
		c.in = nil
	}
	c.r, c.w = 0, 0
}

// unread returns the input that is there.
func (c *endpointConn) unread() []byte {
	if c.in == nil {
		return nil
	}
	return c.in.b[c.r:c.w]
}

func (c *endpointConn) close() {
	c.dropInput()
	if c.watch != nil {
		c.watched.forget(c.watch)
	}
	_ = c.Conn.Close()
}

// watchWith has w tell of the endpoint's going.
func (c *endpointConn) watchWith(w *watcher) {
	if w == nil || !c.plain {
		return
	}
	c.watch = w
	c.watched.mu.Lock()
	defer c.watched.mu.Unlock()
	c.watched.registered = w.registerEndpoint(c)
}

// conns are the kept connections to one endpoint. The most recently used is used next, so that surplus ones grow old and
// are closed.
type conns struct {
	mu     sync.Mutex
	idle   []*endpointConn // by idleSince
	closed bool

	open atomic.Int64 // dialled or being dialled, and not closed
}

var errTooManyConns = errors.New("too many connections to the endpoint")

// get returns a connection to address, dialling one if none is kept. One that was used before may have died since: it is
// for who writes to it to find out. now may be a moment ago. A nil config is one without TLS.
func (cs *conns) get(l *lease, address string, config *tls.Config, o *PoolOptions, limit int, now time.Time) (*endpointConn, error) {
	for {
		cs.mu.Lock()
		n := len(cs.idle)
		if n == 0 {
			cs.mu.Unlock()
			break
		}
		c := cs.idle[n-1]
		cs.idle[n-1] = nil
		cs.idle = cs.idle[:n-1]
		cs.mu.Unlock()
		if now.Sub(c.idleSince) < o.Timeouts.EndpointIdle && c.config == config && c.tcp != nil && c.r == c.w {
			if !l.attach(c.Conn) {
				cs.put(c, now)
				return nil, errCancelled
			}
			return c, nil
		}
		cs.drop(c)
	}
	// Slow path: dial.
	if cs.open.Add(1) > int64(limit) {
		cs.open.Add(-1)
		return nil, errTooManyConns
	}
	c, err := dialApart(l, address, config, o.Timeouts.Connect)
	if err != nil {
		cs.open.Add(-1)
		return nil, err
	}
	c.dialTook = time.Since(now)
	if !l.attach(c.Conn) {
		cs.drop(c)
		return nil, errCancelled
	}
	return c, nil
}

// errCancelled says that the request was cancelled while it waited.
var errCancelled = errors.New("the request was cancelled")

// dialApart is dial in a goroutine of its own. Dialling takes a deep stack, which the goroutine that called it would keep
// for as long as its stream runs.
func dialApart(l *lease, address string, config *tls.Config, timeout time.Duration) (c *endpointConn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { // certificates come from outside, and this goroutine is nobody's request
			if v := recover(); v != nil {
				c, err = nil, fmt.Errorf("panic: %v", v)
			}
		}()
		c, err = dial(l, address, config, timeout)
	}()
	<-done
	return c, err
}

// dial opens a connection within the timeout, TLS handshake included.
func dial(l *lease, address string, config *tls.Config, timeout time.Duration) (*endpointConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if l != nil {
		if !l.waiting(cancel) {
			return nil, errCancelled
		}
		defer l.waited()
	}
	// The connection is watched by its live check and deadlines; keep-alive probes find peers that vanished silently.
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 6}}
	c, err := d.DialContext(ctx, "tcp", address)
	if err == nil && config != nil {
		t := tls.Client(c, tlsConfigFor(config, address))
		if err = t.HandshakeContext(ctx); err != nil {
			_ = c.Close()
			err = fmt.Errorf("TLS handshake: %w", err)
		}
		c = t
	}
	if err != nil {
		if l != nil && l.cancelled() != notCancelled {
			return nil, errCancelled
		}
		return nil, err
	}
	return newEndpointConn(c, config), nil
}

// tlsConfigFor returns config with the server's name filled in.
func tlsConfigFor(config *tls.Config, address string) *tls.Config {
	if config.ServerName != "" {
		return config
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	config = config.Clone()
	config.ServerName = host
	return config
}

// put keeps c for the next request.
func (cs *conns) put(c *endpointConn, now time.Time) {
	c.idleSince = now
	c.used = true
	c.size = 0
	cs.mu.Lock()
	if !cs.closed {
		cs.idle = append(cs.idle, c)
		cs.mu.Unlock()
		return
	}
	cs.mu.Unlock()
	cs.drop(c)
}

// drop closes c.
func (cs *conns) drop(c *endpointConn) {
	c.close()
	cs.open.Add(-1)
}

// expire closes the idle connections that were last used before t; all of them and for ever if final.
func (cs *conns) expire(t time.Time, final bool) {
	cs.mu.Lock()
	n := 0
	for n < len(cs.idle) && (final || cs.idle[n].idleSince.Before(t)) {
		n++
	}
	old := append([]*endpointConn(nil), cs.idle[:n]...)
	m := copy(cs.idle, cs.idle[n:])
	clear(cs.idle[m:])
	cs.idle = cs.idle[:m]
	cs.closed = cs.closed || final
	cs.mu.Unlock()
	for _, c := range old {
		cs.drop(c)
	}
}

// An endpoint is the data path's side of a pool.Endpoint: its connections and its health.
type endpoint struct {
	*pool.Endpoint
	https  bool // its URL says so
	conns  conns
	health health
}

// systemTLS is for endpoints whose pool says nothing of TLS: the system's CAs.
var systemTLS = &tls.Config{MinVersion: tls.VersionTLS12}

// tls returns how to speak TLS with the endpoint, nil where it speaks none.
func (ep *endpoint) tls(o *PoolOptions) *tls.Config {
	switch {
	case !ep.https:
		return nil
	case o.TLS != nil:
		return o.TLS
	}
	return systemTLS
}

// endpoints finds the data path's side of endpoints by their slots.
type endpoints struct {
	mu     sync.Mutex                  // serialises writers
	bySlot atomic.Pointer[[]*endpoint] // never nil after the first get; slots without traffic yet hold nil
}

// get returns the endpoint of e. It does not allocate unless e is new.
func (es *endpoints) get(e *pool.Endpoint) *endpoint {
	if s := es.bySlot.Load(); s != nil && int(e.Slot) < len(*s) {
		if ep := (*s)[e.Slot]; ep != nil && ep.Endpoint == e {
			return ep
		}
	}
	return es.add(e)
}

func (es *endpoints) add(e *pool.Endpoint) *endpoint {
	es.mu.Lock()
	defer es.mu.Unlock()
	var old []*endpoint
	if s := es.bySlot.Load(); s != nil {
		old = *s
	}
	if int(e.Slot) < len(old) && old[e.Slot] != nil {
		ep := old[e.Slot]
		if ep.Endpoint == e {
			return ep
		}
		ep.conns.expire(time.Time{}, true) // its slot has another owner: it is gone for good
	}
	s := make([]*endpoint, max(len(old), int(e.Slot)+1))
	copy(s, old)
	ep := &endpoint{Endpoint: e, https: strings.HasPrefix(e.URL, "https:")}
	s[e.Slot] = ep
	es.bySlot.Store(&s)
	return ep
}

// all returns the endpoints that have had traffic.
func (es *endpoints) all() []*endpoint {
	s := es.bySlot.Load()
	if s == nil {
		return nil
	}
	out := make([]*endpoint, 0, len(*s))
	for _, ep := range *s {
		if ep != nil {
			out = append(out, ep)
		}
	}
	return out
}

// isTimeout reports whether err is a deadline that passed.
func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// rawConn returns the descriptor of a TCP connection, also from under TLS, nil if
// there is none.
func rawConn(c net.Conn) syscall.RawConn {
	for {
		if sc, ok := c.(syscall.Conn); ok {
			rc, err := sc.SyscallConn()
			if err != nil {
				return nil
			}
			return rc
		}
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = u.NetConn()
	}
}
