// Package policies compares routing policies in virtual time: the product's own table and policies, and published rivals,
// in front of simulated engines that behave like vLLM. A run of an hour of traffic takes seconds and is repeatable.
//
// It must not be imported by the product's packages.
package policies

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/admission"
)

// A Request is one arrival of a workload.
type Request struct {
	At      time.Duration // at the workload's recorded rate
	In, Out int           // tokens
	// Blocks identifies the full blocks of the prompt, Workload.BlockTokens tokens each: equal ids mean equal tokens and
	// equal prefix. Nil: nothing of it is shared.
	Blocks  []uint64
	Adapter int32 // 0 is the base model
	Tenant  string
	Class   admission.Class

	MaxTokens   int    // of the answer, that the request allows; 0: it doesn't say
	Session     uint64 // hash of what it names its session by; 0: nothing
	NotStreamed bool   // its first token isn't seen by routers
}

// A Workload is a list of arrivals in order of time, and what they need of an engine.
type Workload struct {
	Name        string
	Requests    []Request
	BlockTokens int // tokens of one id in Request.Blocks; a multiple of 16
	Adapters    int // adapters are numbered 1..Adapters; 0 is none
	MaxLoras    int
	MaxCPULoras int
}

// Rate is the mean arrival rate as recorded, in requests per second.
func (w *Workload) Rate() float64 {
	n := len(w.Requests)
	if n < 2 {
		return 0
	}
	return float64(n-1) / (w.Requests[n-1].At - w.Requests[0].At).Seconds()
}

// mix is the finaliser of splitmix64; it makes ids of ids.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// BlockID is an id for the nth block of something that has an id. It is as good a hash as the gateway's own.
func BlockID(id, n uint64) uint64 { return chain(id, n) }

func chain(prev, id uint64) uint64 { return mix(prev ^ mix(id)) }

// maxTraceTokens is more than any request has.
const maxTraceTokens = 1 << 24

// ReadTrace reads a trace with columns t_ms,in,out and optionally blocks (ids of the prompt's consecutive blocks of
// blockTokens tokens; a-b is a run). Stamps that come in batches are spread evenly over spread. Only full blocks count.
func ReadTrace(r io.Reader, name string, blockTokens int, spread time.Duration, rnd *rand.Rand) (*Workload, error) {
	w := &Workload{Name: name, BlockTokens: max(blockTokens, 16)}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 4<<20)
	for line := 1; sc.Scan(); line++ {
		if line == 1 || sc.Text() == "" {
			continue
		}
		f := strings.Split(sc.Text(), ",")
		if len(f) < 3 {
			return nil, fmt.Errorf("%s:%d: %d columns; want t_ms,in,out[,blocks]", name, line, len(f))
		}
		ms, err1 := strconv.ParseFloat(f[0], 64)
		in, err2 := strconv.Atoi(f[1])
		out, err3 := strconv.Atoi(f[2])
		if err := cmp.Or(err1, err2, err3); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, line, err)
		}
		if !(ms >= 0 && ms < 1e12) || in > maxTraceTokens || out > maxTraceTokens {
			return nil, fmt.Errorf("%s:%d: %g ms, %d tokens in, %d out; want no negative time and %d tokens at most", name, line, ms, in, out, maxTraceTokens)
		}
		q := Request{At: time.Duration(ms * 1e6), In: max(in, 1), Out: max(out, 1)}
		if spread > 0 {
			q.At += time.Duration(rnd.Int64N(int64(spread)))
		}
		if blockTokens > 0 && len(f) > 3 {
			for id, err := range ids(f[3]) {
				if err != nil {
					return nil, fmt.Errorf("%s:%d: %w", name, line, err)
				}
				if len(q.Blocks) >= q.In/blockTokens {
					break
				}
				q.Blocks = append(q.Blocks, mix(id))
			}
		}
		w.Requests = append(w.Requests, q)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	w.sort()
	return w, nil
}

func ids(s string) func(yield func(uint64, error) bool) {
	return func(yield func(uint64, error) bool) {
		for f := range strings.FieldsSeq(s) {
			from, to, isRange := strings.Cut(f, "-")
			a, err := strconv.ParseUint(from, 10, 64)
			b := a
			if err == nil && isRange {
				b, err = strconv.ParseUint(to, 10, 64)
			}
			if err != nil {
				yield(0, err)
				return
			}
			for ; a <= b; a++ {
				if !yield(a, nil) {
					return
				}
			}
		}
	}
}

