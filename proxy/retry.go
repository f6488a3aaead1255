package proxy

import (
	"errors"
	"fmt"
	"io"
	"time"

	"kvgate/openai"
	"kvgate/pool"
)

// A heldAnswer is an endpoint's whole answer that the request moved on from, and that the client gets after all if
// nothing better comes.
type heldAnswer struct {
	status int
	head   []byte // status line and fields, short of framing
	body   []byte
}

const (
	// maxHeldBytes is the largest error answer that is looked into before it is decided whether to move on.
	maxHeldBytes = 64 << 10
	// heldTimeout is how long the rest of one may take.
	heldTimeout = 2 * time.Second
	// defaultBusy is how long an endpoint that says it is overloaded, but not for how long, is left alone: a moment, for
	// a queue that is full now has room as soon as one request ends.
	defaultBusy = time.Second
	// maxBusy is the longest that an endpoint is believed to be overloaded.
	maxBusy = 30 * time.Second
)

// backpressure reports whether a status says that the endpoint did nothing for want of room or readiness: 429 (TGI), 503
// (SGLang, loading llama.cpp, vLLM while scaling), 529 (Dynamo, Anthropic).
func backpressure(status int) bool { return status == 429 || status == 503 || status == 529 }

// weigh looks at an answer whose head has been read. If the answer has to be read to know what to make of it, whole
// says that it is in x.held now. It returns a failure if the request moves on from the answer; otherwise the answer is
// to be relayed.
func (x *exchange) weigh(ep *endpoint) (whole bool, f *failure) {
	status := x.resp.status
	if backpressure(status) {
		ep.SetBusyUntil(x.h.opts.Now().Add(busyFor(x.resp.retryAfter)))
	}
	if !backpressure(status) && status != 404 || x.route.Kind == openai.KindStored || x.resp.encoded ||
		x.resp.framing == byLength && x.resp.length > maxHeldBytes {
		return false, nil
	}
	if f := x.hold(); f != nil || x.part != nil {
		return false, f
	}
	info := openai.ParseError(x.held.body)
	if status == 404 {
		if info.Class != openai.ClassModelNotFound {
			return true, nil
		}
		// The endpoint has lost the adapter, or is another server by now. Whatever was believed of it is void.
		if t := x.query.Target; t != nil && t.Adapter {
			ep.Adapters().Forget(t.Hash)
		}
		if x.h.opts.OnDoubt != nil {
			x.h.opts.OnDoubt(ep.Endpoint)
		}
	}
	gone := status == 404 && x.adapterGone(ep)
	if !gone && !x.elsewhere() && !x.named.HasFallback() {
		return true, nil
	}
	return true, &failure{outcome: EndpointStatus, status: status, message: info.Message, err: refusedWith(status), unexecuted: true, adapterGone: gone}
}

// refusedWith is what is logged of a refusal. The endpoint's own words may quote the prompt.
func refusedWith(status int) error {
	return fmt.Errorf("the endpoint refused the request with status %d", status)
}

func busyFor(retryAfterSeconds int) time.Duration {
	if retryAfterSeconds == 0 {
		return defaultBusy
	}
	return min(time.Duration(retryAfterSeconds)*time.Second, maxBusy)
}

// hold reads an error answer into x.held. One that is too long, or too long in coming, is left to be relayed, with what has
// been read of it in x.part.
func (x *exchange) hold() *failure {
	h := &heldAnswer{status: x.resp.status, head: append([]byte(nil), x.writer().b...), body: []byte{}}
	body := newBodyReader(&x.resp)
	c := x.conn
	until := earlier(time.Now().Add(heldTimeout), x.deadline)
	for !body.done {
		in := c.unread()
		if len(in) == 0 {
			err := x.await(c, until)
			if err == nil {
				continue
			}
			if body.framing == byClose && errors.Is(err, io.EOF) {
				break
			}
			if isTimeout(err) && x.lease.cancelled() == notCancelled && time.Now().Before(x.deadline) {
				x.part, x.partBody = h.body, body
				return nil
			}
			return x.brokenOff(err)
		}
		data, used, err := body.next(in)
		c.r += used
		if err != nil {
			return &failure{outcome: EndpointReset, err: err, message: msgAnswer}
		}
		if h.body = append(h.body, data...); len(h.body) > maxHeldBytes {
			x.part, x.partBody = h.body, body
			return nil
		}
	}
	x.held = h
	return nil
}

