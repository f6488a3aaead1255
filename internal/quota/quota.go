// Package quota says whether a tenant may use more: requests, requests at a time, and input, output and total tokens within
// windows that slide. What a request may cost is charged before it goes and corrected by what it did cost.
//
// It imports nothing of kvgate's but pool and internal/caller and reads no clock: time comes in as an argument.
package quota

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/internal/caller"
	"kvgate/pool"
)

// A Kind is what a limit counts.
type Kind uint8

// The kinds.
const (
	Requests Kind = iota
	InputTokens
	OutputTokens
	TotalTokens
	numKinds
	Concurrent = numKinds // requests at a time, which has no window
)

var kindWords = [...]string{"requests", "input_tokens", "output_tokens", "total_tokens", "concurrent requests"}

// String returns the kind's word.
func (k Kind) String() string { return kindWords[k] }

// A Limit is how much the tenants, or the key, that it is for may use of some models.
type Limit struct {
	Tenant string // a name or a pattern; each tenant that matches has the limit for itself. Not looked at if Key is set
	Key    string // the name of a key, that the limit is for alone
	// Models are what it is about, nil for all; they share it, or with PerModel each has it for itself. Patterns are what
	// Models was made of, for telling limits apart.
	Models   *caller.Models
	Patterns []string
	PerModel bool

	Window     time.Duration
	Amounts    [numKinds]int64 // by kind; 0 is no limit
	Concurrent int64           // 0 is no limit
}

// id tells the limit apart from others whatever its amounts are, so that a reload that changes them keeps the share that was used.
func (l *Limit) id() string {
	return fmt.Sprintf("%s|%s|%s|%t|%s", strconv.Quote(l.Tenant), strconv.Quote(l.Key), strings.Join(l.Patterns, ","), l.PerModel, l.Window)
}

// Cost is what a request uses, in tokens. That it is one request goes without saying.
type Cost struct{ Input, Output int64 }

// of is how much of k it is, within what can be added up.
func (c Cost) of(k Kind) int64 {
	c.Input, c.Output = min(max(c.Input, 0), farthest), min(max(c.Output, 0), farthest)
	switch k {
	case Requests:
		return 1
	case InputTokens:
		return c.Input
	case OutputTokens:
		return c.Output
	}
	return c.Input + c.Output
}

// An account is what has been used of a limit by one tenant, or of one model by it. It follows the generic cell rate
// algorithm (GCRA; ITU-T I.371, there for cells of ATM): a single instant, the theoretical arrival time, at which nothing
// would be used any more. Using n of the amount L moves it on by n·W/L from now, or from where it was if that is later; it may
// not come to lie more than W ahead. So what is used comes back evenly, all of it within the window W. One atomic number
// takes and checks at once: requests that run at the same time can't together take more than there is.
type account struct {
	id      string
	tat     [numKinds]atomic.Int64 // nanoseconds on the caller's clock
	running atomic.Int64
}

// take moves the arrival time on by inc, and reports whether it stays within the window; if not it stays where it was, and
// wait is how long until it would.
func (a *account) take(k Kind, inc, window, now int64) (tat, wait int64, ok bool) {
	for {
		old := a.tat[k].Load()
		tat = min(max(old, now), now+farthest) + inc
		if wait = tat - now - window; wait > 0 && inc > 0 {
			return old, wait, false
		}
		if a.tat[k].CompareAndSwap(old, tat) {
			return tat, 0, true
		}
	}
}

// correct moves the arrival time by inc, either way, whatever there is: what has been used has been used.
func (a *account) correct(k Kind, inc, now int64) {
	if inc < 0 {
		a.tat[k].Add(inc)
		return
	}
	for {
		old := a.tat[k].Load()
		if a.tat[k].CompareAndSwap(old, min(max(old, now)+inc, now+farthest)) {
			return
		}
	}
}

// A bucket is an account and the limit that it is of.
type bucket struct {
	*account
	limit *Limit
	tag   uint64 // of the tenant
}

// step is by how much n of the amount moves the arrival time; 0 for less than none.
func (b *bucket) step(k Kind, n int64) int64 {
	d := math.Ceil(float64(n) * float64(b.limit.Window) / float64(b.limit.Amounts[k]))
	return int64(min(max(d, 0), farthest))
}

// farthest is the most by which the arrival time moves, 36 years: whoever asks for more tokens than there are must not make
// the sum overflow.
const farthest = 1 << 60

// A Limiter knows the limits and what has been used of them. It is safe for concurrent use.
type Limiter struct {
	limits []Limit
	ids    []string // of limits, each once
	store  Store
	closed bool // refuse what the store can't be asked about
	books  *books

	mu     sync.RWMutex
	rows   map[row][]*bucket // which limits a request has, as far as that was asked
	most   int               // rows and accounts
	forgot int64             // when forget ran last
}

