package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/internal/modelsim"
	"kvgate/pool"
)

// A simRequest is one request of a workload.
type simRequest struct {
	at             time.Duration
	input, output  int
	adapter        int32    // 0 is the base model
	blocks         []uint64 // of simBlock tokens
	slo            time.Duration
	first, ended   time.Duration
	engineRequest  modelsim.Request
	booking        pool.Booking
	decision       Decision
	firstDelivered bool
}

const simBlock = 256

// simOptions describe one run.
type simOptions struct {
	replicas int
	profiles []string // by replica, in turn; nil is the default profile
	slots    int      // max_loras
	adapters int
	scrape   time.Duration
	policy   Config
	seed     uint64
	hidden   bool // responses aren't streamed: pending tokens are cleared by prediction
}

type simResult struct {
	mean, p50, p99 time.Duration // time to the first token
	attained       float64       // share with TTFT < max(2 s, 3 × own unloaded prefill) and TPOT < 100 ms
	hit            float64       // prefix hit share of tokens
	preemptions    uint64
	loads          uint64
	counts         []int
}

func (r simResult) String() string {
	return fmt.Sprintf("TTFT mean %.3f p50 %.3f p99 %.2f s, SLO %.1f %%, hit %.3f, preempted %d, loads %d, counts %v",
		r.mean.Seconds(), r.p50.Seconds(), r.p99.Seconds(), 100*r.attained, r.hit, r.preemptions, r.loads, r.counts)
}

