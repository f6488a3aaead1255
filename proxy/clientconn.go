package proxy

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

// A clientConn is an accepted connection. It reads the socket itself, frames every
// message, and hands on request heads, one at a time, each whole and accepted by
// checkHead, without the fields that frame a body: the first to the HTTP server and the
// handler, the others to the handler alone. So the server's more lenient parser decides
// nothing: it doesn't get to see anything that could be read in two ways, or a byte of a
// body. Bodies are for the handler, who gets them from readBody; what it leaves is
// skipped before the next head.
//
// A refusal of the first head reaches the server as an error of its read, a *rejection,
// which its ErrorHandler answers before the connection is closed.
//
// Input is read into a pooled buffer, as large as the connection's last request was,
// that is given back whenever nothing is buffered: an idle connection has none. A body
// that came with its head is used where it lies.
//
// Read deadlines are clientConn's own: each phase (first head, idle, rest of a head,
// body) has its time, and the timer is only touched when it is due or has to come
// sooner. The same holds for writes, which may stall for a time but take as long as
// they need while they progress.
//
// All but Close and the watch belong to the goroutine that serves the connection.
type clientConn struct {
	net.Conn // the TCP connection, or TLS over it
	edge     *edge
	release  func() // gives back the place among the listener's connections; called once

	// Reading.
	phase     phase
	fail      *rejection // no byte from here on is good
	failSaid  bool       // the server has been given the one byte that makes it read a head
	served    bool       // at least one head was let through
	expect    bool       // the client waits for 100 Continue before it sends its body
	chunkLine chunkLine
	left      int64       // bytes left of the body, or of the chunk's data
	body      int64       // body bytes consumed of the current message
	before    int64       // of the message before it
	extra     int         // bytes of chunk extensions or trailers, or empty lines, of the current message
	size      int         // bytes of the current message's head; with body: how large a buffer the next will want
	looked    int         // bytes of the incomplete head in the buffer that have been looked at
	in        *bodyBuffer // input; nil: none is buffered
	lent      bool        // a requestBody uses part of in
	r, w      int         // in.b[r:w] is not yet consumed
	head      []byte      // what the server hasn't read yet of a checked head; part of in
	whole     []byte      // the checked head, until the handler has taken it; part of in
	sock      socket
	fd        int       // descriptor of a plain socket while serveMore's read holds it; else 0
	ended     time.Time // when the last request had been handled; zero: not known, or long ago
	since     time.Time // when the current phase began; zero until somebody had to wait in it
	readArmed time.Time // the deadline set on Conn; zero: none

	// Writing.
	writeArmed  time.Time
	writeForced bool // the deadline was set from outside

	unread atomic.Bool // the client may still be sending what nobody will read: linger before closing
	closed atomic.Bool

	watched watchState

	peer    []byte // the client's address and port
	peerLen int    // of the address in it
}

func newClientConn(c net.Conn, e *edge, release func()) *clientConn {
	cc := &clientConn{Conn: c, edge: e, release: release}
	cc.sock.init(cc)
	return cc
}

// learnPeer has ip and peerText know the client's address.
func (c *clientConn) learnPeer() {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		ap := a.AddrPort()
		var space [64]byte
		b := ap.Addr().Unmap().AppendTo(space[:0])
		c.peerLen = len(b)
		b = strconv.AppendUint(append(b, ':'), uint64(ap.Port()), 10)
		c.peer = append([]byte(nil), b...)
	}
}

// ip is the client's address in text, empty where there is none.
func (c *clientConn) ip() []byte { return c.peer[:c.peerLen] }

// peerText is the client's address and port.
func (c *clientConn) peerText() string { return text(c.peer) }

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
	// The server holds one while it parses a head.
	readBufferBytes = 40 << 10
	readBufferSlack = 64

	minInputClass = 4  // 4 KiB
	maxInputClass = 20 // 64 KiB: a larger body is read into a buffer of its own

	maxEmptyLines   = 4         // CR LFs before a request line (RFC 9112 2.2 asks for one at least)
	maxTrailerBytes = 8 << 10   //
	maxChunkDigits  = 15        //
	maxSkipBytes    = 256 << 10 // of a body that nobody wants; more, and the connection is closed

	lingerTotal  = 5 * time.Second
	lingerSilent = time.Second

	writeSliceBytes = 64 << 10 // one deadline each
)

