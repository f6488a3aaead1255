package proxy

import (
	"bytes"
	"errors"
	"io"
	"time"
)

// never is a deadline that doesn't come.
var never = time.Unix(1<<40, 0)

// after returns the instant d from now, never if d is zero.
func after(now time.Time, d time.Duration) time.Time {
	if d <= 0 {
		return never
	}
	return now.Add(d)
}

// earlier returns the earlier of two instants.
func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

const (
	// copyBodyBytes is the size up to which a body is copied behind the head to be written in one piece; a larger one is
	// written with it by writev.
	copyBodyBytes = 8 << 10
	// uploadSliceBytes is written at once before looking whether the endpoint has answered already.
	uploadSliceBytes = 256 << 10
	// uploadLook is how often an endpoint that doesn't take the request is looked at.
	uploadLook = 200 * time.Millisecond
	// uploadStall is how long an endpoint may take none of a request.
	uploadStall = 30 * time.Second
	// lateAnswer is how long an answer may take that comes though the request couldn't be written.
	lateAnswer = time.Second
	// maxInterim is the most interim (1xx) answers that are read over.
	maxInterim = 64
)

// forward sends the request to ep and relays the answer to the client. It returns nil if an answer has been relayed
// whole, whatever its status.
func (x *exchange) forward(ep *endpoint) *failure {
	var c *endpointConn
	var complete bool
	var wrote int
	var err error
	var until, firstToken time.Time
	keep := false
	defer func() {
		// On every way out the connection goes back once: to the idle list after a clean end, else closed.
		x.giveBack(ep, keep)
	}()
	for {
		c, err = ep.conns.get(&x.lease, ep.Address, ep.tls(x.pool), x.pool, x.h.limits.EndpointConnections, x.attemptAt)
		if err != nil {
			return x.connectFailure(err)
		}
		x.conn = c
		if !c.used {
			c.watchWith(x.h.watch)
		}
		x.dialing, c.dialTook = x.dialing+c.dialTook, 0

		out := x.writer()
		x.putRequestHead(ep)
		x.sentAt = time.Time{}
		complete, wrote, err = x.upload(c, out.b)
		out.b = out.b[:0]
		if err != errStale {
			break
		}
		x.conn = nil
		x.lease.detach()
		ep.conns.drop(c)
	}
	if x.sentAt.IsZero() {
		x.sentAt = time.Now()
	}
	firstToken = never
	if x.wantsStream {
		firstToken = after(x.sentAt, x.pool.Timeouts.FirstToken)
	}
	until = earlier(firstToken, x.deadline)
	if err != nil {
		if isTimeout(err) && x.lease.cancelled() == notCancelled {
			return &failure{outcome: EndpointTimeout, err: errors.New("the endpoint took none of the request"), message: msgTimeout}
		}
		if wrote == 0 || x.lease.cancelled() != notCancelled {
			f := x.brokenOff(err)
			f.unexecuted = wrote == 0
			return f
		}
		// What the endpoint said before it closed may still be there to read.
		until = earlier(until, x.sentAt.Add(lateAnswer))
	}

	f := x.readHead(c, until)
	if f != nil {
		if err != nil && f.outcome == EndpointTimeout {
			f.outcome, f.err, f.message = EndpointReset, err, msgReset
		}
		return f
	}
	if !complete {
		x.resp.keepAlive = false // the rest of the request is not going to be sent
	}
	whole, f := x.weigh(ep)
	switch {
	case f != nil:
		keep = whole
		return f
	case whole:
		// The answer was read in order to decide; from here it goes as any other.
		x.giveBack(ep, true)
		x.release()
		x.sendHeld(x.held)
		return nil
	}
	return x.relayEnded(x.relay(ep, firstToken))
}

// putRequestHead puts the head for ep into the writer. It is apart from forward, whose stack a stream keeps.
//
//go:noinline
func (x *exchange) putRequestHead(ep *endpoint) {
	var head requestHead
	x.fillRequestHead(&head, ep)
	x.out.b = appendRequestHead(x.out.b[:0], &head)
}

