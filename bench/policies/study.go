package policies

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Study is everything that docs/routing.md shows: capacities and latencies of all policies, and how the interesting ones
// take it when something about the world changes.
type Study struct {
	Seeds    int
	Policies []Policy
	// Workloads are compared in full; Engines on other GPUs, by the names of the workloads; Varied are those under which the
	// variations are tried. Each is made anew for each seed.
	Workloads []Maker
	Engines   []string // profiles
	OnEngines []Maker
	Varied    []Maker
	Parallel  int
	Progress  func(what string)
}

// A Maker makes a workload for a seed.
type Maker struct {
	Name string
	Make func(seed uint64) (*Workload, error)
}

// A Variation is a change of the world that policies are tried under.
type Variation struct {
	Group, Name string
	Change      func(*Options)
}

// Variations are tried one by one; the first of each group is what the others are compared with.
var Variations = []Variation{
	{"scrapes", "50 ms old", func(o *Options) { o.ScrapeEvery = 50 * time.Millisecond }},
	{"scrapes", "200 ms", func(o *Options) { o.ScrapeEvery = 200 * time.Millisecond }},
	{"scrapes", "1 s", func(o *Options) { o.ScrapeEvery = time.Second }},
	{"scrapes", "5 s", func(o *Options) { o.ScrapeEvery = 5 * time.Second }},
	{"gateways", "1", func(o *Options) { o.Gateways = 1 }},
	{"gateways", "2", func(o *Options) { o.Gateways = 2 }},
	{"gateways", "4", func(o *Options) { o.Gateways = 4 }},
	{"one at a time", "as it is", func(*Options) {}},
	{"one at a time", "estimates ±30 %", func(o *Options) { o.EstimateError = 0.3 }},
	{"one at a time", "not streamed", func(o *Options) { o.NotStreamed = true }},
	{"one at a time", "half is others', scrapes 1 s", func(o *Options) { o.ForeignShare, o.ScrapeEvery = 0.5, time.Second }},
	{"one at a time", "a server joins", func(o *Options) { o.Join = 0.5 }},
	{"one at a time", "a server leaves", func(o *Options) { o.Leave = 0.5 }},
	{"one at a time", "a server restarts", func(o *Options) { o.Restart = 0.5 }},
}

// A Figure is one policy under one variation, by seed.
type Figure struct {
	Workload, Policy string
	Variation        Variation
	Results          []*Result // by seed
}

// Findings are what a study found.
type Findings struct {
	Seeds   int
	Lines   []Line            // of Study.Workloads
	Engines map[string][]Line // by profile
	Figures []Figure
	Loads   []float64
}

// studyLoads are the shares of the oracle's capacity at which latencies are measured, and studyLoad the one of the bars
// and the variations.
var studyLoads = []float64{0.6, 0.85, 0.95}

const studyLoad = 0.85

// Do runs the study.
func (s Study) Do(ctx context.Context) (*Findings, error) {
	f := &Findings{Seeds: s.Seeds, Engines: make(map[string][]Line), Loads: studyLoads}
	progress := s.Progress
	if progress == nil {
		progress = func(string) {}
	}
	plan := func(makers []Maker, o Options, loads []float64, ps []Policy) ([]Line, error) {
		p := Plan{Policies: ps, Options: o, Seeds: s.Seeds, Loads: loads, Parallel: s.Parallel}
		p.Progress = func(done, total int, what string) { progress(fmt.Sprintf("capacities %d/%d: %s", done, total, what)) }
		for _, m := range makers {
			p.Workloads = append(p.Workloads, m.Make)
		}
		return p.Do(ctx)
	}
	var err error
	for _, m := range s.Workloads {
		lines, err := plan([]Maker{m}, Options{}, studyLoads, interesting(s.Policies, m.Name))
		if err != nil {
			return nil, err
		}
		f.Lines = append(f.Lines, lines...)
	}
	for _, e := range s.Engines {
		if f.Engines[e], err = plan(s.OnEngines, Options{Profiles: []string{e}}, []float64{studyLoad}, pick(s.Policies, "llm-d", "dynamo", "auto", "oracle")); err != nil {
			return nil, err
		}
	}
	f.Figures, err = s.vary(ctx, f.Lines, progress)
	return f, err
}

// interesting leaves out the policies that can have nothing to do with a workload: those made for adapters where there are
// none, and those made for prefixes where nothing is shared.
func interesting(ps []Policy, workload string) []Policy {
	return slices.DeleteFunc(slices.Clone(ps), func(p Policy) bool {
		lora := strings.Contains(workload, "lora")
		shared := lora || workload != "short" && workload != "giants" && workload != "bursts"
		return !lora && p.Name == "llm-d+lora" || lora && p.Name == "dynamo" || !shared && (p.Name == "dynamo" || p.Name == "llm-d-precise")
	})
}

