// Package admission holds requests while every endpoint that could serve them has enough to do: bounded, by strict priority
// between classes, fair by tokens between the tenants of a class.
//
// A [Queue] decides order and bounds, nothing else. Whether there is room, and where, is for the caller to say, who books
// the request when he says so: the booking is the permit, so that there is no count beside it that could leak.
//
// It imports pool alone, starts no goroutine and reads no clock: time comes in as a [pool.Instant], so that the proxy and a
// simulation in virtual time run the same code.
package admission

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// A Class is a strict priority: while a request of a class could go, none of a lower one does.
type Class uint8

// The classes. The zero Class is Normal, so that a caller who knows nothing of classes asks for no favour.
const (
	Normal Class = iota
	High
	Low
	numClasses
)

// order lists the classes, the first to be served first.
var order = [numClasses]Class{High, Normal, Low}

var classNames = [numClasses]string{Normal: "normal", High: "high", Low: "low"}

// String returns the class's name.
func (c Class) String() string {
	if c < numClasses {
		return classNames[c]
	}
	return ""
}

// Classes lists the classes, the first to be served first.
func Classes() []Class { return slices.Clone(order[:]) }

// ClassNamed returns the class with this name.
func ClassNamed[S ~string | ~[]byte](name S) (Class, bool) {
	for c, n := range classNames {
		if n == string(name) {
			return Class(c), true
		}
	}
	return Normal, false
}

// rank is the class's place in order.
func (c Class) rank() int { return slices.Index(order[:], c) }

// A Reason says why a request that waited, or would have, did not go.
type Reason uint8

// The reasons.
const (
	Full    Reason = iota // as many requests, or bytes, wait as may
	TooLate               // it would wait longer than it may, at the pace of the queue
	Shed                  // it made room for a request of a higher class, or of a tenant that had less waiting
	Expired               // it has waited as long as it may
	numReasons
)

var reasonNames = [numReasons]string{Full: "full", TooLate: "too_late", Shed: "shed", Expired: "expired"}

// String returns the reason's word.
func (r Reason) String() string {
	if r < numReasons {
		return reasonNames[r]
	}
	return ""
}

// Reasons lists the reasons.
func Reasons() []Reason { return []Reason{Full, TooLate, Shed, Expired} }

// Options bound a [Queue].
type Options struct {
	MaxWaiting int   // requests
	MaxBytes   int64 // of their bodies
	// MaxWait is how long a request may wait. It is what bursts are absorbed with.
	MaxWait time.Duration
	// StandingWait is how long a request may wait in a standing queue: when a tenant's oldest request has always waited for
	// longer than this during MaxWait. More comes in than goes out then, some are going to be refused however long the
	// queue is, and a long one only makes those late that are not. For the same reason such a queue serves who came last
	// first: those who go have waited for next to nothing. It stands until it is empty, or nearly. 0: queues never stand.
	StandingWait time.Duration
	// Shed lets a request that finds the queue full take the place of one of a lower class.
	Shed bool
	// Weights are the shares of tenants under contention; one that isn't there has 1.
	Weights map[string]float64
}

// An Answer is what came of trying to start a request.
type Answer uint8

// The answers.
const (
	Started Answer = iota // it is booked and on its way
	NoRoom                // not now; nor could any other one of its lane
	Gone                  // it is not to wait any more; the caller knows why
	// Stuck is NoRoom for want of something that its lane alone needs, such as a slot for its adapter, while there is room for
	// others. That says nothing of whether more comes in than goes out.
	Stuck
)

// A Starter starts requests for a [Queue]. It is called with the queue locked: it must not call it, and must not block.
type Starter interface {
	// Start books w and has it go, if there is room for it.
	Start(w *Waiter, now pool.Instant) Answer
	// Refuse tells w that it won't go. retryAfter is when the queue will have drained as far as it is known now.
	Refuse(w *Waiter, why Reason, retryAfter time.Duration)
}

