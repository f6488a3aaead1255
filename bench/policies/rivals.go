package policies

import (
	"math"
	"slices"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"kvgate/internal/modelsim"
)

// The rivals are scoring rules as their projects publish them, in one reading of their code, not their products.

// none is the part of a Router that a rule doesn't need.
type none struct{}

func (none) FirstToken(*Call, time.Duration) {}
func (none) Done(*Call, time.Duration)       {}
func (none) Scrape(int, Page, time.Duration) {}
func (none) Route(*Call, time.Duration) int  { return 0 }

// counting knows its own requests in flight, by replica.
type counting struct {
	none
	f        *Fleet
	inFlight []int
}

func newCounting(f *Fleet) counting { return counting{f: f, inFlight: make([]int, len(f.Engines))} }

func (c *counting) sent(replica int) int              { c.inFlight[replica]++; return replica }
func (c *counting) Done(q *Call, now time.Duration)   { c.inFlight[q.Replica]-- }
func (c *counting) argmin(cost func(int) float64) int { return c.f.argmin(cost) }

func (c *counting) argmax(score func(int) float64) int {
	return c.argmin(func(i int) float64 { return -score(i) })
}

// scraping also remembers the last page of each replica.
type scraping struct {
	counting
	pages []Page
}

func newScraping(f *Fleet) scraping {
	return scraping{newCounting(f), make([]Page, len(f.Engines))}
}

func (s *scraping) Scrape(replica int, p Page, _ time.Duration) { s.pages[replica] = p }

type routerFunc struct {
	counting
	route func(c *counting, q *Call) int
}

func (r *routerFunc) Route(q *Call, _ time.Duration) int { return r.sent(r.route(&r.counting, q)) }

func simple(name, doc string, route func(c *counting, q *Call) int) Policy {
	return Policy{Name: name, Doc: doc, New: func(f *Fleet) (Router, error) {
		return &routerFunc{newCounting(f), route}, nil
	}}
}

// Rivals are the policies that kvgate is compared with.
var Rivals = []Policy{
	simple("random", "uniformly random", func(c *counting, _ *Call) int { return c.f.anyUp() }),
	{Name: "round_robin", Doc: "in turn", New: func(f *Fleet) (Router, error) {
		i := f.Rand.IntN(len(f.Engines))
		return &routerFunc{newCounting(f), func(c *counting, _ *Call) int {
			for {
				if i++; f.Up[i%len(c.inFlight)] {
					return i % len(c.inFlight)
				}
			}
		}}, nil
	}},
	simple("power_of_two", "the less loaded of two at random, by requests in flight", func(c *counting, _ *Call) int {
		a := c.f.anyUp()
		b := a
		for b == a {
			b = c.f.anyUp()
		}
		if c.inFlight[b] < c.inFlight[a] {
			return b
		}
		return a
	}),
	simple("least_requests", "fewest requests in flight from this gateway", func(c *counting, _ *Call) int {
		return c.argmin(func(i int) float64 { return float64(c.inFlight[i]) })
	}),
	simple("consistent_hash", "KubeAI's rule: the prompt's first two blocks under rendezvous hashing, load at most 1.25 times the mean", func(c *counting, q *Call) int {
		h := uint64(q.Adapter)
		if n := min(2, len(q.Blocks)); n > 0 {
			h = chain(h, q.Blocks[n-1])
		} else {
			h = chain(h, uint64(q.Index))
		}
		total, up := 0, 0
		for i, n := range c.inFlight {
			if c.f.Up[i] {
				total, up = total+n, up+1
			}
		}
		bound := math.Ceil(1.25 * float64(total+1) / float64(up))
		best, at := uint64(0), -1
		for i, n := range c.inFlight {
			if w := mix(h ^ mix(uint64(i))); c.f.Up[i] && float64(n+1) <= bound && (at < 0 || w > best) {
				best, at = w, i
			}
		}
		return at
	}),
	{Name: "llm-d", Doc: "llm-d's default: queue 2, KV utilization 2, prefix 3 (at most 4,096 tokens, own LRU index), most points", New: newGIE(2, 2, 3, 0, false)},
	{Name: "llm-d+lora", Doc: "the same with LoRA affinity 1", New: newGIE(2, 2, 3, 1, false)},
	{Name: "llm-d-precise", Doc: "llm-d's precise profile: prefix from KV events, full length, 2; KV 1; queue 1", New: newGIE(1, 1, 2, 0, true)},
	{Name: "sglang", Doc: "SGLang's cache_aware: longest match above 30 %, else fewest in flight; shortest queue when out of balance (64, 1.5)", New: newSGLang},
	{Name: "dynamo", Doc: "Dynamo's KV router: uncached and active prefill plus active blocks, from KV events", New: newDynamo},
	{Name: "oracle", Doc: "perfect knowledge of every engine: least TTFT plus twice the own prefill work (Mooncake's Algorithm 1)", New: newOracle, shared: true},
}

// gie is the scoring of the Gateway API inference extension, which llm-d builds on.
type gie struct {
	scraping
	queue, kv, prefix, lora float64
	precise                 bool
	index                   []*simplelru.LRU[uint64, struct{}]
	matched                 []float64
}

func newGIE(queue, kv, prefix, lora float64, precise bool) func(*Fleet) (Router, error) {
	return func(f *Fleet) (Router, error) {
		g := &gie{scraping: newScraping(f), queue: queue, kv: kv, prefix: prefix, lora: lora, precise: precise}
		g.matched = make([]float64, len(f.Engines))
		for _, e := range f.Engines {
			l, err := simplelru.NewLRU[uint64, struct{}](max(1, e.KVTokens()/f.Workload.BlockTokens), nil)
			if err != nil {
				return nil, err
			}
			g.index = append(g.index, l)
		}
		return g, nil
	}
}

