//go:build !race

package modelsim

import (
	"testing"
	"time"
)

// In steady state neither steps nor requests allocate: a million requests cost
// what their slice costs.
func TestEngineDoesNotAllocate(t *testing.T) {
	e := engine(t, EngineOptions{Profile: flat(1<<20, 2048, 64), MaxLoras: 4})
	reqs := make([]Request, 64)
	var blocks [64][64]uint64
	round := uint64(0)
	var at time.Duration
	work := func() {
		for i := range reqs {
			r := &reqs[i]
			r.Reset()
			r.PromptTokens, r.OutputTokens, r.Adapter = 1024+i, 20, int32(i%3)
			for b := range blocks[i] {
				blocks[i][b] = round<<32 + uint64(i)<<16 + uint64(b)
				if b < 32 {
					blocks[i][b] = uint64(b) + 1
				}
			}
			r.Blocks = blocks[i][:]
			if err := e.Submit(r, at); err != nil {
				t.Fatal(err)
			}
		}
		for next, ok := e.NextEvent(); ok; next, ok = e.NextEvent() {
			at = next
			e.Advance(at)
		}
		round++
	}
	for range 40 { // until every block has been used and evicted
		work()
	}
	// Go's map rehashes in place now and then.
	if n := testing.AllocsPerRun(50, work); n > 2 {
		t.Errorf("%g allocations for 64 requests of 20 tokens; want none", n)
	}
}
