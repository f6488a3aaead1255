package load

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"

	"github.com/HdrHistogram/hdrhistogram-go"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// colors tell two targets apart, also for the colour-blind (Okabe and Ito's set); the second is dashed besides.
var colors = []color.RGBA{{0, 114, 178, 255}, {213, 94, 0, 255}}

// A plotted is a plot as SVG.
type plotted struct {
	Title string
	SVG   template.HTML
}

type series struct {
	name   string
	target int
	faint  bool
	points plotter.XYs
}

func (r *Result) plots() (out []plotted, err error) {
	add := func(title, x, y string, logX bool, all []series) {
		if err == nil {
			var p plotted
			if p, err = draft(title, x, y, logX, all); p.SVG != "" {
				out = append(out, p)
			}
		}
	}
	curve := func(f func(*curves) *hdrhistogram.Histogram) (all []series) {
		for i := range r.cdf {
			all = append(all, series{name: r.Targets[i].Name, target: i, points: cumulated(f(&r.cdf[i]))})
		}
		return all
	}
	overTime := func(f func(*Window) (float64, bool), suffix string, faint bool) (all []series) {
		for i := range r.Targets {
			var pts plotter.XYs
			for k := range r.Targets[i].Windows {
				w := &r.Targets[i].Windows[k]
				if v, ok := f(w); ok {
					pts = append(pts, plotter.XY{X: w.At, Y: v})
				}
			}
			all = append(all, series{name: r.Targets[i].Name + suffix, target: i, faint: faint, points: pts})
		}
		return all
	}
	add("Time to first token", "seconds", "% of requests", true, curve(func(c *curves) *hdrhistogram.Histogram { return c.ttft }))
	add("Time per output token", "seconds", "% of requests", true, curve(func(c *curves) *hdrhistogram.Histogram { return c.tpot }))
	add("Whole request", "seconds", "% of requests", true, curve(func(c *curves) *hdrhistogram.Histogram { return c.all }))
	add("Time to first token by when requests began", "seconds of the run", "seconds", false, append(
		overTime(func(w *Window) (float64, bool) { return w.TTFTP50, w.TTFTP50 > 0 }, " p50", false),
		overTime(func(w *Window) (float64, bool) { return w.TTFTP99, w.TTFTP99 > 0 }, " p99", true)...))
	add("Requests under way", "seconds of the run", "requests", false, overTime(func(w *Window) (float64, bool) { return float64(w.InFlight), true }, "", false))
	add("Output of the requests that ended", "seconds of the run", "tokens/s", false, overTime(func(w *Window) (float64, bool) { return w.OutputTokensPerSecond, true }, "", false))
	return out, err
}

// cumulated is a histogram's distribution function, in per cent over seconds.
func cumulated(h *hdrhistogram.Histogram) (out plotter.XYs) {
	if h.TotalCount() == 0 {
		return nil
	}
	for p := 0.0; p <= 100; p += 0.5 {
		out = append(out, plotter.XY{X: float64(max(1, h.ValueAtQuantile(p))) / 1e6, Y: p})
	}
	return out
}

// draft draws a plot; without any point there is none.
func draft(title, x, y string, logX bool, all []series) (plotted, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	low, high := math.Inf(1), 0.0
	drawn := false
	for _, s := range all {
		if len(s.points) == 0 {
			continue
		}
		line, err := plotter.NewLine(s.points)
		if err != nil {
			return plotted{}, fmt.Errorf("plot %s: %w", title, err)
		}
		line.Color, line.Width = colors[s.target], vg.Points(1.5)
		if s.faint {
			line.Width = vg.Points(0.7)
		}
		if s.target > 0 {
			line.Dashes = []vg.Length{vg.Points(5), vg.Points(2)}
		}
		p.Add(line)
		p.Legend.Add(s.name, line)
		for _, pt := range s.points {
			low, high = min(low, pt.X), max(high, pt.X)
		}
		drawn = true
	}
	if !drawn {
		return plotted{}, nil
	}
	p.Y.Min = 0
	p.Y.Max = max(p.Y.Max, 1e-9) * (1 + 0.08*float64(len(all))) // room for the legend
	if logX {
		// To powers of ten on both sides: the ticks are theirs.
		p.X.Min, p.X.Max = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)+1e-9))
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	canvas := vgsvg.New(4.4*vg.Inch, 3.2*vg.Inch)
	p.Draw(draw.Crop(draw.New(canvas), 0, -14, 0, 0)) // the last tick's label stands out
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return plotted{}, fmt.Errorf("plot %s: %w", title, err)
	}
	svg := b.Bytes()
	if i := bytes.Index(svg, []byte("<svg")); i > 0 {
		svg = svg[i:] // a part of a page has no XML declaration
	}
	return plotted{title, template.HTML(svg)}, nil // #nosec: made here; names of targets are escaped by the library
}
