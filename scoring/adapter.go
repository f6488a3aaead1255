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
			// What is listed and unknown to us is somebody else's. What is known may be our own, ended since.
			if !known {
				v.inFlight, v.running = true, true
			}
		}
		v.others = max(v.others, foreign)
	} else if fresh && l.Known.Has(pool.KnowsAdapterSlots) {
		v.others = max(v.others, int(l.AdapterSlotsUsed))
	}
	return v
}

// adapterPrices adds what the request's adapter costs on each row, and reports whether any row holds it.
func (p *Policy) adapterPrices(sc *scratch, x *price, cost []float32, rec *recorder) (held bool) {
	c := &sc.candidates
	if cap(sc.adapters) < len(cost) {
		sc.adapters = make([]adapterView, len(cost)+len(cost)/4)
	}
	views := sc.adapters[:len(cost)]
	inFlight := false
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
		t := p.adapterPrice(c.snapshot.Rows[ri].Endpoint, &views[i], inFlight)
		cost[i] += t
		if rec != nil {
			rec.adapter(ri, t)
		}
	}
	return held
}

// hostLoadShare is what a load from host memory costs of one from disk: 30 ms of 0.5 s, engine model §3.
const hostLoadShare = 0.06

// leastLeaving bounds how long a slot is believed to stay taken: ten requests' time.
const leastLeaving = 0.1

// adapterPrice is the cost of a request for an adapter on e, in prefill tokens. elsewhere says that some endpoint has
// requests for the adapter in flight. The unit of it is a hold: what the endpoint could prefill in the time for which a
// request keeps its adapter's slot.
//
//   - An adapter that runs here, or waits here for a slot already, costs nothing: another request of it takes no slot.
//   - Nor does one that is resident and finds a slot free; one that is not must be loaded, which
//     stalls everybody else on the endpoint too.
//   - Where all slots are taken, the server passes over the request until as many adapters have ended as are before it.
//   - Taking a slot here while the adapter runs elsewhere takes it from some other adapter for a hold. That is what
//     confines an adapter to as few endpoints as its traffic needs: it spreads when the wait there costs more than a hold.
func (p *Policy) adapterPrice(e *pool.Endpoint, v *adapterView, elsewhere bool) float32 {
	if v.inFlight {
		return 0
	}
	rate := p.learn.prefillRate(e)
	hold := p.learn.slotSeconds() * rate
	t := 0.0
	switch {
	case !v.known:
		t += p.learn.adapterLoadSeconds(e) * rate
	case !v.resident:
		t += p.learn.adapterLoadSeconds(e) * hostLoadShare * rate
	}
	if v.full() {
		t += hold * float64(v.others-v.slots+1) / max(v.leaving, leastLeaving)
	}
	if elsewhere {
		t += hold
	}
	return float32(t)
}