// giveBack ends the use of the connection that the exchange holds, if it holds one.
func (x *exchange) giveBack(ep *endpoint, clean bool) {
	c := x.conn
	if c == nil {
		return
	}
	x.conn = nil
	if asItWas := x.lease.detach(); clean && asItWas && x.resp.keepAlive && c.r == c.w && c.tcp != nil {
		c.dropInput()
		now := x.firstToken // of an answer that is no stream, which comes as a whole
		if x.wantsStream || now.IsZero() {
			now = time.Now()
		}
		ep.conns.put(c, now)
		return
	}
	ep.conns.drop(c)
}

// What clients are told when an endpoint fails.
const (
	msgConnect = "the model server could not be reached; try again"
	msgReset   = "the model server closed the connection before its answer was complete; try again"
	msgTimeout = "the model server did not answer in time; try again later"
	msgAnswer  = "the model server sent an answer that is not valid HTTP; try again"
)

// connectFailure explains why there is no connection. The request was not executed.
func (x *exchange) connectFailure(err error) *failure {
	switch {
	case errors.Is(err, errCancelled):
		return x.cancelFailure()
	case errors.Is(err, errTooManyConns):
		return &failure{outcome: Saturated, err: err, message: "the model servers have as many requests as they can take; try again later", unexecuted: true, retryAfterSeconds: 1}
	}
	if exhausted(err) { // no fault of the endpoint's, and no better at another one
		return &failure{outcome: Saturated, err: err, message: "the gateway has as many connections as it can open; try again later", retryAfterSeconds: 1}
	}
	return &failure{outcome: EndpointConnect, err: err, message: msgConnect, unexecuted: true}
}

// cancelFailure says who cancelled the request.
func (x *exchange) cancelFailure() *failure {
	if x.lease.cancelled() == cancelledByDrain {
		return &failure{outcome: ShuttingDown, message: "the gateway is shutting down; try again", closing: true}
	}
	return &failure{outcome: ClientGone, closing: true}
}

