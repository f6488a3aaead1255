package pool

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

func observe(tab *Table, e *Endpoint, l Load, at Instant) bool {
	l.Known |= KnowsRunning | KnowsWaiting
	return tab.Observe(e, Observation{Load: &l, At: at, Before: e.Booked()})
}

func TestReannouncedEndpointKeepsItsCounters(t *testing.T) { // B6
	tab := testTable(t, 2)
	row := tab.Load().Rows[0]
	var b [20]Booking
	for i := range b {
		row.Book(&b[i], Claim{PendingTokens: 1, KVTokens: 2})
	}
	specs := []Spec{{Pool: "p", URL: "http://127.0.0.1:8000"}, {Pool: "p", URL: "http://127.0.0.1:8001"}}
	f := func(specs []Spec, wantAdded, wantRemoved int) {
		t.Helper()
		added, removed, err := tab.SetEndpoints("p", specs, 10)
		if err != nil || len(added) != wantAdded || len(removed) != wantRemoved {
			t.Fatalf("added %d, removed %d, %v; want %d, %d", len(added), len(removed), err, wantAdded, wantRemoved)
		}
	}
	f(specs, 0, 0)
	f(specs[1:], 0, 1) // discovery flaps
	f(specs, 1, 0)
	again := tab.Load().Rows[0]
	if again.Endpoint != row.Endpoint || again.Booked().Requests != 20 {
		t.Errorf("after flapping: another endpoint (%v) or %d requests; want the same with 20", again.Endpoint != row.Endpoint, again.Booked().Requests)
	}
	for i := range b {
		b[i].End()
	}
	// A new pod on the old address is another endpoint and starts unknown.
	f([]Spec{{Pool: "p", URL: "http://127.0.0.1:8000", SourceID: "uid-2"}, specs[1]}, 1, 1)
	if r := tab.Load().Rows[0]; r.Endpoint == row.Endpoint || r.Load.Known != 0 {
		t.Error("a pod with another UID on the same address took over what was known of the old one")
	}
}

