package metrics

import (
	"cmp"
	"math"
	"slices"
	"strconv"

	"kvgate/pool"
)

// A Raw is what a page says, in the server's own fields. [Raw.Load] adds them up.
type Raw struct {
	Dialect string
	Engines []RawEngine // sorted by model and name; engines with numbers for names numerically

	AdaptersKnown    bool
	AdaptersRunning  []string // as the newest series lists them, in its order
	AdaptersWaiting  []string // no queue: since vLLM 0.12 a copy of AdaptersRunning
	MaxAdapters      Value
	Named            []string // adapters that have a series of their own; sorted
	NamedKnown       bool
	StartTime        Value // Unix seconds
	PromptTokens     Value // counters, over all engines
	GenerationTokens Value
	PrefixHitTokens  Value
	PrefixQueries    Value // tokens looked up in the prefix cache
	Preemptions      Value
	Pending          Value // queued in front of all engines, where the page has several
	Workers          int   // servers behind this one that the page tells apart; 0 where it doesn't

	Anomalies int // numbers out of their range
}

// A RawEngine is one engine (data-parallel rank) of a page.
type RawEngine struct {
	Model, ID string // as labelled; "" where the page has no such label

	Running, Waiting, Swapped, Deferred, PDQueued, Pending Value
	KVUsage                                                Value // ratio 0..1
	Awake                                                  Value // 0 or 1
	BlockSize, Blocks, KVTokens                            Value
	SlotsUsed, SlotsTotal                                  Value
}

// maxUtilization is how far above 1 a ratio may be by rounding; beyond that it isn't one.
const maxUtilization = 1.05

// raw reads p. now is the time in Unix seconds.
func (d *Dialect) raw(p *page, now float64) *Raw {
	r := &Raw{Dialect: d.Name, StartTime: newest(p.samples(startTime))}
	engine, description := d.terms()
	for _, t := range engine {
		t.leaves(p, r.addEngine)
	}
	if len(r.Engines) == 0 {
		for _, t := range description {
			t.leaves(p, r.addEngine)
		}
	}
	slices.SortFunc(r.Engines, func(a, b RawEngine) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), compareIDs(a.ID, b.ID))
	})
	for i := range r.Engines {
		e := &r.Engines[i]
		own := func(s *series) bool { return s.model == e.Model && s.engine == e.ID }
		// What describes an engine may lack labels, or have them where the gauges don't: none matches any.
		about := func(s *series) bool {
			return (s.model == e.Model || s.model == "" || e.Model == "") && (s.engine == e.ID || s.engine == "" || e.ID == "")
		}
		values := [][]*Value{
			{&e.Running, &e.Waiting, &e.Swapped, &e.Deferred, &e.PDQueued, &e.KVUsage, &e.Awake},
			{&e.BlockSize, &e.Blocks, &e.KVTokens, &e.SlotsUsed, &e.SlotsTotal, &e.Pending},
		}
		for j, t := range engine {
			*values[0][j] = t.eval(p, own)
		}
		for j, t := range description {
			*values[1][j] = t.eval(p, about)
		}
		e.Pending = d.Pending.eval(p, own)
		switch {
		case !e.KVUsage.Known || e.KVUsage.V <= 1:
		case e.KVUsage.V <= maxUtilization:
			e.KVUsage.V = 1
			r.Anomalies++
		default:
			e.KVUsage = Value{}
			r.Anomalies++
		}
	}
	if !slices.ContainsFunc(r.Engines, func(e RawEngine) bool { return e.ID == "" }) {
		r.Pending = d.Pending.eval(p, func(s *series) bool { return s.engine == "" })
	}
	for i, v := range []*Value{&r.PromptTokens, &r.GenerationTokens, &r.PrefixHitTokens, &r.PrefixQueries, &r.Preemptions} {
		*v = counter(p, d.counters()[i])
	}
	d.Adapters.read(p, now, r)
	if w := d.Workers; w.family != "" {
		seen := make(map[string]bool)
		for _, s := range p.samples(w.family) {
			v, _ := s.label(w.label)
			seen[v] = true
		}
		r.Workers = len(seen)
	}
	return r
}

func (r *Raw) addEngine(s sample) {
	for i := range r.Engines {
		if r.Engines[i].Model == s.model && r.Engines[i].ID == s.engine {
			return
		}
	}
	r.Engines = append(r.Engines, RawEngine{Model: s.model, ID: s.engine})
}

// compareIDs orders "2" before "10".
func compareIDs(a, b string) int {
	m, errA := strconv.Atoi(a)
	n, errB := strconv.Atoi(b)
	if errA == nil && errB == nil {
		return cmp.Compare(m, n)
	}
	return cmp.Compare(a, b)
}

func newest(s []sample) (v Value) {
	for _, s := range s {
		if !v.Known || s.value > v.V {
			v = known(s.value)
		}
	}
	return v
}

// counter adds up the series of the first family that the page has. Copies of one count count once.
func counter(p *page, families []string) (total Value) {
	for _, f := range families {
		samples := p.samples(f)
		for i, s := range samples {
			v := s.value
			copied := false
			for j, o := range samples {
				if i == j || o.original != s.original {
					continue
				}
				copied = copied || j < i
				v = max(v, o.value)
			}
			if !copied {
				total = known(total.V + v)
			}
		}
		if total.Known {
			break
		}
	}
	return total
}

