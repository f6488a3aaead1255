package proxy

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// A clientConn is an accepted connection as the HTTP server reads it. It stands
// below the server's own buffer, so every byte of every request passes through it in
// order, and it lets pass only bytes that it has framed and checked itself: whole
// request heads that checkHead accepts, Content-Length bodies counted to the byte,
// chunked bodies with their framing checked, limited and freed of extensions and
// trailers. What the server's more lenient parser would make of anything else never
// comes up, since it doesn't get to see it.
//
// Checking is done in place, in the buffer the server reads into: no copy, no second
// buffer, no allocation. Only a head that arrives in pieces is collected in a buffer
// of its own until it is whole.
//
// A refusal reaches the server as an error of its read, a *rejection, which its
// ErrorHandler answers before the connection is closed.
//
// Read deadlines are clientConn's own: each phase (first head, idle, rest of a head,
// body) has its time, and the timer is only touched when it is due or has to come
// sooner. The same holds for writes, which may stall for a time but take as long as
// they need while they progress.
//
// Read, Write and the fields used by them belong to the goroutine that serves the
// connection. Close and the watch may be used from any.
type clientConn struct {
	net.Conn // the TCP connection, or TLS over it
	edge     *edge
	release  func() // gives back the place among the listener's connections; called once

	// Reading.
	phase     phase
	fail      *rejection // no byte from here on is good
	failSaid  bool       // the server has been given the one byte that makes it read a head
	served    bool       // at least one head was let through
	left      int64      // bytes left of the body, or of the chunk's data
	body      int64      // body bytes let through of the current message
	extra     int        // bytes of chunk extensions, trailers or empty lines dropped from the current message
	chunkLine chunkLine
	held      *heldInput // nil: input is read straight into the server's buffer
	since     time.Time  // when the current phase began; zero until somebody had to wait in it
	readArmed time.Time  // the deadline set on Conn; zero: none

	// Writing.
	discard     int // answers of the server that are not to be sent, since handlers have sent their own
	discardSeen int // bytes of the CR LF CR LF at the end of the next one that have been seen
	writeArmed  time.Time
	writeForced bool // the deadline was set from outside

	unread atomic.Bool // the client may still be sending what nobody will read: linger before closing
	closed atomic.Bool

	watched watchState
}

// phase says what the next byte of a connection belongs to.
type phase uint8

const (
	inHead phase = iota
	inBody
	inChunkLine
	inChunkData
	inChunkEnd // the CR LF after a chunk's data
	inTrailer
)

const (
	// readBufferBytes is the server's read buffer, which a request head must fit.
	// It is a size class of Go's allocator.
	readBufferBytes = 40 << 10
	readBufferSlack = 64

	maxEmptyLines     = 4        // CR LFs before a request line (RFC 9112 2.2 asks for one at least)
	maxExtensionBytes = 16 << 10 // chunk extensions of one body together
	maxTrailerBytes   = 8 << 10
	maxChunkDigits    = 15

	lingerTotal  = 5 * time.Second
	lingerSilent = time.Second

	writeSliceBytes = 64 << 10 // one deadline each
)

var (
	crlf     = []byte("\r\n")
	crlfcrlf = []byte("\r\n\r\n")
)

// heldInput collects a head that came in pieces, with what came behind it.
// b[off:ok] may be handed on; b[ok:] is not yet a whole head.
type heldInput struct {
	b       []byte
	off, ok int
}

var heldPool = sync.Pool{New: func() any { return &heldInput{b: make([]byte, 0, 4<<10)} }}

// Read implements net.Conn: it returns checked bytes only.
func (c *clientConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if c.held != nil {
			if n, err := c.readHeld(p); n > 0 || err != nil {
				return n, err
			}
			continue
		}
		if c.fail != nil {
			return c.refuse(p)
		}
		// Fast path: a whole head, or a piece of a body, straight into the server's buffer.
		n, err := c.readRaw(p)
		if n > 0 {
			ok, rest := c.check(p[:n])
			if rest < n {
				c.hold(p[rest:n])
			}
			if ok > 0 {
				return ok, nil
			}
			continue
		}
		if err != nil {
			return 0, c.endOfInput(err)
		}
	}
}

