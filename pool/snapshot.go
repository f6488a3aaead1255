package pool

import (
	"iter"
	"math"
	"unsafe"
)

// A Row is one endpoint as it stood when a [Snapshot] was published, with a way to its live counters. Rows are values of
// one cache line: a reader that holds a Row never sees it change.
type Row struct {
	Endpoint *Endpoint
	Load     *Load   // never nil; immutable
	Served   *Served // nil until GET /v1/models has been read; immutable
	live     *counters

	ScrapedAt  Instant // when Load was read; zero if never
	Foreign    Foreign
	KVCapacity int32   // tokens of KV cache; 0 is unknown
	Weight     float32 // of the endpoint's Spec, never 0
	State      State
	Slot       uint16 // of Endpoint
}

// The next line does not compile unless a Row fills one cache line exactly.
var _ = [1]struct{}{}[unsafe.Sizeof(Row{})-cacheLine]

// State is a set of conditions of an endpoint that hold for the whole snapshot.
type State uint16

const (
	Draining    State = 1 << iota // takes no new requests; running ones finish
	Sleeping                      // weights are offloaded
	NotReady                      // discovery says that it is not ready
	Blind                         // its page was read and tells nothing of its load
	Unreachable                   // it takes no connections; it is tried only when nothing else is left
	Unmeasured                    // its page can't be read or understood: it is known by our own requests alone
)

// Unroutable are the states in which an endpoint gets no request whatever else holds.
const Unroutable = Draining | Sleeping | NotReady

// Booked returns what this gateway holds on the row's endpoint at this moment; it is live, not of the snapshot.
func (r *Row) Booked() Booked { return r.live.booked() }

// EjectedUntil is [Endpoint.EjectedUntil] without the detour.
func (r *Row) EjectedUntil() Instant { return r.live.ejectedUntil.Load() }

// BusyUntil is [Endpoint.BusyUntil] without the detour.
func (r *Row) BusyUntil() Instant { return r.live.busyUntil.Load() }

// Untroubled reports whether the endpoint was never ejected and never asked to be left alone: neither instant is set.
func (r *Row) Untroubled() bool { return r.live.ejectedUntil.Load()|r.live.busyUntil.Load() == 0 }

// Learned returns what [Endpoint.SetLearned] published last.
func (r *Row) Learned() (slowness, kvCapacityTokens float32) {
	l := r.live.learned.Load()
	return math.Float32frombits(uint32(l)), math.Float32frombits(uint32(l >> 32))
}

// IntakeTokens is [Endpoint.IntakeTokens] without the detour.
func (r *Row) IntakeTokens() int64 { return r.live.intakeTokens.Load() }

// Fresh reports whether the row's load was read no longer than maxAge nanoseconds before now. A row that was never
// scraped, or whose page tells nothing of its load, is not fresh.
func (r *Row) Fresh(now, maxAge Instant) bool {
	return r.ScrapedAt != 0 && now-r.ScrapedAt <= maxAge && r.State&Blind == 0
}

// Stale reports whether the row's load was read longer than maxAge nanoseconds before now. One that was never read is
// unknown, not stale.
func (r *Row) Stale(now, maxAge Instant) bool { return r.ScrapedAt != 0 && now-r.ScrapedAt > maxAge }

// Tells reports whether what the row's load says may be told of the endpoint as it is at now: it has been read, it is not
// stale, and the endpoint is not down.
func (r *Row) Tells(now, maxAge Instant) bool {
	return r.ScrapedAt != 0 && !r.Stale(now, maxAge) && r.State&Unreachable == 0
}

// A Target is what a name in `model` stands for.
type Target struct {
	Name        string
	Hash        uint64  // HashName(Name)
	Pool        int32   // index into Snapshot.Pools
	Adapter     bool    // Name is a LoRA adapter on top of the pool's base model
	Base        string  // the base model of an adapter as its server names it; Name itself otherwise
	Rows        []int32 // rows that serve it, ascending
	MaxModelLen int64   // largest context length among them, in tokens; 0 is unknown
	MinModelLen int64   // smallest that one of them says; 0 is unknown
}

// A SharedName is a name that two pools serve.
type SharedName struct{ Name, Pool, Other string } // Pool gets the requests, Other doesn't

// A PoolRange is the rows of one pool: Rows[First:End].
type PoolRange struct {
	Name       string
	First, End int32
}

// A Snapshot is an immutable table of all endpoints at one instant. Nobody writes to one after it is published.
type Snapshot struct {
	Version uint64
	At      Instant
	Rows    []Row // dense; by pool in configuration order, then by endpoint ID
	Pools   []PoolRange

	// Shared are names that a pool's endpoints serve, or its configuration says so, though the name is another pool's: the
	// first pool that serves one keeps it. Sorted.
	Shared []SharedName

	byName   map[string]*Target
	bySlot   []int32  // row of Endpoint.Slot, or -1
	idHashes []uint64 // IDHash of each row's endpoint
}

// IDHash is the row's Endpoint.IDHash, without going there: who hashes all rows against a key walks one short array.
func (s *Snapshot) IDHash(row int32) uint64 { return s.idHashes[row] }

// Target returns what name stands for, or nil. It does not allocate.
func (s *Snapshot) Target(name []byte) *Target { return s.byName[string(name)] }

// TargetString is Target for a string.
func (s *Snapshot) TargetString(name string) *Target { return s.byName[name] }

// RowOf returns the number of the row whose endpoint has the given slot, or -1.
func (s *Snapshot) RowOf(slot uint16) int32 {
	if int(slot) >= len(s.bySlot) {
		return -1
	}
	return s.bySlot[slot]
}

// Targets yields every name that is served, in no particular order.
func (s *Snapshot) Targets() iter.Seq[*Target] {
	return func(yield func(*Target) bool) {
		for _, t := range s.byName {
			if !yield(t) {
				return
			}
		}
	}
}

// Pool returns the index of the named pool, or -1.
func (s *Snapshot) Pool(name string) int {
	for i := range s.Pools {
		if s.Pools[i].Name == name {
			return i
		}
	}
	return -1
}

// PoolRows returns the rows of pool i.
func (s *Snapshot) PoolRows(i int) []Row { return s.Rows[s.Pools[i].First:s.Pools[i].End] }
