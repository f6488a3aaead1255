package metrics

var _ = register(Dialect{
	Name:   "lmdeploy",
	Doc:    "LMDeploy's api_server, started with --metrics.",
	Paths:  []string{"/metrics"},
	Detect: []string{"lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting"},
	Model:  []string{"model_name"},
	Engine: []string{"engine"},

	Running: gauge("lmdeploy:num_requests_running"),
	Waiting: gauge("lmdeploy:num_requests_waiting"),
	Pending: gauge("lmdeploy:num_api_requests_waiting"),
	KVUsage: gauge("lmdeploy:gpu_cache_usage_perc"), // a ratio
})
