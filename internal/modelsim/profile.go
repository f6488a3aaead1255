package modelsim

import (
	"fmt"
	"slices"
	"sort"
	"time"
)

// A Profile is what one GPU (or group of GPUs) and one model need for a step,
// as data. Step time is
//
//	lin(Σ new tokens)·f_lora + AP·Σ_prefill n·(c + n/2) + AD·Σ_decode c + C0 + C1·|batch| + Σ adapter loads
//
// with n the new tokens of a sequence in the step and c its tokens already in
// the KV cache.
type Profile struct {
	Name string

	// Linear is the time of all layers but attention by tokens in a step,
	// sorted by tokens, at least two points. Between points it is linear,
	// below the first constant.
	Linear []LinearPoint
	// LinearMicrosPerToken extends Linear past its last point.
	LinearMicrosPerToken float64

	// PrefillAttentionMicros (AP) is per pair of new token and context token.
	PrefillAttentionMicros float64
	// DecodeAttentionMicros (AD) is per context token of a decoding sequence.
	DecodeAttentionMicros float64
	// StepMillis (C0) is the fixed cost of a step: lm_head, sampler, launches.
	StepMillis float64
	// SequenceMillis (C1) is per sequence in the step.
	SequenceMillis float64

	// KVTokens is the size of the KV cache.
	KVTokens int
	// MaxBatchTokens is vLLM's max_num_batched_tokens, MaxSequences its
	// max_num_seqs, MaxModelTokens its max_model_len.
	MaxBatchTokens int
	MaxSequences   int
	MaxModelTokens int
}

// A LinearPoint is one measurement of the linear layers.
type LinearPoint struct {
	Tokens int
	Millis float64
}

func points(millis ...float64) []LinearPoint {
	tokens := [...]int{1, 32, 128, 256, 512, 1024, 2048, 4096, 8192}
	p := make([]LinearPoint, len(millis))
	for i, ms := range millis {
		p[i] = LinearPoint{tokens[i], ms}
	}
	return p
}

// profiles holds the known ones.
//
// Sources. A100 linear layers: Vidur's profiling tables (microsoft/vidur,
// data/profiling/compute/a100). H100: Vidur's Llama-2 tables on H100 scaled by
// the Llama-3/Llama-2 ratio seen on A100, 70B with two all-reduces a layer from
// its H100 DGX table (derived, not measured). RTX rows: LLMServingSim
// (casys-kaist/LLMServingSim), profiles captured from vLLM 0.19. KV sizes:
// 0.9·HBM less weights, 5.5 GiB of activations and 0.15 GiB (one GPU) or
// 0.6 GiB a GPU, over KV bytes a token; the RTX ones as vLLM printed them.
// Decode attention reads the KV cache at 85 to 90 % of peak bandwidth. C0 and
// C1 were chosen on the RTX PRO 6000 runs; the RTX 4090 runs confirm them.
// Batch and sequence limits are vLLM's defaults for the class, or those of the
// measured runs.
var profiles = []Profile{
	{
		Name:                   "8b-h100",
		Linear:                 points(5.6, 6.2, 6.8, 9.8, 12.8, 22.5, 43.2, 87.4, 175),
		LinearMicrosPerToken:   21,
		PrefillAttentionMicros: 1.31e-3, DecodeAttentionMicros: 0.046,
		StepMillis: 1.5, SequenceMillis: 0.02,
		KVTokens: 421_000, MaxBatchTokens: 2048, MaxSequences: 1024, MaxModelTokens: 131_072,
	},
	{
		Name:                   "8b-a100",
		Linear:                 points(9.76, 11.0, 13.3, 19.6, 34.9, 75.6, 146, 275, 549),
		LinearMicrosPerToken:   67,
		PrefillAttentionMicros: 2.91e-3, DecodeAttentionMicros: 0.0756,
		StepMillis: 2.0, SequenceMillis: 0.02,
		KVTokens: 421_000, MaxBatchTokens: 2048, MaxSequences: 256, MaxModelTokens: 131_072,
	},
	{
		Name:                   "70b-h100-tp4",
		Linear:                 points(16.8, 17.9, 19.5, 24.2, 38.8, 77.7, 142, 285, 570),
		LinearMicrosPerToken:   69,
		PrefillAttentionMicros: 1.64e-3, DecodeAttentionMicros: 0.0288,
		StepMillis: 2.5, SequenceMillis: 0.02,
		KVTokens: 487_000, MaxBatchTokens: 2048, MaxSequences: 1024, MaxModelTokens: 131_072,
	},
	{
		Name:                   "8b-pro6000",
		Linear:                 points(10.1, 10.6, 11.6, 13.9, 22.2, 39.7, 76.7),
		LinearMicrosPerToken:   37,
		PrefillAttentionMicros: 2.14e-3, DecodeAttentionMicros: 0.094,
		StepMillis: 2.0, SequenceMillis: 0.02,
		KVTokens: 520_000, MaxBatchTokens: 2048, MaxSequences: 128, MaxModelTokens: 131_072,
	},
	{
		Name:                   "8b-rtx4090",
		Linear:                 points(15.2, 16.9, 19.7, 23.9, 45.9, 90.9, 181),
		LinearMicrosPerToken:   88,
		PrefillAttentionMicros: 4.2e-3, DecodeAttentionMicros: 0.15,
		StepMillis: 2.4, SequenceMillis: 0.02,
		KVTokens: 2588 * 16, MaxBatchTokens: 2048, MaxSequences: 256, MaxModelTokens: 41_408,
	},
}

