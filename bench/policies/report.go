package policies

import (
	"cmp"
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"text/tabwriter"
	"time"
)

// A Plan is a comparison: every policy on every workload, over several seeds.
type Plan struct {
	// Workloads are made anew for each seed.
	Workloads []func(seed uint64) (*Workload, error)
	Policies  []Policy
	Options   Options
	Seeds     int
	// Loads are shares of the reference policy's capacity at which latencies are measured.
	Loads []float64
	// Reference is the policy whose capacity is 100 %; default "oracle", and the first of Policies if that is not among them.
	Reference string
	Want      float64 // attainment that defines capacity; default 0.95
	// Parallel bounds the runs at the same time; default GOMAXPROCS.
	Parallel int
	// Progress is told what begins, and how much is done: a policy on a workload with a seed counts one. Never at the same time.
	Progress func(done, total int, what string)
}

// A Line is one policy on one workload with one seed.
type Line struct {
	Workload, Policy string
	Seed             uint64
	Capacity         float64   // requests per second
	At               []*Result // by Plan.Loads
}

// Do runs the plan. Capacities first, since loads are shares of the reference's.
func (p Plan) Do(ctx context.Context) ([]Line, error) {
	p.Want = cmp.Or(p.Want, 0.95)
	p.Parallel = cmp.Or(p.Parallel, runtime.GOMAXPROCS(0))
	p.Seeds = max(p.Seeds, 1)
	ref := slices.IndexFunc(p.Policies, func(q Policy) bool { return q.Name == cmp.Or(p.Reference, "oracle") })
	ref = max(ref, 0)
	order := slices.Clone(p.Policies)
	order[0], order[ref] = order[ref], order[0] // the reference first: its capacity is the others' hint

	var mu sync.Mutex
	var lines []Line
	var firstErr error
	done, total := 0, len(p.Workloads)*p.Seeds*len(p.Policies)
	begins := func(workload, policy string, seed uint64) {
		mu.Lock()
		defer mu.Unlock()
		if p.Progress != nil {
			p.Progress(done, total, fmt.Sprintf("%s, seed %d: %s", workload, seed, policy))
		}
	}
	ended := func() {
		mu.Lock()
		defer mu.Unlock()
		done++
	}
	sem := make(chan struct{}, p.Parallel)
	var wg sync.WaitGroup
	for _, make := range p.Workloads {
		for seed := range uint64(p.Seeds) {
			wg.Go(func() {
				sem <- struct{}{}
				defer func() { <-sem }()
				ls, err := p.workload(ctx, make, seed+1, order, begins, ended)
				mu.Lock()
				defer mu.Unlock()
				lines = append(lines, ls...)
				if err != nil && firstErr == nil {
					firstErr = err
				}
			})
		}
	}
	wg.Wait()
	rank := func(name string) int {
		return slices.IndexFunc(p.Policies, func(q Policy) bool { return q.Name == name })
	}
	slices.SortStableFunc(lines, func(a, b Line) int {
		return cmp.Or(cmp.Compare(a.Workload, b.Workload), cmp.Compare(rank(a.Policy), rank(b.Policy)), cmp.Compare(a.Seed, b.Seed))
	})
	return lines, firstErr
}

func (p Plan) workload(ctx context.Context, make func(uint64) (*Workload, error), seed uint64, order []Policy, begins func(workload, policy string, seed uint64), ended func()) ([]Line, error) {
	w, err := make(seed)
	if err != nil {
		return nil, err
	}
	var lines []Line
	reference := 0.0
	for _, pol := range order {
		if err := ctx.Err(); err != nil {
			return lines, err
		}
		begins(w.Name, pol.Name, seed)
		o := p.Options
		o.Seed = seed
		l := Line{Workload: w.Name, Policy: pol.Name, Seed: seed}
		if l.Capacity, err = Capacity(w, pol, o, p.Want, reference); err != nil {
			return lines, err
		}
		if reference == 0 {
			reference = l.Capacity
		}
		for _, load := range p.Loads {
			o.Rate = load * reference
			r, err := Run(w, pol, o)
			if err != nil {
				return lines, err
			}
			l.At = append(l.At, r)
		}
		lines = append(lines, l)
		ended()
	}
	return lines, nil
}

// Spread is a mean over seeds and its standard deviation.
type Spread struct{ Mean, Dev float64 }

func spread(v []float64) Spread {
	var s Spread
	for _, x := range v {
		s.Mean += x / float64(len(v))
	}
	for _, x := range v {
		s.Dev += (x - s.Mean) * (x - s.Mean)
	}
	if len(v) > 1 {
		s.Dev = math.Sqrt(s.Dev / float64(len(v)-1))
	}
	return s
}

func (s Spread) String() string {
	return fmt.Sprintf("%s ±%s", digits(s.Mean), digits(s.Dev))
}

