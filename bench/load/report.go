package load

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"text/tabwriter"
)

// seconds writes a time with three digits.
func seconds(v float64) string {
	switch {
	case v <= 0:
		return "0"
	case v < 1e-3:
		return fmt.Sprintf("%.3g µs", v*1e6)
	case v < 1:
		return fmt.Sprintf("%.3g ms", v*1e3)
	case v < 1000:
		return fmt.Sprintf("%.3g s", v)
	}
	return fmt.Sprintf("%.0f s", v)
}

// A line is one distribution of a target.
type line struct {
	Name string
	Summary
}

// Lines are the distributions that there is something of.
func (t *TargetResult) Lines() (out []line) {
	for _, l := range []line{
		{"time to first token", t.TTFT},
		{"time per output token", t.TPOT},
		{"between tokens", t.InterToken},
		{"whole request", t.EndToEnd},
		{"sent behind schedule", t.Lag},
	} {
		if l.Count > 0 {
			out = append(out, l)
		}
	}
	return out
}

// Throughput says what a target did in a second.
func (t *TargetResult) Throughput() string {
	out := fmt.Sprintf("%.3g requests/s, %.0f output tokens/s, %.0f input tokens/s", t.RequestsPerSecond, t.OutputTokensPerSecond, t.InputTokensPerSecond)
	if t.CachedTokens > 0 {
		out += fmt.Sprintf(", %.0f %% of them from the prefix cache", 100*float64(t.CachedTokens)/float64(t.InputTokens))
	}
	return out
}

// WriteText prints r as tables.
func (r *Result) WriteText(out io.Writer) error {
	for _, s := range r.Settings {
		fmt.Fprintf(out, "%-18s %s\n", s.Name, s.Value)
	}
	for i := range r.Targets {
		t := &r.Targets[i]
		fmt.Fprintf(out, "\n%s  %s\n%d requests: %d answered, %d failed", t.Name, t.URL, t.Requests, t.Answered, t.Failed)
		if t.Interrupted > 0 {
			fmt.Fprintf(out, ", %d interrupted", t.Interrupted)
		}
		fmt.Fprintf(out, "; %s\n", t.Throughput())
		for _, f := range t.Failures {
			fmt.Fprintf(out, "  %s: %d, such as: %s\n", f.Kind, f.Count, printable(f.Example))
		}
		tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(tw, "\tmean\tp50\tp90\tp95\tp99\tp99.9\tmax\t")
		for _, l := range t.Lines() {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", l.Name, seconds(l.Mean), seconds(l.P50), seconds(l.P90), seconds(l.P95), seconds(l.P99), seconds(l.P999), seconds(l.Max))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	if c := r.Comparison; c != nil {
		fmt.Fprintf(out, "\n%s against %s, from %d pairs of requests in %d stretches of time\n", c.B, c.A, c.Pairs, c.Blocks)
		tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintf(tw, "\t%s\t%s\t%s of %s\t99 %% confidence\t%s is\t\n", c.A, c.B, c.B, c.A, c.B)
		for _, w := range c.Rows {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%.2f ×\t%s\t%s\t\n", w.Metric, seconds(w.A), seconds(w.B), w.Ratio, w.Interval(), w.Verdict)
		}
		fmt.Fprintf(tw, "failed\t%.1f %%\t%.1f %%\t\t\t%s\t\n", 100*c.FailedA, 100*c.FailedB, c.FailedVerdict)
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintf(out, "\nnote: %s\n", n)
	}
	return nil
}

// printable keeps what a server said from doing things to the terminal.
func printable(text string) string {
	return string(bytes.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c >= 0x80 && c < 0xa0 {
			return '·'
		}
		return c
	}, []byte(text)))
}

// Interval is the interval in words.
func (w Row) Interval() string {
	if w.High == 0 {
		return "?"
	}
	return fmt.Sprintf("%.2f to %.2f", w.Low, w.High)
}

// WriteJSON prints r as JSON.
func (r *Result) WriteJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

//go:embed report.html.tmpl
var page string

var pageTemplate = template.Must(template.New("report").Funcs(template.FuncMap{
	"seconds": seconds,
	"percent": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) },
}).Parse(page))

// WriteHTML prints r as one page that needs nothing from elsewhere.
func (r *Result) WriteHTML(out io.Writer) error {
	plots, err := r.plots()
	if err != nil {
		return err
	}
	return pageTemplate.Execute(out, struct {
		*Result
		Plots []plotted
	}{r, plots})
}
