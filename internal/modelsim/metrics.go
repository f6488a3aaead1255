package modelsim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// pageState is what /metrics shows beyond the engine's own counters.
type pageState struct {
	ttft, itl, e2e, queue         histogram
	promptTokens, generatedTokens histogram

	byStop, byLength, aborted, errors uint64

	lora   []loraSeries // every label set ever seen, as in vLLM
	gauges sglangGauges
	run    []int32
	flight []int32
}

// loraSeries is one label set of vllm:lora_requests_info and when it last held.
type loraSeries struct {
	adapters string
	at       time.Time
}

type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds
	sum    float64
	total  uint64
}

func (h *histogram) observe(v float64) {
	i, _ := slices.BinarySearch(h.bounds, v)
	h.counts[i]++
	h.sum += v
	h.total++
}

func (p *pageState) init() {
	set := func(h *histogram, bounds ...float64) {
		*h = histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
	}
	set(&p.ttft, 0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
	set(&p.itl, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
	long := []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	set(&p.e2e, long...)
	set(&p.queue, long...)
	tokens := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	set(&p.promptTokens, tokens...)
	set(&p.generatedTokens, tokens...)
}

// maxLoraSeries bounds what a server with churning adapters remembers.
const maxLoraSeries = 4096

// adapterInfo stamps the series of the adapters in flight, as vLLM does after
// every step (since 0.12 both labels list all of them).
func (s *pageState) adapterInfo(p *process) {
	if p.s.opt.MaxLoras == 0 {
		return
	}
	s.run, s.flight = p.eng.AppendAdapters(s.run[:0], s.flight[:0])
	names := make([]string, len(s.flight))
	for i, n := range s.flight {
		names[i] = p.names[n]
	}
	slices.Sort(names)
	key := strings.Join(names, ",")
	now := time.Now()
	for i := range s.lora {
		if s.lora[i].adapters == key {
			s.lora[i].at = now
			return
		}
	}
	if len(s.lora) >= maxLoraSeries {
		s.lora = s.lora[1:]
	}
	s.lora = append(s.lora, loraSeries{key, now})
}

// metricsPage renders /metrics as vLLM's Python front end does: prometheus_client's
// number format, labels sorted by name.
func (p *process) metricsPage() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.eng.Stats()
	w := &pageWriter{}
	model := `model_name=` + quoteLabel(p.s.opt.Models[0])
	engine := `engine="0",`
	old := p.s.opt.Dialect == DialectVLLM08
	if old {
		engine = ""
	}
	labels := engine + model
	with := func(extra string) string { // in order of names
		if extra < "model_name" {
			return engine + extra + "," + model
		}
		return labels + "," + extra
	}

	w.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	w.sample("process_start_time_seconds", "", float64(p.started.UnixMicro()/1e4)/100)
	w.family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.")
	w.sample("vllm:num_requests_running", labels, float64(st.Running))
	w.family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.")
	w.sample("vllm:num_requests_waiting", labels, float64(st.Waiting))
	if !old {
		deferred := min(st.WaitingForAdapter, st.Waiting)
		w.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.")
		w.sample("vllm:num_requests_waiting_by_reason", with(`reason="capacity"`), float64(st.Waiting-deferred))
		w.sample("vllm:num_requests_waiting_by_reason", with(`reason="deferred"`), float64(deferred))
		w.family("vllm:engine_sleep_state", "gauge", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.")
		for i, state := range []string{"awake", "weights_offloaded", "discard_all"} {
			v := 0.0
			if p.sleep == i {
				v = 1
			}
			w.sample("vllm:engine_sleep_state", with(`sleep_state="`+state+`"`), v)
		}
	}
	if old {
		w.family("vllm:gpu_cache_usage_perc", "gauge", "GPU KV-cache usage. 1 means 100 percent usage.")
		w.sample("vllm:gpu_cache_usage_perc", labels, st.KVUtilization())
	} else {
		w.family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.")
		w.sample("vllm:kv_cache_usage_perc", labels, st.KVUtilization())
	}
	counter := func(name, help string, v uint64) {
		w.family(name, "counter", help)
		w.sample(name, labels, float64(v))
	}
	prefix := "vllm:prefix_cache"
	if old {
		prefix = "vllm:gpu_prefix_cache"
	}
	counter(prefix+"_queries_total", "Prefix cache queries, in terms of number of queried tokens.", st.PrefixQueryTokens)
	counter(prefix+"_hits_total", "Prefix cache hits, in terms of number of cached tokens.", st.PrefixHitTokens)
	counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", st.Preemptions)
	counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", st.PromptTokens)
	counter("vllm:generation_tokens_total", "Number of generation tokens processed.", st.GeneratedTokens)
	w.family("vllm:request_success_total", "counter", "Count of successfully processed requests.")
	for _, r := range []struct {
		reason string
		n      uint64
	}{{"stop", p.page.byStop}, {"length", p.page.byLength}, {"abort", p.page.aborted}, {"error", p.page.errors}} {
		w.sample("vllm:request_success_total", with(`finished_reason="`+r.reason+`"`), float64(r.n))
	}
	for _, h := range []struct {
		name, help string
		h          *histogram
	}{
		{"vllm:request_prompt_tokens", "Number of prefill tokens processed.", &p.page.promptTokens},
		{"vllm:request_generation_tokens", "Number of generation tokens processed.", &p.page.generatedTokens},
		{"vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", &p.page.ttft},
		{"vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", &p.page.itl},
		{"vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", &p.page.e2e},
		{"vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &p.page.queue},
	} {
		w.histogram(h.name, h.help, labels, with, h.h)
	}
	if p.s.opt.MaxLoras > 0 {
		w.family("vllm:lora_requests_info", "gauge", "Running stats on lora requests.")
		for _, l := range p.page.lora {
			w.sample("vllm:lora_requests_info", fmt.Sprintf(`max_lora="%d",running_lora_adapters=%s,waiting_lora_adapters=%s`,
				p.s.opt.MaxLoras, quoteLabel(l.adapters), quoteLabel(l.adapters)), float64(l.at.UnixMicro())/1e6)
		}
	}
	w.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	info := fmt.Sprintf(`block_size="%d",cache_dtype="auto",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",`+
		`is_attention_free="False",kv_cache_max_concurrency="%.2f",kv_cache_memory_bytes="None",kv_cache_size_tokens="%d",`+
		`mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="%d",num_gpu_blocks_override="None",`+
		`prefix_caching_hash_algo="sha256",sliding_window="None",user_specified_block_size="False"`,
		st.KVBlockTokens, float64(p.eng.KVTokens())/float64(p.s.maxModelTokens), p.eng.KVTokens(), st.KVBlocks)
	if old {
		info = fmt.Sprintf(`block_size="%d",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="%d",sliding_window="None"`,
			st.KVBlockTokens, st.KVBlocks)
	}
	w.sample("vllm:cache_config_info", info, 1)
	return w.b
}

type pageWriter struct{ b []byte }

func (w *pageWriter) family(name, kind, help string) {
	w.b = fmt.Appendf(w.b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

func (w *pageWriter) sample(name, labels string, v float64) {
	w.b = append(w.b, name...)
	if labels != "" {
		w.b = append(append(append(w.b, '{'), labels...), '}')
	}
	w.b = append(append(append(w.b, ' '), pythonFloat(v)...), '\n')
}

// histogram writes h; with adds a label to labels.
func (w *pageWriter) histogram(name, help, labels string, with func(string) string, h *histogram) {
	w.family(name, "histogram", help)
	sum := uint64(0)
	for i, n := range h.counts {
		sum += n
		le := "+Inf"
		if i < len(h.bounds) {
			le = pythonFloat(h.bounds[i])
		}
		w.sample(name+"_bucket", with(`le="`+le+`"`), float64(sum))
	}
	w.sample(name+"_count", labels, float64(h.total))
	w.sample(name+"_sum", labels, h.sum)
}

// pythonFloat formats v as prometheus_client for Python does.
func pythonFloat(v float64) string {
	s := strconv.FormatFloat(v, 'f', -1, 64)
	dot := strings.IndexByte(s, '.')
	if dot < 0 {
		dot = len(s)
		s += ".0"
	}
	if v > 0 && dot > 6 {
		return strings.TrimRight(s[:1]+"."+s[1:dot]+s[dot+1:], "0.") + "e+0" + strconv.Itoa(dot-1)
	}
	return s
}

// quoteLabel quotes a label value.
func quoteLabel(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`).Replace(s) + `"`
}
