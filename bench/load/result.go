package load

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// A Result is what a run saw of the requests that count. It holds no key.
type Result struct {
	Began       time.Time      `json:"began"`
	Settings    []Setting      `json:"settings"`
	Interrupted bool           `json:"interrupted"` // ended before its time, by whoever started it
	Targets     []TargetResult `json:"targets"`
	Comparison  *Comparison    `json:"comparison,omitempty"`
	Notes       []string       `json:"notes,omitempty"` // what to keep in mind when reading it

	cdf []curves // per target, for plots
}

// A TargetResult is what was seen of one target. Tokens are the server's count, where it gives one.
type TargetResult struct {
	Name string `json:"name"`
	URL  string `json:"url"`

	Requests    int       `json:"requests"` // answered, failed and interrupted
	Answered    int       `json:"answered"`
	Failed      int       `json:"failed"`
	Interrupted int       `json:"interrupted"`
	Failures    []Failure `json:"failures,omitempty"` // the most frequent first

	// Seconds is the time from the first request that counts to the end of the last, over all slices.
	Seconds               float64 `json:"seconds"`
	RequestsPerSecond     float64 `json:"requests_per_second"` // answered
	InputTokensPerSecond  float64 `json:"input_tokens_per_second"`
	OutputTokensPerSecond float64 `json:"output_tokens_per_second"`
	InputTokens           int64   `json:"input_tokens"`
	CachedTokens          int64   `json:"cached_tokens"` // of the input, from the server's prefix cache
	OutputTokens          int64   `json:"output_tokens"`

	// All but Lag are of answered requests; TTFT and EndToEnd count from the time at which a request should have been sent.
	TTFT       Summary `json:"time_to_first_token,omitzero"`
	TPOT       Summary `json:"time_per_output_token,omitzero"` // each request's mean, without its first token
	InterToken Summary `json:"between_tokens,omitzero"`        // of events that came one after another, of all requests
	EndToEnd   Summary `json:"end_to_end"`
	Lag        Summary `json:"lag"` // of sending behind the schedule

	Windows []Window `json:"windows"`
}

// A Failure is one way in which requests failed.
type Failure struct {
	Kind    string `json:"kind"`
	Count   int    `json:"count"`
	Example string `json:"example,omitempty"`
}

// A Summary is a distribution of times, in seconds; all are 0 without a Count.
type Summary struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean_seconds"`
	P50   float64 `json:"p50_seconds"`
	P90   float64 `json:"p90_seconds"`
	P95   float64 `json:"p95_seconds"`
	P99   float64 `json:"p99_seconds"`
	P999  float64 `json:"p999_seconds"`
	Max   float64 `json:"max_seconds"`
}

// A Window is a stretch of the run: what began in it, ended in it, and was under way at its end.
type Window struct {
	At                    float64 `json:"at_seconds"` // its end, since the beginning of the run
	Answered              int     `json:"answered"`   // ended
	Failed                int     `json:"failed"`     // ended
	InFlight              int     `json:"in_flight"`
	OutputTokensPerSecond float64 `json:"output_tokens_per_second"`   // of those that ended
	TTFTP50               float64 `json:"ttft_p50_seconds,omitempty"` // of those that began
	TTFTP99               float64 `json:"ttft_p99_seconds,omitempty"`
}

// Histograms hold µs, up to an hour, with three digits.
func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, time.Hour.Microseconds(), 3) }

func record(h *hdrhistogram.Histogram, d time.Duration) {
	_ = h.RecordValue(min(max(d.Microseconds(), 1), time.Hour.Microseconds()))
}

func summary(h *hdrhistogram.Histogram) Summary {
	if h.TotalCount() == 0 {
		return Summary{}
	}
	q := func(p float64) float64 { return float64(h.ValueAtQuantile(p)) / 1e6 }
	return Summary{h.TotalCount(), h.Mean() / 1e6, q(50), q(90), q(95), q(99), q(99.9), float64(h.Max()) / 1e6}
}

func (s *sample) ttft() time.Duration { return s.first - s.intended }
func (s *sample) all() time.Duration  { return s.end - s.intended }

// tpot is the mean time per token behind the first; 0 is unknown.
func (s *sample) tpot() time.Duration {
	if s.output < 2 || s.last <= s.first {
		return 0
	}
	return (s.last - s.first) / time.Duration(s.output-1)
}

// curves are histograms that are drawn.
type curves struct{ ttft, tpot, all *hdrhistogram.Histogram }

func (r *run) result() *Result {
	out := &Result{Began: r.began.UTC().Truncate(time.Second), Settings: r.o.settings(), Interrupted: r.ctx.Err() != nil}
	for i := range r.o.Targets {
		t, c := r.target(i)
		out.Targets = append(out.Targets, t)
		out.cdf = append(out.cdf, c)
	}
	r.windows(out)
	if len(out.Targets) == 2 {
		out.Comparison = r.compare()
	}
	r.notes(out)
	return out
}

