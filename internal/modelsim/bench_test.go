package modelsim

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"
)

// One op is one request through an 8b-h100 engine at about 85 % load: 12,000
// prompt tokens in 512-token blocks, a third of them shared, 343 tokens out (the
// means of the Mooncake conversation trace).
func BenchmarkEngineConversation(b *testing.B) {
	prof, err := ProfileByName("8b-h100")
	if err != nil {
		b.Fatal(err)
	}
	e := engine(b, EngineOptions{Profile: prof, PromptBlockTokens: 512})
	rng := rand.New(rand.NewPCG(1, 1))
	reqs := make([]Request, b.N)
	ids := make([]uint64, 64*b.N)
	var now time.Duration
	b.ReportAllocs()
	b.ResetTimer()
	for i := range reqs {
		now += time.Duration(rng.ExpFloat64() / 2.2 * 1e9)
		r := &reqs[i]
		r.ID, r.PromptTokens, r.OutputTokens = uint64(i), 2000+rng.IntN(20_000), 1+rng.IntN(686)
		r.Blocks = ids[i*64 : i*64 : i*64+64]
		shared := rng.Uint64N(500) << 32
		for k := range uint64(r.PromptTokens / 512) {
			if k > uint64(r.PromptTokens)/1536 {
				shared = uint64(i+1000) << 32
			}
			r.Blocks = append(r.Blocks, shared+k)
		}
		e.Advance(now)
		if err := e.Submit(r, now); err != nil {
			b.Fatal(err)
		}
	}
	e.Advance(forever)
	b.StopTimer()
	s := e.Stats()
	b.ReportMetric(float64(s.Steps)/b.Elapsed().Seconds(), "steps/s")
	b.ReportMetric(float64(s.Finished)/b.Elapsed().Seconds(), "requests/s")
	b.ReportMetric(float64(s.GeneratedTokens)/float64(s.Steps), "tokens/step")
}

// One op is one step of a batch that only decodes.
func BenchmarkEngineDecode(b *testing.B) {
	for _, batch := range []int{1, 32, 256} {
		b.Run(map[int]string{1: "batch=1", 32: "batch=32", 256: "batch=256"}[batch], func(b *testing.B) {
			prof := flat(1<<40, 2048, 1024)
			e := engine(b, EngineOptions{Profile: prof, BlockTokens: 1 << 20})
			for range batch {
				submit(b, e, 0, &Request{PromptTokens: 1, OutputTokens: 1 << 30})
			}
			b.ReportAllocs()
			for b.Loop() {
				at, _ := e.NextEvent()
				e.Advance(at)
			}
		})
	}
}

// One op is one streamed chat of 16 tokens through a socket, the engine's time
// made short: what the server itself costs whoever measures a gateway with it.
func BenchmarkServerStream(b *testing.B) {
	s, err := New(Options{Speedup: 1e6})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close(context.Background())
	body := chat("how much is it", `,"stream":true,"max_tokens":16`)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				b.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	})
}
