// Package adapters treats the LoRA adapters of a pool as memory that is managed: it loads what is asked for and nobody holds,
// gives hot ones replicas before they need them, keeps pinned ones, gives a restarted server its set back, and unloads what
// is worth least when slots are short.
//
// A [Planner] decides, without IO and without a clock; a [Manager] looks at the table, has the planner decide, and does it
// through the model servers' own API, over net/http. It must not import proxy.
package adapters

import (
	"cmp"
	"math"
	"slices"
	"time"

	"kvgate/pool"
)

// An Adapter is one entry of the registry.
type Adapter struct {
	Name   string
	Source string // path or id that the server loads it from
	Base   string // the base model that it sits on; "": the pool's
	Pin    bool   // is never unloaded, and loaded without being asked for
	Min    int    // replicas that are kept, at least; a pinned one has 1
	Max    int    // replicas at most; 0: as many as there are endpoints
}

func (a *Adapter) least() int {
	if a.Pin {
		return max(1, a.Min)
	}
	return a.Min
}

// PlanOptions are how a [Planner] decides.
type PlanOptions struct {
	// PerEndpoint is how many adapters an endpoint may have. 0: as many as a batch of it can hold, where it says so.
	PerEndpoint int
	// MaxLoading is how many loads that nobody waits for may run at a time; one endpoint runs one at a time (default 1).
	MaxLoading int
	// Hold is how long an adapter stays where it was loaded, and how long what has failed is left alone at first (default 30 s).
	Hold time.Duration
	// Preload fills free slots with adapters that nobody has asked for yet, in the order of the registry.
	Preload bool
}

func (o PlanOptions) withDefaults() PlanOptions {
	o.MaxLoading = cmp.Or(o.MaxLoading, 1)
	o.Hold = cmp.Or(o.Hold, 30*time.Second)
	return o
}

// defaultPerEndpoint is believed of an endpoint that doesn't say how many adapters it takes: vLLM's and SGLang's usual
// max_loras.
const defaultPerEndpoint = 4

// An Endpoint is what a plan knows of an endpoint.
type Endpoint struct {
	ID    string
	Hash  uint64   // of the ID, for rendezvous hashing
	Ready bool     // it may get requests
	Known bool     // Has is complete
	Has   []string // adapters that it serves
	Slots int      // adapters that a batch can hold; 0 is unknown
	// Busy is how much of its time is taken, roughly: 1 is all of it.
	Busy float64
	// InFlight is how many requests for the adapter are there.
	InFlight func(adapter string) int
}

// An Action is one thing to do.
type Action struct {
	Unload   bool
	Adapter  *Adapter
	Endpoint string
	Why      string // of a closed list: see the constants
	Awaited  bool   // a request waits for it
}

// Why something is done.
const (
	WhyAsked   = "asked"   // a request waits for it
	WhyPinned  = "pinned"  // it is to have more replicas than it has
	WhyHot     = "hot"     // its share of the work is more than its replicas can carry, or one of them has more than its endpoint can
	WhyRestore = "restore" // the endpoint had it and lost it, by a restart most likely
	WhyPreload = "preload" // there is room
	WhyRoom    = "room"    // another one needs its place
)

// Reasons lists them.
func Reasons() []string {
	return []string{WhyAsked, WhyPinned, WhyHot, WhyRestore, WhyPreload, WhyRoom}
}

// A Planner decides which adapters are loaded where. It is not safe for concurrent use.
type Planner struct {
	o     PlanOptions
	list  []*adapterState // in the order of the registry
	named map[string]*adapterState
	where map[string]*placeState // by endpoint
	last  pool.Instant
}

// adapterState is what is known of one adapter.
type adapterState struct {
	Adapter
	rate     float64 // requests per second, over minutes
	running  float64 // requests in flight, over seconds
	since    float64 // requests counted since the last plan
	asked    bool    // a request waits
	short    bool    // a request found its replicas without room
	hotSince pool.Instant
	failures int          // in a row
	notUntil pool.Instant // it has failed wherever it was tried
	holders  int          // of this plan: ready endpoints that have it
	coming   int          // and loads under way
}