func (r *run) target(i int) (TargetResult, curves) {
	t := TargetResult{Name: r.o.Targets[i].Name, URL: r.o.Targets[i].URL}
	c := curves{newHistogram(), newHistogram(), newHistogram()}
	lag := newHistogram()
	failures := map[string]*Failure{}
	from, to := map[int]time.Duration{}, map[int]time.Duration{} // per segment
	for k := range r.samples {
		s := &r.samples[k]
		if s.target != i {
			continue
		}
		t.Requests++
		record(lag, s.sent-s.intended)
		if first, ok := from[s.segment]; !ok || s.intended < first {
			from[s.segment] = s.intended
		}
		to[s.segment] = max(to[s.segment], s.end)
		switch s.failure {
		case "":
			t.Answered++
			t.InputTokens += int64(s.input)
			t.CachedTokens += int64(s.cached)
			t.OutputTokens += int64(s.output)
			record(c.all, s.all())
			if s.first > 0 {
				record(c.ttft, s.ttft())
			}
			if d := s.tpot(); d > 0 {
				record(c.tpot, d)
			}
		case interrupted:
			t.Interrupted++
		default:
			t.Failed++
			f := failures[s.failure]
			if f == nil {
				f = &Failure{Kind: s.failure, Example: s.example}
				failures[s.failure] = f
			}
			f.Count++
		}
	}
	for g, first := range from {
		t.Seconds += (to[g] - first).Seconds()
	}
	if t.Seconds > 0 {
		t.RequestsPerSecond = float64(t.Answered) / t.Seconds
		t.InputTokensPerSecond = float64(t.InputTokens) / t.Seconds
		t.OutputTokensPerSecond = float64(t.OutputTokens) / t.Seconds
	}
	for _, f := range failures {
		t.Failures = append(t.Failures, *f)
	}
	slices.SortFunc(t.Failures, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind))
	})
	t.TTFT, t.TPOT, t.EndToEnd, t.Lag, t.InterToken = summary(c.ttft), summary(c.tpot), summary(c.all), summary(lag), summary(r.gaps[i])
	return t, c
}

// windows cuts the run into at most 60 stretches of whole tenths of a second.
func (r *run) windows(out *Result) {
	if len(r.samples) == 0 {
		return
	}
	from, to := r.samples[0].intended, time.Duration(0)
	for i := range r.samples {
		from, to = min(from, r.samples[i].intended), max(to, r.samples[i].end)
	}
	width := max((to-from)/60, 100*time.Millisecond).Truncate(100*time.Millisecond) + 100*time.Millisecond
	n := int((to-from)/width) + 1
	for target := range out.Targets {
		ws := make([]Window, n)
		begun := make([]*hdrhistogram.Histogram, n)
		for i := range ws {
			begun[i] = newHistogram()
			ws[i].At = (from + time.Duration(i+1)*width).Seconds()
		}
		for i := range r.samples {
			s := &r.samples[i]
			if s.target != target {
				continue
			}
			b, e := int((s.intended-from)/width), int((s.end-from)/width)
			for k := b; k < e; k++ {
				ws[k].InFlight++
			}
			switch s.failure {
			case "":
				ws[e].Answered++
				ws[e].OutputTokensPerSecond += float64(s.output) / width.Seconds()
				if s.first > 0 {
					record(begun[b], s.ttft())
				}
			case interrupted:
			default:
				ws[e].Failed++
			}
		}
		for i := range ws {
			if begun[i].TotalCount() > 0 {
				q := summary(begun[i])
				ws[i].TTFTP50, ws[i].TTFTP99 = q.P50, q.P99
			}
		}
		out.Targets[target].Windows = ws
	}
}

// notes says what would be misread.
func (r *run) notes(out *Result) {
	note := func(format string, args ...any) { out.Notes = append(out.Notes, fmt.Sprintf(format, args...)) }
	if out.Interrupted {
		note("interrupted: what had not ended by then is not in the figures")
	}
	for i := range out.Targets {
		t := &out.Targets[i]
		if t.Requests == 0 {
			note("%s: no request counts", t.Name)
			continue
		}
		if t.Answered > 0 && 100*t.Failed > t.Requests {
			note("%s: %.1f %% failed; times are of the others", t.Name, 100*float64(t.Failed)/float64(t.Requests))
		}
		if t.Lag.P99 > max(0.02, t.EndToEnd.P50/20) {
			note("%s: requests were sent late (99 %% within %s): this machine or the bound on conversations at a time is part of the figures", t.Name, seconds(t.Lag.P99))
		}
		if t.Answered > 0 && t.InputTokens == 0 {
			note("%s: the answers say nothing of tokens; an event counts as one", t.Name)
		}
	}
}
