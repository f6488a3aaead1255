package pool

import (
	"math"
	"sync/atomic"
	"unsafe"
)

// A Spec is how discovery names an endpoint. Pool, URL and SourceID are its identity: a new pod on an old address has
// another SourceID and starts unknown.
type Spec struct {
	Pool       string
	URL        string  // scheme://host:port, without a path
	SourceID   string  // the source's own id, such as a pod's UID; "" for a static list
	Name       string  // shown in logs and metric labels; host:port when empty
	MetricsURL string  // overrides where the dialect would look
	Dialect    string  // "auto" or a registered dialect
	Weight     float64 // share of traffic relative to its peers for policies that know weights; 0 counts as 1
	NotReady   bool    // the source says that it must not get requests yet, or any more
	Labels     map[string]string
}

// identity is what makes two specs the same endpoint.
type identity struct{ pool, url, source string }

// An Endpoint is one model server that requests can be sent to. It is created when discovery first names it and lives
// until its last request has ended; bookings and beliefs on it survive snapshots, reloads and flapping discovery.
// Its exported strings and numbers are set once, before it is published; its counters are read and written by anyone.
type Endpoint struct {
	ID       string // pool/name: what logs and metric labels show; stable across restarts of the gateway
	Pool     string
	URL      string  // scheme://host:port
	SourceID string  // see Spec
	Address  string  // host:port
	IDHash   uint64  // HashName(ID): the endpoint's side of rendezvous hashing
	Slot     uint16  // a small number no other live endpoint has; reused only after this one is gone
	Since    Instant // when discovery first named it

	spec     atomic.Pointer[Spec]          // never nil; discovery may change all of it but the identity
	live     *counters                     // one cache line of its own
	adapters atomic.Pointer[AdapterMemory] // never nil; replaced when the endpoint restarts
	ranks    atomic.Pointer[Ranks]         // of its data-parallel engines; nil where requests can't name one
	epoch    atomic.Uint32                 // what was believed of the slot under another epoch is void

	// What has been learned from this endpoint's traffic; 0 means nothing yet. Written by scoring only.
	PrefillTokensPerSecond       Float
	MedianPrefillTokensPerSecond Float         // over its prefills, of which Prefills were seen
	Prefills                     atomic.Uint32 // wraps
	DecodeSecondsPerToken        Float
	LearnedKVCapacity            Float // tokens, where the server does not say
	AdapterLoadSeconds           Float
}

// An AtomicInstant is an [Instant] that goroutines may read and write together.
type AtomicInstant struct{ v atomic.Int64 }

// Load returns the instant last stored; the zero Instant if none was.
func (a *AtomicInstant) Load() Instant { return Instant(a.v.Load()) }

// Store sets the instant.
func (a *AtomicInstant) Store(t Instant) { a.v.Store(int64(t)) }

// CompareAndSwap stores new if the value is old and reports whether it did.
func (a *AtomicInstant) CompareAndSwap(old, new Instant) bool {
	return a.v.CompareAndSwap(int64(old), int64(new))
}

// counters are the live numbers of one endpoint that every decision reads: exactly one cache line, so that walking a
// thousand endpoints touches a thousand lines and a booking dirties one.
type counters struct {
	version      atomic.Uint64 // bookings ever made; a booking is valid only for the version that was read
	requests     atomic.Int64
	tokens       atomic.Int64 // KV tokens<<32 + pending tokens: a sum of such sums, so each half is exact while below 2³²
	intakeTokens atomic.Int64 // tokens ever taken into the KV cache: the clock by which cached prefixes age
	_            [8]byte
	ejectedUntil AtomicInstant
	busyUntil    AtomicInstant
	learned      atomic.Uint64 // two float32: slowness, KV capacity
}

// kvShift is the place of the KV tokens in counters.tokens.
const kvShift = 32

const cacheLine = 64

// The next line does not compile unless counters fill one cache line exactly.
var _ = [1]struct{}{}[unsafe.Sizeof(counters{})-cacheLine]

// slabSize counters are allocated at once: a pointer-free block of whole pages, hence aligned to cache lines.
const slabSize = 128

// Booked is what this gateway holds on an endpoint.
type Booked struct {
	Requests      int64 // sent and not yet ended
	PendingTokens int64 // uncached prompt tokens of requests that have not reached their first token
	KVTokens      int64 // KV tokens reserved: prompts plus expected outputs
}

// Spec returns how discovery describes e now. The caller must not change it.
func (e *Endpoint) Spec() *Spec { return e.spec.Load() }

// Booked returns what is booked on e now. The three numbers are read one after the other.
func (e *Endpoint) Booked() Booked { return e.live.booked() }

func (c *counters) booked() Booked {
	t := c.tokens.Load()
	return Booked{Requests: c.requests.Load(), PendingTokens: t & (1<<kvShift - 1), KVTokens: t >> kvShift}
}

// Epoch changes when the server is found to have restarted, and no two endpoints that ever had the same slot share one:
// what was believed of a slot under another epoch is void.
func (e *Endpoint) Epoch() uint32 { return e.epoch.Load() }

// IntakeTokens is the number of tokens that e is believed to have ever taken into its KV cache: uncached prompt tokens as
// they are booked, and what TakeIn adds.
func (e *Endpoint) IntakeTokens() int64 { return e.live.intakeTokens.Load() }

// TakeIn adds tokens to what e is known to have taken into its KV cache besides the prompts booked on it: outputs, and
// cached prompts that were used again.
func (e *Endpoint) TakeIn(tokens int64) { e.live.intakeTokens.Add(tokens) }

// EjectedUntil is the instant until which passive health checking keeps requests away; zero when it doesn't.
func (e *Endpoint) EjectedUntil() Instant { return e.live.ejectedUntil.Load() }

// SetEjectedUntil ejects e until t, or readmits it when t is zero. An instant that has passed is when e came back: slow
// start counts from it, so Readmit is SetEjectedUntil(now).
func (e *Endpoint) SetEjectedUntil(t Instant) { e.live.ejectedUntil.Store(t) }

// Readmit ends an ejection at now.
func (e *Endpoint) Readmit(now Instant) { e.live.ejectedUntil.Store(now) }

// SetLearned publishes two learned numbers where decisions read them without leaving the endpoint's cache line: how many
// times slower e prefills than the fastest endpoint of its pool, and its KV capacity in tokens. 0 is unknown.
func (e *Endpoint) SetLearned(slowness, kvCapacityTokens float32) {
	e.live.learned.Store(uint64(math.Float32bits(slowness)) | uint64(math.Float32bits(kvCapacityTokens))<<32)
}

// BusyUntil is the instant until which e asked to be left alone (429 or 503 with Retry-After); zero when it didn't.
func (e *Endpoint) BusyUntil() Instant { return e.live.busyUntil.Load() }

// SetBusyUntil notes backpressure until t.
func (e *Endpoint) SetBusyUntil(t Instant) { e.live.busyUntil.Store(t) }

// Adapters returns e's memory of adapters; never nil.
func (e *Endpoint) Adapters() *AdapterMemory { return e.adapters.Load() }

// forget drops what was believed of the server's caches, since its process is new.
func (e *Endpoint) forget() {
	e.epoch.Add(1)
	e.adapters.Store(newAdapterMemory(len(e.Adapters().slots)))
}