// books are the accounts of all limits; they outlive limiters.
type books struct {
	mu   sync.Mutex
	byID map[string]*account
}

// A row is what limits depend on.
type row struct{ tenant, key, model string }

// maxRows bounds what is remembered: tenants may come from tokens and models from servers. Beyond it what is unused is
// forgotten, and if that doesn't do, the names beyond it share one account of each limit.
const maxRows = 1 << 17

// Options are what a Limiter is made of.
type Options struct {
	Limits []Limit
	Store  Store // shares the counts; nil: they are this process's own
	Closed bool  // requests are refused while the store can't be asked, instead of counted here alone
	Before *Limiter
}

// New returns the limiter of these limits. What was used under Before stays used.
func New(o Options) *Limiter {
	l := &Limiter{limits: o.Limits, store: o.Store, closed: o.Closed, rows: make(map[row][]*bucket), most: maxRows}
	if o.Before != nil {
		l.books = o.Before.books
	} else {
		l.books = &books{byID: make(map[string]*account)}
	}
	seen := make(map[string]int)
	for i := range l.limits {
		id := l.limits[i].id()
		if seen[id]++; seen[id] > 1 {
			id += "|" + strconv.Itoa(seen[id])
		}
		l.ids = append(l.ids, id)
	}
	return l
}

// NeedsUsage reports whether any limit is of tokens.
func (l *Limiter) NeedsUsage() bool {
	for i := range l.limits {
		for k := InputTokens; k < numKinds; k++ {
			if l.limits[i].Amounts[k] > 0 {
				return true
			}
		}
	}
	return false
}

// buckets returns the accounts of the limits that a request has.
func (l *Limiter) buckets(c *caller.Caller, tenant string, t *pool.Target, now int64) []*bucket {
	r := row{tenant: tenant, model: t.Name}
	if c != nil {
		r.key = c.Key
	}
	l.mu.RLock()
	found, ok := l.rows[r]
	l.mu.RUnlock()
	if ok {
		return found
	}
	// Slow path: the first request of its kind.
	r = row{strings.Clone(r.tenant), strings.Clone(r.key), strings.Clone(r.model)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if found, ok := l.rows[r]; ok {
		return found
	}
	if (len(l.rows) >= l.most || l.books.len() >= l.most) && now-l.forgot > int64(time.Second) {
		l.forgot = now
		l.forget(now)
	}
	crowded := len(l.rows) >= l.most || l.books.len() >= l.most
	for i := range l.limits {
		m := &l.limits[i]
		if m.Key != "" && m.Key != r.key || m.Key == "" && !caller.Match(m.Tenant, r.tenant) || !m.Models.Has(t) {
			continue
		}
		id := l.ids[i]
		switch {
		case crowded:
			id += "|others"
		case m.PerModel:
			id += "|" + strconv.Quote(r.tenant) + "|" + strconv.Quote(r.model)
		default:
			id += "|" + strconv.Quote(r.tenant)
		}
		found = append(found, &bucket{l.books.account(id), m, pool.HashName(r.tenant)})
	}
	if !crowded {
		l.rows[r] = found
	}
	return found
}

func (b *books) len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.byID)
}

func (b *books) account(id string) *account {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.byID[id]
	if a == nil {
		a = &account{id: id}
		b.byID[id] = a
	}
	return a
}

// forget drops accounts of which nothing is used.
func (l *Limiter) forget(now int64) {
	clear(l.rows)
	l.books.mu.Lock()
	defer l.books.mu.Unlock()
	for id, a := range l.books.byID {
		idle := a.running.Load() == 0
		for k := range a.tat {
			idle = idle && a.tat[k].Load() <= now
		}
		if idle {
			delete(l.books.byID, id)
		}
	}
}

// A Charge is what one request has taken of its limits. The zero Charge has taken nothing; one that is used again doesn't
// allocate. Not safe for concurrent use.
type Charge struct {
	l     *Limiter
	items []item
	held  []*account // of which it is one of the running requests
	cost  Cost
}

type item struct {
	b    *bucket
	kind Kind
	inc  int64
	tat  int64 // after it
}

// A Refusal says why a request may not go.
type Refusal struct {
	Kind      Kind
	Limit     int64
	Used      int64 // of it; not of Concurrent
	Asked     int64
	Window    time.Duration
	Wait      time.Duration // until it would fit, with nothing else asked for
	Never     bool          // it asks for more than the whole limit
	Unchecked bool          // the store can't be asked
}

