package metrics

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/internal/modelsim"
	"kvgate/pool"
)

// A simulated vLLM is detected, read and followed through adapters, sleep and a restart.
func TestSimulatedServer(t *testing.T) {
	for _, dialect := range []modelsim.Dialect{modelsim.DialectVLLM, modelsim.DialectVLLM08} {
		t.Run(string(dialect), func(t *testing.T) {
			sim, err := modelsim.New(modelsim.Options{Models: []string{"base"}, Adapters: []string{"sql"}, MaxLoras: 2, Speedup: 10, Dialect: dialect})
			if err != nil {
				t.Fatal(err)
			}
			defer sim.Close(context.Background())
			started := time.Now()
			o := quick()
			o.MaxBackoff = 10 * time.Millisecond
			r := newRig(t, o, pool.Spec{URL: sim.URL(), Dialect: Auto})
			row := r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.Served != nil })
			const want = pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity
			if !row.Load.Known.Has(want) || row.Load.KVCapacityTokens < 10_000 || row.Load.Dialect != "vllm" || row.Load.StartTime == 0 {
				t.Errorf("load %+v", row.Load)
			}
			if tg := r.table.Load().TargetString("sql"); tg == nil || !tg.Adapter || tg.Base != "base" {
				t.Errorf("adapter sql: %+v", tg)
			}

			// A direct client's request for the adapter is foreign load, and prefill and decoding show in the counters.
			body := `{"model":"sql","prompt":"` + strings.Repeat("many words ", 200) + `","max_tokens":4000,"ignore_eos":true}`
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan struct{})
			go func() {
				defer close(done)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, sim.URL()+"/v1/completions", strings.NewReader(body))
				req.Header.Set("Content-Type", "application/json")
				if res, err := http.DefaultClient.Do(req); err == nil {
					res.Body.Close()
				}
			}()
			r.row(0, "seen running a foreign request for sql", func(row *pool.Row) bool {
				return row.Load.Running == 1 && row.Foreign.Requests == 1 && row.Load.PromptTokens > 100 &&
					row.Load.KVCacheUtilization > 0 && len(row.Load.Adapters) == 1 && row.Load.Adapters[0] == "sql"
			})
			cancel()
			<-done
			http.DefaultClient.CloseIdleConnections()
			r.row(0, "idle again", func(row *pool.Row) bool { return row.Load.Running == 0 && row.Foreign.Requests == 0 })

			if dialect == modelsim.DialectVLLM {
				sim.Sleep(1)
				r.row(0, "asleep", func(row *pool.Row) bool { return row.State&pool.Sleeping != 0 })
				sim.Wake()
				r.row(0, "awake", func(row *pool.Row) bool { return row.State&pool.Sleeping == 0 })
			}
			// Start times that differ by less than 2 s count as one, so the process must be older than that.
			r.row(0, "old enough", func(*pool.Row) bool { return time.Since(started) > 2100*time.Millisecond })
			epoch := r.endpoints[0].Epoch()
			if err := sim.Restart(); err != nil {
				t.Fatal(err)
			}
			r.row(0, "seen to have restarted", func(*pool.Row) bool { return r.endpoints[0].Epoch() == epoch+1 })
		})
	}
}

// A simulated SGLang is detected, and read as far as its page goes.
func TestSimulatedSGLang(t *testing.T) {
	sim, err := modelsim.New(modelsim.Options{
		Dialect: modelsim.DialectSGLang, Models: []string{"base"}, Adapters: []string{"sql"}, MaxLoras: 2, KVTokens: 32_000, MaxSequences: 1, Speedup: 10,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sim.Close(context.Background())
	o := quick()
	o.MaxBackoff = 10 * time.Millisecond
	r := newRig(t, o, pool.Spec{URL: sim.URL(), Dialect: Auto})
	row := r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.Served != nil })
	const want = pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity | pool.KnowsMaxAdapters
	if !row.Load.Known.Has(want) || row.Load.KVCapacityTokens != 32_000 || row.Load.MaxAdapters != 2 || row.Load.Dialect != "sglang" {
		t.Errorf("load %+v", row.Load)
	}
	if tg := r.table.Load().TargetString("sql"); tg == nil || !tg.Adapter || tg.Base != "base" {
		t.Errorf("adapter sql: %+v", tg)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var clients sync.WaitGroup
	body := `{"model":"base:sql","prompt":"` + strings.Repeat("many words ", 1000) + `","max_tokens":20000,"ignore_eos":true}`
	for range 3 { // one runs, two wait
		clients.Go(func() {
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, sim.URL()+"/v1/completions", strings.NewReader(body))
			if res, err := http.DefaultClient.Do(req); err == nil {
				res.Body.Close()
			}
		})
	}
	// 11 kB are 2,750 tokens of the 32,000; the page has hundredths, and says so each 40th step.
	r.row(0, "seen running and waiting", func(row *pool.Row) bool {
		return row.Load.Running == 1 && row.Load.Waiting == 2 && row.Load.KVCacheUtilization >= 0.08 && row.Load.PromptTokens > 2000
	})
	epoch := r.endpoints[0].Epoch()
	cancel()
	clients.Wait()
	http.DefaultClient.CloseIdleConnections()
	if err := sim.Restart(); err != nil { // there is no start time; the counters tell
		t.Fatal(err)
	}
	r.row(0, "seen to have restarted", func(row *pool.Row) bool {
		return r.endpoints[0].Epoch() == epoch+1 && row.Load != nil && row.Load.Running == 0
	})
}
