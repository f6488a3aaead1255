package metrics

var triton = register(Dialect{
	Name:  "triton",
	Doc:   "Triton Inference Server with the TensorRT-LLM backend. (Its vLLM backend exports no gauges.)",
	Paths: []string{"/metrics"},
	Ports: []int{8002, 0},
	Detect: []string{
		"nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics", "nv_inference_pending_request_count",
		"nv_inference_request_success",
	},
	// Each model has its own engine and its own KV cache.
	Engine: []string{"model"},

	// 23.11 had neither "waiting" nor "fraction". The counter nv_inference_exec_count is not what runs.
	Running: labelled("nv_trt_llm_request_metrics", "request_type", "scheduled"),
	Waiting: labelled("nv_trt_llm_request_metrics", "request_type", "waiting"),
	Pending: gauge("nv_inference_pending_request_count"),
	KVUsage: first(
		labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
		ratio(
			labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "used"),
			labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),
		),
	),
	BlockSize: labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"),
	Blocks:    labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),
})
