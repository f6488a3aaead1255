package gateway

import (
	"fmt"

	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
)

// Explain tells how a request with this body to this path would be decided now. It books nothing.
func (g *Gateway) Explain(path string, body []byte) (scoring.Explanation, error) {
	route, ok := openai.FindRoute([]byte("POST"), []byte(path))
	if !ok || route.Kind != openai.KindJSON {
		return scoring.Explanation{}, fmt.Errorf("path %s: nothing is decided there; try /v1/chat/completions", path)
	}
	var peek openai.Request
	if err := openai.Peek(route.API, body, &peek); err != nil {
		return scoring.Explanation{}, err
	}
	s := g.table.Load()
	target := s.Target(peek.Model)
	if target == nil {
		return scoring.Explanation{}, fmt.Errorf("model %q: nobody serves it; see /debug/models", peek.Model)
	}
	name := s.Pools[target.Pool].Name
	policy := (*g.policies.Load())[name]
	if policy == nil {
		return scoring.Explanation{}, fmt.Errorf("pool %s is being set up; try again", name)
	}
	return policy.Explain(Query(&peek.Facts, target), s, g.now()), nil
}

// Query is the little of a request that decisions need to know.
func Query(f *openai.Facts, target *pool.Target) *scoring.Request {
	q := &scoring.Request{
		Target: target, PromptBytes: int32(min(f.PromptBytes(), 1<<30)), N: int32(min(f.Choices(), 1<<16)), Stream: f.Stream,
	}
	if f.PromptIsTokens {
		q.PromptTokens, q.ExactPrompt = int32(min(f.PromptTokens, 1<<30)), true
	}
	if f.HasMaxTokens {
		q.MaxTokens = int32(min(f.MaxTokens, 1<<30))
	}
	for _, key := range [][]byte{f.SessionID, f.PromptCacheKey, f.User} {
		if len(key) > 0 {
			q.Session = pool.HashName(key)
			break
		}
	}
	return q
}
