package metrics

import (
	"encoding/json"
	"fmt"
)

var trtllm = register(Dialect{
	Name: "trtllm",
	Doc:  "trtllm-serve from 1.2 on with return_perf_metrics: true. Its /metrics is never read: that drains what others want to read.",
	// Not /metrics: it is a JSON list that each read takes from.
	Paths:  []string{"/prometheus/metrics"},
	Detect: []string{"trtllm_num_requests_running", "trtllm_kv_cache_utilization"},
	Model:  []string{"model_name"},

	// In the older loop all of it moves only when a request ends.
	Running:   gauge("trtllm_num_requests_running"),
	Waiting:   gauge("trtllm_num_requests_waiting"),
	KVUsage:   first(gauge("trtllm_kv_cache_utilization"), ratio(gauge("trtllm_kv_cache_used_blocks"), gauge("trtllm_kv_cache_max_blocks"))),
	BlockSize: gauge("trtllm_kv_cache_tokens_per_block"),
	Blocks:    gauge("trtllm_kv_cache_max_blocks"),
})

// iterationStats reads the JSON that trtllm-serve has at /metrics: a list of what happened in each iteration since it was
// last read. `auto` sees it once, when it looks for a page there.
func iterationStats(body []byte) (*Raw, error) {
	var list []struct {
		Active  *float64 `json:"numActiveRequests"`
		Queued  *float64 `json:"numQueuedRequests"`
		KVCache *struct {
			Max      *float64 `json:"maxNumBlocks"`
			Used     *float64 `json:"usedNumBlocks"`
			PerBlock *float64 `json:"tokensPerBlock"`
		} `json:"kvCacheStats"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("iteration stats of trtllm-serve: %w", err)
	}
	r := &Raw{Dialect: "trtllm"}
	if len(list) == 0 {
		return r, nil // nobody has asked for anything since, or somebody else read it: unknown
	}
	at := func(v *float64) Value {
		if v == nil || *v < 0 {
			return Value{}
		}
		return known(*v)
	}
	last := list[len(list)-1]
	e := RawEngine{Running: at(last.Active), Waiting: at(last.Queued)}
	if kv := last.KVCache; kv != nil {
		e.BlockSize, e.Blocks = at(kv.PerBlock), at(kv.Max)
		if used := at(kv.Used); used.Known && e.Blocks.V > 0 {
			e.KVUsage = known(used.V / e.Blocks.V)
		}
	}
	r.Engines = []RawEngine{e}
	return r, nil
}