// String is what the client is told.
func (r *Refusal) String() string {
	switch {
	case r.Unchecked:
		return "the rate limits can't be checked at the moment; try again later"
	case r.Kind == Concurrent:
		return fmt.Sprintf("rate limit reached: %d requests at a time; try again when one of them has ended", r.Limit)
	case r.Never:
		return fmt.Sprintf("the request is larger than the rate limit: limit %d %s per %s, requested %d; ask for fewer tokens", r.Limit, r.Kind, short(r.Window), r.Asked)
	}
	return fmt.Sprintf("rate limit reached: limit %d %s per %s, used %d, requested %d; try again in %s", r.Limit, r.Kind, short(r.Window), r.Used, r.Asked, short(max(r.Wait, time.Millisecond)))
}

// Take charges a request to every limit that it has, all of them or none. now is in nanoseconds, since any instant that stays
// the same. ch must have been settled. It returns nil if the request may go.
func (l *Limiter) Take(ch *Charge, c *caller.Caller, tenant string, t *pool.Target, cost Cost, now int64) *Refusal {
	buckets := l.buckets(c, tenant, t, now)
	if len(buckets) == 0 {
		return nil
	}
	ch.l, ch.cost = l, cost
	for _, b := range buckets {
		if b.limit.Concurrent > 0 {
			if n := b.running.Add(1); n > b.limit.Concurrent {
				b.running.Add(-1)
				ch.undo(now)
				return &Refusal{Kind: Concurrent, Limit: b.limit.Concurrent, Wait: time.Second}
			}
			ch.held = append(ch.held, b.account)
		}
		for k := range numKinds {
			if b.limit.Amounts[k] == 0 {
				continue
			}
			n := cost.of(k)
			inc := b.step(k, n)
			tat, wait, ok := b.take(k, inc, int64(b.limit.Window), now)
			ch.items = append(ch.items, item{b, k, inc, tat})
			if !ok {
				r := refusal(b, k, n, tat, wait, now)
				ch.items[len(ch.items)-1].inc = 0
				ch.undo(now)
				return r
			}
		}
	}
	if l.store != nil && len(ch.items) > 0 {
		return l.takeShared(ch, now)
	}
	return nil
}

func refusal(b *bucket, k Kind, n, tat, wait, now int64) *Refusal {
	limit := b.limit.Amounts[k]
	return &Refusal{
		Kind: k, Limit: limit, Used: min(limit, int64(float64(max(0, tat-now))/float64(b.limit.Window)*float64(limit)+0.5)), Asked: n, Window: b.limit.Window,
		Wait: time.Duration(wait), Never: n > limit,
	}
}

// undo gives back what ch has taken here. What limits said stays in it, for headers.
func (ch *Charge) undo(now int64) {
	for i := range ch.items {
		it := &ch.items[i]
		if it.inc > 0 {
			it.b.correct(it.kind, -it.inc, now)
			it.tat -= it.inc
			it.inc = 0
		}
	}
	ch.release()
	ch.l = nil
}

func (ch *Charge) release() {
	for _, a := range ch.held {
		a.running.Add(-1)
	}
	ch.held = ch.held[:0]
}

// Taken reports whether ch holds anything that is to be settled.
func (ch *Charge) Taken() bool { return ch.l != nil }

// Active reports whether any limit with a window was asked.
func (ch *Charge) Active() bool { return len(ch.items) > 0 }

// Charged is what has been charged, as long as it has not been settled.
func (ch *Charge) Charged() Cost { return ch.cost }

// Settle ends the request and corrects what was charged by what it cost. With counts false it was no request at all. Without
// a charge it does nothing.
func (ch *Charge) Settle(cost Cost, counts bool, now int64) {
	if ch.l == nil {
		return
	}
	var moved bool
	for i := range ch.items {
		it := &ch.items[i]
		if it.inc == 0 && it.kind == Requests { // it was refused
			continue
		}
		n := cost.of(it.kind)
		if !counts {
			n = 0
		}
		inc := it.b.step(it.kind, n) - it.inc
		if inc != 0 {
			it.b.correct(it.kind, inc, now)
		}
		it.inc = inc // for the store
		moved = moved || inc != 0
	}
	ch.release()
	if moved && ch.l.store != nil {
		ch.l.addShared(ch)
	}
	ch.Reset()
}

// Reset forgets the charge. It is for charges that were refused; others are settled.
func (ch *Charge) Reset() {
	clear(ch.items)
	clear(ch.held)
	*ch = Charge{items: ch.items[:0], held: ch.held[:0]}
}

// A State is how much of a limit is used, and whether a request fits.
type State struct {
	Kind   Kind
	Limit  int64
	Window time.Duration // 0 of Concurrent
	Used   int64
	Asked  int64    // by the request
	Why    *Refusal // nil: it fits
}

