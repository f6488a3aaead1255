package metrics

import (
	"slices"
	"strconv"
	"strings"
)

// A Dialect says which series of a model server's page mean which number of a [Raw], and where the page is. Dialects are
// data: one file each, registered by [register].
type Dialect struct {
	Name string // what configuration files say
	Doc  string // one sentence: which servers speak it

	// Paths are where the page may be, in the order in which they are tried. Ports are ports other than the endpoint's
	// own where `auto` may look for it; 0 stands for the endpoint's own.
	Paths []string
	Ports []int
	// Props says that GET /props must be asked first whether reading the page has effects.
	Props bool
	// Detect are families of which one on a page is enough to know the dialect.
	Detect []string

	// Model and Engine are the labels that tell engines on one page apart. The first Model label that a series has counts;
	// the values of all Engine labels together name the engine.
	Model, Engine []string
	// Blank are labels that must be empty or absent: servers repeat totals split by them.
	Blank []string

	// Numbers of an engine. Several series of one engine are copies of each other, and the largest is taken.
	Running    term
	Waiting    term // queued, without the three below
	Swapped    term // preempted to host memory
	Deferred   term // the part of Waiting that doesn't wait for capacity
	PDQueued   term // in queues between prefill and decode servers
	Pending    term // queued in a front end before the engine
	KVUsage    term // ratio 0..1
	Awake      term // 0 while the weights are offloaded
	BlockSize  term // tokens per KV block
	Blocks     term
	KVTokens   term // capacity in tokens, where the server says so itself
	SlotsUsed  term // adapter slots
	SlotsTotal term

	Adapters adapterSource
	// Workers names a label of a family that has one value for each server behind this one; the numbers of KV space
	// are then of one of them.
	Workers labelOf

	// Counters, newest name first.
	PromptTokens, GenerationTokens, PrefixHitTokens, PrefixQueryTokens, Preemptions []string

	want *wanted // every family of the above
}

type labelOf struct{ family, label string }

// An adapterSource says where a page names LoRA adapters.
type adapterSource struct {
	Info                  []string // families whose newest series lists adapters in labels, see adapters.go
	Running, Waiting, Max string   // those labels
	Named                 []labelOf
}

// startTime is the family by which every Prometheus client library tells when its process started, in Unix seconds.
const startTime = "process_start_time_seconds"

var dialects []*Dialect

// register adds a dialect. The order of detection is that of [Dialects].
func register(d Dialect) *Dialect {
	if slices.ContainsFunc(dialects, func(o *Dialect) bool { return o.Name == d.Name }) {
		panic("BUG: dialect " + d.Name + " is registered twice")
	}
	d.compile()
	dialects = append(dialects, &d)
	slices.SortFunc(dialects, func(a, b *Dialect) int { return strings.Compare(a.Name, b.Name) })
	return &d
}

// Dialects returns all dialects, sorted by name. The caller must not change them.
func Dialects() []*Dialect { return slices.Clone(dialects) }

// Auto is the name that stands for detecting the dialect.
const Auto = "auto"

// Names returns what may be written as an endpoint's dialect, Auto first.
func Names() []string {
	names := []string{Auto}
	for _, d := range dialects {
		names = append(names, d.Name)
	}
	return names
}

// Lookup returns the named dialect, or nil; also for Auto.
func Lookup(name string) *Dialect {
	for _, d := range dialects {
		if d.Name == name {
			return d
		}
	}
	return nil
}

// terms are the terms that belong to an engine: those that show that an engine is there, and
// those that describe it.
func (d *Dialect) terms() (engine, description []*term) {
	return []*term{&d.Running, &d.Waiting, &d.Swapped, &d.Deferred, &d.PDQueued, &d.KVUsage, &d.Awake},
		[]*term{&d.BlockSize, &d.Blocks, &d.KVTokens, &d.SlotsUsed, &d.SlotsTotal, &d.Pending}
}

func (d *Dialect) counters() [][]string {
	return [][]string{d.PromptTokens, d.GenerationTokens, d.PrefixHitTokens, d.PrefixQueryTokens, d.Preemptions}
}

