package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/internal/modelsim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A request is what a stub was asked.
type request struct {
	at            time.Time
	path, auth    string
	Model         string
	Stream        bool
	MaxTokens     int `json:"max_tokens"`
	Prompt        string
	Messages      []message
	IgnoreEOS     bool `json:"ignore_eos"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	inFlight, arrived int
}

func (q *request) words() int {
	n := len(strings.Fields(q.Prompt))
	for _, m := range q.Messages {
		n += len(strings.Fields(m.Content))
	}
	return n
}

// A stub answers as it is told to and remembers what it was asked.
type stub struct {
	*httptest.Server
	mu       sync.Mutex
	requests []request
	inFlight atomic.Int64
}

func newStub(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, q *request)) *stub {
	t.Helper()
	s := &stub{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"object":"list","data":[{"id":"first"},{"id":"second"}]}`)
			return
		}
		q := request{at: time.Now(), path: r.URL.Path, auth: r.Header.Get("Authorization")}
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
			t.Errorf("body: %v", err)
		}
		q.inFlight = int(s.inFlight.Add(1))
		defer s.inFlight.Add(-1)
		s.mu.Lock()
		q.arrived = len(s.requests)
		s.requests = append(s.requests, q)
		s.mu.Unlock()
		answer(w, r, &q)
	}))
	t.Cleanup(s.Close)
	return s
}

// tokens streams two tokens after a time each.
func tokens(first, second time.Duration) func(http.ResponseWriter, *http.Request, *request) {
	return func(w http.ResponseWriter, r *http.Request, _ *request) {
		for i, d := range []time.Duration{first, second} {
			if !wait(r, d) {
				return
			}
			fmt.Fprintf(w, ": a comment\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"w%d \"}}]}\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"+
			"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":50,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":40}}}\n\ndata: [DONE]\n\n")
	}
}

// wait takes a server's time; false is a client that left.
func wait(r *http.Request, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-r.Context().Done():
		return false
	}
}

func options(targets ...string) Options {
	o := New()
	for _, u := range targets {
		o.Targets = append(o.Targets, Target{URL: u})
	}
	o.Input, o.Output, o.PrefixTokens, o.Timeout = Const(20), Const(5), Const(100), time.Minute
	return o
}

func mustRun(t *testing.T, o Options) *Result {
	t.Helper()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range r.Targets {
		a := &r.Targets[i]
		ended, failed := 0, 0
		for _, w := range a.Windows {
			ended, failed = ended+w.Answered, failed+w.Failed
		}
		if a.Requests != a.Answered+a.Failed+a.Interrupted || ended != a.Answered || failed != a.Failed || a.EndToEnd.Count != int64(a.Answered) || a.Lag.Count != int64(a.Requests) {
			t.Errorf("counts don't add up: %+v", a)
		}
	}
	return r
}

// Every way to ask gets whole answers from a server that behaves like vLLM, and tokens are as the server counts them.
func TestServers(t *testing.T) {
	for _, api := range APIs {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s %v", api, stream), func(t *testing.T) {
				var seen atomic.Int64
				s, err := modelsim.New(modelsim.Options{Speedup: 50, Adapters: []string{"sql", "chat"}, OnRequest: func(*http.Request, []byte) { seen.Add(1) }})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = s.Close(context.Background()) }()
				o := options(s.URL() + "/v1/")
				o.Targets[0], err = ParseTarget(o.Targets[0].URL)
				if err != nil {
					t.Fatal(err)
				}
				o.API, o.Stream, o.Requests, o.Rate, o.Adapters, o.Prefixes, o.Turns = api, stream, 40, 100, []string{"sql", "chat"}, 2, Const(2)
				r := mustRun(t, o)
				a := &r.Targets[0]
				if a.Requests != 40 || a.Answered != 40 || seen.Load() != 40 || a.OutputTokens != 200 || a.InputTokens < 40*120 {
					t.Errorf("%+v; the server saw %d", a, seen.Load())
				}
				if (a.CachedTokens > 0) != (api == "chat" || !stream) { // vLLM's streamed completions don't say
					t.Errorf("%d of %d tokens from the cache", a.CachedTokens, a.InputTokens)
				}
				if (a.TTFT.Count == 40) != stream || (a.TPOT.Count == 40) != stream || stream && a.InterToken.Count != 40*4 {
					t.Errorf("streamed %v: %+v", stream, a)
				}
			})
		}
	}
}

