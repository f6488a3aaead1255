// Package pool is the vocabulary of the router: endpoints, what is known about them, what this gateway has booked
// on them, and the immutable table that decisions read.
//
// It imports nothing of kvgate's, performs no IO, and reads no wall clock: time comes in as an [Instant], so that the
// same code runs in the proxy and in a virtual-time simulation.
package pool

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
)

// An Instant is a time in nanoseconds on a monotonic clock whose origin is arbitrary (process start, or the start of a
// simulation) but never at zero: the zero Instant means "never".
type Instant int64

// Sub returns the duration from u to t.
func (t Instant) Sub(u Instant) time.Duration { return time.Duration(t - u) }

// Add returns t moved by d.
func (t Instant) Add(d time.Duration) Instant { return t + Instant(d) }

// HashName is the 64-bit hash of a model or adapter name that bookings, adapter memories and rendezvous hashing use. It
// is the same in every process, so that gateways which share nothing agree (xxHash64, seed 0).
func HashName[S ~string | ~[]byte](name S) uint64 {
	return xxhash.Sum64String(string(name)) // the conversion does not escape and does not allocate
}

// Rendezvous is the weight of an endpoint for a name under rendezvous (highest random weight) hashing: the endpoint with
// the largest weight is the name's first choice. Both arguments are hashes of [HashName]; the mix is the finaliser of
// MurmurHash3 (fmix64), which spreads every input bit over the result.
func Rendezvous(endpoint, name uint64) uint64 {
	h := endpoint ^ (name * 0x9e3779b97f4a7c15)
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// A Float is a float64 that goroutines may read and write together. The zero value is 0.
type Float struct{ bits atomic.Uint64 }

// Load returns the value last stored.
func (f *Float) Load() float64 { return math.Float64frombits(f.bits.Load()) }

// Store sets the value.
func (f *Float) Store(v float64) { f.bits.Store(math.Float64bits(v)) }

// Update replaces the value v by fn(v). fn may run more than once and must have no other effect.
func (f *Float) Update(fn func(float64) float64) float64 {
	for {
		old := f.bits.Load()
		v := fn(math.Float64frombits(old))
		if f.bits.CompareAndSwap(old, math.Float64bits(v)) {
			return v
		}
	}
}