func (w *Workload) sort() {
	slices.SortStableFunc(w.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	if len(w.Requests) > 0 {
		first := w.Requests[0].At
		for i := range w.Requests {
			w.Requests[i].At -= first
		}
	}
}

// WithAdapters puts each request of base behind a system prompt of 1,024 tokens of one of n adapters, drawn from a Zipf
// distribution with exponent 1, the usual stand-in for adapter popularity (S-LoRA, dLoRA and others use skewed draws; no
// public trace has adapter ids).
func WithAdapters(base *Workload, n, maxLoras, maxCPULoras int, rnd *rand.Rand) *Workload {
	const system, block = 1024, genBlock
	w := &Workload{
		Name: fmt.Sprintf("lora%d", n), BlockTokens: block,
		Adapters: n, MaxLoras: maxLoras, MaxCPULoras: maxCPULoras,
	}
	cdf := zipf(n, 1)
	for i, q := range base.Requests {
		a := draw(cdf, rnd)
		h := mix(uint64(a+1) << 32)
		q.Blocks = nil
		for range system / block {
			h = chain(h, 1)
			q.Blocks = append(q.Blocks, h)
		}
		q.Adapter = int32(a + 1)
		q.In += system
		h = chain(h, uint64(i)<<20)
		for len(q.Blocks) < q.In/block {
			h = chain(h, 2)
			q.Blocks = append(q.Blocks, h)
		}
		w.Requests = append(w.Requests, q)
	}
	return w
}

func zipf(n int, s float64) []float64 {
	cdf := make([]float64, n)
	sum := 0.0
	for i := range cdf {
		sum += math.Pow(float64(i+1), -s)
		cdf[i] = sum
	}
	for i := range cdf {
		cdf[i] /= sum
	}
	return cdf
}

func draw(cdf []float64, rnd *rand.Rand) int {
	i, _ := slices.BinarySearch(cdf, rnd.Float64())
	return min(i, len(cdf)-1)
}

// lognormal draws from a log-normal distribution given by its median and its mean.
func lognormal(rnd *rand.Rand, median, mean float64) float64 {
	sigma := math.Sqrt(2 * math.Log(mean/median))
	return median * math.Exp(sigma*rnd.NormFloat64())
}

// genBlock is the block size of generated workloads, in tokens: what prefixes are compared in, and what the gateway hashes.
// The engines page their KV cache in 16 tokens all the same.
const genBlock = 64

// session builds prompts that grow: each turn's prompt is the one before, its answer, and new input.
type session struct {
	h      uint64
	blocks []uint64
	tokens int
}

func newSession(seed uint64) *session { return &session{h: mix(seed)} }

func (s *session) fork(seed uint64) *session {
	return &session{h: chain(s.h, seed), blocks: slices.Clone(s.blocks), tokens: s.tokens}
}

func (s *session) grow(tokens int) {
	s.tokens += tokens
	for len(s.blocks) < s.tokens/genBlock {
		s.h = chain(s.h, uint64(len(s.blocks)))
		s.blocks = append(s.blocks, s.h)
	}
}

func (s *session) request(at time.Duration, out int) Request {
	return Request{At: at, In: max(1, s.tokens), Out: max(1, out), Blocks: slices.Clone(s.blocks)}
}

// A Generator makes workloads with stated statistics, so that every figure can be repeated without a trace.
type Generator struct {
	Name, Doc string
	// Requests is how many make a run that reaches a steady state on 8 replicas: some minutes at capacity.
	Requests int
	make     func(n int, rnd *rand.Rand) *Workload
}

// Make returns n requests drawn with seed; 0 is g.Requests of them.
func (g Generator) Make(n int, seed uint64) *Workload {
	n = cmp.Or(n, g.Requests)
	w := g.make(n, rand.New(rand.NewPCG(seed, 0x6b766761)))
	w.Name = g.Name
	w.sort()
	if len(w.Requests) > n {
		w.Requests = w.Requests[:n]
	}
	return w
}

// Generators are the workloads that need no file. Rates are arbitrary: runs scale them.
var Generators = []Generator{
	{"conversation", "chats of growing context behind one system prompt: input mean 12,000 and p99 85,000 tokens, output mean 343, 37 % of tokens seen before (the statistics of Mooncake's conversation trace)", 8000, conversation},
	{"tool", "agents: few very hot tool prompts, many short turns; input mean 8,600 tokens, output mean 180, 60 % of tokens seen before", 10000, tool},
	{"rag", "questions over long shared documents, Zipf over 200 documents of 8,000 to 60,000 tokens, output mean 150", 8000, rag},
	{"short", "short prompts, nothing shared: input mean 1,155 and median 1,020, output mean 211 (the statistics of Azure's 2023 conversation trace)", 20000, short},
	{"bursts", "as short, arriving in bursts: coefficient of variation of gaps 3.6", 20000, bursts},
	{"giants", "as short, and one prompt in 250 has 100,000 tokens", 20000, giants},
	{"lora64", "as short behind a system prompt of 1,024 tokens per adapter, Zipf(1) over 64 adapters, 4 slots", 20000, loras(64, 4, 32)},
	{"lora128", "the same with 128 adapters, 8 slots", 20000, loras(128, 8, 32)},
	{"lora256", "the same with 256 adapters, 8 slots", 20000, loras(256, 8, 32)},
}

// GeneratorByName returns the named generator.
func GeneratorByName(name string) (Generator, bool) {
	i := slices.IndexFunc(Generators, func(g Generator) bool { return g.Name == name })
	if i < 0 {
		return Generator{}, false
	}
	return Generators[i], true
}

func conversation(n int, rnd *rand.Rand) *Workload {
	w := &Workload{BlockTokens: genBlock}
	system := newSession(1)
	system.grow(512)
	at := time.Duration(0)
	for len(w.Requests) < n {
		s := system.fork(rnd.Uint64())
		at += time.Duration(rnd.ExpFloat64() * float64(time.Second))
		t := at
		turns := 1 + int(rnd.ExpFloat64()*1.1)
		s.grow(int(min(lognormal(rnd, 5200, 10500), 115000)))
		for range turns {
			if s.tokens > 120000 {
				break
			}
			out := int(min(lognormal(rnd, 260, 343), 2000))
			w.Requests = append(w.Requests, s.request(t, out))
			s.grow(out + int(min(lognormal(rnd, 300, 900), 8000)))
			t += time.Duration((20 + 60*rnd.ExpFloat64()) * float64(time.Second))
		}
	}
	return w
}

func tool(n int, rnd *rand.Rand) *Workload {
	w := &Workload{BlockTokens: genBlock}
	const kinds = 12
	cdf := zipf(kinds, 1.2)
	prompts := make([]*session, kinds)
	for i := range prompts {
		prompts[i] = newSession(uint64(1000 + i))
		prompts[i].grow(2000 + rnd.IntN(6000))
	}
	at := time.Duration(0)
	for len(w.Requests) < n {
		s := prompts[draw(cdf, rnd)].fork(rnd.Uint64())
		at += time.Duration(rnd.ExpFloat64() * float64(time.Second))
		t := at
		s.grow(int(min(lognormal(rnd, 1200, 4500), 90000)))
		for range 1 + int(rnd.ExpFloat64()*1.2) {
			out := int(min(lognormal(rnd, 60, 180), 2000))
			w.Requests = append(w.Requests, s.request(t, out))
			s.grow(out + int(min(lognormal(rnd, 300, 900), 8000)))
			t += time.Duration((2 + 8*rnd.ExpFloat64()) * float64(time.Second))
		}
	}
	return w
}

func rag(n int, rnd *rand.Rand) *Workload {
	w := &Workload{BlockTokens: genBlock}
	const documents = 200
	cdf := zipf(documents, 0.9)
	docs := make([]*session, documents)
	for i := range docs {
		docs[i] = newSession(uint64(5000 + i))
		docs[i].grow(8000 + rnd.IntN(52000))
	}
	at := time.Duration(0)
	for range n {
		at += time.Duration(rnd.ExpFloat64() * float64(time.Second))
		s := docs[draw(cdf, rnd)].fork(rnd.Uint64())
		s.grow(int(min(lognormal(rnd, 60, 120), 2000)))
		w.Requests = append(w.Requests, s.request(at, int(min(lognormal(rnd, 110, 150), 1000))))
	}
	return w
}

func azure(rnd *rand.Rand, at time.Duration) Request {
	return Request{At: at, In: int(min(lognormal(rnd, 1020, 1155), 14000)), Out: int(min(lognormal(rnd, 129, 211), 1000))}
}

func short(n int, rnd *rand.Rand) *Workload {
	w := &Workload{BlockTokens: genBlock}
	at := time.Duration(0)
	for range n {
		at += time.Duration(rnd.ExpFloat64() * float64(time.Second))
		w.Requests = append(w.Requests, azure(rnd, at))
	}
	return w
}

// giantTokens is the length of a giant prompt, and giantEvery how many others come with one.
const giantTokens, giantEvery = 100_000, 250

func giants(n int, rnd *rand.Rand) *Workload {
	w := short(n, rnd)
	for i := range w.Requests {
		if rnd.IntN(giantEvery) == 0 {
			w.Requests[i].In = giantTokens
		}
	}
	return w
}

func bursts(n int, rnd *rand.Rand) *Workload {
	w := &Workload{BlockTokens: genBlock}
	at := time.Duration(0)
	for range n {
		// A two-phase hyperexponential with squared coefficient of variation 13.2 (Azure's code trace), balanced means.
		const cv2 = 13.2
		p := (1 + math.Sqrt((cv2-1)/(cv2+1))) / 2
		rate := 2 * p
		if rnd.Float64() > p {
			rate = 2 * (1 - p)
		}
		at += time.Duration(rnd.ExpFloat64() / rate * float64(time.Second))
		w.Requests = append(w.Requests, azure(rnd, at))
	}
	return w
}

func loras(n, slots, cpu int) func(int, *rand.Rand) *Workload {
	return func(count int, rnd *rand.Rand) *Workload {
		return WithAdapters(short(count, rnd), n, slots, cpu, rnd)
	}
}
