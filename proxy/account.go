package proxy

import (
	"cmp"
	"errors"
	"strconv"
	"sync"
	"time"

	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// end answers a request that failed without an answer, and accounts for it: the booking is released, the outcome
// recorded, what can be learned from it learned. It runs exactly once per request, whatever happened.
// It reports whether the client's connection is to be closed.
func (x *exchange) end(f *failure) (closing bool) {
	h := x.h
	if f != nil && !x.committed {
		x.answerFailure(f)
	}
	if x.timer != nil {
		x.timer.Stop()
	}
	x.leaveQueue()
	x.release()
	watchHandle{x.client}.stop()
	if f != nil && f.outcome == ShuttingDown && x.lease.cancelled() == cancelledByDrain {
		h.cut.Add(1) // before it leaves: who waits for it to leave wants to have it counted
	}
	h.leave(x)
	if x.retryTaken {
		h.retrying.Add(-1)
	}
	closing = x.closing || f != nil && f.closing
	if x.routes.Quotas != nil {
		x.settle(f)
	}
	x.report(f)
	x.reset()
	h.exchanges.Put(x)
	return closing
}

// report hands the record over. A panic in whoever takes it is not to touch the answer, which is under way.
func (x *exchange) report(f *failure) {
	if x.h.opts.Sink == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			x.h.panicked(v)
		}
	}()
	x.record(f)
	x.h.opts.Sink.Observe(&x.rec)
}

// record fills in the record of the request, which is empty.
func (x *exchange) record(f *failure) {
	if f == nil {
		f = x.inStream
	}
	r, now := &x.rec, time.Now()
	x.client.ended = now
	r.RequestID = text(x.requestID)
	r.Method = x.facts.method
	r.Path = text(x.path)
	r.ClientAddr = x.client.peerText()
	r.Status = x.status
	r.Attempts = x.attempts[:min(x.attempt, len(x.attempts))]
	r.Stream = x.wantsStream
	r.QueueSeconds = x.wait.took.Seconds()
	r.DecisionSeconds = x.deciding.Seconds()
	r.DurationSeconds = now.Sub(x.began).Seconds()
	r.BytesIn = int64(x.bodyLen)
	r.BytesOut = x.bytesOut
	if x.route.API != openai.APINone {
		r.API = x.route.API.String()
	}
	out := x.outcome(f)
	r.Outcome = out.String()
	if f != nil {
		if f.err != nil {
			r.Error = f.err.Error()
		} else {
			r.Error = f.message
		}
	}
	if r.Status == 0 {
		r.Status = out.Status()
	}
	r.Model = text(x.model)
	if x.pool != nil {
		r.Pool = x.pool.Name
	}
	if t := x.query.Target; t != nil {
		if r.Served = t.Name; t.Adapter {
			r.Adapter = t.Name
		}
	}
	q := &x.query
	r.PromptBytes, r.MaxTokens, r.Session, r.Prefix = int64(q.PromptBytes), int64(q.MaxTokens), q.Session, x.prefix
	r.Tenant = x.tenant
	if x.caller != nil {
		r.Key = x.caller.Key
	}
	if !x.firstToken.IsZero() && x.wantsStream {
		r.TTFTSeconds = x.firstToken.Sub(x.began).Seconds()
	}
	if x.scanning {
		u := x.usage()
		r.UsageKnown, r.CachedKnown = u.HasInput || u.HasOutput, u.HasCached
		r.InputTokens, r.OutputTokens, r.CachedTokens = u.InputTokens, u.OutputTokens, u.CachedTokens
	}
	x.recordTimes(r)
	r.Trace = x.trace.TraceContext
	d := &x.decision
	if d.Endpoint == nil {
		return
	}
	r.Endpoint = d.Endpoint.ID
	r.Decided, r.Explained = true, x.explained
	r.Cost, r.RunnerUpCost = float64(d.Cost), float64(d.RunnerUpCost)
	if d.RunnerUp != nil {
		r.RunnerUp = d.RunnerUp.ID
	}
	r.SnapshotVersion = x.snapshot.Version
	r.ScrapeAgeSeconds = -1
	if d.Row != nil && d.Row.ScrapedAt != 0 {
		r.ScrapeAgeSeconds = max(0, d.Claim.At.Sub(d.Row.ScrapedAt).Seconds()) // when it was decided
	}
	r.PromptTokens = int64(d.PromptTokens)
	r.NewTokens = int64(d.PromptTokens - d.CachedTokens)
	r.PredictedSeconds = d.FirstToken.Seconds()
	if r.TTFTSeconds > 0 && !x.sentAt.IsZero() {
		r.AnsweredSeconds = x.firstToken.Sub(x.sentAt).Seconds()
	}
	r.AdapterResident = r.Adapter != "" && !d.Cold
}