// DefaultProfile is the profile used when none is named.
const DefaultProfile = "8b-h100"

// ProfileNames lists the known profiles.
func ProfileNames() []string {
	names := make([]string, len(profiles))
	for i := range profiles {
		names[i] = profiles[i].Name
	}
	return names
}

// ProfileByName returns the named profile, or DefaultProfile's for "".
func ProfileByName(name string) (Profile, error) {
	if name == "" {
		name = DefaultProfile
	}
	for _, p := range profiles {
		if p.Name == name {
			return p, nil
		}
	}
	return Profile{}, fmt.Errorf("profile %q is unknown; want one of %v", name, ProfileNames())
}

// PrefillRate is how many tokens of prompts a busy server that does nothing else computes in a second.
func (p *Profile) PrefillRate() float64 {
	n := p.MaxBatchTokens
	return float64(n) / ((p.linearNanos(n) + p.StepMillis*1e6) / 1e9)
}

// TokenTime is the time per output token of a request that is alone on a server.
func (p *Profile) TokenTime() time.Duration {
	return time.Duration(p.linearNanos(1) + (p.StepMillis+p.SequenceMillis)*1e6)
}

// WithSpeed is p with its [Profile.PrefillRate] and [Profile.TokenTime] as given; 0 leaves one as it is.
func (p *Profile) WithSpeed(prefillRate float64, tokenTime time.Duration) (Profile, error) {
	if prefillRate == 0 {
		prefillRate = p.PrefillRate()
	}
	decode := 1.0
	if tokenTime > 0 {
		decode = tokenTime.Seconds() / p.TokenTime().Seconds()
	}
	n := p.MaxBatchTokens
	fixed := decode * (p.Linear[0].Millis + p.StepMillis) // of a step, which is decoding's
	step := float64(n) / prefillRate * 1e3
	prefill := (step - fixed) / (p.linearNanos(n)/1e6 - p.Linear[0].Millis)
	if prefill <= 0 {
		return Profile{}, fmt.Errorf("%.0f tokens/s of prompts: a step of %d tokens would take %.1f ms, and takes %.1f ms for a single one; want a lower rate, or less time per output token", prefillRate, n, step, fixed)
	}
	return p.Scaled(prefill, decode), nil
}

// Scaled is p with what limits prefill taking prefill times as long, and what limits decoding decode times: the reading of
// weights and of the KV cache, and the fixed cost of a step.
func (p *Profile) Scaled(prefill, decode float64) Profile {
	q := *p
	q.Linear = slices.Clone(p.Linear)
	first := p.Linear[0].Millis
	for i := range q.Linear {
		q.Linear[i].Millis = decode*first + prefill*(p.Linear[i].Millis-first)
	}
	q.LinearMicrosPerToken *= prefill
	q.PrefillAttentionMicros *= prefill
	q.DecodeAttentionMicros *= decode
	q.StepMillis *= decode
	q.SequenceMillis *= decode
	return q
}

// linearNanos is the time of the linear layers for a step of that many tokens.
func (p *Profile) linearNanos(tokens int) float64 {
	pts := p.Linear
	last := len(pts) - 1
	if tokens >= pts[last].Tokens {
		return pts[last].Millis*1e6 + float64(tokens-pts[last].Tokens)*p.LinearMicrosPerToken*1e3
	}
	if tokens <= pts[0].Tokens {
		return pts[0].Millis * 1e6
	}
	i := sort.Search(len(pts), func(i int) bool { return pts[i].Tokens > tokens })
	a, b := pts[i-1], pts[i]
	share := float64(tokens-a.Tokens) / float64(b.Tokens-a.Tokens)
	return (a.Millis + share*(b.Millis-a.Millis)) * 1e6
}

// linearTable tabulates linearNanos for steps of up to maxTokens tokens.
func (p *Profile) linearTable(maxTokens int) []float64 {
	t := make([]float64, maxTokens+1)
	for i := range t {
		t[i] = p.linearNanos(i)
	}
	return t
}

func (p *Profile) check() error {
	if len(p.Linear) < 2 || p.KVTokens <= 0 || p.MaxBatchTokens <= 0 || p.MaxSequences <= 0 {
		return fmt.Errorf("profile %q: linear table, KV tokens, batch tokens and sequences must all be set", p.Name)
	}
	return nil
}
