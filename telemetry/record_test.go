package telemetry

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

type keep struct{ seen []string }

func (k *keep) Observe(r *Record) { k.seen = append(k.seen, r.RequestID) }

func TestSinksHandOnInOrder(t *testing.T) {
	a := &keep{}
	s := Sinks{a, a}
	s.Observe(&Record{RequestID: "x"})
	if !slices.Equal(a.seen, []string{"x", "x"}) {
		t.Errorf("sinks saw %v; want x twice", a.seen)
	}
}

// The rules of prometheus.io/docs/practices/naming.
func TestNamesFollowPrometheusRules(t *testing.T) {
	name := regexp.MustCompile(`^kvgate_[a-z]+(_[a-z]+)*$`)
	seen := map[string]bool{}
	for _, d := range Definitions() {
		if !name.MatchString(d.Name) || seen[d.Name] {
			t.Errorf("%s: bad or repeated name", d.Name)
		}
		seen[d.Name] = true
		if (d.Kind == Counter) != strings.HasSuffix(d.Name, "_total") {
			t.Errorf("%s is a %s; _total is for counters, and all of them", d.Name, d.Kind)
		}
		if (d.Kind == Histogram) != (len(d.Buckets) > 0) {
			t.Errorf("%s is a %s with %d buckets", d.Name, d.Kind, len(d.Buckets))
		}
		if !slices.IsSorted(d.Buckets) {
			t.Errorf("%s: buckets are not sorted", d.Name)
		}
		if !strings.HasSuffix(d.Help, ".") {
			t.Errorf("%s: help %q is no sentence", d.Name, d.Help)
		}
	}
}
