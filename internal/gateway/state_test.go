package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/admin"
	"kvgate/internal/modelsim"
	"kvgate/pool"
	"kvgate/scoring"
)

// conversation is the body of a chat whose prompt begins as every longer one with the same number does.
func conversation(model string, i, words int) []byte {
	text := strings.Repeat(fmt.Sprintf("conversation %d goes on. ", i), words)
	b, _ := json.Marshal(map[string]any{
		"model": model, "max_tokens": 2, "stream": true,
		"messages": []map[string]string{{"role": "user", "content": text}},
	})
	return b
}

func TestKnowledgeSurvivesARestart(t *testing.T) {
	const conversations = 30
	var servers []*modelsim.Server
	var urls []string
	for i := range 3 {
		s := sim(t, modelsim.Options{Adapters: []string{"sql", "chat"}, Seed: uint64(i), Speedup: 1}) // slow enough to have a rate
		servers, urls = append(servers, s), append(urls, s.URL())
	}
	file := filepath.Join(t.TempDir(), "state")
	text := "state: {file: '" + file + "'}\n" + onePool(urls...)
	g := start(t, text, Options{})
	for i := range conversations {
		if status, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", string(conversation(baseModel, i, 300))); status != http.StatusOK {
			t.Fatalf("status %d: %s", status, body)
		}
	}
	if status, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", string(conversation("sql", 0, 50))); status != http.StatusOK {
		t.Fatalf("status %d: %s", status, body)
	}
	cached := func(g *run, i int) (endpoint string, tokens int32) {
		t.Helper()
		x, err := g.Explain(&admin.Inquiry{Path: "/v1/chat/completions", Body: conversation(baseModel, i, 400)})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range x.Endpoints {
			if e.CachedTokens > tokens {
				endpoint, tokens = e.ID, e.CachedTokens
			}
		}
		return endpoint, tokens
	}
	var where [conversations]string
	for i := range where {
		var tokens int32
		if where[i], tokens = cached(g, i); tokens < 1000 {
			t.Fatalf("conversation %d: %d tokens cached on %q before the restart", i, tokens, where[i])
		}
	}
	// The counters of the process that is going to be replaced have been seen to move, so that it is known as another one.
	eventually(t, "the first server's counters have been scraped", func() bool {
		for _, r := range g.Table().Load().Rows {
			if r.Endpoint.URL == urls[0] {
				return r.Load.PromptTokens > 0 && r.Booked().Requests == 0
			}
		}
		return false
	})
	view := snapshotOf(t, g)
	g.stop()
	g.wait()

	// One server is another process by the time that the gateway is back.
	if err := servers[0].Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	servers[0] = sim(t, modelsim.Options{Adapters: []string{"sql", "chat"}, Listen: strings.TrimPrefix(urls[0], "http://"), Seed: 9})
	other := "p/" + strings.TrimPrefix(urls[0], "http://")

	g = start(t, text, Options{})
	kept := 0
	for i := range where {
		at, tokens := cached(g, i)
		switch {
		case where[i] == other:
			if tokens != 0 {
				t.Errorf("conversation %d: %d tokens are believed to be cached by a server that has restarted", i, tokens)
			}
		case at != where[i] || tokens < 1000:
			t.Errorf("conversation %d was on %s; after the restart %d tokens of it are believed to be on %q", i, where[i], tokens, at)
		default:
			kept++
		}
	}
	if kept == 0 {
		t.Errorf("all conversations were on the server that restarted: %v", where)
	}
	again := snapshotOf(t, g)
	rates := 0
	for i, e := range again.Endpoints {
		was := view.Endpoints[i]
		if was.PrefillTokensPerSecond != nil {
			rates++
			if e.PrefillTokensPerSecond == nil || *e.PrefillTokensPerSecond != *was.PrefillTokensPerSecond {
				t.Errorf("%s: prefill rate %v; want %v as before", e.ID, e.PrefillTokensPerSecond, *was.PrefillTokensPerSecond)
			}
		}
		want := len(was.PlacedAdapters)
		if e.ID == other {
			want = 0
		}
		if len(e.PlacedAdapters) != want {
			t.Errorf("%s: adapters %v; want %d, of %v", e.ID, e.PlacedAdapters, want, was.PlacedAdapters)
		}
	}
	if rates == 0 {
		t.Error("no rate had been learned before the restart: the test shows nothing")
	}
	if len(again.Learned) != 1 || len(view.Learned) != 1 || again.Learned[0].WorkTokens != view.Learned[0].WorkTokens || view.Learned[0].WorkTokens == 0 {
		t.Errorf("learned %+v; want %+v as before", again.Learned, view.Learned)
	}
	if log := g.log.String(); strings.Count(log, `"state taken up"`) != 3 || strings.Count(log, `"same_process":false`) != 1 {
		t.Errorf("log:\n%s", log)
	}
}

func snapshotOf(t *testing.T, g *run) (v pool.View) {
	t.Helper()
	status, body := get(t, "http://"+g.AdminAddr()+"/debug/snapshot")
	if err := json.Unmarshal([]byte(body), &v); err != nil || status != http.StatusOK {
		t.Fatalf("status %d, %v: %s", status, err, body)
	}
	return v
}

