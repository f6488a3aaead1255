package modelsim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/shared"
)

// shape is the sequence of events of a stream: the event's name and its JSON with
// every value replaced by its type, keys in order, repeats of an event once.
func shape(t *testing.T, stream string) []string {
	t.Helper()
	var out []string
	for event := range strings.SplitSeq(strings.TrimSpace(stream), "\n\n") {
		var s strings.Builder
		for line := range strings.Lines(event) {
			name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
			if name != "data" || value == "[DONE]" {
				s.WriteString(name + ": " + value + " ")
				continue
			}
			s.WriteString(types(t, value))
		}
		if len(out) == 0 || out[len(out)-1] != s.String() {
			out = append(out, s.String())
		}
	}
	return out
}

// types replaces the values of a JSON text by their types. finish_reason and the
// like keep null apart from a value.
func types(t *testing.T, text string) string {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var b bytes.Buffer
	for {
		tok, err := d.Token()
		if err != nil {
			return b.String()
		}
		switch v := tok.(type) {
		case json.Delim:
			b.WriteString(v.String())
		case json.Number:
			b.WriteString("# ")
		case string:
			// Keys are what a decoder cannot tell from values; short known words
			// are kept, texts are not.
			if strings.Contains(text, `"`+v+`":`) || strings.HasPrefix(v, "response.") || strings.HasPrefix(v, "message_") || strings.HasSuffix(v, "_delta") {
				b.WriteString(v + " ")
			} else {
				b.WriteString("$ ")
			}
		default:
			fmt.Fprintf(&b, "%v ", v)
		}
	}
}

// Streams have the shape of the samples, which follow vLLM's source: the same
// events in the same order with the same keys.
func TestStreamsHaveVLLMsShape(t *testing.T) {
	dir := filepath.Join(shared.Dir(t), "sse-samples")
	s := start(t, Options{})
	f := func(sample, path, body string) {
		t.Helper()
		want, err := os.ReadFile(filepath.Join(dir, sample))
		if err != nil {
			t.Fatal(err)
		}
		_, got := post(t, s, path, body)
		g, w := shape(t, got), shape(t, string(want))
		for i := range max(len(g), len(w)) {
			var a, b string
			if i < len(g) {
				a = g[i]
			}
			if i < len(w) {
				b = w[i]
			}
			if a != b {
				t.Errorf("%s: part %d of %d\n got %s\nwant %s", sample, i, len(w), a, b)
			}
		}
	}
	messages := `"messages":[{"role":"user","content":"one two three four"}]`
	f("vllm-chat-plain.sse", "/v1/chat/completions", `{`+messages+`,"stream":true,"max_tokens":4}`)
	f("vllm-chat-usage.sse", "/v1/chat/completions", `{`+messages+`,"stream":true,"max_tokens":4,"stream_options":{"include_usage":true}}`)
	f("vllm-completions-usage.sse", "/v1/completions", `{"prompt":"one two three","stream":true,"max_tokens":4,"stream_options":{"include_usage":true}}`)
	f("vllm-anthropic-text.sse", "/v1/messages", `{`+messages+`,"stream":true,"max_tokens":4}`)
	s.SetFaults(Fault{Kind: FaultFinishAbort, Events: 2, Count: 1})
	f("vllm-chat-abort-finish-reason.sse", "/v1/chat/completions", `{`+messages+`,"stream":true,"max_tokens":4}`)
	s.SetFaults(Fault{Kind: FaultErrorEvent, Events: 3, Count: 1})
	f("vllm-chat-error-mid-stream.sse", "/v1/chat/completions", `{`+messages+`,"stream":true,"max_tokens":4}`)
	s.SetFaults(Fault{Kind: FaultFinishError, Events: 1, Count: 1})
	f("vllm-chat-retryable-generation-error.sse", "/v1/chat/completions", `{`+messages+`,"stream":true,"max_tokens":4}`)
	f("vllm-responses-text.sse", "/v1/responses", `{"input":"one two three","stream":true}`)
}
