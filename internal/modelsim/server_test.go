package modelsim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

// start runs a server for a test; at its end goroutines and descriptors are back
// where they were.
func start(t *testing.T, opt Options) *Server {
	t.Helper()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	if opt.Speedup == 0 {
		opt.Speedup = 50
	}
	s, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		eventually(t, "goroutines and descriptors back to where they were", func() bool {
			return runtime.NumGoroutine() <= goroutines && openFiles(t) <= files
		})
	})
	return s
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0 // not Linux: only goroutines are checked
	}
	return len(entries)
}

// eventually polls for what happens soon but not at once.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	buf := make([]byte, 1<<16)
	t.Errorf("never came: %s\n%s", what, buf[:runtime.Stack(buf, true)])
}

func post(t *testing.T, s *Server, path, body string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s: %v after %q", path, err, b)
	}
	return resp, string(b)
}

func get(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	resp, err := http.Get(s.URL() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func chat(content string, more string) string {
	return fmt.Sprintf(`{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":%q}]%s}`, content, more)
}

// unstable is what differs between runs in an answer.
var unstable = regexp.MustCompile(`"(id|created|created_at|item_id)":("[^"]*"|\d+)`)

func normal(s string) string {
	return unstable.ReplaceAllString(s, `"$1":0`)
}

func TestChatStream(t *testing.T) {
	s := start(t, Options{})
	resp, body := post(t, s, "/v1/chat/completions", chat("nonce-4711 please", `,"stream":true,"max_tokens":3,"stream_options":{"include_usage":true}`))
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream; charset=utf-8" {
		t.Errorf("Content-Type %q", ct)
	}
	got := normal(body)
	m := "meta-llama/Llama-3.1-8B-Instruct"
	head := `data: {"id":0,"object":"chat.completion.chunk","created":0,"model":"` + m + `","choices":[`
	want := []string{
		head + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}`,
		head + `{"index":0,"delta":{"content":"nonce-4711"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`,
		head + `{"index":0,"delta":{"content":" please"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`,
		"*", // a filler word
		head + `{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}`,
		head + `],"usage":{"prompt_tokens":16,"total_tokens":19,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}`,
		`data: [DONE]`,
	}
	events := strings.Split(strings.TrimSuffix(got, "\n\n"), "\n\n")
	if len(events) != len(want) {
		t.Fatalf("%d events; want %d:\n%s", len(events), len(want), got)
	}
	for i := range want {
		if want[i] != "*" && events[i] != want[i] {
			t.Errorf("event %d:\n%s\nwant\n%s", i, events[i], want[i])
		}
	}
	if st := s.Stats(); st.Executed != 1 || st.Completed != 1 || st.Engine.Finished != 1 || st.Engine.GeneratedTokens != 3 {
		t.Errorf("stats %+v", st)
	}
}

func TestChatWhole(t *testing.T) {
	s := start(t, Options{RequestIDHeaders: true, Seed: 7})
	req, err := http.NewRequest("POST", s.URL()+"/v1/chat/completions", strings.NewReader(chat("tell me", "")))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Request-Id", "abc-1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		ID      string
		Choices []struct {
			Message      struct{ Content string }
			FinishReason string `json:"finish_reason"`
		}
		Usage struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		t.Fatal(err)
	}
	c := out.Choices[0]
	if out.ID != "chatcmpl-abc-1" || resp.Header.Get("X-Request-Id") != "abc-1" {
		t.Errorf("id %q, header %q; want the request's", out.ID, resp.Header.Get("X-Request-Id"))
	}
	if !strings.HasPrefix(c.Message.Content, "tell me ") || c.FinishReason != "stop" || len(strings.Fields(c.Message.Content)) != out.Usage.Completion {
		t.Errorf("%+v; want the user's words first, stop, as many words as tokens", out)
	}
	// The same request gets the same answer, from the prefix cache but for one block.
	_, again := post(t, s, "/v1/chat/completions", chat("tell me", ""))
	if !strings.Contains(again, quote(c.Message.Content)) {
		t.Errorf("answer changed: %s", again)
	}
}

// Every word the user said comes back on every API, and each stream ends as its
// API says.
func TestAPIsStreamAndEnd(t *testing.T) {
	s := start(t, Options{})
	f := func(path, body string, wants ...string) {
		t.Helper()
		resp, got := post(t, s, path, body)
		if resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s", path, resp.StatusCode, got)
		}
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s: no %q in\n%s", path, want, got)
			}
		}
	}
	f("/v1/completions", `{"prompt":"once upon","max_tokens":4,"stream":true}`,
		`"object":"text_completion"`, `"text":"once"`, `"text":" upon"`, `"finish_reason":"length"`, "data: [DONE]\n\n")
	f("/v1/completions", `{"prompt":["a b","c d"],"n":2,"max_tokens":2}`, `"index":3,"text":"c d"`, `"completion_tokens":8`, `"prompt_tokens":2,`)
	f("/v1/completions", `{"prompt":[1,2,3,4,5],"max_tokens":2}`, `"prompt_tokens":5,`)
	f("/v1/messages", `{"model":"meta-llama/Llama-3.1-8B-Instruct","max_tokens":3,"stream":true,"system":"x","messages":[{"role":"user","content":[{"type":"text","text":"hello there"}]}]}`,
		"event: message_start\n", `"text":"hello"`, "event: content_block_stop\n", `"stop_reason":"max_tokens"`, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n")
	f("/v1/messages", `{"max_tokens":3,"messages":[{"role":"user","content":"hello there"}]}`, `"text":"hello there `, `"type":"message"`)
	f("/v1/messages/count_tokens", `{"messages":[{"role":"user","content":"hello there"}]}`, `{"input_tokens":`)
	f("/v1/responses", `{"input":"say hi","stream":true}`,
		"event: response.created\n", `"delta":"say"`, "event: response.output_text.done\n", "event: response.completed\n", `"status":"completed"`)
	f("/v1/embeddings", `{"input":["a","b"],"encoding_format":"base64"}`, `"index":1,"object":"embedding","embedding":"`, `"prompt_tokens":2`)
	f("/rerank", `{"query":"q","documents":["one","two"]}`, `"index":1,"document":{"text":"two"`)
	f("/score", `{"text_1":"q","text_2":["one","two"]}`, `"object":"score"`)
	f("/tokenize", `{"prompt":"héllo world"}`, `"count":3`, `"max_model_len":131072`)
	if tokens := byteTokens([]byte("héllo world")); string(tokenBytes(tokens)) != "héllo world" {
		t.Errorf("tokens %v do not give the text back", tokens)
	}
	_, ids := post(t, s, "/tokenize", `{"prompt":"héllo world!"}`)
	list := ids[strings.Index(ids, "["):]
	f("/detokenize", `{"tokens":`+list[:strings.Index(list, "]")+1]+`}`, `{"prompt":"héllo world!"}`)
	if st := s.Stats(); st.Engine.Running+st.Engine.Waiting+st.Engine.KVBlocksUsed != 0 || st.InFlight != 0 {
		t.Errorf("left over: %+v", st)
	}
}

func TestResponsesAreKeptWhereMade(t *testing.T) {
	s := start(t, Options{})
	_, first := post(t, s, "/v1/responses", `{"input":"remember blue","max_output_tokens":4}`)
	var r struct{ ID, Status string }
	if err := json.Unmarshal([]byte(first), &r); err != nil || r.Status != "incomplete" {
		t.Fatalf("%v %s", err, first)
	}
	if code, got := get(t, s, "/v1/responses/"+r.ID); code != 200 || got != first {
		t.Errorf("GET: %d %s; want what was answered", code, got)
	}
	_, second := post(t, s, "/v1/responses", `{"input":"and now","max_output_tokens":4,"previous_response_id":"`+r.ID+`"}`)
	var a, b struct {
		Usage struct {
			In int `json:"input_tokens"`
		}
	}
	json.Unmarshal([]byte(first), &a)
	json.Unmarshal([]byte(second), &b)
	if b.Usage.In <= a.Usage.In {
		t.Errorf("second turn has %d input tokens, the first %d; want the conversation so far in it", b.Usage.In, a.Usage.In)
	}
	req, _ := http.NewRequest("DELETE", s.URL()+"/v1/responses/"+r.ID, nil)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if code, got := get(t, s, "/v1/responses/"+r.ID); resp.StatusCode != 200 || code != 404 || !strings.Contains(got, "not found") {
		t.Errorf("after DELETE (%d): %d %s", resp.StatusCode, code, got)
	}
	if resp, got := post(t, s, "/v1/responses", `{"input":"x","previous_response_id":"resp_none"}`); resp.StatusCode != 404 {
		t.Errorf("unknown previous_response_id: %d %s", resp.StatusCode, got)
	}
}

func TestErrorsInVLLMsWords(t *testing.T) {
	s := start(t, Options{MaxModelTokens: 64, APIKey: ""})
	f := func(path, body string, status int, want string) {
		t.Helper()
		resp, got := post(t, s, path, body)
		if resp.StatusCode != status || !strings.Contains(got, want) {
			t.Errorf("%s: %d %s; want %d with %s", body, resp.StatusCode, got, status, want)
		}
	}
	f("/v1/chat/completions", `{"model":"nope","messages":[{"role":"user","content":"x"}]}`, 404,
		`{"error":{"message":"The model `+"`nope`"+` does not exist.","type":"NotFoundError","param":"model","code":404}}`)
	f("/v1/messages", `{"model":"nope","messages":[{"role":"user","content":"x"}]}`, 404, `{"type":"error","error":{"type":"NotFoundError",`)
	f("/v1/chat/completions", chat(strings.Repeat("long ", 100), ""), 400, "maximum context length is 64 tokens")
	f("/v1/chat/completions", chat("x", `,"max_tokens":60`), 400, "maximum context length is 64 tokens. However, you requested 72 tokens")
	f("/v1/chat/completions", `{"messages":[]}`, 400, `"param":"messages"`)
	f("/v1/chat/completions", `{"messages":`, 400, "JSON decode error")
	f("/v1/chat/completions", chat("x", `,"max_tokens":"3"`), 400, `"param":"max_tokens"`)
	f("/v1/chat/completions", chat("x", `,"Model":"nope","max_tokens":1`), 200, `"model":"meta-llama/Llama-3.1-8B-Instruct"`)
	f("/nowhere", `{}`, 404, `{"detail":"Not Found"}`)
	if code, _ := get(t, s, "/v1/chat/completions"); code != 405 {
		t.Errorf("GET: %d; want 405", code)
	}
}

func TestModelsAndAdapters(t *testing.T) {
	s := start(t, Options{Models: []string{"base", "alias"}, Adapters: []string{"sql"}, MaxLoras: 2, Speedup: 1000})
	cards := func() string {
		_, body := get(t, s, "/v1/models")
		var list struct {
			Data []struct {
				ID, Root string
				Parent   *string
				Len      *int `json:"max_model_len"`
			}
		}
		if err := json.Unmarshal([]byte(body), &list); err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, m := range list.Data {
			p := "-"
			if m.Parent != nil {
				p = *m.Parent
			}
			out = append(out, m.ID+"<"+p+" "+m.Root)
		}
		return strings.Join(out, ", ")
	}
	if got, want := cards(), "base<- /models/base, alias<- /models/base, sql<base /adapters/sql"; got != want {
		t.Fatalf("cards %s; want %s", got, want)
	}
	f := func(path, body string, status int, want string) {
		t.Helper()
		resp, got := post(t, s, path, body)
		if resp.StatusCode != status || !strings.Contains(got, want) {
			t.Errorf("%s %s: %d %s; want %d %s", path, body, resp.StatusCode, got, status, want)
		}
	}
	f("/v1/load_lora_adapter", `{"lora_name":"law","lora_path":"/p/law"}`, 200, "Success: LoRA adapter 'law' added successfully.")
	f("/v1/load_lora_adapter", `{"lora_name":"law","lora_path":"/p/law"}`, 400, "has already been loaded")
	f("/v1/load_lora_adapter", `{"lora_name":"law","lora_path":"/p/law2","load_inplace":true}`, 200, "Success")
	f("/v1/load_lora_adapter", `{"lora_name":"law"}`, 400, `"type":"InvalidUserInput"`)
	f("/v1/chat/completions", chat("x", `,"model":"law","max_tokens":2`), 200, `"model":"law"`)
	if got := cards(); !strings.Contains(got, "law<base /p/law2") {
		t.Errorf("cards %s; want law from its new path", got)
	}
	f("/v1/unload_lora_adapter", `{"lora_name":"law"}`, 200, "Success: LoRA adapter 'law' removed successfully.")
	f("/v1/unload_lora_adapter", `{"lora_name":"law"}`, 404, "The lora adapter 'law' cannot be found.")
	f("/v1/chat/completions", chat("x", `,"model":"law"`), 404, "does not exist")
	off := start(t, Options{})
	if resp, _ := post(t, off, "/v1/load_lora_adapter", `{"lora_name":"a","lora_path":"b"}`); resp.StatusCode != 404 {
		t.Errorf("with adapters off: %d; want 404", resp.StatusCode)
	}
}

// metric is the value of a series whose line begins with prefix.
func metric(t *testing.T, page, prefix string) string {
	t.Helper()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(rest[strings.LastIndex(rest, " ")+1:])
		}
	}
	t.Errorf("no %s in\n%s", prefix, page)
	return ""
}

func TestMetricsPage(t *testing.T) {
	s := start(t, Options{Adapters: []string{"b", "a"}, Speedup: 1000})
	post(t, s, "/v1/chat/completions", chat("x", `,"model":"a","max_tokens":5`))
	post(t, s, "/v1/chat/completions", chat("x", `,"model":"a","max_tokens":5`))
	post(t, s, "/v1/chat/completions", chat("x", `,"model":"b"`))
	_, page := get(t, s, "/metrics")
	labels := `{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"}`
	f := func(prefix, want string) {
		t.Helper()
		if got := metric(t, page, prefix); got != want {
			t.Errorf("%s %s; want %s", prefix, got, want)
		}
	}
	f("vllm:num_requests_running"+labels, "0.0")
	f("vllm:num_requests_waiting"+labels, "0.0")
	f("vllm:kv_cache_usage_perc"+labels, "0.0")
	f("vllm:num_preemptions_total"+labels, "0.0")
	f(`vllm:request_success_total{engine="0",finished_reason="length",`, "2.0")
	f(`vllm:request_success_total{engine="0",finished_reason="stop",`, "1.0")
	f(`vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",`, "3.0")
	f("vllm:time_to_first_token_seconds_count"+labels, "3.0")
	f(`vllm:engine_sleep_state{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct",sleep_state="awake"}`, "1.0")
	if !strings.Contains(page, `kv_cache_size_tokens="420992"`) || !strings.Contains(page, `num_gpu_blocks="26312"`) || !strings.Contains(page, `block_size="16"`) {
		t.Error("cache_config_info lacks its sizes")
	}
	// Both lists name every adapter in flight; the newest series of an idle
	// server is empty; the old ones stay.
	newest, at := "", 0.0
	n := 0
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "vllm:lora_requests_info{") {
			n++
			v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndex(line, " ")+1:]), 64)
			if err != nil {
				t.Error(err)
			}
			if v > at {
				newest, at = line, v
			}
		}
	}
	if n != 3 || !strings.HasPrefix(newest, `vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.`) {
		t.Errorf("%d lora series, newest %q; want 3 with the empty one newest", n, newest)
	}
	if got := pythonFloat(1203377); got != "1.203377e+06" {
		t.Errorf("pythonFloat: %s", got)
	}
}