// A Waiter is one request in a [Queue]. The caller fills in the exported fields before Enter and leaves it alone until it has
// been started, refused or taken out.
type Waiter struct {
	Owner  any    // for the Starter
	Tenant string // who pays
	Class  Class
	// Lane tells requests apart that can be started independently of each other, such as those for different adapters: one
	// that finds no room holds up its own lane only.
	Lane   uint64
	Tokens int64 // that it will take, prompt and output, estimated: what tenants are charged
	Bytes  int64 // of memory that it holds while it waits
	// Patience is how long it may wait, whatever Options say: for an endpoint to appear, say. 0: as Options say.
	Patience time.Duration

	queued     bool
	entered    pool.Instant
	deadline   pool.Instant
	flow       *flow
	lane       *lane
	prev, next *Waiter // of the lane
}

// Deadline is when w has waited long enough.
func (w *Waiter) Deadline() pool.Instant { return w.deadline }

// A Queue holds requests that wait. It is safe for concurrent use.
type Queue struct {
	start   Starter
	waiting atomic.Int64 // readers take no lock; writers hold mu

	mu      sync.Mutex
	o       Options
	bytes   int64
	classes [numClasses]class
	lanes   map[uint64]*place // by Waiter.Lane
	pass    uint64            // of Dispatch
	refused [numClasses][numReasons]uint64
}

// class is what waits of one class.
type class struct {
	flows  map[string]*flow // of tenants that wait, or whose virtual time is ahead
	order  []*flow          // those that wait, by virtual time
	now    float64          // virtual time: that of the flow served last
	n      int
	tokens int64
	drain  meter
}

// flow is what waits of one tenant in one class.
type flow struct {
	class  *class
	tenant string
	weight float64
	time   float64 // virtual: tokens served over weight
	n      int
	tokens int64
	lanes  []*lane // those with something waiting

	queues [2]queue // [1] of stuck lanes, [0] of the others: that one of them stands says nothing of the other
}

// queue is how long the oldest request of some lanes has been waiting.
type queue struct {
	short    pool.Instant // when it last had not waited for long
	stood    pool.Instant // when the queue last stood
	standing bool
}

// queue is the one that l is part of.
func (f *flow) queue(l *lane) *queue {
	if l.stuck {
		return &f.queues[1]
	}
	return &f.queues[0]
}

// lane is what waits of one lane in a flow.
type lane struct {
	*place
	first, last *Waiter
}

// place is one lane, of all flows.
type place struct {
	n       int    // requests waiting
	blocked uint64 // the pass of Dispatch that found no room for it
	stuck   bool   // the last pass that tried it answered Stuck
}

// New returns an empty queue that starts requests by s.
func New(o Options, s Starter) *Queue {
	q := &Queue{start: s, o: o, lanes: make(map[uint64]*place)}
	for i := range q.classes {
		q.classes[i].flows = make(map[string]*flow)
	}
	return q
}

// Configure changes the options. Requests that wait keep their deadlines.
func (q *Queue) Configure(o Options) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.o = o
	for i := range q.classes {
		for _, f := range q.classes[i].flows {
			f.weight = q.weight(f.tenant)
		}
	}
}

func (q *Queue) weight(tenant string) float64 {
	if w := q.o.Weights[tenant]; w > 0 {
		return w
	}
	return 1
}

// Waiting is how many requests wait. It takes no lock: a request that finds 0 and room may go without entering.
func (q *Queue) Waiting() int { return int(q.waiting.Load()) }

// Enter has w wait from now on. It reports false, and has called Refuse, if it may not. The caller then calls Dispatch, since
// room may have come in the meantime.
func (q *Queue) Enter(w *Waiter, now pool.Instant) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.queued {
		panic("BUG: the request waits already")
	}
	c := &q.classes[w.Class]
	q.run(now)
	f := c.flows[w.Tenant]
	if f == nil {
		c.prune()
		f = &flow{class: c, tenant: strings.Clone(w.Tenant), weight: q.weight(w.Tenant)}
	}
	if why, ok := q.admits(w, f, now); !ok {
		q.refuse(w, f, why)
		return false
	}
	c.flows[f.tenant] = f // w's name may be in memory of its request
	w.entered, w.flow, w.queued = now, f, true
	w.deadline = now.Add(cmp.Or(w.Patience, q.o.MaxWait))
	if f.n == 0 {
		for i := range f.queues {
			f.queues[i].short, f.queues[i].standing = now, false
		}
		f.time = max(f.time, c.now)
		c.insert(f)
	}
	p := q.lanes[w.Lane]
	if p == nil {
		p = &place{}
		q.lanes[w.Lane] = p
	}
	p.n++
	i := slices.IndexFunc(f.lanes, func(l *lane) bool { return l.place == p })
	if i < 0 {
		i = len(f.lanes)
		f.lanes = append(f.lanes, &lane{place: p})
	}
	l := f.lanes[i]
	w.lane, w.prev, w.next = l, l.last, nil
	if l.last == nil {
		l.first = w
	} else {
		l.last.next = w
	}
	l.last = w
	f.n++
	f.tokens += w.Tokens
	c.n++
	c.tokens += w.Tokens
	q.bytes += w.Bytes
	q.waiting.Add(1)
	return true
}

