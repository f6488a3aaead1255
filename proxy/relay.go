package proxy

import (
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"
)

// A writer collects bytes that are going to the client or the endpoint, so that each goes out in as few writes as it
// can. It is on loan from a pool and given back whenever a stream is silent.
type writer struct{ b []byte }

var writerPool = sync.Pool{New: func() any { return &writer{make([]byte, 0, minBufferBytes)} }}

// writer returns the exchange's writer.
func (x *exchange) writer() *writer {
	if x.out == nil {
		x.out = writerPool.Get().(*writer)
	}
	return x.out
}

// dropWriter gives the writer back with what is in it.
func (x *exchange) dropWriter() {
	if x.out == nil {
		return
	}
	if cap(x.out.b) <= maxBufferBytes {
		x.out.b = x.out.b[:0]
		writerPool.Put(x.out)
	}
	x.out = nil
}

// A chunkState is what the next byte of a chunked body belongs to (RFC 9112 7.1).
type chunkState uint8

const (
	chunkSize chunkState = iota
	chunkExt
	chunkSizeLF
	chunkBody
	chunkBodyCR
	chunkBodyLF
	chunkTrailer      // at the beginning of a trailer line
	chunkTrailerField // within one
	chunkTrailerLF
	chunkLastLF
)

const (
	// maxSizeDigits keeps a chunk's size within an int64.
	maxSizeDigits = 15
	// maxChunkOverheadBytes bounds chunk extensions and trailers of one chunk.
	maxChunkOverheadBytes = 8 << 10
)

var errBadChunk = errors.New("malformed chunk")

// A bodyReader takes the payload of a response out of the bytes that carry it.
type bodyReader struct {
	framing  framing
	done     bool
	state    chunkState
	digits   uint8
	overhead int
	left     int64 // bytes left of the body, or of the chunk
}

func newBodyReader(r *response) bodyReader {
	return bodyReader{framing: r.framing, done: r.framing == noBody, left: r.length}
}

// next returns the first run of payload in in, which may be empty, and how many bytes of in it has used, which is at
// least one. It neither copies nor allocates.
func (b *bodyReader) next(in []byte) (data []byte, used int, err error) {
	switch b.framing {
	case byClose:
		return in, len(in), nil
	case byLength:
		n := int(min(b.left, int64(len(in))))
		b.left -= int64(n)
		b.done = b.left == 0
		return in[:n], n, nil
	}
	i := 0
	for i < len(in) && !b.done {
		if b.state == chunkBody {
			n := int(min(b.left, int64(len(in)-i)))
			b.left -= int64(n)
			if b.left == 0 {
				b.state = chunkBodyCR
			}
			// The line end behind the data is usually there already, and saves a turn.
			used = i + n
			if b.state == chunkBodyCR && len(in)-used >= 2 && in[used] == '\r' && in[used+1] == '\n' {
				b.beginChunk()
				return in[i : i+n], used + 2, nil
			}
			return in[i : i+n], used, nil
		}
		if !b.frame(in[i]) {
			return nil, i, errBadChunk
		}
		i++
	}
	return nil, i, nil
}

func (b *bodyReader) beginChunk() {
	b.state, b.digits, b.overhead, b.left = chunkSize, 0, 0, 0
}

// frame takes one byte of chunk framing and reports whether it may stand there.
func (b *bodyReader) frame(c byte) bool {
	switch b.state {
	case chunkSize:
		switch {
		case byteClass[c]&isHexDig != 0 && b.digits < maxSizeDigits:
			b.digits++
			b.left = b.left<<4 | int64(unhex(c))
		case b.digits == 0:
			return false
		case c == '\r':
			b.state = chunkSizeLF
		case c == ';', c == ' ', c == '\t':
			b.state = chunkExt
		default:
			return false
		}
	case chunkExt:
		if b.overhead++; b.overhead > maxChunkOverheadBytes {
			return false
		}
		if c == '\r' {
			b.state = chunkSizeLF
		} else if byteClass[c]&isValue == 0 {
			return false
		}
	case chunkSizeLF:
		if c != '\n' {
			return false
		}
		if b.state = chunkBody; b.left == 0 {
			b.state = chunkTrailer
		}
	case chunkBodyCR:
		if c != '\r' {
			return false
		}
		b.state = chunkBodyLF
	case chunkBodyLF:
		if c != '\n' {
			return false
		}
		b.beginChunk()
	case chunkTrailer, chunkTrailerField:
		// Trailer fields are dropped.
		if b.overhead++; b.overhead > maxChunkOverheadBytes {
			return false
		}
		switch {
		case c == '\r' && b.state == chunkTrailer:
			b.state = chunkLastLF
		case c == '\r':
			b.state = chunkTrailerLF
		case byteClass[c]&isValue == 0:
			return false
		default:
			b.state = chunkTrailerField
		}
	case chunkTrailerLF:
		if c != '\n' {
			return false
		}
		b.state = chunkTrailer
	case chunkLastLF:
		if c != '\n' {
			return false
		}
		b.done = true
	}
	return true
}

