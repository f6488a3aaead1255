package metrics

var _ = register(Dialect{
	Name:   "jetstream",
	Doc:    "JetStream on TPUs.",
	Paths:  []string{"/metrics"},
	Detect: []string{"jetstream_prefill_backlog_size", "jetstream_slots_used_percentage"},
	Model:  []string{"model_name"},
	Engine: []string{"idx"},

	Waiting:  gauge("jetstream_prefill_backlog_size"),
	PDQueued: sum(gauge("jetstream_transfer_backlog_size"), gauge("jetstream_generate_backlog_size")),
	KVUsage:  gauge("jetstream_slots_used_percentage"), // a ratio of decode slots
})
