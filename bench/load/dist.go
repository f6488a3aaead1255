package load

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

// A Dist is a distribution of lengths, turns or seconds. The zero value is always 0.
type Dist struct {
	kind string // one of distKinds; "" is a constant
	a, b float64
}

// distKinds say how each kind is written, beside a number alone.
var distKinds = []struct{ name, args string }{
	{"uniform", "LEAST-MOST"},
	{"normal", "MEAN,DEVIATION"},
	{"lognormal", "MEDIAN,SIGMA"},
	{"exp", "MEAN"},
}

// maxDrawn bounds what is drawn: a prompt of so many tokens is 4 MB of text.
const maxDrawn = 1e6

// Const is always v.
func Const(v float64) Dist { return Dist{a: v} }

// ParseDist reads 256, uniform:100-500, normal:256,64, lognormal:256,0.8 or exp:256.
func ParseDist(text string) (Dist, error) {
	kind, args, ok := strings.Cut(text, ":")
	if !ok {
		v, err := number(text)
		return Dist{a: v}, err
	}
	d := Dist{kind: kind}
	var err error
	separator := ","
	switch kind {
	case "uniform":
		separator = "-"
		fallthrough
	case "normal", "lognormal":
		first, second, ok := strings.Cut(args, separator)
		if !ok {
			return Dist{}, fmt.Errorf("%q has one number; want two with %q between them", text, separator)
		}
		var err2 error
		d.a, err = number(first)
		d.b, err2 = number(second)
		err = errors.Join(err, err2)
	case "exp":
		d.a, err = number(args)
	default:
		return Dist{}, fmt.Errorf("%q: unknown distribution %q; want a number, %s", text, kind, distHelp())
	}
	switch {
	case err != nil:
		return Dist{}, fmt.Errorf("%q: want %s", text, distHelp())
	case kind == "uniform" && d.b < d.a:
		return Dist{}, fmt.Errorf("%q: the most is less than the least", text)
	case kind == "lognormal" && d.b > 5:
		return Dist{}, fmt.Errorf("%q: a sigma above 5", text)
	}
	return d, nil
}

func distHelp() string {
	var out []string
	for _, k := range distKinds {
		out = append(out, k.name+":"+k.args)
	}
	return strings.Join(out, ", ")
}

func number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || !(v >= 0) || v > maxDrawn {
		return 0, fmt.Errorf("%q; want a number from 0 to %g", text, maxDrawn)
	}
	return v, nil
}

// Draw returns a value of d, from 0 to 10⁶.
func (d Dist) Draw(rnd *rand.Rand) float64 {
	v := d.a
	switch d.kind {
	case "uniform":
		v += rnd.Float64() * (d.b - d.a)
	case "normal":
		v += rnd.NormFloat64() * d.b
	case "lognormal":
		v *= math.Exp(rnd.NormFloat64() * d.b)
	case "exp":
		v *= rnd.ExpFloat64()
	}
	return min(max(v, 0), maxDrawn)
}

// whole draws a whole number of at least least.
func (d Dist) whole(rnd *rand.Rand, least int) int {
	return max(least, int(math.Round(d.Draw(rnd))))
}

// meanWhole is the mean of whole, by drawing: rounding and bounds have no formula worth having.
func (d Dist) meanWhole(least int) float64 {
	if d.kind == "" {
		return float64(d.whole(nil, least))
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	const n = 20_000
	sum := 0
	for range n {
		sum += d.whole(rnd, least)
	}
	return float64(sum) / n
}

// String is what ParseDist reads.
func (d Dist) String() string {
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	switch d.kind {
	case "":
		return f(d.a)
	case "exp":
		return "exp:" + f(d.a)
	case "uniform":
		return "uniform:" + f(d.a) + "-" + f(d.b)
	}
	return d.kind + ":" + f(d.a) + "," + f(d.b)
}

// Set and Type make a Dist a flag.
func (d *Dist) Set(text string) (err error) {
	*d, err = ParseDist(text)
	return err
}

// Type names the kind of flag.
func (d *Dist) Type() string { return "distribution" }

// A zipf draws 0 to n-1, i with a weight of 1/(i+1)^s. It is made once and read by many.
type zipf []float64 // cumulated weights

func newZipf(n int, s float64) zipf {
	z := make(zipf, n)
	sum := 0.0
	for i := range z {
		sum += math.Pow(float64(i+1), -s)
		z[i] = sum
	}
	return z
}

func (z zipf) draw(rnd *rand.Rand) int {
	v := rnd.Float64() * z[len(z)-1]
	low, high := 0, len(z)-1
	for low < high {
		if m := (low + high) / 2; z[m] <= v {
			low = m + 1
		} else {
			high = m
		}
	}
	return low
}
