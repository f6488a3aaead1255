package proxy

import (
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// An Explainer keeps explanations of decisions, for people who ask later.
type Explainer interface {
	// Explain is called before the first endpoint of a request is chosen, with what the choice will be made from. It
	// returns the number under which it keeps an explanation, or 0. It must keep nothing of q, is called by many goroutines
	// at once, delays the request by what it takes, and must not need much stack: streams keep theirs.
	Explain(p *scoring.Policy, q *scoring.Request, s *pool.Snapshot, now pool.Instant) uint64
}

// traced is a request's part in a distributed trace.
type traced struct {
	telemetry.TraceContext
	continued bool // it is the caller's, and so is what comes as tracestate
	attempt   int  // from 0
}

// explain has the decision that is about to be made explained.
func (x *exchange) explain(s *pool.Snapshot, now pool.Instant) {
	if e := x.h.opts.Explainer; e != nil && x.attempt == 0 && x.pinned == nil {
		x.explained = e.Explain(x.pool.Policy, &x.query, s, now)
	}
}

// recordTimes says where the request's time went.
func (x *exchange) recordTimes(r *telemetry.Record) {
	if x.readAt.IsZero() {
		return
	}
	r.ReadSeconds = x.readAt.Sub(x.began).Seconds()
	if !x.firstToken.IsZero() {
		r.FirstByteSeconds = x.firstToken.Sub(x.began).Seconds()
	}
	if x.sentAt.IsZero() {
		return
	}
	r.SentSeconds = x.sentAt.Sub(x.began).Seconds()
	waits := r.QueueSeconds + x.dialing.Seconds()
	for i := range min(x.attempt-1, len(x.attempts)) { // the last one is where it was sent
		waits += x.attempts[i].Seconds
	}
	r.OverheadSeconds = max(0, x.sentAt.Sub(x.readAt).Seconds()-waits)
}
