package modelsim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// EngineOptions configures an Engine. Zero fields take the profile's value or
// the default named here.
type EngineOptions struct {
	Profile Profile // required

	KVTokens       int // KV cache size
	MaxBatchTokens int
	MaxSequences   int

	// BlockTokens is the size of a KV block, default 16.
	BlockTokens int
	// PromptBlockTokens is how many tokens one id in Request.Blocks stands for:
	// a multiple of BlockTokens, default BlockTokens. The KV cache is paged in
	// BlockTokens either way, so traces with coarse ids keep exact KV use.
	PromptBlockTokens int

	// MaxLoras is how many adapters fit in one batch; 0 turns adapters off.
	// MaxCPULoras is how many stay in host memory, default MaxLoras.
	MaxLoras, MaxCPULoras int
	// AdapterHostLoad is the time to bring an adapter from host memory to the
	// GPU, default 30 ms (17 to 200 ms reported: vLLM #31250, PEFT #981).
	// AdapterDiskLoad is the time from disk to host memory, paid on top,
	// default 0.5 s (0.2 s to 8 s reported: vLLM #5564, AIBrix #1886).
	AdapterHostLoad, AdapterDiskLoad time.Duration
	// AdapterFactor slows the linear layers while any adapter is in the batch,
	// default 1.15 (+8 to +33 % reported: vLLM #15655, #11267).
	AdapterFactor float64

	// NoPrefixCache turns prefix sharing off.
	NoPrefixCache bool

	Hooks Hooks
}

// Hooks are called at the end of the step in which something happened, in
// scheduling order. Each may be nil. They may call Submit and Abort, but what
// they read of the engine is in the middle of a change.
type Hooks struct {
	FirstToken    func(r *Request, at time.Duration)
	Token         func(r *Request, at time.Duration) // every token, the first included
	Finished      func(r *Request, at time.Duration) // State says how
	Preempted     func(r *Request, at time.Duration) // at the start of the step
	AdapterLoaded func(adapter int32, disk bool, at time.Duration)
	Step          func(s StepInfo)
}

// StepInfo describes a finished step.
type StepInfo struct {
	Start, End time.Duration
	Sequences  int // in the batch
	Tokens     int // new tokens, prefill and decode
	Decodes    int // sequences that were decoding
}

// State is where a request is in its life.
type State uint8

// The states of a request.
const (
	StateNew State = iota
	StateWaiting
	StateRunning
	StateFinished
	StateAborted
)

// A Request is one sequence to generate. The caller owns it and must leave it
// alone between Submit and the Finished hook, except to read. It may be used
// again after that, with Reset.
type Request struct {
	ID           uint64
	PromptTokens int
	// OutputTokens is how many tokens it will generate; 0 is a pooling request
	// that ends when its prompt is computed.
	OutputTokens int

	// What every step touches is kept together: the engine spends its time here.
	Generated int // filled in by the engine: tokens generated so far
	computed  int // tokens in the KV cache
	target    int // tokens to have in the KV cache before the next one can be sampled
	step      int // new tokens in the current step
	capacity  int // tokens the held KV blocks have room for
	estimated int // computed, or for a waiting request what the cache held when it was submitted
	indexed   int // leading prompt blocks already made hittable
	blocks    []int32
	// Adapter is 0 for the base model, else the adapter's number. Numbers are
	// small and dense.
	Adapter  int32
	State    State // filled in by the engine
	aborting bool
	admitted bool

	// Blocks identifies the full blocks of the prompt. Ids are prefix-chained:
	// equal ids mean equal tokens, equal prefix, equal adapter, equal salt. A
	// last id for a partial block is ignored. Nil shares nothing.
	Blocks []uint64
	// Tag is the caller's own.
	Tag any

	// Filled in by the engine.
	SubmittedAt  time.Duration
	AdmittedAt   time.Duration // start of the first step that computed some of it
	FirstTokenAt time.Duration
	FinishedAt   time.Duration
	CachedTokens int // prompt tokens found in the prefix cache at first admission
	Preemptions  int

	private int // KV blocks held besides blocks
}

