package usage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func record(id string) *telemetry.Record {
	return &telemetry.Record{
		RequestID: id, Decided: true, Tenant: "a", Key: "a-1", Model: "gpt", Served: "llama", Pool: "p", API: "chat_completions", Status: 200, Outcome: "ok",
		UsageKnown: true, InputTokens: 7, OutputTokens: 3, DurationSeconds: 0.5,
	}
}

func parse(t testing.TB, data []byte) (out []Line) {
	t.Helper()
	sc := bufio.NewScanner(bytes.NewReader(data))
	for sc.Scan() {
		var l Line
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			t.Fatalf("%q: %v", sc.Text(), err)
		}
		out = append(out, l)
	}
	return out
}

func read(t testing.TB, name string) []Line {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return parse(t, b)
}

func closed(t testing.TB, r *Recorder, patience time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return r.Close(ctx)
}

// Every request that reached an endpoint is in the file after a clean stop, also where it was rotated meanwhile.
func TestFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "usage.jsonl")
	r, err := New(Options{File: name})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 250 {
				r.Observe(record(fmt.Sprint(g, "-", i)))
			}
		})
	}
	wg.Wait()
	if err := os.Rename(name, name+".1"); err != nil {
		t.Fatal(err)
	}
	if err := r.Reopen(); err != nil {
		t.Fatal(err)
	}
	r.Observe(&telemetry.Record{RequestID: "refused", Outcome: "quota"})
	u := record("unknown")
	u.UsageKnown = false
	r.Observe(u)
	if err := closed(t, r, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	all := append(read(t, name+".1"), read(t, name)...)
	seen := map[string]bool{}
	for _, l := range all {
		seen[l.RequestID] = true
	}
	if len(all) != 2001 || len(seen) != 2001 {
		t.Fatalf("%d lines of %d requests", len(all), len(seen))
	}
	if l := all[0]; l.Tenant != "a" || l.Key != "a-1" || l.Model != "gpt" || l.Served != "llama" || *l.InputTokens != 7 || *l.OutputTokens != 3 || l.CachedTokens != nil || l.Time.IsZero() {
		t.Errorf("%+v", l)
	}
	if l := all[2000]; l.RequestID != "unknown" || l.InputTokens != nil {
		t.Errorf("%+v", l)
	}
	if _, err := New(Options{File: filepath.Join(name, "x")}); err == nil {
		t.Error("a file that can't be written is fine")
	}
}

// A hook is a web server that takes batches, or doesn't.
type hook struct {
	*httptest.Server
	mu    sync.Mutex
	fail  int
	got   []Line
	posts int
	auth  string
}

func newHook(t testing.TB) *hook {
	h := &hook{}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		h.mu.Lock()
		defer h.mu.Unlock()
		h.posts++
		h.auth = r.Header.Get("Authorization")
		if h.fail != 0 || err != nil {
			if h.fail > 0 {
				h.fail--
			}
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		h.got = append(h.got, parse(t, b)...)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hook) seen() (lines, posts int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.got), h.posts
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestWebhook(t *testing.T) {
	h := newHook(t)
	var told []error
	var mu sync.Mutex
	o := Options{URL: h.URL, Token: "secret", Interval: 20 * time.Millisecond, Spool: filepath.Join(t.TempDir(), "spool"), OnTrouble: func(err error) {
		mu.Lock()
		told = append(told, err)
		mu.Unlock()
	}}
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		r.Observe(record(fmt.Sprint(i)))
	}
	eventually(t, "all are there", func() bool { n, _ := h.seen(); return n == 100 })
	if _, posts := h.seen(); posts > 50 {
		t.Errorf("%d posts of 100 records", posts)
	}
	// One that failed is sent again.
	h.mu.Lock()
	h.fail = 1
	h.mu.Unlock()
	r.Observe(record("again"))
	eventually(t, "it is there in the end", func() bool { n, _ := h.seen(); return n == 101 })
	// What a web server doesn't take is sent after the next start.
	h.mu.Lock()
	h.fail = -1
	h.mu.Unlock()
	for i := range 10 {
		r.Observe(record(fmt.Sprint("spool", i)))
	}
	if err := closed(t, r, 300*time.Millisecond); err != nil {
		t.Errorf("%v", err)
	}
	if n := len(read(t, o.Spool)); n != 10 {
		t.Errorf("%d lines in the spool; want 10", n)
	}
	h.mu.Lock()
	h.fail = 0
	h.mu.Unlock()
	if r, err = New(o); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the rest is there", func() bool { n, _ := h.seen(); return n == 111 })
	r.Observe(record("last"))
	if err := closed(t, r, 10*time.Second); err != nil { // at once, not after an interval
		t.Error(err)
	}
	if n, _ := h.seen(); n != 112 {
		t.Errorf("%d lines; want 112", n)
	}
	if len(read(t, o.Spool)) != 0 {
		t.Error("the spool is still there")
	}
	if h.auth != "Bearer secret" {
		t.Errorf("authorized by %q", h.auth)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(told) == 0 {
		t.Error("nobody was told of failures")
	}
}

// While a destination takes nothing, memory is bounded, and what is lost is told, then and at the end.
func TestBounded(t *testing.T) {
	h := newHook(t)
	h.fail = -1
	var lost sync.Map
	r, err := New(Options{URL: h.URL, Interval: time.Millisecond, MaxBytes: 10_000, OnTrouble: func(err error) {
		if strings.Contains(err.Error(), "lost") {
			lost.Store("told", err)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		r.Observe(record(fmt.Sprint(i)))
	}
	if n := r.queues[0].Waiting(); n > 10_000 {
		t.Errorf("%d bytes wait", n)
	}
	eventually(t, "the loss is told", func() bool { _, ok := lost.Load("told"); return ok })
	if err := closed(t, r, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "are lost") {
		t.Errorf("%v", err)
	}
}

func BenchmarkObserve(b *testing.B) {
	r, err := New(Options{File: filepath.Join(b.TempDir(), "usage.jsonl")})
	if err != nil {
		b.Fatal(err)
	}
	rec := record("0123456789abcdef0123456789abcdef")
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(rec)
	}
	b.StopTimer()
	if err := closed(b, r, time.Minute); err != nil {
		b.Fatal(err)
	}
}
