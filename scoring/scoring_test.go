package scoring

import (
	"errors"
	"sync"
	"testing"

	"kvgate/pool"
)

// chiSquare7 is the value that chi-square with 7 degrees of freedom exceeds once in 10,000 times.
const chiSquare7 = 29.88

func TestEqualEndpointsGetEqualShares(t *testing.T) { // B2
	everyPolicy(t, func(t *testing.T, c Config) {
		tab := newTable(t, 8, nil)
		s := tab.Load()
		p := newPolicy(t, c)
		counts := make([]int, 8)
		var b pool.Booking
		for range 2000 {
			counts[choose(t, p, request(s, "m", 100), s, &b)]++
			b.End()
		}
		if x := chiSquare(counts); x > chiSquare7 {
			t.Errorf("shares %v of 2,000: chi-square %.1f; want below %v", counts, x, chiSquare7)
		}
	})
}

func TestTwoTiedBestOfEightShareEqually(t *testing.T) { // B2
	everyPolicy(t, func(t *testing.T, c Config) {
		switch c.Name {
		case "round_robin", "random", "power_of_two", "consistent_hash":
			t.Skip("does not look for the best")
		}
		if c.Weights["lru"] > 0 {
			t.Skip("lru takes turns by itself")
		}
		tab := newTable(t, 8, func(i int) pool.Load {
			l := idle()
			if i != 3 && i != 4 {
				l.Running, l.Waiting, l.KVCacheUtilization = 20, 5, 0.5
			}
			return l
		})
		s := tab.Load()
		p := newPolicy(t, c)
		counts := make([]int, 8)
		var b pool.Booking
		for range 2000 {
			counts[choose(t, p, request(s, "m", 100), s, &b)]++
			b.End()
		}
		if counts[3]+counts[4] != 2000 || counts[3] < 850 || counts[4] < 850 {
			t.Errorf("shares %v; want 1,000 each for the two that are idle", counts)
		}
	})
}

func TestBurstOnOneFrozenSnapshotSpreads(t *testing.T) { // B1
	everyPolicy(t, func(t *testing.T, c Config) {
		if c.Name == "random" {
			t.Skip("random promises nothing for a single burst")
		}
		tab := newTable(t, 8, func(i int) pool.Load {
			l := idle()
			if i != 2 { // one is slightly better
				l.Running, l.KVCacheUtilization = 1, 0.02
			}
			return l
		})
		s := tab.Load()
		p := newPolicy(t, c)
		bookings := make([]pool.Booking, 64)
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i := range bookings {
			wg.Go(func() {
				<-start
				if _, err := p.Choose(request(s, "m", 1000), s, second0+1, &bookings[i]); err != nil {
					t.Error(err)
				}
			})
		}
		close(start)
		wg.Wait()
		total := int64(0)
		for i := range s.Rows {
			n := s.Rows[i].Booked().Requests
			total += n
			if n > 2*64/8 {
				t.Errorf("endpoint %d has %d of 64; want at most 16", i, n)
			}
		}
		if total != 64 {
			t.Errorf("%d requests booked; want 64", total)
		}
		for i := range bookings {
			bookings[i].End()
		}
	})
}

func TestBookingsAloneBalance(t *testing.T) { // B3, B4, B11: no first token and no scrape for a long time
	everyPolicy(t, func(t *testing.T, c Config) {
		if c.Name == "random" || c.Name == "power_of_two" || c.Name == "consistent_hash" {
			t.Skip("balances in the long run only")
		}
		tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
		specs := []pool.Spec{{Pool: "p", URL: "http://127.0.0.1:1"}, {Pool: "p", URL: "http://127.0.0.1:2"}, {Pool: "p", URL: "http://127.0.0.1:3"}}
		if _, _, err := tab.SetEndpoints("p", specs, 1); err != nil {
			t.Fatal(err)
		}
		s := tab.Load()
		p := newPolicy(t, c)
		bookings := make([]pool.Booking, 30)
		for i := range bookings {
			choose(t, p, request(s, "m", 500), s, &bookings[i])
		}
		for i := range s.Rows {
			if n := s.Rows[i].Booked().Requests; n < 8 || n > 12 {
				t.Errorf("endpoint %d holds %d of 30; want 10 ± 20 %%", i, n)
			}
		}
		for i := range bookings {
			bookings[i].End()
			if h := s.Rows[i%3].Booked(); i == 29 && h != (pool.Booked{}) {
				t.Errorf("%+v left; want nothing", h)
			}
		}
	})
}