// Reset prepares a finished request to be submitted again.
func (r *Request) Reset() {
	*r = Request{
		ID: r.ID, PromptTokens: r.PromptTokens, OutputTokens: r.OutputTokens,
		Blocks: r.Blocks, Adapter: r.Adapter, Tag: r.Tag, blocks: r.blocks[:0],
	}
}

// InPrefill reports whether part of its prompt (or, after a preemption, of what
// it had generated) is still to be computed.
func (r *Request) InPrefill() bool {
	return r.State == StateWaiting || r.State == StateRunning && r.Generated == 0 || r.target-r.computed > 1
}

// An Engine is one replica of a model server's core: scheduler, KV cache,
// adapter slots, step times. It follows vLLM V1.
//
// Time only moves in Advance. Everything submitted or aborted takes effect at
// the next step boundary, as in vLLM, where the engine core reads its queue
// between steps. An Engine is not safe for concurrent use, and two engines given
// the same calls do the same.
type Engine struct {
	opt    EngineOptions
	prof   Profile
	linear []float64 // nanoseconds by tokens in the step
	kv     *kvCache
	lora   adapterSlots

	running []*Request
	waiting []*Request // live part is waiting[head:]
	head    int

	stepping           bool
	stepStart, stepEnd time.Duration
	due                time.Duration // when an idle engine may start its next step
	stepTokens         int
	stepSequences      int
	stepDecodes        int
	decodeContext      int // Σ context tokens of the decoding sequences of the step

	busy      bool // in Advance or reap, where hooks may call back
	aborts    int  // marked and not yet reaped
	paused    bool
	arrived   int           // requests that no scheduler pass has seen yet
	extraLoad time.Duration // adapter loads asked for from outside, paid in the next step

	// What is still to be prefilled and in no step yet, by Request.estimated.
	pendingTokens int
	pendingPairs  int64 // 2 × pairs of new token and context token

	stats Stats

	ends      []sequenceEnd // scratch of EstimateTTFT
	lastSteps []int         // scratch of EstimateTTFT, by adapter
}

// Stats are an engine's gauges and counters.
type Stats struct {
	Running           int
	Waiting           int // left waiting by the last scheduler pass, as vLLM's gauge is; preempted ones included
	WaitingForAdapter int // passed over in the last scheduler pass for want of a slot
	KVBlocksUsed      int // held by sequences; cached and unreferenced ones count as free
	KVBlocks          int
	KVBlockTokens     int

	Steps             uint64
	Preemptions       uint64
	Finished          uint64
	Aborted           uint64
	PromptTokens      uint64 // of requests whose prompt is computed
	GeneratedTokens   uint64
	PrefillTokens     uint64 // computed, recomputation included
	PrefixQueryTokens uint64
	PrefixHitTokens   uint64
	AdapterHostLoads  uint64
	AdapterDiskLoads  uint64
}

// KVUtilization is the share of KV blocks in use, 0..1.
func (s Stats) KVUtilization() float64 { return float64(s.KVBlocksUsed) / float64(s.KVBlocks) }

// Errors of Submit.
var (
	ErrTooLong   = errors.New("request does not fit into the KV cache")
	ErrNoAdapter = errors.New("adapters are off")
)

// NewEngine returns an idle engine at time 0.
func NewEngine(opt EngineOptions) (*Engine, error) {
	if err := opt.Profile.check(); err != nil {
		return nil, err
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&opt.KVTokens, opt.Profile.KVTokens)
	def(&opt.MaxBatchTokens, opt.Profile.MaxBatchTokens)
	def(&opt.MaxSequences, opt.Profile.MaxSequences)
	def(&opt.BlockTokens, 16)
	def(&opt.PromptBlockTokens, opt.BlockTokens)
	def(&opt.MaxCPULoras, opt.MaxLoras)
	if opt.AdapterHostLoad == 0 {
		opt.AdapterHostLoad = 30 * time.Millisecond
	}
	if opt.AdapterDiskLoad == 0 {
		opt.AdapterDiskLoad = 500 * time.Millisecond
	}
	if opt.AdapterFactor == 0 {
		opt.AdapterFactor = 1.15
	}
	if opt.BlockTokens < 1 || opt.PromptBlockTokens%opt.BlockTokens != 0 || opt.KVTokens < opt.PromptBlockTokens {
		return nil, fmt.Errorf("KV block %d, prompt block %d, KV cache %d tokens; want each a multiple of the one before",
			opt.BlockTokens, opt.PromptBlockTokens, opt.KVTokens)
	}
	if opt.MaxCPULoras < opt.MaxLoras {
		return nil, fmt.Errorf("max_cpu_loras %d is below max_loras %d", opt.MaxCPULoras, opt.MaxLoras)
	}
	e := &Engine{
		opt: opt, prof: opt.Profile,
		linear: opt.Profile.linearTable(opt.MaxBatchTokens),
		kv:     newKVCache(opt.KVTokens/opt.BlockTokens, opt.BlockTokens, opt.PromptBlockTokens),
		lora:   adapterSlots{maxGPU: opt.MaxLoras, maxCPU: opt.MaxCPULoras},
	}
	e.lora.grow(0)
	return e, nil
}

