package metrics

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// read takes adapters from p.
//
// The server adds a series for each combination of adapters it has had in flight, sets it to the time, and never removes
// it: only the newest one speaks of now. Where several processes write one page, a value is the sum of their times.
func (a *adapterSource) read(p *page, now float64, r *Raw) {
	for _, f := range a.Info {
		best := make(map[string]float64, 1) // by engine
		for _, s := range p.samples(f) {
			t := timeOf(s.value, now)
			if b, ok := best[s.engine]; !ok || t > b {
				best[s.engine] = t
			}
		}
		for _, s := range p.samples(f) {
			t := timeOf(s.value, now)
			if t != best[s.engine] {
				continue
			}
			if n, err := strconv.ParseFloat(labelOr(s.series, a.Max), 64); err == nil && n >= 0 && !math.IsInf(n, 0) {
				r.MaxAdapters = known(max(r.MaxAdapters.V, n))
			}
			r.AdaptersKnown = true
			r.AdaptersRunning = splitNames(r.AdaptersRunning, labelOr(s.series, a.Running))
			r.AdaptersWaiting = splitNames(r.AdaptersWaiting, labelOr(s.series, a.Waiting))
		}
		if r.AdaptersKnown {
			break
		}
	}
	for _, n := range a.Named {
		for _, s := range p.samples(n.family) {
			r.NamedKnown = true
			if s.value > 0 {
				r.Named = splitNames(r.Named, labelOr(s.series, n.label))
			}
		}
	}
	slices.Sort(r.Named)
}

// timeOf undoes the sum over processes: a value of about n times now is divided by n.
func timeOf(v, now float64) float64 {
	if now > 0 {
		if n := math.Round(v / now); n >= 2 {
			return v / n
		}
	}
	return v
}

func labelOr(s *series, name string) string {
	v, _ := s.label(name)
	return v
}

// splitNames appends the names in a comma-separated list that aren't there yet.
func splitNames(names []string, list string) []string {
	for n := range strings.SplitSeq(list, ",") {
		if n = strings.TrimSpace(n); n != "" && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}
