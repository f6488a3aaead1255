package gateway

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/internal/modelsim"
	"kvgate/pool"
)

// docs/failures.md lists what can fail and names the test of each. Those here take a whole gateway and simulated servers.

// A server is killed under 100 streams: each ends with an error event and a cut, none with [DONE], none is sent again, and
// the other server goes on.
func TestServerKilledUnderStreams(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	// The one that is going to be killed is in the middle of every stream then, however slow the machine is.
	if err := a.SetFaults(modelsim.Fault{Kind: modelsim.FaultHangStream, Events: 5}); err != nil {
		t.Fatal(err)
	}
	g := start(t, onePool(a.URL(), b.URL()), Options{})
	const n = 100
	var cut, whole atomic.Int64
	var wg sync.WaitGroup
	var begun sync.WaitGroup
	begun.Add(n)
	for range n {
		wg.Go(func() {
			resp, err := client.Post("http://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, true, 150)))
			if err != nil {
				begun.Done()
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			_, _ = io.ReadFull(resp.Body, make([]byte, 10))
			begun.Done()
			body, err := io.ReadAll(resp.Body)
			done := strings.HasSuffix(string(body), "data: [DONE]\n\n")
			switch {
			case err == nil && done:
				whole.Add(1)
			case errors.Is(err, io.ErrUnexpectedEOF) && !done && strings.Contains(string(body), `"code":"endpoint_reset"`):
				cut.Add(1)
			default:
				t.Errorf("%v, [DONE] %v: %q", err, done, body[max(0, len(body)-300):])
			}
		})
	}
	begun.Wait()
	killed := a.Stats()
	a.OOM(100 * time.Millisecond)
	wg.Wait()
	if cut.Load() == 0 || whole.Load() == 0 || cut.Load()+whole.Load() != n {
		t.Errorf("%d cut, %d whole of %d; the server had %+v", cut.Load(), whole.Load(), n, killed)
	}
	eventually(t, "no booking", func() bool { return g.booked() == (pool.Booked{}) })
}

// booked is what is booked on all endpoints.
func (r *run) booked() (sum pool.Booked) {
	for _, row := range r.table.Load().Rows {
		b := row.Booked()
		sum.Requests += b.Requests
		sum.PendingTokens += b.PendingTokens
		sum.KVTokens += b.KVTokens
	}
	return sum
}

// An engine is dead while its API server lives: after a few errors its server is left out.
func TestEngineDead(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL(), b.URL())+"    policy: round_robin\nhealth: {base_pause: 1m}\n", Options{})
	if err := a.SetFaults(modelsim.Fault{Kind: modelsim.FaultDead}); err != nil {
		t.Fatal(err)
	}
	failed, good := 0, 0
	for good < 30 && failed < 30 {
		if code, _ := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(baseModel, false, 2)); code == 200 {
			good++
		} else {
			failed++
		}
	}
	// Every second request goes there: without ejection 30 fail. On a busy machine the other server may seem to be away for
	// a moment, and then the dead one is tried once more.
	if failed > 8 {
		t.Errorf("%d requests failed until the server was left out; want 3", failed)
	}
}

// A metrics page that stands still at idle does not draw all traffic to its server.
func TestFrozenMetrics(t *testing.T) {
	a, b := sim(t, modelsim.Options{Speedup: 1}), sim(t, modelsim.Options{Speedup: 1})
	if err := a.SetFaults(modelsim.Fault{Kind: modelsim.FaultMetricsFrozen}); err != nil {
		t.Fatal(err)
	}
	var seen collect
	g := start(t, onePool(a.URL(), b.URL()), Options{Sink: &seen})
	const n = 60
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":60,"messages":[{"role":"user","content":"Prompt %d."}]}`, baseModel, i)
			if code, text := post(t, "http://"+g.Addr()+"/v1/chat/completions", body); code != 200 {
				t.Errorf("%d %s", code, text)
			}
		})
		time.Sleep(5 * time.Millisecond) // so that pages are read in between
	}
	wg.Wait()
	eventually(t, "all records", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return len(seen.recs) == n })
	frozen := 0
	for _, r := range seen.recs {
		if strings.HasSuffix(r.Endpoint, a.Addr()) {
			frozen++
		}
	}
	if frozen > n*7/10 || frozen < n*3/10 {
		t.Errorf("%d of %d requests went to the server whose metrics are frozen", frozen, n)
	}
}

// An adapter that a server has lost between two looks at it costs a request a second try; when nobody has it, clients are
// told what model servers tell them.
func TestAdapterVanishes(t *testing.T) {
	a, b := sim(t, modelsim.Options{Adapters: []string{"sql"}}), sim(t, modelsim.Options{Adapters: []string{"sql"}})
	g := start(t, onePool(a.URL(), b.URL())+"    policy: round_robin\n", Options{})
	unload := func(s *modelsim.Server) {
		t.Helper()
		resp, err := http.Post(s.URL()+"/v1/unload_lora_adapter", "application/json", strings.NewReader(`{"lora_name":"sql"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("unloading: %d", resp.StatusCode)
		}
	}
	ask := func() (int, string) { return post(t, "http://"+g.Addr()+"/v1/chat/completions", chat("sql", false, 2)) }
	unload(a)
	for range 6 {
		if code, body := ask(); code != 200 {
			t.Errorf("one server has it: %d %s", code, body)
		}
	}
	unload(b)
	if code, body := ask(); code != 404 || !strings.Contains(body, "does not exist") {
		t.Errorf("nobody has it: %d %s", code, body)
	}
	eventually(t, "the gateway to know", func() bool {
		code, body := ask()
		return code == 404 && strings.Contains(body, `"code":"model_not_found"`)
	})
}
