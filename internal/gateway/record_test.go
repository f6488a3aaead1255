package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/modelsim"
	"kvgate/internal/record"
)

// recorded reads a record to its end.
func recorded(t *testing.T, name string) (out []record.Line, r *record.Reader) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	r = record.NewReader(bytes.NewReader(b), name)
	for {
		var l record.Line
		if err := r.Next(&l); errors.Is(err, io.EOF) {
			return out, r
		} else if err != nil {
			t.Fatal(err)
		}
		out = append(out, l)
	}
}

// What is recorded tells which prompts begin alike, how long they were and how they were served, and nothing of what they say.
func TestRecord(t *testing.T) {
	a, b := sim(t, modelsim.Options{Adapters: []string{"sql"}}), sim(t, modelsim.Options{Adapters: []string{"sql"}})
	dir := t.TempDir()
	file := filepath.Join(dir, "record.jsonl")
	text := func(policy string) string {
		return onePool(a.URL(), b.URL()) + "    policy: " + policy + "\nrecord: {file: " + file + "}\n"
	}
	g := start(t, text("auto"), Options{})
	url := "http://" + g.Addr() + "/v1/chat/completions"
	system := strings.Repeat("plantedsystemprompt ", 100) // 2,000 bytes
	ask := func(model, question string, stream bool) {
		t.Helper()
		body := fmt.Sprintf(`{"model":%q,"stream":%t,"max_tokens":9,"user":"planteduser","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`,
			model, stream, system, question+strings.Repeat(" plantedquestion", 40))
		code, answer := post(t, url, body)
		if code != 200 {
			t.Fatalf("%d %s", code, answer)
		}
		if stream && strings.Contains(answer, `"usage":{`) {
			t.Errorf("usage that nobody asked for: %s", answer)
		}
	}
	ask(baseModel, "one", true)
	ask(baseModel, "two", false)
	ask("sql", "one", true)
	if code, _ := post(t, url, chat("plantedmodel", false, 3)); code != 404 {
		t.Errorf("%d", code)
	}
	// A request is accounted for after its answer's end.
	eventually(t, "three requests are recorded", func() bool {
		_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
		return strings.Contains(page, "kvgate_recorded_requests_total 3\n")
	})
	// A policy that needs no prefixes, and a file that was rotated away by hand.
	if err := os.Rename(file, file+".old"); err != nil {
		t.Fatal(err)
	}
	g.write(text("{weights: {queue: 2, kvCache: 0.5}}"))
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Reload("signal"); err != nil { // the same again: it is opened anew
		t.Fatal(err)
	}
	ask(baseModel, "three", true)
	eventually(t, "the last request is recorded", func() bool {
		_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
		return strings.Contains(page, "kvgate_recorded_requests_total 4\n") && strings.Contains(page, "kvgate_record_dropped_requests_total 0\n")
	})
	g.stop()
	g.wait()

	first, _ := recorded(t, file+".old")
	second, r := recorded(t, file)
	if len(first) != 3 || len(second) != 1 {
		t.Fatalf("%d and %d requests are recorded; want 3 and 1", len(first), len(second))
	}
	all := append(first, second...)
	for i, l := range all {
		if l.Pool != "p" || l.Estimated || l.InputTokens < 100 || l.OutputTokens != 9 || l.MaxTokens != 9 || l.PromptBytes < 2500 || l.CachedTokens < 0 ||
			l.Status != 200 || l.Outcome != "ok" || l.Endpoint == "" || l.Session != all[0].Session || l.DurationSeconds <= 0 || l.At < all[max(0, i-1)].At {
			t.Errorf("%d: %+v", i, l)
		}
		if l.Stream != (i != 1) || l.Stream != (l.TTFTSeconds > 0) || l.Adapter != (i == 2) || l.Adapter != (l.Model == "sql") {
			t.Errorf("%d: %+v", i, l)
		}
		// Seven blocks of 256 bytes hold nothing but the system prompt.
		if ids := l.BlockIDs(nil); len(ids) < 8 || (ids[6] == all[0].BlockIDs(nil)[6]) != (i != 2) || i > 0 && ids[len(ids)-1] == all[0].BlockIDs(nil)[len(ids)-1] {
			t.Errorf("%d: blocks %x", i, ids)
		}
	}
	if f := r.Fleets(); len(f) != 1 || f[0].Pool != "p" || f[0].Endpoints != 2 || f[0].Policy != "kv_cache=0.5+queue=2" || f[0].KVTokens < 100_000 || f[0].AdapterSlots != 4 {
		t.Errorf("fleet %+v", f)
	}
	for _, name := range []string{file, file + ".old"} {
		data, err := os.ReadFile(name)
		if err != nil || bytes.Contains(data, []byte("planted")) || bytes.Contains(data, []byte("127.0.0.1")) {
			t.Errorf("%v: %s", err, data)
		}
	}
}

// A record that can't be written keeps the gateway from starting, and a reload from being taken over.
func TestRecordThatCannotBeWritten(t *testing.T) {
	a := sim(t, modelsim.Options{})
	good := onePool(a.URL())
	g := start(t, good, Options{})
	g.write(good + "record: {file: " + filepath.Join(t.TempDir(), "no", "such", "dir", "r") + "}\n")
	if _, err := g.Reload("test"); err == nil || !strings.Contains(err.Error(), "record: open") {
		t.Errorf("%v", err)
	}
	if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, true, 3)); code != 200 {
		t.Errorf("%d %s", code, body)
	}
}
