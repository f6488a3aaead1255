package scoring

import (
	"math"
	"slices"

	"kvgate/pool"
)

const autoFormula = "argmin pending + 2.5·new + 0.1·kv + 2·overflow + adapter, in prefill tokens × slowness"

// CostWeights are the weights of the policy `auto`. A zero field means its default; everything is flat around the
// defaults, so there is nothing to tune per workload (docs/routing.md).
type CostWeights struct {
	OwnWork  float32 // w: how much a request's own prefill counts beside its wait, since it also delays others (1.5)
	KV       float32 // per KV token in use: decode batches slow down slowly (0.1)
	Overflow float32 // per token of need beyond Guard: preemption recomputes (2)
	Guard    float32 // share of the KV cache that is left to be filled, 0..1 (0.95)

	// Shared is the part of a cached prefix, 0..1, that is taken to be in use by others already, and so needs no KV space
	// of its own (0.75): a document that is asked about is being asked about by several.
	Shared float32

	// Of an adapter's price; see adapterPrice.
	AdapterLoad  float32 // per second of loading it (10): all who run there wait, and another adapter leaves host memory
	AdapterSlot  float32 // per second of waiting for a slot there (2)
	AdapterQueue float32 // the same where it waits already (0.5): the request comes in with the others
	AdapterTwice float32 // per second of holding a slot here while it holds one elsewhere (4)

	StaleTokens     float32 // handicap of an endpoint whose load is unknown or stale (16384)
	SlowStartTokens float32 // handicap of an endpoint that just came back, falling to 0 over SlowStart (16384)

	// What nobody holds yet goes to its first choice under rendezvous hashing among endpoints whose cost is within
	// MarginTokens + MarginShare · new of the best (256, 0.05), so that gateways which share nothing agree. MarginForeign (2) is
	// added to MarginShare times the share of requests that others sent: that share of all conversations has begun with them.
	MarginTokens, MarginShare, MarginForeign float32
}

func (w CostWeights) withDefaults() CostWeights {
	return CostWeights{
		OwnWork:         orDefault(w.OwnWork, 1.5),
		KV:              orDefault(w.KV, 0.1),
		Overflow:        orDefault(w.Overflow, 2),
		Guard:           orDefault(w.Guard, 0.95),
		Shared:          orDefault(w.Shared, 0.75),
		AdapterLoad:     orDefault(w.AdapterLoad, 10),
		AdapterSlot:     orDefault(w.AdapterSlot, 2),
		AdapterQueue:    orDefault(w.AdapterQueue, 0.5),
		AdapterTwice:    orDefault(w.AdapterTwice, 4),
		StaleTokens:     orDefault(w.StaleTokens, 16384),
		SlowStartTokens: orDefault(w.SlowStartTokens, 16384),
		MarginTokens:    orDefault(w.MarginTokens, 256),
		MarginShare:     orDefault(w.MarginShare, 0.05),
		MarginForeign:   orDefault(w.MarginForeign, 2),
	}
}

// tierCost separates the tiers: no cost comes near it, and float32 still tells costs apart beside it.
var tierCost = [...]float32{tierGood: 0, tierBusy: 1 << 26, tierEjected: 1 << 27, tierOut: math.MaxFloat32}

// Terms are the parts of an endpoint's cost under `auto`, in prefill tokens.
type Terms struct {
	Pending   float32 `json:"pending"`    // uncached prompt tokens ahead that have not reached their first token
	New       float32 `json:"new"`        // this request's tokens that are not in the prefix cache, times 1+w
	KV        float32 `json:"kv"`         // KV tokens in use, lightly
	Overflow  float32 `json:"overflow"`   // need beyond the guard
	Adapter   float32 `json:"adapter"`    // loading the adapter, and taking a slot for it
	Stale     float32 `json:"stale"`      // handicap: load unknown or too old
	SlowStart float32 `json:"slow_start"` // handicap: came back from an ejection
	Slowness  float32 `json:"slowness"`   // factor on the sum: how much slower this endpoint prefills than its peers
}

// Sum is the cost.
func (t *Terms) Sum() float32 {
	return (t.Pending+t.New+t.KV+t.Overflow)*t.Slowness + t.Adapter + t.Stale + t.SlowStart
}

// price are the numbers that one decision's costs have in common.
type price struct {
	w          *CostWeights
	own        float32 // (1 + w) · prompt
	need       float32
	waiting    float32 // tokens that a foreign waiting request stands for
	now        pool.Instant
	staleAfter pool.Instant
	slowStart  pool.Instant
}

