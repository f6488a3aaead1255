package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/config"
	"kvgate/internal/admin"
	"kvgate/internal/modelsim"
	"kvgate/telemetry"
)

func TestMain(m *testing.M) {
	// fasthttp's cleaner of idle workers looks up every 10 s whether it is still wanted; nobody can wake it.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"))
}

const baseModel = "meta-llama/Llama-3.1-8B-Instruct"

// sim starts a simulated model server, a hundred times faster than a GPU.
func sim(t *testing.T, o modelsim.Options) *modelsim.Server {
	t.Helper()
	if o.Speedup == 0 {
		o.Speedup = 100
	}
	s, err := modelsim.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// A syncBuffer is a log that can be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// A run is a gateway at work in this process.
type run struct {
	*Gateway
	t     *testing.T
	file  string
	log   *syncBuffer
	stop  context.CancelFunc
	cut   context.CancelFunc
	done  chan struct{}
	files int // open before it ran, and what the test itself opens
	res   Result
	err   error
}

const header = "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\ndrain: {delay: 0s, timeout: 5s}\nscrape: {interval: 50ms}\n"

// start runs a gateway on a file with this text after header, and waits until it is ready.
func start(t *testing.T, text string, o Options) *run {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(header+text), 0o600); err != nil {
		t.Fatal(err)
	}
	return startFile(t, file, o)
}

// startFile runs a gateway on a file, and waits until it is ready.
func startFile(t *testing.T, file string, o Options) *run {
	t.Helper()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	r := &run{t: t, files: openFiles(), file: file, log: &syncBuffer{}, done: make(chan struct{})}
	load := func() (*config.Config, error) { return config.Load(r.file, ConfigOptions()) }
	cfg, err := load()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	cut, cutNow := context.WithCancel(context.Background())
	r.stop, r.cut = stop, cutNow
	o.Load, o.LogOutput, o.Cut = load, r.log, cut
	if o.WatchEvery == 0 {
		o.WatchEvery = -1
	}
	if r.Gateway, err = New(cfg, o); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.done)
		r.res, r.err = r.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		cutNow()
		r.wait()
		// Whatever the test did, the gateway has left no file or connection open. What runs is watched by goleak.
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		for deadline := time.Now().Add(15 * time.Second); openFiles() > r.files; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("%d files are open; before the gateway ran there were %d", openFiles(), r.files)
				break
			}
		}
	})
	select {
	case <-r.Ready():
	case <-r.done:
		t.Fatalf("the gateway ended: %v\n%s", r.err, r.log)
	case <-time.After(20 * time.Second):
		t.Fatalf("not ready\n%s", r.log)
	}
	return r
}

// openFiles counts what this process has open; 0 where nobody says.
func openFiles() int {
	all, _ := os.ReadDir("/proc/self/fd")
	return len(all)
}

func (r *run) write(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.file, []byte(header+text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *run) wait() {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(30 * time.Second):
		r.t.Fatalf("the gateway does not end\n%s", r.log)
	}
}

