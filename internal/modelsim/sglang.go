package modelsim

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"
)

// sglangVersion is the SGLang whose surface this is. Its rules and words are those of its sources: srt/lora/lora_manager.py,
// srt/managers/tokenizer_manager.py and tokenizer_communicator_mixin.py, srt/entrypoints/http_server.py.
const sglangVersion = "0.5.15"

var sglangSurface = surface{
	owner: "sglang",
	page:  (*process).sglangPage, step: (*process).sglangStep,
	keyed:  func(path string) bool { return !strings.HasPrefix(path, "/health") && path != "/metrics" },
	manage: (*exchange).sglangManage, resolve: (*exchange).sglangResolve,
	tooLong: func(longest, n, limit int) *apiError {
		if limit == 0 {
			return badRequest("The input (%d tokens) is longer than the model's context length (%d tokens).", n, longest)
		}
		return badRequest("Requested token count exceeds the model's maximum context length of %d tokens. You requested a total of %d tokens: %d tokens from the input messages and %d tokens for the completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit.", longest, n+limit, n, limit)
	},
	errorBody: sglangError,
}

// sglangError is an error's body: flat, but nested for Responses.
func sglangError(x *exchange, e *apiError) string {
	if strings.HasPrefix(x.r.URL.Path, "/v1/responses") {
		return `{"error":` + e.object() + "}"
	}
	return `{"object":"error",` + e.object()[1:]
}

// Metrics.

// sglangGauges are the gauges as the scheduler last wrote them.
type sglangGauges struct {
	Stats
	slotsUsed int
	at        time.Duration // engine time
	decodes   int           // steps since then
}

// How often SGLang writes its gauges: with each prefill, or --decode-log-interval, or while idle.
const (
	sglangDecodeSteps = 40
	sglangIdle        = 30 * time.Second
)

// sglangStep writes the gauges when SGLang does; they are stale in between.
func (p *process) sglangStep(i StepInfo) {
	g := &p.page.gauges
	if g.decodes++; i.Sequences == i.Decodes && i.Sequences > 0 && g.decodes < sglangDecodeSteps {
		return
	}
	*g = sglangGauges{Stats: p.eng.Stats(), slotsUsed: len(p.eng.lora.gpu), at: i.End}
}

// sglangPage renders /metrics as SGLang does with --enable-metrics: several processes write it, so that there is no start time.
func (p *process) sglangPage() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, st := p.now(), p.eng.Stats()
	g := &p.page.gauges
	if st.Running+st.Waiting == 0 && now-g.at >= sglangIdle {
		*g = sglangGauges{Stats: st, slotsUsed: len(p.eng.lora.gpu), at: now}
	}
	w := &pageWriter{}
	model := `model_name=` + quoteLabel(p.s.opt.Models[0])
	gauge := func(name, help string, v float64) {
		w.family("sglang:"+name, "gauge", help)
		w.sample("sglang:"+name, `engine_type="unified",`+model+`,moe_ep_rank="0",pp_rank="0",tp_rank="0"`, v)
	}
	tokens := func(blocks int) float64 { return float64(blocks * g.KVBlockTokens) }
	gauge("num_running_reqs", "The number of running requests.", float64(g.Running))
	gauge("num_queue_reqs", "The number of requests in the waiting queue.", float64(g.Waiting))
	gauge("num_grammar_queue_reqs", "The number of requests in the grammar waiting queue.", 0)
	gauge("token_usage", "The token usage.", math.Round(100*g.KVUtilization())/100)
	gauge("num_used_tokens", "The number of used tokens.", tokens(g.KVBlocksUsed))
	gauge("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", tokens(g.KVBlocks))
	gauge("page_size", "KV cache page size in tokens.", float64(g.KVBlockTokens))
	gauge("num_pages", "Number of KV cache pages.", float64(g.KVBlocks))
	gauge("context_len", "Maximum context length.", float64(p.s.maxModelTokens))
	gauge("cache_hit_rate", "The prefix cache hit rate.", 0) // what it is on decode steps
	if n := p.s.opt.MaxLoras; n > 0 {
		gauge("lora_pool_slots_used", "Number of LoRA adapter slots currently occupied in GPU memory.", float64(g.slotsUsed))
		gauge("lora_pool_slots_total", "Total number of LoRA adapter slots available (max_loras_per_batch).", float64(n))
		gauge("lora_pool_utilization", "LoRA pool utilization ratio (used/total). 1.0 means pool is full.", float64(g.slotsUsed)/float64(n))
	}
	counter := func(name, help, labels string, v uint64) {
		w.family("sglang:"+name, "counter", help)
		w.sample("sglang:"+name, labels, float64(v))
	}
	counter("prompt_tokens_total", "Number of prefill tokens processed.", model, st.PromptTokens)
	counter("generation_tokens_total", "Number of generation tokens processed.", model, st.GeneratedTokens)
	counter("cached_tokens_total", "Number of cached prompt tokens.", `cache_source="device",`+model, st.PrefixHitTokens)
	counter("num_requests_total", "Number of requests processed.", model, st.Finished+st.Aborted)
	counter("num_aborted_requests_total", "Number of requests aborted.", model, st.Aborted)
	counter("num_retracted_requests_total", "Total number of retracted requests.", model, st.Preemptions)
	with := func(le string) string { return le + "," + model }
	w.histogram("sglang:time_to_first_token_seconds", "Histogram of time to first token in seconds.", model, with, &p.page.ttft)
	w.histogram("sglang:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", model, with, &p.page.itl)
	w.histogram("sglang:e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds", model, with, &p.page.e2e)
	return w.b
}

