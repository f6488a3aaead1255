package proxybench

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// An engine is the model server and the clients: one thread, one epoll set, no goroutine per connection. So its own
// time per request stays below that of whatever stands between the two.
//
// All its methods are for one goroutine, which should be locked to its thread.
type engine struct {
	ep     int
	base   time.Time
	events [512]unix.EpollEvent
	buf    [256 << 10]byte
	conns  []*conn // by descriptor
	hasNs  bool    // epoll_pwait2 is there

	// The model server.
	answers   *answers
	listeners []int
	addrs     []netip.AddrPort
	serving   serving
	streaming []*conn // by client's number: the connection on which its stream comes
	paced     []due   // in the order of their times, from pacedHead on
	pacedHead int

	// The clients.
	load     *load
	want     int64 // bytes of body that an answer has
	clients  []*conn
	free     []*conn // open loop: those that wait
	waiting  []int64 // open loop: the times at which requests that found no connection should have been sent
	nextSend int64
	started  int // connections of a ramp
	sequence uint64
	count    counts
}

// serving is how the model server answers.
type serving struct {
	chunks int           // of a stream
	gap    time.Duration // between them; 0: the next goes out when the client has the one before
}

// A load is what clients do.
type load struct {
	addr     netip.AddrPort
	template *request
	conns    int
	rate     float64       // requests per second, open loop; 0: closed loop
	ramp     time.Duration // over which the connections are opened
	stream   bool
	fresh    bool // a connection for each request
	once     bool // one request per connection, which then stays open
}

// counts are what has happened since they were last cleared.
type counts struct {
	requests, chunks, errors int
	firstError               error
	late                     int // requests that found no free connection
	latency                  *hdrhistogram.Histogram
}

type connKind uint8

const (
	isListener connKind = iota
	isStub
	isClient
)

type conn struct {
	fd      int
	kind    connKind
	gone    bool
	writing []byte // what the socket hasn't taken yet
	p       parser

	// Of the model server.
	stream int // chunks still to be sent; 0: no stream
	client int // whose
	gen    uint32

	// Of a client.
	number     int
	busy       bool
	connecting bool
	due        int64 // when the request should have been sent
	seen       int   // events of this answer
	lastNext   int   // events after which the last chunk was asked for
}

type due struct {
	at  int64
	c   *conn
	gen uint32
}

func newEngine(a *answers) (*engine, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	e := &engine{ep: ep, base: time.Now(), answers: a, hasNs: true}
	e.clear()
	// Timers as exact as they come; it is this thread's own setting.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	return e, nil
}

func (e *engine) close() {
	for _, c := range e.conns {
		if c != nil {
			e.drop(c)
		}
	}
	_ = unix.Close(e.ep)
}

func (e *engine) now() int64 { return int64(time.Since(e.base)) }

func (e *engine) clear() {
	h := e.count.latency
	if h == nil {
		h = hdrhistogram.New(1000, int64(time.Minute), 3) // ns
	}
	h.Reset()
	e.count = counts{latency: h}
}

func (e *engine) add(fd int, kind connKind, events uint32) (*conn, error) {
	c := &conn{fd: fd, kind: kind}
	c.p.request = kind == isStub
	ev := unix.EpollEvent{Events: events, Fd: int32(fd)}
	if err := unix.EpollCtl(e.ep, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("epoll: %w", err)
	}
	for fd >= len(e.conns) {
		e.conns = append(e.conns, nil)
	}
	e.conns[fd] = c
	return c, nil
}

// listen has the model server listen on n addresses of the loopback network.
func (e *engine) listen(n int) error {
	for len(e.listeners) < n {
		i := len(e.listeners)
		ip := netip.AddrFrom4([4]byte{127, 0, byte(1 + i/250), byte(1 + i%250)})
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("socket: %w", err)
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: ip.As4()}); err == nil {
			err = unix.Listen(fd, 4096)
		}
		if err != nil {
			_ = unix.Close(fd)
			return fmt.Errorf("listen on %s: %w", ip, err)
		}
		sa, err := unix.Getsockname(fd)
		if err != nil {
			_ = unix.Close(fd)
			return fmt.Errorf("listen on %s: %w", ip, err)
		}
		if _, err = e.add(fd, isListener, unix.EPOLLIN); err != nil {
			return err
		}
		e.listeners = append(e.listeners, fd)
		e.addrs = append(e.addrs, netip.AddrPortFrom(ip, uint16(sa.(*unix.SockaddrInet4).Port)))
	}
	return nil
}