func TestRemovedEndpointsFreeTheirSlots(t *testing.T) {
	tab := testTable(t, 0)
	for i := range 1000 {
		spec := Spec{Pool: "p", URL: "http://127.0.0.1:8000", SourceID: fmt.Sprint(i)}
		if _, _, err := tab.SetEndpoints("p", []Spec{spec}, Instant(time.Hour)*Instant(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	if len(tab.slots) > 4 || len(tab.removed) > 2 {
		t.Errorf("after 1,000 pods one after the other: %d slots, %d remembered; want a handful", len(tab.slots), len(tab.removed))
	}
}

func TestUnknownIsNotIdle(t *testing.T) {
	row := testTable(t, 1).Load().Rows[0]
	if row.Load.Known != 0 || row.Fresh(1, 1<<62) || row.KVCapacity != 0 {
		t.Error("an endpoint that was never scraped looks known")
	}
}

func TestForeignLoad(t *testing.T) {
	f := func(l Load, ours Booked, want Foreign) {
		t.Helper()
		if got := foreign(&l, ours); got != want {
			t.Errorf("foreign(%+v, %+v) = %+v; want %+v", l, ours, got, want)
		}
	}
	const queue, kv = KnowsRunning | KnowsWaiting, KnowsKVCacheUtilization | KnowsKVCapacity
	f(Load{}, Booked{}, Foreign{}) // nothing known
	f(Load{Known: queue, Running: 3, Waiting: 1}, Booked{Requests: 4}, Foreign{})
	f(Load{Known: queue, Running: 3, Waiting: 1}, Booked{Requests: 9}, Foreign{}) // ours have not arrived yet
	f(Load{Known: queue, Running: 6, Waiting: 4}, Booked{}, Foreign{Requests: 10, Waiting: 4})
	f(Load{Known: queue, Running: 6, Waiting: 4}, Booked{Requests: 5}, Foreign{Requests: 5, Waiting: 2})
	f(Load{Known: KnowsRunning, Running: 6}, Booked{Requests: 2}, Foreign{Requests: 4})
	f(Load{Known: queue | kv, Running: 4, KVCacheUtilization: .5, KVCapacityTokens: 1000}, Booked{Requests: 2, KVTokens: 900}, Foreign{Requests: 2, KVTokens: 250})
	f(Load{Known: queue | kv, KVCacheUtilization: .5, KVCapacityTokens: 1000}, Booked{}, Foreign{KVTokens: 500}) // held for a transfer
	f(Load{Known: kv, KVCacheUtilization: .5, KVCapacityTokens: 1000}, Booked{Requests: 2, KVTokens: 400}, Foreign{KVTokens: 100})
}

func TestForeignIsNotOursThatEndedMeanwhile(t *testing.T) {
	tab := testTable(t, 1)
	row := tab.Load().Rows[0]
	var b Booking
	row.Book(&b, Claim{})
	before := row.Booked()
	b.End() // after the page was rendered, before it arrived
	tab.Observe(row.Endpoint, Observation{Load: &Load{Known: KnowsRunning, Running: 1}, Before: before, At: 2})
	if f := tab.Load().Rows[0].Foreign; f.Requests != 0 {
		t.Errorf("%d foreign requests; want 0: the one on the page was ours", f.Requests)
	}
}

func TestRestartDropsBeliefs(t *testing.T) { // S8
	tab := testTable(t, 1)
	e := tab.Load().Rows[0].Endpoint
	f := func(l Load, at Instant, want bool) {
		t.Helper()
		before := e.Epoch()
		if got := observe(tab, e, l, at); got != want || (e.Epoch() != before) != want {
			t.Errorf("restart noticed: %v, epoch %d after %d; want %v", got, e.Epoch(), before, want)
		}
	}
	none := Load{PromptTokens: -1, GenerationTokens: -1, PrefixQueryTokens: -1}
	with := func(start, prompt float64) Load { l := none; l.StartTime, l.PromptTokens = start, prompt; return l }
	f(with(1000, 500), 1, false)
	var b Booking
	tab.Load().Rows[0].Book(&b, Claim{Adapter: 9, At: 1})
	tab.SetServed(e, &Served{Models: []Model{{ID: "m"}}, At: 1})
	f(with(1000.5, 600), 2, false) // start times jitter
	f(with(1300, 10), 3, true)
	if _, ok := e.Adapters().Use(9); ok {
		t.Error("adapters are still believed after a restart")
	}
	if tab.Load().Rows[0].Served != nil {
		t.Error("the models served are still believed after a restart")
	}
	b.End()
	if e.Adapters().Active() != 0 || e.Booked() != (Booked{}) {
		t.Errorf("a booking from before the restart did not end cleanly: %+v", e.Booked())
	}
	f(with(0, 20), 4, false) // the page stopped saying when it started: counters decide
	f(with(0, 5), 5, true)
	f(none, 6, false)
}

func TestTargets(t *testing.T) {
	tab := NewTable([]PoolSpec{{Name: "a", Models: []string{"base-a"}}, {Name: "b"}}, Options{})
	must := func(_, _ []*Endpoint, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(tab.SetEndpoints("a", []Spec{{Pool: "a", URL: "http://127.0.0.1:1"}, {Pool: "a", URL: "http://127.0.0.1:2"}}, 1))
	must(tab.SetEndpoints("b", []Spec{{Pool: "b", URL: "http://127.0.0.1:3"}}, 1))
	row := func(i int) *Endpoint { return tab.Load().Rows[i].Endpoint }
	f := func(name string, want ...int32) {
		t.Helper()
		tg := tab.Load().Target([]byte(name))
		if tg == nil {
			if want != nil {
				t.Errorf("%q is unknown; want rows %v", name, want)
			}
			return
		}
		if want == nil || !slices.Equal(tg.Rows, want) {
			t.Errorf("%q is served by rows %v; want %v", name, tg.Rows, want)
		}
	}
	f("base-a", 0, 1) // configured, though nobody has said so yet
	f("base-b")
	tab.SetServed(row(2), &Served{Models: []Model{{ID: "base-b"}, {ID: "sql", Parent: "base-b"}}})
	f("base-b", 2)
	f("sql", 2)
	if tg := tab.Load().TargetString("sql"); !tg.Adapter || tg.Base != "base-b" || tg.Pool != 1 {
		t.Errorf("sql: %+v; want an adapter of base-b in pool 1", tg)
	}
	// An endpoint that says it serves something else is not believed to serve the configured name.
	tab.SetServed(row(0), &Served{Models: []Model{{ID: "other"}}})
	f("base-a", 1)
	tab.SetServed(row(1), &Served{Models: []Model{{ID: "other"}}})
	if tg := tab.Load().TargetString("base-a"); tg == nil || len(tg.Rows) != 0 {
		t.Error("a configured name that nobody serves must stay known, with no rows")
	}
	// An adapter that only the metrics page shows, and only while it is in flight.
	must(tab.SetEndpoints("b", []Spec{{Pool: "b", URL: "http://127.0.0.1:4"}}, 2))
	observe(tab, row(2), Load{Known: KnowsAdapters, Adapters: []string{"shy"}}, 3)
	f("shy", 2)
	observe(tab, row(2), Load{Known: KnowsAdapters}, 4)
	f("shy", 2)
	tab.SetServed(row(2), &Served{Models: []Model{{ID: "base-b"}}})
	f("shy")
	observe(tab, row(2), Load{Known: KnowsAdapters, Adapters: []string{"new"}}, 5)
	f("new", 2)
	// An adapter cannot take the name of another pool's model.
	tab.SetServed(row(2), &Served{Models: []Model{{ID: "base-b"}, {ID: "base-a", Parent: "base-b"}}})
	if tg := tab.Load().TargetString("base-a"); tg.Pool != 0 {
		t.Errorf("base-a went to pool %d; want 0", tg.Pool)
	}
}

func TestSetEndpointsRefusesABadSpecWhole(t *testing.T) {
	tab := testTable(t, 2)
	before := tab.Load()
	for _, u := range []string{"127.0.0.1:80", "ftp://127.0.0.1:1", "http://", "http://[::1", ""} {
		if _, _, err := tab.SetEndpoints("p", []Spec{{Pool: "p", URL: "http://127.0.0.1:9"}, {Pool: "p", URL: u}}, 1); err == nil {
			t.Errorf("url %q was accepted", u)
		}
	}
	if tab.Load() != before {
		t.Error("a refused set of endpoints changed the table")
	}
}

func TestPublishEveryHoldsObservationsBack(t *testing.T) {
	tab := NewTable([]PoolSpec{{Name: "p"}}, Options{PublishEvery: 10})
	if _, _, err := tab.SetEndpoints("p", []Spec{{Pool: "p", URL: "http://127.0.0.1:1"}}, 100); err != nil {
		t.Fatal(err)
	}
	e := tab.Load().Rows[0].Endpoint
	observe(tab, e, Load{Running: 1}, 105)
	if tab.Load().Rows[0].Load.Running != 0 {
		t.Error("published 5 ns after the last time; want it held for 10")
	}
	tab.Flush(106)
	if tab.Load().Rows[0].Load.Running != 1 {
		t.Error("Flush did not publish what was held")
	}
	observe(tab, e, Load{Running: 2}, 120)
	if tab.Load().Rows[0].Load.Running != 2 {
		t.Error("not published though the interval had passed")
	}
}

// Readers hold one snapshot while writers publish: no torn rows, counts agree within a snapshot.
func TestConcurrentReadersAndWriters(t *testing.T) {
	tab := testTable(t, 16)
	stop := make(chan struct{})
	var writers, readers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range 500 {
				s := tab.Load()
				row := &s.Rows[(i*7+w)%len(s.Rows)]
				n := int32(i)
				observe(tab, row.Endpoint, Load{Running: n, Waiting: n, KVCacheUtilization: float64(n)}, Instant(i+1))
				if i%50 == 0 {
					tab.SetServed(row.Endpoint, &Served{Models: []Model{{ID: "m"}, {ID: fmt.Sprint("a", i), Parent: "m"}}})
					tab.SetState(row.Endpoint, Draining, i%100 == 0, Instant(i+1))
				}
			}
		})
	}
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				s := tab.Load()
				for i := range s.Rows {
					if l := s.Rows[i].Load; l.Running != l.Waiting || float64(l.Running) != l.KVCacheUtilization {
						t.Errorf("torn row: %+v", l)
						return
					}
				}
				if tg := s.TargetString("m"); tg == nil || int(tg.Rows[len(tg.Rows)-1]) >= len(s.Rows) {
					t.Error("index and rows disagree")
					return
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}
