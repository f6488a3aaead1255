package telemetry

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"kvgate/pool"
)

func okRecord(model string) *Record {
	return &Record{
		RequestID: "r1", Method: "POST", Path: "/v1/chat/completions", API: "chat_completions", Status: 200, Outcome: "ok",
		Pool: "p", Model: model, Endpoint: "p/a", Attempts: []Attempt{{"p/b", "endpoint_connect", 0.001}, {"p/a", "ok", 0.5}},
		Stream: true, QueueSeconds: 0.25, DecisionSeconds: 3e-6, TTFTSeconds: 0.5, DurationSeconds: 1.5,
		UsageKnown: true, CachedKnown: true, InputTokens: 100, OutputTokens: 11, CachedTokens: 64,
		BytesIn: 400, BytesOut: 900, Decided: true, Cost: 12, SnapshotVersion: 7, ScrapeAgeSeconds: 0.2,
	}
}

func testTable(t testing.TB, urls ...string) *pool.Table {
	t.Helper()
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	setEndpoints(t, tab, urls...)
	return tab
}

func setEndpoints(t testing.TB, tab *pool.Table, names ...string) {
	t.Helper()
	var specs []pool.Spec
	for i, n := range names {
		specs = append(specs, pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 9000+i), Name: n})
	}
	if _, _, err := tab.SetEndpoints("p", specs, 1); err != nil {
		t.Fatal(err)
	}
}

// page is the metrics page without comments and Go's own metrics.
func page(t testing.TB, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body, _ := io.ReadAll(w.Body)
	if w.Code != 200 {
		t.Fatalf("status %d: %s", w.Code, body)
	}
	return regexp.MustCompile(`(?m)^(#.*|go_.*|process_.*|promhttp_.*)\n`).ReplaceAllString(string(body), "")
}

func wantLines(t *testing.T, page string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains(page, l+"\n") {
			t.Errorf("no line %s in:\n%s", l, page)
		}
	}
}

func TestObserveCountsARequest(t *testing.T) {
	m := New(Options{})
	m.Observe(okRecord("m"))
	m.Observe(&Record{Outcome: "model_not_found", Status: 404, Model: "nope"})
	wantLines(t, page(t, m),
		`kvgate_requests_total{code="200",model="m",outcome="ok",pool="p"} 1`,
		`kvgate_requests_total{code="404",model="nope",outcome="model_not_found",pool=""} 1`,
		`kvgate_request_duration_seconds_sum{model="m",pool="p"} 1.5`,
		`kvgate_time_to_first_token_seconds_sum{model="m",pool="p"} 0.5`,
		`kvgate_time_per_output_token_seconds_sum{model="m",pool="p"} 0.1`,
		`kvgate_queue_duration_seconds_sum{pool="p"} 0.25`,
		`kvgate_decision_duration_seconds_count{pool="p"} 1`,
		`kvgate_tokens_total{model="m",pool="p",type="input"} 100`,
		`kvgate_tokens_total{model="m",pool="p",type="output"} 11`,
		`kvgate_tokens_total{model="m",pool="p",type="cached"} 64`,
		`kvgate_attempts_total{endpoint="p/a",outcome="ok"} 1`,
		`kvgate_attempts_total{endpoint="p/b",outcome="endpoint_connect"} 1`,
		`kvgate_request_body_bytes_total{pool="p"} 400`,
		`kvgate_response_body_bytes_total{pool="p"} 900`,
	)
}