func TestFiltersAndFailOpen(t *testing.T) {
	everyPolicy(t, func(t *testing.T, c Config) {
		tab := newTable(t, 3, nil)
		p := newPolicy(t, c)
		var b pool.Booking
		only := func(want ...int) {
			t.Helper()
			s := tab.Load()
			seen := map[int]bool{}
			for range 100 {
				seen[choose(t, p, request(s, "m", 100), s, &b)] = true
				b.End()
			}
			for i := range 3 {
				ok := false
				for _, w := range want {
					ok = ok || w == i
				}
				if seen[i] != ok {
					t.Errorf("endpoint %d used: %v; want %v", i, seen[i], ok)
				}
			}
		}
		row := func(i int) *pool.Endpoint { return tab.Load().Rows[i].Endpoint }
		now := second0 + 1

		tab.SetState(row(0), pool.Draining, true, now)
		row(1).SetEjectedUntil(now + aSecond)
		only(2)
		row(1).SetEjectedUntil(0)
		only(1, 2)
		row(1).SetBusyUntil(now + aSecond) // 429: avoided while others can
		only(2)
		row(2).SetBusyUntil(now + aSecond)
		only(1, 2)
		row(1).SetBusyUntil(0)
		row(2).SetBusyUntil(0)

		// What takes no connections is as good as ejected, whether or not it was ever reached.
		tab.SetState(row(2), pool.Unreachable, true, now)
		only(1)
		row(1).SetBusyUntil(now + aSecond)
		only(1)
		row(1).SetBusyUntil(0)
		row(1).SetEjectedUntil(now + aSecond)
		only(1, 2)
		e := p.Explain(request(tab.Load(), "m", 100), tab.Load(), now)
		if !e.Panic || e.Endpoints[0].Filtered != "draining" || e.Endpoints[1].Filtered != "ejected" || e.Endpoints[2].Filtered != "down" {
			t.Errorf("explained as %+v", e)
		}
		row(1).SetEjectedUntil(0)
		tab.SetState(row(2), pool.Unreachable, false, now)
		only(1, 2)

		// Panic mode: all that serve are ejected, so all of them are used, but never the one that drains.
		row(1).SetEjectedUntil(now + aSecond)
		row(2).SetEjectedUntil(now + aSecond)
		only(1, 2)
		s := tab.Load()
		d, err := p.Choose(request(s, "m", 100), s, now, &b)
		if err != nil || !d.Panic {
			t.Errorf("all ejected: panic %v, error %v; want panic mode", d.Panic, err)
		}
		b.End()

		// An attempt never goes where the request has failed.
		req := request(s, "m", 100)
		req.Tried[0], req.Tried[1] = row(1), row(2)
		if _, err := p.Choose(req, s, now, &b); !errors.Is(err, ErrNoEndpoints) {
			t.Errorf("all tried: %v; want %v", err, ErrNoEndpoints)
		}
		// Too long for every server, even if the estimate is twice too high.
		if _, err := p.Choose(request(s, "m", 300_000), s, now, &b); !errors.Is(err, ErrTooLong) {
			t.Errorf("300,000 tokens for a context of 131,072: %v; want %v", err, ErrTooLong)
		}
		if b.Held() {
			t.Error("a refused request holds a booking")
		}
	})
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{
		{Name: "fastest"},
		{Weights: map[string]float64{"speed": 1}},
		{Weights: map[string]float64{"queue": -1}},
		{Weights: map[string]float64{"queue": 0}},
		{Weights: map[string]float64{"kv_cache": 1, "kvCache": 2}},
		{Name: "auto", Weights: map[string]float64{"queue": 1}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}
