package scoring

import (
	"testing"
	"time"

	"kvgate/pool"
)

func adapterLoad(running int32, kv float64, adapters ...string) pool.Load {
	l := idle()
	l.Running, l.KVCacheUtilization, l.Adapters = running, kv, adapters
	return l
}

func TestAdapterOnAFullAndOnAFreeServer(t *testing.T) {
	for _, c := range []Config{{}, {Weights: map[string]float64{"queue": 2, "kv_cache": 2, "kv_headroom": 2, "lora_affinity": 1}}} {
		s := newTable(t, 2, func(i int) pool.Load {
			l := adapterLoad(20, 0.4, "a1")
			if i == 0 {
				l.Running, l.Waiting, l.KVCacheUtilization = 60, 20, 0.99
			}
			return l
		}).Load()
		p := newPolicy(t, c)
		var b pool.Booking
		for range 50 {
			if got := choose(t, p, request(s, "a1", 1000), s, &b); got != 1 {
				t.Fatalf("%s: adapter a1 is on both; its request went to the full one", p.Name())
			}
			b.End()
		}
	}
}

func TestIdleAdapterIsRemembered(t *testing.T) { // S3
	for _, c := range []Config{{}, {Weights: map[string]float64{"queue": 1, "lora_affinity": 2}}} {
		s := newTable(t, 4, nil).Load() // the page never shows it: it is idle whenever it is scraped
		p := newPolicy(t, c)
		var b pool.Booking
		first := choose(t, p, request(s, "a1", 500), s, &b)
		b.End()
		for i := range 20 {
			if got := choose(t, p, request(s, "a1", 500), s, &b); got != first {
				t.Fatalf("%s: request %d for an idle adapter went to %d; %d holds it", p.Name(), i, got, first)
			}
			b.End()
		}
	}
}

func TestBothLoRAListsAreOneSet(t *testing.T) { // S2: the load is their union, so two of four slots are free
	s := newTable(t, 1, func(int) pool.Load { return adapterLoad(2, 0.1, "a1", "a2") }).Load()
	v := viewAdapter(&s.Rows[0], s.TargetString("a3"), true)
	if v.others != 2 || v.slots != 4 || v.full() {
		t.Errorf("%d of %d slots are taken; want 2 of 4", v.others, v.slots)
	}
}

func TestNewAdapterGoesToOnePlaceInEveryGateway(t *testing.T) {
	// Two gateways that share nothing, with slightly different views of the load.
	place := func(name string, extra float64) int {
		s := newTable(t, 8, func(i int) pool.Load { return adapterLoad(3, 0.10+extra*float64(i)/1000) }).Load()
		var b pool.Booking
		return choose(t, newPolicy(t, Config{Rand: seeded(uint64(extra * 10))}), request(s, name, 1000), s, &b)
	}
	places := map[int]bool{}
	for _, name := range []string{"a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"} {
		one, two := place(name, 0), place(name, 0.3)
		if one != two {
			t.Errorf("adapter %s goes to %d and to %d", name, one, two)
		}
		places[one] = true
	}
	if len(places) < 4 {
		t.Errorf("ten adapters went to %d places of eight", len(places))
	}
}

func TestColdAdapterDoesNotEvictARunningOne(t *testing.T) {
	// Endpoint 0 runs four adapters on its four slots; endpoint 1 is busier but has a slot.
	s := newTable(t, 2, func(i int) pool.Load {
		if i == 0 {
			return adapterLoad(4, 0.1, "a1", "a2", "a3", "a4")
		}
		return adapterLoad(25, 0.3, "a5")
	}).Load()
	p := newPolicy(t, Config{})
	var b pool.Booking
	for range 20 {
		if got := choose(t, p, request(s, "a9", 1000), s, &b); got != 1 {
			t.Fatal("a cold adapter went where every slot is taken")
		}
		b.End()
		s.Rows[1].Endpoint.Adapters().Forget(pool.HashName("a9"))
	}
}

func TestAdapterHeldNowhereSpillsFromABadFirstPlace(t *testing.T) {
	s := newTable(t, 4, nil).Load()
	p := newPolicy(t, Config{})
	var b, load pool.Booking
	first := choose(t, p, request(s, "a1", 1000), s, &b)
	b.End()
	s.Rows[first].Endpoint.Adapters().Forget(pool.HashName("a1"))
	s.Rows[first].Book(&load, pool.Claim{PendingTokens: 200_000, KVTokens: 200_000})
	if got := choose(t, p, request(s, "a1", 1000), s, &b); got == first {
		t.Error("it went to its first place though 200,000 tokens are pending there")
	}
}

func TestHotAdapterSpreadsUnderLoad(t *testing.T) {
	s := newTable(t, 4, nil).Load()
	p := newPolicy(t, Config{})
	bookings := make([]pool.Booking, 200)
	for i := range bookings {
		choose(t, p, request(s, "a1", 4000), s, &bookings[i])
	}
	used := 0
	for i := range s.Rows {
		if s.Rows[i].Booked().Requests > 0 {
			used++
		}
	}
	if used < 3 {
		t.Errorf("800,000 pending tokens of one adapter on %d of 4 endpoints", used)
	}
}

func TestAdapterLoadTimeIsLearned(t *testing.T) {
	s := newTable(t, 1, nil).Load()
	p := newPolicy(t, Config{})
	e := s.Rows[0].Endpoint
	e.PrefillTokensPerSecond.Store(20_000)
	for i := range 200 {
		var b pool.Booking
		d, err := p.Choose(request(s, "a1", 1000), s, second0+pool.Instant(i), &b)
		if err != nil || !d.Cold {
			t.Fatalf("cold %v, error %v", d.Cold, err)
		}
		p.FirstToken(&d, 2*time.Second)
		b.End()
		e.Adapters().Forget(pool.HashName("a1"))
	}
	if got := e.AdapterLoadSeconds.Load(); got < 1.7 || got > 2.1 {
		t.Errorf("learned a load time of %.2f s; want about 1.9", got)
	}
	if got := e.PrefillTokensPerSecond.Load(); got != 20_000 {
		t.Errorf("loads changed the prefill rate to %.0f", got)
	}
}