// Submit queues r at time now, which must not be before the last Advance. An
// idle engine starts its next step when Advance is next called, so requests that
// arrive together are scheduled together.
func (e *Engine) Submit(r *Request, now time.Duration) error {
	if err := e.check(r); err != nil {
		return err
	}
	r.State = StateWaiting
	r.SubmittedAt = now
	r.target = r.PromptTokens
	r.estimated = e.CachedTokens(r)
	e.addPending(r, 1)
	if r.Adapter > 0 {
		e.lora.inFlight[r.Adapter]++
	}
	if e.head > 1024 && 2*e.head > len(e.waiting) {
		n := copy(e.waiting, e.waiting[e.head:])
		clear(e.waiting[n:])
		e.waiting, e.head = e.waiting[:n], 0
	}
	e.waiting = append(e.waiting, r)
	e.arrived++
	e.wake(now)
	return nil
}

func (e *Engine) check(r *Request) error {
	if r.PromptTokens < 1 || r.OutputTokens < 0 || r.State != StateNew {
		return fmt.Errorf("request %d: %d prompt tokens, %d output tokens, state %d; want a new one with a prompt",
			r.ID, r.PromptTokens, r.OutputTokens, r.State)
	}
	if e.kvNeed(r, r.PromptTokens+r.OutputTokens) > e.kv.total {
		return fmt.Errorf("request %d: %d+%d tokens, %d KV blocks: %w", r.ID, r.PromptTokens, r.OutputTokens, e.kv.total, ErrTooLong)
	}
	if r.Adapter > 0 {
		if e.opt.MaxLoras == 0 {
			return fmt.Errorf("request %d: adapter %d: %w", r.ID, r.Adapter, ErrNoAdapter)
		}
		e.lora.grow(r.Adapter)
	}
	if full := r.PromptTokens / e.kv.promptTokens; len(r.Blocks) > full {
		r.Blocks = r.Blocks[:full]
	}
	return nil
}

func (e *Engine) wake(now time.Duration) {
	if !e.stepping {
		e.due = max(e.due, now)
	}
}

// Abort ends r at the next step boundary, or at once if no step is under way;
// its KV blocks are freed and Finished is called with StateAborted. Aborting a
// request that has ended does nothing.
func (e *Engine) Abort(r *Request, now time.Duration) {
	if r.aborting || r.State != StateWaiting && r.State != StateRunning {
		return
	}
	r.aborting = true
	e.aborts++
	if !e.stepping && !e.busy {
		e.reap(now)
	}
}

// SetPaused stops or resumes the starting of steps; a paused engine is asleep.
func (e *Engine) SetPaused(paused bool, now time.Duration) {
	e.paused = paused
	e.wake(now)
}

// NextEvent is the time of the engine's next change: the end of its step, or the
// start of one. ok is false if nothing will happen before a Submit.
func (e *Engine) NextEvent() (at time.Duration, ok bool) {
	if e.stepping {
		return e.stepEnd, true
	}
	if e.paused || len(e.running)+e.queued() == 0 {
		return 0, false
	}
	return e.due, true
}

