package quota

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/internal/caller"
	"kvgate/pool"
)

var (
	llama  = &pool.Target{Name: "llama", Base: "llama"}
	qwen   = &pool.Target{Name: "qwen", Base: "qwen"}
	nobody *caller.Caller
)

func all(n int64, k Kind, window time.Duration) Limit {
	l := Limit{Tenant: "*", Window: window}
	l.Amounts[k] = n
	return l
}

const second = int64(time.Second)

// What is used comes back evenly, and all of it within the window.
func TestWindow(t *testing.T) {
	l := New(Options{Limits: []Limit{all(10, Requests, 10*time.Second)}})
	now := int64(1_000_000)
	take := func(want int) {
		t.Helper()
		n := 0
		for range 50 {
			var ch Charge
			if r := l.Take(&ch, nobody, "a", llama, Cost{}, now); r != nil {
				if r.Kind != Requests || r.Limit != 10 || r.Wait <= 0 || r.Wait > time.Second || r.Never {
					t.Errorf("%+v", r)
				}
				break
			}
			n++
		}
		if n != want {
			t.Errorf("%d requests at %v; want %d", n, time.Duration(now), want)
		}
	}
	take(10)
	take(0)
	now += second
	take(1)
	now += 3 * second
	take(3)
	now += 3600 * second
	take(10)
	var ch Charge
	if r := l.Take(&ch, nobody, "b", llama, Cost{}, now); r != nil {
		t.Errorf("another tenant: %v", r)
	}
}

// Requests that run at the same time can't together take more than there is.
func TestParallelRequestsCannotOverrun(t *testing.T) {
	l := New(Options{Limits: []Limit{all(1000, Requests, time.Hour), all(50_000, TotalTokens, time.Hour), {Tenant: "*", Window: time.Minute, Concurrent: 7}}})
	var passed, tokens, running, most atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			var ch Charge
			for range 2000 {
				c := Cost{Input: rng.Int64N(50), Output: rng.Int64N(100)}
				if l.Take(&ch, nobody, "a", llama, c, 5) != nil {
					ch.Reset()
					continue
				}
				n := running.Add(1)
				for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
				passed.Add(1)
				tokens.Add(c.Input + c.Output)
				running.Add(-1)
				ch.Settle(c, true, 5)
			}
		})
	}
	wg.Wait()
	if passed.Load() > 1000 || tokens.Load() > 50_000 || most.Load() > 7 || passed.Load() < 300 {
		t.Errorf("%d requests, %d tokens, %d at a time", passed.Load(), tokens.Load(), most.Load())
	}
	for id, a := range l.books.byID {
		if a.running.Load() != 0 {
			t.Errorf("%s: %d still run", id, a.running.Load())
		}
	}
}

// What was charged is corrected by what it cost: less comes back, more is owed, and what was no request costs nothing.
func TestSettle(t *testing.T) {
	var lim Limit
	lim.Tenant, lim.Window, lim.Amounts, lim.Concurrent = "*", time.Minute, [numKinds]int64{10, 1000, 1000, 1500}, 2
	l := New(Options{Limits: []Limit{lim}})
	now := int64(60 * second)
	used := func(want ...int64) {
		t.Helper()
		for id, a := range l.books.byID {
			for k := range numKinds {
				n := int64(float64(max(0, a.tat[k].Load()-now))/float64(time.Minute)*float64(lim.Amounts[k]) + 0.5)
				if n != want[k] {
					t.Errorf("%s: %d %s used; want %d", id, n, k, want[k])
				}
			}
		}
	}
	var ch Charge
	take := func(c Cost) *Refusal { return l.Take(&ch, nobody, "a", llama, c, now) }
	if r := take(Cost{100, 800}); r != nil {
		t.Fatal(r)
	}
	used(1, 100, 800, 900)
	ch.Settle(Cost{120, 30}, true, now)
	used(1, 120, 30, 150)
	take(Cost{100, 100})
	ch.Settle(Cost{100, 1200}, true, now) // more than was charged, and than there is
	used(2, 220, 1230, 1450)
	r := take(Cost{1, 1})
	if r == nil || r.Kind != OutputTokens || r.Used != 1000 {
		t.Fatalf("%+v", r)
	}
	ch.Reset()
	used(2, 220, 1230, 1450) // a refusal takes nothing
	now += 30 * second
	used(0, 0, 730, 700)
	if r := take(Cost{1, 1}); r != nil {
		t.Fatal(r)
	}
	ch.Settle(Cost{9, 9}, false, now)
	used(0, 0, 730, 700)
	if r := take(Cost{2000, 0}); r == nil || !r.Never || !strings.Contains(r.String(), "larger than the rate limit: limit 1000 input_tokens per 1m0s, requested 2000") {
		t.Errorf("%v", r)
	}
	ch.Reset()
	if r := take(Cost{0, 1<<63 - 1}); r == nil || !r.Never {
		t.Errorf("%v", r)
	}
	ch.Reset()
	var other, third Charge
	take(Cost{})
	l.Take(&other, nobody, "a", llama, Cost{}, now)
	if r := l.Take(&third, nobody, "a", llama, Cost{}, now); r == nil || r.Kind != Concurrent {
		t.Errorf("%+v", r)
	}
	third.Reset()
	ch.Settle(Cost{}, true, now)
	if r := l.Take(&third, nobody, "a", llama, Cost{}, now); r != nil {
		t.Errorf("%+v", r)
	}
	third.Settle(Cost{}, true, now)
	third.Settle(Cost{}, true, now) // once is enough
	other.Settle(Cost{}, true, now)
	for _, a := range l.books.byID {
		if a.running.Load() != 0 {
			t.Errorf("%d still run", a.running.Load())
		}
	}
}

