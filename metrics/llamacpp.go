package metrics

import "errors"

var llamacpp = register(Dialect{
	Name: "llamacpp",
	Doc:  "llama.cpp's server, started with --metrics. GET /props tells first whether it sleeps, since /metrics would wake it.",

	Paths:  []string{"/metrics"},
	Props:  true,
	Detect: []string{"llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:prompt_tokens_total"},

	Running: gauge("llamacpp:requests_processing"),
	Waiting: gauge("llamacpp:requests_deferred"),    // its queue; it has no other
	KVUsage: gauge("llamacpp:kv_cache_usage_ratio"), // until 2025-05-21

	PromptTokens:     []string{"llamacpp:prompt_tokens_total"},
	GenerationTokens: []string{"llamacpp:tokens_predicted_total"},
})

// Reasons not to touch a page, which say nothing bad of the server.
var (
	errAsleep = errors.New("the server sleeps, and reading its page would wake it")
	errRouter = errors.New("the server routes to others, and has no page of its own")
)

func untouched(err error) bool { return errors.Is(err, errAsleep) || errors.Is(err, errRouter) }
