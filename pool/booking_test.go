package pool

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
)

func testTable(t testing.TB, n int) *Table {
	t.Helper()
	tab := NewTable([]PoolSpec{{Name: "p", Models: []string{"m"}}}, Options{})
	specs := make([]Spec, n)
	for i := range specs {
		specs[i] = Spec{Pool: "p", URL: fmt.Sprintf("http://127.0.0.1:%d", 8000+i)}
	}
	if _, _, err := tab.SetEndpoints("p", specs, 1); err != nil {
		t.Fatal(err)
	}
	return tab
}

func TestBookingEffectsHappenOnce(t *testing.T) {
	row := &testTable(t, 1).Load().Rows[0]
	var b Booking
	want := func(w Booked) {
		t.Helper()
		if got := row.Booked(); got != w {
			t.Errorf("booked %+v; want %+v", got, w)
		}
	}
	row.Book(&b, Claim{PendingTokens: 100, KVTokens: 150, Adapter: 7, At: 5})
	want(Booked{1, 100, 150})
	if a := row.Endpoint.Adapters().Active(); a != 1 {
		t.Errorf("%d adapters active; want 1", a)
	}
	first := b.Generation()
	b.FirstToken()
	b.FirstToken()
	want(Booked{1, 0, 150})
	b.End()
	b.End()
	want(Booked{})
	if a := row.Endpoint.Adapters().Active(); a != 0 {
		t.Errorf("%d adapters active after the end; want 0", a)
	}
	// A timer of the first use must not clear the second one's pending tokens.
	row.Book(&b, Claim{PendingTokens: 10, KVTokens: 20, At: 6})
	b.FirstTokenOf(first)
	want(Booked{1, 10, 20})
	b.End()
	want(Booked{})
	if got := row.Endpoint.IntakeTokens(); got != 110 {
		t.Errorf("intake %d tokens; want 110", got)
	}
}

func TestTryBookRefusesAStaleDecision(t *testing.T) {
	row := &testTable(t, 1).Load().Rows[0]
	v := row.Version()
	var a, b Booking
	if !row.TryBook(&a, v, Claim{PendingTokens: 1}) {
		t.Fatal("the first booking of a version was refused")
	}
	if row.TryBook(&b, v, Claim{PendingTokens: 1}) {
		t.Fatal("a second booking of one version was accepted")
	}
	if b.Held() || row.Booked().Requests != 1 {
		t.Errorf("a refused booking left a trace: %+v", row.Booked())
	}
}

// Bookings, first tokens from timers and ends race on every endpoint; at the end nothing is left (field failure B5).
func TestBookingsReturnToZero(t *testing.T) {
	tab := testTable(t, 3)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			var b Booking
			for range 2000 {
				s := tab.Load()
				row := &s.Rows[r.IntN(len(s.Rows))]
				row.Book(&b, Claim{PendingTokens: 10, KVTokens: 30, Adapter: uint64(1 + r.IntN(40)), At: Instant(1 + r.IntN(1000))})
				gen := b.Generation()
				var timers sync.WaitGroup
				timers.Go(func() { b.FirstTokenOf(gen) })
				if r.IntN(2) == 0 {
					b.FirstToken()
				}
				b.End()
				if r.IntN(4) == 0 {
					timers.Wait()
				} else {
					defer timers.Wait()
				}
			}
		})
	}
	// Meanwhile discovery flaps and scrapes restart endpoints.
	wg.Go(func() {
		for i := range 300 {
			row := tab.Load().Rows[i%3]
			tab.Observe(row.Endpoint, Observation{Load: &Load{Known: KnowsRunning, StartTime: float64(1 + 10*i), MaxAdapters: int32(i % 40)}, At: Instant(i + 1)})
		}
	})
	wg.Wait()
	for _, row := range tab.Load().Rows {
		if got := row.Booked(); got != (Booked{}) {
			t.Errorf("%s: %+v booked after every request has ended", row.Endpoint.ID, got)
		}
		if a := row.Endpoint.Adapters().Active(); a != 0 {
			t.Errorf("%s: %d adapters active after every request has ended", row.Endpoint.ID, a)
		}
	}
}

func TestAdapterMemory(t *testing.T) {
	row := &testTable(t, 1).Load().Rows[0]
	m := row.Endpoint.Adapters()
	var b [3]Booking
	for i := range b {
		row.Book(&b[i], Claim{Adapter: uint64(i + 1), At: Instant(10 * (i + 1))})
	}
	b[0].End()
	u, ok := m.Use(1)
	if !ok || u.InFlight != 0 || u.LastUsed != 10 || u.Newer != 2 {
		t.Errorf("adapter 1: %+v %v; want idle, used at 10, two newer", u, ok)
	}
	if u, ok := m.Use(3); !ok || u.InFlight != 1 || u.Newer != 0 {
		t.Errorf("adapter 3: %+v %v; want one in flight, none newer", u, ok)
	}
	// The least recently used idle one makes room; those in flight stay.
	var more Booking
	for i := range 100 {
		row.Book(&more, Claim{Adapter: uint64(100 + i), At: Instant(1000 + i)})
		more.End()
	}
	if _, ok := m.Use(1); ok {
		t.Error("an idle adapter survived a hundred newer ones")
	}
	if _, ok := m.Use(2); !ok {
		t.Error("an adapter with a request in flight was forgotten")
	}
	m.Forget(3)
	if _, ok := m.Use(3); !ok {
		t.Error("Forget dropped an adapter with a request in flight")
	}
	b[1].End()
	b[2].End()
	m.Forget(3)
	if _, ok := m.Use(3); ok {
		t.Error("Forget kept an idle adapter")
	}
}