// Advance moves time to to: it ends and starts every step due until then.
func (e *Engine) Advance(to time.Duration) {
	e.busy = true
	defer func() { e.busy = false }()
	for {
		if e.stepping {
			if e.stepEnd > to {
				return
			}
			e.endStep()
			e.due = e.stepEnd
		}
		if e.paused || e.due > to || !e.startStep(e.due) {
			return
		}
	}
}

func (e *Engine) queued() int { return len(e.waiting) - e.head }

// startStep runs scheduler passes until one schedules something, and reports
// whether a step began.
func (e *Engine) startStep(now time.Duration) bool {
	e.reap(now)
	for range 3 {
		if len(e.running)+e.queued() == 0 {
			return false
		}
		if d, ok := e.schedule(now); ok {
			e.stepping, e.stepStart, e.stepEnd = true, now, now+d
			return true
		}
		// A pass that preempted everything scheduled nothing; with the KV cache
		// empty the next one must.
	}
	panic("BUG: nothing can be scheduled")
}

// schedule is one pass of vLLM V1's scheduler and returns the time its step takes.
func (e *Engine) schedule(now time.Duration) (time.Duration, bool) {
	e.arrived = 0
	budget := e.opt.MaxBatchTokens
	var attention float64 // nanoseconds
	var sequences, decodes, context int
	adapters := false
	load := e.extraLoad
	e.extraLoad = 0
	preempted := false

	// Running ones first, in order: one token, or the next chunk of a prompt.
	running := e.running
	for i := 0; i < len(running); i++ {
		r := running[i]
		n := min(r.target-r.computed, budget)
		if n == 0 {
			r.step = 0
			continue
		}
		if r.computed+n > r.capacity {
			for !e.allocate(r, r.computed+n) {
				// The youngest goes, even if that is r itself.
				last := len(running) - 1
				victim := running[last]
				running = running[:last]
				e.preempt(victim, now)
				preempted = true
				if victim == r {
					break
				}
			}
			if r.State != StateRunning {
				break
			}
		}
		budget -= n
		r.step = n
		sequences++
		if r.estimated >= r.target { // all computed but the token sampled last
			decodes++
			context += r.computed
		} else {
			attention += e.prefill(r, n)
		}
		adapters = adapters || r.Adapter > 0
	}
	e.running = running

	// Then waiting ones, first come first served, unless KV ran out. One whose
	// adapter has no slot is passed over and keeps its place.
	passed := 0
	if !preempted {
		i := e.head
		for i < len(e.waiting) && budget > 0 && len(e.running) < e.opt.MaxSequences {
			r := e.waiting[i]
			if r.Adapter > 0 && !e.lora.admissible(r.Adapter) {
				passed++
				i++
				continue
			}
			n, ok := e.admit(r, budget, now)
			if !ok {
				break
			}
			// Close the gap: those passed over move up by one.
			copy(e.waiting[e.head+1:i+1], e.waiting[e.head:i])
			e.waiting[e.head] = nil
			e.head++
			i++

			e.running = append(e.running, r)
			budget -= n
			r.step = n
			sequences++
			attention += e.prefill(r, n)
			if r.Adapter > 0 {
				adapters = true
				load += e.loadAdapter(r.Adapter, now)
			}
		}
		if e.head == len(e.waiting) {
			e.waiting, e.head = e.waiting[:0], 0
		}
		e.stats.WaitingForAdapter = passed
	}

	tokens := e.opt.MaxBatchTokens - budget
	if tokens == 0 {
		e.extraLoad = load
		return 0, false
	}
	e.stepTokens, e.stepSequences, e.stepDecodes, e.decodeContext = tokens, sequences, decodes, context
	linear := e.linear[tokens]
	if adapters {
		linear *= e.opt.AdapterFactor
	}
	ns := linear + attention +
		e.prof.DecodeAttentionMicros*1e3*float64(context) +
		e.prof.StepMillis*1e6 + e.prof.SequenceMillis*1e6*float64(sequences)
	return time.Duration(math.Round(ns)) + load, true
}

