package adapters

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// What servers answer, as their sources have it, and what it means.
func TestAnswers(t *testing.T) {
	f := func(what string, status int, answer string, want Fault, message string) {
		t.Helper()
		err := judge(status, []byte(answer))
		var e *ServerError
		if want == NoFault {
			if err != nil {
				t.Errorf("%s: %v; want success", what, err)
			}
			return
		}
		if !errors.As(err, &e) || e.Fault != want || !strings.Contains(e.Message, message) {
			t.Errorf("%s: %v (fault %v); want fault %v and %q", what, err, e, want, message)
		}
	}
	f("vLLM loads", 200, "Success: LoRA adapter 'a' added successfully.", NoFault, "")
	f("SGLang loads", 200, `{"success":true,"error_message":null,"loaded_adapters":{"a":"/p"}}`, NoFault, "")
	f("SGLang refuses", 400, `{"success":false,"error_message":"LoRA adapter a is already loaded","loaded_adapters":{"a":"/p"}}`, AtAdapter, "already loaded")
	f("SGLang fails in a 200", 200, `{"success":false,"error_message":"no such rank"}`, AtAdapter, "no such rank")
	f("SGLang without LoRA", 400, `{"success":false,"error_message":"LoRA is not enabled. Please set `+"`--enable-lora`"+` to enable LoRA.","loaded_adapters":{}}`, Unsupported, "--enable-lora")
	f("vLLM has no such path", 404, `{"error":{"message":"Loading lora a failed: No adapter found for /p","type":"NotFoundError","param":null,"code":404}}`, AtAdapter, "No adapter found")
	f("vLLM before 0.10.1", 400, `{"object":"error","message":"Both 'lora_name' and 'lora_path' must be provided.","type":"InvalidUserInput","param":null,"code":400}`, AtAdapter, "Both")
	f("vLLM without the routes", 404, `{"detail":"Not Found"}`, Unsupported, "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
	f("a proxy without them", 404, "404 page not found", Unsupported, "at run time")
	f("the engine fails", 500, `{"error":{"message":"CUDA error","type":"InternalServerError","code":500}}`, AtEndpoint, "CUDA error")
	f("a key is wanted", 401, `{"error":"Unauthorized"}`, AtEndpoint, "Unauthorized")
	f("scaling", 503, `{"error":"The model is currently scaling. Please try again later."}`, AtEndpoint, "scaling")
	f("nonsense", 502, strings.Repeat("x", 10_000), AtEndpoint, "…")
}

func TestCalls(t *testing.T) {
	var path, key string
	var body map[string]string
	status, answer := 200, "ok"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, key = r.URL.Path, r.Header.Get("Authorization")
		body = nil
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer))
	}))
	defer s.Close()
	c := newClient("k", nil)
	defer c.close()
	if err := c.load(t.Context(), s.URL, "vllm", "org/a", "/p"); err != nil || path != "/v1/load_lora_adapter" || body["lora_name"] != "org/a" || body["lora_path"] != "/p" || key != "Bearer k" {
		t.Errorf("vLLM: %v %s %v %s", err, path, body, key)
	}
	if err := c.unload(t.Context(), s.URL, "sglang", "a"); err != nil || path != "/unload_lora_adapter" || len(body) != 1 || body["lora_name"] != "a" {
		t.Errorf("SGLang: %v %s %v", err, path, body)
	}
	// what is as it should be already is no failure
	status, answer = 400, `{"error":{"message":"The lora adapter 'a' has already been loaded.","type":"InvalidUserInput","code":400}}`
	if err := c.load(t.Context(), s.URL, "vllm", "a", "/p"); err != nil {
		t.Errorf("already loaded: %v", err)
	}
	status, answer = 404, `{"error":{"message":"The lora adapter 'a' cannot be found.","type":"NotFoundError","code":404}}`
	if err := c.unload(t.Context(), s.URL, "vllm", "a"); err != nil {
		t.Errorf("gone already: %v", err)
	}
	status, answer = 302, ""
	if err := c.load(t.Context(), s.URL, "vllm", "a", "/p"); err == nil {
		t.Error("a redirect was taken for success")
	}
	s.Close()
	var e *ServerError
	if err := c.load(t.Context(), s.URL, "vllm", "a", "/p"); !errors.As(err, &e) || e.Fault != AtEndpoint || e.Status != 0 {
		t.Errorf("a server that is away: %v", err)
	}
}