// of is the cost of r without its prefix cache and adapters. It touches the row and its counters: two cache lines. The
// parts go to t unless that is nil.
func (x *price) of(r *pool.Row, t *Terms) float32 {
	b := r.Booked()
	slowness, learnedKV := r.Learned()
	used, capacity := float32(b.KVTokens), float32(r.KVCapacity)
	if slowness == 0 {
		slowness = 1
	}
	pending, stale, slow, overflow := float32(b.PendingTokens), float32(0), float32(0), float32(0)
	if r.Fresh(x.now, x.staleAfter) {
		pending += float32(r.Foreign.Waiting) * x.waiting
		used += float32(r.Foreign.KVTokens)
		if capacity == 0 && r.Load.Known.Has(pool.KnowsKVCacheUtilization) {
			// Slow path: fullness is known and size is not.
			used = max(used, float32(r.Load.KVCacheUtilization)*learnedOr(learnedKV))
		}
	} else {
		stale = x.w.StaleTokens
	}
	if capacity == 0 {
		capacity = learnedOr(learnedKV)
	}
	overflow = x.w.Overflow * max(0, used+x.need-x.w.Guard*capacity)
	if r.Weight != 1 {
		slowness /= r.Weight
	}
	if back := r.EjectedUntil(); back != 0 && back <= x.now && x.now-back < x.slowStart {
		slow = x.w.SlowStartTokens * float32(x.slowStart-(x.now-back)) / float32(x.slowStart)
	}
	kv := x.w.KV * used
	if t != nil {
		*t = Terms{Pending: pending, New: x.own, KV: kv, Overflow: overflow, Stale: stale, SlowStart: slow, Slowness: slowness}
	}
	return (pending+x.own+kv+overflow)*slowness + stale + slow
}

// overflow is that term of of.
func (x *price) overflow(r *pool.Row) float32 {
	used, capacity, _ := kvUse(r, r.Booked().KVTokens, r.Fresh(x.now, x.staleAfter))
	return x.w.Overflow * max(0, float32(used)+x.need-x.w.Guard*float32(capacity))
}

// priorKVCapacity is believed of an endpoint that tells neither its KV size nor enough to learn it: an 8B model on a GPU
// with 40 GB. Too small a number only makes full endpoints look full early, all alike.
const priorKVCapacity = 200_000

func learnedOr(learned float32) float32 {
	if learned > 0 {
		return learned
	}
	return priorKVCapacity
}

// kvUse is the KV tokens in use on r and its capacity, given what is booked.
func kvUse(r *pool.Row, booked int64, fresh bool) (used, capacity float64, known bool) {
	_, learned := r.Learned()
	used, capacity = float64(booked), float64(r.KVCapacity)
	if capacity == 0 {
		capacity = float64(learnedOr(learned))
	}
	if !fresh || !r.Load.Known.Has(pool.KnowsKVCacheUtilization) {
		return used, capacity, false
	}
	if r.KVCapacity == 0 {
		return max(used, r.Load.KVCacheUtilization*capacity), capacity, true
	}
	return used + float64(r.Foreign.KVTokens), capacity, true
}