// gieMaxTokens is how much of a prompt the default profile's index looks at: 256 blocks of 16 tokens.
const gieMaxTokens = 4096

func (g *gie) Route(q *Call, _ time.Duration) int {
	blocks := q.Blocks
	if !g.precise {
		blocks = blocks[:min(len(blocks), gieMaxTokens/g.f.Workload.BlockTokens)]
	}
	for i := range g.index {
		n := 0
		if g.precise {
			n = g.f.Engines[i].CachedBlocks(blocks)
		} else {
			for n < len(blocks) && g.index[i].Contains(blocks[n]) {
				n++
			}
		}
		g.matched[i] = float64(n) / max(1, float64(len(blocks)))
	}
	lo, hi := math.MaxInt, 0
	for _, p := range g.pages {
		lo, hi = min(lo, p.Waiting), max(hi, p.Waiting)
	}
	r := g.argmax(func(i int) float64 {
		p := &g.pages[i]
		queue := 1.0
		if hi > lo {
			queue = float64(hi-p.Waiting) / float64(hi-lo)
		}
		return g.queue*queue + g.kv*(1-p.KVCacheUtilization) + g.prefix*g.matched[i] + g.lora*g.affinity(p, q.Adapter)
	})
	if !g.precise {
		for j := len(blocks) - 1; j >= 0; j-- { // heads last, so that they stay longest
			g.index[r].Add(blocks[j], struct{}{})
		}
	}
	return g.sent(r)
}

func (g *gie) affinity(p *Page, adapter int32) float64 {
	switch {
	case adapter == 0, slices.Contains(p.AdaptersRunning, adapter):
		return 1
	case len(p.AdaptersInFlight) < p.MaxLoras:
		return 0.8
	case slices.Contains(p.AdaptersInFlight, adapter):
		return 0.6
	}
	return 0
}

type sglang struct {
	counting
	index []*simplelru.LRU[uint64, struct{}]
}

func newSGLang(f *Fleet) (Router, error) {
	s := &sglang{counting: newCounting(f)}
	for range f.Engines {
		// Its tree holds up to 2^26 characters by default, about 2^24 tokens.
		l, err := simplelru.NewLRU[uint64, struct{}](1<<24/f.Workload.BlockTokens, nil)
		if err != nil {
			return nil, err
		}
		s.index = append(s.index, l)
	}
	return s, nil
}

func (s *sglang) Route(q *Call, _ time.Duration) int {
	lo, hi := slices.Min(s.inFlight), slices.Max(s.inFlight)
	fewest := func() int { return s.argmin(func(i int) float64 { return float64(s.inFlight[i]) }) }
	var r int
	if hi-lo > 64 && float64(hi) > 1.5*float64(lo) {
		r = fewest()
	} else {
		match := func(i int) float64 {
			n := 0
			for n < len(q.Blocks) && s.index[i].Contains(q.Blocks[n]) {
				n++
			}
			return float64(n) / max(1, float64(len(q.Blocks)))
		}
		if r = s.argmax(match); match(r) <= 0.3 {
			r = fewest()
		}
	}
	for j := len(q.Blocks) - 1; j >= 0; j-- {
		s.index[r].Add(q.Blocks[j], struct{}{})
	}
	return s.sent(r)
}

type dynamo struct {
	counting
	prefill, blocks []float64
}

type dynamoState struct{ prefill, blocks float64 }

func newDynamo(f *Fleet) (Router, error) {
	n := len(f.Engines)
	return &dynamo{newCounting(f), make([]float64, n), make([]float64, n)}, nil
}

func (d *dynamo) Route(q *Call, _ time.Duration) int {
	size := float64(d.f.Workload.BlockTokens)
	need := func(i int) (fresh, blocks float64) {
		cached := float64(d.f.Engines[i].CachedBlocks(q.Blocks)) * size
		return (float64(q.In) - cached) / size, (float64(q.In) - cached) / size
	}
	r := d.argmin(func(i int) float64 {
		fresh, blocks := need(i)
		return d.prefill[i] + fresh + d.blocks[i] + blocks
	})
	fresh, _ := need(r)
	st := &dynamoState{prefill: fresh, blocks: float64(q.In) / size}
	q.state = st
	d.prefill[r] += st.prefill
	d.blocks[r] += st.blocks
	return d.sent(r)
}

func (d *dynamo) FirstToken(q *Call, _ time.Duration) {
	st := q.state.(*dynamoState)
	d.prefill[q.Replica] -= st.prefill
	st.prefill = 0
}

func (d *dynamo) Done(q *Call, now time.Duration) {
	d.FirstToken(q, now)
	d.blocks[q.Replica] -= q.state.(*dynamoState).blocks
	d.counting.Done(q, now)
}

type oracle struct{ counting }

func newOracle(f *Fleet) (Router, error) { return &oracle{newCounting(f)}, nil }

func (o *oracle) Route(q *Call, now time.Duration) int {
	r := modelsim.Request{PromptTokens: q.In, OutputTokens: q.Out, Blocks: q.Blocks, Adapter: q.Adapter}
	return o.sent(o.argmin(func(i int) float64 {
		e := o.f.Engines[i]
		own := e.PrefillTime(q.In, e.CachedTokens(&r), q.Adapter > 0)
		if gpu, host := e.AdapterResident(q.Adapter); q.Adapter > 0 && !gpu {
			own += adapterHostLoad // a load stalls the whole batch: it is work that the others pay for, too
			if !host {
				own += adapterDiskLoad
			}
		}
		return (e.EstimateTTFT(&r, now) + 2*own).Seconds()
	}))
}