// prefill accounts for a chunk of n tokens and returns its attention time.
func (e *Engine) prefill(r *Request, n int) float64 {
	e.addPending(r, -1)
	r.estimated = r.computed + n
	e.addPending(r, 1)
	e.stats.PrefillTokens += uint64(n)
	return e.prof.PrefillAttentionMicros * 1e3 * float64(n) * (float64(r.computed) + float64(n)/2)
}

// addPending adds (sign 1) or removes (-1) r's share of the pending prefill.
func (e *Engine) addPending(r *Request, sign int) {
	if r.estimated >= r.target {
		return
	}
	e.pendingTokens += sign * (r.target - r.estimated)
	e.pendingPairs += int64(sign) * (int64(r.target)*int64(r.target) - int64(r.estimated)*int64(r.estimated))
}

// admit gives a waiting request KV blocks for its first chunk and returns the
// chunk's size; ok is false if there is no space.
func (e *Engine) admit(r *Request, budget int, now time.Duration) (n int, ok bool) {
	hits := e.hits(r)
	cached := len(hits) * e.kv.promptTokens
	n = min(r.target-cached, budget)
	need := e.kvNeed(r, cached+n) - len(hits)*e.kv.promptUnits
	if need > e.kv.free()-e.kv.unreferenced(hits) {
		return 0, false
	}
	for _, id := range hits {
		r.blocks = append(r.blocks, e.kv.hit(id))
	}
	e.addPending(r, -1)
	r.estimated, r.computed, r.indexed = cached, cached, len(hits)
	e.addPending(r, 1)
	r.capacity = cached
	if !e.allocate(r, cached+n) {
		panic("BUG: KV blocks vanished")
	}
	e.stats.PrefixQueryTokens += uint64(r.target)
	e.stats.PrefixHitTokens += uint64(cached)
	r.State = StateRunning
	if !r.admitted {
		r.admitted, r.AdmittedAt, r.CachedTokens = true, now, cached
	}
	if r.Adapter > 0 {
		e.lora.start(r.Adapter)
	}
	return n, true
}

// hits returns r's leading blocks that are in the prefix cache, less than all of
// its tokens: at least one is always computed.
func (e *Engine) hits(r *Request) []uint64 {
	if e.opt.NoPrefixCache {
		return nil
	}
	ids := r.Blocks
	if most := (max(r.target, r.PromptTokens) - 1) / e.kv.promptTokens; len(ids) > most {
		ids = ids[:most]
	}
	return ids[:e.kv.cachedBlocks(ids)]
}

// kvNeed is how many KV blocks r holds with tokens computed.
func (e *Engine) kvNeed(r *Request, tokens int) int {
	p := e.kv.promptTokens
	shareable := len(r.Blocks) * p
	if tokens <= shareable {
		return (tokens + p - 1) / p * e.kv.promptUnits
	}
	b := e.kv.blockTokens
	return len(r.Blocks)*e.kv.promptUnits + (tokens-shareable+b-1)/b
}

// allocate makes room for r to have tokens in the KV cache, all or nothing.
func (e *Engine) allocate(r *Request, tokens int) bool {
	held := len(r.blocks)*e.kv.promptUnits + r.private
	if e.kvNeed(r, tokens)-held > e.kv.free() {
		return false
	}
	p := e.kv.promptTokens
	for len(r.blocks) < len(r.Blocks) && len(r.blocks)*p < tokens {
		r.blocks = append(r.blocks, e.kv.newPromptBlock(r.Blocks[len(r.blocks)]))
	}
	r.capacity = len(r.blocks) * p
	if len(r.blocks) == len(r.Blocks) && tokens > r.capacity {
		b := e.kv.blockTokens
		private := (tokens - r.capacity + b - 1) / b
		e.kv.take(private - r.private)
		r.private = private
		r.capacity += private * b
	}
	return true
}

// preempt frees a running request's KV blocks and puts it at the head of the
// queue, to be computed again, what it generated included.
func (e *Engine) preempt(r *Request, now time.Duration) {
	e.freeKV(r)
	e.addPending(r, -1)
	r.computed, r.step, r.estimated = 0, 0, 0
	e.addPending(r, 1)
	r.State = StateWaiting
	r.Preemptions++
	e.stats.Preemptions++
	if r.Adapter > 0 {
		e.lora.stop(r.Adapter)
	}
	if e.head == 0 {
		// Room for more at the front, so that a burst of preemptions is cheap.
		grown := make([]*Request, 64+len(e.waiting), 128+2*len(e.waiting))
		copy(grown[64:], e.waiting)
		e.waiting, e.head = grown, 64
	}
	e.head--
	e.waiting[e.head] = r
	if e.opt.Hooks.Preempted != nil {
		e.opt.Hooks.Preempted(r, now)
	}
}