const (
	// directBytes is the size from which payload is written from where it was read, by writev, and not copied first.
	directBytes = 8 << 10
	// flushBytes is how much is collected at most.
	flushBytes = 32 << 10
	// heldBytes is how much of an answer is held back at most before it is known to be no error to move on from.
	heldBytes = 16 << 10
)

// relaying is how far the relay of an answer is.
type relaying struct {
	body  bodyReader
	ep    *endpoint
	until time.Time // when waiting for more ends
	hold  bool      // what has come is held back
	ended bool      // body is done, f says why not, or err does
	f     *failure
	err   error // of reading
}

// relay sends the answer, whose head has been read, to the client as its bytes come. See [exchange.relayEnded] for its end.
func (x *exchange) relay(ep *endpoint, firstToken time.Time) *failure {
	r := &x.relaying
	*r = relaying{body: newBodyReader(&x.resp), ep: ep, until: earlier(firstToken, x.deadline)}
	x.startScan()
	x.startRewrite()
	framing := x.resp.framing
	if x.rewriter != nil && framing == byLength {
		framing = byClose // of another length, which nobody knows yet
	}
	x.beginAnswer(framing, x.resp.length)
	if part := x.part; part != nil { // Slow path: a long refusal
		r.body, x.part = x.partBody, nil
		if x.bytesOut += int64(len(part)); len(part) > 0 {
			x.scan(part)
			if f := x.pass(part, false); f != nil {
				return f
			}
		}
	}
	// Fast path: the head goes out with the first bytes of the body, so that a failure before them is still an answer
	// of our own, and a small answer is one write.
	r.hold = x.holdsFirstEvent()
	x.relayBody()
	switch {
	case r.f != nil:
		return r.f
	case r.err != nil && (r.body.framing != byClose || !errors.Is(r.err, io.EOF) || x.lease.cancelled() != notCancelled):
		return x.cut(x.brokenOff(r.err))
	} // RFC 9112 6.3(8): nothing tells an end by closing from a clean one
	if x.rewriter != nil {
		if f := x.endRewrite(); f != nil {
			return f
		}
	}
	x.endScan()
	// The endpoint has done its part: whoever is chosen next should see that, even if this client takes its time.
	x.giveBack(ep, true)
	x.release()
	if x.chunkedOut {
		x.writer().b = append(x.out.b, "0\r\n\r\n"...)
	}
	return x.flushBody()
}

// relayBody relays the body, whose end is then in x.relaying.
func (x *exchange) relayBody() {
	c, r := x.conn, &x.relaying
	x.pump()
	for !r.ended {
		var err error
		if c.plain && c.r == c.w && c.watched.mayWait(true) {
			x.armRead(c, r.until)
			err = c.tcp.Read(x.relayMore)
			if isTimeout(err) && x.lease.cancelled() == notCancelled && time.Now().Before(r.until) {
				c.readArmed, err = time.Time{}, nil // it was an earlier request's, or the endpoint has gone
			}
		} else if err = x.await(c, r.until); err == nil {
			x.pump()
		}
		if err != nil {
			r.err, r.ended = err, true
		}
	}
	c.watched.mayWait(false)
}

// pump relays what has been read. If there is to be more, nothing is left that could be sent now.
func (x *exchange) pump() {
	c, r := x.conn, &x.relaying
	for !r.body.done {
		in := c.unread()
		if len(in) == 0 {
			if !r.hold && x.bytesOut > 0 {
				if r.f = x.flushBody(); r.f != nil {
					break
				}
			}
			return
		}
		data, used, err := r.body.next(in)
		c.r += used
		if err != nil {
			r.f = x.cut(&failure{outcome: EndpointReset, err: err, message: msgAnswer})
			break
		}
		if len(data) == 0 {
			continue
		}
		x.bytesOut += int64(len(data))
		x.scan(data)
		r.until = x.deadline
		if idle := x.pool.Timeouts.Idle; x.wantsStream && idle > 0 {
			r.until = earlier(time.Now().Add(idle), x.deadline)
		}
		if r.hold {
			if r.f = x.weighFirstEvent(r.ep); r.f != nil {
				break
			}
			r.hold = !x.firstEventKnown() && len(x.out.b)+len(data) < heldBytes
		}
		if r.f = x.pass(data, r.hold); r.f != nil {
			break
		}
	}
	r.ended = true
}

// relayEnded takes in how relay ended. A client that has a stream's last event has its answer, and need not wait for what
// ends the body. It doesn't call relay, since its frame would be on the stack of each stream.
func (x *exchange) relayEnded(f *failure) *failure {
	if f != nil && f.outcome == ClientGone && x.told {
		x.endScan()
		return nil
	}
	return f
}

