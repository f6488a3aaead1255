package metrics

var _ = register(Dialect{
	Name:   "tgi",
	Doc:    "Text Generation Inference, and IBM's TGIS adapter on vLLM.",
	Paths:  []string{"/metrics"},
	Detect: []string{"tgi_queue_size", "tgi_batch_current_size"},

	Running: gauge("tgi_batch_current_size"),
	Waiting: gauge("tgi_queue_size"),
	// From v3 on the batch's token limit is the KV space.
	KVUsage:  ratio(gauge("tgi_batch_current_max_tokens"), gauge("tgi_batch_max_total_tokens")),
	KVTokens: gauge("tgi_batch_max_total_tokens"),

	PromptTokens:     []string{"tgi_request_input_length_sum"},
	GenerationTokens: []string{"tgi_request_generated_tokens_sum"},
})
