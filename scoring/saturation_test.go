package scoring

import (
	"fmt"
	"testing"
	"time"

	"kvgate/pool"
)

func TestRoom(t *testing.T) {
	now := second0 + 1e6
	p := newPolicy(t, Config{})
	// book makes a booking on row i of a new table with two endpoints, and full fills the other.
	f := func(what string, want Room, l Limits, prepare func(tab *pool.Table, rows []pool.Row)) {
		t.Helper()
		tab := newTable(t, 2, nil)
		if prepare != nil {
			prepare(tab, tab.Load().Rows)
		}
		s := tab.Load()
		if got := p.Room(request(s, "m", 100), s, now, &l); got != want {
			t.Errorf("%s: %d; want %d", what, got, want)
		}
	}
	book := func(r *pool.Row, pending, kv int64) {
		r.Book(new(pool.Booking), pool.Claim{PendingTokens: pending, KVTokens: kv, At: now})
	}
	both := func(do func(*pool.Row)) func(*pool.Table, []pool.Row) {
		return func(_ *pool.Table, rows []pool.Row) { do(&rows[0]); do(&rows[1]) }
	}
	f("idle", Free, Limits{}, nil)
	// The prior rate is 20,000 tokens/s: a backlog of 100 ms is 2,000.
	f("little pending", Free, Limits{}, both(func(r *pool.Row) { book(r, 1999, 5000) }))
	f("much pending", Saturated, Limits{}, both(func(r *pool.Row) { book(r, 2001, 5000) }))
	f("much pending on one", Free, Limits{}, func(_ *pool.Table, rows []pool.Row) { book(&rows[0], 1e6, 5000) })
	f("much pending, more allowed", Free, Limits{Backlog: time.Second}, both(func(r *pool.Row) { book(r, 2001, 5000) }))
	f("less allowed", Saturated, Limits{Backlog: time.Millisecond}, both(func(r *pool.Row) { book(r, 21, 5000) }))
	f("less allowed, and nothing pending", Free, Limits{Backlog: time.Millisecond}, both(func(r *pool.Row) { book(r, 0, 5000) }))
	f("full", Saturated, Limits{}, both(func(r *pool.Row) { book(r, 0, 421_000*9/10) }))
	f("not quite full", Free, Limits{}, both(func(r *pool.Row) { book(r, 0, 421_000*9/10-1) }))
	f("full by share", Saturated, Limits{KVShare: 0.5}, both(func(r *pool.Row) { book(r, 0, 421_000*5/10) }))
	f("as many as may be", Saturated, Limits{Requests: 1}, both(func(r *pool.Row) { book(r, 0, 1) }))
	f("busy", Saturated, Limits{}, both(func(r *pool.Row) { r.Endpoint.SetBusyUntil(now + 1) }))
	f("no longer busy", Free, Limits{}, both(func(r *pool.Row) { r.Endpoint.SetBusyUntil(now) }))
	// where all are ejected, they are tried
	f("ejected", Free, Limits{}, both(func(r *pool.Row) { r.Endpoint.SetEjectedUntil(now + 1); book(r, 1e6, 1) }))
	f("one ejected, the other full", Saturated, Limits{}, func(_ *pool.Table, rows []pool.Row) {
		rows[0].Endpoint.SetEjectedUntil(now + 1)
		book(&rows[1], 0, 420_000)
	})
	f("down", Nobody, Limits{}, func(tab *pool.Table, rows []pool.Row) {
		for i := range rows {
			tab.SetState(rows[i].Endpoint, []pool.State{pool.Unreachable, pool.NotReady}[i], true, now)
		}
	})
	f("others' waiting requests", Saturated, Limits{}, func(tab *pool.Table, rows []pool.Row) {
		for i := range rows {
			l := idle()
			l.Running, l.Waiting = 3, 10 // of 1,024 tokens each, as far as is known
			scrape(tab, rows[i].Endpoint, l, second0)
		}
	})
	f("others' KV", Saturated, Limits{}, func(tab *pool.Table, rows []pool.Row) {
		for i := range rows {
			l := idle()
			l.Running, l.KVCacheUtilization = 3, 0.95
			scrape(tab, rows[i].Endpoint, l, second0)
		}
	})
	f("KV of unknown size, fullness known", Saturated, Limits{}, func(tab *pool.Table, rows []pool.Row) {
		for i := range rows {
			l := idle()
			l.Known &^= pool.KnowsKVCapacity
			l.Running, l.KVCacheUtilization = 3, 0.95
			scrape(tab, rows[i].Endpoint, l, second0)
		}
	})

	// named and not looked at
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	s := tab.Load()
	if got := p.Room(request(s, "m", 100), s, now, &Limits{}); got != Nobody {
		t.Errorf("no endpoint: %d; want Nobody", got)
	}
	if _, _, err := tab.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://127.0.0.1:1"}}, now); err != nil {
		t.Fatal(err)
	}
	s = tab.Load()
	if got := p.Room(request(s, "m", 100), s, now, &Limits{Seen: true}); got != Nobody {
		t.Errorf("an unseen endpoint: %d; want Nobody", got)
	}
	if got := p.Room(request(s, "m", 100), s, now, &Limits{}); got != Free {
		t.Errorf("an unseen endpoint, where that doesn't matter: %d; want Free", got)
	}
}