func onePool(urls ...string) string {
	return "pools:\n  - name: p\n    discovery: {static: [" + strings.Join(urls, ", ") + "]}\n"
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := client.Get(url)
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

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
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

func chat(model string, stream bool, tokens int) string {
	return fmt.Sprintf(`{"model":%q,"stream":%t,"max_tokens":%d,"messages":[{"role":"user","content":"Say something."}]}`, model, stream, tokens)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// collect is a sink that keeps copies.
type collect struct {
	mu   sync.Mutex
	recs []telemetry.Record
}

func (c *collect) Observe(r *telemetry.Record) {
	v := *r
	v.Endpoint, v.Model, v.Outcome, v.RequestID = strings.Clone(r.Endpoint), strings.Clone(r.Model), strings.Clone(r.Outcome), strings.Clone(r.RequestID)
	v.Attempts = append([]telemetry.Attempt(nil), r.Attempts...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recs = append(c.recs, v)
}

func TestServesAndShowsWhatItDoes(t *testing.T) {
	a, b := sim(t, modelsim.Options{Adapters: []string{"sql"}}), sim(t, modelsim.Options{Adapters: []string{"sql"}})
	var seen collect
	g := start(t, onePool(a.URL(), b.URL()), Options{Sink: &seen})
	url, adminURL := "http://"+g.Addr(), "http://"+g.AdminAddr()

	if code, body := get(t, url+"/v1/models"); code != 200 || !strings.Contains(body, baseModel) || !strings.Contains(body, `"sql"`) {
		t.Errorf("models: %d %s", code, body)
	}
	for _, model := range []string{baseModel, "sql"} {
		if code, body := post(t, url+"/v1/chat/completions", chat(model, false, 8)); code != 200 || !strings.Contains(body, `"usage"`) {
			t.Errorf("chat with %s: %d %s", model, code, body)
		}
		if code, body := post(t, url+"/v1/chat/completions", chat(model, true, 8)); code != 200 || !strings.HasSuffix(body, "data: [DONE]\n\n") {
			t.Errorf("stream of %s: %d %s", model, code, body)
		}
	}
	if code, body := post(t, url+"/v1/chat/completions", chat("nope", false, 8)); code != 404 || !strings.Contains(body, "model_not_found") {
		t.Errorf("unknown model: %d %s", code, body)
	}

	eventually(t, "five records", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return len(seen.recs) >= 5 })
	if code, body := get(t, adminURL+"/-/ready"); code != 200 || body != "ready\n" {
		t.Errorf("ready: %d %q", code, body)
	}
	_, page := get(t, adminURL+"/metrics")
	for _, want := range []string{
		`kvgate_requests_total{code="200",model="sql",outcome="ok",pool="p"} 2`,
		`kvgate_requests_total{code="404",model="nope",outcome="model_not_found",pool=""} 1`,
		`kvgate_endpoint_up{endpoint="p/` + a.Addr() + `"} 1`,
		`kvgate_config_last_reload_successful 1`,
	} {
		eventually(t, want, func() bool { // a list of models is a record too
			_, page = get(t, adminURL+"/metrics")
			return strings.Contains(page, want+"\n")
		})
	}
	if !strings.Contains(page, `kvgate_scrapes_total{endpoint="p/`+a.Addr()+`",result="ok"}`) {
		t.Error("no scrape was counted")
	}

	var snap struct {
		Endpoints []struct {
			URL, Pool, Dialect string
			Healthy            bool
			Models             []string
			Load               struct {
				Known                 bool
				KVCacheUtilization    *float64 `json:"kv_cache_utilization"`
				KVCacheUtilizationMax *float64 `json:"kv_cache_utilization_max"`
				MaxAdapters           *int     `json:"max_adapters"`
			}
			Booked struct{ Requests *int }
		}
	}
	_, body := get(t, adminURL+"/debug/snapshot")
	if err := json.Unmarshal([]byte(body), &snap); err != nil || len(snap.Endpoints) != 2 {
		t.Fatalf("snapshot: %v %s", err, body)
	}
	for _, e := range snap.Endpoints {
		if e.Dialect != "vllm" || !e.Healthy || !e.Load.Known || e.Load.KVCacheUtilization == nil || e.Load.KVCacheUtilizationMax == nil ||
			e.Load.MaxAdapters == nil || *e.Load.MaxAdapters != 4 || e.Booked.Requests == nil || *e.Booked.Requests != 0 {
			t.Errorf("snapshot: %+v in %s", e, body)
		}
	}

	var dec admin.DecisionsView
	_, body = get(t, adminURL+"/debug/decisions?n=3")
	if err := json.Unmarshal([]byte(body), &dec); err != nil || len(dec.Decisions) != 3 || !dec.Truncated || dec.Total < 5 {
		t.Errorf("decisions: %v %s", err, body)
	}
	if code, body := post(t, adminURL+"/debug/explain", chat("sql", true, 8)); code != 200 || !strings.Contains(body, `"chosen":"p/`) {
		t.Errorf("explain: %d %s", code, body)
	}
	if code, body := post(t, adminURL+"/debug/explain", `{"model":5}`); code != 400 || !strings.Contains(body, "model") {
		t.Errorf("explain of a bad body: %d %s", code, body)
	}
	if code, body := get(t, adminURL+"/debug/config"); code != 200 || !strings.Contains(body, "name: p") {
		t.Errorf("config: %d %s", code, body)
	}
	if code, body := get(t, adminURL+"/debug/pprof/goroutine?debug=1"); code != 200 || !strings.Contains(body, "goroutine profile") {
		t.Errorf("pprof: %d %.80s", code, body)
	}
	// Nothing of this on the data listener.
	for _, path := range []string{"/metrics", "/debug/snapshot", "/debug/pprof/", "/-/ready", "/-/reload"} {
		if code, _ := get(t, url+path); code != 404 {
			t.Errorf("data listener answers %s with %d", path, code)
		}
	}
	g.stop()
	g.wait()
	if g.err != nil || g.res.Cut != 0 || g.res.Forced {
		t.Errorf("ended with %+v, %v", g.res, g.err)
	}
	for line := range strings.SplitSeq(strings.TrimSpace(g.log.String()), "\n") {
		if !json.Valid([]byte(line)) {
			t.Errorf("log line is not JSON: %s", line)
		}
	}
	if n := strings.Count(g.log.String(), `"msg":"request"`); n < 5 {
		t.Errorf("%d access lines; want one per request", n)
	}
}

func TestEndpointsThatAreDownDoNotKeepItFromStarting(t *testing.T) {
	a := sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL(), "http://127.0.0.1:1"), Options{})
	for range 6 {
		if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code != 200 {
			t.Errorf("%d %s", code, body)
		}
	}
	_, body := get(t, "http://"+g.AdminAddr()+"/debug/snapshot")
	if !strings.Contains(body, `"error":`) {
		t.Errorf("the snapshot does not say why an endpoint is unknown: %s", body)
	}
	if strings.Count(body, `"healthy":true`) != 1 || !strings.Contains(body, `"down"`) {
		t.Errorf("want one endpoint healthy and one down: %s", body)
	}
	if _, page := get(t, "http://"+g.AdminAddr()+"/metrics"); !strings.Contains(page, "kvgate_endpoint_up{endpoint=\"p/127.0.0.1:1\"} 0\n") {
		t.Error("the endpoint that is down is up in the metrics")
	}
}

