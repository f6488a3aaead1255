package top

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/uniseg"
	"go.uber.org/goleak"

	"kvgate/internal/admin"
	"kvgate/scoring"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const fleet = `{"at":"2026-01-02T03:04:05Z","whole":true,
 "gateway":{"version":"v1","started_at":"2026-01-02T00:00:00Z","missing":[],"in_flight":7},
 "figures":{"requests_per_second":35.2,"ttft_p50_seconds":0.024,"ttft_p99_seconds":1.5,"output_tokens_per_second":3012,"error_ratio":0.02},
 "pools":[{"name":"llama-8b","policy":"auto","models":["m"],"requests_per_second":30,"ttft_p50_seconds":0.02,"prefix_hit_ratio":0.5,"adapter_hit_ratio":0.99},
          {"name":"qwen","policy":"weighted","models":["q"]}],
 "endpoints":[
  {"id":"llama-8b/a","pool":"llama-8b","url":"http://a","healthy":true,"state":["up"],"kv_cache_utilization":0.97,"kv_capacity_tokens":1000,"kv_headroom_tokens":30,"booked_requests":9,"pending_tokens":1200,"running":8,"waiting":3,"adapters":[{"name":"sql","in_flight":2}]},
  {"id":"llama-8b/b","pool":"llama-8b","url":"http://b","healthy":false,"state":["down"],"error":"refused","booked_requests":0,"pending_tokens":0},
  {"id":"qwen/c","pool":"qwen","url":"http://c","healthy":true,"state":["up"],"kv_cache_utilization":0.25,"booked_requests":2,"pending_tokens":0,"running":2,"waiting":0}],
 "ages":[4,-1,250],
 "requests":[
  {"number":1,"at":"2026-01-02T03:04:01Z","model":"m","endpoint":"llama-8b/a","outcome":"ok","status":200,"duration_seconds":1.5,"ttft_seconds":0.03},
  {"number":2,"at":"2026-01-02T03:04:02Z","model":"evil\u001b[2J","endpoint":"qwen/c","outcome":"endpoint_reset","status":502,"duration_seconds":0.5}]}`

func live(t *testing.T) *admin.LiveView {
	t.Helper()
	var l admin.LiveView
	if err := json.Unmarshal([]byte(fleet), &l); err != nil {
		t.Fatal(err)
	}
	return &l
}

// A terminal is a simulated one with a view on it.
type terminal struct {
	t *testing.T
	s tcell.SimulationScreen
	v *View
}

func newTerminal(t *testing.T, width, height int, o Options) *terminal {
	t.Helper()
	s := tcell.NewSimulationScreen("UTF-8")
	if err := s.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Fini)
	s.SetSize(width, height)
	if o.Live == nil {
		o.Live = func(context.Context) (*admin.LiveView, error) { return live(t), nil }
	}
	v, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	v.Take(live(t), nil)
	return &terminal{t, s, v}
}

// lines is what the terminal shows.
func (m *terminal) lines() []string {
	m.v.Draw(m.s)
	m.s.Show()
	cells, w, h := m.s.GetContents()
	out := make([]string, h)
	for y := range h {
		var b strings.Builder
		for x := range w {
			b.Write(cells[y*w+x].Bytes)
		}
		out[y] = strings.TrimRight(b.String(), " ")
	}
	return out
}

func (m *terminal) shows(texts ...string) {
	m.t.Helper()
	all := strings.Join(m.lines(), "\n")
	for _, text := range texts {
		if !strings.Contains(all, text) {
			m.t.Errorf("%q is not shown:\n%s", text, all)
		}
	}
}

func (m *terminal) press(keys ...any) {
	for _, k := range keys {
		switch k := k.(type) {
		case tcell.Key:
			m.v.key(m.t.Context(), tcell.NewEventKey(k, 0, 0))
		case string:
			for _, r := range k {
				m.v.key(m.t.Context(), tcell.NewEventKey(tcell.KeyRune, r, 0))
			}
		}
	}
}

func TestWhoWaits(t *testing.T) {
	m := newTerminal(t, 120, 24, Options{})
	l := live(t)
	l.Waiting = []admin.WaitingView{
		{Pool: "llama-8b", Class: "high", Refused: 3},
		{Pool: "llama-8b", Class: "normal", Waiting: 40, Tenants: []admin.WaitingTenant{{Tenant: "a", Waiting: 20}, {Tenant: "b", Waiting: 15}, {Others: 4, Waiting: 5}}},
		{Pool: "qwen", Class: "low", Waiting: 9, Tenants: []admin.WaitingTenant{{Tenant: "b", Waiting: 9}}},
	}
	m.v.Take(l, nil)
	m.shows("49 wait for admission: 40 normal, 9 low  by tenant: b 24, a 20, others 5")
	if text := waiting(l.Waiting[:1]); text != "" {
		t.Errorf("none waits, and it says %q", text)
	}
}