// readHeld hands on what is held, or reads more of a head that isn't whole. It
// returns 0, nil if the caller should look again.
func (c *clientConn) readHeld(p []byte) (int, error) {
	h := c.held
	if h.off < h.ok {
		n := copy(p, h.b[h.off:h.ok])
		h.off += n
		if h.off == len(h.b) {
			c.dropHeld()
		}
		return n, nil
	}
	if c.fail != nil {
		c.dropHeld()
		return 0, nil
	}
	h.b = h.b[:copy(h.b, h.b[h.ok:])]
	h.off, h.ok = 0, 0
	if len(h.b) > c.edge.headBytes {
		c.refuseWith(errHeadTooLarge)
		return 0, nil
	}
	if len(h.b) == cap(h.b) {
		h.b = append(h.b, make([]byte, len(h.b))...)[:len(h.b)]
	}
	n, err := c.readRaw(h.b[len(h.b):cap(h.b)])
	if n == 0 && err != nil {
		return 0, c.endOfInput(err)
	}
	was := len(h.b)
	h.b = h.b[:was+n]
	if bytes.Contains(h.b[max(0, was-3):], crlfcrlf) || bytes.HasPrefix(h.b, crlf) {
		ok, rest := c.check(h.b)
		h.b = h.b[:ok+copy(h.b[ok:], h.b[rest:])]
		h.ok = ok
		was = ok
	}
	if h.ok < len(h.b) && c.fail == nil {
		c.checkPartialHead(h.b[h.ok:], was-h.ok)
	}
	if len(h.b) == 0 {
		c.dropHeld()
	}
	return 0, nil
}

// hold keeps b, the beginning of a head, until the rest of it has come.
func (c *clientConn) hold(b []byte) {
	h := heldPool.Get().(*heldInput)
	h.b = append(h.b[:0], b...)
	h.off, h.ok = 0, 0
	c.held = h
	if c.served { // the first head's time runs since accept
		c.since = time.Now()
	}
	c.checkPartialHead(b, 0)
}

func (c *clientConn) dropHeld() {
	if cap(c.held.b) <= 64<<10 {
		heldPool.Put(c.held)
	}
	c.held = nil
}

// checkPartialHead refuses a head before it is whole if b[from:] already shows that
// it can't be one: so TLS on the plain port, or lines that end in LF, are answered at
// once and not after the head timeout.
func (c *clientConn) checkPartialHead(b []byte, from int) {
	if len(b) == 0 {
		return
	}
	if first := b[0]; first != '\r' && byteClass[first]&isToken == 0 {
		c.refuseWith(errRequestLine)
		return
	}
	for i := max(from, 1); i < len(b); i++ {
		switch cr := b[i-1] == '\r'; {
		case cr != (b[i] == '\n'):
			c.refuseWith(errLineEnd)
			return
		case b[i] != '\r' && b[i] != '\n' && byteClass[b[i]]&isValue == 0:
			c.refuseWith(errLineEnd)
			return
		}
	}
}