// Every metric that is defined can be seen, and none is seen that is not defined.
func TestDefinitionsAreThePage(t *testing.T) {
	tab := testTable(t, "a")
	e := tab.Load().Rows[0].Endpoint
	tab.Observe(e, pool.Observation{Load: &pool.Load{
		Known:   pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity,
		Running: 3, Waiting: 2, KVCacheUtilization: 0.5, KVCapacityTokens: 1000,
	}, At: 2e9})
	m := New(Options{Table: tab, Now: func() pool.Instant { return 3e9 }, MaxModels: 1, Sources: func() []Source {
		return []Source{
			{Pool: "p", Kind: "file", Targets: 2, Healthy: true, LastSuccess: time.Unix(1700000001, 5e8)},
			{Pool: "q", Kind: "dns", Failures: 3},
		}
	}, Usage: func() Usage {
		return Usage{Connections: 100, MaxConnections: 1000, BodyBytes: 30 << 20, MaxBodyBytes: 40 << 20}
	}})
	r := okRecord("m")
	r.Tenant, r.Key = "a", "a-1"
	m.Observe(r)
	m.ObserveScrape("p/a", time.Millisecond, "ok")
	m.ObserveScrape("p/a", time.Millisecond, "timeout")
	m.SetReload(true, time.Unix(1700000000, 0))
	m.SetDraining()
	m.Registry().MustRegister(NewAdmissionCollector(func() []AdmissionState {
		return []AdmissionState{{Pool: "p", Ready: 2, Demand: 3, Classes: []AdmissionClass{{Class: "high", Refused: []AdmissionRefusals{{"full", 1}}}}, Tenants: []AdmissionTenant{{"high", "a", 2}, {"high", "other", 1}, {"high", "other", 4}}}}
	}))
	a := NewAdapterMetrics(func() []AdapterState { return []AdapterState{{Pool: "p", Adapter: "a", Replicas: 1}} })
	m.Registry().MustRegister(a)
	a.Observe("p", "load", "asked", true, time.Second)
	m.RegisterRecorded(func() (uint64, uint64) { return 7, 2 })
	m.RegisterCapture(func() bool { return true })
	got := page(t, m)
	for _, d := range Definitions() {
		if !regexp.MustCompile(`(?m)^` + d.Name + `(_count)?[{ ]`).MatchString(got) {
			t.Errorf("%s is defined and not on the page", d.Name)
		}
	}
	for l := range strings.SplitSeq(strings.TrimSpace(got), "\n") {
		name, _, _ := strings.Cut(l, " ")
		name, _, _ = strings.Cut(name, "{")
		name = strings.NewReplacer("_bucket", "", "_sum", "", "_count", "").Replace(name)
		found := false
		for _, d := range Definitions() {
			found = found || d.Name == name
		}
		if !found {
			t.Errorf("%s is on the page and not defined", name)
		}
	}
	wantLines(t, got, `kvgate_endpoint_kv_cache_utilization_ratio{endpoint="p/a"} 0.5`, `kvgate_endpoint_waiting_requests{endpoint="p/a"} 2`,
		`kvgate_scrape_age_seconds{endpoint="p/a"} 1`, `kvgate_config_last_reload_success_timestamp_seconds 1.7e+09`,
		`kvgate_scrapes_total{endpoint="p/a",result="timeout"} 1`, `kvgate_endpoint_foreign_requests{endpoint="p/a"} 5`,
		`kvgate_admission_tenant_waiting_requests{class="high",pool="p",tenant="a"} 2`,
		`kvgate_admission_tenant_waiting_requests{class="high",pool="p",tenant="other"} 5`,
		`kvgate_recorded_requests_total 7`, `kvgate_record_dropped_requests_total 2`,
		`kvgate_client_connections 100`, `kvgate_in_flight_body_bytes 3.145728e+07`, `kvgate_gateway_saturation_ratio 0.75`,
		`kvgate_discovery_targets{pool="p",source="file"} 2`, `kvgate_discovery_healthy{pool="p",source="file"} 1`,
		`kvgate_discovery_last_success_timestamp_seconds{pool="p",source="file"} 1.7000000015e+09`,
		`kvgate_discovery_healthy{pool="q",source="dns"} 0`, `kvgate_discovery_failures_total{pool="q",source="dns"} 3`)
	if strings.Contains(got, `kvgate_discovery_last_success_timestamp_seconds{pool="q"`) {
		t.Error("a source that never found anything has found it at some time")
	}
	families, err := m.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	if problems, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
}

// An endpoint that was never scraped shows no load rather than an idle one.
func TestUnknownIsAbsent(t *testing.T) {
	m := New(Options{Table: testTable(t, "a"), Now: func() pool.Instant { return 1 }})
	got := page(t, m)
	wantLines(t, got, `kvgate_endpoint_up{endpoint="p/a"} 1`, `kvgate_endpoint_inflight_requests{endpoint="p/a"} 0`)
	for _, absent := range []string{"kv_cache_utilization", "waiting", "running", "scrape_age", "foreign", "kv_capacity"} {
		if strings.Contains(got, absent) {
			t.Errorf("%s is shown of an endpoint that was never scraped:\n%s", absent, got)
		}
	}
}

// What an endpoint said long ago, or before it went down, is not shown as if it were so now; its age is.
func TestOldLoadIsAbsent(t *testing.T) {
	tab := testTable(t, "a")
	e := tab.Load().Rows[0].Endpoint
	tab.Observe(e, pool.Observation{Load: &pool.Load{
		Known:   pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity,
		Running: 3, Waiting: 2, KVCacheUtilization: 0.5, KVCapacityTokens: 1000,
	}, At: 1e9})
	now := pool.Instant(11e9)
	m := New(Options{Table: tab, Now: func() pool.Instant { return now }, StaleAfter: func() time.Duration { return 10 * time.Second }})
	const loads = 5
	f := func(age string, want int) {
		t.Helper()
		got := page(t, m)
		wantLines(t, got, `kvgate_scrape_age_seconds{endpoint="p/a"} `+age, `kvgate_endpoint_inflight_requests{endpoint="p/a"} 0`)
		if n := len(regexp.MustCompile(`(?m)^kvgate_endpoint_(kv|waiting|running|foreign)`).FindAllString(got, -1)); n != want {
			t.Errorf("%d series of a load that is %s s old; want %d:\n%s", n, age, want, got)
		}
	}
	f("10", loads)
	tab.SetState(e, pool.Unreachable, true, now)
	f("10", 0)
	tab.SetState(e, pool.Unreachable, false, now)
	f("10", loads)
	now += 1e9
	f("11", 0)
}

