package openai

import (
	"os"
	"strings"
	"testing"
)

func TestFindRoute(t *testing.T) {
	found := func(method, path string, api API, kind Kind, style Style, id string) {
		t.Helper()
		r, ok := FindRoute([]byte(method), []byte(path))
		if !ok || r.API != api || r.Kind != kind || r.Style != style || string(r.ID) != id || r.Allow != "" {
			t.Errorf("%s %s: %+v, %v; want %v", method, path, r, ok, api)
		}
	}
	for path, api := range map[string]API{
		"/v1/chat/completions": ChatCompletions, "/v1/completions": Completions, "/v1/embeddings": Embeddings, "/v1/responses": Responses,
		"/rerank": Rerank, "/v1/rerank": Rerank, "/v2/rerank": Rerank, "/score": Score, "/v1/score": Score, "/pooling": Pooling,
		"/classify": Classify, "/v1/classify": Classify, "/tokenize": Tokenize, "/v1/tokenize": Tokenize, "/detokenize": Detokenize,
		"/v1/detokenize": Detokenize,
	} {
		found("POST", path, api, KindJSON, StyleOpenAI, "")
	}
	found("POST", "/v1/messages", Messages, KindJSON, StyleAnthropic, "")
	found("POST", "/v1/messages/count_tokens", CountTokens, KindJSON, StyleAnthropic, "")
	found("POST", "/v1/audio/transcriptions", Transcriptions, KindMultipart, StyleOpenAI, "")
	found("POST", "/v1/audio/translations", Translations, KindMultipart, StyleOpenAI, "")
	found("GET", "/v1/responses/resp_1-a", Responses, KindStored, StyleOpenAI, "resp_1-a")
	found("DELETE", "/v1/responses/resp_1", Responses, KindStored, StyleOpenAI, "resp_1")
	found("POST", "/v1/responses/resp_1/cancel", Responses, KindStored, StyleOpenAI, "resp_1")
	found("GET", "/v1/responses/resp_1/input_items", Responses, KindStored, StyleOpenAI, "resp_1")
	found("GET", "/v1/models", Models, KindModelList, StyleOpenAI, "")
	found("GET", "/v1/models/org/Model:v1@x", Models, KindModel, StyleOpenAI, "org/Model:v1@x")
	found("GET", "/v1/models/org%2FModel", Models, KindModel, StyleOpenAI, "org%2FModel")

	wrongMethod := func(method, path, allow string) {
		t.Helper()
		if r, ok := FindRoute([]byte(method), []byte(path)); ok || r.Allow != allow || r.Kind != KindNone {
			t.Errorf("%s %s: %+v, %v; want Allow %q", method, path, r, ok, allow)
		}
	}
	wrongMethod("GET", "/v1/chat/completions", "POST")
	wrongMethod("POST", "/v1/models", "GET")
	wrongMethod("PUT", "/v1/responses/r", "GET, DELETE")
	wrongMethod("GET, DELETE", "/v1/responses/r", "GET, DELETE")
	wrongMethod("", "/v1/responses/r", "GET, DELETE")
	wrongMethod("post", "/v1/completions", "POST")
	wrongMethod("GET", "/v1/responses/r/cancel", "POST")

	// What administers a model server, other spellings of what exists, and steps
	// out of it.
	for _, path := range []string{
		"", "/", "*", "/v1", "/v1/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/sleep", "/wake_up", "/metrics",
		"/v1/metrics", "/health", "/ping", "/version", "/load", "/server_info", "/is_sleeping", "/pause", "/resume", "/reset_prefix_cache",
		"/collective_rpc", "/scale_elastic_ep", "/abort_requests", "/abort_request", "/flush_cache", "/slow_down", "/terminate", "/slots", "/props",
		"/lora-adapters", "/models/load", "/generate", "/invocations", "/v1/realtime", "/v1/chat/completions/", "//v1/chat/completions",
		"/v1//chat/completions", "/v1/chat/completions%20", "/v1/chat%2Fcompletions", "/V1/chat/completions", "/v1/../v1/completions", "/v1/./completions",
		"http://x/v1/completions", "/v1/completions/render", "/v1/models/", "/v1/responses/", "/v1/responses/..", "/v1/responses/.", "/v1/responses/../cancel",
		"/v1/responses/%2e%2e/cancel", "/v1/responses/a/b", "/v1/responses/a//cancel", "/v1/responses/a/cancel/", "/v1/responses/a%2Fb",
		"/v1/responses/" + strings.Repeat("a", 257), "/v1/messages/", "/v1/messages/batches", "/v1/responses/a\x00",
	} {
		for _, method := range []string{"GET", "POST", "DELETE"} {
			r, ok := FindRoute([]byte(method), []byte(path))
			if ok || r.Allow != "" || r.Kind != KindNone {
				t.Errorf("%s %q is routed: %+v", method, path, r)
			}
			if want := strings.HasPrefix(path, "/v1/messages"); (r.Style == StyleAnthropic) != want {
				t.Errorf("%s %q: style %v", method, path, r.Style)
			}
		}
	}
	if r, _ := FindRoute([]byte("GET"), []byte("/v1/messages")); r.Style != StyleAnthropic {
		t.Error("405 of /v1/messages has OpenAI's style")
	}
}

func TestAppendUnescaped(t *testing.T) {
	f := func(seg, want string, ok bool) {
		t.Helper()
		got, good := AppendUnescaped([]byte("x"), []byte(seg))
		if good != ok || ok && string(got) != "x"+want {
			t.Errorf("%q: %q, %v; want %q, %v", seg, got, good, want, ok)
		}
	}
	f("org/Model:v1@x", "org/Model:v1@x", true)
	f("org%2FModel%3av1", "org/Model:v1", true)
	f("a%252Fb", "a%2Fb", true) // once
	f("a+b", "a+b", true)
	f("a%", "", false)
	f("a%2", "", false)
	f("a%2g", "", false)
}

func TestAPINames(t *testing.T) {
	seen := map[string]bool{}
	for a := range numAPIs {
		if n := a.String(); n == "" || seen[n] {
			t.Errorf("API %d is called %q", a, n)
		} else {
			seen[n] = true
		}
	}
	if API(200).String() != "none" {
		t.Error("an API that isn't one has a name")
	}
}

// Paths are exactly the paths without an id.
func TestPaths(t *testing.T) {
	source, err := os.ReadFile("route.go")
	if err != nil {
		t.Fatal(err)
	}
	_, cases, _ := strings.Cut(string(source), "func lookup(path []byte) Route {")
	cases, _, _ = strings.Cut(cases, "\n\t}\n")
	n := strings.Count(cases, `"/`) + strings.Count(cases, "case messagesPath:")
	if n != len(Paths) {
		t.Errorf("%d paths are looked up and %d listed", n, len(Paths))
	}
	page, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range Paths {
		if lookup([]byte(p)).Kind == KindNone {
			t.Errorf("%s is listed and not served", p)
		}
		if !strings.Contains(string(page), "`"+p+"`") {
			t.Errorf("docs/api.md lacks %s", p)
		}
	}
}