// check frames and checks b, which continues the connection's input. It returns how
// many bytes at the front of b may be handed on (what is dropped is closed up), and
// where in b an incomplete head begins, len(b) if none does. After a refusal nothing
// of what follows is handed on.
func (c *clientConn) check(b []byte) (ok, rest int) {
	r, w := 0, 0
	// keep moves b[r:to] to the end of what may be handed on.
	keep := func(to int) {
		if w == r {
			w = to
		} else {
			w += copy(b[w:], b[r:to])
		}
		r = to
	}
	for r < len(b) && c.fail == nil {
		switch c.phase {
		case inHead:
			if b[r] == '\r' { // an empty line before the request line
				if r+1 == len(b) {
					return w, r
				}
				if c.extra++; b[r+1] != '\n' {
					c.refuseWith(errLineEnd)
				} else if c.extra > maxEmptyLines {
					c.refuseWith(errLeadingLines)
				}
				r += 2
				continue
			}
			var hi headInfo
			n, rej := checkHead(b[r:], &c.edge.limits, &hi)
			switch {
			case n > c.edge.headBytes:
				rej = errHeadTooLarge
			case n == 0 && rej == nil:
				return w, r
			}
			if rej != nil {
				c.refuseWith(rej)
				continue
			}
			end := r + n
			if hi.cutTo > 0 {
				from, to := r+hi.cutFrom, r+hi.cutTo
				keep(from)
				r = to
			}
			keep(end)
			c.beginBody(&hi)
		case inBody, inChunkData:
			n := int(min(c.left, int64(len(b)-r)))
			keep(r + n)
			if c.body += int64(n); c.body > c.edge.bodyBytes {
				c.refuseWith(errBodyTooLarge)
				continue
			}
			if c.left -= int64(n); c.left == 0 {
				if c.phase == inBody {
					c.endMessage()
				} else {
					c.phase, c.chunkLine = inChunkEnd, chunkLine{}
				}
			}
		default:
			// Slow path: chunk framing, a byte at a time.
			pass, rej := c.chunkByte(b[r])
			if rej != nil {
				c.refuseWith(rej)
				continue
			}
			if pass {
				keep(r + 1)
			} else {
				r++
			}
		}
	}
	return w, len(b)
}

// beginBody sets the phase for what follows an accepted head.
func (c *clientConn) beginBody(hi *headInfo) {
	c.served = true
	c.body, c.extra, c.since = 0, 0, time.Time{}
	switch {
	case hi.chunked:
		c.phase, c.chunkLine = inChunkLine, chunkLine{}
		c.unread.Store(true)
	case hi.contentLength > 0:
		c.phase, c.left = inBody, hi.contentLength
		c.unread.Store(true)
	}
}

func (c *clientConn) endMessage() {
	c.phase = inHead
	c.extra, c.since = 0, time.Time{}
	c.unread.Store(false)
}

// chunkLine is the state within a line of chunk framing.
type chunkLine struct {
	size   int64
	digits uint8
	ext    bool // in the extensions, which are dropped
	cr     bool // a CR was seen; LF must follow
	name   bool // in a trailer line: a name byte was seen
	colon  bool // in a trailer line: the colon was seen
}

// chunkByte takes the next byte of a chunk-size line, of the CR LF after a chunk's
// data, or of the trailer section (RFC 9112 7.1). pass says whether the server is to
// see it: extensions and trailer fields are dropped.
func (c *clientConn) chunkByte(x byte) (pass bool, rej *rejection) {
	l := &c.chunkLine
	if l.cr != (x == '\n') {
		return false, errChunk // LF without CR, or CR without LF
	}
	switch c.phase {
	case inChunkEnd:
		if x == '\n' {
			c.phase, *l = inChunkLine, chunkLine{}
			return true, nil
		}
		l.cr = true
		if x != '\r' {
			return false, errChunk
		}
		return true, nil

	case inChunkLine:
		switch {
		case x == '\n':
			c.left = l.size
			if l.size == 0 {
				c.phase = inTrailer
				c.extra = 0
			} else {
				c.phase = inChunkData
			}
			*l = chunkLine{}
			return true, nil
		case x == '\r' && l.digits > 0:
			l.cr = true
			return true, nil
		case l.ext:
			if c.extra++; c.extra > maxExtensionBytes {
				return false, errChunkExtension
			}
			if byteClass[x]&isValue == 0 {
				return false, errChunk
			}
			return false, nil
		case x == ';' && l.digits > 0:
			l.ext = true
			return false, nil
		case byteClass[x]&isHexDig != 0 && l.digits < maxChunkDigits:
			l.digits++
			l.size = l.size<<4 | int64(unhex(x))
			if c.body+l.size > c.edge.bodyBytes {
				return false, errBodyTooLarge
			}
			return true, nil
		}
		return false, errChunk

	default: // inTrailer
		if x == '\n' {
			if !l.name { // the empty line: the end of the message
				*l = chunkLine{}
				c.endMessage()
				return true, nil
			}
			if !l.colon {
				return false, errTrailer
			}
			*l = chunkLine{}
			return false, nil
		}
		if c.extra++; c.extra > maxTrailerBytes {
			return false, errTrailerTooLong
		}
		switch {
		case x == '\r':
			l.cr = true
			return !l.name, nil
		case l.colon:
			if byteClass[x]&isValue == 0 {
				return false, errTrailer
			}
		case x == ':' && l.name:
			l.colon = true
		case byteClass[x]&isToken != 0:
			l.name = true
		default:
			return false, errTrailer
		}
		return false, nil
	}
}

