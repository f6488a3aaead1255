package adapters

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/pool"
)

// A fleet plays the endpoints: what is decided is done at once, unless it is told to fail.
type fleet struct {
	t    *testing.T
	p    *Planner
	now  pool.Instant
	eps  []Endpoint
	busy map[string]map[string]int // requests in flight, by endpoint and adapter
	fail map[string]Fault          // by "adapter@endpoint", "adapter@", "@endpoint"
}

func newFleet(t *testing.T, n int, list []Adapter, o PlanOptions) *fleet {
	f := &fleet{t: t, p: NewPlanner(list, o), now: pool.Instant(time.Hour), busy: map[string]map[string]int{}, fail: map[string]Fault{}}
	for i := range n {
		id := fmt.Sprint("e", i)
		f.busy[id] = map[string]int{}
		f.eps = append(f.eps, Endpoint{
			ID: id, Hash: pool.HashName(id), Ready: true, Known: true,
			InFlight: func(a string) int { return f.busy[id][a] },
		})
	}
	return f
}

func (f *fleet) at(id string) *Endpoint {
	return &f.eps[slices.IndexFunc(f.eps, func(e Endpoint) bool { return e.ID == id })]
}

// step plans and does it, and returns what was done.
func (f *fleet) step() string {
	f.t.Helper()
	var done []string
	for _, a := range f.p.Plan(f.now, f.eps) {
		e := f.at(a.Endpoint)
		what := "+"
		if a.Unload {
			what = "-"
		}
		fault := cmpFault(f.fail[a.Adapter.Name+"@"+e.ID], f.fail[a.Adapter.Name+"@"], f.fail["@"+e.ID])
		switch {
		case fault != NoFault:
			what = "!"
		case a.Unload:
			if f.busy[e.ID][a.Adapter.Name] > 0 {
				f.t.Errorf("%s is unloaded from %s with requests in flight", a.Adapter.Name, e.ID)
			}
			e.Has = slices.DeleteFunc(e.Has, func(n string) bool { return n == a.Adapter.Name })
		default:
			if slices.Contains(e.Has, a.Adapter.Name) {
				f.t.Errorf("%s is loaded on %s twice", a.Adapter.Name, e.ID)
			}
			e.Has = append(e.Has, a.Adapter.Name)
		}
		f.p.Done(a, fault, f.now)
		done = append(done, what+a.Adapter.Name+":"+a.Why)
	}
	return strings.Join(done, " ")
}

func cmpFault(fs ...Fault) Fault {
	for _, f := range fs {
		if f != NoFault {
			return f
		}
	}
	return NoFault
}

func (f *fleet) pass(d time.Duration) { f.now = f.now.Add(d) }

// where lists the endpoints that have the adapter.
func (f *fleet) where(name string) (ids []string) {
	for i := range f.eps {
		if slices.Contains(f.eps[i].Has, name) {
			ids = append(ids, f.eps[i].ID)
		}
	}
	return ids
}

func (f *fleet) did(want string) {
	f.t.Helper()
	if got := f.step(); got != want {
		f.t.Errorf("did %q; want %q", got, want)
	}
}

func registry(names ...string) (list []Adapter) {
	for _, n := range names {
		list = append(list, Adapter{Name: n, Source: "/" + n})
	}
	return list
}

func TestLoadsWhatIsAskedForOnce(t *testing.T) {
	f := newFleet(t, 3, registry("a", "b"), PlanOptions{PerEndpoint: 2})
	f.did("")
	for range 5 {
		if !f.p.Ask("a", f.now) {
			t.Error("no hope for a")
		}
	}
	f.did("+a:asked")
	f.did("")
	if f.p.Ask("x", f.now) {
		t.Error("hope for an adapter that isn't in the registry")
	}
	// while it is being loaded, it is not loaded a second time
	f.p.Ask("b", f.now)
	first := f.p.Plan(f.now, f.eps)
	f.p.Ask("b", f.now)
	if second := f.p.Plan(f.now, f.eps); len(first) != 1 || len(second) != 0 {
		t.Errorf("plans of %d and %d loads; want 1 and 0", len(first), len(second))
	}
}