// admits reports whether there is a place for w in the queue, or one that is worth taking from somebody else.
func (q *Queue) admits(w *Waiter, f *flow, now pool.Instant) (Reason, bool) {
	if w.Bytes > q.o.MaxBytes {
		return Full, false
	}
	if w.Patience == 0 {
		if wait, known := q.estimate(w, f); known && !f.queues[0].standing && wait > q.o.MaxWait {
			return TooLate, false
		}
	}
	for int(q.waiting.Load()) >= q.o.MaxWaiting || q.bytes+w.Bytes > q.o.MaxBytes {
		v := q.victim(w, f)
		if v == nil {
			return Full, false
		}
		vf := v.flow
		q.remove(v)
		q.refuse(v, vf, Shed)
	}
	return 0, true
}

// stand notes which of f's queues stand.
func (q *Queue) stand(f *flow, now pool.Instant) {
	oldest := [len(f.queues)]pool.Instant{now, now}
	for _, l := range f.lanes {
		if l.first.Patience == 0 {
			i := 0
			if l.stuck {
				i = 1
			}
			oldest[i] = min(oldest[i], l.first.entered)
		}
	}
	for i := range f.queues {
		u := &f.queues[i]
		if q.o.StandingWait == 0 {
			u.standing = false
			continue
		}
		switch age := now.Sub(oldest[i]); {
		case age <= q.o.StandingWait/2:
			u.short, u.standing = now, false
		case age <= q.o.StandingWait:
			u.short = now
		case now.Sub(u.short) > q.o.MaxWait, u.stood != 0 && now.Sub(u.stood) < q.o.MaxWait: // what has just stood stands again
			u.standing = true
		}
		if u.standing {
			u.stood = now
		}
	}
}

// victim is whose place w may have: the newest request of whoever has most waiting in the lowest class below w's, else of
// whoever has more waiting than w's own tenant would have, in w's class. nil: nobody's.
func (q *Queue) victim(w *Waiter, f *flow) *Waiter {
	if q.o.Shed {
		for r := len(order) - 1; r > w.Class.rank(); r-- {
			if c := &q.classes[order[r]]; c.n > 0 {
				return c.heaviest().newest()
			}
		}
	}
	h := q.classes[w.Class].heaviest()
	if h == nil || h == f || float64(h.tokens)/h.weight <= float64(f.tokens+w.Tokens)/f.weight {
		return nil
	}
	return h.newest()
}

// heaviest is the flow with most waiting for its weight.
func (c *class) heaviest() (h *flow) {
	for _, f := range c.order {
		if h == nil || float64(f.tokens)/f.weight > float64(h.tokens)/h.weight {
			h = f
		}
	}
	return h
}

// newest is the request of f that came last.
func (f *flow) newest() (w *Waiter) {
	for _, l := range f.lanes {
		if w == nil || l.last.entered >= w.entered {
			w = l.last
		}
	}
	return w
}

func (q *Queue) refuse(w *Waiter, f *flow, why Reason) {
	q.refused[w.Class][why]++
	q.start.Refuse(w, why, q.retryAfter(w, f))
}

// Leave takes w out: its client has gone, or its time is up. It reports false if w no longer waits: it has been started or
// refused.
func (q *Queue) Leave(w *Waiter, now pool.Instant) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !w.queued {
		return false
	}
	q.run(now)
	q.remove(w)
	return true
}

// Expire is Leave for a request whose time is up: it is refused.
func (q *Queue) Expire(w *Waiter, now pool.Instant) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !w.queued {
		return false
	}
	q.run(now)
	f := w.flow
	q.remove(w)
	q.refuse(w, f, Expired)
	return true
}

