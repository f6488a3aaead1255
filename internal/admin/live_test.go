package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// A liveMessage is a LiveView as a viewer reads it.
type liveMessage struct {
	LiveView
	Changed [][2]json.RawMessage `json:"changed"`
}

func fleet(t testing.TB, n int) *pool.Table {
	t.Helper()
	table := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	var specs []pool.Spec
	for i := range n {
		specs = append(specs, pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 1000+i), Name: fmt.Sprintf("e%04d", i)})
	}
	if _, _, err := table.SetEndpoints("p", specs, 1); err != nil {
		t.Fatal(err)
	}
	return table
}

func scraped(table *pool.Table, i int, kv float64, at pool.Instant) {
	e := table.Load().Rows[i].Endpoint
	table.Observe(e, pool.Observation{At: at, Load: &pool.Load{
		Known: pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity | pool.KnowsRunning, KVCacheUtilization: kv, KVCapacityTokens: 100_000, Running: 2,
		PromptTokens: -1, GenerationTokens: -1, PrefixHitTokens: -1, PrefixQueryTokens: -1, Preemptions: -1,
	}})
	table.Flush(at)
}

// ticking returns a server whose viewers are told what is new when the test says so.
func ticking(o Options) (s *Server, tick chan time.Time) {
	o.Now = func() pool.Instant { return 5e9 }
	s = New(o)
	tick = make(chan time.Time)
	s.live.tick = func() (<-chan time.Time, func()) { return tick, func() {} }
	return s, tick
}

func next(t *testing.T, v *viewer) (m liveMessage) {
	t.Helper()
	select {
	case b, ok := <-v.out:
		if !ok {
			t.Fatal("the stream has ended")
		}
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no message")
	}
	return m
}

func TestViewersAreToldEverythingAndThenWhatIsNew(t *testing.T) {
	table, recent := fleet(t, 3), telemetry.NewRecent(100)
	s, tick := ticking(Options{Table: table, Recent: recent})
	defer s.live.close()
	done := func(model, endpoint string) {
		recent.Observe(&telemetry.Record{Model: model, Pool: "p", Endpoint: endpoint, Outcome: "ok", Status: 200, Decided: true, TTFTSeconds: 0.1, ScrapeAgeSeconds: -1})
	}
	done("before", "p/e0000")
	v := s.live.join()
	m := next(t, v)
	if !m.Whole || len(m.Endpoints) != 3 || m.Endpoints[1].ID != "p/e0001" || len(m.Requests) != 1 || m.Requests[0].Model != "before" {
		t.Fatalf("first message: %+v", m)
	}
	if m.Endpoints[0].KV != nil || m.Ages[0] != -1 || m.Endpoints[0].KVHeadroom != nil {
		t.Errorf("what is unknown is told: %+v, ages %v", m.Endpoints[0], m.Ages)
	}
	scraped(table, 1, 0.25, 4e9)
	done("after", "p/e0001")
	tick <- time.Now()
	m = next(t, v)
	if m.Whole || len(m.Endpoints) != 0 || len(m.Changed) != 1 || string(m.Changed[0][0]) != "1" || len(m.Requests) != 1 || m.Requests[0].Model != "after" {
		t.Fatalf("second message: %+v", m)
	}
	var e LiveEndpoint
	if err := json.Unmarshal(m.Changed[0][1], &e); err != nil || *e.KV != 0.25 || *e.KVCapacity != 100_000 || *e.Foreign != 2 || m.Ages[1] != 10 {
		t.Errorf("changed: %+v, ages %v, %v", e, m.Ages, err)
	}
	tick <- time.Now()
	if m = next(t, v); len(m.Changed) != 0 || len(m.Requests) != 0 {
		t.Errorf("nothing happened, and this was told: %+v", m)
	}

	// A second viewer is told everything at once; the first one nothing twice.
	w := s.live.join()
	if m = next(t, w); !m.Whole || len(m.Requests) != 2 {
		t.Errorf("the second viewer: %+v", m)
	}
	// Other endpoints: everybody is told everything.
	if _, _, err := table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://127.0.0.1:7"}}, 5e9); err != nil {
		t.Fatal(err)
	}
	tick <- time.Now()
	for _, v := range []*viewer{v, w} {
		if m = next(t, v); !m.Whole || len(m.Endpoints) != 1 {
			t.Errorf("after other endpoints came: %+v", m)
		}
	}
}

