package metrics

import (
	"math"
	"strconv"
)

// A Value is a number that a page may or may not speak of.
type Value struct {
	V     float64
	Known bool
}

func known(v float64) Value { return Value{v, true} }

// A term says how one number of one engine is read from a page. The zero term is never known.
type term struct {
	op     operation
	family string
	where  []label // labels that a series must have to count
	label  string  // which label holds the number
	args   []term

	constant float64
}

type operation uint8

const (
	opNone     operation = iota
	opGauge              // the value of the family's series
	opLabel              // the number in a label of the family's series
	opFirst              // the first argument that is known
	opSum                // of the arguments that are known
	opRatio              // the first argument over the second
	opConstant           // always the same
)

// gauge is the value of a family. Of several series of one engine (processes, tensor-parallel ranks) the largest counts.
func gauge(family string) term { return term{op: opGauge, family: family} }

// labelled is gauge for the series whose label has the given value.
func labelled(family, name, value string) term {
	return term{op: opGauge, family: family, where: []label{{name, value}}}
}

// infoLabel is the number that an info series carries in a label.
func infoLabel(family, label string) term { return term{op: opLabel, family: family, label: label} }

// first is the first of several terms that the page knows: the newest name first.
func first(t ...term) term { return term{op: opFirst, args: t} }

// sum adds up those of its terms that the page knows.
func sum(t ...term) term { return term{op: opSum, args: t} }

// ratio is a over b.
func ratio(a, b term) term { return term{op: opRatio, args: []term{a, b}} }

// families yields the names of all families that t reads.
func (t *term) families(yield func(string)) {
	if t.family != "" {
		yield(t.family)
	}
	for i := range t.args {
		t.args[i].families(yield)
	}
}

// accepts reports whether t, which is a gauge or a label, takes its number from s.
func (t *term) accepts(s *series) bool {
	for _, w := range t.where {
		if v, ok := s.label(w.name); !ok || v != w.value {
			return false
		}
	}
	return true
}

// leaves calls yield for every sample that t reads, whatever its engine.
func (t *term) leaves(p *page, yield func(sample)) {
	for _, s := range p.samples(t.family) {
		if t.accepts(s.series) {
			yield(s)
		}
	}
	for i := range t.args {
		t.args[i].leaves(p, yield)
	}
}

// eval reads t for the engine that match accepts.
func (t *term) eval(p *page, match func(*series) bool) Value {
	switch t.op {
	case opGauge, opLabel:
		var v Value
		for _, s := range p.samples(t.family) {
			if !t.accepts(s.series) || !match(s.series) {
				continue
			}
			n := s.value
			if t.op == opLabel {
				text, _ := s.label(t.label)
				var err error
				if n, err = strconv.ParseFloat(text, 64); err != nil || math.IsNaN(n) || math.IsInf(n, 0) || n < 0 {
					continue // "None" until profiling has ended
				}
			}
			if !v.Known || n > v.V {
				v = known(n)
			}
		}
		return v
	case opFirst:
		for i := range t.args {
			if v := t.args[i].eval(p, match); v.Known {
				return v
			}
		}
	case opSum:
		var v Value
		for i := range t.args {
			if a := t.args[i].eval(p, match); a.Known {
				v = known(v.V + a.V)
			}
		}
		return v
	case opRatio:
		a, b := t.args[0].eval(p, match), t.args[1].eval(p, match)
		if a.Known && b.Known && b.V > 0 {
			return known(a.V / b.V)
		}
	case opConstant:
		return known(t.constant)
	}
	return Value{}
}