// With nobody to send requests to it is not ready, says why, and tries all the same; when one comes back it is ready.
func TestNothingIsUp(t *testing.T) {
	a := sim(t, modelsim.Options{})
	a.Refuse(0)
	g := start(t, "pools:\n  - name: p\n    models: ["+baseModel+"]\n    discovery: {static: ["+a.URL()+"]}\n", Options{})
	adminURL := "http://" + g.AdminAddr()
	eventually(t, "the log says that it is not ready", func() bool {
		return strings.Contains(g.log.String(), `"msg":"listening, not ready"`) && strings.Contains(g.log.String(), `"endpoints":1,"endpoints_up":0`)
	})
	if code, body := get(t, adminURL+"/-/ready"); code != 503 || body != "not ready: no endpoint is up (of 1: 1 down); kvgate endpoints says why\n" {
		t.Errorf("ready: %d %q", code, body)
	}
	if _, page := get(t, adminURL+"/metrics"); !strings.Contains(page, "kvgate_endpoint_up{endpoint=\"p/"+a.Addr()+"\"} 0\n") {
		t.Error("the endpoint that is down is up in the metrics")
	}
	if _, body := get(t, adminURL+"/debug/snapshot"); !strings.Contains(body, `"healthy":false,"state":["down"]`) || !strings.Contains(body, "connection refused") {
		t.Errorf("snapshot: %s", body)
	}
	if _, body := post(t, adminURL+"/debug/explain?format=text", chat(baseModel, false, 2)); !strings.Contains(body, "chosen though down") {
		t.Errorf("explain: %s", body)
	}
	if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code != 502 || !strings.Contains(body, "endpoint_connect") {
		t.Errorf("a request: %d %s", code, body)
	}
	if err := a.Accept(); err != nil {
		t.Fatal(err)
	}
	g.files++ // it listens
	// The request may come before the next scrape: it is tried, and clears the state.
	if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code != 200 {
		t.Errorf("a request after it came back: %d %s", code, body)
	}
	eventually(t, "ready", func() bool { code, _ := get(t, adminURL+"/-/ready"); return code == 200 })
	eventually(t, "known", func() bool { return g.Table().Load().Rows[0].ScrapedAt != 0 })
	a.OOM(2 * time.Second) // cuts what is open, too
	eventually(t, "not ready", func() bool { code, _ := get(t, adminURL+"/-/ready"); return code == 503 })
	if _, page := get(t, adminURL+"/metrics"); strings.Contains(page, "kvgate_endpoint_up{endpoint=\"p/"+a.Addr()+"\"} 0\n") &&
		strings.Contains(page, "kvgate_endpoint_running_requests{") {
		t.Error("what an endpoint ran before it went down is shown as if it ran now")
	}
	eventually(t, "ready again", func() bool { code, _ := get(t, adminURL+"/-/ready"); return code == 200 })
	for _, line := range []string{`"from":"unknown","to":"down"`, `"from":"down","to":"up"`, `"from":"up","to":"down"`} {
		if !strings.Contains(g.log.String(), line) {
			t.Errorf("the log lacks %s:\n%s", line, g.log)
		}
	}
}