// While nobody looks, nothing runs.
func TestNothingRunsWhileNobodyLooks(t *testing.T) {
	s, _ := ticking(Options{Table: fleet(t, 1)})
	for range 3 {
		v := s.live.join()
		next(t, v)
		s.live.leave(v)
		s.live.leave(v)       // twice is once
		s.live.running.Wait() // the loop has ended by itself
		if s.live.stop != nil {
			t.Fatal("a loop is left")
		}
	}
	s.live.close()
	if s.live.join() != nil {
		t.Error("joined after the end")
	}
}

// A viewer whose connection is slow delays nobody, and is sent everything when it comes back.
func TestSlowViewers(t *testing.T) {
	table := fleet(t, 2)
	s, tick := ticking(Options{Table: table})
	defer s.live.close()
	slow := s.live.join()
	for i := range 3 * viewerBacklog {
		scraped(table, 0, 0.01*float64(i+1), pool.Instant(1e9+i))
		tick <- time.Now()
	}
	fast := s.live.join()
	next(t, fast)
	for len(slow.out) > 0 {
		<-slow.out
	}
	tick <- time.Now()
	if m := next(t, slow); !m.Whole || *m.Endpoints[0].KV != 0.24 {
		t.Errorf("after it fell behind: %+v", m)
	}
	for range maxViewers - 2 {
		s.live.join()
	}
	if s.live.join() != nil {
		t.Error("there is no bound on viewers")
	}
}

// The stream as it goes over the wire, and its end when the listener stops.
func TestLiveStream(t *testing.T) {
	url := serve(t, Options{Table: fleet(t, 2), Recent: telemetry.NewRecent(4)})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url+"/debug/live", nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("content type %s", ct)
	}
	in := bufio.NewReader(resp.Body)
	for i := range 2 {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		var m liveMessage
		if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &m); err != nil || m.Whole != (i == 0) {
			t.Errorf("message %d: %v, whole %v", i, err, m.Whole)
		}
		if blank, _ := in.ReadString('\n'); blank != "\n" {
			t.Errorf("an event ends in %q", blank)
		}
	}
	// serve's cleanup stops the listener while the stream is open: it would hang for ever if the stream were waited for.
	if _, body := do(t, "GET", url+"/debug/live?once=1", ""); !strings.Contains(body, `"whole":true`) || !json.Valid([]byte(body)) {
		t.Errorf("once: %s", body)
	}
}

