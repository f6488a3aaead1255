package proxy

import "kvgate/openai"

// noSuchPath is what a client is told of a path that isn't served. Slow path.
func noSuchPath(method, path []byte) string {
	const no = "there is no such path; "
	switch string(path) {
	case "/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping", "/-/ready", "/-/healthy":
		return no + "the gateway's health is on its admin listener, at /-/ready and /-/healthy"
	}
	// A base URL without /v1 is the commonest mistake.
	if with := append([]byte("/v1"), path...); len(path) <= maxComparedBytes {
		if route, ok := openai.FindRoute(method, with); ok || route.Allow != "" {
			return no + "did you mean " + string(with) + "?"
		}
		best, least := "", len("/v1")+1
		for _, p := range openai.Paths {
			if d := editDistance(string(path), p); d < least && d <= len(path)/3 {
				best, least = p, d
			}
		}
		if best != "" {
			return no + "did you mean " + best + "?"
		}
	}
	return no + "served are /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/messages, /v1/models and others"
}
