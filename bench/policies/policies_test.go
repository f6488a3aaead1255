package policies

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/internal/shared"
)

func TestReadTrace(t *testing.T) {
	w, err := ReadTrace(strings.NewReader("t_ms,in,out,blocks\n2000,1100,5,7-9\n1000,40,3,1 5\n"), "t", 512, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(w.Requests) != 2 || w.Requests[0].In != 40 || w.Requests[1].At != time.Second {
		t.Errorf("%+v; want the two requests in order of time, from 0", w.Requests)
	}
	if n := len(w.Requests[0].Blocks); n != 0 {
		t.Errorf("a prompt of 40 tokens has %d full blocks of 512; want 0", n)
	}
	if b := w.Requests[1].Blocks; len(b) != 2 || b[0] != mix(7) || b[1] != mix(8) {
		t.Errorf("blocks %x; want two full ones, of ids 7 and 8", b)
	}
	for _, bad := range []string{"h\n1,2\n", "h\nx,2,3\n", "h\n1,900,3,9-x\n"} {
		if _, err := ReadTrace(strings.NewReader(bad), "t", 16, 0, nil); err == nil || !strings.Contains(err.Error(), "t:2") {
			t.Errorf("%q: error %v; want one that names line 2", bad, err)
		}
	}
}

// The generators keep the statistics that they state.
func TestGenerators(t *testing.T) {
	f := func(name string, n int, meanIn, meanOut, reuse float64) {
		t.Helper()
		g, ok := GeneratorByName(name)
		if !ok {
			t.Fatalf("no generator %q", name)
		}
		w := g.Make(n, 7)
		if len(w.Requests) != n {
			t.Errorf("%s: %d requests; want %d", name, len(w.Requests), n)
		}
		seen := make(map[uint64]bool)
		var in, out, hit float64
		last := time.Duration(0)
		for i, q := range w.Requests {
			in += float64(q.In)
			out += float64(q.Out)
			if q.At < last || q.In < 1 || q.Out < 1 || len(q.Blocks) > q.In/w.BlockTokens || int(q.Adapter) > w.Adapters {
				t.Fatalf("%s: request %d is impossible: %+v", name, i, q)
			}
			last = q.At
			fresh := false
			for _, b := range q.Blocks {
				if seen[b] && !fresh {
					hit += float64(w.BlockTokens)
				} else {
					fresh = true
				}
				seen[b] = true
			}
		}
		count := float64(len(w.Requests))
		near := func(what string, got, want, tolerance float64) {
			t.Helper()
			if got < want*(1-tolerance) || got > want*(1+tolerance) {
				t.Errorf("%s: %s %.3f; want %.3f ±%.0f %%", name, what, got, want, 100*tolerance)
			}
		}
		near("mean input", in/count, meanIn, .25)
		near("mean output", out/count, meanOut, .2)
		if reuse == 0 {
			if hit != 0 {
				t.Errorf("%s: %.0f tokens seen before; want none", name, hit)
			}
		} else {
			near("tokens seen before", hit/in, reuse, .35)
		}
	}
	f("conversation", 1500, 12000, 343, .37)
	f("tool", 1500, 8600, 180, .6)
	f("rag", 400, 30000, 150, .9)
	f("short", 2000, 1155, 211, 0)
	f("bursts", 2000, 1155, 211, 0)
	f("lora128", 1000, 1155+1024, 211, .47)
}

func TestRunsRepeat(t *testing.T) {
	g, _ := GeneratorByName("conversation")
	w := g.Make(150, 1)
	for _, p := range append(slices.Clone(Rivals), Auto) {
		o := Options{Rate: 6, Seed: 3, Replicas: 4, Gateways: 2, ForeignShare: .2}
		a, err := Run(w, p, o)
		if err != nil {
			t.Fatal(err)
		}
		b, err := Run(w, p, o)
		if err != nil {
			t.Fatal(err)
		}
		if a.TTFTMean != b.TTFTMean || a.Attainment != b.Attainment {
			t.Errorf("%s: two runs with one seed differ: %v and %v", p.Name, a.TTFTMean, b.TTFTMean)
		}
	}
}

// The engine and the rivals reproduce the published study of these rules on Mooncake's conversation trace: 8 replicas, 9.02
// requests per second. Mean TTFT in seconds and share within the SLO; the study's own margin between seeds is about 5 %.
func TestRivalsReproduceTheStudy(t *testing.T) {
	dir := shared.Dir(t)
	f, err := os.Open(filepath.Join(dir, "traces", "mooncake_conversation.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := ReadTrace(f, "conv", 512, 3*time.Second, rand.New(rand.NewPCG(1, 2)))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		policy     string
		ttft       float64
		attainment float64
	}{
		{"least_requests", 1.302, .884},
		{"llm-d", 1.068, .915},
		{"dynamo", 0.668, .986},
		{"oracle", 0.550, .993},
	} {
		for _, p := range Rivals {
			if p.Name != want.policy {
				continue
			}
			r, err := Run(w, p, Options{Rate: 9.02, Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%-15s TTFT %.3f s (study %.3f), within SLO %.3f (study %.3f)", p.Name, r.TTFTMean.Seconds(), want.ttft, r.Attainment, want.attainment)
			if d := r.TTFTMean.Seconds()/want.ttft - 1; d < -.1 || d > .1 {
				t.Errorf("%s: mean TTFT is off by %+.0f %%; want within 10 %%", p.Name, 100*d)
			}
			if d := r.Attainment - want.attainment; d < -.015 || d > .015 {
				t.Errorf("%s: attainment is off by %+.3f; want within 0.015", p.Name, d)
			}
		}
	}
}

func TestCapacity(t *testing.T) {
	g, _ := GeneratorByName("short")
	w := g.Make(1500, 1)
	p := Rivals[3]
	o := Options{Replicas: 2, Seed: 1}
	c, err := Capacity(w, p, o, .95, 0)
	if err != nil {
		t.Fatal(err)
	}
	o.Rate = c * .97
	below, err := Run(w, p, o)
	if err != nil {
		t.Fatal(err)
	}
	o.Rate = c * 1.1
	above, err := Run(w, p, o)
	if err != nil {
		t.Fatal(err)
	}
	if below.Attainment < .95 || above.Attainment >= .95 {
		t.Errorf("capacity %.1f/s: attainment %.3f below it and %.3f above; want 0.95 between them", c, below.Attainment, above.Attainment)
	}
}