// String returns the state as a line for people.
func (s *State) String() string {
	text := fmt.Sprintf("%d %s", s.Limit, s.Kind)
	if s.Kind != Concurrent {
		text += " per " + short(s.Window)
	}
	return text + fmt.Sprintf(": %d used, %d asked", s.Used, s.Asked)
}

// Look is Take without taking anything: it tells of every limit that the request has. It allocates, and asks the store.
func (l *Limiter) Look(c *caller.Caller, tenant string, t *pool.Target, cost Cost, now int64) (states []State, err error) {
	var ops []Op
	type at struct {
		b *bucket
		k Kind
	}
	var of []at
	for _, b := range l.buckets(c, tenant, t, now) {
		if most := b.limit.Concurrent; most > 0 {
			s := State{Kind: Concurrent, Limit: most, Used: b.running.Load(), Asked: 1}
			if s.Used >= most {
				s.Why = &Refusal{Kind: Concurrent, Limit: most, Wait: time.Second}
			}
			states = append(states, s)
		}
		for k := range numKinds {
			if b.limit.Amounts[k] > 0 {
				of = append(of, at{b, k})
				ops = append(ops, Op{b.id, b.tag, k, 0, int64(b.limit.Window)})
			}
		}
	}
	ahead := make([]int64, len(ops))
	for i, o := range of {
		ahead[i] = max(0, o.b.tat[o.k].Load()-now)
	}
	if l.store != nil && len(ops) > 0 {
		tats := make([]int64, len(ops))
		if _, err = l.store.Take(ops, tats); err == nil {
			ahead = tats
		}
	}
	for i, o := range of {
		n, window := cost.of(o.k), int64(o.b.limit.Window)
		s := State{Kind: o.k, Limit: o.b.limit.Amounts[o.k], Window: o.b.limit.Window, Asked: n}
		inc := o.b.step(o.k, n)
		r := refusal(o.b, o.k, n, now+ahead[i], ahead[i]+inc-window, now)
		if s.Used = r.Used; inc > 0 && ahead[i]+inc > window {
			s.Why = r
		}
		states = append(states, s)
	}
	return states, err
}

// Closed reports whether requests are refused while the store can't be asked.
func (l *Limiter) Closed() bool { return l.closed }

// AppendHeaders appends the x-ratelimit fields, as OpenAI sends them, of the limits with the least left: one of requests, one
// of tokens.
func (ch *Charge) AppendHeaders(dst []byte, now int64) []byte {
	var tightest [2]*item
	var least [2]float64
	for i := range ch.items {
		it := &ch.items[i]
		g := 1
		if it.kind == Requests {
			g = 0
		}
		left := 1 - float64(max(0, it.tat-now))/float64(it.b.limit.Window)
		if tightest[g] == nil || left < least[g] {
			tightest[g], least[g] = it, left
		}
	}
	for g, what := range [...]string{"requests", "tokens"} {
		it := tightest[g]
		if it == nil {
			continue
		}
		limit := it.b.limit.Amounts[it.kind]
		dst = append(append(append(dst, "x-ratelimit-limit-"...), what...), ": "...)
		dst = strconv.AppendInt(dst, limit, 10)
		dst = append(append(append(dst, "\r\nx-ratelimit-remaining-"...), what...), ": "...)
		dst = strconv.AppendInt(dst, int64(max(0, least[g])*float64(limit)+1e-6), 10)
		dst = append(append(append(dst, "\r\nx-ratelimit-reset-"...), what...), ": "...)
		dst = appendShort(dst, time.Duration(max(0, it.tat-now)))
		dst = append(dst, "\r\n"...)
	}
	return dst
}

func short(d time.Duration) string { return string(appendShort(nil, d)) }

// appendShort appends a duration as OpenAI writes them: 6m0s, 1.5s, 120ms. It is rounded up to milliseconds.
func appendShort(dst []byte, d time.Duration) []byte {
	ms := int64((d + time.Millisecond - 1) / time.Millisecond)
	if ms < 1000 {
		if ms == 0 {
			return append(dst, "0s"...)
		}
		return append(strconv.AppendInt(dst, ms, 10), "ms"...)
	}
	if h := ms / 3_600_000; h > 0 {
		dst = append(strconv.AppendInt(dst, h, 10), 'h')
	}
	if ms >= 60_000 {
		dst = append(strconv.AppendInt(dst, ms/60_000%60, 10), 'm')
	}
	dst = strconv.AppendInt(dst, ms/1000%60, 10)
	if ms %= 1000; ms > 0 {
		dst = append(dst, '.', byte('0'+ms/100), byte('0'+ms/10%10), byte('0'+ms%10))
		for dst[len(dst)-1] == '0' {
			dst = dst[:len(dst)-1]
		}
	}
	return append(dst, 's')
}