func unhex(x byte) byte {
	switch {
	case x <= '9':
		return x - '0'
	case x <= 'F':
		return x - 'A' + 10
	}
	return x - 'a' + 10
}

// refuseWith lets no further byte of the connection through.
func (c *clientConn) refuseWith(rej *rejection) {
	c.fail = rej
	c.unread.Store(true)
}

// refuse tells the server of the refusal. Where the server expects a head it must
// get a first byte before the error, or it takes the connection for an idle one and
// closes it without an answer.
func (c *clientConn) refuse(p []byte) (int, error) {
	if c.phase == inHead && !c.failSaid {
		c.failSaid = true
		p[0] = 'G'
		return 1, nil
	}
	return 0, c.fail
}

// endOfInput turns an error of the connection into what the server is to make of it:
// io.EOF closes without an answer, a *rejection is answered first.
func (c *clientConn) endOfInput(err error) error {
	timeout := errors.Is(err, os.ErrDeadlineExceeded)
	half := c.held != nil || c.phase != inHead // in the middle of a message
	switch {
	case !half:
		return io.EOF
	case timeout && c.phase == inHead:
		c.refuseWith(errHeadTimeout)
	case timeout:
		c.refuseWith(errBodyTimeout)
	case err != io.EOF: // reset: nobody is left to answer
		c.refuseWith(errClientGone)
	case c.phase == inHead:
		c.refuseWith(errHeadCut)
	default:
		c.refuseWith(errBodyCut)
	}
	if c.held != nil {
		c.dropHeld()
	}
	if !timeout {
		c.unread.Store(false) // nothing more can come
	}
	if c.phase == inHead {
		return nil // the next turn of Read says it
	}
	return c.fail
}

// readRaw reads from the connection within the time that the phase leaves.
func (c *clientConn) readRaw(p []byte) (int, error) {
	now := time.Now()
	for {
		until := c.readUntil(now)
		// The deadline that is armed may come too soon: then it is set anew when it
		// fires. That spares a timer operation or two in every request.
		if c.readArmed.IsZero() || c.readArmed.After(until) {
			if err := c.Conn.SetReadDeadline(until); err != nil {
				return 0, err
			}
			c.readArmed = until
		}
		n, err := c.Conn.Read(p)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		now = time.Now()
		if !now.Before(c.readUntil(now)) {
			return 0, err
		}
		c.readArmed = time.Time{}
	}
}

// readUntil returns when waiting for input in the current phase ends.
func (c *clientConn) readUntil(now time.Time) time.Time {
	if c.since.IsZero() {
		c.since = now
	}
	switch {
	case c.phase != inHead:
		return c.since.Add(c.edge.bodyTimeout + time.Duration(c.body/c.edge.bodyRate)*time.Second)
	case c.held == nil && c.served:
		return c.since.Add(c.edge.idleTimeout)
	default:
		return c.since.Add(c.edge.headTimeout)
	}
}