// Percentiles are those of a server whose delays are known.
func TestPercentiles(t *testing.T) {
	s := newStub(t, func(w http.ResponseWriter, r *http.Request, q *request) {
		first := 60 * time.Millisecond
		if q.arrived%10 == 9 {
			first = 600 * time.Millisecond
		}
		tokens(first, 100*time.Millisecond)(w, r, q)
	})
	o := options(s.URL)
	o.Requests, o.Rate, o.Arrival = 100, 50, "constant"
	a := &mustRun(t, o).Targets[0]
	f := func(what string, got, low, high float64) {
		t.Helper()
		if got < low || got > high {
			t.Errorf("%s: %.3f s; want %.3f to %.3f", what, got, low, high)
		}
	}
	f("time to first token, p50", a.TTFT.P50, 0.06, 0.3)
	f("p99", a.TTFT.P99, 0.6, 1.5)
	f("mean", a.TTFT.Mean, 0.114, 0.4)
	f("time per output token, p50", a.TPOT.P50, 0.09, 0.3)
	f("between tokens, p50", a.InterToken.P50, 0.09, 0.3)
	f("whole request, p50", a.EndToEnd.P50, 0.16, 0.6)
	f("whole request, max", a.EndToEnd.Max, 0.7, 3)
	if a.RequestsPerSecond < 20 || a.RequestsPerSecond > 51 || a.InputTokens != 5000 || a.CachedTokens != 4000 || a.OutputTokens != 200 {
		t.Errorf("%+v", a)
	}
}

// What had to wait to be sent counts its wait: a generator that waits for a slow server must not hide how slow it is.
func TestTimesCountFromTheSchedule(t *testing.T) {
	s := newStub(t, tokens(20*time.Millisecond, 0))
	o := options(s.URL)
	o.Requests, o.Rate, o.Arrival, o.MaxInFlight = 50, 1000, "constant", 1
	r := mustRun(t, o)
	a := &r.Targets[0]
	if a.EndToEnd.Max < 0.9 || a.TTFT.P50 < 0.4 || a.Lag.P50 < 0.4 {
		t.Errorf("fifty requests of 20 ms, one after another, due within 50 ms: %+v", a)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "sent late") {
		t.Errorf("notes %q", r.Notes)
	}
}

// A closed loop has as many requests under way as it has clients, and ends by number or by time.
func TestClosedLoop(t *testing.T) {
	s := newStub(t, tokens(5*time.Millisecond, 0))
	o := options(s.URL)
	o.Arrival, o.Clients, o.Requests = "closed", 4, 80
	if a := &mustRun(t, o).Targets[0]; a.Answered != 80 || len(s.requests) != 80 {
		t.Errorf("%+v; the server saw %d", a, len(s.requests))
	}
	most := 0
	for _, q := range s.requests {
		most = max(most, q.inFlight)
	}
	if most != 4 {
		t.Errorf("at most %d requests at a time; want 4", most)
	}
	o.Requests, o.Duration, o.WarmUp = 0, 200*time.Millisecond, 300*time.Millisecond
	if a := &mustRun(t, o).Targets[0]; a.Answered == 0 || a.Answered >= len(s.requests)-80 {
		t.Errorf("%d requests count of %d; the warm-up's must not", a.Answered, len(s.requests)-80)
	}
}

// Pairs: either target gets the same lengths, in an order that is drawn, and never a beginning that the other has seen.
func TestInterleaved(t *testing.T) {
	a, b := newStub(t, tokens(0, 0)), newStub(t, tokens(0, 0))
	o := options(a.URL, b.URL)
	o.Requests, o.Rate, o.Input, o.Output, o.Prefixes, o.PrefixTokens = 200, 400, mustDist("uniform:5-500"), mustDist("uniform:1-100"), 3, mustDist("uniform:50-150")
	r := mustRun(t, o)
	if r.Targets[0].Answered != 100 || r.Targets[1].Answered != 100 || r.Comparison.Pairs != 100 {
		t.Fatalf("%d and %d requests, %d pairs; want 100 each", r.Targets[0].Answered, r.Targets[1].Answered, r.Comparison.Pairs)
	}
	type lengths struct{ words, most int }
	of := func(s *stub) (out []lengths, starts map[string]bool) {
		starts = map[string]bool{}
		for _, q := range s.requests {
			out = append(out, lengths{q.words(), q.MaxTokens})
			starts[q.Messages[0].Content[:32]] = true
		}
		slices.SortFunc(out, func(x, y lengths) int { return (x.words-y.words)*1000 + x.most - y.most })
		return out, starts
	}
	la, startsA := of(a)
	lb, startsB := of(b)
	if !slices.Equal(la, lb) {
		t.Error("the targets got requests of other lengths")
	}
	for s := range startsA {
		if startsB[s] {
			t.Errorf("both targets got a prompt that begins with %q", s)
		}
	}
	if len(startsA) != 3 || len(startsB) != 3 {
		t.Errorf("%d and %d prefixes; want 3", len(startsA), len(startsB))
	}
	run := &run{o: o}
	first := 0
	for i := range 1000 {
		first += run.coin(i)
	}
	if first < 400 || first > 600 {
		t.Errorf("B goes first in %d of 1000 pairs", first)
	}
}

