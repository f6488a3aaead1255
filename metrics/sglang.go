package metrics

var sglang = register(Dialect{
	Name:  "sglang",
	Doc:   "SGLang, started with --enable-metrics; also its /v1/loads?format=prometheus as a metrics URL.",
	Paths: []string{"/metrics"},
	Detect: []string{
		"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang_num_running_reqs",
	},
	Model:  []string{"model_name", "name"}, // "name" before 0.3.5
	Engine: []string{"dp_rank"},
	Blank:  []string{"priority"}, // priority scheduling repeats totals split by priority

	Running: first(gauge("sglang:num_running_reqs"), gauge("sglang_num_running_reqs")),
	// The queue leaves out requests that wait between prefill and decode servers or for their grammar.
	Waiting: first(gauge("sglang:num_queue_reqs"), gauge("sglang_num_waiting_reqs")),
	PDQueued: sum(
		first(gauge("sglang:num_prefill_bootstrap_queue_reqs"), gauge("sglang:num_prefill_prealloc_queue_reqs")),
		gauge("sglang:num_prefill_inflight_queue_reqs"),
		gauge("sglang:num_decode_prealloc_queue_reqs"),
		gauge("sglang:num_decode_transfer_queue_reqs"),
	),
	Pending: first(gauge("sglang:num_grammar_queue_reqs"), gauge("sglang_queues_grammar")),
	KVUsage: first(gauge("sglang:token_usage"), gauge("sglang_token_usage")),
	// cache_config_info existed from 2026-02 to 2026-05 only, without labels for model or rank.
	BlockSize: first(gauge("sglang:page_size"), infoLabel("sglang:cache_config_info", "page_size")),
	Blocks:    first(gauge("sglang:num_pages"), infoLabel("sglang:cache_config_info", "num_pages")),
	KVTokens:  first(gauge("sglang:max_total_num_tokens"), gauge("sglang_max_total_num_tokens")),

	SlotsUsed:  first(gauge("sglang:lora_pool_slots_used"), gauge("sglang_lora_slots_used")),
	SlotsTotal: first(gauge("sglang:lora_pool_slots_total"), gauge("sglang_lora_slots_total")),

	PromptTokens:      []string{"sglang:prompt_tokens_total"},
	GenerationTokens:  []string{"sglang:generation_tokens_total"},
	PrefixHitTokens:   []string{"sglang:cached_tokens_total"}, // split by where the tokens were cached
	PrefixQueryTokens: []string{"sglang:prompt_tokens_total"},
	Preemptions:       []string{"sglang:num_retracted_requests_total"},
})