func TestActionsNeedTheToken(t *testing.T) {
	token, drained, level := "", map[string]bool{}, "info"
	url := serve(t, Options{
		Token:  func() string { return token },
		Reload: func(context.Context) (ReloadResult, error) { return ReloadResult{}, nil },
		Drain: func(id string, on bool) (bool, bool) {
			was := drained[id]
			drained[id] = on
			return id == "p/e", was != on
		},
		LogLevel: func() string { return level },
		SetLogLevel: func(l string) error {
			if l == "loud" {
				return errors.New("level loud")
			}
			level = l
			return nil
		},
	})
	f := func(path, auth string, want int) string {
		t.Helper()
		var h []string
		if auth != "" {
			h = []string{"Authorization", auth}
		}
		code, body := do(t, "POST", url+path, "", h...)
		if code != want {
			t.Errorf("%s with %q: %d %s; want %d", path, auth, code, body, want)
		}
		return body
	}
	// Without a token there are no actions, but reload is open as it ever was.
	f("/-/drain?endpoint=p/e", "", 404)
	f("/-/drain?endpoint=p/e", "Bearer ", 404)
	f("/-/log-level?level=debug", "Bearer x", 404)
	f("/-/authorized", "", 404)
	f("/-/reload", "", 200)
	token = "s3cret-s3cret-s3cret"
	for _, wrong := range []string{"", "Bearer", "Bearer ", "Bearer s3cret", "Basic s3cret-s3cret-s3cret", "s3cret-s3cret-s3cret", "Bearer s3cret-s3cret-s3cre\u00e9"} {
		f("/-/drain?endpoint=p/e", wrong, 401)
		f("/-/readmit?endpoint=p/e", wrong, 401)
		f("/-/log-level?level=debug", wrong, 401)
		f("/-/reload", wrong, 401)
		f("/-/authorized", wrong, 401)
	}
	if len(drained) != 0 || level != "info" {
		t.Errorf("done without the token: %v %s", drained, level)
	}
	right := "bearer " + token
	if body := f("/-/drain?endpoint=p/e", right, 200); !strings.Contains(body, `"changed":true`) || !drained["p/e"] {
		t.Errorf("drain: %s", body)
	}
	if body := f("/-/readmit?endpoint=p/e", right, 200); !strings.Contains(body, `"draining":false`) || drained["p/e"] {
		t.Errorf("re-admit: %s", body)
	}
	f("/-/drain?endpoint=other", right, 404)
	f("/-/log-level?level=loud", right, 400)
	if f("/-/log-level?level=warn", right, 200); level != "warn" {
		t.Errorf("level %s", level)
	}
	f("/-/reload", right, 200)
	f("/-/authorized", right, 200)
	if code, _ := do(t, "GET", url+"/-/drain?endpoint=p/e", "", "Authorization", right); code != 405 {
		t.Errorf("GET of an action: %d", code)
	}
}

func TestDecisionsOfOneEndpointAndOneRequest(t *testing.T) {
	recent := telemetry.NewRecent(8)
	url := serve(t, Options{Recent: recent, Explanation: func(n uint64) (e scoring.Explanation, ok bool) {
		if n != 77 {
			return e, false
		}
		return scoring.Explanation{Policy: "auto", Chosen: "p/b", Endpoints: []scoring.EndpointExplanation{{ID: "p/a"}, {ID: "p/b", Chosen: true}}}, true
	}})
	recent.Observe(&telemetry.Record{RequestID: "one", Endpoint: "p/a", Decided: true, Explained: 77, Attempts: []telemetry.Attempt{{Endpoint: "p/a", Outcome: "ok"}}})
	recent.Observe(&telemetry.Record{RequestID: "two", Endpoint: "p/b", Attempts: []telemetry.Attempt{{Endpoint: "p/a"}, {Endpoint: "p/b"}}})
	recent.Observe(&telemetry.Record{RequestID: "three", Endpoint: "p/b"})
	if _, body := do(t, "GET", url+"/debug/decisions?endpoint=p/a", ""); !strings.Contains(body, "one") || !strings.Contains(body, "two") || strings.Contains(body, "three") {
		t.Errorf("of p/a: %s", body)
	}
	var v DecisionView
	_, body := do(t, "GET", url+"/debug/decisions/1", "")
	if err := json.Unmarshal([]byte(body), &v); err != nil || v.RequestID != "one" || v.Explanation == nil || v.Explanation.Chosen != "p/a" || !v.Explanation.Endpoints[0].Chosen {
		t.Errorf("request 1: %v %s", err, body)
	}
	for _, path := range []string{"0", "4", "99", "-1", "x", "1e3"} {
		if code, _ := do(t, "GET", url+"/debug/decisions/"+path, ""); code != 404 {
			t.Errorf("request %s: %d; want 404", path, code)
		}
	}
}

