package metrics

var _ = register(ray())

// ray adds up all replicas on the page: Ray's node exporter lists each replica of its node, under no address of its own.
func ray() Dialect {
	d := vllm("ray", "Ray Serve LLM: vLLM's series as Ray's node exporter renames them.", "ray_vllm_", "ray_vllm:")
	d.Engine = []string{"ReplicaId", "engine"}
	return d
}