// brokenOff explains an error of reading from or writing to the endpoint.
func (x *exchange) brokenOff(err error) *failure {
	switch {
	case x.lease.cancelled() != notCancelled:
		return x.cancelFailure()
	case isTimeout(err):
		return &failure{outcome: EndpointTimeout, err: err, message: msgTimeout}
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return &failure{outcome: EndpointReset, err: err, message: msgReset}
}

// upload writes head and body. complete reports whether all of it has been written: an endpoint may answer, to refuse a
// body, before it has taken it. Then the rest isn't sent, and err is nil. errStale says that the connection was kept too long.
func (x *exchange) upload(c *endpointConn, head []byte) (complete bool, wrote int, err error) {
	body := x.forwardBody()
	if len(body) <= copyBodyBytes {
		head = append(head, body...)
		x.out.b = head // may have grown
		body = nil
	}
	total := len(head) + len(body)
	switch {
	case c.plain: // Fast path: an empty socket buffer takes most requests at once
		if wrote, err = x.send(c, head, body); err != nil || wrote == total {
			return err == nil, wrote, err
		}
	case c.used && !c.live():
		return false, 0, errStale
	}
	defer x.lease.deadline(true, time.Time{})
	// A TLS connection is broken by a write that timed out, so there the endpoint is not looked at meanwhile.
	look := uploadLook
	if !c.plain {
		look = uploadStall
	}
	moved := time.Now()
	for wrote < total {
		now := time.Now()
		x.lease.deadline(true, earlier(now.Add(look), x.deadline))
		var n int64
		if wrote < len(head) && len(body) > 0 {
			x.vec = [2][]byte{head[wrote:], body[:min(len(body), uploadSliceBytes)]}
			x.bufs = x.vec[:]
			n, err = x.bufs.WriteTo(c.Conn)
			x.vec = [2][]byte{}
		} else {
			rest := head[min(wrote, len(head)):]
			if len(rest) == 0 {
				rest = body[wrote-len(head):]
			}
			var m int
			m, err = c.Conn.Write(rest[:min(len(rest), uploadSliceBytes)])
			n = int64(m)
		}
		wrote += int(n)
		if n > 0 {
			moved = now
		}
		if err == nil {
			continue
		}
		if !isTimeout(err) || x.lease.cancelled() != notCancelled || !c.plain {
			return false, wrote, err
		}
		if !c.live() { // it has answered, or gone; either is for the reader to see
			return false, wrote, nil
		}
		if now = time.Now(); now.Sub(moved) > uploadStall || !now.Before(x.deadline) {
			return false, wrote, err
		}
	}
	return true, wrote, nil
}

// send writes what c takes at once and, if that is all, waits for the answer as c.send does.
func (x *exchange) send(c *endpointConn, head, body []byte) (wrote int, err error) {
	now := x.attemptAt
	if !c.used {
		now = time.Now() // it took time to connect
	}
	until := x.deadline
	if x.wantsStream {
		until = earlier(after(now, x.pool.Timeouts.FirstToken), until)
	}
	x.armRead(c, until)
	wrote, err = c.send(head, body)
	if wrote == 0 && isTimeout(err) && x.lease.cancelled() == notCancelled && time.Now().Before(until) {
		c.readArmed = time.Time{} // the deadline was an earlier request's
		x.armRead(c, until)
		wrote, err = c.send(head, body)
	}
	x.sentAt = c.wroteAt
	return wrote, err
}

// armRead has reads end by the given instant, or before.
func (x *exchange) armRead(c *endpointConn, until time.Time) {
	if c.readArmed.IsZero() || c.readArmed.After(until) {
		c.readArmed = until
		x.lease.deadline(false, until)
	}
}

// await reads more of the answer, until the given instant at the latest. The deadline that is armed may come too soon:
// then it is set anew when it fires, which spares a timer operation per read.
func (x *exchange) await(c *endpointConn, until time.Time) error {
	for {
		x.armRead(c, until)
		err := c.fill()
		if err == nil || !isTimeout(err) || x.lease.cancelled() != notCancelled || !time.Now().Before(until) {
			return err
		}
		c.readArmed = time.Time{}
	}
}

// readHead reads the head of the answer into x.resp and puts the head for the client, short of its framing, into the
// writer.
func (x *exchange) readHead(c *endpointConn, until time.Time) *failure {
	interim, seen := 0, 0
	for {
		in := c.unread()
		from := max(0, min(len(in), seen)-3)
		end := bytes.Index(in[from:], crlfcrlf)
		if end < 0 {
			switch {
			case len(in) > x.h.limits.ResponseHeaderBytes:
				return &failure{outcome: EndpointReset, err: errResponseSize, message: msgAnswer}
			case len(in) > seen && malformedStart(in):
				return &failure{outcome: EndpointReset, err: errStatusLine, message: msgAnswer}
			}
			seen = len(in)
			if err := x.await(c, until); err != nil {
				f := x.brokenOff(err)
				f.unanswered = f.outcome == EndpointReset && len(in) == 0 && interim == 0
				return f
			}
			continue
		}
		end += from + len(crlfcrlf)
		if end > x.h.limits.ResponseHeaderBytes {
			return &failure{outcome: EndpointReset, err: errResponseSize, message: msgAnswer}
		}
		status, http10, reason, fields, err := parseStatusLine(in[:end])
		if err == nil && status < 200 {
			if status == 101 {
				err = errSwitched
			} else if interim++; interim > maxInterim {
				err = errInterim
			} else {
				c.r += end
				seen = 0
				continue
			}
		}
		if err == nil {
			out := x.writer()
			out.b = appendStatusLine(out.b[:0], status, reason)
			out.b, err = parseResponse(out.b, fields, status, http10, x.headRequest(), x.decision.Endpoint.URL, &x.resp)
			if err != nil {
				out.b = out.b[:0]
			}
		}
		if err != nil {
			return &failure{outcome: EndpointReset, err: err, message: msgAnswer}
		}
		c.r += end
		return nil
	}
}

// malformedStart reports whether in, the beginning of a head, can't become one: it doesn't begin like HTTP, or has a
// line that ends in LF alone.
func malformedStart(in []byte) bool {
	const http = "HTTP/1."
	n := min(len(in), len(http))
	if string(in[:n]) != http[:n] {
		return true
	}
	lf := bytes.IndexByte(in, '\n')
	return lf > 0 && in[lf-1] != '\r'
}