func mustDist(text string) Dist {
	d, err := ParseDist(text)
	if err != nil {
		panic(err)
	}
	return d
}

// Slices: one target after the other has all the traffic, the same.
func TestSlices(t *testing.T) {
	a, b := newStub(t, tokens(2*time.Millisecond, 0)), newStub(t, tokens(2*time.Millisecond, 0))
	o := options(a.URL, b.URL)
	o.Duration, o.Slice, o.Rate, o.WarmUp = 1200*time.Millisecond, 100*time.Millisecond, 200, 50*time.Millisecond
	r := mustRun(t, o)
	c := r.Comparison
	if c.Blocks != 6 || c.Left != 0 || c.Pairs != r.Targets[0].Answered || c.Pairs != r.Targets[1].Answered || c.Pairs < 30 {
		t.Errorf("%+v", c)
	}
	type seen struct {
		at     time.Time
		target int
	}
	var all []seen
	for i, s := range []*stub{a, b} {
		for _, q := range s.requests {
			all = append(all, seen{q.at, i})
		}
	}
	slices.SortFunc(all, func(x, y seen) int { return x.at.Compare(y.at) })
	changes := 0
	for i := range all[1:] {
		if all[i].target != all[i+1].target {
			changes++
		}
	}
	if changes < 6 || changes > 13 {
		t.Errorf("the targets took turns %d times; want 6 pairs of slices and a warm-up", changes)
	}
}

// A slower target is seen to be slower.
func TestSlowerTargetIsSeen(t *testing.T) {
	a, b := newStub(t, tokens(20*time.Millisecond, 0)), newStub(t, tokens(120*time.Millisecond, 0))
	o := options(a.URL, b.URL)
	o.Requests, o.Rate = 200, 100
	c := mustRun(t, o).Comparison
	if w := c.Rows[0]; w.Metric != "time to first token, mean" || !strings.HasPrefix(w.Verdict, "slower by") || w.Ratio < 1.5 {
		t.Errorf("%+v", w)
	}
	if c.FailedVerdict != noDifference {
		t.Errorf("%+v", c)
	}
}

// Conversations carry the answers along; adapters are asked for by popularity.
func TestConversations(t *testing.T) {
	s := newStub(t, tokens(0, 0))
	o := options(s.URL)
	o.Requests, o.Rate, o.Turns, o.Extra = 30, 300, Const(3), map[string]any{"ignore_eos": true}
	names, err := ExpandNames([]string{"lora-{1..3}", "base"})
	if err != nil || !slices.Equal(names, []string{"lora-1", "lora-2", "lora-3", "base"}) {
		t.Fatal(names, err)
	}
	o.Adapters, o.Zipf = names, 3
	mustRun(t, o)
	byTurn, first := map[int]int{}, 0
	for _, q := range s.requests {
		byTurn[len(q.Messages)]++
		if q.Model == "lora-1" {
			first++
		}
		if !q.IgnoreEOS || !q.StreamOptions.IncludeUsage || len(q.Messages) > 1 && (q.Messages[1].Role != "assistant" || q.Messages[1].Content != "w0 w1 ") {
			t.Fatalf("%+v", q)
		}
	}
	if byTurn[1] < 10 || byTurn[3] < 5 || byTurn[1]+byTurn[3]+byTurn[5] != 30 {
		t.Errorf("requests by messages: %v", byTurn)
	}
	if first < 18 {
		t.Errorf("the most popular adapter was asked for in %d of 30; Zipf(3) is 5 of 6", first)
	}
}

// secret is a key made at run time that servers repeat in their errors.
func secret() string { return fmt.Sprintf("key-%d-0123456789", time.Now().UnixNano()) }