// beginAnswer completes the head in the writer. The body will follow in the framing that suits the client: with the
// length where it is known, else chunked, else ended by closing the connection.
func (x *exchange) beginAnswer(fr framing, length int64) {
	x.chunkedOut = false
	b := x.writer().b
	switch {
	case fr == byLength, fr == noBody && (!x.headRequest() || length > 0) && x.resp.status != 204 && x.resp.status != 304:
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, length, 10)
		b = append(b, "\r\n"...)
	case fr == noBody:
	case x.facts.http10:
		x.closing = true
	default:
		x.chunkedOut = true
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	out := notYet
	if x.resp.framing == noBody || x.resp.framing == byLength && x.part == nil && int64(len(x.conn.unread())) >= x.resp.length {
		out = x.relayed() // nothing can go wrong with it any more
	}
	x.out.b = x.endHead(b, out)
}

// pass puts payload on its way, changed if it is to be.
func (x *exchange) pass(data []byte, hold bool) *failure {
	if x.rewriter == nil { // Fast path
		return x.emit(data, hold)
	}
	buf := getBuffer(len(data) + minBufferBytes)
	out := x.rewriter.Append(buf.b[:0], data)
	var f *failure
	if len(out) > 0 {
		f = x.emit(out, hold)
	}
	buf.release()
	return f
}

// endRewrite puts what was held back on its way.
func (x *exchange) endRewrite() *failure {
	if rest := x.rewriter.Finish(nil); len(rest) > 0 {
		return x.emit(rest, false)
	}
	return nil
}

// emit puts payload into the writer, and what has gathered there on its way if it is much and not held back.
func (x *exchange) emit(data []byte, hold bool) *failure {
	w := x.writer()
	if x.chunkedOut {
		w.b = strconv.AppendUint(w.b, uint64(len(data)), 16)
		w.b = append(w.b, "\r\n"...)
	}
	if len(data) >= directBytes && !hold {
		x.vec3 = [3][]byte{w.b, data, nil}
		if x.chunkedOut {
			x.vec3[2] = crlf
		}
		f := x.sendBuffers()
		w.b = w.b[:0]
		return f
	}
	w.b = append(w.b, data...)
	if x.chunkedOut {
		w.b = append(w.b, "\r\n"...)
	}
	if len(w.b) >= flushBytes && !hold {
		return x.flushBody()
	}
	return nil
}

// flushBody sends what has gathered and gives the writer back.
func (x *exchange) flushBody() *failure {
	if x.out == nil {
		return nil
	}
	if len(x.out.b) == 0 {
		x.dropWriter()
		return nil
	}
	x.commit()
	_, err := x.client.send(x.out.b)
	x.dropWriter()
	return x.sent(err)
}

// sendBuffers sends vec3.
func (x *exchange) sendBuffers() *failure {
	x.commit()
	x.bufs = x.vec3[:]
	err := x.client.sendBuffers(&x.bufs)
	x.vec3 = [3][]byte{}
	return x.sent(err)
}

// sent takes in how a write to the client ended, which was of all that had been read of the answer.
func (x *exchange) sent(err error) *failure {
	if err != nil {
		return x.clientFailure(err)
	}
	if x.stream != nil && x.stream.Terminal() != "" {
		x.told = true
	}
	return nil
}

// clientFailure explains an error of writing to the client.
func (x *exchange) clientFailure(err error) *failure {
	switch {
	case isTimeout(err):
		err = errors.New("the client took none of the answer for too long")
	case errors.Is(err, net.ErrClosed):
		err = errors.New("the connection to the client was closed")
	}
	x.closing = true
	return &failure{outcome: ClientGone, err: err, closing: true}
}

// cut ends an answer that failed. One that has begun is cut off so that the client can tell: an error event if it is a
// stream, and no proper end.
func (x *exchange) cut(f *failure) *failure {
	if !x.committed {
		x.dropWriter()
		return f
	}
	x.closing = true
	f.closing = true
	if f.outcome == ClientGone {
		return f
	}
	w := x.writer()
	if x.resp.events && !x.resp.encoded && (x.chunkedOut || x.facts.http10) {
		event := x.appendErrorEvent(nil, f)
		if x.chunkedOut {
			w.b = strconv.AppendUint(w.b, uint64(len(event)), 16)
			w.b = append(w.b, "\r\n"...)
			w.b = append(w.b, event...)
			w.b = append(w.b, "\r\n"...)
		} else {
			w.b = append(w.b, event...)
		}
	} else if x.facts.http10 && x.resp.framing != byLength {
		x.client.resetOnClose() // nothing else tells the end of a 1.0 answer from its middle
	}
	x.flushBody()
	return f
}

// relayed is the outcome of an answer that is passed on as it is.
func (x *exchange) relayed() Outcome {
	if x.resp.status >= 400 {
		return EndpointStatus
	}
	return OK
}
