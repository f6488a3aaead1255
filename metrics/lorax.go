package metrics

var _ = register(Dialect{
	Name:   "lorax",
	Doc:    "LoRAX. It names no adapters: any id may be asked for, and is loaded then.",
	Paths:  []string{"/metrics"},
	Detect: []string{"lorax_queue_length", "lorax_batch_current_size"},

	Running: gauge("lorax_batch_current_size"),
	Waiting: gauge("lorax_queue_length"),

	PromptTokens: []string{"lorax_request_input_length_sum"},
})