// Routes.

func (x *exchange) sglangManage() error {
	opt := &x.s.opt
	switch x.r.Method + " " + x.r.URL.Path {
	case "GET /health", "GET /health_generate":
		return x.sglangHealth()
	case "GET /ping", "POST /ping":
		return x.alive(true)
	case "GET /model_info", "GET /get_model_info":
		return x.json(http.StatusOK, fmt.Sprintf(`{"model_path":%s,"tokenizer_path":%[1]s,"is_generation":true,"preferred_sampling_params":null,"weight_version":"default"}`, quote(opt.Models[0])))
	case "GET /server_info", "GET /get_server_info":
		most := "null"
		if opt.MaxCPULoras > 0 {
			most = fmt.Sprint(opt.MaxCPULoras)
		}
		return x.json(http.StatusOK, fmt.Sprintf(`{"model_path":%s,"served_model_name":%[1]s,"enable_lora":%t,"max_loras_per_batch":%d,"max_loaded_loras":%s,"page_size":%d,"max_total_num_tokens":%d,"version":%s}`,
			quote(opt.Models[0]), opt.MaxLoras > 0, opt.MaxLoras, most, x.p.eng.kv.blockTokens, x.p.eng.KVTokens(), quote(sglangVersion)))
	case "GET /flush_cache", "POST /flush_cache":
		x.p.mu.Lock()
		x.p.eng.ResetPrefixCache()
		x.p.mu.Unlock()
		return x.text("Cache flushed.\n")
	case "POST /load_lora_adapter", "POST /unload_lora_adapter":
		if !opt.NoRuntimeLoRA {
			return x.sglangUpdate()
		}
	}
	return x.json(http.StatusNotFound, `{"detail":"Not Found"}`)
}

// sglangHealthTimeout is SGLANG_HEALTH_CHECK_TIMEOUT's default.
const sglangHealthTimeout = 20 * time.Second

// sglangHealth generates a token, behind all that wait.
func (x *exchange) sglangHealth() error {
	r := x.r
	ctx, cancel := context.WithTimeout(r.Context(), sglangHealthTimeout)
	defer cancel()
	x.r = r.WithContext(ctx)
	err := x.prefillOnly(0, "", "", []prompt{textPrompt("health")})
	if r.Context().Err() != nil {
		return errGone
	}
	return x.alive(err == nil)
}

// Adapters.

// sglangResolve finds the adapter behind base:adapter, or lora_path without it. The base isn't looked at, and a name without a
// colon is the base model whatever it says.
func (x *exchange) sglangResolve(model *string, number *int32) error {
	_, name, _ := strings.Cut(*model, ":")
	if name = strings.TrimSpace(name); name == "" {
		if err := x.field("lora_path", &name); err != nil {
			return err
		}
	}
	if *model == "" {
		*model = "default"
	}
	if name == "" {
		return nil
	}
	if x.s.opt.MaxLoras == 0 {
		return badRequest("LoRA adapter '%s' was requested, but LoRA is not enabled. Please launch the server with --enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint.", name)
	}
	for {
		x.p.mu.Lock()
		i := slices.IndexFunc(x.p.adapters, func(a adapter) bool { return a.name == name })
		if i >= 0 { // the least recently used one is first
			a := x.p.adapters[i]
			x.p.adapters = append(slices.Delete(x.p.adapters, i, i+1), a)
			x.p.mu.Unlock()
			*number = a.number
			return nil
		}
		old, evicted := x.p.evicted[name]
		x.p.mu.Unlock()
		if !evicted {
			return badRequest("Got LoRA adapter that has never been loaded: %s\nAll loaded adapters: dict_keys(%s).", name, x.p.adapterNames())
		}
		x.p.updates.Lock()
		message, err := x.sglangLoad(old.name, old.path, old.pinned)
		x.p.updates.Unlock()
		if err != nil {
			return err
		}
		if message != "" && !strings.Contains(message, "already loaded") {
			return badRequest("Failed to implicitly load LoRA adapter %s: %s", name, message)
		}
	}
}

func (p *process) adapterNames() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	for _, a := range p.adapters {
		names = append(names, "'"+a.name+"'")
	}
	return "[" + strings.Join(names, ", ") + "]"
}

