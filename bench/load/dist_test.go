package load

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestDist(t *testing.T) {
	f := func(text string, low, high, mean float64) {
		t.Helper()
		d, err := ParseDist(text)
		if err != nil {
			t.Fatal(err)
		}
		if d.String() != text {
			t.Errorf("%q is written as %q", text, d)
		}
		rnd := rand.New(rand.NewPCG(1, 2))
		sum := 0.0
		const n = 50_000
		for range n {
			v := d.Draw(rnd)
			if v < low || v > high {
				t.Fatalf("%s: %g; want %g to %g", text, v, low, high)
			}
			sum += v
		}
		if m := sum / n; math.Abs(m-mean) > 0.03*mean {
			t.Errorf("%s: mean %g; want %g", text, m, mean)
		}
	}
	f("256", 256, 256, 256)
	f("0", 0, 0, 0)
	f("uniform:100-500", 100, 500, 300)
	f("normal:256,64", 0, 700, 256)
	f("lognormal:100,0.5", 0, 1e6, 100*math.Exp(0.125))
	f("exp:30", 0, 1e6, 30)
	if m := Const(0).meanWhole(1); m != 1 {
		t.Errorf("mean of at least one: %g", m)
	}
}

func TestDistMistakes(t *testing.T) {
	for _, text := range []string{"", "x", "-1", "nan", "inf", "1e9", "uniform:5", "uniform:5-1", "normal:3", "pareto:1", "exp:", "exp:x", "lognormal:10,9", "lognormal:10,x"} {
		if d, err := ParseDist(text); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, %v; want one line of what is wrong", text, d, err)
		}
	}
}

func FuzzParseDist(f *testing.F) {
	for _, s := range []string{"1", "uniform:1-2", "normal:3,1", "lognormal:256,0.8", "exp:2", "uniform:1e-3-5", ":", "exp:1e6"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := ParseDist(text)
		if err != nil {
			return
		}
		again, err := ParseDist(d.String())
		if err != nil || again != d {
			t.Errorf("%q is written as %q, which is %v, %v", text, d, again, err)
		}
		if v := d.whole(rand.New(rand.NewPCG(1, 1)), 1); v < 1 || v > maxDrawn {
			t.Errorf("%q: %d", text, v)
		}
	})
}

func TestZipf(t *testing.T) {
	const n = 90_000
	count := make([]float64, 3)
	rnd := rand.New(rand.NewPCG(1, 2))
	z := newZipf(3, 1)
	for range n {
		count[z.draw(rnd)]++
	}
	for i, want := range []float64{6. / 11, 3. / 11, 2. / 11} {
		if got := count[i] / n; math.Abs(got-want) > 0.01 {
			t.Errorf("%d is drawn in %.3f of cases; want %.3f", i, got, want)
		}
	}
}
