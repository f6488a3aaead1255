package proxybench

import (
	"encoding/csv"
	"fmt"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// A Report is what a run has found.
type Report struct {
	Processors int // that it could use
	Samples    []Sample
	Syscalls   []Syscall
}

// A Syscall is how often one candidate makes a system call in one scenario.
type Syscall struct {
	Scenario, Candidate, Name string
	PerRequest                float64
}

// A Spread is a median over rounds, with the least and the most.
type Spread struct{ Median, Min, Max float64 }

func spread(v []float64) Spread {
	if len(v) == 0 {
		return Spread{math.NaN(), math.NaN(), math.NaN()}
	}
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return Spread{(v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]}
}

// A Line sums up one candidate in one scenario. What was not measured is NaN.
type Line struct {
	Scenario, Candidate string
	Rounds, Errors      int
	CPU                 Spread // microseconds per request
	CPUPerChunk         Spread // microseconds
	Ratio               Spread // of CPU, or of CPUPerChunk where there are chunks, to nginx's in the same round
	System              Spread // share of CPU, 0..1
	Reads, Writes       Spread // system calls per request
	Waits               Spread // sleeps per request
	RPS                 Spread
	P50, P99, P999      Spread // microseconds
	AddedP50, AddedP99  Spread // microseconds beyond direct's in the same round
	ConnKB              Spread // 1,000 bytes
	Cores               Spread // processor seconds per second
	Allocations         Spread
	GCShare             float64 // of all processor time
}

// Lines sums the samples up, in their order.
func (r *Report) Lines() []Line {
	type key struct{ scenario, candidate string }
	var keys []key
	by := map[key][]Sample{}
	for _, s := range r.Samples {
		k := key{s.Scenario, s.Candidate}
		if by[k] == nil {
			keys = append(keys, k)
		}
		by[k] = append(by[k], s)
	}
	// Samples come in the order of a round, which turns: sort by scenario's and candidate's place.
	place := func(k key) int {
		i := slices.IndexFunc(Scenarios, func(s Scenario) bool { return s.Name == k.scenario })
		return i*len(candidates) + slices.IndexFunc(candidates, func(c candidate) bool { return c.name == k.candidate })
	}
	slices.SortStableFunc(keys, func(a, b key) int { return place(a) - place(b) })
	var out []Line
	for _, k := range keys {
		l := Line{Scenario: k.scenario, Candidate: k.candidate, Rounds: len(by[k])}
		// of collects a number over the rounds, and over those of the samples only that have it.
		of := func(f func(Sample) float64) Spread {
			var v []float64
			for _, s := range by[k] {
				if x := f(s); !math.IsNaN(x) && !math.IsInf(x, 0) {
					v = append(v, x)
				}
			}
			return spread(v)
		}
		against := func(other string, round int) (Sample, bool) {
			for _, s := range by[key{k.scenario, other}] {
				if s.Round == round {
					return s, true
				}
			}
			return Sample{}, false
		}
		proxied := func(x float64) float64 {
			if k.candidate == direct {
				return math.NaN()
			}
			return x
		}
		l.CPU = of(func(s Sample) float64 { return proxied(1e6 * s.cpuPerRequest()) })
		l.CPUPerChunk = of(func(s Sample) float64 { return proxied(1e6 * s.CPUSeconds / float64(s.Chunks)) })
		l.Ratio = of(func(s Sample) float64 {
			if o, ok := against(nginx, s.Round); ok {
				return proxied(s.cost() / o.cost())
			}
			return math.NaN()
		})
		l.System = of(func(s Sample) float64 { return proxied(s.SystemSeconds / s.CPUSeconds) })
		each := func(f func(Sample) int) Spread {
			return of(func(s Sample) float64 { return proxied(float64(f(s)) / float64(max(s.Requests, s.Chunks))) })
		}
		l.Reads = each(func(s Sample) int { return s.Reads })
		l.Writes = each(func(s Sample) int { return s.Writes })
		l.Waits = each(func(s Sample) int { return s.Waits })
		l.RPS = of(func(s Sample) float64 {
			if s.Requests == 0 {
				return math.NaN()
			}
			return float64(s.Requests) / s.Seconds
		})
		latency := func(f func(Sample) float64) (own, added Spread) {
			own = of(func(s Sample) float64 {
				if s.P50 == 0 {
					return math.NaN()
				}
				return 1e6 * f(s)
			})
			added = of(func(s Sample) float64 {
				if o, ok := against(direct, s.Round); ok && s.P50 > 0 {
					return proxied(1e6 * (f(s) - f(o)))
				}
				return math.NaN()
			})
			return own, added
		}
		l.P50, l.AddedP50 = latency(func(s Sample) float64 { return s.P50 })
		l.P99, l.AddedP99 = latency(func(s Sample) float64 { return s.P99 })
		l.P999, _ = latency(func(s Sample) float64 { return s.P999 })
		l.ConnKB = of(func(s Sample) float64 {
			if s.ConnBytes == 0 {
				return math.NaN()
			}
			return s.ConnBytes / 1000
		})
		l.Cores = of(func(s Sample) float64 { return proxied(s.CPUSeconds / s.Seconds) })
		l.Allocations = of(func(s Sample) float64 {
			if s.GCOf == 0 || s.Requests == 0 {
				return math.NaN()
			}
			return s.Allocations
		})
		gc, all := 0.0, 0.0
		for _, s := range by[k] {
			l.Errors += s.Errors
			gc += s.GCSeconds
			all += s.GCOf
		}
		l.GCShare = gc / all
		out = append(out, l)
	}
	return out
}

func (s Sample) cpuPerRequest() float64 { return s.CPUSeconds / float64(s.Requests) }

// cost is what is compared: processor time per chunk of streams, else per request.
func (s Sample) cost() float64 {
	if s.Chunks > 0 {
		return s.CPUSeconds / float64(s.Chunks)
	}
	return s.cpuPerRequest()
}

// columns are those of the tables; the ones that no line of a scenario has are left out.
var columns = []struct {
	head   string
	of     func(Line) Spread
	spread bool // shown with least and most
}{
	{"CPU µs/request", func(l Line) Spread {
		if !math.IsNaN(l.CPUPerChunk.Median) {
			return spread(nil)
		}
		return l.CPU
	}, true},
	{"CPU µs/chunk", func(l Line) Spread { return l.CPUPerChunk }, true},
	{"of nginx", func(l Line) Spread { return l.Ratio }, true},
	{"in kernel", func(l Line) Spread { return l.System }, false},
	{"reads", func(l Line) Spread { return l.Reads }, false},
	{"writes", func(l Line) Spread { return l.Writes }, false},
	{"waits", func(l Line) Spread { return l.Waits }, false},
	{"requests/s", func(l Line) Spread { return l.RPS }, false},
	{"p50 µs", func(l Line) Spread { return l.P50 }, false},
	{"p99 µs", func(l Line) Spread { return l.P99 }, false},
	{"p99.9 µs", func(l Line) Spread { return l.P999 }, false},
	{"added p50", func(l Line) Spread { return l.AddedP50 }, false},
	{"added p99", func(l Line) Spread { return l.AddedP99 }, false},
	{"KB/connection", func(l Line) Spread { return l.ConnKB }, true},
	{"cores", func(l Line) Spread { return l.Cores }, false},
	{"allocations", func(l Line) Spread { return l.Allocations }, false},
	{"GC share", func(l Line) Spread { return Spread{l.GCShare, l.GCShare, l.GCShare} }, false},
}

func digits(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return ""
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// tables turns lines into one table per scenario.
func tables(lines []Line, each func(s Scenario, head []string, rows [][]string) error) error {
	for _, s := range Scenarios {
		var ls []Line
		for _, l := range lines {
			if l.Scenario == s.Name {
				ls = append(ls, l)
			}
		}
		if len(ls) == 0 {
			continue
		}
		head := []string{"candidate"}
		rows := make([][]string, len(ls))
		for i, l := range ls {
			rows[i] = []string{l.Candidate}
		}
		for _, c := range columns {
			if !slices.ContainsFunc(ls, func(l Line) bool { return !math.IsNaN(c.of(l).Median) }) {
				continue
			}
			head = append(head, c.head)
			for i, l := range ls {
				v := c.of(l)
				text := digits(v.Median)
				if c.spread && l.Rounds > 1 && text != "" {
					text += " (" + digits(v.Min) + "–" + digits(v.Max) + ")"
				}
				rows[i] = append(rows[i], text)
			}
		}
		if err := each(s, head, rows); err != nil {
			return err
		}
	}
	return nil
}

// WriteText prints the tables for a terminal.
func (r *Report) WriteText(out io.Writer) error {
	err := tables(r.Lines(), func(s Scenario, head []string, rows [][]string) error {
		fmt.Fprintf(out, "%s: %s\n", s.Name, s.Doc)
		tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, strings.Join(head, "\t"))
		for _, row := range rows {
			fmt.Fprintln(tw, strings.Join(row, "\t"))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out)
		return err
	})
	if err != nil || len(r.Syscalls) == 0 {
		return err
	}
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "scenario\tcandidate\tsystem call\tper request")
	for _, c := range r.syscalls() {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%.2f\n", c.Scenario, c.Candidate, c.Name, c.PerRequest)
	}
	return tw.Flush()
}