// pick returns the named policies, in their order.
func pick(ps []Policy, names ...string) (out []Policy) {
	for _, p := range ps {
		if slices.Contains(names, p.Name) {
			out = append(out, p)
		}
	}
	return out
}

// vary runs every variation at studyLoad of the oracle's capacity.
func (s Study) vary(ctx context.Context, lines []Line, progress func(string)) ([]Figure, error) {
	policies := pick(s.Policies, "least_requests", "llm-d", "llm-d+lora", "llm-d-precise", "dynamo", "auto")
	var figures []Figure
	for _, m := range s.Varied {
		for _, p := range interesting(policies, m.Name) {
			for _, v := range Variations {
				figures = append(figures, Figure{m.Name, p.Name, v, make([]*Result, s.Seeds)})
			}
		}
	}
	parallel := s.Parallel
	if parallel == 0 {
		parallel = runtime.GOMAXPROCS(0)
	}
	sem := make(chan struct{}, parallel)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	fail := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
		}
	}
	for _, m := range s.Varied {
		for seed := range uint64(s.Seeds) {
			w, err := m.Make(seed + 1)
			if err != nil {
				return nil, err
			}
			reference := slices.IndexFunc(lines, func(l Line) bool {
				return l.Workload == m.Name && l.Policy == "oracle" && l.Seed == seed+1
			})
			if reference < 0 {
				return nil, fmt.Errorf("workload %s: its capacity under the oracle is not known; it must be among those compared in full", m.Name)
			}
			for i := range figures {
				fig := &figures[i]
				if fig.Workload != m.Name {
					continue
				}
				wg.Go(func() {
					sem <- struct{}{}
					defer func() { <-sem }()
					if ctx.Err() != nil {
						fail(ctx.Err())
						return
					}
					o := Options{Seed: seed + 1, Rate: studyLoad * lines[reference].Capacity}
					fig.Variation.Change(&o)
					r, err := Run(w, policies[slices.IndexFunc(policies, func(p Policy) bool { return p.Name == fig.Policy })], o)
					if err != nil {
						fail(err)
						return
					}
					fig.Results[seed] = r
				})
			}
			wg.Wait() // a workload of the next seed is not made before this one's is done with
			progress(fmt.Sprintf("variations: %s, seed %d", m.Name, seed+1))
		}
	}
	return figures, first
}

// over is the spread over seeds of what f says of each.
func over(rs []*Result, f func(*Result) float64) Spread {
	v := make([]float64, len(rs))
	for i, r := range rs {
		v[i] = f(r)
	}
	return spread(v)
}

func ttftMean(r *Result) float64   { return r.TTFTMean.Seconds() }
func ttftP99(r *Result) float64    { return r.TTFTP99.Seconds() }
func attainment(r *Result) float64 { return r.Attainment }

// find returns the figure of a workload, policy and variation; nil if there is none.
func (f *Findings) find(workload, policy, group, name string) *Figure {
	for i := range f.Figures {
		if g := &f.Figures[i]; g.Workload == workload && g.Policy == policy && g.Variation.Group == group && g.Variation.Name == name {
			return g
		}
	}
	return nil
}

// table writes rows as a table in Markdown, the first as its head.
func table(out io.Writer, rows [][]string) {
	for i, r := range rows {
		fmt.Fprintf(out, "| %s |\n", strings.Join(r, " | "))
		if i == 0 {
			fmt.Fprintf(out, "|%s\n", strings.Repeat("---|", len(r)))
		}
	}
	fmt.Fprintln(out)
}

