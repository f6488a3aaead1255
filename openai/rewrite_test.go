package openai

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"kvgate/internal/shared"
)

func rewritten(events bool, model string, drop bool, pieces ...[]byte) []byte {
	var w Rewriter
	w.Reset(events, model, drop)
	out := []byte{}
	for _, p := range pieces {
		out = w.Append(out, p)
	}
	return w.Finish(out)
}

func TestRewriteModel(t *testing.T) {
	f := func(events bool, in, want string) {
		t.Helper()
		if got := string(rewritten(events, `a"b`, false, []byte(in))); got != want {
			t.Errorf("%s\nis   %s\nwant %s", in, got, want)
		}
		for i := range in { // cut anywhere
			if got := string(rewritten(events, `a"b`, false, []byte(in[:i]), []byte(in[i:]))); got != want {
				t.Errorf("%s cut at %d\nis   %s\nwant %s", in, i, got, want)
			}
		}
	}
	f(false, `{"id":"x","model":"m","z":1}`, `{"id":"x","model":"a\"b","z":1}`)
	f(false, ` { "model" : "m\"\\" , "choices":[{"model":"m","message":{"model":"m"}}]}`, ` { "model" : "a\"b" , "choices":[{"model":"m","message":{"model":"m"}}]}`)
	f(false, `{"model":null}`, `{"model":null}`)
	f(false, `{"a":{"model":"m"},"model":5,"b":["model","m"],"model":"m"}`, `{"a":{"model":"m"},"model":5,"b":["model","m"],"model":"a\"b"}`)
	f(false, `[{"model":"m"}]`, `[{"model":"m"}]`)
	f(false, `{"response":{"id":"r","model":"m","x":{"model":"m"}},"message":{"model":"m"}}`, `{"response":{"id":"r","model":"a\"b","x":{"model":"m"}},"message":{"model":"a\"b"}}`)
	f(false, `{"response":["model","m"],"x":"\"model\":\"m\""}`, `{"response":["model","m"],"x":"\"model\":\"m\""}`)
	f(false, `{"d":[[[[[[[[[[{"k":{"v":[{}]},"l":1}]]]]]]]]]],"model":"m"}`, `{"d":[[[[[[[[[[{"k":{"v":[{}]},"l":1}]]]]]]]]]],"model":"a\"b"}`)
	f(false, "{\"model\":\"m\"}\n{\"model\":\"m\"}\n", "{\"model\":\"a\\\"b\"}\n{\"model\":\"a\\\"b\"}\n") // JSON lines
	f(false, `}{"model"`, `}{"model"`)
	f(true, "data: {\"model\":\"m\"}\n\ndata: [DONE]\n\n", "data: {\"model\":\"a\\\"b\"}\n\ndata: [DONE]\n\n")
	f(true, "\xef\xbb\xbfdata:{\"model\":\"m\"}\r\n\r\nevent: x\rdata: {\"model\":\"m\"}\r\r", "\xef\xbb\xbfdata:{\"model\":\"a\\\"b\"}\r\n\r\nevent: x\rdata: {\"model\":\"a\\\"b\"}\r\r")
	f(true, ": {\"model\":\"m\"}\nid: {\"model\":\"m\"}\ndatax: {\"model\":\"m\"}\ndata: {\ndata: \"model\":\ndata: \"m\"}\n\n", ": {\"model\":\"m\"}\nid: {\"model\":\"m\"}\ndatax: {\"model\":\"m\"}\ndata: {\ndata: \"model\":\ndata: \"a\\\"b\"}\n\n")
	f(true, "data: {\"model\":\"cut", "data: {\"model\":\"a\\\"b\"")
	f(true, "data: no json {\"model\":\"m\"}\n\ndata: {\"model\":\"m\"}\n\n", "data: no json {\"model\":\"m\"}\n\ndata: {\"model\":\"a\\\"b\"}\n\n")
}

func TestDropUsageChunk(t *testing.T) {
	const (
		chunk = "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n"
		usage = "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n"
		done  = "data: [DONE]\n\n"
	)
	f := func(in, want string) {
		t.Helper()
		for _, crlf := range []bool{false, true} {
			in, want := in, want
			if crlf {
				in, want = strings.ReplaceAll(in, "\n", "\r\n"), strings.ReplaceAll(want, "\n", "\r\n")
			}
			for i := range in {
				if got := string(rewritten(true, "", true, []byte(in[:i]), []byte(in[i:]))); got != want {
					t.Fatalf("cut at %d of %q:\n%q\nwant\n%q", i, in, got, want)
				}
			}
		}
	}
	f(chunk+usage+done, chunk+done)
	f(chunk+chunk+done, chunk+chunk+done)
	f(": ping\n\n"+usage+": ping\n"+usage+done, ": ping\n\n: ping\n"+done)
	f("data: {\"usage\":{\"a\":1},\"choices\":[ ]}\n\n"+done, done)
	f("event: x\n"+usage+done, done)
	// What only looks like it stays: no usage, usage with a choice, an error, an end that is missing.
	for _, same := range []string{
		"data: {\"choices\":[],\"prompt_filter_results\":[{\"usage\":{}}]}\n\n",
		"data: {\"choices\":[],\"usage\":null}\n\n",
		"data: {\"choices\":[{}],\"usage\":{\"a\":1}}\n\n",
		"data: {\"usage\":{\"a\":1},\"choices\":[1]}\n\n",
		"data: {\"x\":{\"choices\":[],\"usage\":{}}}\n\n",
		"data: {\"usage\":{\"a\":1}}\n\n",
		"data: {\"error\":{\"message\":\"choices\"}}\n\n",
		"data: {\"choices\":[],\"usage\":{\"a\":1}",
		strings.TrimSuffix(usage, "\n"),
	} {
		f(chunk+same, chunk+same)
	}
	// It is held back no longer than needed.
	var w Rewriter
	w.Reset(true, "", true)
	if got := string(w.Append(nil, []byte(chunk[:strings.Index(chunk, `{"index"`)+1]))); !strings.HasSuffix(got, `"choices":[{`) {
		t.Errorf("held back: %q", got)
	}
	long := "data: {\"choices\":[],\"usage\":{\"x\":\"" + strings.Repeat("y", 2*maxHeldEvent) + "\"}}\n\n"
	if got := rewritten(true, "", true, []byte(long)); string(got) != long {
		t.Error("an event that is too long was changed")
	}
}