// Write implements net.Conn. It is for the HTTP server, which answers what never got to the handler. The handler sends
// its own answers; the empty ones that the server makes for it, which have a head and no body, end here.
func (c *clientConn) Write(p []byte) (n int, err error) {
	for c.discard > 0 && n < len(p) {
		if p[n] == crlfcrlf[c.discardSeen] {
			c.discardSeen++
		} else if c.discardSeen = 0; p[n] == '\r' {
			c.discardSeen = 1
		}
		if n++; c.discardSeen == len(crlfcrlf) {
			c.discard--
			c.discardSeen = 0
		}
	}
	m, err := c.send(p[n:])
	return n + m, err
}

// send writes p to the client. It fails when the client takes nothing for writeStall to twice that.
func (c *clientConn) send(p []byte) (n int, err error) {
	for len(p) > 0 {
		if err := c.armWrite(); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(p[:min(len(p), writeSliceBytes)])
		n += m
		if p = p[m:]; err != nil {
			return n, err
		}
	}
	return n, nil
}

// sendBuffers writes bufs, which hold no more than is sent under one deadline, in one system call.
func (c *clientConn) sendBuffers(bufs *net.Buffers) error {
	if err := c.armWrite(); err != nil {
		return err
	}
	_, err := bufs.WriteTo(c.Conn)
	return err
}

// armWrite sets the write deadline for twice the stall time and renews it when less than once is left: most writes
// touch no timer.
func (c *clientConn) armWrite() error {
	if c.writeForced {
		return nil
	}
	now := time.Now()
	if !c.writeArmed.Before(now.Add(c.edge.writeStall)) {
		return nil
	}
	c.writeArmed = now.Add(2 * c.edge.writeStall)
	return c.Conn.SetWriteDeadline(c.writeArmed)
}

// resetOnClose has the connection reset when it is closed, where nothing else could tell the client that its answer was
// cut off.
func (c *clientConn) resetOnClose() {
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		_ = tc.SetLinger(0)
	}
}

// SetReadDeadline does nothing: reading has its own deadlines.
func (c *clientConn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline sets a deadline in place of the stall time; the zero time brings
// that back.
func (c *clientConn) SetWriteDeadline(t time.Time) error {
	c.writeForced, c.writeArmed = !t.IsZero(), t
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline sets the write deadline.
func (c *clientConn) SetDeadline(t time.Time) error { return c.SetWriteDeadline(t) }

// https reports whether the client speaks TLS.
func (c *clientConn) https() bool {
	_, ok := c.Conn.(*tls.Conn)
	return ok
}

// NetConn returns the connection below, which is TCP or TLS.
func (c *clientConn) NetConn() net.Conn { return c.Conn }

// Close implements net.Conn. If the client may still be sending a request that has
// been answered, it reads and drops that for a while first: closing at once would
// reset the connection and could take the answer away from the client
// (RFC 9112 9.6).
func (c *clientConn) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	c.watched.forget(c)
	if c.unread.Load() {
		c.linger()
	}
	err := c.Conn.Close()
	c.release()
	return err
}

func (c *clientConn) linger() {
	cw, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || cw.CloseWrite() != nil {
		return
	}
	h := heldPool.Get().(*heldInput)
	defer heldPool.Put(h)
	now := time.Now()
	for end := now.Add(lingerTotal); now.Before(end); now = time.Now() {
		until := now.Add(lingerSilent)
		if until.After(end) {
			until = end
		}
		if c.Conn.SetReadDeadline(until) != nil {
			return
		}
		if _, err := c.Conn.Read(h.b[:cap(h.b)]); err != nil {
			return
		}
	}
}

// asClientConn returns the clientConn under c, nil if c isn't from our listener.
func asClientConn(c net.Conn) *clientConn {
	cc, _ := c.(*clientConn)
	return cc
}
