package gateway

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

// sglangs starts two simulated SGLang servers; asked counts the chat requests that reach them, by the model they name.
func sglangs(t *testing.T, o modelsim.Options) (a, b *modelsim.Server, asked func() map[string]int) {
	t.Helper()
	var mu sync.Mutex
	counts := make(map[string]int)
	o.Dialect = modelsim.DialectSGLang
	o.OnRequest = func(r *http.Request, body []byte) {
		var v struct{ Model string }
		if r.URL.Path == "/v1/chat/completions" && json.Unmarshal(body, &v) == nil {
			mu.Lock()
			counts[v.Model]++
			mu.Unlock()
		}
	}
	return sim(t, o), sim(t, o), func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(counts)
	}
}

// holds lists the adapters that a server says it has.
func holds(t *testing.T, s *modelsim.Server) (names []string) {
	t.Helper()
	var v struct {
		Data []struct{ ID, Parent string }
	}
	if _, list := get(t, s.URL()+"/v1/models"); json.Unmarshal([]byte(list), &v) != nil {
		t.Fatalf("list of models: %s", list)
	}
	for _, m := range v.Data {
		if m.Parent != "" {
			names = append(names, m.ID)
		}
	}
	return names
}

// SGLang answers for the base model, with 200, where the adapter isn't named as it wants it.
func TestSGLangLoadsOnDemand(t *testing.T) {
	a, b, asked := sglangs(t, modelsim.Options{MaxLoras: 4})
	g := start(t, managed("      preload: false\n      registry: [{name: sql, source: /adapters/sql}, {name: law, source: /adapters/law}]\n", a.URL(), b.URL()), Options{})
	for _, r := range g.Table().Load().Rows {
		if r.Load == nil || r.Load.Dialect != "sglang" || r.Load.MaxAdapters != 4 || r.KVCapacity == 0 {
			t.Errorf("%s: %+v", r.Endpoint.ID, r.Load)
		}
	}
	var clients sync.WaitGroup
	for i := range 20 {
		clients.Go(func() {
			resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat("sql", i%2 == 0, 3)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if body, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || strings.Contains(string(body), `"error"`) {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
	clients.Wait()
	if n := actions(t, g, "load", "asked", "ok"); n != 1 || len(holds(t, a))+len(holds(t, b)) != 1 {
		t.Errorf("it was loaded %d times, and is on %v and %v; want once", n, holds(t, a), holds(t, b))
	}
	if code, body := ask(t, g, baseModel); code != 200 {
		t.Errorf("base model: %d %s", code, body)
	}
	if got := asked(); len(got) != 2 || got[baseModel+":sql"] != 20 || got[baseModel] != 1 {
		t.Errorf("the servers were asked for %v", got)
	}
	if n := a.Stats().Engine.AdapterHostLoads + b.Stats().Engine.AdapterHostLoads; n != 1 {
		t.Errorf("the adapter was used on %d servers; want 1", n)
	}
}

// With every place of both servers taken, what is asked for least on one of them makes room, and what is asked for most stays.
func TestSGLangUnloadsLeastValue(t *testing.T) {
	a, b, _ := sglangs(t, modelsim.Options{MaxLoras: 2})
	var registry []string
	for i := range 5 {
		registry = append(registry, fmt.Sprintf("{name: a%d, source: /a/%d, max_replicas: 1}", i, i))
	}
	g := start(t, managed("      per_endpoint: 2\n      hold: 100ms\n      preload: false\n      registry: ["+strings.Join(registry, ", ")+"]\n", a.URL(), b.URL()), Options{})
	use := func(name string) {
		t.Helper()
		if code, body := ask(t, g, name); code != 200 {
			t.Fatalf("%s: %d %s", name, code, body)
		}
	}
	for i := range 4 {
		use(fmt.Sprint("a", i))
	}
	servers := []*modelsim.Server{a, b}
	much, little := make([]string, 2), make([]string, 2)
	for i, s := range servers {
		has := holds(t, s)
		if len(has) != 2 {
			t.Fatalf("a server has %v; want 2 adapters", has)
		}
		much[i], little[i] = has[0], has[1]
	}
	for range 20 {
		use(much[0])
		use(much[1])
	}
	use("a4")
	at := 0
	if slices.Contains(holds(t, b), "a4") {
		at = 1
	}
	for i, want := range [][]string{{much[0], little[0]}, {much[1], little[1]}} {
		if i == at {
			want[1] = "a4"
		}
		has := holds(t, servers[i])
		slices.Sort(has)
		slices.Sort(want)
		if !slices.Equal(has, want) {
			t.Errorf("a server has %v; want %v", has, want)
		}
	}
	if actions(t, g, "unload", "room", "ok") != 1 {
		t.Error("want one unloaded, for room")
	}
}

func TestSGLangRestartedGetsItsAdaptersBack(t *testing.T) {
	a, b, _ := sglangs(t, modelsim.Options{MaxLoras: 4})
	g := start(t, managed("      preload: false\n      loading: 4\n      registry: [{name: sql, source: /a/sql}, {name: law, source: /a/law}, {name: pin, source: /a/pin, pin: true, min_replicas: 2}]\n", a.URL(), b.URL()), Options{})
	eventually(t, "the pinned one on both", func() bool { return len(on(g, "pin")) == 2 })
	for _, name := range []string{"sql", "law"} {
		if code, body := ask(t, g, name); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
	}
	had := [][]string{holds(t, a), holds(t, b)}
	time.Sleep(5100 * time.Millisecond) // what has just been loaded may not be on the server's list yet
	for _, s := range []*modelsim.Server{a, b} {
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range []*modelsim.Server{a, b} {
		slices.Sort(had[i])
		eventually(t, fmt.Sprint(had[i], " back"), func() bool {
			has := holds(t, s)
			slices.Sort(has)
			return slices.Equal(has, had[i])
		})
	}
	if n := actions(t, g, "load", "asked", "ok"); n != 2 {
		t.Errorf("%d loads had a request wait; want the first 2 alone", n)
	}
}

func TestSGLangFailuresAreSaid(t *testing.T) {
	// One has no LoRA at all, which SGLang says as it says everything: 400, "success": false.
	off := sim(t, modelsim.Options{Dialect: modelsim.DialectSGLang})
	a, b, asked := sglangs(t, modelsim.Options{MaxLoras: 4, AdapterRoot: "/adapters"})
	g := start(t, managed("      preload: false\n      registry: [{name: sql, source: /adapters/sql}, {name: lost, source: /elsewhere/lost}]\n", off.URL(), a.URL(), b.URL()), Options{})
	if code, body := ask(t, g, "sql"); code != 200 {
		t.Errorf("sql: %d %s", code, body)
	}
	for _, stream := range []bool{false, true} {
		code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat("lost", stream, 3))
		var e struct {
			Error struct{ Message, Type, Param, Code string }
		}
		if err := json.Unmarshal([]byte(body), &e); err != nil || code != 503 || e.Error.Code != "no_endpoints" || e.Error.Param != "model" ||
			!strings.Contains(e.Error.Message, `"lost"`) || strings.Contains(body, "/elsewhere") {
			t.Errorf("an adapter that is nowhere: %d %s", code, body)
		}
	}
	for _, s := range g.adapters.Status() {
		if s.Name == "lost" && !strings.Contains(s.Error, "Repo id must be in the form") && !strings.Contains(s.Error, "--enable-lora") {
			t.Errorf("it is not said why: %+v", s)
		}
	}
	if got := asked(); got[baseModel+":lost"]+got["lost"] != 0 {
		t.Errorf("the servers were asked for %v", got)
	}
}

// A queue that is full is told inside of a 200. Nothing of it has been shown to the client: the other endpoint answers.
func TestSGLangQueueFullMovesOn(t *testing.T) {
	full := sim(t, modelsim.Options{Dialect: modelsim.DialectSGLang, MaxQueued: 1, MaxSequences: 1, Speedup: 1})
	free := sim(t, modelsim.Options{Dialect: modelsim.DialectSGLang})
	for i := range 2 { // others' requests: one runs, one waits
		resp, err := http.Post(full.URL()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, true, 100_000)))
		if err != nil {
			t.Fatal(err)
		}
		defer http.DefaultClient.CloseIdleConnections()
		defer resp.Body.Close()
		eventually(t, "one more there", func() bool { e := full.Stats().Engine; return e.Running == 1 && e.Waiting == i })
	}
	g := start(t, onePool(full.URL(), free.URL())+"    policy: round_robin\n", Options{})
	refused := full.Stats().Errored
	for i := range 4 {
		stream := i%2 == 0
		code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, stream, 3))
		if code != 200 || strings.Contains(body, "error") || !strings.Contains(body, `"finish_reason":"length"`) || stream != strings.Contains(body, "[DONE]") {
			t.Errorf("stream %t: %d %s", stream, code, body)
		}
	}
	if n := full.Stats().Errored - refused; n == 0 || free.Stats().Completed != 4 {
		t.Errorf("%d were refused by the full one, %d answered by the other; want some, and all 4", n, free.Stats().Completed)
	}
}
