package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/admission"
	"kvgate/internal/caller"
	"kvgate/pool"
	"kvgate/scoring"
)

// AdmissionOptions say when requests for a pool wait in the gateway, and how long and how many of them.
type AdmissionOptions struct {
	admission.Options
	scoring.Limits
	// EndpointWait is how long requests wait for an endpoint where none is ready, to scale from zero; 0: they don't.
	EndpointWait time.Duration
	// TenantHeader and ClassHeader name request headers that say who a request is for and how urgent it is: high, normal or
	// low. They are believed where nobody has authenticated; "" for none.
	TenantHeader, ClassHeader string

	off bool // a reload has switched it off: whoever still waits may go
	// unlimited: nothing waits for room, only for adapters that nobody has.
	unlimited bool
}

// Adapters loads adapters. Its methods must not block.
type Adapters interface {
	// Want asks for an adapter that no endpoint has, for a request that waits for it. An error says that it waits in vain.
	Want(t *pool.Target) error
	// Short tells that a request found no room on the endpoints that have its adapter.
	Short(t *pool.Target)
}

// unlimitedAdmission is for pools that have nothing wait but for adapters.
func unlimitedAdmission(wait time.Duration) *AdmissionOptions {
	return &AdmissionOptions{Options: admission.Options{MaxWaiting: 10_000, MaxBytes: 1 << 30, MaxWait: wait}, unlimited: true}
}

// An admitter holds the requests of one pool. It is kept over reloads.
//
// What makes room is told to it by whoever made it, and its own goroutine then sends requests on their way: it chooses for
// them, and books, so that the next one in the queue sees what is left. A booking is all that a request holds, and it is
// released where every booking is.
type admitter struct {
	h     *Handler
	pool  string
	o     atomic.Pointer[AdmissionOptions]
	queue *admission.Queue
	room  chan struct{} // capacity 1: something has changed
}

// admitters are those of all pools that have or had one.
type admitters struct {
	mu     sync.Mutex // serialises writers
	byPool map[string]*admitter
	all    atomic.Pointer[[]*admitter]
}

// serve gives each pool of r that is to have one its admitter.
func (as *admitters) serve(h *Handler, r *Routes) {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, p := range r.pools {
		if p.Adapters != nil {
			def(&p.AdapterWait, defaultAdapterWait)
			if p.Admission == nil {
				p.Admission = unlimitedAdmission(p.AdapterWait)
			}
		}
	}
	for name, a := range as.byPool {
		if o := r.pools[name]; o == nil || o.Admission == nil {
			off := *a.o.Load()
			off.off = true
			a.o.Store(&off)
			a.roomMade()
		}
	}
	var all []*admitter
	for name, p := range r.pools {
		if p.Admission == nil {
			continue
		}
		a := as.byPool[name]
		if a == nil {
			a = &admitter{h: h, pool: name, room: make(chan struct{}, 1)}
			a.queue = admission.New(p.Admission.Options, a)
			if as.byPool == nil {
				as.byPool = make(map[string]*admitter)
			}
			as.byPool[name] = a
			h.wg.Go(a.run)
		}
		o := *p.Admission
		o.Seen = o.EndpointWait > 0
		a.o.Store(&o)
		a.queue.Configure(o.Options)
		p.admitter = a
	}
	for _, p := range r.special {
		if own := r.pools[p.Name]; own != nil {
			p.Admission, p.admitter, p.Adapters, p.AdapterWait = own.Admission, own.admitter, own.Adapters, own.AdapterWait
		}
	}
	for _, a := range as.byPool {
		all = append(all, a)
	}
	as.all.Store(&all)
}

// RoomMade tells that requests that wait may perhaps go now, for a reason that the table doesn't show. It does not block.
func (h *Handler) RoomMade() { h.roomMade() }

// roomMade tells every admitter that somebody may go now. It does not block.
func (h *Handler) roomMade() {
	if all := h.admitters.all.Load(); all != nil {
		for _, a := range *all {
			a.roomMade()
		}
	}
}

func (a *admitter) roomMade() {
	if a.queue.Waiting() == 0 { // Fast path.
		return
	}
	select {
	case a.room <- struct{}{}:
	default: // it is going to look anyway
	}
}

// roomMade tells the pool's admitter, if it has one.
func (o *PoolOptions) roomMade() {
	if o != nil && o.admitter != nil {
		o.admitter.roomMade()
	}
}

// release ends the booking, and lets others know.
func (x *exchange) release() {
	if x.booking.Held() {
		x.booking.End()
		x.pool.roomMade()
	}
}