// Each kind of failure is counted, with an example, and no key gets into a report.
func TestFailures(t *testing.T) {
	key := secret()
	kinds := []func(w http.ResponseWriter, r *http.Request, q *request){
		func(w http.ResponseWriter, _ *http.Request, q *request) {
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprintf(w, `{"error":{"message":"too many of %s <b>\u001b[31m"}}`, q.auth)
		},
		func(w http.ResponseWriter, r *http.Request, _ *request) { wait(r, 10*time.Second) },
		func(w http.ResponseWriter, _ *http.Request, _ *request) {
			fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
		},
		func(w http.ResponseWriter, _ *http.Request, _ *request) {
			fmt.Fprint(w, "data: {\"error\":{\"message\":\"out of memory\"}}\n\n")
		},
		func(w http.ResponseWriter, _ *http.Request, _ *request) { fmt.Fprint(w, "data: <html>\n\n") },
		func(w http.ResponseWriter, _ *http.Request, _ *request) {
			c, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
			}
		},
		func(w http.ResponseWriter, r *http.Request, _ *request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusTemporaryRedirect)
		},
		tokens(0, 0),
	}
	s := newStub(t, func(w http.ResponseWriter, r *http.Request, q *request) { kinds[q.arrived%len(kinds)](w, r, q) })
	o := options(s.URL)
	o.Targets[0].Key, o.Requests, o.Rate, o.Timeout = key, 5*len(kinds), 200, 500*time.Millisecond
	r := mustRun(t, o)
	a := &r.Targets[0]
	got := map[string]int{}
	for _, f := range a.Failures {
		got[f.Kind] = f.Count
	}
	for _, kind := range []string{"status 429", failedTimeout, failedCutOff, failedErrorSent, failedAnswer, failedBroken, "status 307"} {
		// The transport may send a request again on a connection that broke before any answer, so that the order shifts.
		if n := got[kind]; n < 3 || n > 7 {
			t.Errorf("%s: %d; want about 5 (%v)", kind, n, a.Failures)
		}
	}
	for _, write := range []func(io.Writer) error{r.WriteText, r.WriteJSON, r.WriteHTML} {
		var out bytes.Buffer
		if err := write(&out); err != nil {
			t.Fatal(err)
		}
		if text := out.String(); strings.Contains(text, key) || !strings.Contains(text, "too many of Bearer [key]") {
			t.Errorf("the key is in the report, or the example is not:\n%s", text)
		}
	}
	var out bytes.Buffer
	if err := r.WriteText(&out); err != nil || strings.Contains(out.String(), "\x1b") {
		t.Errorf("%v: what a server says gets at the terminal: %q", err, out.String())
	}
	if s.requests[0].auth != "Bearer "+key {
		t.Errorf("the server saw %q", s.requests[0].auth)
	}

	o = options("http://127.0.0.1:1")
	o.Model, o.Requests, o.Rate = "m", 3, 100
	if a := &mustRun(t, o).Targets[0]; a.Failed != 3 || a.Failures[0].Kind != failedConnect {
		t.Errorf("%+v", a)
	}
	o.Model = ""
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "no model is named") {
		t.Errorf("%v", err)
	}
}

// Whoever ends a run early gets what there is; what was cut off is no failure.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := newStub(t, func(w http.ResponseWriter, r *http.Request, q *request) {
		if q.arrived < 10 {
			tokens(0, 0)(w, r, q)
			return
		}
		if q.arrived == 15 {
			cancel()
		}
		wait(r, 10*time.Second)
	})
	o := options(s.URL)
	o.Duration, o.Rate = time.Hour, 200
	r, err := Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	a := &r.Targets[0]
	if !r.Interrupted || a.Answered != 10 || a.Failed != 0 || a.Interrupted < 6 || len(r.Notes) == 0 {
		t.Errorf("%+v", r)
	}
}

// Arrivals come at the rate that was asked for, whatever the process and the turns.
func TestArrivals(t *testing.T) {
	for _, kind := range []string{"poisson", "constant", "burst"} {
		for _, turns := range []string{"1", "uniform:1-5"} {
			o := New()
			o.Arrival, o.Rate, o.Burst, o.Turns = kind, 50, 20, mustDist(turns)
			r := &run{o: o}
			next := r.arrivals(1)
			requests, last, gaps := 0, time.Duration(0), map[time.Duration]int{}
			for i := 0; last < 200*time.Second; i++ {
				c := r.conversation(i)
				requests += len(c.turns)
				at := next()
				gaps[(at-last).Round(time.Millisecond)]++
				if at < last {
					t.Fatal("time goes back")
				}
				last = at
			}
			if rate := float64(requests) / last.Seconds(); rate < 48 || rate > 52 {
				t.Errorf("%s, %s turns: %.1f requests/s; want 50", kind, turns, rate)
			}
			if want := map[string]int{"constant": 3, "burst": 3}[kind]; want > 0 && len(gaps) > want {
				t.Errorf("%s: gaps %v", kind, gaps)
			}
		}
	}
}