// sglangUpdate is POST /load_lora_adapter and /unload_lora_adapter.
func (x *exchange) sglangUpdate() error {
	if err := x.readBody(); err != nil {
		return err
	}
	if err := x.parseBody(); err != nil {
		return err
	}
	var name, path string
	var pinned bool
	if err := x.fieldsInto("lora_name", &name, "lora_path", &path, "pinned", &pinned); err != nil {
		return err
	}
	load := x.r.URL.Path == "/load_lora_adapter"
	if name == "" {
		return missing("lora_name")
	}
	if load && path == "" {
		return missing("lora_path")
	}
	var message string
	var err error
	if x.s.opt.MaxLoras == 0 {
		message = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
	} else {
		x.p.updates.Lock()
		if load {
			message, err = x.sglangLoad(name, path, pinned)
		} else {
			message, err = x.sglangUnload(name)
		}
		x.p.updates.Unlock()
	}
	if err != nil {
		return err
	}
	answer := struct {
		RID     *string           `json:"rid"`
		Success bool              `json:"success"`
		Message *string           `json:"error_message"`
		Loaded  map[string]string `json:"loaded_adapters"`
	}{Success: message == "", Loaded: make(map[string]string)}
	status := http.StatusOK
	if message != "" {
		answer.Message, status = &message, http.StatusBadRequest
	}
	x.p.mu.Lock()
	for _, a := range x.p.adapters {
		answer.Loaded[a.name] = a.path
	}
	x.p.mu.Unlock()
	b, _ := json.Marshal(answer)
	return x.json(status, string(b))
}

// sglangLoad loads an adapter, and unloads the least recently used one if there are more than may be. It returns SGLang's
// message if that can't be. The update lock must be held.
func (x *exchange) sglangLoad(name, path string, pinned bool) (message string, err error) {
	p := x.p
	if root := x.s.opt.AdapterRoot; root != "" && !strings.HasPrefix(path, root) {
		// SGLang takes what is no directory for a repository's name.
		return fmt.Sprintf("Repo id must be in the form 'repo_name' or 'namespace/repo_name': '%s'. Use `repo_type` argument if needed.", path), nil
	}
	p.mu.Lock()
	_, there := p.adapter(name)
	pins := 0
	for _, a := range p.adapters {
		if a.pinned {
			pins++
		}
	}
	p.mu.Unlock()
	if there {
		return fmt.Sprintf("Failed to load LoRA adapter %s because it is already loaded", name), nil
	}
	if pinned && pins >= x.s.opt.MaxLoras-1 {
		return fmt.Sprintf("Failed to load LoRA adapter %s as a pinned adapter. It is not allowed to pin all slots in the LoRA memory pool to avoid starvation for unpinned adapters and base models. Please increase your `--max-loras-per-batch` or load it as unpinned LoRA adapters.", name), nil
	}
	p.mu.Lock()
	a := adapter{name: name, path: path, pinned: pinned, number: int32(len(p.names))}
	p.names = append(p.names, name)
	d := p.eng.LoadAdapterToHost(a.number)
	p.mu.Unlock()
	if err := x.pauseFor(time.Duration(float64(d) / x.s.opt.Speedup)); err != nil {
		return "", err
	}
	p.mu.Lock()
	p.adapters = append(p.adapters, a)
	delete(p.evicted, name)
	p.mu.Unlock()
	for most := x.s.opt.MaxCPULoras; most > 0; {
		p.mu.Lock()
		over, i := len(p.adapters) > most, slices.IndexFunc(p.adapters, func(a adapter) bool { return !a.pinned })
		var victim adapter
		if over && i >= 0 {
			victim = p.adapters[i]
			p.adapters = slices.Delete(p.adapters, i, i+1)
			if p.evicted == nil {
				p.evicted = make(map[string]adapter)
			}
			p.evicted[victim.name] = victim
		}
		p.mu.Unlock()
		if !over {
			break
		}
		if i < 0 {
			return "Didn't find any LoRA adapters when trying to evict LRU LoRA adapter.", nil
		}
		if err := x.sglangDrop(victim); err != nil {
			return "", err
		}
	}
	return "", nil
}

// sglangUnload forgets an adapter, and waits until the requests for it have ended. The update lock must be held.
func (x *exchange) sglangUnload(name string) (message string, err error) {
	x.p.mu.Lock()
	a, ok := x.p.adapter(name)
	x.p.remove(name)
	delete(x.p.evicted, name)
	x.p.mu.Unlock()
	if !ok {
		return fmt.Sprintf("LoRA with name %s does not exist. Loaded LoRAs: dict_keys(%s)", name, x.p.adapterNames()), nil
	}
	return "", x.sglangDrop(a)
}

// sglangDrop frees an adapter's memory as soon as no request uses it.
func (x *exchange) sglangDrop(a adapter) error {
	for {
		x.p.mu.Lock()
		done := x.p.eng.DropAdapter(a.number)
		x.p.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-x.p.stop:
			return errGone
		default:
		}
		if err := x.pauseFor(time.Millisecond); err != nil {
			return err
		}
	}
}