// run lets requests go whenever there is room, until the handler is closed.
func (a *admitter) run() {
	// Endpoints that asked to be left alone for a while do not tell when it is over.
	busy := time.NewTimer(time.Hour)
	defer busy.Stop()
	for {
		select {
		case <-a.h.ctx.Done():
			return
		case <-a.room:
		case <-busy.C:
		}
		now := a.h.opts.Now()
		a.queue.Dispatch(now)
		if a.queue.Waiting() == 0 {
			continue
		}
		if until := a.busyUntil(now); until > now {
			busy.Reset(until.Sub(now))
		}
	}
}

// busyUntil is when the first endpoint that is busy now no longer is.
func (a *admitter) busyUntil(now pool.Instant) (first pool.Instant) {
	s := a.h.table.Load()
	i := s.Pool(a.pool)
	if i < 0 {
		return 0
	}
	rows := s.PoolRows(i)
	for r := range rows {
		if t := rows[r].BusyUntil(); t > now && (first == 0 || t < first) {
			first = t
		}
	}
	return first
}

// waiting is what an exchange needs to wait.
type waiting struct {
	waiter  admission.Waiter
	at      *admitter     // where it waits or has waited
	woken   chan struct{} // capacity 1
	wake    func()        // made once
	since   time.Time
	took    time.Duration // waited in all
	queued  bool          // it has been in the queue
	started bool          // it has been chosen for and booked
	failure *failure      // why it was not
}

// admit lets the request pass, has it wait, or says that there are too many.
func (x *exchange) admit() *failure {
	if n := x.h.limits.Requests; n > 0 && x.h.Active() > n {
		return &failure{outcome: Saturated, message: "too many requests are in flight; try again later", retryAfterSeconds: 1}
	}
	a := x.pool.admitter
	if a == nil || x.pinned != nil { // what can go to one endpoint only gains nothing by waiting here
		return nil
	}
	o := a.o.Load()
	room := scoring.Free
	if !o.unlimited || len(x.query.Target.Rows) == 0 {
		room = x.pool.Policy.Room(&x.query, x.snapshot, x.h.opts.Now(), &o.Limits)
	}
	switch room {
	case scoring.Free:
		x.query.SlotFree = !o.unlimited
		if a.queue.Waiting() == 0 || o.unlimited { // Fast path.
			return nil
		}
	case scoring.Nobody:
		if f := x.wantAdapter(); f != nil {
			return f
		}
		patience := o.EndpointWait
		if x.loadable() {
			patience = max(patience, x.pool.AdapterWait)
		}
		if patience == 0 {
			return nil // to be told that there is none
		}
		return x.enterQueue(a, o, patience)
	}
	return x.enterQueue(a, o, 0)
}

// lookForFallback is how often a request that waits looks for a fallback that has room, once it has waited long enough for one.
const lookForFallback = 250 * time.Millisecond

// untilFallback is how long the request is still to wait before it goes on to a fallback; ok is false if it has none.
func (x *exchange) untilFallback() (d time.Duration, ok bool) {
	if !x.named.HasFallback() || x.committed {
		return 0, false
	}
	return max(0, x.named.FallbackAfter()-x.wait.took), true
}

// fallbackHasRoom reports whether a model that the request may fall back on could take it now.
//
//go:noinline
func (x *exchange) fallbackHasRoom() bool {
	s, now := x.h.table.Load(), x.h.opts.Now()
	for next := x.named; next.HasFallback(); {
		q := x.nameQuery()
		if !x.routes.Names.FallBack(&next, s, &q) {
			return false
		}
		p := x.routes.pools[s.Pools[next.Target.Pool].Name]
		if p == nil {
			continue
		}
		var limits scoring.Limits
		waiting := 0
		limited := p.admitter != nil
		if limited {
			o := p.admitter.o.Load()
			limits, limited = o.Limits, !o.unlimited && !o.off
			waiting = p.admitter.queue.Waiting()
		}
		switch p.Policy.Room(&scoring.Request{Target: next.Target}, s, now, &limits) {
		case scoring.Free:
			if waiting == 0 || !limited {
				return true
			}
		case scoring.Saturated, scoring.NoSlot:
			if !limited { // nothing waits there
				return true
			}
		}
	}
	return false
}

// defaultAdapterWait is how long a request waits for its adapter.
const defaultAdapterWait = 30 * time.Second

// loadable reports whether the request is for an adapter that could be loaded.
func (x *exchange) loadable() bool { return x.pool.Adapters != nil && x.query.Target.Adapter }

// wantAdapter has the request's adapter loaded, if it is one and somebody can do that. It returns a failure if that is no use.
func (x *exchange) wantAdapter() *failure {
	if !x.loadable() {
		return nil
	}
	if err := x.pool.Adapters.Want(x.query.Target); err != nil {
		return &failure{outcome: NoEndpoints, param: "model", err: err, message: "the adapter " + strconv.Quote(cut(x.query.Target.Name, 200)) + " could not be loaded; try again later", retryAfterSeconds: 10}
	}
	return nil
}

