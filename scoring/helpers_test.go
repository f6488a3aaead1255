package scoring

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"kvgate/pool"
)

// second0 is the instant at which the tests' tables were scraped.
const second0 = pool.Instant(1_000_000_000_000)

// seeded is a Rand for Config that gives the same numbers each run.
func seeded(seed uint64) func(uint64) uint64 {
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(seed, 1))
	return func(n uint64) uint64 {
		mu.Lock()
		defer mu.Unlock()
		return r.Uint64N(n)
	}
}

// idle is the load of a vLLM server with nothing to do.
func idle() pool.Load {
	return pool.Load{
		Known: pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity |
			pool.KnowsAdapters | pool.KnowsMaxAdapters,
		KVCapacityTokens: 421_000,
		MaxAdapters:      4,
		PromptTokens:     -1, GenerationTokens: -1, PrefixHitTokens: -1, PrefixQueryTokens: -1, Preemptions: -1,
	}
}

// newTable makes n endpoints that serve the base model "m" and the adapters a0 … a9, scraped at second0 with the load that
// load gives for each (idle if nil).
func newTable(t testing.TB, n int, load func(i int) pool.Load) *pool.Table {
	t.Helper()
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	specs := make([]pool.Spec, n)
	for i := range specs {
		specs[i] = pool.Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 10000+i)}
	}
	if _, _, err := tab.SetEndpoints("p", specs, second0); err != nil {
		t.Fatal(err)
	}
	models := []pool.Model{{ID: "m", MaxModelLen: 131072}}
	for i := range 10 {
		if n > 100 {
			break // every SetServed indexes the table anew
		}
		models = append(models, pool.Model{ID: fmt.Sprintf("a%d", i), Parent: "m", MaxModelLen: 131072})
	}
	for i := range tab.Load().Rows {
		e := tab.Load().Rows[i].Endpoint
		tab.SetServed(e, &pool.Served{Models: models, At: second0})
		scrape(tab, e, idle(), second0)
	}
	if load != nil {
		for i := range tab.Load().Rows {
			scrape(tab, tab.Load().Rows[i].Endpoint, load(i), second0)
		}
	}
	return tab
}

func scrape(tab *pool.Table, e *pool.Endpoint, l pool.Load, at pool.Instant) {
	tab.Observe(e, pool.Observation{Load: &l, At: at, Before: e.Booked()})
}

func newPolicy(t testing.TB, c Config) *Policy {
	t.Helper()
	if c.Rand == nil {
		c.Rand = seeded(1)
	}
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func request(s *pool.Snapshot, model string, prompt int32) *Request {
	return &Request{Target: s.TargetString(model), PromptTokens: prompt, Stream: true}
}

// choose books a request and returns the row it went to.
func choose(t testing.TB, p *Policy, req *Request, s *pool.Snapshot, b *pool.Booking) int {
	t.Helper()
	d, err := p.Choose(req, s, second0+1, b)
	if err != nil {
		t.Fatal(err)
	}
	return int(s.RowOf(d.Endpoint.Slot))
}

// everyPolicy runs f for each named policy and for weights of every scorer.
func everyPolicy(t *testing.T, f func(t *testing.T, c Config)) {
	for _, name := range PolicyNames() {
		t.Run(name, func(t *testing.T) { f(t, Config{Name: name}) })
	}
	all := map[string]float64{}
	for _, s := range Scorers() {
		all[s.Name] = 1
	}
	t.Run("weights=all", func(t *testing.T) { f(t, Config{Weights: all}) })
	t.Run("weights=usual", func(t *testing.T) {
		f(t, Config{Weights: map[string]float64{"queue": 2, "kvCache": 2, "loraAffinity": 1}})
	})
}

// chiSquare is the statistic of counts against equal shares.
func chiSquare(counts []int) float64 {
	n := 0
	for _, c := range counts {
		n += c
	}
	want, x := float64(n)/float64(len(counts)), 0.0
	for _, c := range counts {
		x += (float64(c) - want) * (float64(c) - want) / want
	}
	return x
}

const aSecond = pool.Instant(time.Second)