// Which limits a request has.
func TestScope(t *testing.T) {
	only := func(l Limit, patterns ...string) Limit {
		l.Models, l.Patterns = caller.NewModels(patterns), patterns
		return l
	}
	each := all(1, Requests, time.Hour)
	each.Tenant, each.PerModel = "each-*", true
	key := all(1, Requests, time.Hour)
	key.Key = "k"
	some := only(all(1, Requests, time.Hour), "ll*")
	some.Tenant = "some"
	twice := all(5, Requests, time.Hour)
	twice.Tenant = "twice"
	l := New(Options{Limits: []Limit{each, key, some, twice, twice}})
	f := func(c *caller.Caller, tenant string, tgt *pool.Target, want int) {
		t.Helper()
		n := 0
		for ; n < 7; n++ {
			var ch Charge
			if l.Take(&ch, c, tenant, tgt, Cost{}, 1) != nil {
				break
			}
		}
		if n != want {
			t.Errorf("%v %s %s: %d requests; want %d", c, tenant, tgt.Name, n, want)
		}
	}
	f(nil, "each-a", llama, 1)
	f(nil, "each-a", qwen, 1)
	f(nil, "each-b", llama, 1)
	f(nil, "other", llama, 7)
	f(&caller.Caller{Key: "k", Tenant: "x"}, "x", llama, 1)
	f(&caller.Caller{Key: "k", Tenant: "x"}, "x", qwen, 0)
	f(&caller.Caller{Key: "k2", Tenant: "x"}, "x", qwen, 7)
	f(nil, "some", llama, 1)
	f(nil, "some", qwen, 7)
	f(nil, "twice", qwen, 5)
}

// A reload keeps what was used, also where the amount is another one.
func TestReloadKeepsWhatWasUsed(t *testing.T) {
	l := New(Options{Limits: []Limit{all(10, Requests, time.Hour)}})
	var ch Charge
	for range 10 {
		l.Take(&ch, nobody, "a", llama, Cost{}, 1)
		ch.Settle(Cost{}, true, 1)
	}
	more := New(Options{Limits: []Limit{all(5, OutputTokens, time.Minute), all(20, Requests, time.Hour)}, Before: l})
	if r := more.Take(&ch, nobody, "a", llama, Cost{}, 1); r == nil || r.Kind != Requests || r.Used != 20 {
		t.Errorf("%+v", r)
	}
	if !more.NeedsUsage() || l.NeedsUsage() {
		t.Error("usage is needed for tokens")
	}
}

func TestHeaders(t *testing.T) {
	l := New(Options{Limits: []Limit{all(10, Requests, time.Minute), all(1000, InputTokens, time.Minute), all(100, TotalTokens, time.Minute), all(1000, Requests, time.Hour)}})
	var ch Charge
	if r := l.Take(&ch, nobody, "a", llama, Cost{30, 40}, 1); r != nil {
		t.Fatal(r)
	}
	got := string(ch.AppendHeaders(nil, 1))
	want := "x-ratelimit-limit-requests: 10\r\nx-ratelimit-remaining-requests: 9\r\nx-ratelimit-reset-requests: 6s\r\n" +
		"x-ratelimit-limit-tokens: 100\r\nx-ratelimit-remaining-tokens: 30\r\nx-ratelimit-reset-tokens: 42s\r\n"
	if got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	if r := l.Take(&ch, nobody, "a", llama, Cost{30, 40}, 1); r == nil || r.Kind != TotalTokens {
		t.Errorf("%v", r)
	}
	for d, want := range map[time.Duration]string{
		0: "0s", time.Nanosecond: "1ms", 120 * time.Millisecond: "120ms", 1500 * time.Millisecond: "1.5s", 6 * time.Minute: "6m0s",
		time.Hour + time.Second: "1h0m1s", 1005 * time.Millisecond: "1.005s", 25 * time.Hour: "25h0m0s",
	} {
		if got := short(d); got != want {
			t.Errorf("%d is %s; want %s", d, got, want)
		}
	}
}