// A page that hangs keeps its endpoint in.
func TestHungPageDoesNotExclude(t *testing.T) {
	a := sim(t, modelsim.Options{})
	if err := a.SetFaults(modelsim.Fault{Kind: modelsim.FaultMetricsHang}); err != nil {
		t.Fatal(err)
	}
	g := start(t, onePool(a.URL()), Options{})
	adminURL := "http://" + g.AdminAddr()
	eventually(t, "it is unmeasured", func() bool {
		_, body := get(t, adminURL+"/debug/snapshot")
		return strings.Contains(body, `"healthy":true,"state":["unmeasured"]`)
	})
	if code, body := get(t, adminURL+"/-/ready"); code != 200 {
		t.Errorf("ready: %d %s", code, body)
	}
	if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code != 200 {
		t.Errorf("a request: %d %s", code, body)
	}
}

func TestReloadIsAllOrNothing(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL()), Options{})
	adminURL := "http://" + g.AdminAddr()
	before := g.Table().Load().Rows[0].Endpoint

	if code, body := post(t, adminURL+"/-/reload", ""); code != 200 || !strings.Contains(body, `"changed":false`) {
		t.Errorf("identical bytes: %d %s", code, body)
	}
	version := g.Table().Load().Version
	g.write("pools:\n  - name: p\n    policy: least_request\n    discovery: {static: [" + b.URL() + "]}\n")
	if code, body := post(t, adminURL+"/-/reload", ""); code != 422 || !strings.Contains(body, "least_requests") {
		t.Errorf("bad file: %d %s", code, body)
	}
	if rows := g.Table().Load().Rows; len(rows) != 1 || rows[0].Endpoint != before {
		t.Errorf("a bad file changed the table (version %d to %d)", version, g.Table().Load().Version)
	}
	if _, page := get(t, adminURL+"/metrics"); !strings.Contains(page, "kvgate_config_last_reload_successful 0\n") {
		t.Error("the metric does not say that the reload failed")
	}
	if code, _ := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code != 200 {
		t.Errorf("after a refused reload: %d", code)
	}

	g.write("log: {level: warn}\nlimits: {body_bytes: 1MiB}\n" + onePool(a.URL(), b.URL()) + "  - name: q\n    models: [other]\n    discovery: {static: ['http://127.0.0.1:1']}\n")
	code, body := post(t, adminURL+"/-/reload", "")
	if code != 200 || !strings.Contains(body, `"changed":true`) || !strings.Contains(body, `"needs_restart":["limits.body_bytes"]`) {
		t.Errorf("good file: %d %s", code, body)
	}
	eventually(t, "three endpoints", func() bool { return len(g.Table().Load().Rows) == 3 })
	found := false
	for _, r := range g.Table().Load().Rows {
		found = found || r.Endpoint == before
	}
	if !found {
		t.Error("the endpoint that stayed is another one")
	}
	if _, page := get(t, adminURL+"/metrics"); !strings.Contains(page, "kvgate_config_last_reload_successful 1\n") {
		t.Error("the metric does not say that the reload worked")
	}
}