// outcome is how the request ended.
func (x *exchange) outcome(f *failure) Outcome {
	switch {
	case f != nil:
		return f.outcome
	case x.status >= 400 && x.attempt > 0:
		return EndpointStatus
	}
	return OK
}

// attempted takes in how an attempt ended: for its record, for the endpoint's health, and for what is learned from it.
func (x *exchange) attempted(ep *endpoint, f *failure) {
	now := time.Now()
	out := OK
	switch {
	case f != nil:
		out = f.outcome
	case x.resp.status >= 400:
		out = EndpointStatus
	case x.inStream != nil:
		out = x.inStream.outcome
	}
	if x.attempt < len(x.attempts) {
		x.attempts[x.attempt] = telemetry.Attempt{Endpoint: ep.ID, Outcome: out.String(), Seconds: now.Sub(x.attemptAt).Seconds()}
	}
	if n := x.attempt - x.attemptsBefore; n < len(x.query.Tried) {
		x.query.Tried[n] = ep.Endpoint
	}
	x.attempt++
	if x.timer != nil {
		x.timer.Stop()
	}
	x.judge(ep, f)
	if f == nil && x.inStream == nil && x.resp.status < 300 && x.pinned == nil {
		x.learn(now)
	}
}

// learn tells the policy how the request went.
func (x *exchange) learn(now time.Time) {
	u := scoring.Usage{CachedTokens: -1}
	if x.scanning {
		t := x.usage()
		if t.HasInput {
			u.PromptTokens = int32(min(t.InputTokens, 1<<30))
		}
		if t.HasOutput {
			u.OutputTokens = int32(min(t.OutputTokens, 1<<30))
		}
		if t.HasCached {
			u.CachedTokens = int32(min(t.CachedTokens, 1<<30))
		}
	}
	if !x.firstToken.IsZero() {
		u.Duration = now.Sub(x.firstToken)
	}
	x.pool.Policy.End(&x.decision, u)
}

// usage is what the answer says about tokens.
func (x *exchange) usage() openai.Usage {
	if x.stream != nil {
		u := x.stream.Usage()
		if !u.HasInput && !u.HasOutput {
			u = x.stream.Timings()
		}
		return u
	}
	if x.json == nil {
		return openai.Usage{}
	}
	u := x.json.Usage()
	if !u.HasInput && !u.HasOutput {
		u = x.json.Timings()
	}
	return u
}

// reset forgets the request, so that the exchange keeps nothing alive that was the request's.
func (x *exchange) reset() {
	x.dropWriter()
	x.releaseRequest()
	x.releaseHead()
	x.releaseScan()
	x.client, x.path, x.requestID = nil, nil, nil
	x.caller, x.tenant, x.class = nil, "", caller.Normal
	x.route = openai.Route{}
	x.name, x.routes, x.pool, x.pinned, x.snapshot, x.held, x.part, x.inStream = nil, nil, nil, nil, nil, nil, nil, nil
	x.query = scoring.Request{}
	x.decision = scoring.Decision{}
	x.resp, x.relaying = response{}, relaying{}
	x.bodyLen = 0
	x.attempt, x.attemptsBefore, x.status, x.bytesOut, x.deciding, x.dialing, x.explained = 0, 0, 0, 0, 0, 0, 0
	x.named = names.Route{Rule: -1}
	x.addUsage = false
	x.watching = false
	if x.wait.queued {
		x.wait = waiting{woken: x.wait.woken, wake: x.wait.wake}
	}
	x.wantsStream, x.retryTaken, x.scanning, x.chunkedOut, x.committed, x.told, x.debug = false, false, false, false, false, false, false
	x.firstToken, x.sentAt, x.readAt = time.Time{}, time.Time{}, time.Time{}
	x.rec, x.trace = telemetry.Record{}, traced{}
	if cap(x.pathBuf) > 256 {
		x.pathBuf = nil
	}
	if x.prefix = x.prefix[:0]; cap(x.prefix) > 256 {
		x.prefix = nil
	}
	if cap(x.model) > 256 {
		x.model = nil
	}
	x.model = x.model[:0]
}