// Field failure G3: labels that clients make up are bounded; configured and served names never fold.
func TestClientsCannotMakeSeriesWithoutBound(t *testing.T) {
	m := New(Options{MaxModels: 50})
	for i := range 10_000 {
		m.Observe(&Record{Outcome: "model_not_found", Status: 404, Model: fmt.Sprintf("made-up-%d", i)})
	}
	m.Observe(&Record{Outcome: "model_not_found", Status: 404, Model: strings.Repeat("x", 1<<20)})
	for i := range 200 {
		m.Observe(okRecord(fmt.Sprintf("adapter-%d", i)))
	}
	m.Observe(&Record{Outcome: "endpoint_status", Status: 99999, Pool: "p", Model: "m"})
	m.Observe(&Record{Outcome: "ok", Status: 200, Pool: "p", Model: "bad\xff"})
	got := page(t, m)
	if n := strings.Count(got, `outcome="model_not_found"`); n != 51 {
		t.Errorf("%d series for names that clients made up; want 50 and other", n)
	}
	wantLines(t, got,
		`kvgate_requests_total{code="404",model="other",outcome="model_not_found",pool=""} 9951`,
		`kvgate_model_labels_folded_total 9951`,
		`kvgate_requests_total{code="200",model="adapter-199",outcome="ok",pool="p"} 1`,
		`kvgate_requests_total{code="other",model="m",outcome="endpoint_status",pool="p"} 1`,
		"kvgate_requests_total{code=\"200\",model=\"bad\ufffd\",outcome=\"ok\",pool=\"p\"} 1",
	)
}

func TestSweepForgetsWhatIsGone(t *testing.T) {
	tab := testTable(t, "a", "b")
	m := New(Options{Table: tab, Now: func() pool.Instant { return 1 }, KeepUnserved: 3 * time.Second})
	m.Observe(okRecord("m"))
	m.Observe(okRecord("adapter"))
	sweep := func() { m.Sweep(tab.Load(), time.Second) }
	sweep()
	setEndpoints(t, tab, "a")
	sweep()
	wantLines(t, page(t, m), `kvgate_attempts_total{endpoint="p/b",outcome="endpoint_connect"} 2`) // once is not enough
	sweep()
	if got := page(t, m); strings.Contains(got, "p/b") || !strings.Contains(got, "p/a") {
		t.Errorf("p/b left the table two sweeps ago:\n%s", got)
	}
	// A request that was still running there brings its series back, but not for good.
	m.Observe(okRecord("m"))
	wantLines(t, page(t, m), `kvgate_attempts_total{endpoint="p/b",outcome="endpoint_connect"} 1`)
	sweep()
	sweep()
	got := page(t, m)
	if strings.Contains(got, "p/b") {
		t.Errorf("p/b came back for good:\n%s", got)
	}
	if strings.Contains(got, `"adapter"`) || !strings.Contains(got, `model="m"`) {
		t.Errorf("want the configured m kept and the adapter that nobody serves or asks for forgotten:\n%s", got)
	}
	m.Observe(okRecord("adapter"))
	wantLines(t, page(t, m), `kvgate_requests_total{code="200",model="adapter",outcome="ok",pool="p"} 1`)
}

// Counting, sweeping and reading race; nothing is lost that is not swept.
func TestConcurrentUse(t *testing.T) {
	tab := testTable(t, "a", "b")
	m := New(Options{Table: tab, Now: func() pool.Instant { return 1 }})
	var counting, others sync.WaitGroup
	stop := make(chan struct{})
	for g := range 4 {
		counting.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			for range 3000 {
				rec := okRecord("m")
				rec.Status = 200 + r.IntN(5)
				m.Observe(rec)
			}
		})
	}
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				m.Sweep(tab.Load(), time.Second)
				page(t, m)
			}
		}
	})
	counting.Wait()
	close(stop)
	others.Wait()
	sum := 0.0
	for code := 200; code < 205; code++ {
		var c dto.Metric
		if err := m.requests.WithLabelValues("p", "m", "ok", fmt.Sprint(code)).Write(&c); err != nil {
			t.Fatal(err)
		}
		sum += c.GetCounter().GetValue()
	}
	if sum != 12000 {
		t.Errorf("%v requests counted; want 12000", sum)
	}
}
