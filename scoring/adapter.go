package scoring

import (
	"math"
	"slices"

	"kvgate/pool"
)

// An adapterView is what is believed of one adapter on one endpoint.
type adapterView struct {
	known    bool    // it was used there not long ago: if no longer in a slot, then in host memory
	resident bool    // it is in one of the server's slots, or has requests in flight there
	inFlight bool    // requests for it are running or waiting there: ours, or others' as of the scrape
	running  bool    // one of them has got its first token, so the adapter holds a slot now
	others   int     // distinct other adapters with requests in flight
	slots    int     // distinct adapters that one batch can hold
	leaving  float64 // other adapters that are about to give up their slots; see [pool.AdapterMemory.Others]
}

// foreignLeaving is what an adapter that only others use counts as leaving: about that of two requests.
const foreignLeaving = 0.12

// full reports whether a request for the adapter would have to wait for a slot.
func (v *adapterView) full() bool { return !v.running && v.others >= v.slots }

// defaultAdapterSlots is believed of a server that does not say how many adapters a batch can hold.
const defaultAdapterSlots = 4

// hostAdapters is how many adapters, most recent first, a server is believed to keep in host memory.
const hostAdapters = 32

// viewAdapter looks at the adapter that target names, on r. Servers list adapters with work in flight only; the gateway's
// own memory knows those that sit idle in a slot.
func viewAdapter(r *pool.Row, target *pool.Target, fresh bool) (v adapterView) {
	m := r.Endpoint.Adapters()
	l := r.Load
	v.slots = defaultAdapterSlots
	if l.Known.Has(pool.KnowsMaxAdapters) && l.MaxAdapters > 0 {
		v.slots = int(l.MaxAdapters)
	}
	running, waiting, leaving := m.Others(target.Hash)
	v.others, v.leaving = running+waiting, leaving
	use, known := m.Use(target.Hash)
	if known {
		v.known = use.Newer < hostAdapters
		v.inFlight = use.InFlight > 0
		v.running = use.Started > 0
		v.resident = v.inFlight || use.Newer < v.slots
	}
	if fresh && l.Known.Has(pool.KnowsAdapters) {
		_, listed := slices.BinarySearch(l.Adapters, target.Name)
		foreign := len(l.Adapters)
		if listed {
			foreign--
			v.known, v.resident = true, true
			// What is listed and unknown to us is somebody else's. What is known may be our own, ended since, where nobody
			// else sends requests.
			if !known || r.Foreign.Requests > 0 {
				v.inFlight, v.running = true, true
			}
		}
		if more := foreign - v.others; more > 0 && r.Foreign.Requests > 0 { // else they are our own, ended since
			// Others' requests hold these slots. How many each has, only its own gateway knows.
			v.others, v.leaving = foreign, v.leaving+foreignLeaving*float64(more)
		}
	} else if fresh && l.Known.Has(pool.KnowsAdapterSlots) {
		v.others = max(v.others, int(l.AdapterSlotsUsed))
	}
	return v
}

// adapterPrices adds what the request's adapter costs on each row, and reports whether any row holds it.
//
// To look at what every endpoint remembers takes a microsecond for five of them. Where there are many, those that the index
// knows to hold the adapter are looked at, and the others get the least that it can cost there, until priceOf is asked.
func (p *Policy) adapterPrices(sc *scratch, x *price, cost []float32, rec *recorder) (held bool) {
	c := &sc.candidates
	if cap(sc.adapters) < len(cost) {
		n := len(cost) + len(cost)/4
		sc.adapters, sc.unpriced, sc.least = make([]adapterView, n), make([]bool, n), make([]float32, n)
	}
	views := sc.adapters[:len(cost)]
	inFlight := false
	sc.pricings = 0
	if len(cost) > lookAtAll && rec == nil && p.index != nil {
		return p.boundAdapterPrices(sc, x, cost)
	}
	for i, ri := range c.target.Rows {
		if cost[i] == math.MaxFloat32 {
			continue
		}
		r := &c.snapshot.Rows[ri]
		views[i] = viewAdapter(r, c.target, r.Fresh(x.now, x.staleAfter))
		held = held || views[i].known
		inFlight = inFlight || views[i].inFlight
	}
	for i, ri := range c.target.Rows {
		if cost[i] == math.MaxFloat32 {
			continue
		}
		t := p.adapterPrice(sc, c.snapshot.Rows[ri].Endpoint, &views[i], inFlight)
		cost[i] += t
		if rec != nil {
			rec.adapter(ri, t)
		}
	}
	return held
}

// sharers is how many gateways like this one seem to send requests to the endpoints, by the share of them that are ours.
// Each would load the adapter somewhere for itself.
func sharers(ours, others int64) float32 {
	return min(1+float32(others)/float32(max(ours, 1)), maxSharers)
}

const maxSharers = 8

const (
	lookAtAll   = 16 // endpoints that are looked at one by one
	maxPricings = 48 // looks at others in one decision
)

