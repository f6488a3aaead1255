package pool

import (
	"slices"
	"testing"
)

func TestServedIsKnownAheadOfTheList(t *testing.T) {
	tab := NewTable([]PoolSpec{{Name: "p", Models: []string{"m"}, Loadable: []Model{{ID: "a", Parent: "m"}, {ID: "b", Parent: "m"}}}}, Options{})
	if tg := tab.Load().TargetString("a"); tg == nil || !tg.Adapter || tg.Base != "m" || len(tg.Rows) != 0 {
		t.Fatalf("a loadable adapter that nobody has is %+v; want its name known", tg)
	}
	added, _, err := tab.SetEndpoints("p", []Spec{{Pool: "p", URL: "http://127.0.0.1:1"}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	e := added[0]
	rows := func(name string) int { return len(tab.Load().TargetString(name).Rows) }
	list := func(names ...string) *Served {
		s := &Served{Models: []Model{{ID: "m"}}, At: 2}
		for _, n := range names {
			s.Models = append(s.Models, Model{ID: n, Parent: "m"})
		}
		return s
	}
	tab.AddServed(e, Model{ID: "a", Parent: "m"}, 2)
	if rows("a") != 0 {
		t.Error("it serves something before its list is known")
	}
	tab.SetServed(e, list())
	before := tab.Load()
	tab.AddServed(e, Model{ID: "a", Parent: "m"}, 3)
	tab.AddServed(e, Model{ID: "a", Parent: "m"}, 3)
	if rows("a") != 1 || len(before.Rows[0].Served.Models) != 1 {
		t.Error("want a in the new snapshot, and the old one as it was")
	}
	tab.SetServed(e, list("a", "b"))

	tab.RemoveServed(e, "a", 4)
	if rows("a") != 0 || rows("b") != 1 {
		t.Errorf("a has %d rows, b %d; want 0 and 1", rows("a"), rows("b"))
	}
	// neither a list that was under way nor a page with its last requests brings it back
	tab.SetServed(e, list("a", "b"))
	tab.Observe(e, Observation{Load: &Load{Known: KnowsAdapters, Adapters: []string{"a", "b"}, PromptTokens: -1}, At: 5})
	if rows("a") != 0 {
		t.Error("it is back though it is about to go")
	}
	tab.SetServed(e, list("b"))
	tab.SetServed(e, list("a", "b")) // somebody has loaded it again
	if rows("a") != 1 {
		t.Error("it was loaded again, and isn't there")
	}
	tab.RemoveServed(e, "a", 6)
	tab.AddServed(e, Model{ID: "a", Parent: "m"}, 7) // it couldn't be unloaded after all
	if rows("a") != 1 || !slices.ContainsFunc(tab.Load().Rows[0].Served.Models, func(m Model) bool { return m.ID == "a" }) {
		t.Error("it has stayed, and isn't there")
	}
}
