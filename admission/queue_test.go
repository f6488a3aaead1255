package admission

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/pool"
)

// A yard starts requests while it has places, by lane, and writes down what happened.
type yard struct {
	q      *Queue
	now    pool.Instant
	places map[uint64]int
	stuck  map[uint64]bool // lanes that lack something of their own
	log    []string
	told   map[string]time.Duration // what was refused, and when it should try again
	tokens map[string]int64         // started, by tenant
}

func newYard(o Options, places map[uint64]int) *yard {
	y := &yard{now: pool.Instant(time.Hour), places: places, told: map[string]time.Duration{}, tokens: map[string]int64{}}
	y.q = New(o, y)
	return y
}

func (y *yard) Start(w *Waiter, _ pool.Instant) Answer {
	if y.places[w.Lane] <= 0 {
		if y.stuck[w.Lane] {
			return Stuck
		}
		return NoRoom
	}
	y.places[w.Lane]--
	y.log = append(y.log, w.Owner.(string))
	y.tokens[w.Tenant] += w.Tokens
	return Started
}

func (y *yard) Refuse(w *Waiter, why Reason, retryAfter time.Duration) {
	y.log = append(y.log, fmt.Sprintf("-%s:%s", w.Owner, why))
	y.told[w.Owner.(string)] = retryAfter
}

func (y *yard) enter(name, tenant string, c Class, lane uint64, tokens int64) *Waiter {
	w := &Waiter{Owner: name, Tenant: tenant, Class: c, Lane: lane, Tokens: tokens, Bytes: 1}
	y.q.Enter(w, y.now)
	return w
}

// open makes n places in the lane and lets requests go.
func (y *yard) open(lane uint64, n int) {
	y.places[lane] += n
	y.q.Dispatch(y.now)
}

func (y *yard) pass(d time.Duration) { y.now = y.now.Add(d) }

// happened compares the log and begins a new one.
func (y *yard) happened(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(y.log, " "); got != want {
		t.Errorf("happened: %q; want %q", got, want)
	}
	y.log = nil
}

func roomy() Options {
	return Options{MaxWaiting: 1000, MaxBytes: 1 << 20, MaxWait: time.Minute}
}

func TestClassesAreStrict(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	y.enter("l", "t", Low, 0, 1)
	y.enter("n1", "t", Normal, 0, 1)
	y.enter("n2", "t", Normal, 0, 1)
	y.enter("h", "t", High, 0, 1)
	y.open(0, 2)
	y.happened(t, "h n1")
	y.enter("h2", "t", High, 0, 1)
	y.open(0, 5)
	y.happened(t, "h2 n2 l")
	if n := y.q.Waiting(); n != 0 {
		t.Errorf("%d wait; want none", n)
	}
}

func TestLanesDoNotBlockEachOther(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	y.enter("a1", "t", High, 1, 1)
	y.enter("a2", "t", Normal, 1, 1)
	y.enter("b1", "t", Normal, 2, 1)
	y.enter("b2", "u", Low, 2, 1)
	y.open(2, 2)
	y.happened(t, "b1 b2")
	// … but in their own lane the order holds: a lower class does not go before.
	y.enter("a3", "u", Low, 1, 1)
	y.open(1, 1)
	y.happened(t, "a1")
}

func TestTenantsShareTokensNotRequests(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	// one sends ten times as many requests, the other's are three times as long
	for i := range 300 {
		y.enter(fmt.Sprint("big", i), "big", Normal, 0, 100)
		if i%10 == 0 {
			y.enter(fmt.Sprint("small", i), "small", Normal, 0, 300)
		}
	}
	y.open(0, 60)
	if b, s := y.tokens["big"], y.tokens["small"]; b < s-300 || b > s+300 {
		t.Errorf("big got %d tokens, small %d; want the same within a request", b, s)
	}
	// a tenant that comes later is owed nothing for the time in which it sent nothing
	y.enter("late0", "late", Normal, 0, 100)
	y.enter("late1", "late", Normal, 0, 100)
	before := y.tokens["big"]
	y.log = nil
	y.open(0, 3)
	if y.tokens["late"] > 200 || y.tokens["late"] == 0 || y.tokens["big"] == before && y.tokens["small"] == 0 {
		t.Errorf("after the newcomer: %v", y.log)
	}
}

func TestWeights(t *testing.T) {
	o := roomy()
	o.Weights = map[string]float64{"paid": 3}
	y := newYard(o, map[uint64]int{})
	for i := range 400 {
		y.enter(fmt.Sprint(i), []string{"paid", "free"}[i%2], Normal, 0, 10)
	}
	y.open(0, 100)
	if p, f := y.tokens["paid"], y.tokens["free"]; p < 740 || p > 760 {
		t.Errorf("paid %d, free %d; want 3 to 1", p, f)
	}
}

