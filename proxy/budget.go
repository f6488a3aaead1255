package proxy

import "sync/atomic"

// A budget bounds the bytes of request bodies held in memory by all requests
// together. Bytes are acquired as buffers grow, so what a client declares costs
// nothing until it is sent. It is safe for concurrent use.
type budget struct {
	limit int64
	used  atomic.Int64
	tight atomic.Bool // memory is: nothing is given out
}

func newBudget(limitBytes int64) *budget { return &budget{limit: limitBytes} }

// acquire takes n bytes and reports whether they were there.
func (b *budget) acquire(n int64) bool {
	if b.used.Add(n) > b.limit || b.tight.Load() {
		b.used.Add(-n)
		return false
	}
	return true
}

// release gives n bytes back.
func (b *budget) release(n int64) {
	if b.used.Add(-n) < 0 {
		panic("BUG: more body bytes released than acquired")
	}
}

// usedBytes returns how many bytes are taken.
func (b *budget) usedBytes() int64 { return b.used.Load() }
