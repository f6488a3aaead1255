package pool

import "time"

// Fields is a set of fields of a [Load].
type Fields uint32

// The fields that a scrape can make known. A series that a page lacks leaves its field unknown, which is never zero.
const (
	KnowsRunning Fields = 1 << iota
	KnowsWaiting
	KnowsKVCacheUtilization
	KnowsKVCapacity
	KnowsAdapters     // Adapters lists the adapters with work in flight, or those resident
	KnowsMaxAdapters  // MaxAdapters
	KnowsAdapterSlots // AdapterSlotsUsed
	KnowsSleeping
)

// Has reports whether all of want are in f.
func (f Fields) Has(want Fields) bool { return f&want == want }

// A Load is what one scrape said about one endpoint. The zero Load means "unknown" and must not be mistaken for an idle
// endpoint: ask Known first. A Load is immutable once it has been given to a [Table].
type Load struct {
	Known Fields

	Running int32 // requests in the execution batch, summed over engines
	Waiting int32 // requests queued in the server for whatever reason (also swapped, deferred, waiting for remote KV), summed over engines

	KVCacheUtilization    float64 // ratio 0..1, mean over engines weighted by capacity
	KVCacheUtilizationMax float64 // ratio 0..1, of the fullest engine
	KVCapacityTokens      int64   // tokens, summed over engines

	Adapters         []string // LoRA adapters that the page names as in use or resident; sorted, no duplicates
	MaxAdapters      int32    // adapter slots: distinct adapters that one batch can hold
	AdapterSlotsUsed int32    // slots taken, where the server counts them without names

	Sleeping bool // weights are offloaded: it would hang or fail

	Engines []EngineLoad // data-parallel engines behind one URL; one element where there is one engine

	// StartTime is when the server's process started, in Unix seconds; 0 where the page doesn't say. It is only compared
	// with an earlier one.
	StartTime float64
	// Counters of the page, cumulative since StartTime; negative where absent. A counter that goes backwards is a restart.
	PromptTokens, GenerationTokens, PrefixHitTokens, PrefixQueryTokens, Preemptions float64

	Dialect string // the dialect that read the page
}

// EngineLoad is the load of one data-parallel engine of an endpoint.
type EngineLoad struct {
	ID                 string // the server's own name: engine or data-parallel rank
	Known              Fields
	Running, Waiting   int32
	KVCacheUtilization float64 // ratio 0..1
	KVCapacityTokens   int64
}

// UsedKVTokens is the number of KV tokens held by running requests according to the scrape; ok is false when utilization
// or capacity is unknown.
func (l *Load) UsedKVTokens() (tokens int64, ok bool) {
	if !l.Known.Has(KnowsKVCacheUtilization | KnowsKVCapacity) {
		return 0, false
	}
	return int64(l.KVCacheUtilization * float64(l.KVCapacityTokens)), true
}

// Requests is running plus waiting; ok is false when neither is known. A part that is unknown counts as none.
func (l *Load) Requests() (n int32, ok bool) {
	if l.Known&(KnowsRunning|KnowsWaiting) == 0 {
		return 0, false
	}
	return l.Running + l.Waiting, true
}

// unknownLoad is what rows hold before the first scrape.
var unknownLoad = &Load{PromptTokens: -1, GenerationTokens: -1, PrefixHitTokens: -1, PrefixQueryTokens: -1, Preemptions: -1}

// Foreign is the part of an endpoint's load that this gateway did not send: other gateways and direct clients. It is as
// old as the scrape it was computed from.
type Foreign struct {
	Requests int32 // running and waiting
	Waiting  int32 // of them, queued in the server
	KVTokens int32 // KV tokens they hold
}

// foreign computes what of l is not ours, given the most we had booked while the page was read.
//
// Requests are compared one to one. KV tokens are shared in proportion to requests, since our own reservation counts
// output that has not been generated yet and would hide other people's use.
func foreign(l *Load, booked Booked) Foreign {
	var f Foreign
	n, ok := l.Requests()
	if ok && int64(n) > booked.Requests {
		f.Requests = n - int32(booked.Requests)
		f.Waiting = int32(int64(l.Waiting) * int64(f.Requests) / int64(n))
	}
	if used, known := l.UsedKVTokens(); known {
		switch {
		case !ok || n == 0: // blocks held for nobody we can see: P/D transfers, engines without request gauges
			used = max(0, used-booked.KVTokens)
		default:
			used = used * int64(f.Requests) / int64(n)
		}
		f.KVTokens = int32(min(used, 1<<31-1))
	}
	return f
}

// A Model is one entry of an endpoint's GET /v1/models.
type Model struct {
	ID          string
	Parent      string // base model of an adapter; "" for a base model
	MaxModelLen int64  // context length in tokens; 0 when the server does not say
	Card        []byte // the server's JSON for it, unchanged
}

// Served is what an endpoint says it serves. It is immutable.
type Served struct {
	Models []Model
	At     Instant // when it was read
}

// An Observation is one scrape of one endpoint.
type Observation struct {
	Load *Load // what the page said; nil when the scrape failed
	// Before is what was booked when the request for the page was sent; the table looks again when the observation
	// arrives. The larger of the two is taken for ours, so that a request that ends in between is not mistaken for foreign.
	Before Booked
	At     Instant       // when the page had been read
	Took   time.Duration // from sending the request to the end of the page
	Err    error         // why the scrape failed; nil if it didn't
}
