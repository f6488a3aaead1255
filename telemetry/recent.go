package telemetry

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// Recent keeps the last requests, for people who ask why one went where it went. It holds no bodies, and a bounded number
// of bytes. Its memory is used again, so that remembering allocates nothing.
type Recent struct {
	next  atomic.Uint64
	slots []recentSlot
}

type recentSlot struct {
	mu       sync.Mutex // held for the time of one copy; two requests meet here only when the ring has gone round
	n        uint64     // which request this is, from 1; 0 is none
	at       time.Time
	rec      Record // its strings alias text
	text     []byte
	attempts [4]Attempt
}

// A RecentRecord is one remembered request. It is the reader's own.
type RecentRecord struct {
	Number uint64 // counts requests from 1
	At     time.Time
	Record
}

// NewRecent returns a ring of n requests, at least 1.
func NewRecent(n int) *Recent { return &Recent{slots: make([]recentSlot, max(1, n))} }

// Size is how many requests are remembered at most.
func (d *Recent) Size() int { return len(d.slots) }

// Observe implements [Sink].
func (d *Recent) Observe(r *Record) {
	n := d.next.Add(1)
	s := &d.slots[(n-1)%uint64(len(d.slots))]
	at := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n, s.at, s.rec = n, at, *r
	tries := r.Attempts[:min(len(r.Attempts), len(s.attempts))]
	s.rec.Attempts = append(s.attempts[:0], tries...)
	s.text = s.text[:0]
	each(&s.rec, func(v string) string {
		v = clip(v)
		start := len(s.text)
		s.text = append(s.text, v...) // where that moves it, the strings before keep what it was
		return unsafe.String(unsafe.SliceData(s.text[start:]), len(v))
	})
}

// each replaces every string of r by fn of it.
func each(r *Record, fn func(string) string) {
	for _, s := range [...]*string{
		&r.RequestID, &r.Method, &r.Path, &r.API, &r.ClientAddr, &r.Outcome, &r.Error, &r.Pool, &r.Model, &r.Adapter,
		&r.Served, &r.Tenant, &r.Key,
		&r.Endpoint, &r.RunnerUp,
	} {
		*s = fn(*s)
	}
	for i := range r.Attempts {
		r.Attempts[i].Endpoint = fn(r.Attempts[i].Endpoint)
		r.Attempts[i].Outcome = fn(r.Attempts[i].Outcome)
	}
}

// Since calls fn with the remembered requests after number, oldest first, and returns the number of the newest one. The record
// is only lent: fn keeps nothing of it and must not call d. Requests that were forgotten meanwhile are missing.
func (d *Recent) Since(number uint64, fn func(*RecentRecord)) uint64 {
	newest := d.next.Load()
	if n := uint64(len(d.slots)); newest > n {
		number = max(number, newest-n)
	}
	for n := number + 1; n <= newest; n++ {
		s := &d.slots[(n-1)%uint64(len(d.slots))]
		s.mu.Lock()
		have := s.n
		if have == n {
			rr := RecentRecord{s.n, s.at, s.rec}
			fn(&rr)
		}
		s.mu.Unlock()
		if have < n {
			return n - 1 // it is being written
		}
	}
	return newest
}

// Get returns the remembered request of that number.
func (d *Recent) Get(number uint64) (rr RecentRecord, ok bool) {
	if number == 0 {
		return rr, false
	}
	s := &d.slots[(number-1)%uint64(len(d.slots))]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n != number {
		return rr, false
	}
	return s.copy(), true
}

// copy is what the slot holds, as the reader's own. The caller holds mu.
func (s *recentSlot) copy() RecentRecord {
	rr := RecentRecord{s.n, s.at, s.rec}
	rr.Attempts = slices.Clone(rr.Attempts)
	each(&rr.Record, func(v string) string { return string(append([]byte(nil), v...)) })
	return rr
}

// Last returns at most n remembered requests that keep likes (nil likes all), the newest first.
func (d *Recent) Last(n int, keep func(*Record) bool) []RecentRecord {
	newest := d.next.Load()
	var out []RecentRecord
	for i := uint64(0); i < min(newest, uint64(len(d.slots))) && len(out) < n; i++ {
		s := &d.slots[(newest-1-i)%uint64(len(d.slots))]
		s.mu.Lock()
		if s.n != 0 && (keep == nil || keep(&s.rec)) {
			out = append(out, s.copy())
		}
		s.mu.Unlock()
	}
	return out
}

// Total is the number of requests ever observed.
func (d *Recent) Total() uint64 { return d.next.Load() }