// An endpoint whose slots others' adapters hold has no room for a cold one, and has for one that is there.
func TestRoomForAdapters(t *testing.T) {
	now := second0 + 1e6
	p := newPolicy(t, Config{})
	f := func(what, model string, want Room, prepare func(tab *pool.Table, s *pool.Snapshot)) {
		t.Helper()
		tab := newTable(t, 2, nil) // four slots each
		prepare(tab, tab.Load())
		s := tab.Load()
		if got := p.Room(request(s, model, 100), s, now, &Limits{}); got != want {
			t.Errorf("%s: %s: %d; want %d", what, model, got, want)
		}
	}
	book := func(s *pool.Snapshot, row int, model string, started bool) *pool.Booking {
		b := new(pool.Booking)
		s.Rows[row].Book(b, pool.Claim{PendingTokens: 1, KVTokens: 10, At: now, Adapter: s.TargetString(model).Hash})
		if started {
			b.FirstToken()
		}
		return b
	}
	full := func(_ *pool.Table, s *pool.Snapshot) {
		for i := range 4 {
			book(s, 0, fmt.Sprint("a", i), true)
			book(s, 1, fmt.Sprint("a", i+4), i != 0)
		}
	}
	f("three of four", "a9", Free, func(_ *pool.Table, s *pool.Snapshot) {
		for row := range 2 {
			for i := range 3 {
				book(s, row, fmt.Sprint("a", i), true)
			}
		}
	})
	f("all slots", "a9", NoSlot, full)
	f("all slots", "a1", Free, full)
	f("all slots", "m", Free, full)
	f("all slots, and it waits for its own there", "a4", Free, full) // four others have three
	f("one has ended", "a9", Free, func(_ *pool.Table, s *pool.Snapshot) {
		for i := range 4 {
			b := book(s, 0, fmt.Sprint("a", i), true)
			book(s, 1, fmt.Sprint("a", i), true)
			if i == 3 {
				b.End()
			}
		}
	})
	others := func(listed ...string) func(tab *pool.Table, s *pool.Snapshot) {
		return func(tab *pool.Table, s *pool.Snapshot) {
			for i := range s.Rows {
				scrape(tab, s.Rows[i].Endpoint, adapterLoad(4, 0.1, listed...), second0)
			}
		}
	}
	f("others' requests hold them", "a9", NoSlot, others("a0", "a1", "a2", "a3"))
	f("others' requests hold them", "a3", Free, others("a0", "a1", "a2", "a3"))
	// What the page still names of ours, which have ended since, takes no slot.
	f("ended since the scrape", "a9", Free, func(tab *pool.Table, s *pool.Snapshot) {
		for row := range 2 {
			var bs []*pool.Booking
			for i := range 4 {
				bs = append(bs, book(s, row, fmt.Sprint("a", i), true))
			}
			scrape(tab, s.Rows[row].Endpoint, adapterLoad(4, 0.1, "a0", "a1", "a2", "a3"), second0)
			for _, b := range bs {
				b.End()
			}
		}
	})
	f("slots of unknown number", "a9", Free, func(tab *pool.Table, s *pool.Snapshot) {
		full(tab, s)
		for i := range s.Rows {
			l := idle()
			l.Known &^= pool.KnowsMaxAdapters
			scrape(tab, s.Rows[i].Endpoint, l, second0)
		}
	})
}

func TestDemand(t *testing.T) {
	now := second0 + 1e6
	p := newPolicy(t, Config{})
	tab := newTable(t, 4, nil)
	rows := tab.Load().Rows
	if d := p.Demand(rows, now, &Limits{}, 0, 0); d.Ready != 4 || d.Endpoints != 0 {
		t.Errorf("idle: %+v", d)
	}
	// half of one's KV, reserved on two
	for i := range 2 {
		rows[i].Book(new(pool.Booking), pool.Claim{KVTokens: 421_000 * 45 / 100, At: now})
	}
	if d := p.Demand(rows, now, &Limits{}, 0, 0); d.Endpoints < 0.99 || d.Endpoints > 1.01 {
		t.Errorf("two endpoints half full: %+v; want 1", d)
	}
	// two run, four wait, and each endpoint may have one
	if d := p.Demand(rows, now, &Limits{Requests: 1}, 4, 4); d.Endpoints != 6 {
		t.Errorf("six requests, one an endpoint: %+v; want 6", d)
	}
	// what waits needs six more to be prefilled in 10 s
	if d := p.Demand(rows, now, &Limits{}, 6, 6*200_000); d.Endpoints < 6 {
		t.Errorf("with 1.2 M tokens waiting: %+v; want 6 at least", d)
	}
	tab.SetState(rows[0].Endpoint, pool.Unreachable, true, now)
	if d := p.Demand(tab.Load().Rows, now, &Limits{}, 0, 0); d.Ready != 3 {
		t.Errorf("one down: %+v; want 3 ready", d)
	}
	if d := p.Demand(nil, now, &Limits{}, 1, 1); d.Ready != 0 || d.Endpoints <= 0 {
		t.Errorf("no endpoint and a request: %+v; want more than none", d)
	}
}

// BenchmarkRoom is what admission costs a request that finds room, and one that doesn't.
func BenchmarkRoom(b *testing.B) {
	for _, n := range []int{8, 64, 1000} {
		for _, full := range []bool{false, true} {
			b.Run(fmt.Sprintf("endpoints=%d/full=%t", n, full), func(b *testing.B) {
				s := newTable(b, n, nil).Load()
				if full {
					for i := range s.Rows {
						s.Rows[i].Book(new(pool.Booking), pool.Claim{PendingTokens: 100_000, KVTokens: 100_000, At: second0})
					}
				}
				p := newPolicy(b, Config{})
				req, l := request(s, "m", 1000), &Limits{}
				b.ReportAllocs()
				for b.Loop() {
					p.Room(req, s, second0+1, l)
				}
			})
		}
	}
}