// placeState is what is known of one endpoint.
type placeState struct {
	placed   map[string]pool.Instant // what it should have, and since when
	loading  map[string]bool         // to whether somebody waits for it
	leaving  map[string]bool
	notUntil map[string]pool.Instant // adapters that have failed here; "" for all
	began    map[string]pool.Instant // loads under way
	running  float64                 // requests in flight for adapters of the registry, over seconds
	crowded  pool.Instant            // since when that has been much more than others have
	quiet    pool.Instant            // until when nothing is loaded that nobody waits for, while there is work to do
	seen     pool.Instant
}

// NewPlanner returns a planner for the adapters of a pool.
func NewPlanner(list []Adapter, o PlanOptions) *Planner {
	p := &Planner{where: make(map[string]*placeState)}
	p.Configure(list, o)
	return p
}

// Configure replaces the registry and the options. What is known of an adapter that stays is kept.
func (p *Planner) Configure(list []Adapter, o PlanOptions) {
	old := p.named
	p.o = o.withDefaults()
	p.list, p.named = nil, make(map[string]*adapterState, len(list))
	for _, a := range list {
		s := old[a.Name]
		if s == nil {
			s = new(adapterState)
		} else if s.Source != a.Source {
			s.failures, s.notUntil = 0, 0
		}
		s.Adapter = a
		p.list = append(p.list, s)
		p.named[a.Name] = s
	}
}

// Used notes n requests for an adapter.
func (p *Planner) Used(name string, n float64) {
	if a := p.named[name]; a != nil {
		a.since += n
	}
}

// Ask notes that a request waits for an adapter that no endpoint has. It reports whether there is any hope: an adapter that
// failed everywhere not long ago is not tried again for a while.
func (p *Planner) Ask(name string, now pool.Instant) bool {
	a := p.named[name]
	if a == nil || now < a.notUntil {
		return false
	}
	a.asked = true
	return true
}

// Short notes that a request found no room at the endpoints that have the adapter.
func (p *Planner) Short(name string) {
	if a := p.named[name]; a != nil {
		a.short = true
	}
}

const (
	rateMemory    = 300.0 // seconds
	runningMemory = 10.0
	// hotFor is how long an adapter must need another replica before it gets one, unless it is short of room already.
	hotFor = 3 * time.Second
	// replicaShare is the part of an even share of the pool's requests that one replica is to carry.
	replicaShare = 0.75
	// leastRunning is how many requests in flight don't need another replica, however even the shares.
	leastRunning = 4.0
	maxBackoff   = 5 * time.Minute
	// crowding is how many times as many requests as an even share make an endpoint give some away.
	crowding = 1.4
	// rest is how many times as long as a load took an endpoint with work to do is left in peace after it.
	rest = 9
	// seldom is how often, per second, an adapter may be asked for and not be missed.
	seldom = 1.0 / 600
	// idle is how busy an endpoint may be and not mind.
	idle = 0.02
)

// Plan returns what to do now. The caller does it, and says how it went by [Planner.Done]; the plan counts it as under way.
func (p *Planner) Plan(now pool.Instant, eps []Endpoint) (actions []Action) {
	p.look(now, eps)
	pl := &plan{Planner: p, now: now, eps: eps}
	pl.total = 0
	for _, a := range p.list {
		pl.total += a.running
	}
	for i := range eps {
		for _, waited := range p.where[eps[i].ID].loading {
			if !waited {
				pl.background++
			}
		}
	}
	// Somebody waits: first, and whatever the budget.
	for _, a := range p.list {
		if a.asked && a.holders+a.coming == 0 {
			pl.load(a, WhyAsked, math.Inf(1))
		}
	}
	for _, a := range p.list {
		for a.holders+a.coming < min(a.least(), len(eps)) && pl.load(a, WhyPinned, math.Inf(1)) {
		}
	}
	pl.restore()
	for _, a := range p.list {
		if pl.hot(a) {
			pl.load(a, WhyHot, a.value(1))
		}
	}
	for i := range eps {
		pl.relieve(&eps[i])
	}
	if p.o.Preload {
		for _, a := range p.list {
			if a.holders+a.coming == 0 && !pl.load(a, WhyPreload, -1) && pl.background >= p.o.MaxLoading {
				break
			}
		}
	}
	for i := range eps {
		pl.thin(&eps[i])
	}
	for _, a := range p.list {
		a.asked, a.short = a.asked && a.holders+a.coming == 0, false
	}
	return pl.actions
}

