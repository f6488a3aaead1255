package scoring

import (
	"math"
	"slices"

	"kvgate/pool"
)

// An adapterView is what is believed of one adapter on one endpoint.
type adapterView struct {
	resident bool // it is in one of the server's slots, or has requests in flight there
	inFlight bool // requests for it are running or waiting there: ours, or others' as of the scrape
	others   int  // distinct other adapters with requests in flight
	slots    int  // distinct adapters that one batch can hold
}

// defaultAdapterSlots is believed of a server that does not say how many adapters a batch can hold.
const defaultAdapterSlots = 4

// viewAdapter looks at the adapter that target names, on r. Servers list adapters with work in flight only; the gateway's
// own memory knows those that sit idle in a slot.
func viewAdapter(r *pool.Row, target *pool.Target, fresh bool) (v adapterView) {
	m := r.Endpoint.Adapters()
	l := r.Load
	v.slots = defaultAdapterSlots
	if l.Known.Has(pool.KnowsMaxAdapters) && l.MaxAdapters > 0 {
		v.slots = int(l.MaxAdapters)
	}
	v.others = m.Active()
	use, known := m.Use(target.Hash)
	if known {
		v.inFlight = use.InFlight > 0
		v.resident = v.inFlight || use.Newer < v.slots
		if v.inFlight {
			v.others--
		}
	}
	if fresh && l.Known.Has(pool.KnowsAdapters) {
		_, listed := slices.BinarySearch(l.Adapters, target.Name)
		foreign := len(l.Adapters)
		if listed {
			foreign--
			v.resident = true
			// What is listed and not ours is somebody else's, unless the list is older than the end of our own requests.
			v.inFlight = v.inFlight || !known
		}
		v.others = max(v.others, foreign)
	} else if fresh && l.Known.Has(pool.KnowsAdapterSlots) {
		v.others = max(v.others, int(l.AdapterSlotsUsed))
	}
	return v
}

// adapterPrices adds what the request's adapter costs on each row, and reports whether any row holds it. Rows that cannot
// come within margin of the best are left out: their cost becomes the largest there is.
func (p *Policy) adapterPrices(sc *scratch, x *price, cost []float32, margin float32, rec *recorder) (held bool) {
	c := &sc.candidates
	best := float32(math.MaxFloat32)
	for i, ri := range c.target.Rows {
		if cost[i] == math.MaxFloat32 {
			continue
		}
		if cost[i] > best+margin && rec == nil {
			cost[i] = math.MaxFloat32 // Fast path: prices are not negative
			continue
		}
		r := &c.snapshot.Rows[ri]
		v := viewAdapter(r, c.target, r.Fresh(x.now, x.staleAfter))
		held = held || v.resident
		t := p.adapterPrice(r.Endpoint, v)
		cost[i] += t
		best = min(best, cost[i])
		if rec != nil {
			rec.adapter(ri, t)
		}
	}
	return held
}

// adapterPrice is the cost of a request for an adapter on e, in prefill tokens.
func (p *Policy) adapterPrice(e *pool.Endpoint, v adapterView) float32 {
	rate := p.learn.prefillRate(e)
	var t float64
	if !v.resident {
		t = p.learn.adapterLoadSeconds(e) * rate
	}
	if !v.inFlight {
		if v.others >= v.slots {
			// The scheduler passes over it until one of the adapters that hold the slots has no request left.
			t += float64(v.others-v.slots+1) * p.learn.slotSeconds() * rate
		}
	}
	return float32(t)
}