// WriteMarkdown prints them for a document.
func (r *Report) WriteMarkdown(out io.Writer) error {
	row := func(cells []string) { fmt.Fprintf(out, "| %s |\n", strings.Join(cells, " | ")) }
	err := tables(r.Lines(), func(s Scenario, head []string, rows [][]string) error {
		fmt.Fprintf(out, "%s (`%s`)\n\n", s.Doc, s.Name)
		row(head)
		row(append([]string{"---"}, slices.Repeat([]string{"--:"}, len(head)-1)...))
		for _, cells := range rows {
			row(cells)
		}
		_, err := fmt.Fprintln(out)
		return err
	})
	if err != nil || len(r.Syscalls) == 0 {
		return err
	}
	row([]string{"scenario", "candidate", "system call", "per request"})
	row([]string{"---", "---", "---", "--:"})
	for _, c := range r.syscalls() {
		row([]string{c.Scenario, c.Candidate, c.Name, strconv.FormatFloat(c.PerRequest, 'f', 2, 64)})
	}
	return nil
}

// syscalls are the system calls, with the sum of each candidate's behind them.
func (r *Report) syscalls() (out []Syscall) {
	for i, c := range r.Syscalls {
		out = append(out, c)
		if i+1 < len(r.Syscalls) && r.Syscalls[i+1].Candidate == c.Candidate && r.Syscalls[i+1].Scenario == c.Scenario {
			continue
		}
		sum := Syscall{c.Scenario, c.Candidate, "all", 0}
		for _, o := range r.Syscalls {
			if o.Candidate == c.Candidate && o.Scenario == c.Scenario && o.Name != "total" {
				sum.PerRequest += o.PerRequest
			}
		}
		out = append(out, sum)
	}
	return slices.DeleteFunc(out, func(c Syscall) bool { return c.Name == "total" })
}