// A client that leaves takes its request out of the engine, in a stream, before
// the headers of a whole answer, and while it waits.
func TestClientGoneAborts(t *testing.T) {
	s := start(t, Options{Speedup: 1, MaxSequences: 1})
	leave := func(body string, stream bool) {
		t.Helper()
		before := s.Stats()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL()+"/v1/chat/completions", strings.NewReader(body))
		done := make(chan error, 1)
		first := make(chan struct{})
		go func() {
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				if stream {
					bufio.NewReader(resp.Body).ReadString('\n')
					close(first)
				}
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			done <- err
		}()
		eventually(t, "request in the engine", func() bool { return s.Stats().Executed > before.Executed })
		if stream {
			<-first
		}
		cancel()
		if err := <-done; err == nil {
			t.Error("request ended by itself")
		}
		eventually(t, "abort", func() bool {
			st := s.Stats()
			return st.Aborted == before.Aborted+1 && st.Engine.Aborted == before.Engine.Aborted+1 && st.InFlight == before.InFlight
		})
	}
	leave(chat("x", `,"stream":true,"max_tokens":100000`), true)
	leave(chat("x", `,"max_tokens":100000`), false)
	if st := s.Stats(); st.Engine.KVBlocksUsed != 0 || st.Engine.Running != 0 {
		t.Errorf("left over: %+v", st.Engine)
	}
	// One that holds the only seat, and one that waits behind it.
	ctx := t.Context()
	req, _ := http.NewRequestWithContext(ctx, "POST", s.URL()+"/v1/chat/completions", strings.NewReader(chat("y", `,"max_tokens":100000`)))
	go http.DefaultClient.Do(req)
	eventually(t, "seat taken", func() bool { return s.Stats().Engine.Running == 1 })
	leave(chat("x", `,"stream":true,"max_tokens":100000`), false)
	aborts := s.Aborts()
	if len(aborts) != 3 || !aborts[0].Stream || aborts[1].Stream || aborts[0].Generated == 0 || aborts[2].Generated != 0 {
		t.Errorf("aborts %+v; want a stream with tokens, a whole one, a waiting stream without", aborts)
	}
}