// runFor runs for d.
func (e *engine) runFor(d time.Duration) {
	end := e.now() + int64(d)
	e.run(func(now int64) bool { return now >= end }, end)
}

// runWhile runs as long as f does, in a goroutine of its own.
func (e *engine) runWhile(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	var err error
	e.run(func(int64) bool {
		select {
		case err = <-done:
			return true
		default:
			return false
		}
	}, 0)
	return err
}

// run runs until stop says so, which is asked every 5 ms or oftener. It is asked at the instant end, if that isn't 0.
func (e *engine) run(stop func(now int64) bool, end int64) {
	for {
		now := e.now()
		if stop(now) {
			return
		}
		next := now + int64(5*time.Millisecond)
		if end != 0 {
			next = min(next, end)
		}
		next = min(next, e.fire(now))
		n := e.wait(time.Duration(next - e.now()))
		for i := range n {
			ev := &e.events[i]
			if c := e.conns[ev.Fd]; c != nil {
				e.handle(c, ev.Events)
			}
		}
	}
}

func (e *engine) wait(d time.Duration) int {
	d = max(d, 0)
	if e.hasNs {
		ts := unix.NsecToTimespec(int64(d))
		call := syscall.Syscall6
		if d == 0 {
			call = syscall.RawSyscall6 // it doesn't wait
		}
		n, _, errno := call(unix.SYS_EPOLL_PWAIT2, uintptr(e.ep), uintptr(unsafe.Pointer(&e.events[0])), uintptr(len(e.events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
		if errno == 0 {
			return int(n)
		}
		e.hasNs = errno != unix.ENOSYS
		return 0
	}
	n, err := unix.EpollWait(e.ep, e.events[:], int(d.Milliseconds()))
	if err != nil {
		return 0
	}
	return n
}

// fire does what is due and returns when the next thing will be.
func (e *engine) fire(now int64) (next int64) {
	next = now + int64(time.Hour)
	for e.pacedHead < len(e.paced) {
		d := e.paced[e.pacedHead]
		if d.at > now {
			next = d.at
			break
		}
		e.pacedHead++
		if d.c.gen == d.gen && d.c.stream > 0 {
			e.sendChunk(d.c, d.at)
		}
	}
	if e.pacedHead > 1<<16 && e.pacedHead*2 > len(e.paced) {
		e.paced = e.paced[:copy(e.paced, e.paced[e.pacedHead:])]
		e.pacedHead = 0
	}
	if l := e.load; l != nil {
		for e.started < l.conns {
			at := e.nextSend
			if at > now {
				next = min(next, at)
				break
			}
			e.nextSend += int64(l.ramp) / int64(l.conns)
			e.open(e.started, at)
			if e.started++; e.started == l.conns && l.rate > 0 {
				e.nextSend = now + int64(10*time.Millisecond) // connections are there before the first request is due
			}
		}
		if l.rate > 0 && e.started == l.conns {
			for e.nextSend <= now {
				e.arrive(e.nextSend)
				e.nextSend += int64(float64(time.Second) / l.rate)
			}
			next = min(next, e.nextSend)
		}
	}
	return next
}

// start begins a load.
func (e *engine) start(l *load) {
	e.load = l
	e.want = e.answers.payload(e.serving.chunks, l.stream)
	e.clients = make([]*conn, l.conns)
	e.streaming = make([]*conn, l.conns)
	e.free, e.waiting = e.free[:0], e.waiting[:0]
	e.started, e.nextSend = 0, e.now()
}

// stop ends the load and closes its connections.
func (e *engine) stop() {
	e.load = nil
	for _, c := range e.clients {
		if c != nil && !c.gone {
			e.drop(c)
		}
	}
	e.clients = nil
	e.paced, e.pacedHead = e.paced[:0], 0
}

// arrive sends a request that is due, or has it wait for a connection.
func (e *engine) arrive(at int64) {
	if n := len(e.free); n > 0 {
		c := e.free[0]
		e.free = e.free[:copy(e.free, e.free[1:])]
		e.send(c, at)
		return
	}
	e.count.late++
	if len(e.waiting) < 1<<20 {
		e.waiting = append(e.waiting, at)
	}
}

// open makes the connection of the client with this number, and sends its first request.
func (e *engine) open(number int, at int64) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		e.failed(nil, fmt.Errorf("socket: %w", err))
		return
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: e.load.addr.Addr().As4(), Port: int(e.load.addr.Port())})
	if err != nil && err != unix.EINPROGRESS {
		_ = unix.Close(fd)
		e.failed(nil, fmt.Errorf("connect: %w", err))
		return
	}
	c, err := e.add(fd, isClient, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
	if err != nil {
		e.failed(nil, err)
		return
	}
	c.number, c.due = number, at
	c.connecting = true
	e.clients[number] = c
}

// send sends the next request on c.
func (e *engine) send(c *conn, at int64) {
	c.due, c.busy, c.seen, c.lastNext = at, true, 0, 0
	e.sequence++
	e.write(c, e.load.template.stamp(c.number, e.sequence))
}

// failed counts an error and replaces the connection, after a while.
func (e *engine) failed(c *conn, err error) {
	e.count.errors++
	if e.count.firstError == nil {
		e.count.firstError = err
	}
	if c == nil {
		return
	}
	number, last := c.number, c == e.clients[c.number]
	e.drop(c)
	if e.load != nil && last && e.count.errors < 10000 {
		e.open(number, e.now())
	}
}

func (e *engine) drop(c *conn) {
	if c.gone {
		return
	}
	c.gone = true
	c.stream = 0
	c.gen++
	e.conns[c.fd] = nil
	_ = unix.Close(c.fd)
}

func (e *engine) handle(c *conn, events uint32) {
	if c.kind == isListener {
		e.accept(c)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		if c.connecting {
			e.connected(c)
		} else if len(c.writing) > 0 {
			b := c.writing
			c.writing = nil
			e.write(c, b)
		}
	}
	if !c.gone && events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR|unix.EPOLLRDHUP) != 0 {
		e.read(c)
	}
}

