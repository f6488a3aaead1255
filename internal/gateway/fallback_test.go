package gateway

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

// A request falls back once it has waited for as long as its rule says, if there is room; else it waits on, for either.
func TestFallbackAfter(t *testing.T) {
	a, b := sim(t, modelsim.Options{Models: []string{"big"}, Speedup: 1}), sim(t, modelsim.Options{Models: []string{"small"}, Speedup: 1})
	text := onePool(a.URL()) + "    admission: {endpoint_requests: 1, max_wait: 2m, standing_wait: 0s}\n" +
		"  - name: q\n    discovery: {static: [" + b.URL() + "]}\n    admission: {endpoint_requests: 1, max_wait: 2m, standing_wait: 0s}\n" + `names:
  rules:
    - {model: at-once, to: big, fallback: [small], fallback_after: 0s}
    - {model: soon, to: big, fallback: [small], fallback_after: 300ms}
    - {model: late, to: big, fallback: [small], fallback_after: 1h}
`
	g := start(t, text, Options{})
	eventually(t, "both are known", func() bool {
		return g.Table().Load().TargetString("big") != nil && g.Table().Load().TargetString("small") != nil
	})
	var clients sync.WaitGroup
	defer clients.Wait()
	send := func(ctx context.Context, model string, tokens int) (http.Header, int) {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.Addr()+"/v1/chat/completions", strings.NewReader(chat(model, true, tokens)))
		resp, err := client.Do(r)
		if err != nil {
			return nil, 0
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.Header, resp.StatusCode
	}
	booked := func(model string) int64 {
		s := g.Table().Load()
		return s.Rows[s.TargetString(model).Rows[0]].Booked().Requests
	}
	occupy := func(model string) (end func()) {
		ctx, end := context.WithCancel(t.Context())
		clients.Go(func() { send(ctx, model, 100_000) })
		eventually(t, model+" is taken", func() bool { return booked(model) == 1 })
		return end
	}
	ask := func(model, want string) time.Duration {
		t.Helper()
		began := time.Now()
		if h, status := send(t.Context(), model, 2); status != 200 || h.Get("X-Kvgate-Fallback") != want {
			t.Errorf("%s: %d %v; want fallback %q", model, status, h, want)
		}
		return time.Since(began)
	}
	for _, model := range []string{"at-once", "soon", "late"} {
		ask(model, "")
	}
	endBig := occupy("big")
	ask("at-once", "small")
	if took := ask("soon", "small"); took < 300*time.Millisecond {
		t.Errorf("it fell back after %v", took)
	}
	// Both are full: it waits on for whichever has room first.
	endSmall := occupy("small")
	for _, model := range []string{"at-once", "soon"} {
		done := make(chan string, 1)
		clients.Go(func() {
			h, _ := send(t.Context(), model, 2)
			done <- h.Get("X-Kvgate-Fallback")
		})
		eventually(t, "it waits", func() bool {
			_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
			return strings.Contains(page, `kvgate_admission_waiting_requests{class="normal",pool="p"} 1`)
		})
		select {
		case got := <-done:
			t.Errorf("%s went on to %q", model, got)
		case <-time.After(600 * time.Millisecond): // twice and more of what it waits by itself
		}
		if model == "at-once" {
			endSmall()
			if got := <-done; got != "small" {
				t.Errorf("%s went to %q; want small", model, got)
			}
			endSmall = occupy("small")
			continue
		}
		endBig()
		if got := <-done; got != "" {
			t.Errorf("%s went to %q; want what it asked for", model, got)
		}
	}
	endSmall()
	// One whose rule has it wait for long does so, though there is room elsewhere.
	endBig = occupy("big")
	done := make(chan string, 1)
	clients.Go(func() {
		h, _ := send(t.Context(), "late", 2)
		done <- h.Get("X-Kvgate-Fallback")
	})
	select {
	case got := <-done:
		t.Errorf("late went on to %q", got)
	case <-time.After(600 * time.Millisecond):
	}
	endBig()
	if got := <-done; got != "" {
		t.Errorf("late went to %q; want what it asked for", got)
	}
}