// Load adds r up as the gateway counts load:
//
//   - Running: the sum over engines.
//   - Waiting: what the engines queue, and what is swapped out, between a prefill and a decode server, or pending in front of
//     the engine; deferred requests are in the queue already. It is known only if the queue is: the rest may be empty
//     while the queue is long.
//   - KVCacheUtilization: the mean over engines, weighted by capacity if all of them tell it; KVCacheUtilizationMax: the
//     fullest.
//   - KVCapacityTokens: the sum over engines of what they say, or of block size times blocks. (One of vLLM's blocks is a
//     placeholder; it is far below the precision of anything here.)
//   - Adapters: the union of all lists, since none of them tells running from waiting.
func (r *Raw) Load() *pool.Load {
	l := &pool.Load{
		Dialect:           r.Dialect,
		PromptTokens:      orNegative(r.PromptTokens),
		GenerationTokens:  orNegative(r.GenerationTokens),
		PrefixHitTokens:   orNegative(r.PrefixHitTokens),
		PrefixQueryTokens: orNegative(r.PrefixQueries),
		Preemptions:       orNegative(r.Preemptions),
		StartTime:         r.StartTime.V,
	}
	var running, waiting, capacity float64
	var used, weights float64 // weighted by capacity
	var plain, plainN float64
	weighed := true
	for i := range r.Engines {
		e := &r.Engines[i]
		el := pool.EngineLoad{ID: e.ID}
		if e.Running.Known {
			el.Known |= pool.KnowsRunning
			el.Running = int32(min(math.Round(e.Running.V), math.MaxInt32))
			running += e.Running.V
		}
		if q := e.Waiting; q.Known {
			q.V += e.Swapped.V + e.PDQueued.V + e.Pending.V
			el.Known |= pool.KnowsWaiting
			el.Waiting = int32(min(math.Round(q.V), math.MaxInt32))
			waiting += q.V
		}
		tokens := e.capacity()
		if tokens.Known {
			el.Known |= pool.KnowsKVCapacity
			el.KVCapacityTokens = int64(tokens.V)
			if !r.sharesSpace(i) {
				capacity += tokens.V
			}
		}
		if u := e.KVUsage; u.Known {
			el.Known |= pool.KnowsKVCacheUtilization
			el.KVCacheUtilization = u.V
			l.KVCacheUtilizationMax = max(l.KVCacheUtilizationMax, u.V)
			plain += u.V
			plainN++
			used += u.V * tokens.V
			weights += tokens.V
			weighed = weighed && tokens.V > 0
		}
		l.Known |= el.Known
		if e.Awake.Known {
			l.Known |= pool.KnowsSleeping
			l.Sleeping = l.Sleeping || e.Awake.V == 0
		}
		if s := e.SlotsUsed; s.Known {
			l.Known |= pool.KnowsAdapterSlots
			l.AdapterSlotsUsed = max(l.AdapterSlotsUsed, int32(min(s.V, math.MaxInt32)))
		}
		if s := e.SlotsTotal; s.Known {
			l.Known |= pool.KnowsMaxAdapters
			l.MaxAdapters = max(l.MaxAdapters, int32(min(s.V, math.MaxInt32)))
		}
		l.Engines = append(l.Engines, el)
	}
	waiting += r.Pending.V
	nameEngines(l, r.Engines)
	l.Running = int32(min(math.Round(running), math.MaxInt32))
	if l.Known.Has(pool.KnowsWaiting) {
		l.Waiting = int32(min(math.Round(waiting), math.MaxInt32))
	}
	l.KVCapacityTokens = int64(capacity) * int64(max(1, r.Workers))
	switch {
	case plainN == 0:
	case weighed:
		l.KVCacheUtilization = used / weights
	default:
		l.KVCacheUtilization = plain / plainN
	}
	if r.AdaptersKnown || r.NamedKnown {
		l.Known |= pool.KnowsAdapters
		names := slices.Concat(r.AdaptersRunning, r.AdaptersWaiting, r.Named)
		slices.Sort(names)
		l.Adapters = slices.Compact(names)
	}
	if r.MaxAdapters.Known {
		l.Known |= pool.KnowsMaxAdapters
		l.MaxAdapters = int32(min(r.MaxAdapters.V, math.MaxInt32))
	}
	return l
}

func orNegative(v Value) float64 {
	if v.Known {
		return v.V
	}
	return -1
}

// maxCapacityTokens is more than any engine has room for, and little enough to add up.
const maxCapacityTokens = 1 << 40

// capacity is the engine's KV space in tokens.
func (e *RawEngine) capacity() Value {
	v := e.KVTokens
	if !v.Known && e.BlockSize.Known && e.Blocks.Known {
		v = known(e.BlockSize.V * e.Blocks.V)
	}
	if v.V < 1 || v.V > maxCapacityTokens {
		return Value{}
	}
	return v
}

// sharesSpace reports whether the KV space of engine i is another's too: an engine before it has the same name under
// another model, or it stands for all engines of the page.
func (r *Raw) sharesSpace(i int) bool {
	id := r.Engines[i].ID
	return slices.ContainsFunc(r.Engines[:i], func(e RawEngine) bool { return e.ID == id }) ||
		id == "" && slices.ContainsFunc(r.Engines, func(e RawEngine) bool { return e.ID != "" })
}

// nameEngines gives the engines of l names that differ. Numbers without an engine label on a page that has engines are of
// the whole server; they have been added up and are no engine.
func nameEngines(l *pool.Load, raw []RawEngine) {
	labelled, models := false, false
	for i := range raw {
		labelled = labelled || raw[i].ID != ""
		models = models || raw[i].Model != raw[0].Model
	}
	engines := l.Engines[:0]
	for i, e := range l.Engines {
		switch m := raw[i].Model; {
		case labelled && e.ID == "":
			continue
		case e.ID == "" && models && m != "":
			e.ID = m
		case e.ID == "":
			e.ID = "0"
		case models && m != "":
			e.ID = m + "/" + e.ID
		}
		engines = append(engines, e)
	}
	l.Engines = engines
}