// remove takes w out of every list. Its flow stays in the map with its virtual time.
func (q *Queue) remove(w *Waiter) {
	f, l := w.flow, w.lane
	c := f.class
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.last = w.prev
	}
	if l.first == nil {
		f.lanes = slices.DeleteFunc(f.lanes, func(x *lane) bool { return x == l })
	}
	w.prev, w.next, w.lane, w.flow, w.queued = nil, nil, nil, nil, false
	f.n--
	f.tokens -= w.Tokens
	c.n--
	c.tokens -= w.Tokens
	if l.n--; l.n == 0 {
		delete(q.lanes, w.Lane)
	}
	q.bytes -= w.Bytes
	if f.n == 0 {
		c.order = slices.Delete(c.order, c.position(f), c.position(f)+1)
	}
	q.waiting.Add(-1)
}

func (c *class) position(f *flow) int { return slices.Index(c.order, f) }

// insert puts f where its virtual time belongs, behind its equals.
func (c *class) insert(f *flow) {
	i, _ := slices.BinarySearchFunc(c.order, f.time, func(o *flow, t float64) int {
		if o.time <= t {
			return -1
		}
		return 1
	})
	c.order = slices.Insert(c.order, i, f)
}

const maxIdleFlows = 1024

// prune forgets tenants that have nothing waiting, when there are many: first those whose virtual time says nothing.
func (c *class) prune() {
	if len(c.flows)-len(c.order) < maxIdleFlows {
		return
	}
	for _, behind := range []bool{true, false} {
		for t, f := range c.flows {
			if f.n == 0 && (!behind || f.time <= c.now) {
				delete(c.flows, t)
			}
		}
		if len(c.flows)-len(c.order) < maxIdleFlows {
			return
		}
	}
}

// maxBlocked bounds how many lanes one pass tries in vain, and maxStuck how many that are stuck: where these are, others may
// go.
const (
	maxBlocked = 64
	maxStuck   = 512
)

// Dispatch starts every request that there is room for, in order: by class, then by tenant, least served first, then as they
// came. Call it whenever something has changed that makes room: a first token, an end, an endpoint.
func (q *Queue) Dispatch(now pool.Instant) {
	if q.waiting.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.run(now)
	q.pass++
	blocked, stuck := 0, 0
	for _, o := range order {
		c := &q.classes[o]
		q.age(c, now)
		for i := 0; i < len(c.order); {
			f := c.order[i]
			w := q.next(f)
			if w == nil { // no room for anything of it
				i++
				continue
			}
			switch q.start.Start(w, now) {
			case Started:
				w.lane.stuck = false
				q.remove(w)
				c.now = max(c.now, f.time)
				c.drain.add(w.Tokens)
				q.charge(f, w.Tokens)
			case Gone:
				q.remove(w)
			case NoRoom:
				w.lane.blocked, w.lane.stuck = q.pass, false
				blocked++
			case Stuck:
				w.lane.blocked, w.lane.stuck = q.pass, true
				stuck++
			}
			if blocked >= maxBlocked || stuck >= maxStuck || blocked+stuck >= len(q.lanes) {
				return
			}
		}
	}
}

// charge has f pay for tokens.
func (q *Queue) charge(f *flow, tokens int64) {
	f.time += float64(tokens) / f.weight
	if f.n > 0 {
		i := f.class.position(f)
		f.class.order = slices.Delete(f.class.order, i, i+1)
		f.class.insert(f)
	}
}

// next is the request of f that goes first among those of lanes that may have room: the one that came first, in a standing
// queue the one that came last.
func (q *Queue) next(f *flow) (w *Waiter) {
	for _, l := range f.lanes {
		switch {
		case l.blocked == q.pass:
		case f.queue(l).standing:
			if w == nil || l.last.entered > w.entered {
				w = l.last
			}
		case w == nil || l.first.entered < w.entered:
			w = l.first
		}
	}
	return w
}

// age refuses what has waited too long in c, and finds out which queues stand.
func (q *Queue) age(c *class, now pool.Instant) {
	for i := 0; i < len(c.order); {
		f := c.order[i]
		q.stand(f, now)
		for k := 0; k < len(f.lanes); {
			l, n := f.lanes[k], len(f.lanes)
			for w := l.first; w != nil && (now >= w.deadline || f.queue(l).standing && w.Patience == 0 && now.Sub(w.entered) > q.o.StandingWait); w = l.first {
				q.remove(w)
				q.refuse(w, f, Expired)
			}
			if len(f.lanes) == n {
				k++
			}
		}
		if f.n > 0 {
			i++
		}
	}
}