// adapterGone takes in that ep doesn't have the request's adapter, and reports whether the request may go on to where it is
// loaded next, on ep again perhaps.
func (x *exchange) adapterGone(ep *endpoint) bool {
	if !x.loadable() || !x.attemptsLeft() {
		return false
	}
	x.h.table.RemoveServed(ep.Endpoint, x.query.Target.Name, x.h.opts.Now())
	return true
}

// admitAgain is admit for a request whose adapter was lost where it went.
//
//go:noinline
func (x *exchange) admitAgain() *failure {
	x.held = nil
	x.query.Tried[min(x.attempt, len(x.query.Tried))-1] = nil
	x.snapshot = x.h.table.Load()
	t := x.snapshot.TargetString(x.query.Target.Name)
	if t == nil {
		return &failure{outcome: NoEndpoints, message: msgNoEndpoints, retryAfterSeconds: 1}
	}
	x.query.Target = t
	return x.admit()
}

// enterQueue waits until the request has been started, or is not going to be.
func (x *exchange) enterQueue(a *admitter, o *AdmissionOptions, patience time.Duration) *failure {
	w := &x.wait
	if w.woken == nil {
		woken := make(chan struct{}, 1)
		w.woken, w.wake = woken, func() {
			select {
			case woken <- struct{}{}:
			default:
			}
		}
	}
	x.callerFromHeaders(o)
	w.at, w.started, w.failure = a, false, nil
	_, tokens := x.pool.Policy.Tokens(&x.query)
	w.waiter = admission.Waiter{
		Owner: x, Tenant: x.tenant, Class: classes[x.class-caller.Low], Lane: x.query.Target.Hash,
		Tokens: int64(tokens), Bytes: int64(x.bodyLen), Patience: patience,
	}
	x.watchClient()
	if d, ok := x.untilFallback(); ok && d == 0 && x.fallbackHasRoom() {
		return &failure{outcome: Saturated, message: "no model server has room for the request; try again later", retryAfterSeconds: 1}
	}
	if !x.lease.waiting(w.wake) {
		return x.cancelFailure()
	}
	w.since, w.queued = time.Now(), true
	if a.queue.Enter(&w.waiter, x.h.opts.Now()) {
		a.roomMade()
		x.awaitTurn(a, cmp.Or(patience, o.MaxWait))
	}
	x.lease.waited()
	gone := a.queue.Leave(&w.waiter, x.h.opts.Now())
	w.took += time.Since(w.since)
	select { // nobody sends any more: what was sent twice is not for the next request
	case <-w.woken:
	default:
	}
	switch {
	case gone:
		return x.cancelFailure()
	case w.failure != nil:
		return w.failure
	}
	return nil
}

// awaitTurn waits until the request has been started, refused or cancelled, for that long at most, or until it is to fall back.
func (x *exchange) awaitTurn(a *admitter, most time.Duration) {
	w := &x.wait
	after, falls := x.untilFallback()
	falls = falls && after < most
	next := most
	if falls {
		next = after
	}
	timer := time.NewTimer(next)
	defer timer.Stop()
	for {
		select {
		case <-w.woken:
			return
		case <-timer.C:
		}
		now := x.h.opts.Now()
		left := most - time.Since(w.since)
		switch {
		case left <= 0 || !falls:
			a.queue.Expire(&w.waiter, now)
			return
		case x.fallbackHasRoom():
			// Not if it has been started meanwhile: then it is on its way.
			if a.queue.Leave(&w.waiter, now) {
				w.failure = &failure{outcome: Saturated, message: "no model server had room for the request in time; try again later", retryAfterSeconds: 1, err: errors.New("it waited for as long as its rule has it wait before it falls back")}
			}
			return
		}
		timer.Reset(min(lookForFallback, left))
	}
}

// classes are admission's, by the caller's from the lowest up.
var classes = [...]admission.Class{admission.Low, admission.Normal, admission.High}

// callerFromHeaders takes who the request is for from the fields that o names, where nobody has authenticated. It is asked
// only of a request that must wait.
func (x *exchange) callerFromHeaders(o *AdmissionOptions) {
	if x.caller != nil {
		return
	}
	if o.TenantHeader != "" {
		x.tenant = text(x.Field(o.TenantHeader))
	}
	if o.ClassHeader != "" {
		if c, ok := caller.ParseClass(text(x.Field(o.ClassHeader))); ok {
			x.class = c
		}
	}
}

// leaveQueue takes the request out of the queue whatever happened to it.
func (x *exchange) leaveQueue() {
	if !x.wait.queued {
		return
	}
	a := x.wait.at
	a.queue.Leave(&x.wait.waiter, x.h.opts.Now()) // does nothing unless waiting panicked
	if x.wait.failure == nil && x.decision.Endpoint != nil && a.queue.Waiting() > 0 {
		// The tenant was charged an estimate. An answer that says nothing of tokens leaves it at that.
		if u := x.usageKnown(); u > 0 {
			a.queue.Settle(x.wait.waiter.Tenant, x.wait.waiter.Class, u-x.wait.waiter.Tokens)
		}
	}
}

