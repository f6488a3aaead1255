package proxy

import (
	"time"

	"kvgate/internal/quota"
)

// Quotas are the limits on what may be used.
type Quotas struct {
	Limiter *quota.Limiter // required
	// AssumedOutputTokens are charged for the output of a request that doesn't bound it.
	AssumedOutputTokens int64
	// Headers tells clients in x-ratelimit-* what is left.
	Headers bool
}

// quotaNow is the clock of limits. It is not the table's: what was used outlives a gateway's table, and stores share it.
func quotaNow() int64 { return time.Now().UnixNano() }

// charge takes what the request may cost from the limits that it has.
//
//go:noinline
func (x *exchange) charge() *failure {
	q := x.routes.Quotas
	if q == nil || x.query.Target == nil {
		return nil
	}
	now := quotaNow()
	x.charged.Settle(quota.Cost{}, false, now) // of a model that it has fallen back from
	x.charged.Reset()                          // … or was refused
	x.quotaAt = now
	r := q.Limiter.Take(&x.charged, x.caller, x.caller.TenantName(), x.query.Target, x.estimate(q), now)
	if r == nil {
		return nil
	}
	return quotaFailure(r)
}

func quotaFailure(r *quota.Refusal) *failure {
	f := &failure{outcome: Quota, message: r.String()}
	if !r.Never {
		f.retryAfterSeconds = max(1, int((r.Wait+time.Second-1)/time.Second))
	}
	return f
}

// estimate is what the request may cost at most, as far as that is known.
func (x *exchange) estimate(q *Quotas) quota.Cost {
	var c quota.Cost
	r := &x.query
	if c.Input = int64(r.PromptTokens); !r.ExactPrompt {
		c.Input = int64(x.pool.Policy.Learner().EstimateTokens(r.Target, int(r.PromptBytes)))
	}
	if x.route.API.Streams() { // those that generate
		if c.Output = int64(r.MaxTokens); c.Output == 0 {
			c.Output = q.AssumedOutputTokens
		}
		c.Output *= max(1, int64(r.N))
	}
	return c
}

// settle corrects what was charged by what the request has cost.
//
//go:noinline
func (x *exchange) settle(f *failure) {
	if x.charged.Taken() {
		cost, counts := x.cost(f)
		x.charged.Settle(cost, counts, quotaNow())
	}
	x.charged.Reset()
}

// cost is what the request has cost, and whether it was one at all: one that no endpoint took was not.
func (x *exchange) cost(f *failure) (c quota.Cost, counts bool) {
	charged := x.charged.Charged()
	if x.scanning {
		if u := x.usage(); u.HasInput || u.HasOutput {
			if c.Input = u.InputTokens; !u.HasInput {
				c.Input = charged.Input
			}
			// A stream that was cut off after it has told usage on the way has gone on since.
			if c.Output = u.OutputTokens; x.stream != nil && f != nil {
				c.Output = max(c.Output, int64(x.stream.Events()))
			}
			return c, true
		}
	}
	switch {
	case x.sentAt.IsZero(), f != nil && f.unexecuted, x.status == 429, x.status == 503:
		return c, false
	case f != nil && f.outcome == NoEndpoints:
		return c, false
	}
	begun := x.scanning && x.stream != nil && x.stream.Events() > 0
	if f != nil && f.outcome != ClientGone && !begun || f == nil && x.status >= 400 {
		return c, true // it came to nothing, and not through the client
	}
	c.Input = charged.Input
	switch {
	case x.scanning && x.stream != nil:
		// Cut off: servers send an event per token, or one for several.
		c.Output = int64(x.stream.Events())
	case x.route.API.Streams():
		// Nobody knows: what was charged stays, so that going away in time is no way around a limit.
		c.Output = charged.Output
	}
	return c, true
}

// appendQuota appends what is left of the request's limits.
func (x *exchange) appendQuota(b []byte) []byte {
	if q := x.routes.Quotas; q != nil && q.Headers && x.charged.Active() {
		b = x.charged.AppendHeaders(b, x.quotaAt)
	}
	return b
}