// A state file that can't be used is one warning and a start without it.
func TestBadStateFiles(t *testing.T) {
	s := sim(t, modelsim.Options{})
	dir := t.TempDir()
	file := filepath.Join(dir, "state")
	run := func(more string) (log string) {
		t.Helper()
		g := start(t, "state: {file: '"+file+"'"+more+"}\n"+onePool(s.URL()), Options{})
		if status, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, true, 2)); status != http.StatusOK {
			t.Fatalf("status %d: %s", status, body)
		}
		g.stop()
		g.wait()
		return g.log.String()
	}
	if log := run(""); strings.Contains(log, "state file") || !strings.Contains(log, "state saved") {
		t.Errorf("the first start says:\n%s", log)
	}
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if fi, _ := os.Stat(file); fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v; want only the owner to read it", fi.Mode())
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2] ^= 1
	for what, b := range map[string][]byte{
		"cut off": good[:len(good)-3], "flipped": flipped, "foreign": []byte("#!/bin/sh\necho hello\n"), "empty": {},
		"another version": bytes.Replace(good, []byte("state 1"), []byte("state 2"), 1), "magic alone": []byte(stateMagic),
	} {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if log := run(""); strings.Count(log, "state file not used") != 1 || !strings.Contains(log, `"level":"warn"`) {
			t.Errorf("%s: log:\n%s", what, log)
		}
		if again, err := os.ReadFile(file); err != nil || !bytes.HasPrefix(again, []byte(stateMagic)) {
			t.Errorf("%s: it was not replaced at the end: %v", what, err)
		}
	}
	old := bytes.Replace(good, []byte(`"saved_at":"20`), []byte(`"saved_at":"19`), 1)
	if _, err := parseState(old); err == nil {
		t.Fatal("a changed time passes the checksum")
	}
	if log := run(", max_age: 1s"); strings.Contains(log, "not used") { // written a moment ago
		t.Errorf("a new file is not used:\n%s", log)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file, 0o700); err != nil {
		t.Fatal(err)
	}
	if log := run(""); strings.Count(log, "state file not used") != 1 || strings.Count(log, "state not saved") != 1 {
		t.Errorf("a directory in its place: log:\n%s", log)
	}
	left, _ := filepath.Glob(filepath.Join(dir, ".state.*"))
	if len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

func TestSameProcess(t *testing.T) {
	f := func(what string, e savedEndpoint, l pool.Load, since int64, same bool) {
		t.Helper()
		if n, ok := e.sameProcess(&l); ok != same || n != since {
			t.Errorf("%s: same %v with %d tokens since; want %v with %d", what, ok, n, same, since)
		}
	}
	f("nothing is known", savedEndpoint{PromptTokens: -1, GenerationTokens: -1}, pool.Load{PromptTokens: -1, GenerationTokens: -1}, 0, false)
	f("start time", savedEndpoint{StartTime: 100, PromptTokens: -1, GenerationTokens: -1}, pool.Load{StartTime: 101, PromptTokens: -1, GenerationTokens: -1}, 0, true)
	f("another start", savedEndpoint{StartTime: 100}, pool.Load{StartTime: 200}, 0, false)
	f("counters", savedEndpoint{PromptTokens: 50, GenerationTokens: 5}, pool.Load{PromptTokens: 70, GenerationTokens: 6}, 21, true)
	f("backwards", savedEndpoint{StartTime: 100, PromptTokens: 50}, pool.Load{StartTime: 100, PromptTokens: 40}, 0, false)
	f("idle since its start", savedEndpoint{}, pool.Load{PromptTokens: 40}, 40, false)
}

func FuzzState(f *testing.F) {
	f.Add([]byte(stateMagic + "{}\n"))
	f.Add([]byte("kvgate-state 2\n"))
	f.Add([]byte(stateMagic + `{"endpoints":[{"pool":"p","url":"http://h:1","prefixes":2}]}` + "\n" + strings.Repeat("x", 24)))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseState(withChecksum(b))
		if err != nil {
			return
		}
		n := 0
		for i := range st.Endpoints {
			n += len(st.Endpoints[i].prefixes)
		}
		if n*prefixSize > len(b) {
			t.Errorf("%d prefixes in %d bytes", n, len(b))
		}
		x := scoring.NewIndex(1 << 16)
		tab := pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{})
		if _, _, err := tab.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://h:1"}}, 1); err != nil {
			t.Fatal(err)
		}
		r := &tab.Load().Rows[0]
		for i := range st.Endpoints {
			r.Endpoint.Relearn(st.Endpoints[i].PrefillTokensPerSecond, st.Endpoints[i].Learned)
			r.Endpoint.Remember(st.Endpoints[i].PlacedAdapters, 2, false)
			x.Restore(r, st.Endpoints[i].prefixes, 0)
		}
		for i := range st.Learned {
			scoring.NewLearner().Restore(&st.Learned[i])
		}
	})
}