// Every sample, cut at every byte or so: all bytes but those of names are as they were, and names are the new one.
func TestRewriteSamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(shared.Dir(t), "sse-samples", "*"))
	if err != nil || len(files) < 20 {
		t.Fatalf("%d samples, %v", len(files), err)
	}
	changed := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		events := strings.HasSuffix(file, ".sse")
		whole := rewritten(events, "new", false, data)
		// Put back what was there: then it is as it was.
		if old := modelsIn(events, data); len(old) > 0 {
			changed++
			back := whole
			for _, name := range old {
				i := bytes.Index(back, []byte(`"new"`))
				if i < 0 {
					t.Errorf("%s: a name was left", file)
					break
				}
				back = append(append(append([]byte(nil), back[:i]...), '"', 0), back[i+4:]...) // marked, so that it isn't found again
				back = bytes.Replace(back, []byte{'"', 0, '"'}, append(append([]byte{'"'}, name...), '"'), 1)
			}
			if !bytes.Equal(back, data) {
				t.Errorf("%s: other bytes changed", file)
			}
		} else if !bytes.Equal(whole, data) {
			t.Errorf("%s: changed without a name in it", file)
		}
		dropped := rewritten(events, "new", true, data)
		for i := 0; i < len(data); i += 1 + len(data)/300 {
			if got := rewritten(events, "new", true, data[:i], data[i:]); !bytes.Equal(got, dropped) {
				t.Fatalf("%s: cut at %d", file, i)
			}
		}
	}
	if changed < 10 {
		t.Errorf("only %d samples have names in them", changed)
	}
}

// modelsIn finds the values of model the long way, as they are written, in order.
func modelsIn(events bool, data []byte) (out [][]byte) {
	docs := bytes.SplitSeq(data, []byte("\n"))
	for d := range docs {
		d = bytes.TrimPrefix(bytes.TrimRight(d, "\r"), bom[:])
		if events {
			var ok bool
			if d, ok = bytes.CutPrefix(d, []byte("data:")); !ok {
				continue
			}
		}
		var m map[string]json.RawMessage
		if json.Unmarshal(d, &m) != nil {
			continue
		}
		for _, at := range []string{"", "response", "message"} {
			o := m
			if at != "" {
				o = nil
				_ = json.Unmarshal(m[at], &o)
			}
			if v := o["model"]; len(v) > 1 && v[0] == '"' {
				out = append(out, v[1:len(v)-1])
			}
		}
	}
	return out
}

// However it is cut, the result is the same; and of valid JSON only the name differs.
func FuzzRewrite(f *testing.F) {
	f.Add([]byte(`{"model":"m","response":{"model":"x"}}`), 5, false)
	f.Add([]byte("data: {\"choices\":[],\"usage\":{}}\n\ndata: [DONE]\n\n"), 9, true)
	f.Add([]byte(": c\rdata: {\"model\":\"\\\"\"}\r\n\r\n"), 3, true)
	f.Fuzz(func(t *testing.T, data []byte, cut int, events bool) {
		cut = min(max(cut, 0), len(data))
		whole := rewritten(events, "new", events, data)
		if got := rewritten(events, "new", events, data[:cut], data[cut:]); !bytes.Equal(got, whole) {
			t.Fatalf("cut at %d: %q; whole %q", cut, got, whole)
		}
		if events || !json.Valid(data) {
			return
		}
		var was, is any
		if json.Unmarshal(data, &was) != nil || json.Unmarshal(whole, &is) != nil {
			t.Fatalf("%q became %q", data, whole)
		}
		if bytes.ContainsRune(data, '\\') {
			return // keys may be spelled with escapes, which no server does
		}
		for _, v := range []any{was, is} {
			if o, ok := v.(map[string]any); ok {
				for _, p := range []any{o, o["response"], o["message"]} {
					if o, ok := p.(map[string]any); ok {
						if _, isText := o["model"].(string); isText {
							o["model"] = "new"
						}
					}
				}
			}
		}
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("%q became %q", data, whole)
		}
	})
}

func TestRewriteDoesNotAllocate(t *testing.T) {
	in := []byte("data: {\"id\":\"x\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n")
	var w Rewriter
	w.Reset(true, "new", true)
	out := make([]byte, 0, 1<<10)
	w.Append(out, in)
	if n := testing.AllocsPerRun(100, func() { w.Append(out, in) }); n != 0 {
		t.Errorf("%v allocations per event", n)
	}
}

func BenchmarkRewriteEvent(b *testing.B) {
	in := []byte("data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1730000000,\"model\":\"meta-llama/Llama-3.3-70B-Instruct\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n")
	var w Rewriter
	w.Reset(true, "new", true)
	out := make([]byte, 0, 1<<10)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		w.Append(out, in)
	}
}