func (e *Engine) freeKV(r *Request) {
	e.kv.release(r.blocks, r.private)
	r.blocks, r.private, r.capacity, r.indexed = r.blocks[:0], 0, 0, 0
}

func (e *Engine) loadAdapter(id int32, now time.Duration) time.Duration {
	source := e.lora.use(id)
	if source == resident {
		return 0
	}
	d := e.opt.AdapterHostLoad
	if source == fromDisk {
		d += e.opt.AdapterDiskLoad
		e.stats.AdapterDiskLoads++
	} else {
		e.stats.AdapterHostLoads++
	}
	if e.opt.Hooks.AdapterLoaded != nil {
		e.opt.Hooks.AdapterLoaded(id, source == fromDisk, now)
	}
	return d
}

// LoadAdapter makes an adapter resident ahead of requests, as a call of
// /v1/load_lora_adapter does, and returns the time it costs the next step. With
// every slot busy it goes to the GPU on its first request instead.
func (e *Engine) LoadAdapter(id int32, now time.Duration) time.Duration {
	e.lora.grow(id)
	if e.opt.MaxLoras == 0 || !e.lora.admissible(id) {
		return 0
	}
	d := e.loadAdapter(id, now)
	if e.stepping || len(e.running)+e.queued() > 0 { // an engine with nothing to do has the time
		e.extraLoad += d
	}
	return d
}

// LoadAdapterToHost reads an adapter into host memory, as SGLang does at a call
// of /load_lora_adapter, and returns the time it costs the next step.
func (e *Engine) LoadAdapterToHost(id int32) time.Duration {
	e.lora.grow(id)
	if e.opt.MaxLoras == 0 || slices.Contains(e.lora.cpu, id) {
		return 0
	}
	e.lora.cpu = append(e.lora.cpu, id)
	e.stats.AdapterDiskLoads++
	d := e.opt.AdapterDiskLoad
	if e.stepping || len(e.running)+e.queued() > 0 {
		e.extraLoad += d
	}
	return d
}

// DropAdapter frees the memory of an adapter, and reports whether it could: no
// request may be using it.
func (e *Engine) DropAdapter(id int32) bool {
	e.lora.grow(id)
	if e.lora.inFlight[id] > 0 {
		return false
	}
	drop := func(lru []int32) []int32 { return slices.DeleteFunc(lru, func(x int32) bool { return x == id }) }
	e.lora.gpu, e.lora.cpu = drop(e.lora.gpu), drop(e.lora.cpu)
	return true
}

// endStep counts what the step computed, samples, and drops what is finished.
func (e *Engine) endStep() {
	now := e.stepEnd
	e.stepping = false
	e.stats.Steps++
	gone := false
	generated := uint64(0)
	hooks := &e.opt.Hooks
	token := hooks.Token
	for _, r := range e.running {
		n := r.step
		if n == 0 {
			continue
		}
		r.step = 0
		r.computed += n
		if r.indexed < len(r.blocks) {
			e.share(r)
		}
		if r.computed < r.target || r.aborting {
			continue
		}
		if r.OutputTokens == 0 {
			e.stats.PromptTokens += uint64(r.PromptTokens)
		} else {
			r.Generated++
			r.target++
			r.estimated = r.target // decoding is not pending prefill
			generated++
			if r.Generated == 1 {
				r.FirstTokenAt = now
				e.stats.PromptTokens += uint64(r.PromptTokens)
				if hooks.FirstToken != nil {
					hooks.FirstToken(r, now)
				}
			}
			if token != nil {
				token(r, now)
			}
		}
		if r.Generated >= r.OutputTokens && !r.aborting {
			r.State = StateFinished
			e.stats.Finished++
			gone = true
		}
	}
	e.stats.GeneratedTokens += generated
	if gone {
		e.dropEnded(now)
	}
	e.reap(now)
	if hooks.Step != nil {
		hooks.Step(StepInfo{e.stepStart, now, e.stepSequences, e.stepTokens, e.stepDecodes})
	}
}