func TestFailuresAreTriedElsewhere(t *testing.T) {
	f := newFleet(t, 3, registry("a"), PlanOptions{Hold: 30 * time.Second})
	first := f.p.Plan(f.now, f.eps) // nothing
	f.fail["@e0"], f.fail["@e1"] = AtEndpoint, AtEndpoint
	f.p.Ask("a", f.now)
	for range 3 {
		f.step()
		f.p.Ask("a", f.now) // who waits asks again when it has failed
	}
	if got := f.where("a"); len(first) != 0 || !slices.Equal(got, []string{"e2"}) {
		t.Errorf("a is on %v; want e2, where loading works", got)
	}

	// a source that two servers can't read is given up for a while
	f = newFleet(t, 5, registry("a"), PlanOptions{Hold: 30 * time.Second})
	f.fail["a@"] = AtAdapter
	f.p.Ask("a", f.now)
	f.did("!a:asked")
	f.p.Ask("a", f.now)
	f.did("!a:asked")
	f.did("")
	if f.p.Ask("a", f.now) || !f.p.Hopeless("a", f.now, f.eps) {
		t.Error("want no hope for now")
	}
	f.pass(31 * time.Second)
	delete(f.fail, "a@")
	if !f.p.Ask("a", f.now) {
		t.Error("want another try")
	}
	f.did("+a:asked")

	// a server without the API is left alone
	f = newFleet(t, 1, registry("a", "b"), PlanOptions{})
	f.fail["@e0"] = Unsupported
	f.p.Ask("a", f.now)
	f.did("!a:asked")
	if !f.p.Hopeless("b", f.now, f.eps) {
		t.Error("want no hope where nobody loads adapters")
	}
	f.p.Restarted("e0")
	delete(f.fail, "@e0")
	f.p.Ask("a", f.now)
	f.did("+a:asked")
}

func TestPinnedAndLeast(t *testing.T) {
	f := newFleet(t, 4, []Adapter{{Name: "pin", Pin: true}, {Name: "three", Min: 3}, {Name: "free"}}, PlanOptions{PerEndpoint: 1, MaxLoading: 8})
	f.did("+pin:pinned +three:pinned +three:pinned +three:pinned")
	// there is no room for another: none of the pinned ones goes
	f.p.Ask("free", f.now)
	f.pass(time.Hour)
	f.did("")
	if f.p.Ask("free", f.now) == false {
		t.Error("it may still come")
	}
	// an endpoint that comes takes it
	f.busy["e9"] = map[string]int{}
	f.eps = append(f.eps, Endpoint{ID: "e9", Ready: true, Known: true, InFlight: func(string) int { return 0 }})
	f.did("+free:asked")
}

func TestLeastValuableMakesRoom(t *testing.T) {
	f := newFleet(t, 1, registry("hot", "cold", "cool", "new"), PlanOptions{PerEndpoint: 3, Hold: time.Minute})
	for _, n := range []string{"hot", "cold", "cool"} {
		f.p.Ask(n, f.now)
		f.step()
	}
	for range 100 {
		f.pass(time.Second)
		f.p.Used("hot", 10)
		f.p.Used("cool", 1)
		if f.now%3 == 0 {
			f.p.Used("cold", 0.1)
		}
		f.did("")
	}
	f.busy["e0"]["cold"] = 1 // it has work to do: the next one goes
	f.p.Ask("new", f.now)
	f.did("-cool:room +new:asked")
	// What nobody waits for takes the place of nothing that is worth more, nor of what has just come.
	f.p.Short("cool")
	f.did("")
}

