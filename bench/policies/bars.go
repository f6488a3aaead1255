package policies

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A Bar is something that `auto` is held to, and how it did.
type Bar struct {
	What, Bar, Measured string
	Holds               bool
}

// Bars judges what was found of the policy `auto`. Differences below 3 % of a capacity and 5 % of a mean TTFT are within
// what another seed changes.
func (f *Findings) Bars() []Bar {
	var bars []Bar
	add := func(what, bar string, holds bool, format string, args ...any) {
		bars = append(bars, Bar{what, bar, fmt.Sprintf(format, args...), holds})
	}
	workloads, policies, by := groups(f.Lines)
	shares := func(w, p string) Spread { _, rel := capacities(by, w, p); return spread(rel) }
	at := func(w, p string) (rs []*Result) {
		for _, l := range by[[2]string{w, p}] {
			if i := slices.Index(f.Loads, studyLoad); i >= 0 && i < len(l.At) {
				rs = append(rs, l.At[i])
			}
		}
		return rs
	}
	prefixed := []string{"conversation", "tool", "rag", "mooncake_conversation"}
	for _, w := range workloads {
		switch {
		case slices.Contains(prefixed, w):
			s, rival := shares(w, "auto"), shares(w, "llm-d")
			add("capacity, "+w, "≥ 96 % of the oracle's", s.Mean >= 0.96, "%.1f %% ±%.1f", 100*s.Mean, 100*s.Dev)
			add("capacity, "+w, "≥ 1.25 × llm-d's default", s.Mean >= 1.25*rival.Mean, "%.2f ×", s.Mean/rival.Mean)
			auto, oracle := at(w, "auto"), at(w, "oracle")
			mean := over(auto, ttftMean).Mean / over(oracle, ttftMean).Mean
			p99 := over(auto, ttftP99).Mean / over(oracle, ttftP99).Mean
			add("mean TTFT at 85 %, "+w, "≤ 1.05 × the oracle's", mean <= 1.05, "%.3f ×", mean)
			add("p99 TTFT at 85 %, "+w, "≤ 1.1 × the oracle's", p99 <= 1.1, "%.3f ×", p99)
		case strings.Contains(w, "lora"):
			best, name := 0.0, ""
			for _, p := range policies {
				if s := shares(w, p).Mean; s > best {
					best, name = s, p
				}
			}
			s := shares(w, "auto")
			add("capacity, "+w, "≥ 95 % of the best of all", s.Mean >= 0.95*best, "%.1f %% of %s's (%.1f %% ±%.1f of the oracle's)", 100*s.Mean/best, name, 100*s.Mean, 100*s.Dev)
		case w == "short" || strings.HasPrefix(w, "azure"):
			s, least := shares(w, "auto"), shares(w, "least_requests")
			add("capacity, "+w+" (nothing shared)", "≥ 98 % of least_requests'", s.Mean >= 0.98*least.Mean, "%.1f %%", 100*s.Mean/least.Mean)
		}
	}
	for _, e := range sortedKeys(f.Engines) {
		names, _, lines := groups(f.Engines[e])
		for _, w := range names {
			_, rel := capacities(lines, w, "auto")
			s := spread(rel)
			add("capacity, "+w+" on "+e, "≥ 93 % of the oracle's", s.Mean >= 0.93, "%.1f %% ±%.1f", 100*s.Mean, 100*s.Dev)
		}
	}
	if len(f.Figures) == 0 {
		return bars
	}
	var varied, tried []string
	for _, g := range f.Figures {
		if !slices.Contains(varied, g.Workload) {
			varied = append(varied, g.Workload)
		}
		if !slices.Contains(tried, g.Policy) && g.Policy != "oracle" { // it knows everything, whoever sends
			tried = append(tried, g.Policy)
		}
	}
	for _, w := range varied {
		fresh := over(f.find(w, "auto", "scrapes", "50 ms old").Results, ttftMean).Mean
		old := over(f.find(w, "auto", "scrapes", "5 s").Results, ttftMean).Mean
		add("scrapes 5 s old, "+w, "mean TTFT ≤ 5 % worse", old <= 1.05*fresh, "%+.1f %%", 100*(old/fresh-1))
	}
	among := func(what, group, name string) {
		// The geometric mean of mean TTFTs, which no workload rules by its size.
		best, rival, score := math.Inf(1), "", 0.0
		for _, p := range tried {
			sum, everywhere := 0.0, true
			for _, w := range varied {
				g := f.find(w, p, group, name)
				if g == nil { // made for some workloads only
					everywhere = false
					break
				}
				sum += math.Log(over(g.Results, ttftMean).Mean)
			}
			if !everywhere {
				continue
			}
			switch s := math.Exp(sum / float64(len(varied))); {
			case p == "auto":
				score = s
			case s < best:
				best, rival = s, p
			}
		}
		add(what+", mean over workloads", "the best policy", score <= best, "%.3f s; the next is %s with %.3f s", score, rival, best)
	}
	among("4 gateways sharing nothing", "gateways", "4")
	for _, w := range varied {
		best, rival := 0.0, ""
		for _, p := range tried {
			g := f.find(w, p, "gateways", "4")
			if g == nil || p == "auto" {
				continue
			}
			if a := over(g.Results, attainment).Mean; a > best {
				best, rival = a, p
			}
		}
		a := over(f.find(w, "auto", "gateways", "4").Results, attainment).Mean
		add("4 gateways, "+w, "within the SLO ≤ 3 % behind the best rival", a >= best-0.03, "%.1f %%; %s %.1f %%", 100*a, rival, 100*best)
		if strings.Contains(w, "lora") {
			add("4 gateways, "+w, "≥ 98 % within the SLO", a >= 0.98, "%.1f %%", 100*a)
		}
	}
	among("half the traffic sent by others", "one at a time", "half is others', scrapes 1 s")
	return bars
}