// A SIGHUP may come before the gateway has begun to run: what it reads holds.
func TestReloadBeforeRun(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(header+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(onePool(a.URL()))
	load := func() (*config.Config, error) { return config.Load(file, ConfigOptions()) }
	cfg, err := load()
	if err != nil {
		t.Fatal(err)
	}
	log := &syncBuffer{}
	g, err := New(cfg, Options{Load: load, LogOutput: log, WatchEvery: -1})
	if err != nil {
		t.Fatal(err)
	}
	write("pools:\n  - name: q\n    discovery: {static: [" + b.URL() + "]}\n")
	if res, err := g.Reload("test"); err != nil || !res.Changed {
		t.Fatalf("reload: %+v, %v", res, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := g.Run(ctx)
		done <- err
	}()
	<-g.Ready()
	rows := g.Table().Load().Rows
	if len(rows) != 1 || rows[0].Endpoint.URL != b.URL() || rows[0].Endpoint.Pool != "q" {
		t.Errorf("%d endpoints; want the one of pool q\n%s", len(rows), log)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_, _ = g.Reload("test") // after the end; goleak tells if that starts anything
}

// Reloads and what discovery finds come at the same time. Whoever is last, what is in the table in the end is scraped.
func TestReloadsWhileDiscoveryMoves(t *testing.T) {
	var sims []string
	for range 4 {
		sims = append(sims, sim(t, modelsim.Options{}).URL())
	}
	targets := filepath.Join(t.TempDir(), "targets.json")
	list := func(urls ...string) {
		t.Helper()
		text := `[{"targets":["` + strings.Join(urls, `","`) + `"]}]`
		if err := os.WriteFile(targets, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list(sims[0])
	text := func(i int) string {
		return fmt.Sprintf("retry: {budget_min: %d}\npools:\n  - name: p\n    discovery: {file: {path: %s, interval: 100ms}}\n", i, targets)
	}
	g := start(t, text(0), Options{})
	for i := range 60 {
		list(sims[:1+i%4]...)
		g.write(text(1 + i))
		if _, err := g.Reload("test"); err != nil {
			t.Fatal(err)
		}
	}
	list(sims...)
	eventually(t, "every endpoint is scraped", func() bool {
		rows := g.Table().Load().Rows
		for _, r := range rows {
			if r.ScrapedAt == 0 || g.now().Sub(r.ScrapedAt) > 2*time.Second {
				return false
			}
		}
		return len(rows) == 4
	})
}

func TestReloadOnFileChange(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL()), Options{WatchEvery: 10 * time.Millisecond})
	g.write("pools: {\n")
	eventually(t, "the refusal in the log", func() bool { return strings.Contains(g.log.String(), "reload refused") })
	g.write(onePool(b.URL()))
	eventually(t, "the other endpoint", func() bool {
		rows := g.Table().Load().Rows
		return len(rows) == 1 && rows[0].Endpoint.URL == b.URL()
	})
	eventually(t, "an answer from it", func() bool {
		code, _ := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2))
		return code == 200
	})
}

// A request that is running when its pool goes ends well, under the configuration that it began with.
func TestRunningRequestsSurviveAReload(t *testing.T) {
	a, b := sim(t, modelsim.Options{Speedup: 1}), sim(t, modelsim.Options{Models: []string{"other"}})
	g := start(t, onePool(a.URL()), Options{})
	answers := make(chan string, 1)
	go func() {
		resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, true, 100)))
		if err != nil {
			answers <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		answers <- string(body)
	}()
	eventually(t, "the request is running", func() bool { return a.Stats().InFlight == 1 })
	g.write("pools:\n  - name: q\n    discovery: {static: [" + b.URL() + "]}\n")
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	if got := <-answers; !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Errorf("the answer ends with %q", got[max(0, len(got)-100):])
	}
}

