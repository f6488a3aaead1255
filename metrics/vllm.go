package metrics

var _ = register(vllm("vllm", "vLLM from 0.5 on, with the V0 or V1 engine and the Python or Rust front end.", "vllm:"))

// vllm is the dialect of vLLM and of what renames its series: prefixes are tried in their order. Names changed as follows:
// kv_cache_usage_perc replaced gpu_cache_usage_perc in 0.9.2, num_requests_swapped went with the V0 engine,
// kv_cache_size_tokens came in 2026-06. Both usages are ratios in spite of their names.
func vllm(name, doc string, prefixes ...string) Dialect {
	each := func(t func(prefix string) term) term {
		var terms []term
		for _, p := range prefixes {
			terms = append(terms, t(p))
		}
		return first(terms...)
	}
	gaugeOf := func(family string) term {
		return each(func(p string) term { return gauge(p + family) })
	}
	names := func(families ...string) (n []string) {
		for _, p := range prefixes {
			for _, f := range families {
				n = append(n, p+f)
			}
		}
		return n
	}
	cacheInfo := func(label string) term {
		return each(func(p string) term { return infoLabel(p+"cache_config_info", label) })
	}
	return Dialect{
		Name:   name,
		Doc:    doc,
		Paths:  []string{"/metrics"},
		Detect: names("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
		Model:  []string{"model_name"},
		Engine: []string{"engine"},

		Running: gaugeOf("num_requests_running"),
		Waiting: gaugeOf("num_requests_waiting"),
		Swapped: gaugeOf("num_requests_swapped"),
		Deferred: each(func(p string) term {
			return labelled(p+"num_requests_waiting_by_reason", "reason", "deferred")
		}),
		KVUsage: first(gaugeOf("kv_cache_usage_perc"), gaugeOf("gpu_cache_usage_perc")),
		Awake: each(func(p string) term {
			return labelled(p+"engine_sleep_state", "sleep_state", "awake")
		}),
		BlockSize: cacheInfo("block_size"),
		Blocks:    cacheInfo("num_gpu_blocks"),
		KVTokens:  cacheInfo("kv_cache_size_tokens"),

		Adapters: adapterSource{
			Info:    names("lora_requests_info"),
			Running: "running_lora_adapters",
			Waiting: "waiting_lora_adapters",
			Max:     "max_lora",
		},

		PromptTokens:      names("prompt_tokens_total"),
		GenerationTokens:  names("generation_tokens_total"),
		PrefixHitTokens:   names("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
		PrefixQueryTokens: names("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
		Preemptions:       names("num_preemptions_total"),
	}
}
