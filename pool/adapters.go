package pool

import "sync/atomic"

// An AdapterMemory remembers which adapters this gateway has sent to an endpoint, or seen on its page, and when. Servers
// list adapters only while requests for them are in flight, so an adapter that sits idle on the GPU is known to nobody else.
//
// It is a small fixed table, least recently used out first. Reading and writing take no lock: two goroutines that place
// different adapters at the same instant may forget one of them, which costs a guess, never correctness.
type AdapterMemory struct {
	active atomic.Int32 // adapters with requests in flight
	slots  []adapterSlot
}

type adapterSlot struct {
	name     atomic.Uint64 // HashName of the adapter; 0 is free
	lastUsed atomic.Int64  // Instant
	inFlight atomic.Int64
	started  atomic.Int64 // of inFlight, those whose first token has come: the adapter holds a slot of the server's
}

// minAdapterSlots is how many adapters are remembered at least: those in GPU slots (usually 1 to 8) and those that the
// server still has in host memory (vLLM's max_cpu_loras, usually some dozens), since a load from there is ten times faster
// than one from disk.
const minAdapterSlots = 64

func newAdapterMemory(n int) *AdapterMemory {
	return &AdapterMemory{slots: make([]adapterSlot, max(n, minAdapterSlots))}
}

// Active is the number of distinct adapters that have requests of ours in flight.
func (m *AdapterMemory) Active() int { return int(m.active.Load()) }

// An AdapterUse is what is remembered of one adapter on one endpoint.
type AdapterUse struct {
	InFlight int     // requests of ours for it
	Started  int     // of them, those that have got their first token
	LastUsed Instant // when the latest of them was booked
	Newer    int     // adapters used more recently: below max_loras it is still in a GPU slot if the server evicts by age
}

// Use looks name up. It does not allocate.
func (m *AdapterMemory) Use(name uint64) (u AdapterUse, ok bool) {
	i := m.find(name)
	if i < 0 {
		return u, false
	}
	s := &m.slots[i]
	last := s.lastUsed.Load()
	u.InFlight, u.Started, u.LastUsed = int(s.inFlight.Load()), int(s.started.Load()), Instant(last)
	for j := range m.slots {
		if o := &m.slots[j]; j != i && o.name.Load() != 0 && o.lastUsed.Load() > last {
			u.Newer++
		}
	}
	return u, true
}

// Others counts the adapters besides name that have requests of ours in flight: running ones have got a first token, so
// they hold a slot of the server's; waiting ones have not. leaving is how many slots are about to come free, by the sum of
// 1/n² over the running ones, n being their requests in flight: an adapter with many is followed by more before they end.
// It does not allocate.
func (m *AdapterMemory) Others(name uint64) (running, waiting int, leaving float64) {
	for i := range m.slots {
		s := &m.slots[i]
		n := s.inFlight.Load()
		if n <= 0 || s.name.Load() == name {
			continue
		}
		if s.started.Load() <= 0 {
			waiting++
			continue
		}
		running++
		leaving += 1 / float64(n*n)
	}
	return running, waiting, leaving
}

func (m *AdapterMemory) find(name uint64) int {
	if name == 0 {
		return -1
	}
	for i := range m.slots {
		if m.slots[i].name.Load() == name {
			return i
		}
	}
	return -1
}

// Each calls fn for every adapter remembered, until fn returns false.
func (m *AdapterMemory) Each(fn func(name uint64, inFlight int, lastUsed Instant) bool) {
	for i := range m.slots {
		s := &m.slots[i]
		if n := s.name.Load(); n != 0 && !fn(n, int(s.inFlight.Load()), Instant(s.lastUsed.Load())) {
			return
		}
	}
}

// saw notes that the server's page names the adapter at now: someone uses it there, if not we.
func (m *AdapterMemory) saw(name uint64, now Instant) {
	if s := m.slot(name); s != nil && Instant(s.lastUsed.Load()) < now {
		s.lastUsed.Store(int64(now))
	}
}

// place notes a request for name and returns its slot; nil when every slot has requests in flight for other adapters.
func (m *AdapterMemory) place(name uint64, now Instant) *adapterSlot {
	s := m.slot(name)
	if s == nil {
		return nil
	}
	s.lastUsed.Store(int64(now))
	if s.inFlight.Add(1) == 1 {
		m.active.Add(1)
	}
	return s
}

// slot returns name's slot, or the least recently used one of those without requests in flight, made its own.
func (m *AdapterMemory) slot(name uint64) *adapterSlot {
	i := m.find(name)
	for i < 0 {
		oldest := int64(1<<63 - 1)
		for j := range m.slots {
			s := &m.slots[j]
			if last := s.lastUsed.Load(); s.inFlight.Load() == 0 && last < oldest {
				i, oldest = j, last
			}
		}
		if i < 0 {
			return nil
		}
		m.slots[i].name.Store(name)
		m.slots[i].lastUsed.Store(0)
	}
	return &m.slots[i]
}

// release undoes the count of place.
func (m *AdapterMemory) release(s *adapterSlot) {
	if s.inFlight.Add(-1) == 0 {
		m.active.Add(-1)
	}
}

// Forget drops name, for a server that answered that it doesn't have it.
func (m *AdapterMemory) Forget(name uint64) {
	if i := m.find(name); i >= 0 && m.slots[i].inFlight.Load() == 0 {
		m.slots[i].name.Store(0)
		m.slots[i].lastUsed.Store(0)
	}
}