var outside = regexp.MustCompile(`(?i)(src|href|action|poster|data)\s*=|url\(|@import|<link|<script|<iframe|<object|<embed`)

// The report is one page that needs nothing from elsewhere, and what servers and people write can't become part of it.
func TestReport(t *testing.T) {
	a, b := newStub(t, tokens(time.Millisecond, time.Millisecond)), newStub(t, func(w http.ResponseWriter, _ *http.Request, _ *request) {
		http.Error(w, "<script>alert(1)</script>", http.StatusInternalServerError)
	})
	o := options(a.URL, b.URL)
	o.Targets[0].Name, o.Targets[1].Name = "<i>x", "y&z"
	o.Requests, o.Rate = 100, 500
	r := mustRun(t, o)
	var page bytes.Buffer
	if err := r.WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	if m := outside.FindString(text); m != "" {
		t.Errorf("the page has %q", m)
	}
	for _, want := range []string{"<svg", "Time to first token", "time per output token", "&lt;script&gt;alert(1)", "status 500", "y&amp;z against &lt;i&gt;x", "points more", "too few to tell", r.Settings[0].Value} {
		if want != "too few to tell" && !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(text, "<i>x") || strings.Contains(text, "NaN") {
		t.Error("a name became markup, or a figure is none")
	}
	if n := strings.Count(text, "<figure"); n != 6 {
		t.Errorf("%d plots; want 6", n)
	}
	var j bytes.Buffer
	var again Result
	if err := r.WriteJSON(&j); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(j.Bytes(), &again); err != nil || again.Targets[0].TTFT != r.Targets[0].TTFT || again.Targets[1].Failures[0].Kind != "status 500" {
		t.Errorf("%v: %s", err, j.String())
	}
}

// Nothing at all is no reason to fail.
func TestReportOfNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o := options("http://127.0.0.1:1", "http://127.0.0.1:2")
	o.Model, o.Requests = "m", 5
	r, err := Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, write := range []func(io.Writer) error{r.WriteText, r.WriteJSON, r.WriteHTML} {
		if err := write(&out); err != nil || strings.Contains(out.String(), "NaN") {
			t.Errorf("%v\n%s", err, out.String())
		}
	}
}

func TestOptionsThatMakeNoSense(t *testing.T) {
	f := func(want string, change func(*Options)) {
		t.Helper()
		o := options("http://127.0.0.1:1")
		o.Model, o.Requests = "m", 1
		change(&o)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	f("0 targets", func(o *Options) { o.Targets = nil })
	f("two targets of the name", func(o *Options) { o.Targets = []Target{{Name: "a"}, {Name: "a"}} })
	f("API", func(o *Options) { o.API = "images" })
	f("arrival", func(o *Options) { o.Arrival = "gamma" })
	f("rate of 0", func(o *Options) { o.Rate = 0 })
	f("0 clients", func(o *Options) { o.Arrival = "closed" })
	f("bursts of 0", func(o *Options) { o.Arrival = "burst" })
	f("neither a duration", func(o *Options) { o.Requests = 0 })
	f("slices need two", func(o *Options) { o.Slice = time.Second })
	f("holds no slice", func(o *Options) {
		o.Targets, o.Requests, o.Slice, o.Duration = append(o.Targets, Target{}), 0, time.Minute, time.Minute
	})
	f("timeout", func(o *Options) { o.Timeout = 0 })
	f("can't be set", func(o *Options) { o.Extra = map[string]any{"model": "x"} })
	for _, text := range []string{"127.0.0.1:80", "ftp://x", "", "=http://x", "http://u:planted@x", "a=http://u:planted@x", "http://x/?k=planted"} {
		if _, err := ParseTarget(text); err == nil || strings.Contains(err.Error(), "planted") {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, name := range []string{"a{1..0}", "a{x..3}", "a{0..999999999}"} {
		if got, err := ExpandNames([]string{name}); err == nil {
			t.Errorf("%q: %d names", name, len(got))
		}
	}
}