// usageKnown is how many tokens the answer says that it took; 0 if it doesn't.
func (x *exchange) usageKnown() int64 {
	if !x.scanning {
		return 0
	}
	u := x.usage()
	return u.InputTokens + u.OutputTokens
}

// Start implements admission.Starter: it chooses an endpoint for the request and books it there.
func (a *admitter) Start(w *admission.Waiter, now pool.Instant) (answer admission.Answer) {
	x := w.Owner.(*exchange)
	defer func() { // runs on the admitter's goroutine, where a panic would cost every request
		if v := recover(); v != nil {
			x.wait.failure = a.h.panicked(v)
			x.wait.wake()
			answer = admission.Gone
		}
	}()
	s, o := a.h.table.Load(), a.o.Load()
	t := s.TargetString(x.query.Target.Name)
	if t == nil {
		x.wait.failure = &failure{outcome: NoEndpoints, message: msgNoEndpoints, retryAfterSeconds: 1}
		x.wait.wake()
		return admission.Gone
	}
	x.query.Target = t
	if !o.off {
		switch room := x.pool.Policy.Room(&x.query, s, now, &o.Limits); room {
		case scoring.Saturated, scoring.NoSlot:
			if o.unlimited {
				break
			}
			if x.loadable() {
				x.pool.Adapters.Short(t)
			}
			if room == scoring.NoSlot {
				return admission.Stuck
			}
			return admission.NoRoom
		case scoring.Nobody:
			if f := x.wantAdapter(); f != nil {
				x.wait.failure = f
				x.wait.wake()
				return admission.Gone
			}
			if o.EndpointWait > 0 || x.loadable() {
				return admission.NoRoom
			}
		case scoring.Free:
			x.query.SlotFree = !o.unlimited
		}
	}
	x.explain(s, now)
	began := time.Now()
	d, err := x.pool.Policy.Choose(&x.query, s, now, &x.booking)
	x.deciding += time.Since(began)
	if err != nil {
		x.wait.failure = undecided(err)
	} else {
		x.decision, x.snapshot, x.wait.started = d, s, true
	}
	x.wait.wake()
	if err != nil {
		return admission.Gone
	}
	return admission.Started
}

// Refuse implements admission.Starter.
func (a *admitter) Refuse(w *admission.Waiter, why admission.Reason, retryAfter time.Duration) {
	x := w.Owner.(*exchange)
	f := &failure{outcome: Saturated, retryAfterSeconds: int(math.Ceil(retryAfter.Seconds()))}
	switch why {
	case admission.Full, admission.Shed:
		f.message = "too many requests are waiting for this model; try again later"
	case admission.TooLate:
		f.message = "the requests that are waiting for this model will take too long; try again later"
	case admission.Expired:
		f.outcome, f.message = QueueTimeout, "no model server had room for the request in time; try again later"
		if w.Patience > 0 && x.pool.Policy.Room(&x.query, a.h.table.Load(), a.h.opts.Now(), &a.o.Load().Limits) == scoring.Nobody {
			f.outcome, f.message = NoEndpoints, "no model server has become ready in time; try again later"
			if x.loadable() {
				f.message, f.param = "the adapter could not be loaded in time; try again later", "model"
			}
		}
	}
	f.err = fmt.Errorf("refused while waiting: %s", why)
	x.wait.failure = f
	x.wait.wake()
}

// AdmissionStats describe the queue of one pool, and what its work takes.
type AdmissionStats struct {
	Pool string
	admission.Stats
	scoring.Demand
	Tenants []admission.TenantStats // that wait, by class, those with most waiting first
}

// Admission describes every pool: also one that never has requests wait has a demand.
func (h *Handler) Admission() []AdmissionStats {
	routes, s, now := h.routes.Load(), h.table.Load(), h.opts.Now()
	var all []AdmissionStats
	for i := range s.Pools {
		p := routes.pools[s.Pools[i].Name]
		if p == nil {
			continue
		}
		st := AdmissionStats{Pool: p.Name}
		var limits scoring.Limits
		var tokens int64
		waiting := 0
		if a := p.admitter; a != nil {
			waiting = a.queue.Waiting()
			st.Stats, limits = a.queue.Stats(), a.o.Load().Limits
			if waiting > 0 {
				st.Tenants = a.queue.AppendTenants(nil)
			}
			for _, t := range st.Tokens {
				tokens += t
			}
		}
		st.Demand = p.Policy.Demand(s.PoolRows(i), now, &limits, waiting, tokens)
		all = append(all, st)
	}
	return all
}