// answerFailure answers a request that failed before a byte of an answer was sent.
func (x *exchange) answerFailure(f *failure) {
	if f.outcome == ClientGone || x.client == nil {
		x.closing = true
		return
	}
	if h := x.held; h != nil && f.outcome != Internal && f.outcome != ShuttingDown {
		// An earlier attempt had an answer, and nothing better came of moving on from it.
		x.sendHeld(h)
		f.outcome, f.err, f.message = EndpointStatus, nil, ""
		return
	}
	x.dropWriter()
	x.closing = x.closing || f.closing
	status := cmp.Or(f.outcome.Status(), f.status, 502)
	x.resp = response{status: status}
	w := x.writer()
	w.b = appendStatusLine(w.b, status, nil)
	w.b = append(w.b, "Content-Type: application/json\r\n"...)
	if f.allow != "" {
		w.b = append(append(append(w.b, "Allow: "...), f.allow...), "\r\n"...)
	}
	if f.outcome == Unauthorized {
		w.b = append(w.b, "WWW-Authenticate: Bearer\r\n"...) // RFC 9110 11.6.1 demands one
	}
	if f.retryAfterSeconds > 0 {
		w.b = append(strconv.AppendInt(append(w.b, "Retry-After: "...), int64(f.retryAfterSeconds), 10), "\r\n"...)
	}
	body := openai.AppendError(nil, x.route.Style, &openai.APIError{
		Status: status, Type: f.outcome.ErrorType(), Code: cmp.Or(f.code, f.outcome.String()),
		Message: f.message, Param: f.param, RequestID: text(x.requestID),
	})
	x.sendWhole(w, body, f.outcome)
}

// sendWhole completes the head in w and sends it with body.
func (x *exchange) sendWhole(w *writer, body []byte, out Outcome) {
	w.b = append(w.b, "Content-Length: "...)
	w.b = strconv.AppendInt(w.b, int64(len(body)), 10)
	w.b = append(w.b, "\r\n"...)
	w.b = x.endHead(w.b, out)
	if !x.headRequest() {
		w.b = append(w.b, body...)
		x.bytesOut += int64(len(body))
	}
	x.flushBody()
}

// endHead appends what every answer's head ends with.
func (x *exchange) endHead(b []byte, out Outcome) []byte {
	x.status = x.resp.status
	b = append(b, "X-Request-Id: "...)
	b = append(b, x.requestID...)
	b = append(b, "\r\n"...)
	if x.h.draining.Load() {
		x.closing = true
	}
	switch {
	case x.closing:
		b = append(b, "Connection: close\r\n"...)
	case x.facts.http10:
		b = append(b, "Connection: keep-alive\r\n"...)
	}
	if t := x.query.Target; x.named.How == names.FellBack && t != nil && formSafe(t.Name) {
		b = append(append(append(b, "X-Kvgate-Fallback: "...), t.Name...), "\r\n"...)
	}
	b = x.appendQuota(b)
	if x.debug {
		b = x.appendDebugHeaders(b, out)
	}
	return append(b, "\r\n"...)
}

// appendDebugHeaders says how the answer came about.
func (x *exchange) appendDebugHeaders(b []byte, out Outcome) []byte {
	if e := x.decision.Endpoint; e != nil {
		b = append(append(append(b, "X-Kvgate-Endpoint: "...), e.ID...), "\r\n"...)
	}
	if out != notYet {
		b = append(append(append(b, "X-Kvgate-Outcome: "...), out.String()...), "\r\n"...)
	}
	attempts := x.attempt
	if x.conn != nil {
		attempts++ // the one that is running
	}
	b = append(strconv.AppendInt(append(b, "X-Kvgate-Attempts: "...), int64(attempts), 10), "\r\n"...)
	b = append(b, "Server-Timing: choose;dur="...)
	b = appendMilliseconds(b, x.deciding)
	if !x.sentAt.IsZero() {
		b = append(b, ", first_byte;dur="...)
		b = appendMilliseconds(b, time.Since(x.sentAt))
	}
	return append(b, "\r\n"...)
}

func appendMilliseconds(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d)/float64(time.Millisecond), 'f', 3, 64)
}

// appendErrorEvent appends the event that tells a client that its stream was cut off.
func (x *exchange) appendErrorEvent(b []byte, f *failure) []byte {
	status := f.outcome.Status()
	return openai.AppendStreamError(b, x.route.API, x.stream.MidEvent(), &openai.APIError{
		Status: status, Type: f.outcome.ErrorType(), Code: f.outcome.String(), Message: f.message, RequestID: text(x.requestID),
	})
}

// statusTexts are the reasons of the statuses that we send ourselves.
var statusTexts = map[int]string{
	200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
	408: "Request Timeout", 413: "Content Too Large", 415: "Unsupported Media Type", 429: "Too Many Requests",
	431: "Request Header Fields Too Large", 500: "Internal Server Error", 502: "Bad Gateway", 503: "Service Unavailable",
	504: "Gateway Timeout",
}

