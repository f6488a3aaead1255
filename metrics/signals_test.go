package metrics

import (
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/pool"
)

// A plain server without adapters is scraped without a single error, and the default intervals are kept.
func TestPlainServerHasNoErrors(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	s.serve("/v1/models", modelList)
	var good, bad atomic.Int64
	o := quick()
	o.OnScrape = func(_ *pool.Endpoint, s Scrape) {
		if s.Fault == FaultNone && s.Skipped == 0 && s.Anomalies == 0 {
			good.Add(1)
		} else {
			bad.Add(1)
		}
	}
	r := newRig(t, o, pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "scraped often", func(*pool.Row) bool { return good.Load() > 20 })
	r.manager.Stop()
	if n, err := r.table.LastError(r.endpoints[0]); err != nil || n != 0 || bad.Load() != 0 {
		t.Errorf("%d failures, last error %v, %d bad scrapes", n, err, bad.Load())
	}
	close(r.states)
	for st := range r.states {
		if st != "unknown>up" {
			t.Errorf("state %s", st)
		}
	}
}

// A server that restarted loses what was believed of it, and is asked for its models again.
func TestRestartIsNoticed(t *testing.T) {
	s := newModelServer(t)
	page := func(start, prompts int) string {
		return vllmPage + fmt.Sprintf("process_start_time_seconds %d\nvllm:prompt_tokens_total %d\n", start, prompts)
	}
	s.serve("/metrics", page(1_700_000_000, 100))
	s.serve("/v1/models", modelList)
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: "vllm"})
	e := r.endpoints[0]
	r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.Served != nil })
	before := e.Epoch()
	s.serve("/metrics", page(1_700_000_100, 200))
	r.row(0, "seen to have restarted", func(row *pool.Row) bool { return e.Epoch() == before+1 })
	r.row(0, "asked for its models again", func(row *pool.Row) bool { return row.Served != nil })
	// Some pages have no start time (several processes behind one page): then a counter tells.
	s.serve("/metrics", vllmPage+"vllm:prompt_tokens_total 300\n")
	r.row(0, "scraped without start time", func(row *pool.Row) bool { return row.Load.PromptTokens == 300 })
	s.serve("/metrics", vllmPage+"vllm:prompt_tokens_total 5\n")
	r.row(0, "seen to have restarted", func(row *pool.Row) bool { return e.Epoch() == before+2 })
}

func adapterList(adapters ...string) string {
	cards := []string{`{"id":"m","parent":null}`}
	for _, a := range adapters {
		cards = append(cards, fmt.Sprintf(`{"id":%q,"parent":"m","root":"/adapters/%s","max_model_len":null}`, a, a))
	}
	return `{"object":"list","data":[` + strings.Join(cards, ",") + `]}`
}

func adapterPage(adapters string, at int) string {
	return vllmPage + fmt.Sprintf("vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=%q,waiting_lora_adapters=\"\"} %d\n", adapters, at)
}

// With the default intervals, an adapter that appears or vanishes is routable or not within 2 s.
func TestAdaptersComeAndGoInTime(t *testing.T) {
	const within = 2 * time.Second
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	s.serve("/v1/models", adapterList())
	r := newRig(t, Options{Now: clock, Timeout: 10 * time.Second}, pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.Served != nil })
	routable := func(name string) func(*pool.Row) bool {
		return func(*pool.Row) bool {
			tg := r.table.Load().TargetString(name)
			return tg != nil && len(tg.Rows) == 1
		}
	}
	gone := func(name string) func(*pool.Row) bool {
		return func(row *pool.Row) bool { return !routable(name)(row) }
	}
	change := func(what string, do func(), ok func(*pool.Row) bool) {
		t.Helper()
		start := time.Now()
		do()
		r.row(0, what, ok)
		if took := time.Since(start); took > within {
			// The schedule leaves over half a second for the machine to be slow in.
			t.Errorf("%s took %v; want %v at most", what, took, within)
		}
	}
	change("sql in the list", func() { s.serve("/v1/models", adapterList("sql")) }, routable("sql"))
	change("sql gone from the list", func() { s.serve("/v1/models", adapterList()) }, gone("sql"))
	change("chat on the page", func() { s.serve("/metrics", adapterPage("chat", 1_750_000_000)) }, routable("chat"))

	other := newModelServer(t) // has no list: the page is all it says
	other.serve("/metrics", adapterPage("chat", 1_750_000_000))
	r = newRig(t, Options{Now: clock, Timeout: 10 * time.Second}, pool.Spec{URL: other.URL, Dialect: "vllm"})
	r.row(0, "routable for chat", routable("chat"))
	change("code on the page", func() { other.serve("/metrics", adapterPage("chat,code", 1_750_000_009)) }, routable("code"))
}