// However many names there are, memory is bounded, and those beyond the bound still have limits.
func TestRowsAreBounded(t *testing.T) {
	l := New(Options{Limits: []Limit{all(2, Requests, time.Hour)}})
	l.most = 1000
	passed := 0
	now := 2 * second
	for i := range 1100 {
		var ch Charge
		for range 3 {
			if l.Take(&ch, nobody, fmt.Sprint(i), llama, Cost{}, now) == nil {
				passed++
				ch.Settle(Cost{}, true, now)
			}
		}
	}
	if passed != 2*1000+2 {
		t.Errorf("%d requests; want 2 of each tenant that has an account, and 2 of all others", passed)
	}
	if len(l.rows) > l.most || len(l.books.byID) > l.most+1 {
		t.Errorf("%d rows, %d accounts", len(l.rows), len(l.books.byID))
	}
	now += 2 * 3600 * second
	var ch Charge
	if l.Take(&ch, nobody, "new", llama, Cost{}, now) != nil || len(l.books.byID) != 1 {
		t.Errorf("%d accounts; want those forgotten of which nothing is used", len(l.books.byID))
	}
}

func TestTakeDoesNotAllocate(t *testing.T) {
	l := New(Options{Limits: []Limit{all(1e9, Requests, time.Minute), all(1e9, InputTokens, time.Minute), all(1e9, TotalTokens, time.Minute), {Tenant: "*", Window: time.Minute, Concurrent: 10}}})
	c := &caller.Caller{Key: "k", Tenant: "t"}
	var ch Charge
	head := make([]byte, 0, 1024)
	f := func() {
		if r := l.Take(&ch, c, "t", llama, Cost{100, 100}, 1); r != nil {
			t.Fatal(r)
		}
		head = ch.AppendHeaders(head[:0], 1)
		ch.Settle(Cost{90, 40}, true, 1)
	}
	f()
	if n := testing.AllocsPerRun(200, f); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkTakeAndSettle(b *testing.B) {
	for _, n := range []int{1, 4} {
		b.Run(fmt.Sprint("limits=", n), func(b *testing.B) {
			var limits []Limit
			for k := range Kind(n) {
				limits = append(limits, all(1e9, k, time.Second))
			}
			l := New(Options{Limits: limits})
			c := &caller.Caller{Key: "k", Tenant: "t"}
			var ch Charge
			head := make([]byte, 0, 1024)
			b.ReportAllocs()
			for i := int64(1); b.Loop(); i += 1000 {
				if r := l.Take(&ch, c, "t", llama, Cost{10, 10}, i); r != nil {
					b.Fatal(r)
				}
				head = ch.AppendHeaders(head[:0], i)
				ch.Settle(Cost{9, 4}, true, i)
			}
		})
	}
}

// Looking says of every limit what taking would, and takes nothing.
func TestLookIsTakeWithoutTaking(t *testing.T) {
	perRequest := all(5, Requests, 10*time.Second)
	perRequest.Concurrent = 2
	l := New(Options{Limits: []Limit{perRequest, all(1000, TotalTokens, 10*time.Second)}})
	cost := Cost{Input: 300, Output: 200}
	now := second
	f := func(want ...string) {
		t.Helper()
		for range 3 {
			states, err := l.Look(nobody, "a", llama, cost, now)
			if err != nil || len(states) != len(want) {
				t.Fatal(states, err)
			}
			for i := range states {
				got := states[i].String()
				if states[i].Why != nil {
					got += "!"
				}
				if got != want[i] {
					t.Errorf("%s; want %s", got, want[i])
				}
			}
		}
	}
	f("2 concurrent requests: 0 used, 1 asked", "5 requests per 10s: 0 used, 1 asked", "1000 total_tokens per 10s: 0 used, 500 asked")
	var ch [3]Charge
	for i := range 2 {
		if r := l.Take(&ch[i], nobody, "a", llama, cost, now); r != nil {
			t.Fatal(r)
		}
	}
	f("2 concurrent requests: 2 used, 1 asked!", "5 requests per 10s: 2 used, 1 asked", "1000 total_tokens per 10s: 1000 used, 500 asked!")
	ch[0].Settle(Cost{Input: 100}, true, now)
	ch[1].Settle(Cost{Input: 300, Output: 100}, true, now)
	f("2 concurrent requests: 0 used, 1 asked", "5 requests per 10s: 2 used, 1 asked", "1000 total_tokens per 10s: 500 used, 500 asked")
	if r := l.Take(&ch[2], nobody, "a", llama, cost, now); r != nil {
		t.Error(r)
	}
}
