package scoring

import (
	"math"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// Priors, used until there is something learned. None of them needs to be right: all endpoints of a pool share them.
const (
	priorBytesPerToken  = 4.0    // English text in common tokenizers
	priorOutputTokens   = 256.0  // between chat (210–340 on average) and code (30), routing study §Workloads
	priorNewTokens      = 1024.0 // mean uncached prompt
	priorPrefillRate    = 20_000 // tokens/s: between an 8B on an A100 (14,000) and on an H100 (45,000), engine model §3
	priorAdapterLoad    = 0.5    // seconds, from disk, engine model §3
	priorRequestSeconds = 4.0    // time that a request holds its seat after its first token

	// baseSeconds of a first token are not prefill: one decode step, tokenizer, network.
	baseSeconds = 0.015
)

// A Learner holds what is learned from traffic per model: bytes per token, output length. What is learned per endpoint is
// kept on the endpoint. It has a fixed size and is safe for concurrent use.
type Learner struct {
	models    [modelSlots]modelStats
	rest      modelStats // models beyond those, and the prior of every new one
	newTokens pool.Float
	seconds   pool.Float // of a request after its first token
	rate      pool.Float // prefill rate of the fastest endpoint, tokens/s
	typical   pool.Float // the largest of the endpoints' median rates
}

const (
	modelSlots  = 1024
	modelProbes = 8
)

type modelStats struct {
	hash          atomic.Uint64 // 0 is free
	seen          atomic.Uint32
	bytesPerToken pool.Float
	outputTokens  pool.Float
}

// NewLearner returns a Learner that knows nothing.
func NewLearner() *Learner { return new(Learner) }

// model returns the statistics of a model; those of all others where there is no place left.
func (l *Learner) model(hash uint64) *modelStats {
	for i := range uint64(modelProbes) {
		m := &l.models[(hash+i)%modelSlots]
		switch h := m.hash.Load(); {
		case h == hash:
			return m
		case h == 0:
			return &l.rest
		}
	}
	return &l.rest
}

// adopt is model, and makes a place if there is none yet.
func (l *Learner) adopt(hash uint64) *modelStats {
	for i := range uint64(modelProbes) {
		m := &l.models[(hash+i)%modelSlots]
		if h := m.hash.Load(); h == hash || h == 0 && m.hash.CompareAndSwap(0, hash) || m.hash.Load() == hash {
			return m
		}
	}
	return &l.rest
}

// first returns the first value that is known.
func first(values ...float64) float64 {
	for _, v := range values {
		if v > 0 {
			return v
		}
	}
	return 0
}

// EstimateTokens is how many tokens promptBytes of a request body are for target's model, by what was learned.
func (l *Learner) EstimateTokens(target *pool.Target, promptBytes int) int {
	return int(float64(promptBytes)/l.bytesPerToken(l.model(target.Hash)) + 0.5)
}

func (l *Learner) bytesPerToken(m *modelStats) float64 {
	return first(m.bytesPerToken.Load(), l.rest.bytesPerToken.Load(), priorBytesPerToken)
}

const maxTokens = 1 << 24 // longer than any context; keeps sums of terms in range

func (l *Learner) promptTokens(m *modelStats, req *Request) int32 {
	if req.PromptTokens > 0 {
		return min(req.PromptTokens, maxTokens)
	}
	return int32(min(max(float64(req.PromptBytes)/l.bytesPerToken(m), 1), maxTokens))
}

func (l *Learner) outputTokens(m *modelStats, req *Request) int32 {
	t := first(m.outputTokens.Load(), l.rest.outputTokens.Load(), priorOutputTokens)
	if req.MaxTokens > 0 {
		t = min(t, float64(req.MaxTokens))
	}
	return int32(min(t*float64(max(req.N, 1)), maxTokens))
}

func (l *Learner) meanNewTokens() float64 { return first(l.newTokens.Load(), priorNewTokens) }

func (l *Learner) prefillRate(e *pool.Endpoint) float64 {
	return first(e.PrefillTokensPerSecond.Load(), l.rate.Load(), priorPrefillRate)
}

func (l *Learner) adapterLoadSeconds(e *pool.Endpoint) float64 {
	return first(e.AdapterLoadSeconds.Load(), priorAdapterLoad)
}

// slotSeconds is how long an adapter slot stays taken once it is.
func (l *Learner) slotSeconds() float64 { return first(l.seconds.Load(), priorRequestSeconds) }

func (l *Learner) predict(e *pool.Endpoint, ahead, own int32) time.Duration {
	s := baseSeconds + float64(ahead+own)/l.prefillRate(e)
	return time.Duration(s * float64(time.Second))
}

// Weights of new samples in the moving averages.
const (
	rateGain  = 0.05
	modelGain = 0.02
	// rateSample is the work, in tokens, of which a sample of the prefill rate has full weight: less is mostly overhead.
	rateSample     = 4096
	maxAdapterLoad = 5 // seconds; more is waiting for a slot
	// typicalGain is how far a sample moves the rate that endpoints are compared by, as a share of it, once there are many; and
	// typicalSamples are enough to compare. It is their median: prefills are slowed by waiting for space and hastened by cached
	// blocks that nobody knew of, by factors. Compared by means, endpoints that were full for a while looked slow, were avoided,
	// and what they had cached was computed once more elsewhere, which made those full (docs/adr/0007-compare-by-medians.md).
	typicalGain    = 0.01
	typicalSamples = 32
	// slownessBand is how far an endpoint's learned slowness may be from what is believed of it without changing that, and
	// it changes in steps of √2: equal servers measure a little different, and must not be told apart by that.
	slownessBand = 1.5
	// envelopeDecay lets the fastest rate be forgotten, over some thousand requests, when its endpoint is gone.
	envelopeDecay = 0.0005
)

func blend(f *pool.Float, sample, gain float64) {
	f.Update(func(v float64) float64 {
		if v == 0 {
			return sample
		}
		return v + gain*(sample-v)
	})
}

// FirstToken takes in that the first token of the request that d was made for came ttft after it was sent.
func (p *Policy) FirstToken(d *Decision, ttft time.Duration) {
	l := p.learn
	work := float64(d.AheadTokens) + float64(d.Claim.PendingTokens)
	seconds := ttft.Seconds() - baseSeconds
	if d.waits {
		if d.Cold {
			load := seconds - work/l.prefillRate(d.Endpoint)
			blend(&d.Endpoint.AdapterLoadSeconds, min(max(load, 0.01), maxAdapterLoad), modelGain)
		}
		return
	}
	if work < rateSample/16 || seconds <= 0.001 {
		return
	}
	e := d.Endpoint
	// Seconds per token are averaged, weighted by tokens, which makes it total time over total work.
	gain := rateGain * min(1, work/rateSample)
	update := func(f *pool.Float) float64 {
		return f.Update(func(v float64) float64 {
			if v == 0 {
				return work / seconds
			}
			return 1 / (1/v + gain*(seconds/work-1/v))
		})
	}
	own := update(&e.PrefillTokensPerSecond)
	envelope := func(f *pool.Float, own float64) float64 {
		return f.Update(func(v float64) float64 {
			if own >= v {
				return own
			}
			return v - envelopeDecay*(v-own)
		})
	}
	envelope(&l.rate, own)
	n := e.Prefills.Add(1)
	typical := e.MedianPrefillTokensPerSecond.Update(func(v float64) float64 {
		switch step := max(typicalGain, 1/(float64(n)+1)) * min(1, work/rateSample); {
		case v == 0:
			return work / seconds
		case work/seconds > v:
			return v * (1 + step)
		default:
			return v * (1 - step)
		}
	})
	if n < typicalSamples {
		return
	}
	fastest := envelope(&l.typical, typical)
	current, _ := d.Row.Learned()
	slowness := first(float64(current), 1)
	if raw := fastest / typical; raw > slowness*slownessBand || raw < slowness/slownessBand {
		slowness = math.Exp2(math.Round(2*math.Log2(raw)) / 2)
	}
	e.SetLearned(float32(slowness), float32(e.LearnedKVCapacity.Load()))
}

// Usage is how a request ended, as far as its answer told.
type Usage struct {
	PromptTokens int32         // 0 is unknown
	CachedTokens int32         // of them, served from the prefix cache; negative is unknown
	OutputTokens int32         // 0 is unknown
	Duration     time.Duration // from the first token to the end; 0 is unknown
}

// End takes in how the request that d was made for ended. Requests that failed are not reported.
func (p *Policy) End(d *Decision, u Usage) {
	l := p.learn
	m := l.adopt(d.model)
	m.seen.Add(1)
	if u.PromptTokens > 0 {
		if d.promptBytes > 0 {
			// Ratio of sums, as for rates: weight grows with the prompt.
			sample := float64(d.promptBytes) / float64(u.PromptTokens)
			gain := modelGain * min(1, float64(u.PromptTokens)/256)
			blend(&m.bytesPerToken, sample, gain)
			blend(&l.rest.bytesPerToken, sample, gain)
		}
	}
	if u.OutputTokens > 0 {
		d.Endpoint.TakeIn(int64(u.OutputTokens)) // its dead blocks stay in the server's cache until others need them
		blend(&m.outputTokens, float64(u.OutputTokens), modelGain)
		blend(&l.rest.outputTokens, float64(u.OutputTokens), modelGain)
	}
	blend(&l.newTokens, float64(d.Claim.PendingTokens), modelGain)
	if u.Duration > 0 {
		blend(&l.seconds, u.Duration.Seconds(), modelGain)
	}
	if p.index != nil && u.CachedTokens >= 0 && u.PromptTokens > 0 {
		p.index.learnHits(d.CachedTokens, u.CachedTokens)
	}
	p.learnKV(d)
}

// learnKV learns the KV capacity of an endpoint that tells how full it is but not how large: what is booked on it over the
// utilization that was scraped. Samples of a nearly empty cache say nothing.
func (p *Policy) learnKV(d *Decision) {
	l := d.Row.Load
	if d.Row.KVCapacity != 0 || !l.Known.Has(pool.KnowsKVCacheUtilization) || l.KVCacheUtilization < 0.1 || d.Row.Foreign.Requests > 0 {
		return
	}
	e := d.Endpoint
	booked := e.Booked().KVTokens
	if booked <= 0 {
		return
	}
	blend(&e.LearnedKVCapacity, float64(booked)/l.KVCacheUtilization, modelGain)
	slowness, _ := d.Row.Learned()
	e.SetLearned(slowness, float32(e.LearnedKVCapacity.Load()))
}