// elsewhere reports whether another endpoint might take the request: a look before it is given up here. One that asked to
// be left alone does not count, or an overload would be doubled by moving on from it.
func (x *exchange) elsewhere() bool {
	t := x.query.Target
	if t == nil || x.pinned != nil || !x.attemptsLeft() {
		return false
	}
	now := x.h.opts.Now()
	for _, i := range t.Rows {
		row := &x.snapshot.Rows[i]
		if row.Endpoint != x.decision.Endpoint && row.Healthy(now) && row.BusyUntil() <= now && !x.tried(row.Endpoint) {
			return true
		}
	}
	return false
}

func (x *exchange) tried(e *pool.Endpoint) bool {
	for _, t := range x.query.Tried {
		if t == e {
			return true
		}
	}
	return false
}

// attemptsLeft reports whether another attempt is allowed after the one that is running.
func (x *exchange) attemptsLeft() bool {
	return x.attempt-x.attemptsBefore+1 < x.pool.Retry.MaxAttempts
}

// mayRetry reports whether the request, whose last attempt failed with f, may try another endpoint. If so, it has taken
// its place in the retry budget and holds nothing of the attempt before.
func (x *exchange) mayRetry(f *failure) bool {
	r := &x.pool.Retry
	switch {
	case x.committed || x.attempt-x.attemptsBefore >= r.MaxAttempts || x.pinned != nil:
		return false
	case f.outcome == ClientGone || x.lease.cancelled() != notCancelled:
		return false
	case !f.unexecuted && !(f.unanswered && r.ReplayUnanswered):
		return false
	}
	if !x.retryTaken {
		if x.retryTaken = x.h.takeRetry(int64(retryBudget(r, x.h.Active()))); !x.retryTaken {
			return false
		}
	}
	x.endAttempt()
	return true
}

// endAttempt gives back what the request holds of an attempt that came to nothing.
func (x *exchange) endAttempt() {
	x.release()
	x.dropWriter()
	x.releaseScan()
	x.scanning = false
	x.firstToken = time.Time{}
	x.bytesOut = 0
}

// takeRetry takes a place among the running retries, of which there may be limit, and reports whether there was one.
func (h *Handler) takeRetry(limit int64) bool {
	for {
		n := h.retrying.Load()
		if n >= limit {
			return false
		}
		if h.retrying.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// retryBudget is how many retries may run while active requests do.
func retryBudget(r *Retry, active int) int {
	ratio, least := r.BudgetRatio, r.BudgetMin
	if ratio == 0 && least == 0 {
		ratio, least = 0.2, 3
	}
	return max(least, int(ratio*float64(active)))
}

// sendHeld sends an answer that was held back.
func (x *exchange) sendHeld(h *heldAnswer) {
	x.dropWriter()
	x.resp = response{status: h.status}
	w := x.writer()
	w.b = append(w.b, h.head...)
	x.sendWhole(w, h.body, EndpointStatus)
}

// holdsFirstEvent reports whether the beginning of the answer is held back until its first event is known to be no error
// that the request could move on from: a full queue in a 200 (SGLang, TGI).
func (x *exchange) holdsFirstEvent() bool {
	return x.scanning && x.resp.events && x.resp.status == 200 && (x.elsewhere() || x.named.HasFallback())
}

// weighFirstEvent returns a failure if the first event is an error to move on from.
func (x *exchange) weighFirstEvent(ep *endpoint) *failure {
	if known, failed := x.stream.FirstEvent(); !known || !failed {
		return nil
	}
	e := x.stream.Error()
	if e.Class == openai.ClassOther && !backpressure(e.Status) {
		return nil // an error after work began, or the client's own
	}
	if backpressure(e.Status) || e.Class == openai.ClassOverloaded || e.Class == openai.ClassLoading {
		ep.SetBusyUntil(x.h.opts.Now().Add(defaultBusy))
	}
	x.resp.keepAlive = false // what follows the event is of no interest
	return &failure{outcome: EndpointStatus, status: e.Status, message: e.Message, err: refusedWith(e.Status), unexecuted: true}
}

// firstEventKnown reports whether there is nothing left to hold back for.
func (x *exchange) firstEventKnown() bool {
	known, _ := x.stream.FirstEvent()
	return known || x.stream.Comments() > 0
}
