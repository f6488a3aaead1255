package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/internal/adapters"
	"kvgate/internal/modelsim"
	"kvgate/pool"
)

func managed(more string, urls ...string) string {
	return "pools:\n  - name: p\n    models: [" + baseModel + "]\n    discovery: {static: [" + strings.Join(urls, ", ") + "]}\n    adapters:\n" + more
}

// on returns where an adapter is, by what the gateway says.
func on(g *run, name string) []string {
	for _, s := range g.adapters.Status() {
		if s.Name == name {
			return s.On
		}
	}
	return nil
}

func ask(t *testing.T, g *run, model string) (int, string) {
	t.Helper()
	return post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(model, false, 3))
}

// actions counts what the metrics say was done.
func actions(t *testing.T, g *run, action, why, result string) int {
	t.Helper()
	_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
	n := 0
	_, rest, ok := strings.Cut(page, fmt.Sprintf(`kvgate_adapter_actions_total{action=%q,pool="p",reason=%q,result=%q} `, action, why, result))
	if ok {
		fmt.Sscan(rest, &n)
	}
	return n
}

// A request for an adapter that nobody has waits until it has been loaded, once for all that ask.
func TestAdapterIsLoadedOnDemand(t *testing.T) {
	a, b := sim(t, modelsim.Options{MaxLoras: 4}), sim(t, modelsim.Options{MaxLoras: 4})
	g := start(t, managed("      preload: false\n      registry: [{name: sql, source: /adapters/sql}, {name: law, source: /adapters/law}]\n", a.URL(), b.URL()), Options{})
	if _, list := get(t, "http://"+g.Addr()+"/v1/models"); !strings.Contains(list, `"id":"sql"`) || !strings.Contains(list, `"parent":"`+baseModel+`"`) {
		t.Errorf("the list of models lacks what could be loaded: %s", list)
	}
	var clients sync.WaitGroup
	for range 20 {
		clients.Go(func() {
			resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat("sql", false, 3)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if body, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
	clients.Wait()
	if n := actions(t, g, "load", "asked", "ok"); n != 1 {
		t.Errorf("it was loaded %d times; want once", n)
	}
	if w := on(g, "sql"); len(w) != 1 {
		t.Errorf("it is on %v; want one endpoint", w)
	}
	if code, body := ask(t, g, baseModel); code != 200 {
		t.Errorf("base model: %d %s", code, body)
	}
	if code, body := ask(t, g, "nobody"); code != 404 {
		t.Errorf("an adapter that isn't in the registry: %d %s", code, body)
	}
	code, page := get(t, "http://"+g.AdminAddr()+"/debug/adapters")
	var v struct{ Adapters []adapters.Status }
	if err := json.Unmarshal([]byte(page), &v); code != 200 || err != nil || len(v.Adapters) != 2 || v.Adapters[0].Name != "sql" {
		t.Errorf("/debug/adapters: %d %v %s", code, err, page)
	}
}

func TestAdapterFailuresAreSaidAndTriedElsewhere(t *testing.T) {
	// The first can't load adapters at run time at all; the second can.
	a := sim(t, modelsim.Options{MaxLoras: 4, NoRuntimeLoRA: true})
	b := sim(t, modelsim.Options{MaxLoras: 4, AdapterRoot: "/adapters"})
	g := start(t, managed("      preload: false\n      registry: [{name: sql, source: /adapters/sql}, {name: law, source: /adapters/law}, {name: lost, source: /elsewhere/lost}]\n", a.URL(), b.URL()), Options{})
	for _, name := range []string{"sql", "law"} {
		if code, body := ask(t, g, name); code != 200 {
			t.Errorf("%s: %d %s", name, code, body)
		}
		if w := on(g, name); len(w) != 1 || !strings.HasSuffix(b.URL(), strings.TrimPrefix(w[0], "p/")) {
			t.Errorf("%s is on %v; want %s", name, w, b.URL())
		}
	}
	code, body := ask(t, g, "lost")
	var e struct {
		Error struct{ Message, Type, Param, Code string }
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || code != 503 || e.Error.Code != "no_endpoints" || e.Error.Param != "model" || !strings.Contains(e.Error.Message, `"lost"`) {
		t.Errorf("an adapter that is nowhere: %d %s", code, body)
	}
	for _, s := range g.adapters.Status() {
		if s.Name == "lost" && !strings.Contains(s.Error, "No adapter found for /elsewhere/lost") {
			t.Errorf("it is not said why: %+v", s)
		}
	}
	if strings.Contains(body, "/elsewhere") || strings.Contains(body, "127.0.0.1") {
		t.Errorf("the client is told of the inside: %s", body)
	}
}

func TestRestartedServerGetsItsAdaptersBack(t *testing.T) {
	a := sim(t, modelsim.Options{MaxLoras: 4})
	g := start(t, managed("      preload: false\n      loading: 4\n      registry: [{name: sql, source: /a/sql}, {name: law, source: /a/law}, {name: pin, source: /a/pin, pin: true}]\n", a.URL()), Options{})
	eventually(t, "the pinned one", func() bool { return len(on(g, "pin")) == 1 })
	for _, name := range []string{"sql", "law"} {
		if code, body := ask(t, g, name); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
	}
	time.Sleep(5100 * time.Millisecond) // what has just been loaded may not be on the server's list yet
	if err := a.Restart(); err != nil {
		t.Fatal(err)
	}
	served := func() string {
		_, list := get(t, a.URL()+"/v1/models")
		return list
	}
	eventually(t, "all three back on the server", func() bool {
		list := served()
		return strings.Contains(list, `"sql"`) && strings.Contains(list, `"law"`) && strings.Contains(list, `"pin"`)
	})
	if n := actions(t, g, "load", "asked", "ok"); n != 2 {
		t.Errorf("%d loads had a request wait; want the first 2 alone", n)
	}
}

// With fewer places than adapters, what is worth least goes when its last request has ended, and everything is answered.
func TestAdaptersShareFewPlaces(t *testing.T) {
	a := sim(t, modelsim.Options{MaxLoras: 2})
	g := start(t, managed("      per_endpoint: 2\n      hold: 100ms\n      preload: false\n      registry: [{name: a0, source: /a/0}, {name: a1, source: /a/1}, {name: a2, source: /a/2}, {name: a3, source: /a/3}]\n", a.URL()), Options{})
	var clients sync.WaitGroup
	for k := range 4 {
		clients.Go(func() {
			for i := range 6 {
				name := fmt.Sprint("a", (i+k)%4)
				resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(name, i%2 == 0, 3)))
				if err != nil {
					t.Error(err)
					return
				}
				if body, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 {
					t.Errorf("%s: %d %s", name, resp.StatusCode, body)
				}
				resp.Body.Close()
			}
		})
	}
	clients.Wait()
	eventually(t, "at most two on the server", func() bool {
		_, list := get(t, a.URL()+"/v1/models")
		return strings.Count(list, `"parent":"`) <= 2
	})
	if actions(t, g, "unload", "room", "ok") == 0 {
		t.Error("nothing was unloaded")
	}
}

func TestAdaptersDryRun(t *testing.T) {
	a := sim(t, modelsim.Options{MaxLoras: 4})
	g := start(t, managed("      dry_run: true\n      registry: [{name: pin, source: /a/pin, pin: true}]\n", a.URL()), Options{})
	eventually(t, "a decision in the log", func() bool { return strings.Contains(g.log.String(), "would load adapter") })
	if code, body := ask(t, g, "pin"); code != 404 {
		t.Errorf("%d %s; want 404: nobody has it", code, body)
	}
	if _, list := get(t, a.URL()+"/v1/models"); strings.Contains(list, `"pin"`) {
		t.Error("a dry run has loaded it")
	}
}

// A pool that waits for endpoints starts with none: requests wait for the first one that discovery finds, and then go.
func TestScaleFromZero(t *testing.T) {
	targets := t.TempDir() + "/targets.yaml"
	write(t, targets, "[]\n")
	text := "pools:\n  - name: p\n    models: [" + baseModel + "]\n    discovery: {file: {path: " + targets + ", interval: 100ms}}\n    admission: {wait_for_endpoints: 30s}\n"
	g := start(t, text, Options{StartTimeout: 100 * time.Millisecond})
	var codes []int
	var mu sync.Mutex
	var clients sync.WaitGroup
	for i := range 5 {
		clients.Go(func() {
			resp, err := http.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, i%2 == 0, 3)))
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			mu.Lock()
			codes = append(codes, resp.StatusCode)
			mu.Unlock()
		})
	}
	page := func() string {
		_, p := get(t, "http://"+g.AdminAddr()+"/metrics")
		return p
	}
	eventually(t, "five waiting", func() bool {
		return strings.Contains(page(), `kvgate_admission_waiting_requests{class="normal",pool="p"} 5`)
	})
	if p := page(); strings.Contains(p, `kvgate_pool_demand_endpoints{pool="p"} 0`+"\n") || !strings.Contains(p, `kvgate_pool_ready_endpoints{pool="p"} 0`) {
		t.Errorf("no demand is shown:\n%s", p)
	}
	// Named before it is up, as pods are: not a request goes to it until it answers.
	s := sim(t, modelsim.Options{})
	s.Refuse(0)
	write(t, targets, "- targets: [\""+s.URL()+"\"]\n")
	eventually(t, "the endpoint in the table", func() bool { return len(g.Table().Load().Rows) == 1 })
	eventually(t, "the endpoint looked at", func() bool { return strings.Contains(g.log.String(), "endpoint down") })
	mu.Lock()
	if len(codes) > 0 {
		t.Errorf("answered before there was an endpoint: %v", codes)
	}
	mu.Unlock()
	if err := s.Accept(); err != nil {
		t.Fatal(err)
	}
	clients.Wait()
	if want := []int{200, 200, 200, 200, 200}; !slices.Equal(codes, want) {
		t.Errorf("codes %v; want %v", codes, want)
	}
	http.DefaultClient.CloseIdleConnections()
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A request for an adapter that finds every slot taken by others' waits in the gateway. One for an adapter that holds a slot
// passes it, and it goes as soon as a slot is free, wherever that is.
func TestAdapterSlotsSaturate(t *testing.T) {
	names := []string{"a", "b", "c"}
	s, u := sim(t, modelsim.Options{Adapters: names, MaxLoras: 1, Speedup: 1}), sim(t, modelsim.Options{Adapters: names, MaxLoras: 1, Speedup: 1})
	g := start(t, onePool(s.URL(), u.URL())+"    admission: {max_wait: 1m, standing_wait: 0s}\n", Options{})
	eventually(t, "the slots are known", func() bool {
		for _, r := range g.Table().Load().Rows {
			if r.Load == nil || r.Load.MaxAdapters != 1 {
				return false
			}
		}
		return g.Table().Load().TargetString("c") != nil
	})
	waiting := func(want int) func() bool {
		return func() bool {
			_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
			return strings.Contains(page, fmt.Sprintf(`kvgate_admission_waiting_requests{class="normal",pool="p"} %d`+"\n", want))
		}
	}
	booked := func(want int64) func() bool {
		return func() bool {
			n := int64(0)
			for _, r := range g.Table().Load().Rows {
				n += r.Booked().Requests
			}
			return n == want
		}
	}
	var clients sync.WaitGroup
	defer clients.Wait()
	stream := func(model string) (end func()) {
		ctx, end := context.WithCancel(t.Context())
		clients.Go(func() {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.Addr()+"/v1/chat/completions", strings.NewReader(chat(model, true, 100_000)))
			if resp, err := client.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		return end
	}
	started := func(model string) func() bool {
		return func() bool {
			for _, r := range g.Table().Load().Rows {
				if use, _ := r.Endpoint.Adapters().Use(pool.HashName(model)); use.Started > 0 {
					return true
				}
			}
			return false
		}
	}
	endA := stream("a")
	defer endA()
	eventually(t, "a runs", started("a"))
	endB := stream("b")
	defer endB()
	eventually(t, "b runs", started("b"))
	defer stream("c")()
	eventually(t, "c waits", waiting(1))
	if _, body := post(t, "http://"+g.AdminAddr()+"/debug/explain?format=text", chat("c", false, 2)); !strings.Contains(body, "it waits until one of these has room, with 1 others") {
		t.Errorf("explained: %s", body)
	}
	for _, model := range []string{"a", "b", baseModel} { // nobody waits behind it
		if status, body := ask(t, g, model); status != 200 {
			t.Errorf("%s: %d %s", model, status, body)
		}
	}
	if !waiting(1)() || !booked(2)() {
		t.Error("c has gone to where no slot is")
	}
	endB()
	eventually(t, "c runs", started("c"))
}