func digits(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// Lines groups lines by workload and policy and keeps their order.
func groups(lines []Line) (workloads, policies []string, by map[[2]string][]Line) {
	by = make(map[[2]string][]Line)
	for _, l := range lines {
		if !slices.Contains(workloads, l.Workload) {
			workloads = append(workloads, l.Workload)
		}
		if !slices.Contains(policies, l.Policy) {
			policies = append(policies, l.Policy)
		}
		k := [2]string{l.Workload, l.Policy}
		by[k] = append(by[k], l)
	}
	return workloads, policies, by
}

// WriteCapacity prints capacities in requests per second, and as shares of the reference's, seed by seed.
func WriteCapacity(out io.Writer, lines []Line, reference string) error {
	workloads, policies, by := groups(lines)
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(tw, "policy")
	for _, w := range workloads {
		fmt.Fprintf(tw, "\t%s req/s\tshare", w)
	}
	fmt.Fprintln(tw)
	for _, p := range policies {
		fmt.Fprint(tw, p)
		for _, w := range workloads {
			var abs, rel []float64
			for i, l := range by[[2]string{w, p}] {
				abs = append(abs, l.Capacity)
				if ref := by[[2]string{w, reference}]; i < len(ref) {
					rel = append(rel, l.Capacity/ref[i].Capacity)
				}
			}
			if len(abs) == 0 {
				fmt.Fprint(tw, "\t-\t-")
				continue
			}
			r := spread(rel)
			fmt.Fprintf(tw, "\t%v\t%.1f%% ±%.1f", spread(abs), 100*r.Mean, 100*r.Dev)
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// WriteLatency prints what clients saw at each load.
func WriteLatency(out io.Writer, lines []Line, loads []float64) error {
	workloads, policies, by := groups(lines)
	for i, load := range loads {
		for _, w := range workloads {
			fmt.Fprintf(out, "\n%s at %.0f %% of the reference's capacity (means over seeds)\n", w, 100*load)
			tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintln(tw, "policy\tTTFT mean s\tp50\tp90\tp99\tTPOT p99 ms\thit\tpreemptions\tadapter loads host/disk\twithin SLO\t")
			for _, p := range policies {
				ls := by[[2]string{w, p}]
				if len(ls) == 0 || i >= len(ls[0].At) {
					continue
				}
				mean := func(f func(*Result) float64) float64 {
					var v []float64
					for _, l := range ls {
						v = append(v, f(l.At[i]))
					}
					return spread(v).Mean
				}
				sec := func(f func(*Result) time.Duration) float64 {
					return mean(func(r *Result) float64 { return f(r).Seconds() })
				}
				fmt.Fprintf(tw, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.1f\t%.3f\t%.0f\t%.0f/%.0f\t%.1f%%\t\n", p,
					sec(func(r *Result) time.Duration { return r.TTFTMean }),
					sec(func(r *Result) time.Duration { return r.TTFTP50 }),
					sec(func(r *Result) time.Duration { return r.TTFTP90 }),
					sec(func(r *Result) time.Duration { return r.TTFTP99 }),
					1000*sec(func(r *Result) time.Duration { return r.TPOTP99 }),
					mean(func(r *Result) float64 { return r.HitRatio }),
					mean(func(r *Result) float64 { return float64(r.Preemptions) }),
					mean(func(r *Result) float64 { return float64(r.AdapterHostLoads) }),
					mean(func(r *Result) float64 { return float64(r.AdapterDiskLoads) }),
					100*mean(func(r *Result) float64 { return r.Attainment }))
			}
			if err := tw.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// WriteCSV writes every run on a line of its own.
func WriteCSV(out io.Writer, lines []Line, loads []float64) error {
	c := csv.NewWriter(out)
	head := []string{"workload", "policy", "seed", "capacity_rps", "load", "rate_rps", "attainment", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "hit_ratio", "preemptions", "adapter_host_loads", "adapter_disk_loads"}
	if err := c.Write(head); err != nil {
		return err
	}
	num := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	for _, l := range lines {
		row := []string{l.Workload, l.Policy, strconv.FormatUint(l.Seed, 10), num(l.Capacity)}
		if len(l.At) == 0 {
			if err := c.Write(append(row, make([]string, len(head)-len(row))...)); err != nil {
				return err
			}
		}
		for i, r := range l.At {
			if err := c.Write(append(slices.Clone(row), num(loads[i]), num(r.Rate), num(r.Attainment),
				num(r.TTFTMean.Seconds()), num(r.TTFTP50.Seconds()), num(r.TTFTP90.Seconds()), num(r.TTFTP99.Seconds()),
				num(r.TPOTP99.Seconds()), num(r.E2EP99.Seconds()), num(r.HitRatio),
				strconv.FormatUint(r.Preemptions, 10), strconv.FormatUint(r.AdapterHostLoads, 10), strconv.FormatUint(r.AdapterDiskLoads, 10))); err != nil {
				return err
			}
		}
	}
	c.Flush()
	return c.Error()
}
