package modelsim

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

const metricsContentType = "text/plain; version=1.0.0; charset=utf-8"

// version is the vLLM whose surface this is.
const version = "0.26.0"

// manage answers everything that is not inference.
func (x *exchange) manage() error {
	path := x.r.URL.Path
	if path == "/metrics" {
		if !x.metricsFault() {
			x.w.Header().Set("Content-Type", metricsContentType)
			x.w.Write(x.s.surface.page(x.p))
		}
		return nil
	}
	if err := x.beforeHeaders(); err != nil {
		return err
	}
	if x.r.Method+" "+path == "GET /v1/models" {
		return x.json(http.StatusOK, x.models())
	}
	return x.s.surface.manage(x)
}

// alive answers a look at the server's health.
func (x *exchange) alive(ok bool) error {
	x.w.Header().Set("Content-Length", "0")
	if !ok {
		x.w.WriteHeader(http.StatusServiceUnavailable)
	}
	return nil
}

// vllmManage has vLLM's own routes.
func (x *exchange) vllmManage() error {
	path := x.r.URL.Path
	switch x.r.Method + " " + path {
	case "GET /health", "GET /ping", "POST /ping":
		return x.alive(!x.p.isDead())
	case "GET /version":
		return x.json(http.StatusOK, `{"version":"`+version+`"}`)
	case "GET /load":
		x.p.mu.Lock()
		n := len(x.p.calls)
		x.p.mu.Unlock()
		return x.json(http.StatusOK, fmt.Sprintf(`{"server_load":%d}`, n))
	case "GET /is_sleeping":
		x.p.mu.Lock()
		asleep := x.p.sleep > 0
		x.p.mu.Unlock()
		return x.json(http.StatusOK, fmt.Sprintf(`{"is_sleeping":%t}`, asleep))
	case "POST /sleep":
		level, err := strconv.Atoi(x.r.URL.Query().Get("level"))
		if err != nil {
			level = 1
		}
		x.s.Sleep(level)
		return nil
	case "POST /wake_up":
		x.s.Wake()
		return nil
	case "POST /reset_prefix_cache":
		x.p.mu.Lock()
		x.p.eng.ResetPrefixCache()
		x.p.mu.Unlock()
		return nil
	}
	if x.s.opt.MaxLoras > 0 && !x.s.opt.NoRuntimeLoRA {
		switch x.r.Method + " " + path {
		case "POST /v1/load_lora_adapter":
			return x.loadAdapter()
		case "POST /v1/unload_lora_adapter":
			return x.unloadAdapter()
		}
	}
	return x.json(http.StatusNotFound, `{"detail":"Not Found"}`)
}

// models is /v1/models: a card for each name of the base model, then the
// adapters.
func (x *exchange) models() string {
	now := time.Now().Unix()
	root := x.s.surface.root + x.s.opt.Models[0]
	var cards []string
	card := func(id, root, parent, length string) {
		cards = append(cards, fmt.Sprintf(`{"id":%s,"object":"model","created":%d,"owned_by":"%s","root":%s,"parent":%s,"max_model_len":%s,"permission":[{"id":"modelperm-%016x","object":"model_permission","created":%d,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`,
			quote(id), now, x.s.surface.owner, quote(root), parent, length, mix(x.s.sequence.Add(1)), now))
	}
	for _, name := range x.s.opt.Models {
		card(name, root, "null", strconv.Itoa(x.s.maxModelTokens))
	}
	x.p.mu.Lock()
	adapters := slices.Clone(x.p.adapters)
	x.p.mu.Unlock()
	for _, a := range adapters {
		card(a.name, a.path, quote(x.s.opt.Models[0]), "null")
	}
	return `{"object":"list","data":[` + strings.Join(cards, ",") + "]}"
}

// loadAdapter is vLLM's POST /v1/load_lora_adapter.
func (x *exchange) loadAdapter() error {
	if err := x.readBody(); err != nil {
		return err
	}
	if err := x.parseBody(); err != nil {
		return err
	}
	var name, path string
	var inPlace bool
	if err := x.fieldsInto("lora_name", &name, "lora_path", &path, "load_inplace", &inPlace); err != nil {
		return err
	}
	invalid := func(format string, args ...any) error {
		return &apiError{http.StatusBadRequest, "InvalidUserInput", fmt.Sprintf(format, args...), ""}
	}
	if name == "" || path == "" {
		return invalid("Both 'lora_name' and 'lora_path' must be provided.")
	}
	if root := x.s.opt.AdapterRoot; root != "" && !strings.HasPrefix(path, root) {
		// vLLM looks for the name first, and then in vain for a file or a repository.
		return &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("Loading lora %s failed: No adapter found for %s", name, path), ""}
	}
	x.p.mu.Lock()
	if old, ok := x.p.adapter(name); ok {
		if !inPlace {
			x.p.mu.Unlock()
			return invalid("The lora adapter '%s' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.", name)
		}
		x.p.remove(old.name)
	}
	number := x.p.register(name, path)
	// vLLM loads it into the engine before it answers.
	d := x.p.eng.LoadAdapter(number, x.p.now())
	x.p.mu.Unlock()
	if err := x.pauseFor(time.Duration(float64(d) / x.s.opt.Speedup)); err != nil {
		return err
	}
	return x.text("Success: LoRA adapter '" + name + "' added successfully.")
}

// unloadAdapter is POST /v1/unload_lora_adapter. As in vLLM it only forgets the
// name; the weights stay until they are evicted, running requests go on.
func (x *exchange) unloadAdapter() error {
	if err := x.readBody(); err != nil {
		return err
	}
	if err := x.parseBody(); err != nil {
		return err
	}
	var name string
	if err := x.field("lora_name", &name); err != nil {
		return err
	}
	if name == "" {
		return &apiError{http.StatusBadRequest, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.", ""}
	}
	x.p.mu.Lock()
	ok := x.p.remove(name)
	x.p.mu.Unlock()
	if !ok {
		return &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The lora adapter '%s' cannot be found.", name), ""}
	}
	return x.text("Success: LoRA adapter '" + name + "' removed successfully.")
}

func (p *process) remove(name string) bool {
	n := len(p.adapters)
	p.adapters = slices.DeleteFunc(p.adapters, func(a adapter) bool { return a.name == name })
	return len(p.adapters) < n
}

// text answers as FastAPI's Response does with a string: no content type.
func (x *exchange) text(s string) error {
	x.w.Header()["Content-Type"] = nil
	x.w.Header().Set("Content-Length", strconv.Itoa(len(s)))
	_, err := x.w.Write([]byte(s))
	return err
}
