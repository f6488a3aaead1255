package gateway

import (
	"fmt"
	"strings"

	"kvgate/internal/names"
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
)

// Explain tells how a request with this body to this path would be decided now. It books nothing.
func (g *Gateway) Explain(path string, body []byte) (scoring.Explanation, error) {
	return g.decides.Load().explain(g.table.Load(), g.now(), path, body, g.handler)
}

// Explain tells how a request with this body to this path is decided on s at now by its pool's policy, with no rules or
// aliases; a pool without a policy is an error.
func Explain(s *pool.Snapshot, now pool.Instant, path string, body []byte, policy func(pool string) *scoring.Policy) (scoring.Explanation, error) {
	d := &decider{policies: make(map[string]*scoring.Policy)}
	for i := range s.Pools {
		d.policies[s.Pools[i].Name] = policy(s.Pools[i].Name)
	}
	return d.explain(s, now, path, body, nil)
}

// explain tells how a request with this body to this path, and no header fields, is decided on s at now, and whether it
// waits in h, which may be nil.
func (d *decider) explain(s *pool.Snapshot, now pool.Instant, path string, body []byte, h *proxy.Handler) (scoring.Explanation, error) {
	route, ok := openai.FindRoute([]byte("POST"), []byte(path))
	if !ok || route.Kind != openai.KindJSON {
		return scoring.Explanation{}, fmt.Errorf("path %s: nothing is decided there; try /v1/chat/completions", path)
	}
	var peek openai.Request
	if err := openai.Peek(route.API, body, &peek); err != nil {
		return scoring.Explanation{}, err
	}
	nq := proxy.NameQuery(peek.Model, []byte(path), &peek.Facts)
	named, steps := d.names.Explain(s, &nq)
	if named.Target == nil && named.HasFallback() {
		q := nq
		if d.names.FallBack(&named, s, &q) {
			steps = append(steps, names.Step{Name: string(peek.Model), By: names.FellBack.String(), To: named.Target.Name})
		}
	}
	target := named.Target
	if target == nil {
		err := fmt.Errorf("model %q: nobody serves it; kvgate models lists what is served", peek.Model)
		if named.Wanted != "" {
			err = fmt.Errorf("model %q: it stands for %q, and nobody serves that; kvgate models lists what is served", peek.Model, named.Wanted)
		}
		return scoring.Explanation{}, err
	}
	name := s.Pools[target.Pool].Name
	p := d.policy(&named, name)
	if p == nil {
		return scoring.Explanation{}, fmt.Errorf("pool %s is being set up; try again", name)
	}
	var q scoring.Request
	proxy.FillQuery(&q, &peek.Facts, body, target, p, nil)
	x := p.Explain(&q, s, now)
	x.Pool = name
	if h != nil {
		x.Waits, x.Waiting = h.Waits(name, &q, s, now)
	}
	x.FallsBack = d.fallsBack(&named, s, now, &nq, &peek.Facts, body)
	if len(steps) != 1 || steps[0].By != names.Served.String() {
		x.Asked, x.Resolved = string(peek.Model), describe(steps)
	}
	return x, nil
}

// fallsBack lists the models of the chain behind named that may take the request.
func (d *decider) fallsBack(named *names.Route, s *pool.Snapshot, now pool.Instant, nq *names.Request, facts *openai.Facts, body []byte) (out []scoring.Fallback) {
	next := *named
	for next.HasFallback() && d.names.FallBack(&next, s, nq) {
		f := scoring.Fallback{Model: next.Target.Name, Pool: s.Pools[next.Target.Pool].Name}
		if p := d.policy(&next, f.Pool); p != nil {
			var q scoring.Request
			proxy.FillQuery(&q, facts, body, next.Target, p, nil)
			f.Chosen = p.Explain(&q, s, now).Chosen
		}
		out = append(out, f)
	}
	return out
}

// describe tells the steps from a name to a model.
func describe(steps []names.Step) (out []string) {
	for _, s := range steps {
		var b strings.Builder
		fmt.Fprintf(&b, "%s: %s", s.Name, s.By)
		if s.Rule != nil {
			fmt.Fprintf(&b, " names.rules[%d]", *s.Rule)
		}
		if s.To != s.Name {
			fmt.Fprintf(&b, " → %s", s.To)
		}
		if s.Share > 0 {
			fmt.Fprintf(&b, " (%.3g%% of requests", 100*s.Share)
			for _, o := range s.Others {
				fmt.Fprintf(&b, "; %s has weight %g", o.Model, o.Weight)
			}
			b.WriteByte(')')
		}
		out = append(out, b.String())
	}
	return out
}