func TestDrain(t *testing.T) {
	a := sim(t, modelsim.Options{Speedup: 1})
	g := start(t, onePool(a.URL()), Options{})
	stream := func(tokens int) chan string {
		out := make(chan string, 1)
		go func() {
			resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, true, tokens)))
			if err != nil {
				out <- err.Error()
				return
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			out <- fmt.Sprintf("%s|%v", body, err)
		}()
		return out
	}
	short, long := stream(20), stream(100_000)
	eventually(t, "both run", func() bool { return a.Stats().InFlight == 2 })
	g.stop()
	eventually(t, "readiness fails", func() bool {
		code, body := get(t, "http://"+g.AdminAddr()+"/-/ready")
		return code == 503 && strings.Contains(body, "draining")
	})
	if got := <-short; !strings.HasSuffix(got, "data: [DONE]\n\n|<nil>") {
		t.Errorf("a request that could end did not: %q", got[max(0, len(got)-200):])
	}
	eventually(t, "the one that could end is accounted for", func() bool { return g.handler.Active() == 1 })
	g.cut() // the second signal
	g.wait()
	got := <-long
	if !strings.Contains(got, `"draining"`) || strings.Contains(got, "[DONE]") || strings.HasSuffix(got, "|<nil>") {
		t.Errorf("a request that was cut off ends with %q; want an error event and a visible cut", got[max(0, len(got)-300):])
	}
	if n := strings.Count(g.log.String(), `"msg":"draining"`); n != 1 {
		t.Errorf("the drain is logged %d times; want once", n)
	}
	if !g.res.Forced || g.res.Cut != 1 {
		t.Errorf("result %+v; want one cut, forced", g.res)
	}
	eventually(t, "the server stops working on it", func() bool { return a.Stats().InFlight == 0 })
}

