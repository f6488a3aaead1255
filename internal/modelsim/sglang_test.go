package modelsim

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// updated is the answer to a call that loads or unloads an adapter.
type updated struct {
	Success bool              `json:"success"`
	Message *string           `json:"error_message"`
	Loaded  map[string]string `json:"loaded_adapters"`
}

func update(t *testing.T, s *Server, verb, body string) (int, updated) {
	t.Helper()
	resp, text := post(t, s, "/"+verb+"_lora_adapter", body)
	var u updated
	if err := json.Unmarshal([]byte(text), &u); err != nil || u.Success != (u.Message == nil) || u.Success != (resp.StatusCode == 200) {
		t.Errorf("%s %s: %d %s (%v)", verb, body, resp.StatusCode, text, err)
	}
	return resp.StatusCode, u
}

func named(model, more string) string {
	return fmt.Sprintf(`{"model":%q,"max_tokens":3,"messages":[{"role":"user","content":"x y z"}]%s}`, model, more)
}

func TestSGLangAdapters(t *testing.T) {
	s := start(t, Options{Dialect: DialectSGLang, Models: []string{"base"}, MaxLoras: 2, MaxCPULoras: 3, AdapterRoot: "/a"})
	ask := func(body string, status int, want string) {
		t.Helper()
		if resp, text := post(t, s, "/v1/chat/completions", body); resp.StatusCode != status || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s; want %d and %s", body, resp.StatusCode, text, status, want)
		}
	}
	list := func() (names []string) {
		t.Helper()
		var v struct {
			Data []struct {
				ID, Root, Parent string
				MaxModelLen      *int   `json:"max_model_len"`
				OwnedBy          string `json:"owned_by"`
			}
		}
		_, text := get(t, s, "/v1/models")
		if err := json.Unmarshal([]byte(text), &v); err != nil || len(v.Data) == 0 || v.Data[0].ID != "base" || v.Data[0].Root != "base" || v.Data[0].Parent != "" || v.Data[0].MaxModelLen == nil {
			t.Fatalf("list of models: %s", text)
		}
		for _, m := range v.Data[1:] {
			if m.Parent != "base" || m.Root != "/a/"+m.ID || m.MaxModelLen != nil || m.OwnedBy != "sglang" {
				t.Errorf("adapter %+v", m)
			}
			names = append(names, m.ID)
		}
		return names
	}
	loads := func() uint64 { return s.Stats().Engine.AdapterDiskLoads }

	if resp, _ := post(t, s, "/v1/load_lora_adapter", `{"lora_name":"sql","lora_path":"/a/sql"}`); resp.StatusCode != 404 {
		t.Errorf("vLLM's route: %d", resp.StatusCode)
	}
	ask(named("base:sql", ""), 400, `{"object":"error","message":"Got LoRA adapter that has never been loaded: sql`)
	if _, u := update(t, s, "load", `{"lora_name":"sql","lora_path":"/a/sql"}`); !u.Success || u.Loaded["sql"] != "/a/sql" || len(u.Loaded) != 1 {
		t.Errorf("load: %+v", u)
	}
	if _, u := update(t, s, "load", `{"lora_name":"sql","lora_path":"/a/other"}`); u.Success || *u.Message != "Failed to load LoRA adapter sql because it is already loaded" || u.Loaded["sql"] != "/a/sql" {
		t.Errorf("twice: %+v", u)
	}
	if _, u := update(t, s, "load", `{"lora_name":"lost","lora_path":"/b/lost"}`); u.Success || !strings.Contains(*u.Message, "'/b/lost'") {
		t.Errorf("unknown path: %+v", u)
	}
	if resp, text := post(t, s, "/load_lora_adapter", `{"lora_name":"sql"}`); resp.StatusCode != 400 || !strings.HasPrefix(text, `{"object":"error"`) {
		t.Errorf("no path: %d %s", resp.StatusCode, text)
	}
	if loads() != 1 || s.Stats().Engine.AdapterHostLoads != 0 {
		t.Errorf("%+v; want one load from disk", s.Stats().Engine)
	}

	// Only base:adapter and lora_path mean the adapter.
	for _, model := range []string{"sql", "base", "nobody", ""} {
		ask(named(model, ""), 200, `"model":"`+model)
	}
	if n := s.Stats().Engine.AdapterHostLoads; n != 0 {
		t.Errorf("an adapter's own name got it: %d loads", n)
	}
	ask(named("base:sql", ""), 200, `"model":"base:sql"`)
	if n := s.Stats().Engine.AdapterHostLoads; n != 1 {
		t.Errorf("base:sql: %d loads to the GPU; want 1", n)
	}
	ask(named("base", `,"lora_path":"sql"`), 200, `"model":"base"`)
	ask(named("base", `,"lora_path":"law"`), 400, "never been loaded: law")

	// One slot is never pinned; more than max_loaded_loras push out the least recently used one, which comes back when asked for.
	if _, u := update(t, s, "load", `{"lora_name":"pin","lora_path":"/a/pin","pinned":true}`); !u.Success {
		t.Errorf("pinned: %+v", u)
	}
	if _, u := update(t, s, "load", `{"lora_name":"pin2","lora_path":"/a/pin2","pinned":true}`); u.Success || !strings.Contains(*u.Message, "not allowed to pin all slots") {
		t.Errorf("all slots pinned: %+v", u)
	}
	update(t, s, "load", `{"lora_name":"law","lora_path":"/a/law"}`)
	ask(named("base:sql", ""), 200, "")
	if _, u := update(t, s, "load", `{"lora_name":"tax","lora_path":"/a/tax"}`); !u.Success || len(u.Loaded) != 3 {
		t.Errorf("a fourth: %+v", u)
	}
	if got := list(); !slices.Equal(got, []string{"pin", "sql", "tax"}) {
		t.Errorf("adapters %v; want law, the least recently used one, gone", got)
	}
	before := loads()
	ask(named("base:law", ""), 200, `"model":"base:law"`)
	if loads() != before+1 || slices.Contains(list(), "sql") {
		t.Errorf("%d loads, adapters %v; want law read again, and sql gone", loads()-before, list())
	}
	if _, u := update(t, s, "unload", `{"lora_name":"law"}`); !u.Success || u.Loaded["law"] != "" {
		t.Errorf("unload: %+v", u)
	}
	ask(named("base:law", `,"stream":true`), 400, "never been loaded: law") // before the stream has begun
	if _, u := update(t, s, "unload", `{"lora_name":"law"}`); u.Success || !strings.HasPrefix(*u.Message, "LoRA with name law does not exist") {
		t.Errorf("unload what isn't there: %+v", u)
	}

	off := start(t, Options{Dialect: DialectSGLang})
	if _, u := update(t, off, "load", `{"lora_name":"sql","lora_path":"/a/sql"}`); u.Success || !strings.Contains(*u.Message, "LoRA is not enabled") {
		t.Errorf("without LoRA: %+v", u)
	}
	if resp, text := post(t, off, "/v1/chat/completions", named("base:sql", "")); resp.StatusCode != 400 || !strings.Contains(text, "LoRA is not enabled") {
		t.Errorf("without LoRA: %d %s", resp.StatusCode, text)
	}
}

