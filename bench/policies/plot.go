package policies

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"os"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// palette tells up to eight policies apart, also for the colour-blind (Okabe and Ito's set).
var palette = []color.RGBA{
	{0, 114, 178, 255},
	{230, 159, 0, 255},
	{0, 158, 115, 255},
	{213, 94, 0, 255},
	{204, 121, 167, 255},
	{86, 180, 233, 255},
	{240, 228, 66, 255},
	{90, 90, 90, 255},
}

// PlotCapacity draws capacities as shares of the reference's, one group of bars per workload, into an SVG or PNG file.
func PlotCapacity(file string, lines []Line, reference string) error {
	workloads, policies, by := groups(lines)
	p := plot.New()
	p.Title.Text = "Capacity at 95 % of requests within the SLO"
	p.Y.Label.Text = "share of the " + reference + "'s (%)"
	p.Y.Min = 0
	p.Legend.Top = true
	p.Legend.Left = true
	width := vg.Points(min(16, 320/float64(max(1, len(policies)*len(workloads)))*2))
	for i, pol := range policies {
		values := make(plotter.Values, len(workloads))
		for j, w := range workloads {
			var rel []float64
			for k, l := range by[[2]string{w, pol}] {
				if ref := by[[2]string{w, reference}]; k < len(ref) {
					rel = append(rel, 100*l.Capacity/ref[k].Capacity)
				}
			}
			values[j] = spread(rel).Mean
		}
		bars, err := plotter.NewBarChart(values, width)
		if err != nil {
			return fmt.Errorf("plot %s: %w", file, err)
		}
		bars.Color = palette[i%len(palette)]
		bars.LineStyle.Width = 0
		bars.Offset = width * vg.Length(float64(i)-float64(len(policies)-1)/2)
		p.Add(bars)
		p.Legend.Add(pol, bars)
	}
	p.NominalX(workloads...)
	p.Y.Max = 150
	w := vg.Length(max(6, 1.1*float64(len(workloads)))) * vg.Inch
	if err := p.Save(w, 4*vg.Inch, file); err != nil {
		return fmt.Errorf("plot %s: %w", file, err)
	}
	return nil
}

// PlotTTFT draws mean time to first token over load, one file per workload, and returns the files' names.
func PlotTTFT(dir, format string, lines []Line, loads []float64) ([]string, error) {
	workloads, policies, by := groups(lines)
	var files []string
	if len(loads) < 2 {
		return nil, nil
	}
	for _, w := range workloads {
		p := plot.New()
		p.Title.Text = w
		p.X.Label.Text = "load (% of the reference's capacity)"
		p.Y.Label.Text = "mean TTFT (s)"
		p.Y.Scale = plot.LogScale{}
		p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
		p.Legend.Top = true
		p.Legend.Left = true
		for i, pol := range policies {
			pts := make(plotter.XYs, 0, len(loads))
			for k, load := range loads {
				var v []float64
				for _, l := range by[[2]string{w, pol}] {
					if k < len(l.At) {
						v = append(v, l.At[k].TTFTMean.Seconds())
					}
				}
				if len(v) > 0 {
					pts = append(pts, plotter.XY{X: 100 * load, Y: max(1e-3, spread(v).Mean)})
				}
			}
			line, points, err := plotter.NewLinePoints(pts)
			if err != nil {
				return files, fmt.Errorf("plot %s: %w", w, err)
			}
			line.Color = palette[i%len(palette)]
			line.Width = vg.Points(1.5)
			points.Color = line.Color
			p.Add(line, points)
			p.Legend.Add(pol, line, points)
		}
		file := filepath.Join(dir, "ttft-"+w+"."+format)
		if err := p.Save(6*vg.Inch, 4*vg.Inch, file); err != nil {
			return files, fmt.Errorf("plot %s: %w", file, err)
		}
		files = append(files, file)
	}
	return files, nil
}

// PlotGroup draws mean TTFT over the variations of a group, one line per policy, into an SVG or PNG file.
func (f *Findings) PlotGroup(file, workload, group, label string) error {
	p := plot.New()
	p.Title.Text = workload
	p.X.Label.Text = label
	p.Y.Label.Text = "mean TTFT (s)"
	p.Y.Scale = plot.LogScale{}
	p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
	p.Legend.Top = true
	p.Legend.Left = true
	var names []string
	for _, v := range Variations {
		if v.Group == group {
			names = append(names, v.Name)
		}
	}
	drawn := 0
	for _, g := range f.Figures {
		if g.Workload != workload || g.Variation.Group != group || g.Variation.Name != names[0] {
			continue
		}
		pts := make(plotter.XYs, len(names))
		for i, name := range names {
			pts[i] = plotter.XY{X: float64(i), Y: max(1e-3, over(f.find(workload, g.Policy, group, name).Results, ttftMean).Mean)}
		}
		line, points, err := plotter.NewLinePoints(pts)
		if err != nil {
			return fmt.Errorf("plot %s: %w", file, err)
		}
		line.Color = palette[drawn%len(palette)]
		line.Width = vg.Points(1.5)
		points.Color = line.Color
		p.Add(line, points)
		p.Legend.Add(g.Policy, line, points)
		drawn++
	}
	p.NominalX(names...)
	if err := p.Save(5*vg.Inch, 3.5*vg.Inch, file); err != nil {
		return fmt.Errorf("plot %s: %w", file, err)
	}
	return nil
}

// Write writes tables, every run and the plots into dir and returns the files' names. What is in dir under other names stays.
func (f *Findings) Write(dir, format string) (files []string, err error) {
	path := func(name string) string {
		file := filepath.Join(dir, name)
		files = append(files, file)
		return file
	}
	write := func(name string, fn func(io.Writer) error) {
		if err != nil {
			return
		}
		var out *os.File
		if out, err = os.Create(path(name)); err != nil {
			return
		}
		err = errors.Join(fn(out), out.Close())
	}
	write("tables.md", func(w io.Writer) error { f.WriteTables(w); return nil })
	write("runs.csv", func(w io.Writer) error { return WriteCSV(w, f.Lines, f.Loads) })
	shown := f.Lines[:0:0]
	for _, l := range f.Lines {
		if slices.Contains([]string{"round_robin", "least_requests", "llm-d", "llm-d+lora", "sglang", "dynamo", "auto", "oracle"}, l.Policy) {
			shown = append(shown, l)
		}
	}
	if err == nil {
		err = PlotCapacity(path("capacity."+format), shown, "oracle")
	}
	var curves []Line
	for _, l := range shown {
		if slices.Contains([]string{"conversation", "tool", "rag", "lora64"}, l.Workload) {
			curves = append(curves, l)
		}
	}
	if err == nil {
		var plots []string
		plots, err = PlotTTFT(dir, format, curves, f.Loads)
		files = append(files, plots...)
	}
	for _, g := range []struct{ workload, group, label string }{
		{"conversation", "scrapes", "age of the scraped metrics"},
		{"conversation", "gateways", "gateways that share nothing"},
		{"lora128", "gateways", "gateways that share nothing"},
	} {
		if err == nil && f.find(g.workload, "auto", g.group, "1") != nil || f.find(g.workload, "auto", g.group, "1 s") != nil {
			err = f.PlotGroup(path(g.group+"-"+g.workload+"."+format), g.workload, g.group, g.label)
		}
	}
	return files, err
}
