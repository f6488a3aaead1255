package openai

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func TestParseError(t *testing.T) {
	f := func(body string, want ErrorInfo) {
		t.Helper()
		if got := ParseError([]byte(body)); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", body, got, want)
		}
		// The scanner that sees only pieces agrees, but for param.
		var j JSONScan
		for i := range body {
			j.Feed([]byte(body[i : i+1]))
		}
		want.Param = ""
		if strings.HasPrefix(body, "{") && !strings.HasPrefix(body, `{"detail":[`) && want.Class != ClassModelNotFound {
			if got := j.Error(); got != want || j.Failed() != (want.Shape != ShapeNone) {
				t.Errorf("%s scanned:\n got %+v\nwant %+v", body, got, want)
			}
		}
	}
	// vLLM since 0.10.1, llama.cpp, Ollama
	f(`{"error":{"message":"The model `+"`x`"+` does not exist.","type":"NotFoundError","param":"model","code":404}}`,
		ErrorInfo{ShapeOpenAI, ClassModelNotFound, "The model `x` does not exist.", "NotFoundError", "404", "model", 404, ""})
	f(`{"error":{"message":"The model 'x' does not exist","type":"invalid_request_error","param":null,"code":"model_not_found"}}`,
		ErrorInfo{ShapeOpenAI, ClassModelNotFound, "The model 'x' does not exist", "invalid_request_error", "model_not_found", "", 404, ""})
	f(`{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`,
		ErrorInfo{ShapeOpenAI, ClassLoading, "Loading model", "unavailable_error", "503", "", 503, ""})
	f(`{"error":{"message":"boom","type":"server_error"}}`, ErrorInfo{ShapeOpenAI, ClassOther, "boom", "server_error", "", "", 500, ""})
	f(`{"error":{"message":"This model's maximum context length is 4096 tokens.","type":"BadRequestError","param":null,"code":400}}`,
		ErrorInfo{ShapeOpenAI, ClassOther, "This model's maximum context length is 4096 tokens.", "BadRequestError", "400", "", 400, ""})
	// SGLang, TensorRT-LLM, vLLM before
	f(`{"object":"error","message":"The request queue is full.","type":"ServiceUnavailableError","param":null,"code":503}`,
		ErrorInfo{ShapeFlat, ClassOverloaded, "The request queue is full.", "ServiceUnavailableError", "503", "", 503, ""})
	// vLLM while scaling, Ollama
	f(`{"error":"The model is currently scaling. Please try again later."}`,
		ErrorInfo{ShapeText, ClassLoading, "The model is currently scaling. Please try again later.", "", "", "", 0, ""})
	f(`{"error":"server busy, please try again.  maximum pending requests exceeded"}`,
		ErrorInfo{ShapeText, ClassOverloaded, "server busy, please try again.  maximum pending requests exceeded", "", "", "", 0, ""})
	f(`{"error":"model 'x' not found"}`, ErrorInfo{ShapeText, ClassModelNotFound, "model 'x' not found", "", "", "", 0, ""})
	f(`{"error":"Unauthorized"}`, ErrorInfo{ShapeText, ClassOther, "Unauthorized", "", "", "", 0, ""})
	// TGI, LoRAX; TEI
	f(`{"error":"Model is overloaded","error_type":"overloaded"}`, ErrorInfo{ShapeTyped, ClassOverloaded, "Model is overloaded", "overloaded", "", "", 429, ""})
	f(`{"error":"Model is overloaded","error_type":"Overloaded"}`, ErrorInfo{ShapeTyped, ClassOverloaded, "Model is overloaded", "Overloaded", "", "", 429, ""})
	// Anthropic
	f(`{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`,
		ErrorInfo{ShapeAnthropic, ClassOverloaded, "Overloaded", "overloaded_error", "", "", 529, ""})
	f(`{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: too large"}}`,
		ErrorInfo{ShapeAnthropic, ClassOther, "max_tokens: too large", "invalid_request_error", "", "", 400, ""})
	// FastAPI
	f(`{"detail":"Not Found"}`, ErrorInfo{ShapeDetail, ClassOther, "Not Found", "", "", "", 0, ""})
	f(`{"detail":[{"loc":["body"],"msg":"field required","type":"x"}]}`, ErrorInfo{ShapeDetail, ClassOther, "field required", "", "", "", 0, ""})
	// no error
	f(`{"id":"x","choices":[]}`, ErrorInfo{})
	f(`{"error":null}`, ErrorInfo{})
	f(`{"error":""}`, ErrorInfo{})
	f(`not json`, ErrorInfo{})
	f(``, ErrorInfo{})
	f(`[]`, ErrorInfo{})

	if e := ParseError([]byte(`{"error":{"message":"` + strings.Repeat("x", maxErrorBytes) + `"}}`)); e.Shape != ShapeNone {
		t.Error("a huge body is parsed")
	}
	b, err := os.ReadFile("testdata/sse/hostile-json-instead-of-sse.json")
	if err != nil {
		t.Fatal(err)
	}
	if e := ParseError(b); e.Status != 500 || e.Shape != ShapeOpenAI {
		t.Errorf("%+v", e)
	}
}

