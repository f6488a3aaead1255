package policies

import (
	"fmt"
	"slices"
	"testing"
)

// Progress is told before the first policy runs, and of each.
func TestProgressIsToldOfEachPolicy(t *testing.T) {
	g, _ := GeneratorByName(Generators[0].Name)
	var got []string
	p := Plan{
		Policies: Rivals[:2], Seeds: 1, Parallel: 1, Options: Options{Replicas: 2},
		Workloads: []func(uint64) (*Workload, error){func(seed uint64) (*Workload, error) { return g.Make(60, seed), nil }},
		Progress:  func(done, total int, what string) { got = append(got, fmt.Sprintf("%d/%d %s", done, total, what)) },
	}
	p.Reference = Rivals[0].Name
	if _, err := p.Do(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{}
	for i, r := range Rivals[:2] {
		want = append(want, fmt.Sprintf("%d/2 %s, seed 1: %s", i, g.Name, r.Name))
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q; want %q", got, want)
	}
}
