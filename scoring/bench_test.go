package scoring

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/zeebo/xxh3"

	"kvgate/pool"
)

// BenchmarkChoose is one decision of `auto` with its booking, the prefix lookup and the insertion of a prompt of 2,000
// tokens (8,000 bytes, hashed beforehand), on endpoints that all have something to do.
func BenchmarkChoose(b *testing.B) {
	for _, n := range []int{8, 64, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) { benchmarkChoose(b, n, Config{Index: NewIndex(0)}) })
	}
}

// BenchmarkChoosePolicy is the same for every other policy, on 64 endpoints.
func BenchmarkChoosePolicy(b *testing.B) {
	for _, name := range PolicyNames() {
		b.Run(name, func(b *testing.B) { benchmarkChoose(b, 64, Config{Name: name}) })
	}
	all := map[string]float64{}
	for _, s := range Scorers() {
		all[s.Name] = 1
	}
	b.Run("weights=all", func(b *testing.B) { benchmarkChoose(b, 64, Config{Weights: all, Index: NewIndex(0)}) })
}

func benchmarkChoose(b *testing.B, n int, c Config) {
	r := rand.New(rand.NewPCG(1, 1))
	tab := newTable(b, n, func(int) pool.Load {
		l := idle()
		l.Running, l.Waiting, l.KVCacheUtilization = r.Int32N(20), r.Int32N(3), r.Float64()/2
		return l
	})
	s := tab.Load()
	p, err := New(c)
	if err != nil {
		b.Fatal(err)
	}
	held := make([]pool.Booking, 4*n)
	for i := range held {
		s.Rows[i%n].Book(&held[i], pool.Claim{PendingTokens: int64(r.IntN(1000)), KVTokens: int64(r.IntN(10000))})
	}
	target := s.TargetString("m")
	prompts := make([][]uint64, 256)
	for i := range prompts {
		body := make([]byte, 8000)
		for j := range body {
			body[j] = byte(r.Uint32())
		}
		copy(body, bytes.Repeat([]byte("you are a helpful assistant. "), 40)) // what all have in common
		prompts[i] = HashPrefix(nil, PrefixSeed(target, nil), body)
	}
	var booking pool.Booking
	req := Request{Target: target, PromptTokens: 2000, PromptBytes: 8000, Stream: true}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		req.Prefix = prompts[i%len(prompts)]
		if _, err := p.Choose(&req, s, second0+1, &booking); err != nil {
			b.Fatal(err)
		}
		booking.End()
	}
}

// BenchmarkPrefix is what a prompt of 400 KB (100,000 tokens) costs: hashing, lookup and insertion, beside plain hashes of
// the same bytes.
func BenchmarkPrefix(b *testing.B) {
	body := make([]byte, 400_000)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range body {
		body[i] = byte(r.Uint32())
	}
	s := newTable(b, 8, nil).Load()
	target := s.TargetString("m")
	var hashes []uint64
	b.Run("xxhash64", func(b *testing.B) {
		for b.Loop() {
			xxhash.Sum64(body)
		}
	})
	b.Run("xxh3", func(b *testing.B) {
		for b.Loop() {
			xxh3.Hash(body)
		}
	})
	b.Run("HashPrefix", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			hashes = HashPrefix(hashes[:0], target.Hash, body)
		}
	})
	b.Run("hash+lookup+insert", func(b *testing.B) {
		x := NewIndex(0)
		var out [maxMatches]match
		var seen slotSet
		b.ReportAllocs()
		req := Request{Target: target, PromptTokens: 100_000, PromptBytes: 400_000}
		for seed := uint64(0); b.Loop(); seed++ {
			hashes = HashPrefix(hashes[:0], seed, body) // another prompt each time: entries that no cache holds
			req.Prefix = hashes
			x.lookup(&req, s, out[:0], &seen)
			x.insert(&req, &s.Rows[seed%8], blockScale{perByte: 0.25, most: 99_999})
			if n := len(x.lookup(&req, s, out[:0], &seen)); n != 1 {
				b.Fatal("not found")
			}
		}
	})
}

// BenchmarkIndex is what looking up and inserting cost in a table of the default size that is full of what others were
// sent, so that each bucket comes from memory: prompts that nobody has sent before, and such that one endpoint of 8 holds
// whole, or up to the middle. 16 KB of prompt are 40 blocks, 256 KB are 184, and 2 MB 1,024.
func BenchmarkIndex(b *testing.B) {
	s := newTable(b, 8, nil).Load()
	target := s.TargetString("m")
	r := rand.New(rand.NewPCG(1, 1))
	x := NewIndex(0)
	sc := blockScale{perByte: 0.25, most: 1 << 20}
	random := func(dst []uint64) {
		for i := range dst {
			dst[i] = r.Uint64()
		}
	}
	prefix := make([]uint64, 64)
	for i := range 2 * len(x.buckets) * bucketWords / len(prefix) {
		random(prefix)
		s.Rows[i%8].Endpoint.TakeIn(r.Int64N(10_000)) // so that ages differ
		x.insert(&Request{Target: target, Prefix: prefix}, &s.Rows[i%8], sc)
	}
	var seen slotSet
	var out [maxMatches]match
	for _, n := range []int{4, 40, 184, 1024} {
		req := Request{Target: target, Prefix: make([]uint64, n)}
		b.Run(fmt.Sprintf("unknown/blocks=%d/lookup", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				random(req.Prefix)
				if len(x.lookup(&req, s, out[:0], &seen)) > 1 {
					b.Fatal("found")
				}
			}
		})
		b.Run(fmt.Sprintf("unknown/blocks=%d/lookup+insert", n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				random(req.Prefix)
				if len(x.lookup(&req, s, out[:0], &seen)) > 1 {
					b.Fatal("found")
				}
				s.Rows[i%8].Endpoint.TakeIn(r.Int64N(10_000))
				x.insert(&req, &s.Rows[i%8], sc)
			}
		})
		for _, held := range []struct {
			name string
			of   int
		}{{"known", 1}, {"half", 2}} {
			known := make([][]uint64, 200_000/n)
			for i := range known {
				known[i] = make([]uint64, n)
				random(known[i])
				x.insert(&Request{Target: target, Prefix: known[i][:n/held.of]}, &s.Rows[i%8], sc)
			}
			b.Run(fmt.Sprintf("%s/blocks=%d/lookup", held.name, n), func(b *testing.B) {
				b.ReportAllocs()
				found := 0
				for i := 0; b.Loop(); i++ {
					req.Prefix = known[i%len(known)]
					found += len(x.lookup(&req, s, out[:0], &seen))
				}
				if found < b.N*9/10 {
					b.Fatalf("%d of %d found", found, b.N)
				}
			})
		}
	}
}