func TestOptionsOfAnswers(t *testing.T) {
	s := start(t, Options{EndsEarly: true, MeanOutputTokens: 3, APIKey: "k", Dialect: DialectVLLM08, Adapters: []string{"a"}})
	ask := func(body, key string) (int, string) {
		t.Helper()
		req, _ := http.NewRequest("POST", s.URL()+"/v1/completions", strings.NewReader(body))
		if key != "" {
			req.Header.Set("Authorization", "Bearer "+key)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	if code, body := ask(`{"prompt":"x"}`, "wrong"); code != 401 || body != `{"error":"Unauthorized"}` {
		t.Errorf("wrong key: %d %s", code, body)
	}
	if code, body := ask(`{"prompt":"x","max_tokens":5000}`, "k"); code != 200 || !strings.Contains(body, `"finish_reason":"stop"`) {
		t.Errorf("EndsEarly: %d %s", code, body)
	}
	if code, body := ask(`{"prompt":"x","max_tokens":50,"ignore_eos":true}`, "k"); code != 200 || !strings.Contains(body, `"completion_tokens":50,`) {
		t.Errorf("ignore_eos: %d %s", code, body)
	}
	// Two choices that share a prompt count it once, in every chunk.
	if code, body := ask(`{"prompt":"12345678","max_tokens":2,"n":2,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`, "k"); code != 200 ||
		strings.Count(body, `"usage":{"prompt_tokens":2,`) != 7 || !strings.Contains(body, `"text":"12345678","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}],"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1}`) || !strings.Contains(body, `"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4}`) {
		t.Errorf("continuous usage: %d %s", code, body)
	}
	_, page := get(t, s, "/metrics") // needs no key
	if got := metric(t, page, `vllm:gpu_cache_usage_perc{model_name="meta-llama/Llama-3.1-8B-Instruct"}`); got != "0.0" || strings.Contains(page, "engine=") {
		t.Errorf("vLLM 0.8 page: %s\n%s", got, page)
	}
}

// Audio is a form; the model may come after the file.
func TestTranscription(t *testing.T) {
	s := start(t, Options{Models: []string{"whisper"}})
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	f, _ := w.CreateFormFile("file", "talk.wav")
	f.Write(make([]byte, 64_000))
	w.WriteField("model", "whisper")
	w.Close()
	resp, err := http.Post(s.URL()+"/v1/audio/transcriptions", w.FormDataContentType(), bytes.NewReader(form.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || !strings.HasPrefix(string(b), `{"text":"talk.wav `) {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}

func TestFillKeepsItsShare(t *testing.T) {
	s := start(t, Options{Profile: "8b-h100", Speedup: 50})
	if err := s.Fill(0.9); err != nil {
		t.Fatal(err)
	}
	f := func() {
		t.Helper()
		if u := s.Stats().Engine.KVUtilization(); u < 0.80 || u > 1 {
			t.Errorf("utilization %.3f; want about 0.9", u)
		}
	}
	f()
	// Until many background requests have ended and started again.
	eventually(t, "60 generations", func() bool { return s.Stats().Engine.Finished > 60 })
	f()
	if st := s.Stats(); st.InFlight != 0 || st.Engine.Running+st.Engine.Waiting != 47 {
		t.Errorf("%d calls, %d+%d requests; want background only", st.InFlight, st.Engine.Running, st.Engine.Waiting)
	}
}

func TestOnlyLoopback(t *testing.T) {
	if s, err := New(Options{Listen: "0.0.0.0:0"}); err == nil {
		s.Close(context.Background())
		t.Fatal("listens on all interfaces unasked")
	}
	s := start(t, Options{Listen: "localhost:0"})
	host, _, _ := net.SplitHostPort(s.Addr())
	if !net.ParseIP(host).IsLoopback() {
		t.Errorf("address %s", s.Addr())
	}
}
