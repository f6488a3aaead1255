package admin

import (
	"math"

	"kvgate/telemetry"
)

// stats are figures of the last historyPoints seconds, by second and pool.
type stats struct {
	seconds [historyPoints]second // by Unix time
}

type second struct {
	at    int64
	pools map[string]*tally
}

// A tally is what ended within one second, or within several.
type tally struct {
	weight, errors, told, output, input, usedInput, cached, estimated, expected, adapters, hits float64
	ttft                                                                                        histogram
	prediction                                                                                  histogram // actual over predicted
}

// add takes in a request that stands for weight requests.
func (s *stats) add(at int64, r *telemetry.Record, weight float64) {
	sec := &s.seconds[at%historyPoints]
	switch {
	case sec.at < at:
		*sec = second{at, make(map[string]*tally)}
	case sec.at > at:
		return // a request that ended long ago
	}
	t := sec.pools[r.Pool]
	if t == nil {
		t = new(tally)
		sec.pools[string([]byte(r.Pool))] = t // the record is only lent
	}
	t.weight += weight
	if r.Outcome != "ok" && r.Outcome != "client_gone" {
		t.errors += weight
	}
	if r.UsageKnown {
		t.told += weight
		t.output += weight * float64(r.OutputTokens)
		t.input += weight * float64(r.InputTokens)
		if r.CachedKnown {
			t.usedInput += weight * float64(r.InputTokens)
			t.cached += weight * float64(r.CachedTokens)
		}
	}
	if !r.Decided {
		return
	}
	t.estimated += weight * float64(r.PromptTokens)
	t.expected += weight * float64(r.PromptTokens-r.NewTokens)
	if r.Adapter != "" {
		t.adapters += weight
		if r.AdapterResident {
			t.hits += weight
		}
	}
	if r.TTFTSeconds > 0 && r.Status < 400 {
		t.ttft.add(r.TTFTSeconds, weight)
		if r.PredictedSeconds > 0 && r.AnsweredSeconds > 0 {
			t.prediction.add(r.AnsweredSeconds/r.PredictedSeconds, weight)
		}
	}
}

func (t *tally) merge(o *tally) {
	for _, p := range [...]struct{ to, from *float64 }{
		{&t.weight, &o.weight},
		{&t.errors, &o.errors},
		{&t.told, &o.told},
		{&t.output, &o.output},
		{&t.input, &o.input},
		{&t.usedInput, &o.usedInput},
		{&t.cached, &o.cached},
		{&t.estimated, &o.estimated},
		{&t.expected, &o.expected},
		{&t.adapters, &o.adapters},
		{&t.hits, &o.hits},
	} {
		*p.to += *p.from
	}
	t.ttft.merge(&o.ttft)
	t.prediction.merge(&o.prediction)
}

// figures are those of some pools over the window that ends before now, whose second has only begun.
func (s *stats) figures(now int64, of func(pool string) bool) (f LiveFigures) {
	var t tally
	oldest := now
	for at := now - windowSeconds; at < now; at++ {
		sec := &s.seconds[at%historyPoints]
		if sec.at != at {
			continue
		}
		oldest = min(oldest, at)
		for name, p := range sec.pools {
			if of(name) {
				t.merge(p)
			}
		}
	}
	seconds := float64(max(1, now-oldest))
	f.RequestsPerSecond = round(t.weight / seconds)
	if t.told > 0 || t.weight == 0 {
		f.OutputTokensPerSecond, f.InputTokensPerSecond = new(round(t.output/seconds)), new(round(t.input/seconds))
	}
	f.ErrorRatio = ratio(t.errors, t.weight)
	f.TTFTP50, f.TTFTP99 = t.ttft.quantile(0.5), t.ttft.quantile(0.99)
	f.PrefixHitRatio = ratio(t.cached, t.usedInput)
	if f.PrefixHitRatio == nil {
		f.PrefixHitRatio = ratio(t.expected, t.estimated)
	}
	f.AdapterHitRatio = ratio(t.hits, t.adapters)
	f.PredictionRatio = t.prediction.quantile(0.5)
	return f
}

// history are the last n whole seconds before now, as far as anything is remembered.
func (s *stats) history(now int64, n int) []LivePoint {
	out := []LivePoint{}
	known := false
	for at := now - int64(n); at < now; at++ {
		sec := &s.seconds[at%historyPoints]
		var t tally
		if sec.at == at {
			known = true
			for _, p := range sec.pools {
				t.merge(p)
			}
		}
		if known || n == 1 {
			out = append(out, LivePoint{at, round(t.weight), round(t.errors), t.ttft.quantile(0.5), t.ttft.quantile(0.99), round(t.output), round(t.input)})
		}
	}
	return out
}

func ratio(a, b float64) *float64 {
	if b <= 0 {
		return nil
	}
	return rounded(new(a/b), 4)
}

func round(v float64) float64 { return math.Round(v*100) / 100 }

// A histogram has buckets of a tenth each, from a tenth of a millisecond: quantiles are right to five percent.
type histogram struct {
	counts [histogramBuckets]float32
	sum    float32
}

const (
	histogramBuckets = 160
	histogramLeast   = 1e-4
)

var histogramStep = math.Log(1.1)

func (h *histogram) add(v, weight float64) {
	i := int(math.Log(v/histogramLeast) / histogramStep)
	h.counts[min(max(i, 0), histogramBuckets-1)] += float32(weight)
	h.sum += float32(weight)
}

func (h *histogram) merge(o *histogram) {
	if o.sum == 0 {
		return
	}
	h.sum += o.sum
	for i, n := range o.counts {
		h.counts[i] += n
	}
}

// quantile is the middle of the bucket that q, 0..1, falls into; nil when there is nothing.
func (h *histogram) quantile(q float64) *float64 {
	if h.sum == 0 {
		return nil
	}
	rank := float32(q) * h.sum
	for i, n := range h.counts {
		if rank -= n; rank < 0 || rank == 0 && n > 0 {
			return significant3(histogramLeast * math.Exp((float64(i)+0.5)*histogramStep))
		}
	}
	return significant3(histogramLeast * math.Exp(histogramBuckets*histogramStep))
}

func significant3(v float64) *float64 { return rounded(&v, 2-int(math.Floor(math.Log10(v)))) }
