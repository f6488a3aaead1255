package pool

import (
	"encoding/json"
	"reflect"
	"testing"
)

// A view that was saved and restored shows the same again.
func TestViewsCanBeRestored(t *testing.T) {
	tab := NewTable([]PoolSpec{{Name: "p"}, {Name: "q"}}, Options{})
	for pool, names := range map[string][]string{"p": {"a", "b"}, "q": {"c"}} {
		var specs []Spec
		for i, n := range names {
			specs = append(specs, Spec{Pool: pool, URL: "http://127.0.0.1:" + string(rune('1'+i)), Name: n})
		}
		if _, _, err := tab.SetEndpoints(pool, specs, 1); err != nil {
			t.Fatal(err)
		}
	}
	s := tab.Load()
	a, b := s.Rows[0].Endpoint, s.Rows[1].Endpoint
	tab.Observe(a, Observation{Load: &Load{
		Known:   KnowsRunning | KnowsWaiting | KnowsKVCacheUtilization | KnowsKVCapacity | KnowsAdapters | KnowsMaxAdapters,
		Running: 7, Waiting: 2, KVCacheUtilization: 0.25, KVCacheUtilizationMax: 0.5, KVCapacityTokens: 4000, Adapters: []string{"x"}, MaxAdapters: 4,
		Engines: []EngineLoad{{ID: "0", Known: KnowsRunning, Running: 7}}, Dialect: "vllm",
	}, At: 2e9})
	tab.SetServed(a, &Served{Models: []Model{{ID: "m"}, {ID: "x", Parent: "m"}}, At: 2e9})
	a.PrefillTokensPerSecond.Store(1234)
	a.AdapterLoadSeconds.Store(0.25)
	a.SetLearned(1.5, 0)
	var booking, second Booking
	tab.Load().Rows[0].Book(&booking, Claim{PendingTokens: 10, KVTokens: 30, At: 3e9})
	tab.Load().Rows[0].Book(&second, Claim{PendingTokens: 20, KVTokens: 40, Adapter: HashName("x"), At: 3e9})
	second.FirstToken()
	tab.SetState(b, Draining, true, 3e9)
	b.SetBusyUntil(9e9)

	want := tab.Load().View(4e9)
	saved, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var v View
	if err := json.Unmarshal(saved, &v); err != nil {
		t.Fatal(err)
	}
	restored, now, err := v.Table()
	if err != nil {
		t.Fatal(err)
	}
	got := restored.Load().View(now)
	got.Version = want.Version
	if !reflect.DeepEqual(got, want) {
		g, _ := json.Marshal(got)
		t.Errorf("restored\n%s\nwant\n%s", g, saved)
	}
	if tg := restored.Load().TargetString("x"); tg == nil || !tg.Adapter || tg.Base != "m" {
		t.Errorf("target x: %+v", tg)
	}
	if _, _, err := (&View{Endpoints: []EndpointView{{ID: "other", URL: "http://h", Pool: "p"}}}).Table(); err == nil {
		t.Error("an id that does not fit its pool was accepted")
	}
}