func (e *engine) connected(c *conn) {
	if n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || n != 0 {
		e.failed(c, fmt.Errorf("connect: %w", errors.Join(err, syscall.Errno(n))))
		return
	}
	c.connecting = false
	if e.load.rate > 0 {
		e.idle(c)
		return
	}
	e.send(c, c.due)
}

func (e *engine) accept(l *conn) {
	for range 64 {
		fd, _, err := unix.Accept4(l.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		_, _ = e.add(fd, isStub, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
	}
}

// write sends b, which must stay as it is until it has gone out, on an error nothing.
func (e *engine) write(c *conn, b []byte) {
	if len(c.writing) > 0 {
		c.writing = append(bytes.Clone(c.writing), b...)
		return
	}
	for len(b) > 0 {
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(c.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		switch errno {
		case 0:
			b = b[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			c.writing = b
			return
		default:
			if c.kind == isClient {
				e.failed(c, fmt.Errorf("write: %w", errno))
			} else {
				e.drop(c)
			}
			return
		}
	}
}

// read takes what is there.
func (e *engine) read(c *conn) {
	for !c.gone {
		n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(c.fd), uintptr(unsafe.Pointer(&e.buf[0])), uintptr(len(e.buf)))
		switch {
		case errno == syscall.EINTR:
			continue
		case errno == syscall.EAGAIN:
			return
		case errno != 0 || n == 0:
			if c.kind == isStub {
				e.drop(c)
				return
			}
			e.closed(c, errno)
			return
		}
		if c.kind == isStub {
			e.request(c, e.buf[:n])
		} else {
			e.answer(c, e.buf[:n])
		}
		if int(n) < len(e.buf) {
			return // epoll tells if there is more
		}
	}
}

// closed is told that a client's connection was closed by its peer.
func (e *engine) closed(c *conn, errno syscall.Errno) {
	switch {
	case c.busy:
		e.failed(c, fmt.Errorf("closed in the middle of an answer: %w", errno))
	case e.load == nil:
		e.drop(c)
	case e.load.once:
		e.failed(c, errors.New("an idle connection was closed"))
	default:
		number := c.number
		e.drop(c)
		e.open(number, e.now())
	}
}

// request takes bytes of requests.
func (e *engine) request(c *conn, b []byte) {
	for len(b) > 0 && !c.gone {
		n, done, err := c.p.feed(b)
		if err != nil {
			e.drop(c)
			return
		}
		b = b[n:]
		if done {
			e.serve(c)
		}
	}
}

func (e *engine) serve(c *conn) {
	a := e.answers
	switch line := c.p.first; {
	case bytes.HasPrefix(line, []byte("POST ")):
		if e.load != nil && e.load.stream && c.p.tag >= 0 && c.p.tag < len(e.streaming) {
			c.stream, c.client = e.serving.chunks, c.p.tag
			e.streaming[c.client] = c
			c.gen++
			e.sendChunk(c, e.now())
			return
		}
		e.write(c, a.plain)
	case bytes.HasPrefix(line, []byte("GET /metrics ")):
		e.write(c, a.metrics)
	case bytes.HasPrefix(line, []byte("GET /v1/models ")):
		e.write(c, a.models)
	case bytes.HasPrefix(line, []byte("GET /health ")):
		e.write(c, a.health)
	default:
		e.write(c, a.missing)
	}
}

// sendChunk sends the next chunk of c's stream, and has the one after it sent in time.
func (e *engine) sendChunk(c *conn, at int64) {
	b := e.answers.chunk
	switch c.stream--; {
	case c.stream == 0:
		b = e.answers.last
	case c.stream == e.serving.chunks-1:
		b = e.answers.first
	}
	e.write(c, b)
	if c.stream > 0 && e.serving.gap > 0 {
		e.paced = append(e.paced, due{at + int64(e.serving.gap), c, c.gen})
	}
}

// answer takes bytes of answers.
func (e *engine) answer(c *conn, b []byte) {
	for len(b) > 0 && !c.gone {
		n, done, err := c.p.feed(b)
		if err != nil {
			e.failed(c, err)
			return
		}
		b = b[n:]
		if e.load.stream {
			e.streamed(c, done)
		}
		if done {
			e.answered(c)
		}
	}
}

// streamed counts what has come of a stream. Where chunks follow each other without a gap, it has the next one sent.
func (e *engine) streamed(c *conn, done bool) {
	last := e.serving.chunks
	n := min(c.p.events, last)
	if done {
		n = last
	}
	if n > c.seen {
		e.count.chunks += n - c.seen
		c.seen = n
	}
	if done || e.serving.gap > 0 || c.seen == c.lastNext || c.seen >= last {
		return
	}
	c.lastNext = c.seen
	if s := e.streaming[c.number]; s != nil && s.stream > 0 && s.client == c.number {
		e.sendChunk(s, 0)
	}
}

var ok200 = []byte("HTTP/1.1 200")

// answered ends a request.
func (e *engine) answered(c *conn) {
	if !bytes.HasPrefix(c.p.first, ok200) {
		e.failed(c, fmt.Errorf("answer: %q; want status 200", c.p.first))
		return
	}
	if c.p.payload != e.want {
		e.failed(c, fmt.Errorf("an answer of %d bytes; want %d", c.p.payload, e.want))
		return
	}
	now := e.now()
	e.count.requests++
	_ = e.count.latency.RecordValue(now - c.due)
	c.busy = false
	switch {
	case e.load.once:
	case e.load.fresh || c.p.close:
		number := c.number
		e.drop(c)
		e.open(number, now)
	case e.load.rate > 0:
		e.idle(c)
	default:
		e.send(c, now)
	}
}

// idle has c take the next request that waits, or wait for one.
func (e *engine) idle(c *conn) {
	if len(e.waiting) > 0 {
		at := e.waiting[0]
		e.waiting = e.waiting[1:]
		e.send(c, at)
		return
	}
	e.free = append(e.free, c)
}
