package gateway

import (
	"fmt"

	"kvgate/openai"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
)

// Explain tells how a request with this body to this path would be decided now. It books nothing.
func (g *Gateway) Explain(path string, body []byte) (scoring.Explanation, error) {
	return Explain(g.table.Load(), g.now(), path, body, func(pool string) *scoring.Policy { return (*g.policies.Load())[pool] })
}

// Explain tells how a request with this body to this path is decided on s at now by its pool's policy; a pool without one
// is an error.
func Explain(s *pool.Snapshot, now pool.Instant, path string, body []byte, policy func(pool string) *scoring.Policy) (scoring.Explanation, error) {
	route, ok := openai.FindRoute([]byte("POST"), []byte(path))
	if !ok || route.Kind != openai.KindJSON {
		return scoring.Explanation{}, fmt.Errorf("path %s: nothing is decided there; try /v1/chat/completions", path)
	}
	var peek openai.Request
	if err := openai.Peek(route.API, body, &peek); err != nil {
		return scoring.Explanation{}, err
	}
	target := s.Target(peek.Model)
	if target == nil {
		return scoring.Explanation{}, fmt.Errorf("model %q: nobody serves it; kvgate models lists what is served", peek.Model)
	}
	name := s.Pools[target.Pool].Name
	p := policy(name)
	if p == nil {
		return scoring.Explanation{}, fmt.Errorf("pool %s is being set up; try again", name)
	}
	var q scoring.Request
	proxy.FillQuery(&q, &peek.Facts, body, target, p, nil)
	return p.Explain(&q, s, now), nil
}
