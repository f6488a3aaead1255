package metrics

var maxServe = register(Dialect{
	Name:   "max",
	Doc:    "Modular MAX, which has its page on port 8001.",
	Paths:  []string{"/metrics"},
	Ports:  []int{8001, 0},
	Detect: []string{"maxserve_num_requests_running", "maxserve_num_requests_queued"},

	Running: gauge("maxserve_num_requests_running"),
	Waiting: sum(gauge("maxserve_num_requests_queued"), gauge("maxserve_num_requests_awaiting_admission")),
	KVUsage: ratio(gauge("maxserve_cache_num_used_blocks"), gauge("maxserve_cache_num_total_blocks")),
	Blocks:  gauge("maxserve_cache_num_total_blocks"), // of a size that it doesn't tell

	Preemptions: []string{"maxserve_cache_preemption_count_total"},
})