func TestStopBeforeReady(t *testing.T) {
	cfg, err := config.Parse("config.yaml", []byte(header+onePool("http://127.0.0.1:1")), ConfigOptions())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	g, err := New(cfg, Options{LogOutput: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Run(ctx); err != nil {
		t.Error(err)
	}
}

func TestAddressInUseIsAnError(t *testing.T) {
	a := sim(t, modelsim.Options{})
	text := strings.Replace(header, "listen: 127.0.0.1:0\n", "listen: '"+a.Addr()+"'\n", 1)
	// Files that are appended to are left alone: they are those of the gateway that has the address.
	dir := t.TempDir()
	text += "record: {file: " + filepath.Join(dir, "record.jsonl") + "}\nusage: {file: " + filepath.Join(dir, "usage.jsonl") + "}\n"
	cfg, err := config.Parse("config.yaml", []byte(text+onePool(a.URL())), ConfigOptions())
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(cfg, Options{LogOutput: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "listen: "+a.Addr()+" is in use") {
		t.Errorf("%v; want one that names the key", err)
	}
	if files, _ := os.ReadDir(dir); len(files) > 0 {
		t.Errorf("a gateway that could not start made %v", files)
	}
}

// A key that waits for a restart is named, with both values, until the file says again what runs.
func TestPendingRestart(t *testing.T) {
	a := sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL()), Options{})
	adminURL := "http://" + g.AdminAddr()
	loadedAt := func() string {
		_, page := get(t, adminURL+"/metrics")
		_, rest, _ := strings.Cut(page, "\nkvgate_config_last_reload_success_timestamp_seconds ")
		line, _, _ := strings.Cut(rest, "\n")
		return line
	}
	g.write("limits: {body_bytes: 1MiB}\n" + onePool(a.URL()))
	for i := range 2 {
		before := loadedAt()
		code, body := post(t, adminURL+"/-/reload", "")
		if code != 200 || !strings.Contains(body, `"needs_restart":["limits.body_bytes"]`) {
			t.Errorf("reload %d: %d %s", i, code, body)
		}
		if moved := loadedAt() != before; moved != (i == 0) {
			t.Errorf("reload %d: the time of the last reload moved: %v", i, moved)
		}
	}
	if _, body := get(t, adminURL+"/debug/config"); !strings.HasPrefix(body, "# restart pending: limits.body_bytes: running 32MiB, file 1MiB\n") {
		t.Errorf("config: %.200s", body)
	}
	g.write(onePool(a.URL()))
	if _, body := post(t, adminURL+"/-/reload", ""); strings.Contains(body, "needs_restart") {
		t.Errorf("reverted: %s", body)
	}
	if _, body := get(t, adminURL+"/debug/config"); strings.Contains(body, "pending") {
		t.Errorf("reverted: %.200s", body)
	}
	if n := strings.Count(g.log.String(), `"from":"unknown"`); n != 1 {
		t.Errorf("%d state changes from unknown; want one, whatever is reloaded", n)
	}
}

// While nothing is known of a pool's models, no name is unknown for good.
func TestNothingIsKnown(t *testing.T) {
	g := start(t, onePool("http://127.0.0.1:1"), Options{})
	resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat("any", false, 2)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 503 || !strings.Contains(string(body), "no_endpoints") || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s, Retry-After %q", resp.StatusCode, body, resp.Header.Get("Retry-After"))
	}
}

// With weights the decision's figure is the total.
func TestWeightedTotalIsRecorded(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	var seen collect
	g := start(t, "pools:\n  - name: p\n    policy: {weights: {queue: 2, kv_cache: 1}}\n    discovery: {static: ["+a.URL()+", "+b.URL()+"]}\n", Options{Sink: &seen})
	eventually(t, "both are known", func() bool {
		rows := g.Table().Load().Rows
		return rows[0].ScrapedAt != 0 && rows[1].ScrapedAt != 0
	})
	post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2))
	eventually(t, "a record", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return len(seen.recs) == 1 })
	if r := &seen.recs[0]; r.Cost < 2 || r.Cost > 3 || r.RunnerUpCost <= 0 || r.RunnerUpCost > r.Cost || r.RunnerUp == "" {
		t.Errorf("cost %g, runner-up %q %g; want totals of up to 3", r.Cost, r.RunnerUp, r.RunnerUpCost)
	}
}

// Field failure S3: an adapter shows in the metrics only while it has work. Requests for it, one after the other, all go
// where the first one loaded it.
func TestIdleAdapterStaysWhereItIs(t *testing.T) {
	var sims []*modelsim.Server
	var urls []string
	for range 4 {
		s := sim(t, modelsim.Options{Adapters: []string{"sql", "law"}})
		sims, urls = append(sims, s), append(urls, s.URL())
	}
	var seen collect
	g := start(t, onePool(urls...), Options{Sink: &seen})
	for range 20 {
		if code, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat("sql", true, 4)); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
		for _, s := range sims { // until no page shows the adapter, and every one has been read since
			eventually(t, "idle servers", func() bool { return s.Stats().InFlight == 0 })
		}
		time.Sleep(60 * time.Millisecond) // longer than the interval between scrapes
	}
	eventually(t, "20 records", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return len(seen.recs) == 20 })
	for i, r := range seen.recs {
		if r.Endpoint != seen.recs[0].Endpoint {
			t.Errorf("request %d went to %s, the first one to %s", i, r.Endpoint, seen.recs[0].Endpoint)
		}
	}
}