var (
	crlf     = []byte("\r\n")
	crlfcrlf = []byte("\r\n\r\n")
	goOn     = []byte("HTTP/1.1 100 Continue\r\n\r\n")
)

// Read implements net.Conn for the HTTP server: it returns checked heads.
func (c *clientConn) Read(p []byte) (int, error) {
	for len(c.head) == 0 {
		if c.fail != nil {
			return c.refuse(p)
		}
		if err := c.nextHead(); err != nil {
			return 0, err
		}
	}
	n := copy(p, c.head)
	if c.head = c.head[n:]; len(c.head) == 0 {
		c.freeInput()
	}
	return n, nil
}

// nextHead sets c.head to the next request's head, or c.fail. An error is the end of
// the connection.
func (c *clientConn) nextHead() error {
	if c.lent {
		panic("BUG: the handler has not released the body")
	}
	c.whole = nil
	if c.phase != inHead {
		if err := c.skipBody(); err != nil {
			return err
		}
	}
	for !c.scanHead() {
		if err := c.fill(); err != nil {
			if err = c.endOfInput(err); err == errClientGone {
				return io.EOF
			} else if err != nil && c.fail == nil {
				return err
			}
			return nil
		}
	}
	return nil
}

// scanHead looks for a head in the buffer. It reports false if more has to be read, else it has set c.head or c.fail.
func (c *clientConn) scanHead() bool {
	b := c.buffered()
	for len(b) > 1 && b[0] == '\r' { // an empty line before the request line
		if c.extra++; b[1] != '\n' {
			c.refuseWith(errLineEnd)
			return true
		}
		if c.extra > maxEmptyLines {
			c.refuseWith(errLeadingLines)
			return true
		}
		c.r += 2
		c.looked = 0
		b = b[2:]
	}
	// A head that comes in many pieces is looked through once more when its end is there.
	if len(b) > 0 && b[0] != '\r' && (c.looked == 0 || bytes.Contains(b[max(0, c.looked-3):], crlfcrlf)) {
		var hi headInfo
		n, rej := checkHead(b, &c.edge.limits, &hi)
		if n > c.edge.headBytes {
			rej = errHeadTooLarge
		}
		if rej != nil {
			c.refuseWith(rej)
			return true
		}
		if n > 0 {
			c.head = hi.cut(b[:n])
			c.whole = c.head
			c.r += n
			c.size = n
			c.beginBody(&hi)
			return true
		}
	}
	if len(b) > 0 {
		if len(b) >= c.edge.headBytes {
			c.refuseWith(errHeadTooLarge)
			return true
		}
		if rej := checkPartialHead(b, c.looked); rej != nil {
			c.refuseWith(rej)
			return true
		}
		if c.looked == 0 && c.served { // the first head's time runs since accept
			c.since = time.Now()
		}
		c.looked = len(b)
	}
	return false
}

// takeHead copies the head of the request, of len(c.whole) bytes, to dst. It is not kept after that.
func (c *clientConn) takeHead(dst []byte) {
	copy(dst, c.whole)
	c.head, c.whole = nil, nil
	c.freeInput()
}

// cut takes out of head what the server is not to see and returns the rest, which
// begins where head does.
func (hi *headInfo) cut(head []byte) []byte {
	if hi.cuts == 0 {
		return head
	}
	w := hi.cutAt[0].from
	for i := range hi.cuts {
		next := len(head)
		if i+1 < hi.cuts {
			next = hi.cutAt[i+1].from
		}
		w += copy(head[w:], head[hi.cutAt[i].to:next])
	}
	return head[:w]
}

// checkPartialHead refuses a head before it is whole if b[from:] already shows that it
// can't be one, so that TLS on the plain port, or lines that end in LF, are answered at
// once and not after the head timeout.
func checkPartialHead(b []byte, from int) *rejection {
	if first := b[0]; first != '\r' && byteClass[first]&isToken == 0 {
		return errRequestLine
	}
	for i := max(from, 1); i < len(b); i++ {
		if cr := b[i-1] == '\r'; cr != (b[i] == '\n') || b[i] != '\r' && b[i] != '\n' && byteClass[b[i]]&isValue == 0 {
			return errLineEnd
		}
	}
	return nil
}

