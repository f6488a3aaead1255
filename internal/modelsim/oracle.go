package modelsim

import (
	"slices"
	"time"
)

// This file is what a router with perfect knowledge would know of an engine. A
// real one can see none of it; the policy comparison's oracle can.

// CachedTokens is how many of r's prompt tokens the prefix cache holds now. r
// need not have been submitted.
func (e *Engine) CachedTokens(r *Request) int {
	return len(e.hits(r)) * e.kv.promptTokens
}

// CachedBlocks is how many leading ids of blocks the prefix cache holds now.
func (e *Engine) CachedBlocks(blocks []uint64) int { return e.kv.cachedBlocks(blocks) }

// PendingPrefillTokens is how many prompt tokens of waiting and running requests
// are to be computed and in no step yet. What a waiting request will find cached
// is taken as it was when it was submitted.
func (e *Engine) PendingPrefillTokens() int { return e.pendingTokens }

// KVFreeTokens is how many tokens the unreferenced KV blocks have room for.
func (e *Engine) KVFreeTokens() int { return e.kv.free() * e.kv.blockTokens }

// KVTokens is the size of the KV cache.
func (e *Engine) KVTokens() int { return e.kv.total * e.kv.blockTokens }

// AdapterResident reports whether the adapter is in a GPU slot, and whether it
// is in host memory.
func (e *Engine) AdapterResident(id int32) (gpu, host bool) {
	return slices.Contains(e.lora.gpu, id), slices.Contains(e.lora.cpu, id)
}

// AdapterSlotFree reports whether a request for the adapter would be scheduled
// now rather than passed over.
func (e *Engine) AdapterSlotFree(id int32) bool {
	e.lora.grow(id)
	return e.lora.admissible(id)
}

// AppendAdapters appends to running the adapters with running requests and to
// inFlight those with any, in order of their numbers.
func (e *Engine) AppendAdapters(running, inFlight []int32) ([]int32, []int32) {
	for id := 1; id < len(e.lora.running); id++ {
		if e.lora.running[id] > 0 {
			running = append(running, int32(id))
		}
		if e.lora.inFlight[id] > 0 {
			inFlight = append(inFlight, int32(id))
		}
	}
	return running, inFlight
}

// StepRemaining is the time from now to the end of the step under way.
func (e *Engine) StepRemaining(now time.Duration) time.Duration {
	if !e.stepping {
		return 0
	}
	return max(0, e.stepEnd-now)
}

// PrefillTime is how long a prompt of tokens takes alone on an idle engine with
// cached of them in the prefix cache: its TTFT without any queue.
func (e *Engine) PrefillTime(tokens, cached int, adapter bool) time.Duration {
	factor := 1.0
	if adapter {
		factor = e.opt.AdapterFactor
	}
	var ns float64
	for c := cached; c < tokens; {
		n := min(tokens-c, e.opt.MaxBatchTokens)
		ns += e.linear[n]*factor + e.prof.PrefillAttentionMicros*1e3*float64(n)*(float64(c)+float64(n)/2) +
			e.prof.StepMillis*1e6 + e.prof.SequenceMillis*1e6
		c += n
	}
	return time.Duration(ns)
}