func TestSettleChargesWhatWasTaken(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	for i := range 400 {
		y.enter(fmt.Sprint(i), []string{"long", "short"}[i%2], Normal, 0, 100)
	}
	started := map[string]int{}
	for range 100 {
		y.open(0, 1)
		n := 0
		fmt.Sscan(y.log[len(y.log)-1], &n)
		tenant := []string{"long", "short"}[n%2]
		started[tenant]++
		if tenant == "long" {
			y.q.Settle(tenant, Normal, 300) // it took 400 in truth
		}
	}
	if l := started["long"]; l < 18 || l > 22 {
		t.Errorf("started %v; want 20 of the four times longer ones", started)
	}
}

func TestBounds(t *testing.T) {
	o := Options{MaxWaiting: 3, MaxBytes: 10, MaxWait: time.Second}
	y := newYard(o, map[uint64]int{})
	for i := range 4 {
		y.enter(fmt.Sprint(i), "t", Normal, 0, 1)
	}
	y.happened(t, "-3:full")
	// a tenant that has less waiting gets the place of the newest of the one with most
	y.enter("u", "u", Normal, 0, 1)
	y.happened(t, "-2:shed")
	// two of one are no more than one and one of the other would be
	y.enter("u2", "u", Normal, 0, 1)
	y.happened(t, "-u2:full")
	// a higher class takes no place unless that is asked for
	y.enter("h", "h", High, 0, 1)
	y.happened(t, "-h:full")
	o.Shed = true
	y.q.Configure(o)
	y.enter("h", "h", High, 0, 1)
	y.happened(t, "-1:shed")
	y.open(0, 9)
	y.happened(t, "h 0 u")

	big := &Waiter{Owner: "big", Bytes: 11}
	y.q.Enter(big, y.now)
	y.happened(t, "-big:full")
	for _, n := range []string{"a", "b", "c"} {
		y.q.Enter(&Waiter{Owner: n, Bytes: 5}, y.now)
	}
	y.happened(t, "-c:full")
	if s := y.q.Stats(); s.Bytes != 10 || s.Waiting[Normal] != 2 || s.Refused[Normal][Full] != 4 || s.Refused[Normal][Shed] != 2 || s.Refused[High][Full] != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestLeaving(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	var ws []*Waiter
	for i := range 5 {
		ws = append(ws, y.enter(fmt.Sprint(i), "t", Normal, 0, 1))
	}
	for _, i := range []int{2, 0, 4} {
		if !y.q.Leave(ws[i], y.now) {
			t.Errorf("%d did not wait", i)
		}
	}
	if y.q.Leave(ws[2], y.now) {
		t.Error("left twice")
	}
	y.open(0, 1)
	if y.q.Leave(ws[1], y.now) {
		t.Error("one that has been started left the queue")
	}
	y.open(0, 1)
	y.happened(t, "1 3")
	if s := y.q.Stats(); s.Bytes != 0 || s.Tokens[Normal] != 0 || y.q.Waiting() != 0 {
		t.Errorf("left behind: %+v", s)
	}
}

func TestTenantsThatWait(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{})
	for i, tenant := range []string{"b", "a", "c", "a", "", "c"} {
		y.enter(fmt.Sprint(i), tenant, Normal, uint64(i%2), int64(10+i))
	}
	y.enter("h", "b", High, 0, 5)
	got := y.q.AppendTenants(nil)
	want := []TenantStats{{High, "b", 1, 5}, {Normal, "a", 2, 24}, {Normal, "c", 2, 27}, {Normal, "", 1, 14}, {Normal, "b", 1, 10}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	y.open(0, 9)
	y.open(1, 9)
	if got := y.q.AppendTenants(nil); len(got) != 0 {
		t.Errorf("nothing waits, and it tells of %v", got)
	}
}

func TestDeadlines(t *testing.T) {
	o := roomy()
	o.MaxWait = 10 * time.Second
	y := newYard(o, map[uint64]int{})
	a := y.enter("a", "t", Normal, 0, 1)
	y.pass(time.Second)
	y.enter("b", "t", Normal, 0, 1)
	p := &Waiter{Owner: "patient", Tenant: "t", Patience: time.Hour}
	y.q.Enter(p, y.now)
	if d := a.Deadline().Sub(y.now); d != 9*time.Second {
		t.Errorf("deadline in %v; want 9s", d)
	}
	y.pass(9 * time.Second)
	y.open(0, 0)
	y.happened(t, "-a:expired")
	y.pass(time.Second)
	y.open(0, 1)
	y.happened(t, "-b:expired patient")

	c := y.enter("c", "t", Normal, 0, 1)
	if !y.q.Expire(c, y.now) || y.q.Expire(c, y.now) {
		t.Error("want it to expire once")
	}
	y.happened(t, "-c:expired")
}

// A queue that stands is kept short; a tenant whose requests go as they come is not affected.
func TestStandingQueue(t *testing.T) {
	o := roomy()
	o.MaxWait, o.StandingWait = 10*time.Second, time.Second
	y := newYard(o, map[uint64]int{})
	// 12 requests a second come, 10 go.
	n, longest := 0, time.Duration(0)
	entered := map[string]pool.Instant{}
	refused := 0
	for tick := range 60 * 60 {
		for range []int{1, 0, 0, 0, 0}[tick%5] {
			name := fmt.Sprint("x", n)
			entered[name] = y.now
			y.enter(name, "heavy", Normal, 0, 100)
			n++
		}
		if tick%300 == 0 {
			name := fmt.Sprint("light", tick)
			entered[name] = y.now
			y.enter(name, "light", Normal, 0, 100)
		}
		if tick%6 == 0 {
			y.open(0, 1)
		}
		for _, l := range y.log {
			name, _, no := strings.Cut(strings.TrimPrefix(l, "-"), ":")
			waited := y.now.Sub(entered[name])
			switch {
			case no:
				refused++
				if strings.HasPrefix(name, "light") {
					t.Errorf("%s at %v", l, y.now)
				}
			case strings.HasPrefix(name, "light") && waited > 300*time.Millisecond:
				t.Errorf("%s waited %v; want its turn at once", name, waited)
			case tick > 20*60:
				longest = max(longest, waited)
			}
		}
		y.log = nil
		y.pass(time.Second / 60)
	}
	if longest > 1100*time.Millisecond {
		t.Errorf("a request of a standing queue waited %v; want about 1s at most", longest)
	}
	if refused < 80 || refused > 160 { // 2 a second
		t.Errorf("%d of %d were refused; want about 120", refused, n)
	}
}

// Lanes that are stuck stand by themselves: others of the tenant keep their order and their time. And however many there are,
// others are tried.
func TestStuckLanes(t *testing.T) {
	o := roomy()
	o.MaxWait, o.StandingWait = 10*time.Second, time.Second
	y := newYard(o, map[uint64]int{})
	y.stuck = map[uint64]bool{}
	for lane := uint64(100); lane < 300; lane++ {
		y.stuck[lane] = true
	}
	step := func() {
		for lane := uint64(100); lane < 300; lane++ { // each has somebody waiting all the time
			y.enter("cold", "t", Normal, lane, 10)
		}
		y.pass(500 * time.Millisecond)
		y.open(1, 0)
	}
	for range 30 {
		step()
	}
	cut := strings.Count(strings.Join(y.log, " "), "-cold:expired")
	if cut < 200*10 {
		t.Errorf("%d were cut from a queue that has stood for 5 s; want most", cut)
	}
	// A burst for another adapter is worth waiting for, in its order.
	y.log = nil
	y.enter("1", "t", Normal, 1, 10)
	step()
	y.enter("2", "t", Normal, 1, 10)
	for range 6 {
		step()
	}
	y.log = nil
	y.open(1, 2)
	if got := strings.Join(y.log, " "); got != "1 2" {
		t.Errorf("%q; want 1 2", got)
	}
	y.log = nil
	y.open(250, 1)
	y.happened(t, "cold")
}

// What a client is told is when it would have had its turn.
func TestRetryAfterIsTruthful(t *testing.T) {
	o := roomy()
	o.MaxWaiting = 80
	y := newYard(o, map[uint64]int{})
	for i := range 80 {
		y.enter(fmt.Sprint(i), []string{"a", "a", "a", "b"}[i%4], Normal, 0, 50)
	}
	y.enter("early", "a", Normal, 0, 50)
	if d := y.told["early"]; d != time.Minute {
		t.Errorf("before anything has moved: %v; want as long as a request may wait", d)
	}
	// four a second
	for range 12 {
		y.pass(250 * time.Millisecond)
		y.open(0, 1)
		y.enter("more", []string{"a", "b"}[rand.IntN(2)], Normal, 0, 50)
	}
	y.enter("late", "a", Normal, 0, 50)
	told := y.told["late"]
	turn := time.Duration(0)
	for y.q.Waiting() > 0 {
		y.pass(250 * time.Millisecond)
		turn += 250 * time.Millisecond
		y.open(0, 1)
	}
	if told < turn*9/10 || told > turn*11/10 {
		t.Errorf("told %v; the queue had drained after %v", told, turn)
	}
	// a tenant with nothing waiting is told of its own turn, not of the heavy one's backlog
	y.enter("", "a", Normal, 0, 0)
	for i := range 79 {
		y.enter(fmt.Sprint("y", i), "a", Normal, 0, 50)
	}
	y.q.Enter(&Waiter{Owner: "light", Tenant: "c", Bytes: 1 << 30}, y.now)
	if d := y.told["light"]; d != time.Second {
		t.Errorf("the light tenant is told %v; want the least, 1s", d)
	}
}

func TestTooLate(t *testing.T) {
	o := roomy()
	o.MaxWait = 2 * time.Second
	y := newYard(o, map[uint64]int{})
	for i := range 4 {
		y.enter(fmt.Sprint(i), "t", Normal, 0, 10)
	}
	for range 3 {
		y.pass(500 * time.Millisecond)
		y.open(0, 1)
	}
	y.log = nil
	// two a second: four wait two seconds, a fifth would wait longer
	for i := range 6 {
		y.enter(fmt.Sprint("n", i), "t", Normal, 0, 10)
	}
	y.happened(t, "-n4:too_late -n5:too_late")
	if d := y.told["n4"]; d < 2*time.Second || d > 3*time.Second {
		t.Errorf("told %v; want the 2.5s that it takes", d)
	}
}

func TestIdleTenantsAreForgotten(t *testing.T) {
	y := newYard(roomy(), map[uint64]int{0: 1 << 30})
	for i := range 100_000 {
		y.enter("x", fmt.Sprint("tenant", i), Normal, 0, 10)
		y.q.Dispatch(y.now)
	}
	if n := len(y.q.classes[Normal].flows); n > maxIdleFlows+1 {
		t.Errorf("%d tenants are remembered; want %d at most", n, maxIdleFlows)
	}
}

// Whatever happens in whatever order, the books stay right and nothing is lost.
func TestBooksBalance(t *testing.T) {
	for seed := range uint64(30) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		o := Options{MaxWaiting: 20, MaxBytes: 200, MaxWait: 3 * time.Second, StandingWait: time.Second, Shed: seed%2 == 0}
		y := newYard(o, map[uint64]int{})
		var live []*Waiter
		entered, left, done := 0, 0, 0
		for i := range 2000 {
			switch rnd.IntN(5) {
			case 0, 1:
				w := &Waiter{Owner: fmt.Sprint(i), Tenant: fmt.Sprint(rnd.IntN(4)), Class: Class(rnd.IntN(3)), Lane: rnd.Uint64N(3), Tokens: rnd.Int64N(100), Bytes: rnd.Int64N(40)}
				entered++
				y.q.Enter(w, y.now)
				live = append(live, w)
			case 2:
				if len(live) > 0 {
					k := rnd.IntN(len(live))
					if y.q.Leave(live[k], y.now) {
						left++
					}
					live = slices.Delete(live, k, k+1)
				}
			case 3:
				y.open(rnd.Uint64N(3), rnd.IntN(3))
			case 4:
				y.pass(time.Duration(rnd.IntN(500)) * time.Millisecond)
				y.q.Dispatch(y.now)
			}
			done += len(y.log)
			y.log = nil
			if entered != left+done+y.q.Waiting() {
				t.Fatalf("seed %d, step %d: %d entered, %d left, %d were started or refused, %d wait", seed, i, entered, left, done, y.q.Waiting())
			}
			s := y.q.Stats()
			var n int
			var tokens, bytes int64
			for c := range y.q.classes {
				last := -1.0
				for _, f := range y.q.classes[c].order {
					if f.n == 0 || f.time < last {
						t.Fatalf("seed %d: flow %q: %d waiting, time %v after %v", seed, f.tenant, f.n, f.time, last)
					}
					last = f.time
					for _, l := range f.lanes {
						for w := l.first; w != nil; w = w.next {
							n++
							tokens += w.Tokens
							bytes += w.Bytes
						}
					}
				}
			}
			if n != y.q.Waiting() || tokens != s.Tokens[0]+s.Tokens[1]+s.Tokens[2] || bytes != s.Bytes || n > 20 || bytes > 200 {
				t.Fatalf("seed %d: %d requests, %d tokens, %d bytes in the lists; the books say %d, %v, %d", seed, n, tokens, bytes, y.q.Waiting(), s.Tokens, s.Bytes)
			}
		}
	}
}
