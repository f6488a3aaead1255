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