// EstimateTTFT is a forward model of the time from now to r's first token if it
// were submitted now: the rest of the step under way, the prefill work ahead of
// it and its own in steps shared with today's decodes, the wait for KV blocks or
// seats if those ahead need more than there are (from the exact number of tokens
// each running request has left), and an adapter load. It is not a bound: it
// does not foresee preemption, nor the starvation of an adapter without a slot
// beyond the first free one.
func (e *Engine) EstimateTTFT(r *Request, now time.Duration) time.Duration {
	cached := e.CachedTokens(r)
	own := r.PromptTokens - cached
	decodes, context := 0, 0
	adapters := r.Adapter > 0
	for _, q := range e.running {
		if q.Generated > 0 {
			decodes++
			context += q.computed
		}
		adapters = adapters || q.Adapter > 0
	}
	factor := 1.0
	if adapters {
		factor = e.opt.AdapterFactor
	}
	perSequence := e.prof.SequenceMillis * 1e6
	decode := e.prof.StepMillis*1e6 + e.prof.DecodeAttentionMicros*1e3*float64(context) + perSequence*float64(decodes)

	// Whole steps full of prefill, and one with the rest.
	room := max(1, e.opt.MaxBatchTokens-decodes)
	tokens := e.pendingTokens + own
	full, rest := tokens/room, tokens%room
	pairs := float64(e.pendingPairs)/2 + float64(int64(r.PromptTokens)*int64(r.PromptTokens)-int64(cached)*int64(cached))/2
	ns := float64(full)*(e.linear[min(room+decodes, e.opt.MaxBatchTokens)]*factor+decode+perSequence) +
		e.prof.PrefillAttentionMicros*1e3*pairs
	if rest > 0 {
		ns += e.linear[min(rest+decodes, e.opt.MaxBatchTokens)]*factor + decode + perSequence
	}
	if r.Adapter > 0 {
		if gpu, host := e.AdapterResident(r.Adapter); !gpu {
			ns += float64(e.opt.AdapterHostLoad)
			if !host {
				ns += float64(e.opt.AdapterDiskLoad)
			}
		}
	}

	step := e.linear[max(1, min(decodes, e.opt.MaxBatchTokens))]*factor + decode
	if blocked := e.blockedSteps(r, cached); blocked > 0 {
		// Until then the prefill ahead goes on, in longer steps; then comes r's.
		longer := min(blocked, float64(full))
		ahead := longer*ns/max(1, float64(full)) + (blocked-longer)*step
		ns = max(ns, ahead+float64(e.PrefillTime(r.PromptTokens, cached, r.Adapter > 0))+decode*float64(1+own/room))
	}
	return e.StepRemaining(now) + time.Duration(ns)
}

// sequenceEnd is when a running request gives back its KV blocks.
type sequenceEnd struct{ steps, blocks int }

// blockedSteps is how many decode steps pass until the running requests have
// given back the KV blocks, seats and adapter slot that r and those waiting
// before it need.
func (e *Engine) blockedSteps(r *Request, cached int) float64 {
	blocks := e.kvNeed(r, r.PromptTokens+1) - cached/e.kv.blockTokens
	for _, q := range e.waiting[e.head:] {
		blocks += e.kvNeed(q, q.target) - q.estimated/e.kv.blockTokens
	}
	blocks -= e.kv.free()
	seats := len(e.running) + e.queued() + 1 - e.opt.MaxSequences
	steps := 0
	if blocks > 0 || seats > 0 {
		e.ends = e.ends[:0]
		for _, q := range e.running {
			e.ends = append(e.ends, sequenceEnd{q.OutputTokens - q.Generated, len(q.blocks)*e.kv.promptUnits + q.private})
		}
		slices.SortFunc(e.ends, func(a, b sequenceEnd) int { return a.steps - b.steps })
		for _, end := range e.ends {
			if blocks <= 0 && seats <= 0 {
				break
			}
			blocks -= end.blocks
			seats--
			steps = end.steps
		}
	}
	if r.Adapter > 0 && !e.AdapterSlotFree(r.Adapter) {
		// The slot whose adapter's requests end first.
		e.lastSteps = append(e.lastSteps[:0], make([]int, len(e.lora.running))...)
		for _, q := range e.running {
			e.lastSteps[q.Adapter] = max(e.lastSteps[q.Adapter], q.OutputTokens-q.Generated)
		}
		first := -1
		for id := 1; id < len(e.lastSteps); id++ {
			if e.lora.running[id] > 0 && (first < 0 || e.lastSteps[id] < first) {
				first = e.lastSteps[id]
			}
		}
		steps = max(steps, first)
	}
	return float64(steps)
}