// WriteCSV writes every sample on a line of its own.
func (r *Report) WriteCSV(out io.Writer) error {
	c := csv.NewWriter(out)
	_ = c.Write([]string{
		"scenario", "candidate", "round", "seconds", "requests", "chunks", "errors", "cpu_seconds", "system_seconds", "reads", "writes", "waits",
		"p50_seconds", "p99_seconds", "p999_seconds", "connection_bytes", "allocations_per_request", "gc_seconds", "gc_of_cpu_seconds",
	})
	num := func(v float64) string { return strconv.FormatFloat(v, 'g', 7, 64) }
	for _, s := range r.Samples {
		_ = c.Write([]string{
			s.Scenario, s.Candidate, strconv.Itoa(s.Round), num(s.Seconds), strconv.Itoa(s.Requests), strconv.Itoa(s.Chunks),
			strconv.Itoa(s.Errors), num(s.CPUSeconds), num(s.SystemSeconds),
			strconv.Itoa(s.Reads), strconv.Itoa(s.Writes), strconv.Itoa(s.Waits), num(s.P50), num(s.P99), num(s.P999), num(s.ConnBytes),
			num(s.Allocations), num(s.GCSeconds), num(s.GCOf),
		})
	}
	c.Flush()
	return c.Error()
}

// palette tells candidates apart, also for the colour-blind (Okabe and Ito's set).
var palette = []color.RGBA{
	{0, 114, 178, 255}, {230, 159, 0, 255}, {0, 158, 115, 255}, {213, 94, 0, 255}, {204, 121, 167, 255}, {86, 180, 233, 255},
}

// Plot draws the processor time of each candidate as a multiple of nginx's, a group of bars per scenario, into
// proxies.FORMAT in dir, and returns the file's name.
func (r *Report) Plot(dir, format string) (string, error) {
	lines := r.Lines()
	at := func(scenario, candidate string) float64 {
		for _, l := range lines {
			if l.Scenario == scenario && l.Candidate == candidate {
				return l.Ratio.Median
			}
		}
		return math.NaN()
	}
	var names []string
	for _, s := range Scenarios {
		if !math.IsNaN(at(s.Name, nginx)) {
			names = append(names, s.Name)
		}
	}
	if len(names) == 0 {
		return "", nil // nothing to compare with
	}
	p := plot.New()
	p.Title.Text = "The proxy's processor time per request, or per chunk of streams"
	p.Y.Label.Text = "nginx = 1"
	p.Y.Min = 0
	p.Legend.Top, p.Legend.Left = true, true
	shown := []string{nginx, haproxy, fastHTTP, reverseProxy, kvgate64}
	width := vg.Points(7)
	most := 0.0
	for i, c := range shown {
		values := make(plotter.Values, len(names))
		for j, name := range names {
			if v := at(name, c); !math.IsNaN(v) {
				values[j] = v
			}
			most = max(most, values[j])
		}
		bars, err := plotter.NewBarChart(values, width)
		if err != nil {
			return "", fmt.Errorf("plot: %w", err)
		}
		bars.Color = palette[i]
		bars.LineStyle.Width = 0
		bars.Offset = width * vg.Length(float64(i)-float64(len(shown)-1)/2)
		p.Add(bars)
		p.Legend.Add(c, bars)
	}
	p.Y.Max = most * 1.3
	p.NominalX(names...)
	file := filepath.Join(dir, "proxies."+format)
	if err := p.Save(vg.Length(max(5, 0.9*float64(len(names))))*vg.Inch, 4*vg.Inch, file); err != nil {
		return "", fmt.Errorf("plot %s: %w", file, err)
	}
	return file, nil
}