// WriteTables writes everything that was found as Markdown.
func (f *Findings) WriteTables(out io.Writer) {
	fmt.Fprintf(out, "Means over %d seeds; ± is the standard deviation between them.\n\n", f.Seeds)
	fmt.Fprint(out, "## Bars\n\n")
	rows := [][]string{{"what", "bar", "measured", "holds"}}
	for _, b := range f.Bars() {
		holds := "yes"
		if !b.Holds {
			holds = "**no**"
		}
		rows = append(rows, []string{b.What, b.Bar, b.Measured, holds})
	}
	table(out, rows)

	fmt.Fprint(out, "## Capacity\n\nRequests/s with 95 % within the SLO; in brackets the share of the oracle's, seed by seed.\n\n")
	f.writeCapacities(out, f.Lines)
	for _, e := range sortedKeys(f.Engines) {
		fmt.Fprintf(out, "On %s:\n\n", e)
		f.writeCapacities(out, f.Engines[e])
	}

	fmt.Fprint(out, "## Latency\n\n")
	workloads, policies, by := groups(f.Lines)
	for _, w := range workloads {
		fmt.Fprintf(out, "### %s at %.0f %% of the oracle's capacity\n\n", w, 100*studyLoad)
		rows := [][]string{{"policy", "TTFT mean s", "p50", "p90", "p99", "p99 up to 32,768 tokens", "p99 beyond", "TPOT p99 ms", "hit ratio", "preemptions", "adapter loads host / disk", "within SLO"}}
		for _, p := range policies {
			var rs []*Result
			for _, l := range by[[2]string{w, p}] {
				if i := slices.Index(f.Loads, studyLoad); i < len(l.At) {
					rs = append(rs, l.At[i])
				}
			}
			if len(rs) == 0 {
				continue
			}
			s := func(fn func(*Result) time.Duration) string {
				return fmt.Sprintf("%.3f", over(rs, func(r *Result) float64 { return fn(r).Seconds() }).Mean)
			}
			n := func(fn func(*Result) uint64) string {
				return fmt.Sprintf("%.0f", over(rs, func(r *Result) float64 { return float64(fn(r)) }).Mean)
			}
			mean := over(rs, ttftMean)
			rows = append(rows, []string{
				p, fmt.Sprintf("%.3f ±%.3f", mean.Mean, mean.Dev), s(func(r *Result) time.Duration { return r.TTFTP50 }),
				s(func(r *Result) time.Duration { return r.TTFTP90 }), s(func(r *Result) time.Duration { return r.TTFTP99 }),
				s(func(r *Result) time.Duration { return r.SmallP99 }), s(func(r *Result) time.Duration { return r.LargeP99 }),
				fmt.Sprintf("%.1f", 1000*over(rs, func(r *Result) float64 { return r.TPOTP99.Seconds() }).Mean),
				fmt.Sprintf("%.3f", over(rs, func(r *Result) float64 { return r.HitRatio }).Mean),
				n(func(r *Result) uint64 { return r.Preemptions }),
				n(func(r *Result) uint64 { return r.AdapterHostLoads }) + " / " + n(func(r *Result) uint64 { return r.AdapterDiskLoads }),
				fmt.Sprintf("%.1f %%", 100*over(rs, attainment).Mean),
			})
		}
		table(out, rows)
	}

	fmt.Fprintf(out, "## When the world changes\n\nAt %.0f %% of the oracle's capacity: mean TTFT in seconds / p99 / share within the SLO.\n\n", 100*studyLoad)
	var names, ps []string
	for _, g := range f.Figures {
		if !slices.Contains(names, g.Workload) {
			names = append(names, g.Workload)
		}
		if !slices.Contains(ps, g.Policy) {
			ps = append(ps, g.Policy)
		}
	}
	for _, w := range names {
		for _, group := range []string{"scrapes", "gateways", "one at a time"} {
			head := []string{w + ", " + group}
			for _, v := range Variations {
				if v.Group == group {
					head = append(head, v.Name)
				}
			}
			rows := [][]string{head}
			for _, p := range ps {
				row := []string{p}
				for _, name := range head[1:] {
					g := f.find(w, p, group, name)
					if g == nil {
						continue
					}
					row = append(row, fmt.Sprintf("%.3f / %.2f / %.1f %%", over(g.Results, ttftMean).Mean, over(g.Results, ttftP99).Mean, 100*over(g.Results, attainment).Mean))
				}
				if len(row) > 1 {
					rows = append(rows, row)
				}
			}
			table(out, rows)
		}
	}
}

func sortedKeys(m map[string][]Line) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func (f *Findings) writeCapacities(out io.Writer, lines []Line) {
	workloads, policies, by := groups(lines)
	rows := [][]string{append([]string{"policy"}, workloads...)}
	for _, p := range policies {
		row := []string{p}
		for _, w := range workloads {
			abs, rel := capacities(by, w, p)
			if len(abs) == 0 {
				row = append(row, "–")
				continue
			}
			r := spread(rel)
			row = append(row, fmt.Sprintf("%s (%.1f %% ±%.1f)", digits(spread(abs).Mean), 100*r.Mean, 100*r.Dev))
		}
		rows = append(rows, row)
	}
	table(out, rows)
}

// capacities are those of a policy on a workload, in requests/s and as shares of the oracle's, by seed.
func capacities(by map[[2]string][]Line, workload, policy string) (abs, rel []float64) {
	ref := by[[2]string{workload, "oracle"}]
	for i, l := range by[[2]string{workload, policy}] {
		abs = append(abs, l.Capacity)
		if i < len(ref) {
			rel = append(rel, l.Capacity/ref[i].Capacity)
		}
	}
	return abs, rel
}
