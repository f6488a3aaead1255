package metrics

var _ = register(vllm("aphrodite", "Aphrodite Engine: vLLM's series under its own prefix.", "aphrodite:"))