// beginBody sets the phase for what follows an accepted head.
func (c *clientConn) beginBody(hi *headInfo) {
	c.served = true
	c.before = c.body
	c.body, c.extra, c.looked, c.since = 0, 0, 0, time.Time{}
	switch {
	case hi.chunked:
		c.phase, c.chunkLine = inChunkLine, chunkLine{}
	case hi.contentLength > 0:
		c.phase, c.left = inBody, hi.contentLength
	default:
		return
	}
	c.expect = hi.expect && c.r == c.w // not if the body has begun already
	c.unread.Store(true)
}

func (c *clientConn) endMessage() {
	c.phase = inHead
	c.expect = false
	c.extra, c.since = 0, time.Time{}
	c.unread.Store(false)
}

// bodyLeft reports whether so much of the current request's body is unread that the
// connection will be closed after the answer rather than the rest skipped, so that the
// answer should say so.
func (c *clientConn) bodyLeft() bool {
	return c.phase != inHead && (c.expect || c.phase == inBody && c.left > maxSkipBytes)
}

// readBody reads the body of the current request into r, which must be empty; without
// a body r stays empty. b bounds what all bodies together hold. After a refusal r is
// empty and the connection must be closed after the answer.
func (c *clientConn) readBody(b *budget, r *requestBody) *rejection {
	c.whole = nil
	if c.phase == inHead {
		return nil
	}
	if c.expect {
		if _, err := c.send(goOn); err != nil {
			c.refuseWith(errClientGone)
			return errClientGone
		}
	}
	c.expect = false
	r.budget = b
	var rej *rejection
	switch {
	case c.phase != inBody:
		rej = c.readChunked(r)
	case c.left <= int64(c.w-c.r):
		// Fast path: the body came with its head and is used where it lies.
		rej = c.lendBody(r)
	default:
		rej = c.readLength(r)
	}
	if rej != nil {
		r.release()
	}
	c.freeInput()
	return rej
}

func (c *clientConn) lendBody(r *requestBody) *rejection {
	if !r.budget.acquire(c.left) {
		return errBudget
	}
	n := int(c.left)
	r.held, r.n, r.lender = c.left, n, c
	r.lent = c.in.b[c.r : c.r+n : c.r+n]
	c.lent = true
	c.r += n
	c.body = c.left
	c.endMessage()
	return nil
}

func (c *clientConn) readLength(r *requestBody) *rejection {
	declared := c.left
	if !r.grow(bodyClass(min(declared, max(firstBodyBytes, c.before))), declared) {
		return errBudget
	}
	r.n = copy(r.buf.b, c.buffered())
	c.r, c.w = 0, 0
	c.left -= int64(r.n)
	c.body = int64(r.n)
	for c.left > 0 {
		if r.n == len(r.buf.b) && !r.grow(min(r.buf.class+2*doubled, bodyClass(declared)), declared) {
			return errBudget
		}
		// No further than this body's end: what follows is another request.
		n, err := c.readRaw(r.buf.b[r.n:min(int64(len(r.buf.b)), declared)])
		if n == 0 {
			return c.endOfBody(err)
		}
		r.n += n
		c.left -= int64(n)
		c.body += int64(n)
	}
	c.endMessage()
	return nil
}

func (c *clientConn) readChunked(r *requestBody) *rejection {
	most := c.edge.bodyBytes
	if !r.grow(minInputClass, most) {
		return errBudget
	}
	for c.phase != inHead {
		if r.n == len(r.buf.b) && !r.grow(min(r.buf.class+2*doubled, bodyClass(most)), most) {
			return errBudget
		}
		space := r.buf.b[r.n:]
		n := 0
		if c.r == c.w && c.phase == inChunkData {
			var err error
			if n, err = c.readRaw(space[:min(c.left, int64(len(space)))]); n == 0 {
				return c.endOfBody(err)
			}
		} else if c.r == c.w {
			if err := c.fill(); err != nil {
				return c.endOfBody(err)
			}
			continue
		} else if c.phase == inChunkData {
			n = copy(space[:min(c.left, int64(len(space)))], c.buffered())
			c.r += n
		} else if rej := c.chunkByte(c.in.b[c.r]); rej != nil {
			c.refuseWith(rej)
			return rej
		} else {
			c.r++
			continue
		}
		r.n += n
		c.body += int64(n)
		c.endOfData(n)
	}
	return nil
}

// endOfData counts n bytes of a chunk's data.
func (c *clientConn) endOfData(n int) {
	if c.left -= int64(n); c.left == 0 {
		c.phase, c.chunkLine = inChunkEnd, chunkLine{}
	}
}

