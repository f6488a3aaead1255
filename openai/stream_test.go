package openai

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// sseSample is a row of testdata/sse/EXPECTED.tsv and the stream it describes.
type sseSample struct {
	file string
	row  map[string]string
	body []byte
}

func sseSamples(tb testing.TB) []sseSample {
	tb.Helper()
	table, err := os.ReadFile("testdata/sse/EXPECTED.tsv")
	if err != nil {
		tb.Fatal(err)
	}
	var rows [][]string
	for line := range strings.Lines(string(table)) {
		rows = append(rows, strings.Split(strings.TrimSuffix(line, "\n"), "\t"))
	}
	var all []sseSample
	for _, row := range rows[1:] {
		s := sseSample{file: row[0], row: map[string]string{}}
		for i, name := range rows[0] {
			s.row[name] = row[i]
		}
		if s.file == "hostile-300kB-event.sse" {
			s.body = hugeEvent(tb)
		} else if s.body, err = os.ReadFile(filepath.Join("testdata/sse", s.file)); err != nil {
			tb.Fatal(err)
		}
		all = append(all, s)
	}
	if len(all) != 50 {
		tb.Fatalf("%d rows in EXPECTED.tsv; want 50", len(all))
	}
	return all
}

// hugeEvent makes a stream with a line of 300 kB, as audio and logprobs do.
func hugeEvent(tb testing.TB) []byte {
	b, err := os.ReadFile("testdata/sse/hostile-crlf.sse")
	if err != nil {
		tb.Fatal(err)
	}
	audio := `"content":"Hi","audio":{"id":"audio_1","data":"` + strings.Repeat("A", 300_000) + `"}`
	return bytes.Replace(bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")), []byte(`"content":"Hi"`), []byte(audio), 1)
}

// feed feeds body in pieces that cut yields the sizes of.
func feed(t *testing.T, s *Stream, body []byte, size func() int) {
	t.Helper()
	for p := bytes.Clone(body); len(p) > 0; {
		n := min(max(size(), 1), len(p))
		before := string(p[:n])
		s.Feed(p[:n:n])
		if string(p[:n]) != before {
			t.Fatal("Feed changed a byte")
		}
		clear(p[:n]) // nothing may be kept
		p = p[n:]
	}
	s.Finish()
}

// summary is all that a Stream says, in the columns of EXPECTED.tsv and more.
func summary(s *Stream) string {
	u := s.Usage()
	known, failed := s.FirstEvent()
	e := s.Error()
	return fmt.Sprintf("events=%d comments=%d terminal=%s finish=%s error=%s usage=%+v timings=%+v id=%s first=%v,%v token=%v,%v complete=%v mid=%v error=%+v",
		s.Events(), s.Comments(), s.Terminal(), s.FinishReason(), e.Label(), u, s.Timings(), s.ID(), known, failed, s.FirstToken(), s.FailedBeforeFirstToken(),
		s.Complete(), s.MidEvent(), e)
}

func (c *sseSample) check(t *testing.T, s *Stream) {
	t.Helper()
	u := s.Usage()
	column := func(name, got string) {
		t.Helper()
		if got != c.row[name] {
			t.Fatalf("%s: %s is %q; want %q", c.file, name, got, c.row[name])
		}
	}
	num := func(n int64, known bool) string {
		if !known {
			return ""
		}
		return strconv.FormatInt(n, 10)
	}
	terminal := s.Terminal()
	if terminal == "" {
		terminal = "none"
	}
	column("events", strconv.Itoa(s.Events()))
	column("comments", strconv.Itoa(s.Comments()))
	column("terminal", terminal)
	column("finish_reason", s.FinishReason())
	column("error", s.Error().Label())
	column("prompt_tokens", num(u.InputTokens, u.HasInput))
	column("completion_tokens", num(u.OutputTokens, u.HasOutput))
	column("cached_tokens", num(u.CachedTokens, u.HasCached))
	if failed := c.row["error"] != ""; s.Failed() != failed || (s.Error().Shape != ShapeNone) != failed {
		t.Fatalf("%s: failed is %v, error %+v", c.file, s.Failed(), s.Error())
	}
	// Some native APIs say by a member of the last event that it is the last one.
	native := c.row["api"] == "tgi" || c.row["api"] == "llamacpp" || c.row["api"] == "ollama"
	fr := c.row["finish_reason"]
	complete := (c.row["terminal"] != "none" || native && fr != "") && c.row["error"] == "" && fr != "abort" && fr != "error"
	if s.Complete() != complete {
		t.Fatalf("%s: complete is %v; want %v", c.file, s.Complete(), complete)
	}
	// A token has come if there is text; errors are no tokens.
	if c.row["text_json"] != `""` && !s.FirstToken() {
		t.Fatalf("%s: no first token", c.file)
	}
}

func TestStreamSamples(t *testing.T) {
	var s Stream
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, c := range sseSamples(t) {
		t.Run(c.file, func(t *testing.T) {
			run := func(size func() int) string {
				t.Helper()
				s.Reset()
				feed(t, &s, c.body, size)
				c.check(t, &s)
				return summary(&s)
			}
			whole := run(func() int { return len(c.body) })
			same := func(how string, got string) {
				t.Helper()
				if got != whole {
					t.Fatalf("%s:\n got %s\nwant %s", how, got, whole)
				}
			}
			same("byte by byte", run(func() int { return 1 }))
			step := stride
			if len(c.body) > 10_000 {
				step = 1009 // and the interesting ends below
			}
			for cut := 1; cut < len(c.body); cut++ {
				if cut%step != 0 && (step == stride || cut > 800 && cut < len(c.body)-800) {
					continue
				}
				first := true
				same(fmt.Sprintf("cut at %d", cut), run(func() int {
					if first {
						first = false
						return cut
					}
					return len(c.body)
				}))
			}
			for range 50 {
				limit := 1 + rnd.IntN(300)
				same("random", run(func() int { return 1 + rnd.IntN(limit) }))
			}
		})
	}
}

// TestStreamMoments checks what is known when, after each event.
func TestStreamMoments(t *testing.T) {
	f := func(file string, firstToken int, firstFailed bool, beforeToken bool, status int, retryable bool) {
		t.Helper()
		body, err := os.ReadFile("testdata/sse/" + file)
		if err != nil {
			t.Fatal(err)
		}
		var s Stream
		token := 0
		for _, line := range bytes.SplitAfter(body, []byte("\n")) {
			before := s.Events()
			s.Feed(line)
			known, failed := s.FirstEvent()
			if known != (s.Events() > 0 || s.Failed() || s.Terminal() != "") {
				t.Errorf("%s: first event known: %v after %d events", file, known, s.Events())
			}
			if known && failed != firstFailed {
				t.Errorf("%s: first event failed: %v", file, failed)
			}
			if s.Events() > before && s.FirstToken() && token == 0 {
				token = s.Events()
			}
		}
		s.Finish()
		if token != firstToken {
			t.Errorf("%s: first token with event %d; want %d", file, token, firstToken)
		}
		e := s.Error()
		if s.FailedBeforeFirstToken() != beforeToken || e.Status != status || e.Retryable() != retryable {
			t.Errorf("%s: before token %v, error %+v, retryable %v", file, s.FailedBeforeFirstToken(), e, e.Retryable())
		}
	}
	// The role chunk is the first token; response.created is not.
	f("vllm-chat-plain.sse", 1, false, false, 0, false)
	f("vllm-rust-frontend-chat.sse", 1, false, false, 0, false)
	f("vllm-completions-usage.sse", 1, false, false, 0, false)
	f("vllm-responses-text.sse", 5, false, false, 0, false)
	f("vllm-responses-reasoning-tool.sse", 5, false, false, 0, false)
	f("vllm-anthropic-text.sse", 1, false, false, 0, false)
	f("vllm-inference-v1-generate.sse", 1, false, false, 0, false)
	f("openai-transcription.sse", 1, false, false, 0, false)
	f("tgi-3.x-generate-stream.sse", 1, false, false, 0, false)
	f("sglang-generate-cumulative.sse", 1, false, false, 0, false)
	f("llamacpp-completion-native.sse", 1, false, false, 0, false)
	f("ollama-chat.ndjson", 1, false, false, 0, false)
	// Errors: in the first event, before any token, after it.
	f("vllm-chat-error-first-event.sse", 0, true, true, 400, false)
	f("tgi-3.x-chat-error.sse", 0, true, true, 429, true)
	f("sglang-generate-error.sse", 0, true, true, 400, false)
	f("hostile-json-instead-of-sse.json", 0, true, true, 500, true)
	f("openai-responses-error-event.sse", 0, false, true, 429, true)
	f("openai-responses-failed.sse", 0, false, true, 500, true)
	f("vllm-chat-error-mid-stream.sse", 1, false, false, 500, true)
	f("tgi-3.x-generate-stream-error.sse", 1, false, false, 424, false)
	f("anthropic-overloaded-error.sse", 1, false, false, 529, true)
	f("llamacpp-2025-02-error-field.sse", 1, false, false, 500, true)
}

func TestStreamForms(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		var s Stream
		for _, size := range []int{len(body), 1, 2, 3, 7} {
			s.Reset()
			feed(t, &s, []byte(body), func() int { return size })
			e := s.Error()
			got := fmt.Sprintf("%d %d %q %q %q %v", s.Events(), s.Comments(), s.Terminal(), s.FinishReason(), e.Label(), s.Complete())
			if got != want {
				t.Errorf("%q in pieces of %d:\n got %s\nwant %s", body, size, got, want)
			}
		}
	}
	f("", `0 0 "" "" "" false`)
	f("data: [DONE]", `0 0 "done" "" "" true`)
	f("data:[DONE]\r\r", `0 0 "done" "" "" true`)
	f("data:  [DONE] \n\n", `0 0 "done" "" "" true`)
	f("data: [DONE]x\n\n", `1 0 "" "" "" false`)
	f("data: [DONE", `0 0 "" "" "" false`)
	f("data: x[DONE]\n\n", `1 0 "" "" "" false`)
	f("data: [DONE]\ndata: x\n\n", `1 0 "" "" "" false`) // one event of two lines
	f(": [DONE]\n\nevent: [DONE]\n\n", `0 1 "" "" "" false`)
	// after the end nothing counts
	f("data: [DONE]\n\ndata: {\"error\":{\"code\":500}}\n\n", `0 0 "done" "" "" true`)
	f("\xef\xbb\xbfdata:[DONE]\n\n", `0 0 "done" "" "" true`)
	f("\xef\xbbdata:[DONE]\n\n", `0 0 "" "" "" false`) // no byte order mark, no data
	// look-alikes in text
	f(`data: {"choices":[{"delta":{"content":"\"finish_reason\":\"abort\",\"error\":{}"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n", `1 0 "done" "stop" "" true`)
	f(`data: {"choices":[{"delta":{"content":"data: [DONE]\n\n","error":{"code":1},"usage":5}}]}`+"\n\n", `1 0 "" "" "" false`)
	// lone CR; data in several lines
	f("data: {\"choices\":[{\rdata: \"finish_reason\":\"length\"}]\rdata:}\r\rdata: [DONE]\r\r", `1 0 "done" "length" "" true`)
	// a newline in a string is no JSON
	f("data: {\"choices\":[{\"finish_reason\":\"ab\ndata:ort\"}]}\n\n", `1 0 "" "" "" false`)
	// a cut answer stays cut, whatever comes later
	f(`data: {"choices":[{"finish_reason":"abort"},{"finish_reason":"stop"}]}`+"\n\n"+`data: {"choices":[{"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n", `2 0 "done" "abort" "" false`)
	// errors of all shapes
	f(`data: {"object":"error","message":"The request queue is full.","type":"ServiceUnavailable","param":null,"code":503}`+"\n\ndata: [DONE]\n\n", `1 0 "done" "" "503" false`)
	f(`data: {"error":"boom"}`+"\n\n", `1 0 "" "" "" false`)
	f("event: error\n: something\n\n", `0 1 "" "" "event" false`)
	f("event: error\ndata: {\"error\":{\"type\":\"api_error\"}}\n\n", `1 0 "error" "" "api_error" false`)
	f(`{"error":{"code":404}}`, `0 0 "" "" "json" false`)
	f("{\n  \"error\": {\"code\": 404}\n}\n", `0 0 "" "" "json" false`)
	f(`data: {"error":null,"choices":[{"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n", `1 0 "done" "stop" "" true`)
	// escapes in keys and values
	f(`data: {"cho\u0069ces":[{"finish_re\u0061son":"st\u006fp"}]}`+"\n\ndata: [DONE]\n\n", `1 0 "done" "stop" "" true`)
	// trailing garbage makes it no JSON
	f(`data: {"choices":[{"finish_reason":"stop"}]} x`+"\n\n", `1 0 "" "" "" false`)
	// odd usage
	f(`data: {"usage":"x"}`+"\n\n"+`data: {"usage":{"prompt_tokens":"7","completion_tokens":-1,"x":{"prompt_tokens":9}}}`+"\n\n", `2 0 "" "" "" false`)
}

func TestStreamUsage(t *testing.T) {
	f := func(body string, want Usage) {
		t.Helper()
		var s Stream
		feed(t, &s, []byte(body), func() int { return 5 })
		if got := s.Usage(); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", body, got, want)
		}
	}
	// strings, negative numbers, null, nested: unknown, not 0
	f(`data: {"usage":{"prompt_tokens":"7","completion_tokens":-1,"prompt_tokens_details":{"cached_tokens":null}}}`+"\n\n", Usage{})
	f(`data: {"usage":{"usage":{"prompt_tokens":7}}}`+"\n\n", Usage{})
	f(`data: {"usage":null}`+"\n\n", Usage{})
	f(`data: {"choices":[{"usage":{"prompt_tokens":7}}]}`+"\n\n", Usage{})
	f(`data: {"usage":{"prompt_tokens":1e3}}`+"\n\n", Usage{})
	// the last one counts, field by field
	f(`data: {"usage":{"prompt_tokens":7,"completion_tokens":1}}`+"\n\n"+`data: {"usage":{"completion_tokens":2}}`+"\n\n",
		Usage{InputTokens: 7, OutputTokens: 2, HasInput: true, HasOutput: true})
	// a cut-off event doesn't count
	f(`data: {"usage":{"prompt_tokens":7}`, Usage{})
	// Anthropic: what was written to the cache is prompt, too
	f(`data: {"type":"message_start","message":{"usage":{"input_tokens":3,"cache_creation_input_tokens":5,"cache_read_input_tokens":11,"output_tokens":1}}}`+"\n\n",
		Usage{InputTokens: 19, OutputTokens: 1, CachedTokens: 11, HasInput: true, HasOutput: true, HasCached: true})

	var s Stream
	body, _ := os.ReadFile("testdata/sse/llamacpp-chat-timings.sse")
	s.Feed(body)
	if got, want := s.Timings(), (Usage{237, 35, 236, true, true, true}); got != want || s.Usage() != (Usage{}) {
		t.Errorf("timings %+v, usage %+v", got, s.Usage())
	}
	body, _ = os.ReadFile("testdata/sse/vllm-responses-text.sse")
	s.Reset()
	s.Feed(body)
	if string(s.ID()) != "resp_0a1b2c3d4e5f" {
		t.Errorf("id %q", s.ID())
	}
	s.Reset()
	if s.ID() != nil || s.Usage() != (Usage{}) || s.Failed() {
		t.Error("Reset forgets nothing")
	}
}

func BenchmarkStreamFeed(b *testing.B) {
	for _, file := range []string{"vllm-chat-plain.sse", "vllm-completions-usage.sse", "vllm-responses-text.sse", "vllm-anthropic-text.sse"} {
		body, err := os.ReadFile("testdata/sse/" + file)
		if err != nil {
			b.Fatal(err)
		}
		events := bytes.SplitAfter(body, []byte("\n\n"))
		// Tokens of a running stream, one event in one read.
		tokens := events[len(events)/3 : len(events)/3+4]
		size := 0
		for _, e := range tokens {
			size += len(e) / len(tokens)
		}
		b.Run(fmt.Sprintf("%s/%dB", strings.TrimSuffix(file, ".sse"), size), func(b *testing.B) {
			var s Stream
			s.Feed(events[0])
			b.SetBytes(int64(size))
			b.ReportAllocs()
			i := 0
			reportCPU(b, func() {
				s.Feed(tokens[i&3])
				i++
			})
		})
		b.Run(fmt.Sprintf("%s/repeated", strings.TrimSuffix(file, ".sse")), func(b *testing.B) {
			var s Stream
			s.Feed(events[0])
			b.SetBytes(int64(len(tokens[0])))
			reportCPU(b, func() { s.Feed(tokens[0]) })
		})
	}
}

// TestStreamShortcut checks that events that look like the one before are read
// where they do tell something.
func TestStreamShortcut(t *testing.T) {
	run := func(events ...string) *Stream {
		var whole, pieces Stream
		body := []byte("data: " + strings.Join(events, "\n\ndata: ") + "\n\n")
		whole.Feed(body) // takes the shortcut
		whole.Finish()
		feed(t, &pieces, body, func() int { return 3 }) // can't
		if a, b := summary(&whole), summary(&pieces); a != b {
			t.Errorf("%q:\nwhole  %s\npieces %s", events, a, b)
		}
		return &whole
	}
	chunk := func(text, rest string) string {
		return `{"id":"c","choices":[{"index":0,"delta":{"content":"` + text + `"},"finish_reason":` + rest + `}]}`
	}
	a, b, c := chunk("a", "null"), chunk("b", "null"), chunk("c", "null")
	s := run(a, b, c, chunk("d", `"stop"`))
	if s.FinishReason() != "stop" || s.Events() != 4 {
		t.Error(summary(s))
	}
	if s = run(a, b, c); !s.learned {
		t.Error("the shortcut was not learned from three events")
	}
	// One that repeats itself, and then doesn't.
	if s = run(a, a, a); !s.learned {
		t.Error("the shortcut was not learned from an event that came twice")
	}
	s = run(a, a, a, a+" ", b, chunk("b", `"stop"`))
	if s.FinishReason() != "stop" || s.Events() != 6 {
		t.Error(summary(s))
	}
	s = run(a, a, a, a[:len(a)-1]+`,"error":"x"}`)
	if !s.Failed() {
		t.Error(summary(s))
	}
	s = run(a, a, a, a+` "}`)
	if s.Events() != 4 || s.Failed() {
		t.Error(summary(s))
	}
	// A text that ends early, and goes on as the members that matter.
	s = run(a, b, c, chunk(`d"},"finish_reason":"abort"},{"delta":{"content":"`, "null"))
	if s.FinishReason() != "abort" || s.Complete() {
		t.Error(summary(s))
	}
	s = run(a, b, c, `{"id":"c","choices":[{"index":0,"delta":{"content":"d"}}],"error":{"code":500},"x":[{"y":{"content":"e"},"finish_reason":null}]}`)
	if s.Error().Code != "500" {
		t.Error(summary(s))
	}
	// Escaped quotes, a backslash before the quote that seems to end the text.
	s = run(a, b, c, chunk(`d\"},\"finish_reason\":\"abort`, "null"), chunk(`\\`, `"length"`), chunk(`\\`, "null"))
	if s.FinishReason() != "length" || s.Events() != 6 {
		t.Error(summary(s))
	}
	s = run(a, b, c, strings.Replace(chunk("d", "null"), `"}`, `\"}`, 1)) // no JSON
	if s.Events() != 4 || s.Failed() {
		t.Error(summary(s))
	}
	// Other digits tell nothing, except in an escaped key and in usage.
	one := `{"id":"c","n":10,"choices":[{"delta":{"content":"%s"},"finish_re\u0061son":%s}]}`
	s = run(fmt.Sprintf(one, "a", "null"), fmt.Sprintf(one, "b", "null"), fmt.Sprintf(one, "c", "null"), fmt.Sprintf(one, "d", `"stop"`))
	if s.FinishReason() != "stop" {
		t.Error(summary(s))
	}
	odd := `{"id":"c","choices":[{"delta":{"content":"%s"}}],"erro\u007%d":"x"}`
	if s = run(fmt.Sprintf(odd, "a", 1), fmt.Sprintf(odd, "b", 1), fmt.Sprintf(odd, "c", 1), fmt.Sprintf(odd, "d", 2)); !s.Failed() {
		t.Error(summary(s))
	}
	counted := `{"id":"c","choices":[{"delta":{"content":"%s"}}],"usage":{"prompt_tokens":5,"completion_tokens":%d}}`
	s = run(fmt.Sprintf(counted, "a", 1), fmt.Sprintf(counted, "b", 2), fmt.Sprintf(counted, "c", 3), fmt.Sprintf(counted, "d", 4))
	if s.Usage().OutputTokens != 4 {
		t.Error(summary(s))
	}
	// The event's name counts where the data has no type, and two lines are no one.
	s = run(a, b, c+"\n\nevent: error", chunk("d", "null"))
	if !s.Failed() {
		t.Error(summary(s))
	}
	s = run(a, b, c, chunk("d", "null")+"\ndata: x", chunk("e", "null")+"\ndata:")
	if s.Events() != 5 {
		t.Error(summary(s))
	}
}
