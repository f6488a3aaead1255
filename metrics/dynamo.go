package metrics

var _ = register(dynamo())

// dynamo reads a Dynamo front end, which is a router of its own and one endpoint to us, and a Dynamo worker, which passes
// its engine's series through.
func dynamo() Dialect {
	d := Dialect{
		Name:  "dynamo",
		Doc:   "NVIDIA Dynamo: a front end with the workers behind it, or one worker (on DYN_SYSTEM_PORT, as a metrics URL).",
		Paths: []string{"/metrics"},
		Detect: []string{
			"dynamo_frontend_inflight_requests", "dynamo_frontend_queued_requests", "dynamo_component_gpu_cache_usage_percent",
			"dynamo_component_total_blocks",
		},
		Model: []string{"model", "model_name"},

		Running: gauge("dynamo_frontend_inflight_requests"),
		Waiting: gauge("dynamo_frontend_queued_requests"),
		KVUsage: gauge("dynamo_component_gpu_cache_usage_percent"), // a ratio
		// Of one worker. How full the workers are can't be told: active blocks leave out those of prefill.
		BlockSize: gauge("dynamo_frontend_model_kv_cache_block_size"),
		Blocks:    first(gauge("dynamo_frontend_model_total_kv_blocks"), gauge("dynamo_component_total_blocks")),
		Workers:   labelOf{"dynamo_frontend_worker_active_decode_blocks", "worker_id"},

		Adapters: adapterSource{Named: []labelOf{{"dynamo_frontend_lora_active_requests", "lora"}}},
	}
	d.passThrough(vllm("", "", "vllm:"))
	d.passThrough(*sglang)
	d.passThrough(*trtllm)
	return d
}