// simulate runs requests through a policy and engines in virtual time.
func simulate(t testing.TB, o simOptions, requests []*simRequest) simResult {
	t.Helper()
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	specs := make([]pool.Spec, o.replicas)
	for i := range specs {
		specs[i] = pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 10000+i)}
	}
	const origin = second0
	if _, _, err := tab.SetEndpoints("p", specs, origin); err != nil {
		t.Fatal(err)
	}
	names := make([]string, o.adapters+1)
	models := []pool.Model{{ID: "m"}}
	for a := 1; a <= o.adapters; a++ {
		names[a] = fmt.Sprintf("adapter-%d", a)
		models = append(models, pool.Model{ID: names[a], Parent: "m"})
	}
	o.policy.Rand = seeded(o.seed)
	policy := newPolicy(t, o.policy)

	engines := make([]*modelsim.Engine, o.replicas)
	rows := tab.Load().Rows
	endpoints := make([]*pool.Endpoint, o.replicas)
	for i := range engines {
		name := ""
		if o.profiles != nil {
			name = o.profiles[i%len(o.profiles)]
		}
		prof, err := modelsim.ProfileByName(name)
		if err != nil {
			t.Fatal(err)
		}
		engines[i], err = modelsim.NewEngine(modelsim.EngineOptions{
			Profile: prof, MaxBatchTokens: 2048, PromptBlockTokens: simBlock, MaxLoras: o.slots, MaxCPULoras: 32,
			Hooks: modelsim.Hooks{
				FirstToken: func(r *modelsim.Request, at time.Duration) {
					q := r.Tag.(*simRequest)
					if q.firstDelivered {
						return
					}
					q.firstDelivered, q.first = true, at
					if !o.hidden {
						q.booking.FirstToken()
						policy.FirstToken(&q.decision, at-q.at)
					}
				},
				Finished: func(r *modelsim.Request, at time.Duration) {
					q := r.Tag.(*simRequest)
					q.ended = at
					q.booking.End()
					u := Usage{PromptTokens: int32(q.input), CachedTokens: int32(r.CachedTokens), OutputTokens: int32(q.output), Duration: at - q.first}
					policy.End(&q.decision, u)
				},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		endpoints[i] = rows[i].Endpoint
		tab.SetServed(endpoints[i], &pool.Served{Models: models, At: origin})
	}

	var running, inFlight []int32
	scrapeAll := func(now time.Duration) {
		for i, e := range engines {
			st := e.Stats()
			l := idle()
			l.Running, l.Waiting = int32(st.Running), int32(st.Waiting)
			l.KVCacheUtilization, l.KVCapacityTokens = st.KVUtilization(), int64(e.KVTokens())
			l.MaxAdapters = int32(o.slots)
			running, inFlight = e.AppendAdapters(running[:0], inFlight[:0])
			for _, a := range inFlight {
				l.Adapters = append(l.Adapters, names[a])
			}
			slices.Sort(l.Adapters)
			scrape(tab, endpoints[i], l, origin.Add(now))
		}
	}
	scrapeAll(0)

	var timers []*simRequest // of hidden first tokens; few enough to scan
	nextScrape := o.scrape
	res := simResult{counts: make([]int, o.replicas)}
	for i := range requests {
		q := requests[i]
		for nextScrape <= q.at {
			for _, e := range engines {
				e.Advance(nextScrape)
			}
			scrapeAll(nextScrape)
			nextScrape += o.scrape
		}
		for _, e := range engines {
			e.Advance(q.at)
		}
		timers = slices.DeleteFunc(timers, func(q2 *simRequest) bool {
			due := q2.at+policy.PredictFirstToken(&q2.decision) <= q.at
			if due {
				q2.booking.FirstToken()
			}
			return due
		})
		s := tab.Load()
		name := "m"
		if q.adapter > 0 {
			name = names[q.adapter]
		}
		req := &Request{Target: s.TargetString(name), PromptTokens: int32(q.input), Stream: !o.hidden, Prefix: q.blocks, BlockTokens: simBlock}
		var err error
		if q.decision, err = policy.Choose(req, s, origin.Add(q.at), &q.booking); err != nil {
			t.Fatal(err)
		}
		if o.hidden {
			timers = append(timers, q)
		}
		k := s.RowOf(q.decision.Endpoint.Slot)
		res.counts[k]++
		q.engineRequest = modelsim.Request{ID: uint64(i), PromptTokens: q.input, OutputTokens: q.output, Blocks: q.blocks, Adapter: q.adapter, Tag: q}
		if err := engines[k].Submit(&q.engineRequest, q.at); err != nil {
			t.Fatal(err)
		}
	}
	end := requests[len(requests)-1].at + time.Hour
	for _, e := range engines {
		e.Advance(end)
	}

	var ttft []time.Duration
	var sum time.Duration
	hit, queried, attained := 0, 0, 0
	measured := requests[len(requests)/10:]
	for i := range measured {
		q := measured[i]
		if q.ended == 0 {
			t.Fatalf("request %d has not ended", i)
		}
		if q.booking.Held() {
			t.Fatalf("request %d still holds a booking", i)
		}
		d := q.first - q.at
		ttft = append(ttft, d)
		sum += d
		tpot := time.Duration(0)
		if q.output > 1 {
			tpot = (q.ended - q.first) / time.Duration(q.output-1)
		}
		if d < max(2*time.Second, q.slo) && tpot < 100*time.Millisecond {
			attained++
		}
		hit += q.engineRequest.CachedTokens
		queried += q.input
	}
	slices.Sort(ttft)
	res.mean = sum / time.Duration(len(ttft))
	res.p50, res.p99 = ttft[len(ttft)/2], ttft[len(ttft)*99/100]
	res.attained = float64(attained) / float64(len(ttft))
	res.hit = float64(hit) / float64(queried)
	for i, e := range engines {
		st := e.Stats()
		res.preemptions += st.Preemptions
		res.loads += st.AdapterHostLoads
		if b := endpoints[i].Booked(); b != (pool.Booked{}) {
			t.Errorf("endpoint %d holds %+v at the end; want nothing", i, b)
		}
	}
	return res
}

// lognormal draws with the given mean and median.
func lognormal(r *rand.Rand, mean, median float64) float64 {
	sigma := math.Sqrt(2 * math.Log(mean/median))
	return median * math.Exp(sigma*r.NormFloat64())
}

func clampInt(v float64, lo, hi int) int { return min(max(int(v), lo), hi) }

// sloOf is 3 × the unloaded prefill of n tokens on the default profile, whose cost is about 22 µs a token and 0.65 ns a
// token squared.
func sloOf(n int) time.Duration {
	return 3 * time.Duration((22e-6*float64(n)+0.65e-9*float64(n)*float64(n))*1e9)
}

// loraWorkload is short chats behind a system prompt of 1,024 tokens per adapter, Zipf(1) over the adapters.
func loraWorkload(seed uint64, n, adapters int, rate float64) []*simRequest {
	r := rand.New(rand.NewPCG(seed, 7))
	weights := make([]float64, adapters)
	total := 0.0
	for k := range weights {
		total += 1 / float64(k+1)
		weights[k] = total
	}
	// Which adapter is the hottest must not be told by its number.
	perm := r.Perm(adapters)
	out := make([]*simRequest, n)
	at := 0.0
	for i := range out {
		at += r.ExpFloat64() / rate
		k, _ := slices.BinarySearch(weights, r.Float64()*total)
		q := new(simRequest)
		out[i] = q
		q.at = time.Duration(at * 1e9)
		q.adapter = int32(perm[min(k, adapters-1)] + 1)
		q.input = 1024 + clampInt(lognormal(r, 1155, 900), 20, 8000)
		q.output = clampInt(lognormal(r, 211, 129), 2, 1000)
		q.slo = sloOf(q.input)
		q.blocks = chain(q.blocks, uint64(q.adapter), 4)
		q.blocks = chain(q.blocks, r.Uint64(), q.input/simBlock-4)
	}
	return out
}

// chain appends n chained block ids of content.
func chain(blocks []uint64, content uint64, n int) []uint64 {
	h := content
	if len(blocks) > 0 {
		h = mix(blocks[len(blocks)-1], content)
	}
	for i := range n {
		h = mix(h, uint64(i)+content)
		blocks = append(blocks, h)
	}
	return blocks
}

// conversationWorkload is chats of several turns with long documents, as in the published conversation traces: most
// prompts are long, some very long, and a turn carries all that was before it.
func conversationWorkload(seed uint64, n int, rate float64) []*simRequest {
	r := rand.New(rand.NewPCG(seed, 9))
	var out []*simRequest
	at := 0.0
	for len(out) < n*5/4 {
		at += r.ExpFloat64() / rate * 2 // two turns on average
		id := r.Uint64()
		blocks := chain(nil, 1, 2) // one system prompt for all
		input := clampInt(lognormal(r, 11_000, 6_500), 600, 110_000)
		when := at
		for turn := range 1 + r.IntN(3) {
			blocks = chain(blocks, id+uint64(turn), input/simBlock-len(blocks))
			output := clampInt(lognormal(r, 343, 300), 2, 1500)
			out = append(out, &simRequest{
				at: time.Duration(when * 1e9), input: input, output: output, slo: sloOf(input), blocks: slices.Clone(blocks),
			})
			when += 20 + 40*r.ExpFloat64()
			input = min(input+output+clampInt(lognormal(r, 700, 300), 20, 20_000), 120_000)
		}
	}
	slices.SortFunc(out, func(a, b *simRequest) int { return int(a.at - b.at) })
	return out[:n]
}

func compare(t *testing.T, o simOptions, make func(seed uint64) []*simRequest, policies ...string) map[string]simResult {
	t.Helper()
	out := map[string]simResult{}
	for _, name := range policies {
		o.policy = Config{Name: name}
		if strings.HasPrefix(name, "weights") {
			o.policy = Config{Weights: map[string]float64{"queue": 2, "kv_cache": 2, "prefix": 3, "lora_affinity": 1}}
		}
		if name == "auto" || name == "weights" {
			o.policy.Index = NewIndex(8 << 20)
		}
		out[name] = simulate(t, o, make(o.seed))
		t.Logf("%-16s %v", name, out[name])
	}
	return out
}
