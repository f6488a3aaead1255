package soak

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

const numServers = 3

// A trouble is one thing that happens to one server.
type trouble struct {
	at     time.Duration // since the beginning
	server int
	kind   string
	lasts  time.Duration    // until the server is well again
	faults []modelsim.Fault // in force meanwhile; none where the process itself is hit
}

// Troubles of the process: SIGKILL, SIGTERM (each until it is started again) and SIGSTOP (until SIGCONT).
const (
	killed    = "killed"
	restarted = "restarted"
	stopped   = "stopped"
)

// kinds are what can happen, each as often as its weight says.
var kinds = []struct {
	name   string
	weight int
	faults func(*rand.Rand) []modelsim.Fault
}{
	{killed, 4, nil},
	{stopped, 4, nil},
	{restarted, 2, nil},
	{"reset", 3, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{
			{Kind: modelsim.FaultResetStream, Events: r.IntN(8), Count: 1 + r.IntN(20)},
			{Kind: modelsim.FaultReset, Count: 1 + r.IntN(10)},
		}
	}},
	{"frozen", 3, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{
			{Kind: modelsim.FaultMetricsFrozen},
			{Kind: modelsim.FaultHangStream, Events: r.IntN(8), Count: 1 + r.IntN(20)},
			{Kind: modelsim.FaultHang, Count: 1 + r.IntN(10)},
		}
	}},
	{"cut", 3, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{
			{Kind: modelsim.FaultCloseStream, Events: r.IntN(8), Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultCutMidEvent, Events: r.IntN(8), Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultBadChunk, Events: r.IntN(8), Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultClose, Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultGarbage, Count: 1 + r.IntN(3)},
		}
	}},
	{"full", 2, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{
			{Kind: modelsim.FaultQueueFull, Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultStatus, Status: []int{429, 503}[r.IntN(2)], RetryAfterSeconds: 1},
		}
	}},
	{"erring", 2, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{
			{Kind: modelsim.FaultErrorEvent, Events: r.IntN(8), Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultFinishError, Events: r.IntN(8), Count: 1 + r.IntN(10)},
			{Kind: modelsim.FaultJSONInStream, Count: 1 + r.IntN(3)},
			{Kind: modelsim.FaultEarlyStatus, Status: 500, Count: 1 + r.IntN(5)},
		}
	}},
	{"metrics", 1, func(r *rand.Rand) []modelsim.Fault {
		return []modelsim.Fault{{Kind: []modelsim.FaultKind{modelsim.FaultMetricsHang, modelsim.FaultMetricsGarbage, modelsim.FaultMetricsHuge}[r.IntN(3)]}}
	}},
}

// plan is what happens in a run of this length: the same for the same seed, and for a longer run the same at first.
func plan(seed uint64, length time.Duration) []trouble {
	var out []trouble
	weights := 0
	for _, k := range kinds {
		weights += k.weight
	}
	between := func(r *rand.Rand, lo, hi time.Duration) time.Duration {
		return lo + time.Duration(r.Int64N(int64(hi-lo)))
	}
	for s := range numServers {
		r := rand.New(rand.NewPCG(seed, uint64(s)))
		for at := between(r, 0, time.Second); at < length; {
			n := r.IntN(weights)
			for _, k := range kinds {
				if n -= k.weight; n >= 0 {
					continue
				}
				// Longer than what the gateway waits for, or shorter.
				tr := trouble{at: at, server: s, kind: k.name, lasts: between(r, 100*time.Millisecond, 2500*time.Millisecond)}
				if k.faults != nil {
					tr.faults = k.faults(r)
				}
				out = append(out, tr)
				at += tr.lasts + between(r, 200*time.Millisecond, 3*time.Second)
				break
			}
		}
	}
	slices.SortFunc(out, func(a, b trouble) int { return int(a.at - b.at) })
	return out
}

// tally says how often each kind is in list.
func tally(list []trouble) string {
	count := map[string]int{}
	for _, tr := range list {
		count[tr.kind]++
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(count)) {
		out = append(out, fmt.Sprintf("%s %d", k, count[k]))
	}
	return strings.Join(out, ", ")
}

// A seed that failed can be run again.
func TestPlanIsTheSeeds(t *testing.T) {
	a, again, longer, other := plan(7, time.Minute), plan(7, time.Minute), plan(7, 2*time.Minute), plan(8, time.Minute)
	if !reflect.DeepEqual(a, again) {
		t.Error("the same seed makes two plans")
	}
	if reflect.DeepEqual(a, other) {
		t.Error("another seed makes the same plan")
	}
	if i := slices.IndexFunc(longer, func(tr trouble) bool { return tr.at >= time.Minute }); !reflect.DeepEqual(a, longer[:i]) {
		t.Error("a longer run begins in another way")
	}
	for _, k := range kinds {
		if !slices.ContainsFunc(longer, func(tr trouble) bool { return tr.kind == k.name }) {
			t.Errorf("two minutes without %s: %s", k.name, tally(longer))
		}
	}
}