// appendStatusLine appends the status line; a nil reason is the usual one.
func appendStatusLine(b []byte, status int, reason []byte) []byte {
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	if reason == nil {
		b = append(b, statusTexts[status]...)
	}
	b = append(b, reason...)
	return append(b, "\r\n"...)
}

// What only a part of a request's life needs is on loan for that part, so that a long stream holds little.
var (
	peekPool   = sync.Pool{New: func() any { return new(openai.Request) }}
	streamPool = sync.Pool{New: func() any { return new(openai.Stream) }}
	jsonPool   = sync.Pool{New: func() any { return new(openai.JSONScan) }}
)

// commit notes that a byte of an answer goes to the client. There is no other attempt after that, so the request itself is
// no longer needed.
func (x *exchange) commit() {
	if !x.committed {
		x.committed = true
		x.releaseRequest()
		x.releaseHead()
	}
}

// releaseRequest gives back the memory of the request's body and of what was found in it.
func (x *exchange) releaseRequest() {
	if x.peek == nil {
		return
	}
	x.peek.Reset()
	peekPool.Put(x.peek)
	x.peek, x.name = nil, nil
	x.releaseSpliced()
	x.body.release()
}

// releaseScan gives back what reads along answers.
func (x *exchange) releaseScan() {
	if x.stream != nil {
		streamPool.Put(x.stream)
		x.stream = nil
	}
	if x.json != nil {
		jsonPool.Put(x.json)
		x.json = nil
	}
	if x.rewriter != nil {
		rewriterPool.Put(x.rewriter)
		x.rewriter = nil
	}
}

// startScan begins to read along the answer, if there is anything in it to read.
func (x *exchange) startScan() {
	x.releaseScan() // an earlier attempt's
	x.scanning = !x.resp.encoded && (x.resp.events || x.resp.json)
	switch {
	case !x.scanning:
	case x.resp.events:
		x.stream = streamPool.Get().(*openai.Stream)
		x.stream.Reset()
	default:
		x.json = jsonPool.Get().(*openai.JSONScan)
		x.json.Reset()
	}
}

// scan reads the next piece of the answer. It changes nothing.
func (x *exchange) scan(data []byte) {
	switch {
	case !x.scanning:
	case x.resp.events:
		x.stream.Feed(data)
	default:
		x.json.Feed(data)
	}
	if !x.firstToken.IsZero() || x.scanning && x.resp.events && !x.stream.FirstToken() {
		return
	}
	// The first token, or the first byte of an answer that shows none.
	x.firstToken = time.Now()
	x.booking.FirstToken()
	x.pool.roomMade()
	if x.wantsStream && x.resp.events && x.pinned == nil {
		x.pool.Policy.FirstToken(&x.decision, x.firstToken.Sub(x.sentAt))
	}
}

// endScan takes in that the answer is complete.
func (x *exchange) endScan() {
	if !x.scanning {
		return
	}
	var id []byte
	if x.resp.events {
		x.stream.Finish()
		id = x.stream.ID()
		switch {
		case x.stream.Failed():
			// Slow path: the answer was a 200, and an error all the same.
			e := x.stream.Error()
			x.inStream = &failure{outcome: EndpointStatus, status: e.Status, err: errors.New("the stream holds an error: " + label(&e))}
		case !x.stream.Complete() && x.route.API.Streams() && x.resp.status == 200:
			// Some servers lose the rest of a stream without a sign (vLLM #52852). It ends as it did there.
			x.inStream = &failure{outcome: OK, err: errors.New("the stream ended properly but without its last event")}
		}
	} else {
		id = x.json.ID()
	}
	if x.route.API == openai.Responses && x.resp.status < 300 && len(id) > 0 {
		x.h.stored.add(id, storedResponse{x.decision.Endpoint, x.tenant, x.query.Target})
	}
}

// label is the word that an error of a stream is known by, if it is one: what an endpoint writes there may quote the prompt.
func label(e *openai.ErrorInfo) string {
	l := e.Label()
	for i := range len(l) {
		if byteClass[l[i]]&isToken == 0 || i == maxLabelBytes {
			return "one of many words"
		}
	}
	return l
}

const maxLabelBytes = 40

// choosePinned books the one endpoint that can take the request.
func (x *exchange) choosePinned(now pool.Instant) (scoring.Decision, error) {
	for i := range x.snapshot.Rows {
		row := &x.snapshot.Rows[i]
		if row.Endpoint != x.pinned {
			continue
		}
		if x.attempt > 0 {
			break
		}
		c := pool.Claim{PendingTokens: 1, KVTokens: 1, At: now}
		row.Book(&x.booking, c)
		return scoring.Decision{Endpoint: x.pinned, Row: row, Claim: c}, nil
	}
	return scoring.Decision{}, scoring.ErrNoEndpoints
}