// Settle corrects what tenant was charged, by the tokens that a request of it took in truth.
func (q *Queue) Settle(tenant string, c Class, more int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if f := q.classes[c].flows[tenant]; f != nil {
		q.charge(f, more)
	}
}

// Stats describe a [Queue] at one moment.
type Stats struct {
	Bytes   int64
	Waiting [numClasses]int
	Tokens  [numClasses]int64
	Refused [numClasses][numReasons]uint64 // ever
}

// Stats returns what waits.
func (q *Queue) Stats() (s Stats) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s.Bytes, s.Refused = q.bytes, q.refused
	for i := range q.classes {
		s.Waiting[i], s.Tokens[i] = q.classes[i].n, q.classes[i].tokens
	}
	return s
}

// A TenantStats is what waits of one tenant in one class.
type TenantStats struct {
	Class   Class
	Tenant  string // "" is requests of nobody in particular
	Waiting int
	Tokens  int64
}

// AppendTenants appends what waits by class and tenant: the classes in order, in each the tenants with most waiting first,
// by name where it is the same.
func (q *Queue) AppendTenants(dst []TenantStats) []TenantStats {
	q.mu.Lock()
	from := len(dst)
	for _, c := range order {
		for _, f := range q.classes[c].order {
			dst = append(dst, TenantStats{c, f.tenant, f.n, f.tokens})
		}
	}
	q.mu.Unlock() // there may be many to sort
	slices.SortFunc(dst[from:], func(a, b TenantStats) int {
		return cmp.Or(cmp.Compare(a.Class.rank(), b.Class.rank()), cmp.Compare(b.Waiting, a.Waiting), cmp.Compare(a.Tenant, b.Tenant))
	})
	return dst
}

// A meter measures how fast a class drains: tokens started over the time in which something waited.
type meter struct {
	tokens, seconds float64
	last            pool.Instant
}

// memory is the time constant of a meter.
const memory = 10 * time.Second

// run has time pass on every meter.
func (q *Queue) run(now pool.Instant) {
	for i := range q.classes {
		c := &q.classes[i]
		if d := now.Sub(c.drain.last).Seconds(); c.n > 0 && d > 0 {
			k := math.Exp(-d / memory.Seconds())
			c.drain.tokens *= k
			c.drain.seconds = c.drain.seconds*k + d
		}
		c.drain.last = max(c.drain.last, now)
	}
}

func (m *meter) add(tokens int64) { m.tokens += float64(tokens) }

// leastMeasured is how long something must have waited for the drain rate to be believed.
const leastMeasured = 0.5

// rate is tokens per second; 0 is unknown.
func (m *meter) rate() float64 {
	if m.seconds < leastMeasured {
		return 0
	}
	return m.tokens / m.seconds
}

// ahead is how many tokens go before w, a request that f does not hold yet: its own tenant's, and of every other as much as
// is served meanwhile.
func (q *Queue) ahead(w *Waiter, f *flow) float64 {
	mine := float64(f.tokens+w.Tokens) / f.weight
	sum := float64(f.tokens)
	for _, o := range f.class.order {
		if o != f {
			sum += min(float64(o.tokens), mine*o.weight)
		}
	}
	return sum
}

// estimate is how long w would wait in f, at the pace at which its class has drained.
func (q *Queue) estimate(w *Waiter, f *flow) (wait time.Duration, known bool) {
	r := f.class.drain.rate()
	if r <= 0 {
		return 0, false
	}
	s := q.ahead(w, f) / r
	return time.Duration(min(s, 1e6) * float64(time.Second)), true
}

const maxRetryAfter = 5 * time.Minute

// retryAfter is when a request like w would find its way: when what is before it has gone. Where nothing is known of the pace,
// it is as long as a request may wait, and where nothing moved all that time, as long as that.
func (q *Queue) retryAfter(w *Waiter, f *flow) time.Duration {
	wait, known := q.estimate(w, f)
	if !known {
		wait = max(q.o.MaxWait, time.Duration(f.class.drain.seconds*float64(time.Second)))
	}
	return min(max(wait, time.Second), maxRetryAfter)
}