// share makes r's computed prompt blocks hittable.
func (e *Engine) share(r *Request) {
	full := min(r.computed/e.kv.promptTokens, len(r.blocks))
	for ; r.indexed < full; r.indexed++ {
		if !e.opt.NoPrefixCache {
			e.kv.computed(r.blocks[r.indexed])
		}
	}
}

// dropEnded removes from running those that are finished or aborted.
func (e *Engine) dropEnded(now time.Duration) {
	kept := e.running[:0]
	ended := 0
	for _, r := range e.running {
		if r.State == StateRunning {
			kept = append(kept, r)
			continue
		}
		ended++
		e.freeKV(r)
		if r.Adapter > 0 {
			e.lora.stop(r.Adapter)
		}
		e.end(r, now)
	}
	clear(e.running[len(kept) : len(kept)+ended])
	e.running = kept
}

func (e *Engine) end(r *Request, now time.Duration) {
	if r.Adapter > 0 {
		e.lora.inFlight[r.Adapter]--
	}
	r.FinishedAt = now
	if e.opt.Hooks.Finished != nil {
		e.opt.Hooks.Finished(r, now)
	}
}

// reap ends the requests marked by Abort.
func (e *Engine) reap(now time.Duration) {
	was := e.busy
	e.busy = true
	for e.aborts > 0 { // hooks may abort more
		e.aborts = 0
		e.reapMarked(now)
	}
	e.busy = was
}

func (e *Engine) reapMarked(now time.Duration) {
	running := false
	for _, r := range e.running {
		if r.aborting && r.State == StateRunning {
			e.addPending(r, -1)
			r.State = StateAborted
			e.stats.Aborted++
			running = true
		}
	}
	if running {
		e.dropEnded(now)
	}
	w, seen := e.head, len(e.waiting)-e.arrived
	for i := e.head; i < len(e.waiting); i++ {
		r := e.waiting[i]
		if !r.aborting {
			e.waiting[w] = r
			w++
			continue
		}
		if i >= seen {
			e.arrived--
		}
		e.addPending(r, -1)
		r.State = StateAborted
		e.stats.Aborted++
		e.end(r, now)
	}
	clear(e.waiting[w:])
	e.waiting = e.waiting[:w]
}

// Preload puts r straight into the running batch with its prompt computed, at no
// time: a server that has been busy for a while. It reports whether r fitted.
func (e *Engine) Preload(r *Request, now time.Duration) (bool, error) {
	if err := e.check(r); err != nil {
		return false, err
	}
	r.target = r.PromptTokens
	if e.stepping || len(e.running) >= e.opt.MaxSequences || r.Adapter > 0 && !e.lora.admissible(r.Adapter) ||
		!e.allocate(r, r.PromptTokens) {
		return false, nil
	}
	if r.Adapter > 0 {
		e.lora.inFlight[r.Adapter]++
		e.lora.start(r.Adapter)
		e.lora.use(r.Adapter)
	}
	r.State, r.SubmittedAt, r.AdmittedAt, r.admitted = StateRunning, now, now, true
	// The last prompt token is left for the first step, which samples from it.
	r.computed = r.PromptTokens - 1
	r.estimated = r.computed
	e.addPending(r, 1)
	e.share(r)
	e.running = append(e.running, r)
	e.wake(now)
	return true, nil
}

// ResetPrefixCache forgets every cached block that no sequence holds.
func (e *Engine) ResetPrefixCache() { e.kv.clear() }

// Stats returns the gauges and counters as they stand.
func (e *Engine) Stats() Stats {
	s := e.stats
	s.Running, s.Waiting = len(e.running), max(0, e.queued()-e.arrived)
	s.KVBlocks, s.KVBlocksUsed, s.KVBlockTokens = e.kv.total, e.kv.used(), e.kv.blockTokens
	return s
}