func TestBrowsersAreSentToTheDashboard(t *testing.T) {
	url := serve(t, Options{})
	if code, body := do(t, "GET", url+"/", "", "Accept", "text/html,*/*"); code != 200 || !strings.Contains(body, "<title>kvgate") {
		t.Errorf("a browser: %d %.200s", code, body)
	}
	if code, body := do(t, "GET", url+"/", ""); code != 200 || !strings.Contains(body, "GET  /metrics") {
		t.Errorf("curl: %d %.200s", code, body)
	}
	for _, file := range []string{"app.js", "style.css"} {
		if code, body := do(t, "GET", url+"/dashboard/"+file, ""); code != 200 || strings.Contains(body, "://") && !strings.Contains(body, "http://www.w3.org") {
			t.Errorf("%s: %d, or it names another site", file, code)
		}
	}
	if code, _ := do(t, "GET", url+"/dashboard/dashboard.go", ""); code != 404 {
		t.Errorf("a file that is none of its: %d", code)
	}
}

func TestFigures(t *testing.T) {
	var s stats
	for i := range 1000 {
		r := telemetry.Record{
			Pool: "p", Outcome: "ok", Status: 200, Decided: true, UsageKnown: true, CachedKnown: true, InputTokens: 100, CachedTokens: 25, OutputTokens: 10,
			TTFTSeconds: float64(i+1) / 1000, AnsweredSeconds: 0.2, PredictedSeconds: 0.1, PromptTokens: 100, NewTokens: 50, Adapter: "a", AdapterResident: i%4 != 0,
		}
		if i%10 == 0 {
			r.Outcome = "endpoint_reset"
		}
		s.add(int64(1000+i%10), &r, 1)
	}
	s.add(1005, &telemetry.Record{Pool: "q", Outcome: "ok"}, 5)
	s.add(700, &telemetry.Record{Pool: "p", Outcome: "ok"}, 1) // long over
	p := func(pool string) bool { return pool == "p" }
	f := s.figures(1010, p)
	near := func(name string, got *float64, want float64) {
		t.Helper()
		if got == nil || math.Abs(*got-want) > 0.06*want {
			t.Errorf("%s %v; want %g", name, got, want)
		}
	}
	near("requests", &f.RequestsPerSecond, 100)
	near("output", f.OutputTokensPerSecond, 1000)
	if q := s.figures(1010, func(pool string) bool { return pool == "q" }); q.OutputTokensPerSecond != nil || q.InputTokensPerSecond != nil {
		t.Errorf("tokens of answers that told of none: %v, %v", *q.OutputTokensPerSecond, *q.InputTokensPerSecond)
	}
	near("errors", f.ErrorRatio, 0.1)
	near("p50", f.TTFTP50, 0.5)
	near("p99", f.TTFTP99, 0.99)
	near("prefix", f.PrefixHitRatio, 0.25)
	near("adapters", f.AdapterHitRatio, 0.75)
	near("prediction", f.PredictionRatio, 2)
	if f := s.figures(1200, p); f.TTFTP50 != nil || f.ErrorRatio != nil || f.RequestsPerSecond != 0 || f.OutputTokensPerSecond == nil || *f.OutputTokensPerSecond != 0 {
		t.Errorf("a window without requests: %+v", f)
	}
	if h := s.history(1010, historyPoints); len(h) != 10 || h[5][0] != int64(1005) || h[5][1] != 105.0 {
		t.Errorf("history: %v", h)
	}
}

// What one tick costs with a thousand endpoints that have all changed and as many requests that have ended.
func BenchmarkAdvance(b *testing.B) {
	table, recent := fleet(b, 1000), telemetry.NewRecent(4096)
	s, _ := ticking(Options{Table: table, Recent: recent})
	f := newFeed(s)
	r := &telemetry.Record{Model: "m", Pool: "p", Endpoint: "p/e0001", Outcome: "ok", Status: 200, Decided: true, TTFTSeconds: 0.1}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		for j := range 1000 {
			scraped(table, j, float64(i%100)/100, pool.Instant(1e9+i))
			recent.Observe(r)
		}
		b.StartTimer()
		f.advance(time.Now())
	}
}