// auto chooses the row with the least cost.
func (p *Policy) auto(sc *scratch, rec *recorder, d *Decision) (version uint64, err error) {
	c := &sc.candidates
	rows := c.target.Rows
	if cap(sc.cost) < len(rows) {
		n := len(rows) + len(rows)/4
		sc.cost, sc.versions = make([]float32, n), make([]uint64, n)
	}
	cost, versions := sc.cost[:len(rows)], sc.versions[:len(rows)]
	x := &sc.price
	*x = price{
		w:          &p.cost,
		own:        (1 + p.cost.OwnWork) * float32(c.prompt),
		need:       float32(c.need),
		waiting:    float32(p.learn.meanNewTokens()),
		now:        c.now,
		staleAfter: p.staleAfter,
		slowStart:  p.slowStart,
	}

	// plain says that state, size, ejection and backpressure are all that can keep this request from a row.
	plain := rec == nil && c.tries == 0 && (c.target.MinModelLen == 0 || int64(c.least) <= c.target.MinModelLen)
	size := max(c.least, 1) // of a KV cache that is known and takes the request
	waiting, own, kv, need, guard, overflow := x.waiting, x.own, x.w.KV, x.need, x.w.Guard, x.w.Overflow
	all := c.snapshot.Rows
	best := float32(math.MaxFloat32)
	ours, others := int64(0), int64(0) // requests
	for i, ri := range rows {
		r := &all[ri]
		versions[i] = r.Version() // before the counters are read
		if plain && r.State&(pool.Unroutable|pool.Unreachable|pool.Blind) == 0 && r.KVCapacity >= size && r.Weight == 1 &&
			r.ScrapedAt != 0 && c.now-r.ScrapedAt <= x.staleAfter && r.Untroubled() {
			// Fast path: no filter objects, and the row is as nearly all are. This is what of comes to then, written where
			// it is used since it is most of what a decision among a thousand endpoints costs.
			b := r.Booked()
			ours, others = ours+b.Requests, others+int64(r.Foreign.Requests)
			used := float32(int32(b.KVTokens)) + float32(r.Foreign.KVTokens)
			v := float32(int32(b.PendingTokens)) + float32(r.Foreign.Waiting)*waiting + own + kv*used
			if over := used + need - guard*float32(r.KVCapacity); over > 0 {
				v += overflow * over
			}
			if slowness, _ := r.Learned(); slowness != 0 {
				v *= slowness
			}
			if cost[i] = v; v < best {
				best = v
			}
			continue
		}
		t, f := c.judge(r)
		if rec != nil {
			rec.judged(c, ri, t, f)
		}
		if t == tierOut {
			cost[i] = math.MaxFloat32
			continue
		}
		ours, others = ours+r.Booked().Requests, others+int64(r.Foreign.Requests)
		cost[i] = x.of(r, rec.termsOf(ri)) + tierCost[t]
		best = min(best, cost[i])
	}

	longest, held := 0, int32(0) // blocks and tokens of the prompt that somebody holds
	for _, m := range c.matched {
		i := position(rows, m.row)
		if i < 0 || cost[i] == math.MaxFloat32 {
			continue
		}
		longest, held = max(longest, m.blocks), max(held, m.tokens)
		r := &c.snapshot.Rows[m.row]
		overflow := min(x.overflow(r), x.w.Overflow*x.w.Shared*float32(m.tokens))
		saved := (1+x.w.OwnWork)*float32(m.tokens) + overflow
		if s, _ := r.Learned(); s != 0 {
			saved *= s
		}
		if r.Weight != 1 {
			saved /= r.Weight
		}
		cost[i] -= saved
		best = min(best, cost[i])
		if rec != nil {
			rec.cached(m, overflow)
		}
	}

	margin := x.w.MarginTokens + x.w.MarginShare*float32(c.prompt-held)
	if others > 0 {
		margin += x.w.MarginForeign * float32(others) / float32(ours+others) * float32(c.prompt-held)
	}
	var key uint64 // what rendezvous hashing hashes: the first thing that nobody holds
	if len(c.req.Prefix) > longest {
		key = c.req.Prefix[longest]
	}
	a := c.req.adapter()
	if a != 0 {
		sc.sharers = sharers(ours, others)
		if !p.adapterPrices(sc, x, cost, rec) {
			key = a
		}
		best = least(cost)
	}
	if best == math.MaxFloat32 {
		return 0, c.nothing()
	}
	pick, first, second, tied := p.pickLeast(c, cost, best+margin, key)
	for a != 0 && (p.priceOf(sc, first, cost) || pick >= 0 && p.priceOf(sc, pick, cost)) {
		best = least(cost)
		pick, first, second, tied = p.pickLeast(c, cost, best+margin, key)
	}
	if key == 0 {
		if pick = first; tied {
			pick = p.uniformMin(cost, best)
		}
	}
	if pick != first {
		second = first
	}

	c.tier = tierGood
	switch {
	case best >= tierCost[tierEjected]/2+tierCost[tierBusy]/2:
		c.tier = tierEjected
	case best >= tierCost[tierBusy]/2:
		c.tier = tierBusy
	}
	ri := rows[pick]
	cached := int32(0)
	for _, m := range c.matched {
		if m.row == ri {
			cached = m.tokens
		}
	}
	p.decide(c, int(ri), cached, d)
	// The tier of the chosen one is no part of what it costs.
	d.Cost = cost[pick] - tierCost[c.tier]
	if second >= 0 && cost[second] != math.MaxFloat32 {
		d.RunnerUp, d.RunnerUpCost = all[rows[second]].Endpoint, cost[second]-tierCost[c.tier]
	}
	if rec != nil {
		rec.costs(c, cost)
	}
	return versions[pick], nil
}

func least(cost []float32) float32 {
	best := float32(math.MaxFloat32)
	for _, v := range cost {
		if v < best { // unlike min, which minds NaN
			best = v
		}
	}
	return best
}

// pickLeast finds the positions of the two least costs and, if there is a key, of its first choice under rendezvous hashing
// among those up to limit; -1 is none. Of equal costs the first come is first, and tied says that there are such.
func (p *Policy) pickLeast(c *Candidates, cost []float32, limit float32, key uint64) (pick, first, second int, tied bool) {
	pick, first, second = -1, -1, -1
	firstCost, secondCost := float32(math.MaxFloat32), float32(math.MaxFloat32)
	for i, v := range cost {
		if v < secondCost {
			if second, secondCost = i, v; v < firstCost {
				second, secondCost, first, firstCost = first, firstCost, i, v
			}
		}
	}
	if key != 0 {
		highest := uint64(0)
		for i, v := range cost {
			if v <= limit {
				if h := pool.Rendezvous(c.snapshot.IDHash(c.target.Rows[i]), key); pick < 0 || h > highest {
					pick, highest = i, h
				}
			}
		}
	}
	return pick, first, second, secondCost == firstCost
}

// position is where row is in rows, which ascend; -1 if it isn't.
func position(rows []int32, row int32) int {
	if i := int(row - rows[0]); i >= 0 && i < len(rows) && rows[i] == row {
		return i // Fast path: all rows of a pool serve its model.
	}
	if i, ok := slices.BinarySearch(rows, row); ok {
		return i
	}
	return -1
}

// uniformMin returns a position of best in cost, each as likely as the others.
func (p *Policy) uniformMin(cost []float32, best float32) int {
	ties, first := uint64(0), -1
	for i, v := range cost {
		if v == best {
			if ties++; first < 0 {
				first = i
			}
		}
	}
	if ties == 1 {
		return first
	}
	n := p.rand(ties)
	for i := first; ; i++ {
		if cost[i] == best {
			if n == 0 {
				return i
			}
			n--
		}
	}
}