func (m *terminal) order() (ids []string) {
	for _, r := range m.v.rows() {
		ids = append(ids, r.e.ID)
	}
	return ids
}

func TestEndpointsInEightyColumns(t *testing.T) {
	m := newTerminal(t, 80, 24, Options{})
	m.shows("kvgate v1", "ready", "35/s", "24ms p50, 1.5s p99", "3012 tok/s", "2% failed", "7 in flight", "llama-8b     auto     1/2 up", "llama-8b/a", "97%", "down", "never", "q quit")
	for _, l := range m.lines() {
		if w := uniseg.StringWidth(l); w > 80 {
			t.Errorf("%d columns: %s", w, l)
		}
	}
	if m.shows("25s"); strings.Contains(strings.Join(m.lines(), ""), "ADAPTERS") {
		t.Error("adapters have no room in 80 columns")
	}
	m = newTerminal(t, 140, 24, Options{})
	m.shows("ADAPTERS", "sql", "PREFILL/S")
	m = newTerminal(t, 20, 4, Options{}) // nothing sensible, but no panic
	m.lines()
}

func TestSortingAndFiltering(t *testing.T) {
	f := func(m *terminal, want string) {
		t.Helper()
		if got := strings.Join(m.order(), " "); got != want {
			t.Errorf("%s; want %s", got, want)
		}
	}
	m := newTerminal(t, 80, 24, Options{})
	f(m, "llama-8b/a llama-8b/b qwen/c")
	m.press("r")
	f(m, "qwen/c llama-8b/b llama-8b/a")
	m.press("s", "s") // by KV, the fullest first; unknown is below everything
	f(m, "llama-8b/a qwen/c llama-8b/b")
	m.press(tcell.KeyLeft, tcell.KeyLeft, "r", "/", "QWEN up")
	m.shows("filter: qwen up")
	f(m, "qwen/c")
	m.press(tcell.KeyBackspace2, tcell.KeyBackspace2, tcell.KeyBackspace2, tcell.KeyEnter, "q")
	f(m, "qwen/c")
	if !m.v.quitting {
		t.Error("q after the filter was entered does not quit")
	}
	m.press(tcell.KeyEscape)
	f(m, "llama-8b/a llama-8b/b qwen/c")
	m.press("/", "nothing of the kind", tcell.KeyEnter)
	m.shows("none of 3 endpoints matches")
	m.press(tcell.KeyDown, tcell.KeyEnd, tcell.KeyEnter) // with no row to be on
	m.lines()
	if _, err := New(Options{Sort: "colour"}); err == nil || !strings.Contains(err.Error(), "endpoint, state, kv") {
		t.Errorf("a column that does not exist: %v", err)
	}
	if v, err := New(Options{Sort: "KV"}); err != nil || !v.down {
		t.Errorf("sorted by kv: %v, %+v", err, v)
	}
}

// The cursor stays on its endpoint when others come before it.
func TestCursorStaysOnItsEndpoint(t *testing.T) {
	m := newTerminal(t, 80, 24, Options{})
	m.press(tcell.KeyDown, tcell.KeyDown)
	l := live(t)
	l.Endpoints = append([]admin.LiveEndpoint{{ID: "a-new/one", Pool: "a-new", State: []string{"up"}}}, l.Endpoints...)
	m.v.Take(l, nil)
	m.lines()
	if m.v.pick != "qwen/c" || m.v.cursor != 3 {
		t.Errorf("the cursor is on row %d, %s", m.v.cursor, m.v.pick)
	}
	m.press(tcell.KeyEnter)
	m.shows("ENDED", "endpoint_reset", "filter: qwen/c")
}

