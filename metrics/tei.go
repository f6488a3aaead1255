package metrics

var _ = register(Dialect{
	Name:   "tei",
	Doc:    "Text Embeddings Inference: a queue and nothing else.",
	Paths:  []string{"/metrics"},
	Detect: []string{"te_queue_size"},

	Waiting: gauge("te_queue_size"),
})