// look takes in what the endpoints are seen to have.
func (p *Planner) look(now pool.Instant, eps []Endpoint) {
	dt := now.Sub(p.last).Seconds()
	if p.last == 0 || dt < 0 {
		dt = 0
	}
	p.last = now
	for _, a := range p.list {
		a.holders, a.coming = 0, 0
		n := 0
		for i := range eps {
			n += eps[i].InFlight(a.Name)
		}
		if dt > 0 {
			a.rate += (1 - math.Exp(-dt/rateMemory)) * (a.since/dt - a.rate)
			a.running += (1 - math.Exp(-dt/runningMemory)) * (float64(n) - a.running)
			a.since = 0
		}
	}
	for i := range eps {
		e := &eps[i]
		w := p.where[e.ID]
		if w == nil {
			w = &placeState{placed: map[string]pool.Instant{}, loading: map[string]bool{}, leaving: map[string]bool{}, notUntil: map[string]pool.Instant{}, began: map[string]pool.Instant{}}
			p.where[e.ID] = w
		}
		w.seen = now
		for _, name := range e.Has {
			a := p.named[name]
			if a == nil {
				continue
			}
			if e.Ready && !w.leaving[name] {
				a.holders++
			}
			if _, ok := w.placed[name]; !ok && !w.leaving[name] {
				w.placed[name] = now
			}
		}
		n := 0
		for _, name := range e.Has {
			if p.named[name] != nil {
				n += e.InFlight(name)
			}
		}
		if dt > 0 {
			w.running += (1 - math.Exp(-dt/runningMemory)) * (float64(n) - w.running)
		}
		for name := range w.loading {
			if a := p.named[name]; a != nil && !slices.Contains(e.Has, name) {
				a.coming++
			}
		}
		for name := range w.placed {
			if p.named[name] == nil {
				delete(w.placed, name)
			}
		}
	}
	for id, w := range p.where {
		if w.seen != now && now.Sub(w.seen) > time.Hour {
			delete(p.where, id)
		}
	}
}

// value is what an adapter's n-th replica of those it has is worth: the requests per second that would miss it.
func (a *adapterState) value(n int) float64 { return a.rate / float64(max(1, n)) }

// A plan is one run of Plan.
type plan struct {
	*Planner
	now        pool.Instant
	eps        []Endpoint
	total      float64 // requests in flight, of all adapters
	background int     // loads under way that nobody waits for
	actions    []Action
}

// hot reports whether a should have another replica.
func (pl *plan) hot(a *adapterState) bool {
	n := a.holders + a.coming
	if n == 0 || a.coming > 0 || a.Max > 0 && n >= a.Max || n >= len(pl.eps) {
		a.hotSince = 0
		return false
	}
	each := max(leastRunning, replicaShare*pl.total/float64(max(1, len(pl.eps))))
	switch {
	case a.short:
		return true
	case a.running <= float64(n)*each:
		a.hotSince = 0
		return false
	case a.hotSince == 0:
		a.hotSince = pl.now
	}
	return pl.now.Sub(a.hotSince) >= hotFor
}

// relieve gives a replica elsewhere to the busiest adapter of an endpoint that has much more to do than the others: each of
// its adapters may be a small one.
func (pl *plan) relieve(e *Endpoint) {
	w := pl.where[e.ID]
	even := pl.total / float64(max(1, len(pl.eps)))
	switch {
	case w.running <= max(even*crowding, even+leastRunning):
		w.crowded = 0
		return
	case w.crowded == 0:
		w.crowded = pl.now
	}
	if pl.now.Sub(w.crowded) < hotFor {
		return
	}
	var busiest *adapterState
	for _, name := range e.Has {
		a := pl.named[name]
		if a == nil || a.coming > 0 || a.holders >= len(pl.eps) || a.Max > 0 && a.holders >= a.Max || w.leaving[name] {
			continue
		}
		if busiest == nil || a.running/float64(max(1, a.holders)) > busiest.running/float64(max(1, busiest.holders)) {
			busiest = a
		}
	}
	if busiest != nil && pl.load(busiest, WhyHot, busiest.value(busiest.holders+1)) {
		w.crowded = pl.now
	}
}