func TestHotOnesGetReplicas(t *testing.T) {
	f := newFleet(t, 4, registry("hot", "a", "b", "c"), PlanOptions{PerEndpoint: 4, MaxLoading: 2})
	for _, n := range []string{"hot", "a", "b", "c"} {
		f.p.Ask(n, f.now)
	}
	f.step()
	on := f.where("hot")[0]
	// It has as many requests in flight as the others together, and they have an endpoint each: more than one can carry.
	for range 60 {
		f.pass(time.Second)
		n := len(f.where("hot"))
		for _, id := range f.where("hot") {
			f.busy[id]["hot"] = 30 / n
		}
		for _, n := range []string{"a", "b", "c"} {
			f.busy[f.where(n)[0]][n] = 10
		}
		f.p.Used("hot", 30)
		f.step()
	}
	got := f.where("hot")
	if len(got) < 2 || !slices.Contains(got, on) {
		t.Errorf("hot is on %v; want more than one endpoint, %s among them", got, on)
	}
	for _, n := range []string{"a", "b", "c"} {
		if w := f.where(n); len(w) != 1 {
			t.Errorf("%s is on %v; want one", n, w)
		}
	}
	// a burst of a second changes nothing
	f = newFleet(t, 4, registry("a", "b"), PlanOptions{PerEndpoint: 4})
	f.p.Ask("a", f.now)
	f.step()
	for i := range 60 {
		f.pass(time.Second)
		f.busy[f.where("a")[0]]["a"] = 0
		if i%20 == 0 {
			f.busy[f.where("a")[0]]["a"] = 20
		}
		f.did("")
	}
	// but one that finds no room does
	f.p.Short("a")
	f.did("+a:hot")
}

func TestRestartedServerGetsItsSetBack(t *testing.T) {
	f := newFleet(t, 2, []Adapter{{Name: "pin", Pin: true}, {Name: "a"}, {Name: "b"}}, PlanOptions{PerEndpoint: 4, MaxLoading: 1, Hold: time.Minute})
	for _, n := range []string{"a", "b"} {
		f.p.Ask(n, f.now)
	}
	f.step()
	f.step()
	f.pass(10 * time.Second)
	before := map[string][]string{"e0": slices.Clone(f.at("e0").Has), "e1": slices.Clone(f.at("e1").Has)}
	for i := range f.eps {
		f.eps[i].Has, f.eps[i].Known = nil, false // it has restarted
		f.p.Restarted(f.eps[i].ID)
	}
	f.did("") // nothing is known of what it has
	for i := range f.eps {
		f.eps[i].Known = true
	}
	for range 6 {
		f.pass(time.Second)
		f.step()
	}
	for id, want := range before {
		got := slices.Clone(f.at(id).Has)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s has %v; want %v as before", id, got, want)
		}
	}
	// what was unloaded from outside and is no longer in the registry is forgotten
	f.p.Configure(registry("b"), PlanOptions{PerEndpoint: 4})
	f.pass(time.Hour)
	f.step()
	f.at("e0").Has, f.at("e1").Has = nil, nil
	for range 5 {
		f.pass(10 * time.Second)
		f.step()
	}
	if len(f.where("a")) > 0 || len(f.where("b")) != 1 {
		t.Errorf("a is on %v, b on %v; want none and one", f.where("a"), f.where("b"))
	}
}

func TestPreload(t *testing.T) {
	f := newFleet(t, 2, registry("a", "b", "c", "d", "e"), PlanOptions{PerEndpoint: 2, MaxLoading: 1, Preload: true})
	for range 10 {
		f.pass(time.Second)
		f.step()
	}
	// As many as there is room for, in order, spread; and then it is quiet.
	for _, n := range []string{"a", "b", "c", "d"} {
		if len(f.where(n)) != 1 {
			t.Errorf("%s is on %v", n, f.where(n))
		}
	}
	if len(f.where("e")) != 0 {
		t.Error("e took somebody's place")
	}
	for range 100 {
		f.pass(time.Second)
		f.did("")
	}
}

// Over hours of shifting demand nothing is loaded in vain: what comes stays for a while.
func TestNoFlapping(t *testing.T) {
	var names []string
	for i := range 12 {
		names = append(names, fmt.Sprint("a", i))
	}
	f := newFleet(t, 2, registry(names...), PlanOptions{PerEndpoint: 3, Hold: time.Minute, Preload: true})
	actions := 0
	for second := range 3600 {
		f.pass(time.Second)
		// six of equal demand take turns with the others every half hour
		for i := range 6 {
			name := names[(i+second/1800*6)%12]
			f.p.Used(name, 1)
			if len(f.where(name)) == 0 {
				f.p.Ask(name, f.now)
			}
		}
		if did := f.step(); did != "" {
			actions += len(strings.Fields(did))
		}
	}
	// six to begin with, and a change of all six places later
	if actions > 6+12+6 {
		t.Errorf("%d loads and unloads in an hour; want 18 or so", actions)
	}
}
