package metrics

var _ = register(nim())

// nim reads NIM 1.x, whose series have no prefix, and what 2.x passes through from the engine behind it.
func nim() Dialect {
	d := Dialect{
		Name:   "nim",
		Doc:    "NVIDIA NIM: 1.x by its own names, later ones by those of vLLM or SGLang inside.",
		Paths:  []string{"/v1/metrics", "/metrics"}, // the latter on very old ones
		Detect: []string{"num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"},
		Model:  []string{"model_name"},

		Running: gauge("num_requests_running"),
		Waiting: gauge("num_requests_waiting"),
		KVUsage: gauge("gpu_cache_usage_perc"), // a ratio

		PromptTokens:     []string{"prompt_tokens_total"},
		GenerationTokens: []string{"generation_tokens_total"},
	}
	d.passThrough(vllm("", "", "vllm:"))
	d.passThrough(*sglang)
	return d
}