// restore gives endpoints back what they lost, the most valuable first.
func (pl *plan) restore() {
	for i := range pl.eps {
		e := &pl.eps[i]
		w := pl.where[e.ID]
		if !e.Ready || !e.Known {
			continue
		}
		var lost []*adapterState
		for name, at := range w.placed {
			// What has just been loaded may not be on the list yet.
			if a := pl.named[name]; a != nil && !slices.Contains(e.Has, name) && !w.leaving[name] && !w.loading[name] && pl.now.Sub(at) > 5*time.Second {
				lost = append(lost, a)
			}
		}
		slices.SortFunc(lost, func(a, b *adapterState) int {
			return cmp.Or(cmp.Compare(b.least(), a.least()), cmp.Compare(b.rate, a.rate), cmp.Compare(a.Name, b.Name))
		})
		for _, a := range lost {
			if !pl.loadAt(a, e, WhyRestore, a.value(1)) {
				break
			}
		}
	}
}

// slots is how many adapters e may have.
func (pl *plan) slots(e *Endpoint) int {
	return cmp.Or(pl.o.PerEndpoint, e.Slots, defaultPerEndpoint)
}

// taken is how many e has, or will.
func (pl *plan) taken(e *Endpoint) int {
	w := pl.where[e.ID]
	n := len(e.Has)
	for name := range w.loading {
		if !slices.Contains(e.Has, name) {
			n++
		}
	}
	for name := range w.leaving {
		if slices.Contains(e.Has, name) {
			n--
		}
	}
	return n
}

// thin unloads what is worth least from an endpoint that has more than it may: after a failure, or a change of what it may.
func (pl *plan) thin(e *Endpoint) {
	for e.Ready && e.Known && pl.taken(e) > pl.slots(e) {
		v := pl.victim(e, math.Inf(1))
		if v == nil {
			return
		}
		pl.unload(v, e, false)
	}
}

// unload takes v off e.
func (pl *plan) unload(v *adapterState, e *Endpoint, awaited bool) {
	w := pl.where[e.ID]
	w.leaving[v.Name] = true
	delete(w.placed, v.Name)
	v.holders--
	pl.actions = append(pl.actions, Action{Unload: true, Adapter: &v.Adapter, Endpoint: e.ID, Why: WhyRoom, Awaited: awaited})
}

// load loads a on the best endpoint. worth is what it is worth to have it: only what is worth less is unloaded for it. It
// reports whether it did.
func (pl *plan) load(a *adapterState, why string, worth float64) bool {
	best, bestCost := -1, math.Inf(1)
	for i := range pl.eps {
		e := &pl.eps[i]
		if !pl.may(a, e, why) {
			continue
		}
		slots := pl.slots(e)
		cost := e.Busy + pl.where[e.ID].running/max(leastRunning, pl.total/float64(len(pl.eps))) + float64(pl.taken(e))/float64(slots) + 0.05*(1-float64(pool.Rendezvous(e.Hash, pool.HashName(a.Name))>>11)/(1<<53))
		if pl.taken(e) >= slots {
			if pl.victim(e, worth) == nil {
				continue
			}
			cost += 10
		}
		if cost < bestCost {
			best, bestCost = i, cost
		}
	}
	return best >= 0 && pl.loadAt(a, &pl.eps[best], why, worth)
}

// may reports whether a may be loaded on e now, as far as it isn't a matter of room.
func (pl *plan) may(a *adapterState, e *Endpoint, why string) bool {
	w := pl.where[e.ID]
	if !e.Ready || !e.Known || slices.Contains(e.Has, a.Name) || w.loading[a.Name] || w.leaving[a.Name] ||
		pl.now < a.notUntil || pl.now < w.notUntil[a.Name] || pl.now < w.notUntil[""] {
		return false
	}
	if _, ok := w.loading[a.Name]; ok {
		return false
	}
	if why == WhyAsked {
		return true
	}
	return len(w.loading) == 0 && pl.background < pl.o.MaxLoading && (pl.now >= w.quiet || e.Busy < idle)
}