func (d *Dialect) compile() {
	d.want = newWanted()
	engine, description := d.terms()
	for _, t := range append(engine, description...) {
		t.families(d.want.add)
	}
	for _, c := range d.counters() {
		for _, f := range c {
			d.want.add(f)
		}
	}
	for _, f := range d.Adapters.Info {
		d.want.add(f)
	}
	for _, n := range d.Adapters.Named {
		d.want.add(n.family)
	}
	d.want.add(d.Workers.family)
	if len(d.want.names) > 0 {
		d.want.add(startTime)
	}
}

// copyLabels tell apart processes and ranks that count the same thing.
var copyLabels = []string{"pid", "tp_rank", "pp_rank", "moe_ep_rank"}

// identify notes on s what its labels mean to d.
func (d *Dialect) identify(s *series) {
	for _, l := range d.Model {
		if v, ok := s.label(l); ok {
			s.model = v
			break
		}
	}
	for _, l := range d.Engine {
		if v, ok := s.label(l); ok && v != "" {
			if s.engine != "" {
				s.engine += "/"
			}
			s.engine += v
		}
	}
	var b strings.Builder
	for _, l := range s.labels {
		if !slices.Contains(copyLabels, l.name) {
			b.WriteString(l.name + "=" + strconv.Quote(l.value) + ",")
		}
	}
	s.original = b.String()
	s.ignored = slices.ContainsFunc(d.Blank, func(l string) bool {
		v, _ := s.label(l)
		return v != ""
	})
}

// passThrough adds the terms of an engine whose series d's servers hand through, after d's own.
func (d *Dialect) passThrough(from Dialect) {
	if from.want == nil {
		from.compile()
	}
	e, desc := d.terms()
	fe, fdesc := from.terms()
	for i, t := range append(e, desc...) {
		if o := append(fe, fdesc...)[i]; o.op != opNone {
			*t = first(*t, *o)
		}
	}
	for _, l := range []struct{ to, from *[]string }{
		{&d.Model, &from.Model},
		{&d.Engine, &from.Engine},
		{&d.Blank, &from.Blank},
		{&d.PromptTokens, &from.PromptTokens},
		{&d.GenerationTokens, &from.GenerationTokens},
		{&d.PrefixHitTokens, &from.PrefixHitTokens},
		{&d.PrefixQueryTokens, &from.PrefixQueryTokens},
		{&d.Preemptions, &from.Preemptions},
		{&d.Adapters.Info, &from.Adapters.Info},
	} {
		for _, n := range *l.from {
			if !slices.Contains(*l.to, n) {
				*l.to = append(slices.Clip(*l.to), n)
			}
		}
	}
	if len(from.Adapters.Info) > 0 {
		d.Adapters.Running, d.Adapters.Waiting, d.Adapters.Max = from.Adapters.Running, from.Adapters.Waiting, from.Adapters.Max
	}
}

// speaks reports whether p shows any family of d.
func (d *Dialect) speaks(p *page) bool {
	for _, f := range d.want.names {
		if f != startTime && len(p.samples(f)) > 0 {
			return true
		}
	}
	return false
}

// everyFamily is the set that pages are scanned for while their dialect is unknown.
func everyFamily() *wanted {
	w := newWanted()
	for _, d := range dialects {
		for _, f := range d.Detect {
			w.add(f)
		}
		for _, f := range d.want.names {
			w.add(f)
		}
	}
	return w
}

// detect names the dialect of a page that was scanned for everyFamily: the first in detectionOrder that has one of its
// Detect families there, or else one of any of its families.
func detect(p *page) *Dialect {
	for _, name := range detectionOrder {
		d := Lookup(name)
		if slices.ContainsFunc(d.Detect, func(f string) bool { return len(p.samples(f)) > 0 }) {
			return d
		}
	}
	for _, name := range detectionOrder {
		if d := Lookup(name); d.speaks(p) {
			return d
		}
	}
	return nil
}

// detectionOrder puts engines before the front ends that pass their series through, and names without a prefix last.
var detectionOrder = []string{
	"vllm", "sglang", "tgi", "lorax", "tei", "llamacpp", "lmdeploy", "aphrodite", "ray", "trtllm", "triton", "max",
	"jetstream", "dynamo", "nim",
}