func TestAppendError(t *testing.T) {
	e := &APIError{Status: 404, Type: "invalid_request_error", Code: "model_not_found", Message: "no model \"x\\y\"\n\x01\xff is served", Param: "model"}
	got := string(AppendError([]byte("> "), StyleOpenAI, e))
	if want := `> {"error":{"message":"no model \"x\\y\"\n\u0001` + "\ufffd" + ` is served","type":"invalid_request_error","param":"model","code":"model_not_found"}}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	got = string(AppendError(nil, StyleOpenAI, &APIError{Message: "m", Type: "server_error"}))
	if want := `{"error":{"message":"m","type":"server_error","param":null,"code":null}}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	e.RequestID = "req_1"
	got = string(AppendError(nil, StyleAnthropic, e))
	if want := `{"type":"error","error":{"type":"not_found_error","message":"no model \"x\\y\"\n\u0001` + "\ufffd" + ` is served"},"request_id":"req_1"}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for status, want := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
		405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error",
	} {
		if got := anthropicType(status); got != want {
			t.Errorf("%d is %s; want %s", status, got, want)
		}
	}
	// What we write, we read, whatever the text.
	for _, style := range []Style{StyleOpenAI, StyleAnthropic} {
		for _, m := range []string{"plain", "\u2028 \x7f \t \"\\", "日本語 😀", strings.Repeat("x", 1000)} {
			b := AppendError(nil, style, &APIError{Status: 429, Type: "rate_limit_error", Code: "saturated", Message: m})
			if !json.Valid(b) {
				t.Errorf("not JSON: %s", b)
			}
			if got := ParseError(b); got.Message != m || got.Status != 429 {
				t.Errorf("%s read as %+v", b, got)
			}
		}
	}
}

func TestAppendStreamError(t *testing.T) {
	e := &APIError{Status: 502, Type: "server_error", Code: "endpoint_reset", Message: "the answer was cut off"}
	for api, want := range map[API]string{
		ChatCompletions: `data: {"error":{"message":"the answer was cut off","type":"server_error","param":null,"code":"endpoint_reset"}}`,
		Responses:       "event: error\n" + `data: {"type":"error","code":"endpoint_reset","message":"the answer was cut off","param":null}`,
		Messages:        "event: error\n" + `data: {"type":"error","error":{"type":"api_error","message":"the answer was cut off"}}`,
	} {
		if got := string(AppendStreamError(nil, api, false, e)); got != want+"\n\n" {
			t.Errorf("%v:\n got %q\nwant %q", api, got, want)
		}
		// A reader takes it for an error, wherever the stream was cut.
		for _, c := range sseSamples(t) {
			if c.row["api"] != "chat" && c.row["api"] != "responses" && c.row["api"] != "anthropic" || c.row["error"] != "" || len(c.body) > 5000 {
				continue
			}
			for cut := 0; cut < len(c.body); cut += stride {
				var s Stream
				s.Feed(c.body[:cut])
				var ended Stream
				ended.Feed(c.body[:cut])
				if ended.Finish(); ended.Terminal() != "" {
					break // nothing is missing
				}
				s.Feed(AppendStreamError(nil, api, s.MidEvent(), e))
				if !s.Failed() || s.Complete() || s.MidEvent() {
					t.Fatalf("%s cut at %d: %s", c.file, cut, summary(&s))
				}
			}
		}
	}
}

func TestJSONScan(t *testing.T) {
	f := func(body string, usage Usage, id, finish string, failed bool) {
		t.Helper()
		var j JSONScan
		for _, size := range []int{len(body), 1, 3, 64, 4096} {
			j.Reset()
			for p := []byte(body); len(p) > 0; {
				n := min(size, len(p))
				if j.Complete() {
					t.Fatalf("complete before the end, in pieces of %d", size)
				}
				before := string(p[:n])
				j.Feed(p[:n:n])
				if string(p[:n]) != before {
					t.Fatal("Feed changed a byte")
				}
				p = p[n:]
			}
			if got := j.Usage(); got != usage || string(j.ID()) != id || j.FinishReason() != finish || j.Failed() != failed || !j.Complete() {
				t.Errorf("%.200s in pieces of %d: %+v, id %q, finish %q, failed %v, complete %v", body, size, got, j.ID(), j.FinishReason(), j.Failed(), j.Complete())
			}
		}
	}
	all := func(in, out, cached int64) Usage { return Usage{in, out, cached, true, true, true} }
	text := strings.Repeat(`The \"usage\":{\"prompt_tokens\":1} of [DONE] \\`, 10)
	f(`{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"`+text+`"},"logprobs":{"content":[{"token":"a","usage":{"prompt_tokens":5}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":31,"total_tokens":38,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":16}}}`,
		all(31, 7, 16), "chatcmpl-1", "stop", false)
	f(`{"id":"resp_1","object":"response","status":"completed","error":null,"output":[{"id":"msg_1","content":[{"text":"`+text+`"}]}],"usage":{"input_tokens":31,"input_tokens_details":{"cached_tokens":16},"output_tokens":7}}`,
		all(31, 7, 16), "resp_1", "completed", false)
	f(`{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","usage":{"input_tokens":15,"cache_read_input_tokens":16,"output_tokens":7}}`,
		all(31, 7, 16), "msg_1", "end_turn", false)
	// Megabytes of numbers and of base64 before the usage.
	vector := strings.Repeat("-0.0123456789,", 200_000) + "1e-5"
	f(`{"object":"list","data":[{"object":"embedding","index":0,"embedding":[`+vector+`]},{"embedding":"`+strings.Repeat("QUJD", 100_000)+`"}],"model":"m","usage":{"prompt_tokens":8,"total_tokens":8}}`,
		Usage{InputTokens: 8, HasInput: true}, "", "", false)
	f(`{"id":"rerank-1","results":[{"index":0,"relevance_score":0.9,"document":{"text":"usage"}}],"usage":{"total_tokens":12}}`,
		Usage{InputTokens: 12, HasInput: true}, "rerank-1", "", false)
	f(`{"generated_text":"x","details":{"finish_reason":"length","generated_tokens":7,"prefill":[{"id":1,"text":"}"}],"seed":null}}`,
		Usage{OutputTokens: 7, HasOutput: true}, "", "length", false)
	f(`{"text":"x","meta_info":{"id":"c0ffee","finish_reason":{"type":"length","length":7},"prompt_tokens":5,"completion_tokens":7,"cached_tokens":4}}`,
		all(5, 7, 4), "c0ffee", "length", false)
	f(`{"error":{"message":"`+text+`","code":500}}`, Usage{}, "", "", true)
	f(`{"id":"resp_1","status":"failed","error":{"code":"server_error","message":"x"}}`, Usage{}, "resp_1", "failed", true)
	f(`[{"error":1}]`, Usage{}, "", "", false)

	var j JSONScan
	j.Feed([]byte(`{"id":"x","content":"hi","timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}`))
	if j.Complete() || j.Timings() != all(237, 35, 236) {
		t.Errorf("%v %+v", j.Complete(), j.Timings())
	}
	// An id that doesn't fit isn't cut: half an id would name another response.
	j.Reset()
	j.Feed([]byte(`{"id":"` + strings.Repeat("i", 128) + `"}`))
	if j.ID() != nil {
		t.Errorf("id %q", j.ID())
	}
}

