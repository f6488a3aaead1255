package modelsim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// flat is a profile with round numbers: a step takes 10 ms, whatever is in it.
func flat(kvTokens, batchTokens, sequences int) Profile {
	return Profile{
		Name: "flat", Linear: []LinearPoint{{1, 10}, {1 << 20, 10}},
		KVTokens: kvTokens, MaxBatchTokens: batchTokens, MaxSequences: sequences,
	}
}

const forever = time.Duration(math.MaxInt64 / 2)

func engine(t testing.TB, opt EngineOptions) *Engine {
	t.Helper()
	e, err := NewEngine(opt)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func submit(t testing.TB, e *Engine, now time.Duration, reqs ...*Request) {
	t.Helper()
	for _, r := range reqs {
		if err := e.Submit(r, now); err != nil {
			t.Fatal(err)
		}
	}
}

// steps records what each step held, as "sequences/tokens/decodes".
func steps(log *[]string) func(StepInfo) {
	return func(s StepInfo) { *log = append(*log, fmt.Sprintf("%d/%d/%d", s.Sequences, s.Tokens, s.Decodes)) }
}

// A long prompt is computed in chunks that leave room for the decodes, which come
// first; what is left of the budget goes to the next in line.
func TestPrefillIsChunkedBehindDecodes(t *testing.T) {
	var log []string
	e := engine(t, EngineOptions{Profile: flat(16_000, 100, 8), Hooks: Hooks{Step: steps(&log)}})
	a := &Request{ID: 1, PromptTokens: 10, OutputTokens: 6}
	submit(t, e, 0, a)
	e.Advance(10 * time.Millisecond) // a has its first token
	b, c := &Request{ID: 2, PromptTokens: 250, OutputTokens: 2}, &Request{ID: 3, PromptTokens: 20, OutputTokens: 2}
	submit(t, e, 10*time.Millisecond, b, c)
	e.Advance(forever)
	// The second step had begun when b and c came.
	want := "1/10/0 1/1/1 2/100/1 2/100/1 3/73/1 3/3/3"
	if got := strings.Join(log, " "); got != want {
		t.Errorf("steps %s; want %s", got, want)
	}
	if a.FirstTokenAt != 10*time.Millisecond || b.FirstTokenAt != 50*time.Millisecond || c.FirstTokenAt != 50*time.Millisecond {
		t.Errorf("first tokens at %v %v %v; want 10, 50, 50 ms", a.FirstTokenAt, b.FirstTokenAt, c.FirstTokenAt)
	}
	if b.FinishedAt != 60*time.Millisecond || a.FinishedAt != 60*time.Millisecond {
		t.Errorf("ends at %v %v; want 60 ms", a.FinishedAt, b.FinishedAt)
	}
}

// The queue is first come first served: one that does not fit holds up those
// behind it, and seats are limited.
func TestQueueIsFirstComeFirstServed(t *testing.T) {
	e := engine(t, EngineOptions{Profile: flat(10*16, 1000, 2)})
	a := &Request{ID: 1, PromptTokens: 96, OutputTokens: 4}
	big := &Request{ID: 2, PromptTokens: 100, OutputTokens: 1}
	small := &Request{ID: 3, PromptTokens: 10, OutputTokens: 1}
	submit(t, e, 0, a, big, small)
	e.Advance(forever)
	if !(a.FinishedAt <= big.AdmittedAt && big.AdmittedAt == small.AdmittedAt) {
		t.Errorf("a ended %v, big began %v, small %v; want small to wait for big", a.FinishedAt, big.AdmittedAt, small.AdmittedAt)
	}
	x, y, z := &Request{PromptTokens: 1, OutputTokens: 3}, &Request{PromptTokens: 1, OutputTokens: 1}, &Request{PromptTokens: 1, OutputTokens: 1}
	submit(t, e, e.stepEnd, x, y, z)
	e.Advance(forever)
	if z.AdmittedAt != y.FinishedAt || z.FinishedAt >= x.FinishedAt {
		t.Errorf("third began %v, second ended %v; want the seat taken over", z.AdmittedAt, y.FinishedAt)
	}
}

// When the KV cache is full the youngest is preempted: it loses all it had,
// waits at the head of the queue and is computed again, its output included.
func TestPreemptionRecomputesTheYoungest(t *testing.T) {
	var log []string
	var preempted []uint64
	var pending int
	var e *Engine
	e = engine(t, EngineOptions{Profile: flat(6*16, 1000, 8), Hooks: Hooks{
		Step: steps(&log),
		Preempted: func(r *Request, _ time.Duration) {
			preempted = append(preempted, r.ID)
			pending = e.PendingPrefillTokens()
		},
	}})
	// Three blocks each; the first to need a fourth takes it from the younger.
	a, b := &Request{ID: 1, PromptTokens: 46, OutputTokens: 20}, &Request{ID: 2, PromptTokens: 44, OutputTokens: 8}
	late := &Request{ID: 3, PromptTokens: 16, OutputTokens: 1}
	submit(t, e, 0, a, b)
	e.Advance(10 * time.Millisecond)
	submit(t, e, 10*time.Millisecond, late)
	e.Advance(forever)
	if !slices.Equal(preempted, []uint64{2}) || b.Preemptions != 1 || e.Stats().Preemptions != 1 {
		t.Fatalf("preempted %v; want 2 once", preempted)
	}
	// b had 3 tokens: 44 + 3 are to be computed again, beside late's 16.
	if pending != 44+3+16 {
		t.Errorf("pending %d tokens after the preemption; want 63", pending)
	}
	if !slices.Contains(log, "2/63/0") {
		t.Errorf("steps %v; want b's 47 tokens computed with late's 16 when a is done", log)
	}
	if !(b.AdmittedAt < late.AdmittedAt && a.FinishedAt <= late.AdmittedAt) || b.Generated != 8 {
		t.Errorf("a ended %v, late began %v, b has %d tokens; want b before late, all its tokens", a.FinishedAt, late.AdmittedAt, b.Generated)
	}
	if b.FirstTokenAt != 10*time.Millisecond {
		t.Errorf("b's first token moved to %v", b.FirstTokenAt)
	}
}

func ids(from, to uint64) (out []uint64) {
	for ; from < to; from++ {
		out = append(out, from)
	}
	return out
}

// A prefix is hit from the moment it is computed, by requests running beside its
// maker too; at least one token of a prompt is always computed.
func TestPrefixSharing(t *testing.T) {
	e := engine(t, EngineOptions{Profile: flat(100*16, 64, 8)})
	a := &Request{PromptTokens: 160, OutputTokens: 50, Blocks: ids(1, 11)}
	submit(t, e, 0, a)
	e.Advance(10 * time.Millisecond) // 64 tokens: four blocks
	if got := e.CachedBlocks(a.Blocks); got != 4 {
		t.Fatalf("%d blocks hittable after one chunk; want 4", got)
	}
	e.Advance(100 * time.Millisecond)
	b := &Request{PromptTokens: 160, OutputTokens: 2, Blocks: ids(1, 11)}                                // all of it known
	c := &Request{PromptTokens: 170, OutputTokens: 2, Blocks: append(ids(1, 6), 99, 100, 101, 102, 103)} // half of it
	if got := e.CachedTokens(b); got != 144 {
		t.Errorf("known prompt: %d tokens cached; want 144, one block is computed again", got)
	}
	used := e.Stats().KVBlocksUsed
	submit(t, e, 100*time.Millisecond, b, c)
	if got := e.PendingPrefillTokens(); got != 16+90 {
		t.Errorf("pending %d; want 106", got)
	}
	e.Advance(120 * time.Millisecond) // both in
	if b.CachedTokens != 144 || c.CachedTokens != 80 {
		t.Errorf("cached %d %d; want 144, 80", b.CachedTokens, c.CachedTokens)
	}
	if s := e.Stats(); s.PrefixQueryTokens != 490 || s.PrefixHitTokens != 224 {
		t.Errorf("queries %d, hits %d; want 490, 224", s.PrefixQueryTokens, s.PrefixHitTokens)
	}
	// b holds nine shared blocks, its tenth and one for output; c at most six new
	// of its own.
	if more := e.Stats().KVBlocksUsed - used; more < 4 || more > 8 {
		t.Errorf("%d more blocks used; want shared ones counted once", more)
	}
	e.Advance(forever)
	if used := e.Stats().KVBlocksUsed; used != 0 {
		t.Errorf("%d blocks in use at the end", used)
	}
	if got := e.CachedBlocks(c.Blocks); got != 10 {
		t.Errorf("%d of c's blocks stay cached; want all 10 full ones", got)
	}
	e.ResetPrefixCache()
	if got := e.CachedBlocks(c.Blocks); got != 0 || e.kv.free() != 100 {
		t.Errorf("%d cached, %d free after reset", got, e.kv.free())
	}
}

// Coarse ids share coarse blocks while KV use stays in fine ones.
func TestCoarsePromptBlocks(t *testing.T) {
	e := engine(t, EngineOptions{Profile: flat(256*16, 10_000, 8), PromptBlockTokens: 512})
	a := &Request{PromptTokens: 1100, OutputTokens: 1, Blocks: []uint64{1, 2, 3}} // the third is partial
	submit(t, e, 0, a)
	e.Advance(0)
	if got := e.Stats().KVBlocksUsed; got != 32+32+5 {
		t.Errorf("%d KV blocks; want 69", got)
	}
	e.Advance(forever)
	b := &Request{PromptTokens: 1024, OutputTokens: 1, Blocks: []uint64{1, 2}}
	if got := e.CachedTokens(b); got != 512 {
		t.Errorf("cached %d; want 512", got)
	}
}

// A waiting request whose adapter has no slot is passed over and keeps its
// place; adapters stay in their slots and in host memory by recency.
func TestAdapterSlots(t *testing.T) {
	var loads []string
	e := engine(t, EngineOptions{
		Profile: flat(1<<20, 1000, 100), MaxLoras: 2, MaxCPULoras: 3,
		Hooks: Hooks{AdapterLoaded: func(id int32, disk bool, _ time.Duration) {
			loads = append(loads, fmt.Sprint(id, disk))
		}},
	})
	r := func(adapter int32, out int) *Request {
		return &Request{PromptTokens: 10, OutputTokens: out, Adapter: adapter}
	}
	a, b, cold, b2, base := r(1, 20), r(2, 3), r(3, 1), r(2, 3), r(0, 1)
	submit(t, e, 0, a, b, cold, b2, base)
	e.Advance(0)
	if st := e.Stats(); st.Running != 4 || st.Waiting != 1 || st.WaitingForAdapter != 1 {
		t.Fatalf("running %d, waiting %d, for an adapter %d; want 4, 1, 1", st.Running, st.Waiting, st.WaitingForAdapter)
	}
	// Two loads from disk, in the step: 2 × 530 ms, and 15 % on the linear layers.
	if end, _ := e.NextEvent(); end != 2*530*time.Millisecond+11500*time.Microsecond {
		t.Errorf("first step ends at %v; want 1.0715s", end)
	}
	// As long as someone uses adapter 2, the one that came first starves.
	e.Advance(e.stepEnd)
	submit(t, e, e.stepStart, r(2, 8))
	e.Advance(e.stepEnd)
	if cold.State != StateWaiting {
		t.Error("adapter 3 got a slot while both were in use")
	}
	e.Advance(forever)
	if cold.State != StateFinished || cold.AdmittedAt >= a.FinishedAt {
		t.Errorf("adapter 3 began %v; want as soon as adapter 2 was idle", cold.AdmittedAt)
	}
	// 2 went out of its slot for 3, but is in host memory; 4 pushes 1 out of it.
	submit(t, e, e.stepEnd, r(2, 1))
	e.Advance(forever)
	submit(t, e, e.stepEnd, r(4, 1))
	e.Advance(forever)
	submit(t, e, e.stepEnd, r(1, 1))
	e.Advance(forever)
	want := []string{"1 true", "2 true", "3 true", "2 false", "4 true", "1 true"}
	if !slices.Equal(loads, want) {
		t.Errorf("loads %v; want %v", loads, want)
	}
	if st := e.Stats(); st.AdapterDiskLoads != 5 || st.AdapterHostLoads != 1 {
		t.Errorf("%d disk loads, %d host loads; want 5, 1", st.AdapterDiskLoads, st.AdapterHostLoads)
	}
	off := engine(t, EngineOptions{Profile: flat(1<<20, 1000, 100)})
	if err := off.Submit(r(1, 1), 0); err == nil {
		t.Error("adapter accepted with adapters off")
	}
}

// Step times are the formula's.
func TestStepTime(t *testing.T) {
	p := Profile{
		Linear: []LinearPoint{{1, 1}, {101, 11}}, LinearMicrosPerToken: 50,
		PrefillAttentionMicros: 2, DecodeAttentionMicros: 3, StepMillis: 5, SequenceMillis: 0.5,
		KVTokens: 1 << 20, MaxBatchTokens: 200, MaxSequences: 10,
	}
	var spans []time.Duration
	e := engine(t, EngineOptions{Profile: p, Hooks: Hooks{Step: func(s StepInfo) { spans = append(spans, s.End-s.Start) }}})
	submit(t, e, 0, &Request{PromptTokens: 251, OutputTokens: 2})
	e.Advance(forever)
	want := []time.Duration{
		// 200 tokens: 11 + 99·0.05 ms linear; 2 µs · 200 · 100 attention; 5 + 0.5 ms
		15950*time.Microsecond + 40*time.Millisecond + 5500*time.Microsecond,
		// 51 tokens: 6 ms; 2 µs · 51 · (200 + 25.5)
		6*time.Millisecond + 23001*time.Microsecond + 5500*time.Microsecond,
		// a decode over 251
		time.Millisecond + 753*time.Microsecond + 5500*time.Microsecond,
	}
	if !slices.Equal(spans, want) {
		t.Errorf("steps took %v; want %v", spans, want)
	}
	idle := engine(t, EngineOptions{Profile: p})
	if got := idle.PrefillTime(251, 0, false); got != want[0]+want[1] {
		t.Errorf("PrefillTime %v; want %v", got, want[0]+want[1])
	}
	if got := idle.EstimateTTFT(&Request{PromptTokens: 251, OutputTokens: 2}, 0); math.Abs(got.Seconds()-(want[0]+want[1]).Seconds()) > 0.001 {
		t.Errorf("EstimateTTFT on an idle engine %v; want %v", got, want[0]+want[1])
	}
}

// Aborts take effect at the step boundary, wherever the request is.
func TestAbort(t *testing.T) {
	var ended []uint64
	e := engine(t, EngineOptions{Profile: flat(100*16, 64, 1), Hooks: Hooks{
		Finished: func(r *Request, _ time.Duration) {
			if r.State == StateAborted {
				ended = append(ended, r.ID)
			}
		},
	}})
	a, b, c := &Request{ID: 1, PromptTokens: 200, OutputTokens: 50}, &Request{ID: 2, PromptTokens: 10, OutputTokens: 1}, &Request{ID: 3, PromptTokens: 10, OutputTokens: 1}
	submit(t, e, 0, a, b, c)
	e.Advance(0)
	e.Abort(a, 1)
	e.Abort(a, 2)
	e.Abort(b, 3)
	if a.State != StateRunning || len(ended) != 0 {
		t.Fatal("aborted in the middle of a step")
	}
	e.Advance(10 * time.Millisecond)
	if !slices.Equal(ended, []uint64{1, 2}) || e.Stats().Aborted != 2 || c.State != StateRunning {
		t.Errorf("aborted %v; want 1, 2 and c running", ended)
	}
	e.Advance(forever)
	if e.Stats().KVBlocksUsed != 0 || e.PendingPrefillTokens() != 0 || c.State != StateFinished {
		t.Errorf("left: %d blocks, %d pending, c %d", e.Stats().KVBlocksUsed, e.PendingPrefillTokens(), c.State)
	}
	e.Abort(c, e.stepEnd)
	if e.Stats().Aborted != 2 {
		t.Error("a finished request was aborted")
	}
	if _, busy := e.NextEvent(); busy {
		t.Error("an idle engine has an event")
	}
}

// A request that could never fit is refused rather than queued for ever.
func TestSubmitRefusesWhatNeverFits(t *testing.T) {
	e := engine(t, EngineOptions{Profile: flat(10*16, 64, 1)})
	if err := e.Submit(&Request{PromptTokens: 150, OutputTokens: 11}, 0); err == nil {
		t.Error("161 tokens taken into 160")
	}
	submit(t, e, 0, &Request{PromptTokens: 150, OutputTokens: 10})
	e.Advance(forever)
	if e.Stats().Finished != 1 {
		t.Error("160 tokens did not finish in 160")
	}
}

// checkBooks recomputes every incremental count from scratch.
func checkBooks(t *testing.T, e *Engine) {
	t.Helper()
	refs := make(map[int32]int32)
	private, pending, pairs := 0, 0, int64(0)
	running := make([]int32, len(e.lora.running))
	flight := make([]int32, len(e.lora.running))
	for _, r := range append(slices.Clone(e.running), e.waiting[e.head:]...) {
		for _, i := range r.blocks {
			refs[i]++
		}
		private += r.private
		if r.estimated < r.target {
			pending += r.target - r.estimated
			pairs += int64(r.target)*int64(r.target) - int64(r.estimated)*int64(r.estimated)
		}
		if r.Adapter > 0 {
			flight[r.Adapter]++
			if r.State == StateRunning {
				running[r.Adapter]++
			}
		}
		if r.State == StateWaiting && (len(r.blocks) > 0 || r.private > 0) {
			t.Fatalf("request %d waits with KV blocks", r.ID)
		}
		if held := e.kvNeed(r, r.computed+r.step); r.State == StateRunning && len(r.blocks)*e.kv.promptUnits+r.private < held {
			t.Fatalf("request %d has %d blocks for %d tokens", r.ID, len(r.blocks)+r.private, r.computed+r.step)
		}
	}
	used := private + len(refs)*e.kv.promptUnits
	for i, n := range refs {
		if e.kv.entries[i].refs != n {
			t.Fatalf("entry %d: %d references, %d holders", i, e.kv.entries[i].refs, n)
		}
	}
	lru := 0
	for i := e.kv.entries[0].next; i != 0; i = e.kv.entries[i].next {
		lru += int(e.kv.entries[i].units)
		if e.kv.entries[i].refs != 0 {
			t.Fatalf("entry %d is in the LRU with %d references", i, e.kv.entries[i].refs)
		}
	}
	if used != e.kv.used() || lru != e.kv.lruUnits || used+lru+e.kv.blank != e.kv.total {
		t.Fatalf("held %d, LRU %d, blank %d of %d; books say used %d, LRU %d", used, lru, e.kv.blank, e.kv.total, e.kv.used(), e.kv.lruUnits)
	}
	if pending != e.pendingTokens || pairs != e.pendingPairs {
		t.Fatalf("pending %d tokens, %d pairs; books say %d, %d", pending, pairs, e.pendingTokens, e.pendingPairs)
	}
	active := 0
	for id := range running {
		if running[id] > 0 {
			active++
		}
	}
	if !slices.Equal(running, e.lora.running) || !slices.Equal(flight, e.lora.inFlight) || active != e.lora.active {
		t.Fatalf("adapters running %v in flight %v; books say %v %v", running, flight, e.lora.running, e.lora.inFlight)
	}
	if active > e.opt.MaxLoras || len(e.lora.gpu) > e.opt.MaxLoras || len(e.lora.cpu) > e.opt.MaxCPULoras {
		t.Fatalf("%d adapters running, %d in slots, %d in host memory", active, len(e.lora.gpu), len(e.lora.cpu))
	}
	if len(e.running) > e.opt.MaxSequences {
		t.Fatalf("%d running", len(e.running))
	}
}

// Random work on a small cache: the books hold after every step, every request
// ends, and the same calls give the same history.
func TestBooksHoldUnderRandomWork(t *testing.T) {
	run := func(seed uint64, promptBlock int) (history []time.Duration, st Stats) {
		rng := rand.New(rand.NewPCG(seed, 1))
		e := engine(t, EngineOptions{
			Profile: flat(64*16, 100, 6), PromptBlockTokens: promptBlock, MaxLoras: 2, MaxCPULoras: 3,
			Hooks: Hooks{Finished: func(_ *Request, at time.Duration) { history = append(history, at) }},
		})
		var all []*Request
		now := time.Duration(0)
		for i := range 400 {
			now += time.Duration(rng.IntN(60)) * time.Millisecond
			for at, ok := e.NextEvent(); ok && at <= now; at, ok = e.NextEvent() {
				e.Advance(at)
				checkBooks(t, e)
			}
			e.Advance(now)
			r := &Request{ID: uint64(i), PromptTokens: 1 + rng.IntN(400), OutputTokens: rng.IntN(60), Adapter: int32(max(0, rng.IntN(8)-3))}
			family := uint64(rng.IntN(4)) << 32
			for b := range r.PromptTokens / promptBlock {
				if rng.IntN(10) == 0 {
					family = uint64(i+10) << 32 // from here on its own
				}
				r.Blocks = append(r.Blocks, family+uint64(b))
			}
			submit(t, e, now, r)
			all = append(all, r)
			if rng.IntN(5) == 0 {
				e.Abort(all[rng.IntN(len(all))], now)
			}
			checkBooks(t, e)
		}
		for at, ok := e.NextEvent(); ok; at, ok = e.NextEvent() {
			e.Advance(at)
			checkBooks(t, e)
		}
		for _, r := range all {
			if r.State != StateAborted && (r.State != StateFinished || r.Generated != r.OutputTokens) {
				t.Fatalf("request %d: state %d, %d of %d tokens", r.ID, r.State, r.Generated, r.OutputTokens)
			}
		}
		if len(history) != len(all) || e.Stats().KVBlocksUsed != 0 || e.PendingPrefillTokens() != 0 {
			t.Fatalf("%d of %d ended, %d blocks used, %d pending", len(history), len(all), e.Stats().KVBlocksUsed, e.PendingPrefillTokens())
		}
		return history, e.Stats()
	}
	preemptions, hits := uint64(0), uint64(0)
	for seed := range uint64(5) {
		for _, block := range []int{16, 32} {
			a, st := run(seed, block)
			b, _ := run(seed, block)
			if !slices.Equal(a, b) {
				t.Fatalf("seed %d: two runs differ", seed)
			}
			preemptions += st.Preemptions
			hits += st.PrefixHitTokens
		}
	}
	if preemptions == 0 || hits == 0 {
		t.Errorf("%d preemptions, %d hit tokens: the work is too easy to show anything", preemptions, hits)
	}
}

// Hooks may call back.
func TestHooksMayCallBack(t *testing.T) {
	var e *Engine
	n := 0
	other := &Request{ID: 9, PromptTokens: 10, OutputTokens: 1000}
	e = engine(t, EngineOptions{Profile: flat(1<<16, 100, 8), Hooks: Hooks{
		Token: func(r *Request, at time.Duration) {
			if r.ID == 1 && r.Generated == 3 {
				e.Abort(r, at)
				e.Abort(other, at)
			}
		},
		Finished: func(r *Request, at time.Duration) {
			if n++; n < 50 {
				if err := e.Submit(&Request{ID: uint64(n + 1), PromptTokens: 5, OutputTokens: 2}, at); err != nil {
					t.Error(err)
				}
			}
		},
	}})
	submit(t, e, 0, &Request{ID: 1, PromptTokens: 10, OutputTokens: 10}, other)
	e.Advance(forever)
	if st := e.Stats(); st.Aborted != 2 || st.Finished != uint64(n)-2 || n < 50 {
		t.Errorf("aborted %d, finished %d of %d", st.Aborted, st.Finished, n)
	}
	checkBooks(t, e)
}

// The forward model is near what then happens: on an engine with a queue very
// near, on one whose KV cache is the bottleneck roughly.
func TestEstimateTTFT(t *testing.T) {
	prof, err := ProfileByName("8b-h100")
	if err != nil {
		t.Fatal(err)
	}
	f := func(outputTokens int, median, decile float64) {
		t.Helper()
		var ratio []float64
		rng := rand.New(rand.NewPCG(3, 3))
		e := engine(t, EngineOptions{Profile: prof, Hooks: Hooks{FirstToken: func(r *Request, at time.Duration) {
			ratio = append(ratio, float64(r.Tag.(time.Duration))/float64(at-r.SubmittedAt))
		}}})
		now := time.Duration(0)
		for i := range 2000 {
			now += time.Duration(rng.ExpFloat64() * 0.3 * 1e9)
			e.Advance(now)
			r := &Request{ID: uint64(i), PromptTokens: 100 + rng.IntN(20_000), OutputTokens: 1 + rng.IntN(outputTokens)}
			r.Tag = e.EstimateTTFT(r, now)
			submit(t, e, now, r)
		}
		e.Advance(forever)
		p10, p50, p90 := quantile(ratio, .1), quantile(ratio, .5), quantile(ratio, .9)
		if math.Abs(p50-1) > median || math.Abs(p10-1) > decile || math.Abs(p90-1) > decile {
			t.Errorf("%d tokens out, %d preemptions: estimate over actual p10 %.2f, p50 %.2f, p90 %.2f; want the median within %.2f of 1, the deciles within %.2f",
				outputTokens, e.Stats().Preemptions, p10, p50, p90, median, decile)
		}
	}
	f(200, 0.02, 0.05)
	f(500, 0.2, 0.25)
}