// boundAdapterPrices is adapterPrices with lower bounds for the endpoints that aren't known to hold the adapter.
func (p *Policy) boundAdapterPrices(sc *scratch, x *price, cost []float32) (held bool) {
	c := &sc.candidates
	views, unpriced := sc.adapters[:len(cost)], sc.unpriced[:len(cost)]
	for i := range unpriced {
		unpriced[i] = true
	}
	inFlight := false
	holders := sc.holders[:0]
	for _, row := range p.index.holders(adapterKey(c.target), c.snapshot, sc.holders[:0]) {
		i := position(c.target.Rows, row)
		if i < 0 || cost[i] == math.MaxFloat32 {
			continue
		}
		r := &c.snapshot.Rows[row]
		views[i] = viewAdapter(r, c.target, r.Fresh(x.now, x.staleAfter))
		held = held || views[i].known
		inFlight = inFlight || views[i].inFlight
		holders = append(holders, int32(i))
	}
	for _, i := range holders {
		unpriced[i] = false
		cost[i] += p.adapterPrice(sc, c.snapshot.Rows[c.target.Rows[i]].Endpoint, &views[i], inFlight)
	}
	sc.elsewhere, sc.pricings = inFlight, maxPricings
	for i, ri := range c.target.Rows {
		if !unpriced[i] || cost[i] == math.MaxFloat32 {
			continue
		}
		r := &c.snapshot.Rows[ri]
		if sc.least[i] = 0; r.Foreign.Requests == 0 { // else somebody else may have it loaded there
			sc.least[i] = p.adapterPrice(sc, r.Endpoint, &coldAdapter, inFlight)
		}
		cost[i] += sc.least[i]
	}
	return held
}

// coldAdapter is one that is nowhere, where there is a slot for it.
var coldAdapter = adapterView{slots: 1}

// priceOf looks at row i, if that has not been done, puts its price in place of the bound, and reports whether it did.
func (p *Policy) priceOf(sc *scratch, i int, cost []float32) bool {
	if sc.pricings == 0 || i < 0 || !sc.unpriced[i] {
		return false
	}
	sc.pricings--
	sc.unpriced[i] = false
	c := &sc.candidates
	r := &c.snapshot.Rows[c.target.Rows[i]]
	v := viewAdapter(r, c.target, r.Fresh(c.now, p.staleAfter))
	cost[i] += p.adapterPrice(sc, r.Endpoint, &v, sc.elsewhere) - sc.least[i]
	return true
}

// hostLoadShare is what a load from host memory costs of one from disk: 30 ms of 0.5 s, engine model §3.
const hostLoadShare = 0.06

// leastLeaving bounds how long a slot is believed to stay taken: ten requests' time.
const leastLeaving = 0.1

// noSlotCost is dearer than what anything else on an endpoint comes to, and less than its being busy; see tierCost.
const noSlotCost = 1 << 24

// adapterPrice is the cost of a request for an adapter on e, in prefill tokens. elsewhere says that some endpoint has
// requests for the adapter in flight. The unit of it is what the endpoint could prefill in the time that something takes.
//
//   - An adapter that runs here costs nothing: another request of it takes no slot.
//   - One that waits here for a slot lets the request in together with those that wait.
//   - Where all slots are taken, the server passes over the request until as many adapters have ended as are before it.
//   - One that is not resident must be loaded, which stalls everybody else on the endpoint and pushes another adapter out
//     of host memory, to be loaded again; and other gateways do the same.
//   - Taking a slot here while the adapter runs elsewhere takes it from some other adapter for as long as a request holds
//     it. That is what confines an adapter to as few endpoints as its traffic needs.
func (p *Policy) adapterPrice(sc *scratch, e *pool.Endpoint, v *adapterView, elsewhere bool) float32 {
	if v.running {
		return 0
	}
	w := &p.cost
	hold := p.learn.slotSeconds()
	wait := 0.0         // for a slot, in seconds
	apart := float32(0) // no tie with an endpoint that has a slot, however short requests have been so far
	if v.full() {
		if apart = w.MarginTokens + w.MarginShare*float32(sc.candidates.prompt); sc.candidates.req.SlotFree {
			apart = noSlotCost
		}
		wait = hold * float64(v.others-v.slots+1) / max(v.leaving, leastLeaving)
	}
	rate := p.learn.prefillRate(e)
	if v.inFlight {
		return float32(rate*wait)*w.AdapterQueue + apart
	}
	load := 0.0
	switch {
	case !v.known:
		load = p.learn.adapterLoadSeconds(e)
	case !v.resident:
		load = p.learn.adapterLoadSeconds(e) * hostLoadShare
	}
	t := w.AdapterLoad*sc.sharers*float32(load) + w.AdapterSlot*float32(wait)
	if elsewhere {
		t += w.AdapterTwice * float32(hold)
	}
	return t*float32(rate) + apart
}
