package policies

import (
	"testing"
	"time"

	"kvgate/internal/adapters"
)

// 256 adapters, Zipf(1), on 8 servers with 8 slots and host memory for 32 adapters each. What managing them buys: how many
// requests wait for an adapter to be read from its source, and the time to first token. Servers start with no adapter, under
// load at once, or a minute before the first request as after a deployment.
func TestManagedAdapters(t *testing.T) {
	g, _ := GeneratorByName("lora256")
	const rate = 34
	cold := g.Make(6000, 1)
	ahead := g.Make(6000, 1)
	lead := time.Duration(60 * rate / ahead.Rate() * float64(time.Second))
	for i := range ahead.Requests {
		ahead.Requests[i].At += lead
	}
	ahead.Requests = append([]Request{{In: 1, Out: 1}}, ahead.Requests...) // begins the run
	type outcome struct {
		*Result
		inPath int
	}
	run := func(w *Workload, p Policy, loads *AdapterLoads) outcome {
		t.Helper()
		// No warm-up: the cold start is the point.
		r, err := Run(w, p, Options{Rate: float64(len(w.Requests)-1) / (float64(w.Requests[len(w.Requests)-1].At) / float64(time.Second)) * rate / cold.Rate(), Seed: 1, WarmUp: 1e-9})
		if err != nil {
			t.Fatal(err)
		}
		o := outcome{r, int(r.AdapterDiskLoads)}
		if loads != nil {
			// The rest of the loads from disk were the gateway's own, ahead of requests.
			o.inPath = max(0, o.inPath-loads.Ahead-loads.Asked) + loads.Waited
		}
		t.Logf("%-22s requests that waited for a load %4d, loads from disk %4d, from host %5d; TTFT mean %.3f p50 %.3f p90 %.3f p99 %.3f s; %+v",
			p.Name, o.inPath, r.AdapterDiskLoads, r.AdapterHostLoads, r.TTFTMean.Seconds(), r.TTFTP50.Seconds(), r.TTFTP90.Seconds(), r.TTFTP99.Seconds(), loads)
		return o
	}
	plan := func(preload bool) adapters.PlanOptions {
		return adapters.PlanOptions{PerEndpoint: 32, MaxLoading: 8, Hold: 30 * time.Second, Preload: preload}
	}
	short := testing.Short() || raceEnabled // a minute and a half under the race detector, with nothing concurrent in it
	for _, w := range []*Workload{cold, ahead} {
		if short && w == cold {
			continue
		}
		if !short {
			run(w, rival("least_requests"), nil)
		}
		without := run(w, Auto, nil)
		var d, m AdapterLoads
		if !short {
			run(w, Managed("on demand", "", plan(false), &d), &d)
		}
		managed := run(w, Managed("managed", "", plan(true), &m), &m)
		// Half and a quarter were seen; auto by itself avoids most loads.
		of := 1.5
		if w == ahead {
			of = 3
		}
		if float64(managed.inPath)*of > float64(without.inPath) {
			t.Errorf("%d requests waited for a load; without management %d", managed.inPath, without.inPath)
		}
		if managed.TTFTP99*2 > without.TTFTP99 {
			t.Errorf("p99 TTFT %v; without management %v", managed.TTFTP99, without.TTFTP99)
		}
	}
}

func rival(name string) Policy {
	for _, p := range Rivals {
		if p.Name == name {
			return p
		}
	}
	panic("BUG: no rival " + name)
}