// Adapters that come and go ten thousand times leave nothing behind.
func TestAdapterChurnLeavesNothing(t *testing.T) {
	d := Lookup("vllm")
	p := newPage(d.want, d)
	var page strings.Builder
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var before uint64
	for i := range 10_000 {
		page.Reset()
		page.WriteString(adapterPage(fmt.Sprintf("adapter-%d,adapter-%d", i, i+1), 1_750_000_000+i))
		if err := p.read(strings.NewReader(page.String()), 1<<20, true); err != nil {
			t.Fatal(err)
		}
		if l := d.raw(p, sampleTime).Load(); len(l.Adapters) != 2 {
			t.Fatalf("adapters %q", l.Adapters)
		}
		if i == 1000 {
			before = heap()
		}
	}
	if after := heap(); after > before+1<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
	if len(p.known) > 200 {
		t.Errorf("%d series are remembered", len(p.known))
	}
	runtime.KeepAlive(p)
}

// Each endpoint has one goroutine of ours, and starting and stopping leaves none.
func TestSyncStartsAndStops(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	s.serve("/v1/models", modelList)
	specs := make([]pool.Spec, 20)
	for i := range specs {
		specs[i] = pool.Spec{URL: s.URL, SourceID: fmt.Sprint(i), Name: fmt.Sprint("e", i), Dialect: "vllm"}
	}
	r := newRig(t, quick(), specs...)
	for i := range specs {
		r.row(i, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 })
	}
	for range 50 {
		if err := r.manager.Sync(nil); err != nil {
			t.Fatal(err)
		}
		if err := r.manager.Sync(r.endpoints); err != nil {
			t.Fatal(err)
		}
	}
	// A dialect that changed is taken up; an unknown one is an error, and stops the scraping.
	specs[0].Dialect = "none"
	specs[1].Dialect = "vlm"
	if _, _, err := r.table.SetEndpoints("p", specs, clock()); err != nil {
		t.Fatal(err)
	}
	err := r.manager.Sync(r.endpoints)
	if err == nil || !strings.Contains(err.Error(), `unknown dialect "vlm"`) {
		t.Errorf("error %v", err)
	}
	r.manager.Stop()
	if err := r.manager.Sync(r.endpoints); err == nil {
		t.Error("Sync after Stop: no error")
	}
	n := s.count("/metrics")
	r.manager.Stop() // again: nothing happens
	if s.count("/metrics") != n {
		t.Error("scraped after Stop")
	}
}

// Only one request is under way to an endpoint at a time.
func TestOneInFlight(t *testing.T) {
	s := newModelServer(t)
	var inFlight, most atomic.Int64
	var seen atomic.Int64
	slow := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			n := inFlight.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			runtime.Gosched()
			fmt.Fprint(w, body)
			inFlight.Add(-1)
			seen.Add(1)
		}
	}
	s.handle("/metrics", slow(vllmPage))
	s.handle("/v1/models", slow(modelList))
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: "vllm"})
	r.row(0, "asked often", func(*pool.Row) bool { return seen.Load() > 50 })
	if most.Load() != 1 {
		t.Errorf("%d requests at once; want 1", most.Load())
	}
}

// A vLLM that sleeps gets no requests until it wakes.
func TestSleepingServerIsUnroutable(t *testing.T) {
	s := newModelServer(t)
	s.serve("/v1/models", modelList)
	s.serve("/metrics", vllmPage+"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0\n")
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "asleep", func(row *pool.Row) bool { return row.State&pool.Sleeping != 0 })
	s.serve("/metrics", vllmPage+"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1\n")
	r.row(0, "awake", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.State&pool.Sleeping == 0 })
	r.manager.Stop()
	if got := []string{<-r.states, <-r.states}; !slices.Equal(got, []string{"unknown>asleep", "asleep>up"}) {
		t.Errorf("states %q", got)
	}
}
