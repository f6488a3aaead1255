package proxy

import (
	"cmp"
	"fmt"

	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
)

// An Inquiry is a request that somebody wants to know the way of, without sending it.
type Inquiry struct {
	Path string
	Head []byte // header lines, each ending with CR LF; credentials in it are not kept
	Body []byte
	// Key is the name of a credential, for who doesn't have the credential itself: as if the request had come with it.
	Key string
}

// namer is an Authorizer that knows credentials by their names.
type namer interface {
	Named(key string) *caller.Caller
}

// Explain tells how a request would be handled now: by the methods that handle requests, on an exchange of its own. It sends,
// books, charges and remembers nothing.
func (h *Handler) Explain(in *Inquiry) (e scoring.Explanation, err error) {
	x := newExchange(h)
	x.routes, x.peek, x.facts.raw = h.routes.Load(), new(openai.Request), in.Head
	x.facts.target = []byte(in.Path)
	x.path = x.facts.target
	route, ok := openai.FindRoute([]byte("POST"), x.path)
	if !ok || route.Kind != openai.KindJSON {
		return e, fmt.Errorf("path %s: nothing is decided there; try /v1/chat/completions", in.Path)
	}
	x.route = route
	who := &scoring.CallerExplanation{}
	if f, err := x.inquirer(in.Key, who); err != nil || f != nil {
		return scoring.Explanation{Refused: refusal(f)}, err
	}
	if err := openai.Peek(route.API, in.Body, x.peek); err != nil {
		return e, err
	}
	x.body = requestBody{lent: in.Body, n: len(in.Body)}
	x.bodyLen, x.wantsStream = len(in.Body), x.peek.Stream

	x.resolveName()
	var steps []names.Step
	if len(x.model) > 0 {
		q := x.nameQuery()
		x.named, steps = x.routes.Names.Explain(x.snapshot, &q)
	}
	f := x.useTarget()
	for f != nil && x.fallBack(f) {
		steps = append(steps, names.Step{Name: text(x.model), By: names.FellBack.String(), To: x.named.Target.Name})
		f = x.useTarget()
	}
	defer func() {
		e.Asked = string(x.model)
		for i := range steps {
			e.Resolved = append(e.Resolved, steps[i].String())
		}
		if who.Class = x.class.String(); who.Key != "" || who.Tenant != "" || who.Note != "" || x.class != caller.Normal {
			e.Caller = who
		}
	}()
	if f != nil {
		e.Refused = refusal(f)
		return e, nil
	}
	now := h.opts.Now()
	if a := x.pool.admitter; a != nil {
		x.callerFromHeaders(a.o.Load())
		who.Tenant = x.tenant
	}
	limits, refused, err := x.look()
	if err != nil {
		return e, err
	}
	e = x.pool.Policy.Explain(&x.query, x.snapshot, now)
	e.Pool, e.Limits = x.pool.Name, limits
	e.Refused = refusal(refused)
	if x.pinned != nil {
		e.Pinned = x.pinned.ID
		e.Choose(x.pinned.ID)
	}
	if refused == nil && x.pinned == nil {
		e.Waits, e.Waiting = x.waits(now)
	}
	e.FallsBack = x.fallsBack(now)
	return e, nil
}

// inquirer finds out who asks: whose credential is in the header, or is named; nobody in particular without one.
func (x *exchange) inquirer(key string, who *scoring.CallerExplanation) (*failure, error) {
	switch a, _ := x.routes.Auth.(namer); {
	case x.routes.Auth == nil && key != "":
		return nil, fmt.Errorf("key %s: the gateway has no auth, so it knows no keys", key)
	case x.routes.Auth == nil:
		return nil, nil
	case key != "":
		if a == nil {
			return nil, fmt.Errorf("key %s: this gateway knows no keys by name", key)
		}
		c := a.Named(key)
		if c == nil {
			return nil, fmt.Errorf("key %s: there is none of that name, or it has expired", key)
		}
		x.caller, x.tenant, x.class = c, c.Tenant, c.Class
	case x.Field("Authorization") == nil && x.Field("x-api-key") == nil && x.Field("api-key") == nil:
		who.Note = "no key was given: what keys may use, and their limits, were not looked at"
		return nil, nil
	default:
		if f := x.authenticate(); f != nil {
			return f, nil
		}
	}
	who.Key, who.Tenant = x.caller.Key, x.caller.Tenant
	return nil, nil
}

// look tells of the limits that the request has, and whether it would be refused for one.
func (x *exchange) look() (out []scoring.LimitExplanation, f *failure, err error) {
	q := x.routes.Quotas
	if q == nil || x.routes.Auth != nil && x.caller == nil {
		return nil, nil, nil
	}
	states, err := q.Limiter.Look(x.caller, x.caller.TenantName(), x.query.Target, x.estimate(q), quotaNow())
	if err != nil && q.Limiter.Closed() {
		return nil, nil, fmt.Errorf("the store of quotas can't be asked, so that requests are refused: %w", err)
	}
	for i := range states {
		s := &states[i]
		l := scoring.LimitExplanation{Limit: s.String(), Of: s.Limit, Used: s.Used, Asked: s.Asked, Refused: s.Why != nil}
		if s.Why != nil {
			no := quotaFailure(s.Why)
			l.RetryAfterSeconds = no.retryAfterSeconds
			f = cmp.Or(f, no)
		}
		out = append(out, l)
	}
	return out, f, nil
}

// waits reports whether the request would wait for room at now, and how many do.
func (x *exchange) waits(now pool.Instant) (waits bool, waiting int) {
	a := x.pool.admitter
	if a == nil {
		return false, 0
	}
	o := a.o.Load()
	waiting = a.queue.Waiting()
	switch room := x.pool.Policy.Room(&x.query, x.snapshot, now, &o.Limits); {
	case o.off, o.unlimited && room != scoring.Nobody:
		return false, waiting
	case room == scoring.Saturated, room == scoring.NoSlot:
		return true, waiting
	case room == scoring.Nobody:
		return o.EndpointWait > 0 || x.loadable(), waiting
	}
	return waiting > 0, waiting
}

// fallsBack lists the models of the request's chain that may still take it.
func (x *exchange) fallsBack(now pool.Instant) (out []scoring.Fallback) {
	for next := x.named; next.HasFallback(); {
		q := x.nameQuery()
		if !x.routes.Names.FallBack(&next, x.snapshot, &q) {
			break
		}
		y := newExchange(x.h)
		y.routes, y.snapshot, y.named = x.routes, x.snapshot, next
		f := scoring.Fallback{Model: next.Target.Name, Pool: x.snapshot.Pools[next.Target.Pool].Name}
		if y.usePool(f.Pool) == nil {
			FillQuery(&y.query, &x.peek.Facts, x.body.bytes(), next.Target, y.pool.Policy, nil)
			f.Chosen = y.pool.Policy.Explain(&y.query, x.snapshot, now).Chosen
		}
		out = append(out, f)
	}
	return out
}

// refusal is f as the client is told it; nil is nil.
func refusal(f *failure) *scoring.Refusal {
	if f == nil {
		return nil
	}
	return &scoring.Refusal{Status: f.outcome.Status(), Code: f.outcome.String(), Message: f.message, RetryAfterSeconds: f.retryAfterSeconds}
}
