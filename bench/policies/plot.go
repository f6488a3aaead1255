package policies

import (
	"fmt"
	"image/color"
	"path/filepath"

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