// endOfBody says what an error in the middle of a body means.
func (c *clientConn) endOfBody(err error) *rejection {
	_ = c.endOfInput(err)
	return c.fail
}

// skipBody reads the rest of a body that nobody wanted. An error means that the
// connection is to be closed: more of it would come than is worth reading, or the
// client is waiting for a word to send it.
func (c *clientConn) skipBody() error {
	if c.bodyLeft() {
		return io.EOF
	}
	for skipped := 0; c.phase != inHead; {
		if c.r == c.w {
			if skipped > maxSkipBytes || c.fill() != nil {
				return io.EOF
			}
		}
		switch c.phase {
		case inBody, inChunkData:
			n := int(min(c.left, int64(c.w-c.r)))
			c.r += n
			skipped += n
			c.body += int64(n)
			if c.phase == inChunkData {
				c.endOfData(n)
			} else if c.left -= int64(n); c.left == 0 {
				c.endMessage()
			}
		default:
			skipped++
			if c.chunkByte(c.in.b[c.r]) != nil {
				return io.EOF
			}
			c.r++
		}
	}
	return nil
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
// data, or of the trailer section (RFC 9112 7.1). Extensions and trailers are checked
// and dropped.
func (c *clientConn) chunkByte(x byte) *rejection {
	l := &c.chunkLine
	if l.cr != (x == '\n') {
		return errChunk // LF without CR, or CR without LF
	}
	switch c.phase {
	case inChunkEnd:
		switch x {
		case '\n':
			c.phase, *l = inChunkLine, chunkLine{}
		case '\r':
			l.cr = true
		default:
			return errChunk
		}

	case inChunkLine:
		switch {
		case x == '\n':
			c.left = l.size
			if l.size == 0 {
				c.phase, c.extra = inTrailer, 0
			} else {
				c.phase = inChunkData
			}
			*l = chunkLine{}
		case x == '\r' && l.digits > 0:
			l.cr = true
		case l.ext:
			if c.extra++; c.extra > c.edge.extensionBytes {
				return errChunkExtension
			}
			if byteClass[x]&isValue == 0 {
				return errChunk
			}
		case x == ';' && l.digits > 0:
			l.ext = true
		case byteClass[x]&isHexDig != 0 && l.digits < maxChunkDigits:
			l.digits++
			l.size = l.size<<4 | int64(unhex(x))
			if c.body+l.size > c.edge.bodyBytes {
				return c.edge.limits.tooLarge
			}
		default:
			return errChunk
		}

	default: // inTrailer
		if c.extra++; c.extra > maxTrailerBytes {
			return errTrailerTooLong
		}
		switch {
		case x == '\n' && !l.name: // the empty line: the end of the message
			*l = chunkLine{}
			c.endMessage()
		case x == '\n' && !l.colon:
			return errTrailer
		case x == '\n':
			*l = chunkLine{}
		case x == '\r':
			l.cr = true
		case l.colon:
			if byteClass[x]&isValue == 0 {
				return errTrailer
			}
		case x == ':' && l.name:
			l.colon = true
		case byteClass[x]&isToken != 0:
			l.name = true
		default:
			return errTrailer
		}
	}
	return nil
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

// refuse tells the server of the refusal. It expects a head, and must get a first byte
// before the error, or it takes the connection for an idle one and closes it without an
// answer.
func (c *clientConn) refuse(p []byte) (int, error) {
	if !c.failSaid && !c.fail.quiet && c.phase == inHead && len(p) > 0 {
		c.failSaid = true
		p[0] = 'G'
		return 1, nil
	}
	return 0, c.fail
}

// endOfInput turns an error of the connection into what is to be made of it: io.EOF
// between messages, where the connection is closed without an answer, or else c.fail.
func (c *clientConn) endOfInput(err error) error {
	timeout := errors.Is(err, os.ErrDeadlineExceeded)
	switch {
	case c.phase == inHead && c.r == c.w:
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
	if !timeout {
		c.unread.Store(false) // nothing more can come
	}
	return c.fail
}

// buffered returns the input that has been read and not consumed.
func (c *clientConn) buffered() []byte {
	if c.in == nil {
		return nil
	}
	return c.in.b[c.r:c.w]
}

// freeInput gives the input buffer back if all of it is consumed, the server has read
// the head in it and no body is used in it.
func (c *clientConn) freeInput() {
	if c.r == c.w && len(c.head) == 0 && len(c.whole) == 0 && c.in != nil && !c.lent {
		putBodyBuffer(c.in)
		c.in, c.r, c.w = nil, 0, 0
	}
}

// inputClass is the size of buffer that would have held the last request, head and
// body, or the usual one if that is more than a buffer should hold.
func (c *clientConn) inputClass() int {
	if n := int64(c.size) + c.body; n <= int64(classBytes(maxInputClass)) {
		return max(minInputClass, bodyClass(n))
	}
	return minInputClass
}

// fill reads more input into the buffer, behind what is there. The server has no head
// left to read.
func (c *clientConn) fill() error {
	n, err := c.readRaw(c.room())
	if n == 0 {
		return err
	}
	c.w += n
	return nil
}

// room returns where more input goes; nil: into a buffer that readRaw gets when there is something to read.
func (c *clientConn) room() []byte {
	if c.r == c.w {
		c.freeInput()
	} else if c.w == len(c.in.b) {
		in := c.in
		if c.r == 0 {
			in = getBodyBuffer(in.class + doubled)
		}
		c.w = copy(in.b, c.buffered())
		c.r = 0
		if in != c.in {
			putBodyBuffer(c.in)
			c.in = in
		}
	}
	if c.in == nil {
		return nil
	}
	return c.in.b[c.w:]
}

// readRaw reads from the connection within the time that the phase leaves. It returns
// an error only if nothing was read.
func (c *clientConn) readRaw(p []byte) (int, error) {
	now := time.Now()
	for {
		if err := c.armRead(now); err != nil {
			return 0, err
		}
		n, err := c.sock.read(p)
		if n > 0 {
			return n, nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, err
		}
		if now = time.Now(); c.overdue(now) {
			return 0, err
		}
	}
}

// armRead sets the read deadline of the phase. One that is armed already may come too soon: then it is set anew when it
// fires, which spares a timer operation or two in every request.
func (c *clientConn) armRead(now time.Time) error {
	until := c.readUntil(now)
	if !c.readArmed.IsZero() && !c.readArmed.After(until) {
		return nil
	}
	c.readArmed = until
	return c.Conn.SetReadDeadline(until)
}

// overdue takes in that the read deadline has passed, and reports whether waiting ends.
func (c *clientConn) overdue(now time.Time) bool {
	if !now.Before(c.readUntil(now)) || c.phase == inHead && c.r == c.w && c.waitsNoMore() {
		return true
	}
	c.readArmed = time.Time{}
	return false
}

// readUntil returns when waiting for input in the current phase ends.
func (c *clientConn) readUntil(now time.Time) time.Time {
	if c.since.IsZero() {
		c.since = now
	}
	switch {
	case c.phase != inHead:
		return c.since.Add(c.edge.bodyTimeout + time.Duration(c.body/c.edge.bodyRate)*time.Second)
	case c.r == c.w && c.served:
		return c.since.Add(c.edge.idleTimeout)
	default:
		return c.since.Add(c.edge.headTimeout)
	}
}

// Write implements net.Conn, for the HTTP server, which answers what never got to the handler.
func (c *clientConn) Write(p []byte) (n int, err error) { return c.send(p) }

// send writes p to the client. It fails when the client takes nothing for writeStall to twice that.
func (c *clientConn) send(p []byte) (n int, err error) {
	if c.fd > 0 && !c.writeForced { // Fast path: what the socket takes at once needs no deadline.
		if n = c.sock.tryWrite(c.fd, p); n == len(p) {
			return n, nil
		}
		p = p[n:]
	}
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
	c.watched.forget(c.edge.watch)
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
	buf := getBodyBuffer(minInputClass)
	defer putBodyBuffer(buf)
	now := time.Now()
	for end := now.Add(lingerTotal); now.Before(end); now = time.Now() {
		until := now.Add(lingerSilent)
		if until.After(end) {
			until = end
		}
		if c.Conn.SetReadDeadline(until) != nil {
			return
		}
		if _, err := c.Conn.Read(buf.b); err != nil {
			return
		}
	}
}

// asClientConn returns the clientConn under c, nil if c isn't from our listener.
func asClientConn(c net.Conn) *clientConn {
	cc, _ := c.(*clientConn)
	return cc
}