func (pl *plan) loadAt(a *adapterState, e *Endpoint, why string, worth float64) bool {
	if !pl.may(a, e, why) {
		return false
	}
	w := pl.where[e.ID]
	if pl.taken(e) >= pl.slots(e) {
		v := pl.victim(e, worth)
		if v == nil {
			return false
		}
		pl.unload(v, e, why == WhyAsked)
	}
	w.loading[a.Name], w.began[a.Name] = why == WhyAsked, pl.now
	a.coming++
	if why != WhyAsked {
		pl.background++
	}
	pl.actions = append(pl.actions, Action{Adapter: &a.Adapter, Endpoint: e.ID, Why: why, Awaited: why == WhyAsked})
	return true
}

// victim is the adapter on e that is worth least, and less than worth; nil if there is none that may go.
func (pl *plan) victim(e *Endpoint, worth float64) (v *adapterState) {
	w := pl.where[e.ID]
	least := worth
	for _, name := range e.Has {
		a := pl.named[name]
		if a == nil || w.leaving[name] || a.holders <= a.least() || e.InFlight(name) > 0 || a.asked {
			continue
		}
		// The only one of what is still asked for goes for nothing but what a request waits for: it would be back soon.
		if !math.IsInf(worth, 1) && a.holders < 2 && a.rate > seldom {
			continue
		}
		if at, ok := w.placed[name]; ok && pl.now.Sub(at) < pl.o.Hold && !math.IsInf(worth, 1) {
			continue
		}
		if val := a.value(a.holders); val < least || v == nil && math.IsInf(worth, 1) {
			v, least = a, val
		}
	}
	return v
}

// A Fault says what kind of failure an action met.
type Fault uint8

// The faults.
const (
	NoFault     Fault = iota
	AtEndpoint        // the endpoint could not do it: it is away, or failed
	AtAdapter         // the server says that the adapter can't be had from its source, or doesn't fit
	Unsupported       // the endpoint doesn't load adapters at run time
	Skipped           // nothing was done
)

// Done takes in how an action went.
func (p *Planner) Done(x Action, fault Fault, now pool.Instant) {
	w, a := p.where[x.Endpoint], p.named[x.Adapter.Name]
	if w == nil {
		return
	}
	if x.Unload {
		delete(w.leaving, x.Adapter.Name)
		return
	}
	// A load stalls its server. It is to have time to make up for it.
	w.quiet = max(w.quiet, now.Add(rest*now.Sub(w.began[x.Adapter.Name])))
	delete(w.loading, x.Adapter.Name)
	delete(w.began, x.Adapter.Name)
	if a == nil {
		return
	}
	switch fault {
	case NoFault:
		w.placed[a.Name] = now
		a.failures, a.notUntil, a.asked = 0, 0, false
	case Skipped:
		w.notUntil[a.Name] = now.Add(p.o.Hold)
	case Unsupported:
		w.notUntil[""] = now.Add(maxBackoff)
	default:
		w.notUntil[a.Name] = now.Add(p.o.Hold)
		a.failures++
		// A source that two servers can't read is not going to be read by the others.
		if fault == AtAdapter && a.failures >= 2 {
			a.notUntil = now.Add(min(p.o.Hold<<min(a.failures-2, 8), maxBackoff))
		}
	}
}

// Restarted forgets that e failed: its process is new.
func (p *Planner) Restarted(id string) {
	if w := p.where[id]; w != nil {
		clear(w.notUntil)
	}
}

// Hopeless reports whether there is no endpoint left on which a could be loaded, and none that has it or is loading it: who
// waits for it does so in vain.
func (p *Planner) Hopeless(name string, now pool.Instant, eps []Endpoint) bool {
	a := p.named[name]
	if a == nil || now < a.notUntil {
		return true
	}
	for i := range eps {
		w := p.where[eps[i].ID]
		if slices.Contains(eps[i].Has, name) || w == nil {
			return false
		}
		if _, loading := w.loading[name]; loading || now >= w.notUntil[name] && now >= w.notUntil[""] && eps[i].Ready {
			return false
		}
	}
	return true
}