// Unloading waits for the requests that run.
func TestSGLangUnloadWaits(t *testing.T) {
	s := start(t, Options{Dialect: DialectSGLang, Adapters: []string{"sql"}, Speedup: 1})
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(named("base:sql", `,"max_tokens":100000,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	eventually(t, "running", func() bool { return s.Stats().Engine.Running == 1 })
	done := make(chan updated)
	go func() {
		_, u := update(t, s, "unload", `{"lora_name":"sql"}`)
		done <- u
	}()
	eventually(t, "no longer on the list", func() bool {
		_, text := get(t, s, "/v1/models")
		return !strings.Contains(text, `"sql"`)
	})
	select {
	case u := <-done:
		t.Fatalf("unloaded under a request: %+v", u)
	default:
	}
	resp.Body.Close()
	if u := <-done; !u.Success {
		t.Errorf("%+v", u)
	}
}

func TestSGLangQueueFull(t *testing.T) {
	s := start(t, Options{Dialect: DialectSGLang, MaxQueued: 1, MaxSequences: 1, Speedup: 1})
	var held []io.Closer
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	for i := range 2 {
		resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(named("", `,"max_tokens":100000,"stream":true`)))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, resp.Body)
		eventually(t, "one runs, then one waits", func() bool { e := s.Stats().Engine; return e.Running == 1 && e.Waiting == i })
	}
	if resp, text := post(t, s, "/v1/chat/completions", named("", `,"stream":true`)); resp.StatusCode != 200 ||
		text != `data: {"error": {"object": "error", "message": "The request queue is full.", "type": "Service Unavailable", "param": null, "code": 503}}`+"\n\ndata: [DONE]\n\n" {
		t.Errorf("stream: %d %s", resp.StatusCode, text)
	}
	for path, want := range map[string]string{
		"/v1/chat/completions": `{"object":"error","message":"The request queue is full."`,
		"/v1/responses":        `{"error":{"message":"The request queue is full."`,
		"/v1/messages":         `{"type":"error","error":{`,
		"/v1/embeddings":       `{"object":"error","message":"The request queue is full."`,
	} {
		if resp, text := post(t, s, path, strings.TrimSuffix(named("", ""), "}")+`,"input":"x"}`); resp.StatusCode != 503 || !strings.HasPrefix(text, want) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, text)
		}
	}
	if resp, text := post(t, s, "/v1/messages", named("", `,"stream":true`)); resp.StatusCode != 200 || !strings.HasPrefix(text, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"") {
		t.Errorf("messages: %d %s", resp.StatusCode, text)
	}
	if code, _ := get(t, s, "/health"); code != 503 { // its token finds no place either
		t.Errorf("health: %d", code)
	}
	if _, err := New(Options{MaxQueued: 1}); err == nil {
		t.Error("vLLM with a limit of its queue")
	}
}

func TestSGLangPageAndRoutes(t *testing.T) {
	s := start(t, Options{Dialect: DialectSGLang, Models: []string{"base"}, Adapters: []string{"sql"}, KVTokens: 3200, APIKey: "k", Speedup: 1})
	const labels = `{engine_type="unified",model_name="base",moe_ep_rank="0",pp_rank="0",tp_rank="0"}`
	value := func(name string) string {
		_, page := get(t, s, "/metrics") // needs no key
		return metric(t, page, name)
	}
	for name, want := range map[string]string{
		"num_running_reqs": "0.0", "num_queue_reqs": "0.0", "token_usage": "0.0", "max_total_num_tokens": "3200.0", "page_size": "16.0",
		"num_pages": "200.0", "lora_pool_slots_used": "0.0", "lora_pool_slots_total": "4.0",
	} {
		if got := value("sglang:" + name + labels); got != want {
			t.Errorf("%s %s; want %s", name, got, want)
		}
	}
	if _, page := get(t, s, "/metrics"); strings.Contains(page, "vllm") || strings.Contains(page, "process_start_time") {
		t.Errorf("not SGLang's:\n%s", page)
	}
	for path, want := range map[string]int{"/health": 200, "/health_generate": 200, "/model_info": 401, "/v1/models": 401, "/version": 401} {
		if code, _ := get(t, s, path); code != want {
			t.Errorf("%s without a key: %d; want %d", path, code, want)
		}
	}
	with := func(method, path, body string) *http.Response {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), method, s.URL()+path, strings.NewReader(body))
		req.Header.Set("Authorization", "Bearer k")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	for path, want := range map[string]int{"/model_info": 200, "/get_model_info": 200, "/server_info": 200, "/version": 404, "/sleep": 404} {
		if resp := with("GET", path, ""); resp.StatusCode != want {
			t.Errorf("%s: %d; want %d", path, resp.StatusCode, want)
		}
	}
	if resp := with("POST", "/v1/chat/completions", named("base", `,"max_tokens":5000`)); resp.StatusCode != 400 {
		t.Errorf("too long: %d", resp.StatusCode)
	}
	// A prefill shows at once, in hundredths; that it has ended only after half a minute of idling.
	resp := with("POST", "/v1/completions", `{"model":"base:sql","max_tokens":2500,"stream":true,"prompt":"`+strings.Repeat("p", 1600)+`"}`)
	eventually(t, "shown", func() bool { return value("sglang:num_running_reqs"+labels) == "1.0" })
	usage, slots := value("sglang:token_usage"+labels), value("sglang:lora_pool_slots_used"+labels)
	if v, err := strconv.ParseFloat(usage, 64); err != nil || v < 0.12 || len(usage) != 4 || slots != "1.0" {
		t.Errorf("token_usage %s, %s slots; want the prompt's 400 of 3,200 tokens and a bit, and 1", usage, slots)
	}
	resp.Body.Close()
	eventually(t, "ended", func() bool { return s.Stats().Engine.Running == 0 })
	if n := value("sglang:num_running_reqs" + labels); n != "1.0" {
		t.Errorf("%s running; the gauge is not written yet", n)
	}
}
