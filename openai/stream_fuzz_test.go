package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// A naive is what a reader that holds the whole stream and decodes it with
// encoding/json finds. It shares no code with Stream.
type naive struct {
	events, comments int
	terminal         string
	finish           string
	failed           bool
	firstToken       bool
	counts           map[string]float64
	unsure           bool // the stream has something that readers may differ about
}

func naiveStream(body string) (n naive) {
	n.counts = map[string]float64{}
	body = strings.TrimPrefix(body, "\ufeff")
	if strings.HasPrefix(body, "{") {
		n.unsure = true // JSON lines
		return n
	}
	body = strings.ReplaceAll(strings.ReplaceAll(body, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(body, "\n")
	ended := len(lines) - 1 // the last one has no line end
	var data []string
	event := ""
	for i, line := range append(lines, "") {
		last := i >= ended
		if line == "" {
			if len(data) > 0 && n.terminal == "" {
				text := strings.Join(data, "\n")
				whole := json.Valid([]byte(text)) && strings.HasPrefix(strings.TrimLeft(text, " \t"), "{")
				if last && !whole && strings.HasSuffix(strings.TrimRightFunc(text, func(r rune) bool { return r <= ' ' }), "}") {
					n.unsure = true // whole to a lenient reader
				}
				if strings.Trim(text, " \t\n") == "[DONE]" { // empty lines of data before it say nothing, to either
					n.terminal = "done"
				} else if !last || whole {
					n.events++
					n.event(text, event)
				}
			} else if len(data) == 0 && event == "error" && n.terminal == "" && !last {
				n.failed = true
			}
			if data = nil; !last || i > ended {
				event = ""
			}
			continue
		}
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		colon := strings.Contains(line, ":")
		switch {
		case name == "data" && (colon || !last):
			data = append(data, value)
		case name == "event" && (colon || !last):
			event = value
		case name == "error" && (colon || !last):
			n.unsure = true
		case name == "" && colon:
			n.comments++
		}
	}
	return n
}

// event takes the data of one event.
func (n *naive) event(text, event string) {
	text = strings.TrimLeft(text, " \t\n")
	if !strings.HasPrefix(text, "{") {
		if strings.Contains(text, "{") {
			n.unsure = true
		}
		return
	}
	var v map[string]any
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	if !json.Valid([]byte(text)) || dec.Decode(&v) != nil || !utf8.ValidString(text) || hasDuplicateKeys(text) || refDepth([]byte(text)) > 100 || len(event) > 60 {
		n.unsure = true // Stream is lenient
		return
	}
	obj := func(v any, key string) map[string]any {
		m, _ := v.(map[string]any)
		o, _ := m[key].(map[string]any)
		return o
	}
	typ, isString := v["type"].(string)
	if !isString {
		typ = event
	}
	if len(typ) > 60 || isString && typ == "" && event != "" {
		n.unsure = true
	}
	failed := typ == "error" || typ == "response.failed" || v["object"] == "error"
	response := obj(v, "response")
	for _, e := range []any{v["error"], response["error"]} {
		if e != nil && e != false && e != "" {
			failed = true
		}
	}
	// Finish reasons, of which there may be several places.
	var reasons []string
	reason := func(r any) {
		if m, ok := r.(map[string]any); ok {
			r = m["type"]
			if _, nested := r.(map[string]any); nested {
				return
			}
		}
		if s, ok := r.(string); ok && s != "" {
			reasons = append(reasons, s)
			n.unsure = n.unsure || len(s) > 60
		}
	}
	choices, _ := v["choices"].([]any)
	hasChoice := false
	for _, c := range choices {
		if m, ok := c.(map[string]any); ok {
			hasChoice = true
			reason(m["finish_reason"])
		}
	}
	text1 := func(v any) any { // finish reasons that may be an object only in some places
		if s, ok := v.(string); ok {
			return s
		}
		return nil
	}
	reason(obj(v, "meta_info")["finish_reason"])
	reason(obj(v, "details")["finish_reason"])
	reason(text1(obj(v, "delta")["stop_reason"]))
	reason(text1(v["stop_reason"]))
	reason(v["stop_type"])
	reason(v["done_reason"])
	if terminalType(typ) {
		if s, ok := response["status"].(string); ok {
			reasons = append(reasons[:0:0], s)
			if v["status"] != nil {
				n.unsure = true
			}
		} else if s, ok := v["status"].(string); ok && s != "" {
			reasons = append(reasons[:0:0], s)
		}
		n.unsure = n.unsure || len(reasons) > 0 && len(reasons[0]) > 60
	}
	if slices.Sort(reasons); len(slices.Compact(reasons)) > 1 {
		n.unsure = true
	}
	if len(reasons) > 0 && !slices.Contains([]string{"abort", "error", "failed", "cancelled"}, n.finish) {
		n.finish = reasons[0]
	} else if len(reasons) > 0 && terminalType(typ) {
		n.finish = reasons[0]
	}
	// Token counts, in all places.
	set := map[string]bool{}
	counts := func(m map[string]any, names map[string]string) {
		for from, to := range names {
			num, ok := m[from].(json.Number)
			// 1e3 and 1.0 are no token counts.
			if !ok || len(num) > 15 || strings.Trim(string(num), "0123456789") != "" {
				continue
			}
			n.unsure = n.unsure || set[to]
			set[to] = true
			n.counts[to], _ = num.Float64()
		}
	}
	usage := map[string]string{
		"prompt_tokens": "prompt", "completion_tokens": "completion", "input_tokens": "input", "output_tokens": "output",
		"total_tokens": "total", "cache_read_input_tokens": "read", "cache_creation_input_tokens": "creation", "prompt_cache_hit_tokens": "cached",
	}
	for _, u := range []map[string]any{obj(v, "usage"), obj(response, "usage"), obj(obj(v, "message"), "usage")} {
		counts(u, usage)
		counts(obj(u, "prompt_tokens_details"), map[string]string{"cached_tokens": "cached"})
		counts(obj(u, "input_tokens_details"), map[string]string{"cached_tokens": "cached"})
	}
	counts(obj(v, "meta_info"), map[string]string{"prompt_tokens": "prompt", "completion_tokens": "completion", "cached_tokens": "cached"})
	counts(obj(v, "details"), map[string]string{"generated_tokens": "completion", "input_length": "prompt"})
	counts(v, map[string]string{"tokens_evaluated": "prompt", "tokens_predicted": "completion", "prompt_eval_count": "prompt", "eval_count": "completion"})
	// Is it a token?
	if !failed && !n.firstToken {
		_, isResponse := v["response"].(string)
		output := hasChoice || isResponse || obj(v, "meta_info") != nil
		for _, key := range []string{"text", "content", "token", "output_ids"} {
			switch v[key].(type) {
			case string, map[string]any, []any:
				output = true
			}
		}
		if _, ok := v["done"].(bool); ok {
			output = true
		}
		switch {
		case typ == "":
			n.firstToken = output
		case strings.HasSuffix(typ, ".delta") && typ != ".delta", strings.HasPrefix(typ, "content_block_"), typ == "message_start", typ == "message_delta",
			typ == "message_stop", typ == "response.completed", typ == "response.incomplete", typ == "transcript.text.done":
			n.firstToken = true
		default:
			n.firstToken = hasChoice
		}
	}
	if strings.HasPrefix(typ, "content_block_") && !slices.Contains([]string{"content_block_start", "content_block_delta", "content_block_stop"}, typ) {
		n.unsure = true
	}
	n.failed = n.failed || failed
	if slices.Contains([]string{"error", "message_stop"}, typ) || terminalType(typ) {
		n.terminal = typ
	}
}

func terminalType(typ string) bool {
	return typ == "response.completed" || typ == "response.failed" || typ == "response.incomplete"
}

// hasDuplicateKeys reports whether an object in text has a key twice.
func hasDuplicateKeys(text string) bool {
	dec := json.NewDecoder(strings.NewReader(text))
	var stack []map[string]bool // nil for arrays
	isKey := false
	for {
		t, err := dec.Token()
		if err != nil {
			return false
		}
		top := len(stack) - 1
		switch {
		case t == json.Delim('{'):
			stack = append(stack, map[string]bool{})
		case t == json.Delim('['):
			stack = append(stack, nil)
		case t == json.Delim('}') || t == json.Delim(']'):
			stack = stack[:top]
		case isKey:
			if stack[top][t.(string)] {
				return true
			}
			stack[top][t.(string)] = true
			isKey = false
			continue
		}
		top = len(stack) - 1
		isKey = top >= 0 && stack[top] != nil
	}
}

func (n *naive) compare(t *testing.T, s *Stream, body []byte) {
	t.Helper()
	if n.unsure {
		return
	}
	got := fmt.Sprintf("events %d comments %d terminal %q finish %q failed %v token %v", s.Events(), s.Comments(), s.Terminal(), s.FinishReason(), s.Failed(), s.FirstToken())
	want := fmt.Sprintf("events %d comments %d terminal %q finish %q failed %v token %v", n.events, n.comments, n.terminal, n.finish, n.failed, n.firstToken)
	if got != want {
		t.Fatalf("%q:\n got %s\nwant %s", body, got, want)
	}
	for i, name := range []string{"prompt", "completion", "input", "output", "total", "cached", "read", "creation"} {
		c, has := s.usage.get(i)
		if want, ok := n.counts[name]; ok != has || ok && float64(c) != want {
			t.Fatalf("%q: %s is %d, %v; want %v, %v", body, name, c, has, want, ok)
		}
	}
}

func TestStreamAgreesWithNaive(t *testing.T) {
	for _, c := range sseSamples(t) {
		n := naiveStream(string(c.body))
		if n.unsure != (strings.HasPrefix(string(c.body), "{") || strings.HasPrefix(c.file, "llamacpp-2025")) {
			t.Errorf("%s: the naive reader is unsure: %v", c.file, n.unsure)
		}
		var s Stream
		s.Feed(c.body)
		s.Finish()
		n.compare(t, &s, c.body)
	}
}

func FuzzStream(f *testing.F) {
	for i, c := range sseSamples(f) {
		if len(c.body) < 10_000 {
			f.Add(c.body, uint64(i))
		}
	}
	f.Add([]byte("event: error\r: x\r\r\ndata\n\ndata:{\"response\":{\"status\":\"failed\",\ndata:\"error\":{\"code\":\"x\"}},\"type\":\"response.failed\"}"), uint64(7))
	f.Add([]byte("data\ndata: [DONE]"), uint64(20))
	f.Fuzz(func(t *testing.T, body []byte, seed uint64) {
		var whole, pieces Stream
		before := bytes.Clone(body)
		whole.Feed(body)
		whole.Finish()
		if !bytes.Equal(before, body) {
			t.Fatal("Feed changed a byte")
		}
		// Any cuts give the same.
		pieces.Feed([]byte("data: {\"error\":{\"code\":1}}\n\ndata: {\"id\":\"x"))
		pieces.Reset()
		feed(t, &pieces, body, func() int {
			seed = seed*6364136223846793005 + 1442695040888963407
			return 1 + int(seed>>33)%(1+int(seed>>40)%40)
		})
		if a, b := summary(&whole), summary(&pieces); a != b {
			t.Fatalf("%q:\nwhole  %s\npieces %s", body, a, b)
		}
		n := naiveStream(string(body))
		n.compare(t, &whole, body)
		// The same JSON in one piece.
		if json.Valid(body) && bytes.HasPrefix(body, []byte("{")) {
			var j JSONScan
			j.Feed(body)
			if !j.Complete() {
				t.Fatalf("%q: not complete", body)
			}
		}
	})
}