func TestModelLists(t *testing.T) {
	f := func(body string, want ...Card) {
		t.Helper()
		got, err := ParseModelList([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		if len(got) != len(want) {
			t.Errorf("%s: %d cards; want %d", body, len(got), len(want))
			return
		}
		for i, g := range got {
			if !bytes.Contains([]byte(body), g.Raw) || !json.Valid(g.Raw) {
				t.Errorf("raw card %s is not in %s", g.Raw, body)
			}
			g.Raw = nil
			if g.ID != want[i].ID || g.Parent != want[i].Parent || g.Root != want[i].Root || g.MaxModelLen != want[i].MaxModelLen {
				t.Errorf("%s:\n got %+v\nwant %+v", body, g, want[i])
			}
		}
	}
	// vLLM, SGLang
	f(`{"object":"list","data":[{"id":"Qwen/Qwen3-8B","object":"model","created":1,"owned_by":"vllm","root":"/models/q","parent":null,"max_model_len":32768,"permission":[]},`+
		`{"id":"sql","object":"model","root":"/adapters/sql","parent":"Qwen/Qwen3-8B","max_model_len":null}]}`,
		Card{ID: "Qwen/Qwen3-8B", Root: "/models/q", MaxModelLen: 32768}, Card{ID: "sql", Parent: "Qwen/Qwen3-8B", Root: "/adapters/sql"})
	// trtllm-serve
	f(`{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"tensorrt_llm"}]}`, Card{ID: "m"})
	// llama.cpp: both shapes at once, meta
	f(`{"models":[{"name":"a.gguf","model":"a.gguf"}],"object":"list","data":[{"id":"a.gguf","meta":{"n_ctx_train":131072,"n_ctx":8192,"n_params":1}}]}`,
		Card{ID: "a.gguf", MaxModelLen: 8192})
	f(`{"models":[{"name":"llama3.2:latest"},{"model":"x"}]}`, Card{ID: "llama3.2:latest"}, Card{ID: "x"})
	f(`[{"id":"bare"}]`, Card{ID: "bare"})
	f(`{"data":[5,null,{"id":7},{},{"id":"ok","max_model_len":"x","parent":3,"meta":null}]}`, Card{ID: "ok"})
	f(`{"data":[]}`)
	for _, body := range []string{``, `{}`, `null`, `{"data":null}`, `{"object":"error"}`, `"x"`, `{"data":[`} {
		if cards, err := ParseModelList([]byte(body)); err == nil {
			t.Errorf("%q: %+v; want an error", body, cards)
		}
	}

	a := Card{ID: "a", Raw: json.RawMessage(`{"id": "a", "x": [1, 2.50],"owned_by":"vllm"}`)}
	got := string(AppendModelList(nil, a, Card{ID: "b\"", Parent: "a", Root: "/r", MaxModelLen: 7}, Card{ID: "a", Raw: json.RawMessage(`{"id":"a"}`)}))
	want := `{"object":"list","data":[{"id": "a", "x": [1, 2.50],"owned_by":"vllm"},{"id":"b\"","object":"model","created":0,"owned_by":"kvgate","root":"/r","parent":"a","max_model_len":7}]}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := string(AppendModelList(nil)); got != `{"object":"list","data":[]}` {
		t.Error(got)
	}
}

func TestSplice(t *testing.T) {
	var r Request
	for name, body := range bodies(t) {
		for _, api := range []API{ChatCompletions, Completions} {
			if Peek(api, body, &r) != nil {
				continue
			}
			facts := r.Facts
			var before map[string]json.RawMessage
			if err := json.Unmarshal(body, &before); err != nil {
				t.Fatal(err)
			}
			for _, model := range []string{"m", "a/much-longer:name@v1", "q\"\\\n\u2028é😀", strings.Repeat("n", 300)} {
				check := func(how string, got []byte, usage bool) {
					t.Helper()
					if err := Peek(api, got, &r); err != nil {
						t.Fatalf("%s %s: %v\n%s", name, how, err, got)
					}
					wantModel := model
					if how == "usage" {
						wantModel = string(facts.Model)
					}
					if string(r.Model) != wantModel || r.IncludeUsage != (usage || facts.IncludeUsage) {
						t.Errorf("%s %s: model %q, include_usage %v\n%s", name, how, r.Model, r.IncludeUsage, got)
					}
					var after map[string]json.RawMessage
					if err := json.Unmarshal(got, &after); err != nil {
						t.Fatal(err)
					}
					for k, v := range before {
						if k != "model" && k != "stream_options" && string(after[k]) != string(v) {
							t.Errorf("%s %s: %s is %s; want %s", name, how, k, after[k], v)
						}
					}
				}
				spliced := SpliceModel([]byte("x"), body, &facts, model)[1:]
				check("model", spliced, false)
				g := facts.ModelRange
				if !bytes.HasPrefix(spliced, body[:g.Start]) || !bytes.HasSuffix(spliced, body[g.End:]) {
					t.Errorf("%s: bytes around the model changed", name)
				}
				check("usage", SpliceIncludeUsage(nil, body, &facts), true)
				check("both", SpliceModelIncludeUsage(nil, body, &facts, model), true)
				both := SpliceModelIncludeUsage(nil, body, &facts, model)
				if Peek(api, spliced, &r) == nil && !bytes.Equal(both, SpliceIncludeUsage(nil, spliced, &r.Facts)) {
					t.Errorf("%s: at once is not one after the other", name)
				}
			}
		}
	}
	f := func(body, want string) {
		t.Helper()
		if err := Peek(ChatCompletions, []byte(body), &r); err != nil {
			t.Fatal(err)
		}
		if got := string(SpliceModelIncludeUsage(nil, []byte(body), &r.Facts, "x")); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	f(`{"model":"m" } `, `{"model":"x" ,"stream_options":{"include_usage":true}} `)
	f(`{"stream_options":null,"model":"m"}`, `{"stream_options":{"include_usage":true},"model":"x"}`)
	f(`{"stream_options":{ },"model":"m"}`, `{"stream_options":{"include_usage":true },"model":"x"}`)
	f(`{"stream_options":{"a":1},"model":"m"}`, `{"stream_options":{"include_usage":true,"a":1},"model":"x"}`)
	f(`{"stream_options":{"include_usage" : null},"model":"m"}`, `{"stream_options":{"include_usage" : true},"model":"x"}`)
	f(`{"model":"m","stream_options":{"include_usage":false}}`, `{"model":"x","stream_options":{"include_usage":true}}`)
}