func TestOneRequest(t *testing.T) {
	asked := uint64(0)
	m := newTerminal(t, 80, 24, Options{Request: func(_ context.Context, n uint64) (*admin.DecisionView, error) {
		if asked = n; n == 1 {
			return nil, errors.New("request 1 is not remembered")
		}
		d := live(t).Requests[1]
		d.SentSeconds, d.FirstByteSeconds, d.PredictedSeconds, d.AnsweredSeconds = new(0.01), new(0.3), new(0.1), new(0.29)
		d.Attempts = []admin.AttemptView{{Endpoint: "qwen/c", Outcome: "endpoint_reset", Seconds: 0.4}}
		d.Explanation = &scoring.Explanation{Policy: "auto", Chosen: "qwen/c", Endpoints: []scoring.EndpointExplanation{{ID: "qwen/c", Chosen: true, Age: 1, PrefillTokensPerSecond: 1}}}
		return &d, nil
	}})
	m.press(tcell.KeyTab)
	m.shows("ENDED", "endpoint_reset", "evil?[2J") // escape sequences from outside stay text
	m.press(tcell.KeyEnter)
	m.shows("request 2", "server until its first token", "290ms", "predicted after 100ms, came after 290ms", "attempt 1: qwen/c", "policy auto", "<- chosen")
	if asked != 2 {
		t.Errorf("asked for request %d; the newest is 2", asked)
	}
	m.press(tcell.KeyEscape, tcell.KeyDown, tcell.KeyEnter)
	m.shows("request 1 is not remembered")
	m.press(tcell.KeyEscape, tcell.KeyTab, "?")
	m.shows("share of the KV cache")
	m.press("x")
	m.shows("ENDPOINT")
}

func TestNoAnswer(t *testing.T) {
	m := newTerminal(t, 80, 24, Options{})
	m.v.Take(nil, errors.New("connection refused"))
	m.shows("no answer, shown is from", "llama-8b/a")
	m.v.live = nil
	m.shows("connection refused")
}

// Run looks again and again, draws, and ends cleanly, also while a look is under way.
func TestRun(t *testing.T) {
	s := tcell.NewSimulationScreen("UTF-8")
	if err := s.Init(); err != nil {
		t.Fatal(err)
	}
	defer s.Fini()
	looks := make(chan struct{})
	v, err := New(Options{Every: time.Millisecond, Live: func(ctx context.Context) (*admin.LiveView, error) {
		select {
		case looks <- struct{}{}:
			return live(t), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- v.Run(t.Context(), s) }()
	for range 3 {
		<-looks
	}
	s.InjectKey(tcell.KeyRune, 'q', 0)
	for {
		select {
		case <-looks:
			continue
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("it does not end")
		}
		break
	}
}

func TestText(t *testing.T) {
	v, err := New(Options{Sort: "kv"})
	if err != nil {
		t.Fatal(err)
	}
	v.Take(live(t), nil)
	lines := strings.Split(strings.TrimRight(v.Text(80), "\n"), "\n")
	if len(lines) != 8 || !strings.HasPrefix(lines[4], "ENDPOINT") || !strings.HasPrefix(lines[5], "llama-8b/a") || !strings.HasSuffix(lines[0], "ready") {
		t.Errorf("picture:\n%s", strings.Join(lines, "\n"))
	}
	for _, l := range lines {
		if uniseg.StringWidth(l) > 80 {
			t.Errorf("too wide: %s", l)
		}
	}
}

func TestNumbers(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.5: "0.5", 9.96: "10.0", 12: "12", 9999: "9999", 10_000: "10k", 421_000: "421k", 1.25e6: "1.2M", 3.1e7: "31M", 2e9: "2.0G"} {
		if got := count(&v); got != want && got != "1.3M" {
			t.Errorf("%g is %s; want %s", v, got, want)
		}
		if got := count(&v); len(got) > 5 {
			t.Errorf("%g is %s, longer than its column", v, got)
		}
	}
	for v, want := range map[float64]string{0.0001: "100µs", 0.0042: "4.2ms", 0.25: "250ms", 1.234: "1.23s", 45: "45s", 600: "10m", 7200: "2h", 200_000: "2d"} {
		if got := seconds(&v); got != want {
			t.Errorf("%g seconds is %s; want %s", v, got, want)
		}
	}
	for v, want := range map[float64]string{0: "         0%", 0.5: "███     50%", 1: "██████ 100%", 1.2: "██████ 120%"} {
		if got := bar(new(v), 6); strings.TrimSpace(got) != strings.TrimSpace(want) || len([]rune(got)) != 11 {
			t.Errorf("bar of %g is %q; want %q", v, got, want)
		}
	}
	if got := fit("a long name", 6, true, false) + fit("a long name", 6, true, true) + fit("x", 3, false, false); got != fmt.Sprint("a lon…", "… name", "  x") {
		t.Errorf("fitted: %q", got)
	}
}
