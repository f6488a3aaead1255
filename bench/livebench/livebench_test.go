package livebench_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/bench/livebench"
	"kvgate/bench/policies"
	"kvgate/internal/cli"
)

// The test's binary is kvgate too, so that the processes which a run starts are the code under test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "kvgate" {
		os.Exit(cli.Main(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// A run of some seconds: every request is answered, live times are there beside those of virtual time, and the table has both.
func TestRun(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it starts half a dozen processes")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o := livebench.Options{Binary: []string{self, "kvgate"}, Requests: 40, Servers: 2, Rate: 4, Speedup: 8}
	for _, name := range []string{"auto", "round_robin"} {
		all := append(slices.Clone(policies.Rivals), policies.Auto)
		o.Policies = append(o.Policies, all[slices.IndexFunc(all, func(p policies.Policy) bool { return p.Name == name })])
	}
	rs, err := livebench.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range rs {
		if r.Policy != o.Policies[i].Name || r.Failed != 0 || r.LiveMean <= 0 || r.LiveP99 < r.LiveMean || r.VirtualMean <= 0 {
			t.Errorf("%+v", r)
		}
	}
	var b strings.Builder
	if err := livebench.Write(&b, rs); err != nil || len(rs) != 2 || strings.Count(b.String(), "\n") != 3 || !strings.Contains(b.String(), "round_robin") {
		t.Errorf("%d results, %v:\n%s", len(rs), err, b.String())
	}
}

func TestAgree(t *testing.T) {
	f := func(want bool, margin float64, live, virtual [2]time.Duration) {
		t.Helper()
		rs := []livebench.Result{{LiveMean: live[0], VirtualMean: virtual[0]}, {LiveMean: live[1], VirtualMean: virtual[1]}}
		if got := livebench.Agree(rs, margin); got != want {
			t.Errorf("live %v, virtual %v: %v; want %v", live, virtual, got, want)
		}
	}
	f(true, 0.1, [2]time.Duration{100, 200}, [2]time.Duration{100, 300})
	f(false, 0.1, [2]time.Duration{200, 100}, [2]time.Duration{100, 300})
	f(true, 0.1, [2]time.Duration{105, 100}, [2]time.Duration{100, 300}) // live they are as good as the same
	f(true, 0.1, [2]time.Duration{200, 100}, [2]time.Duration{100, 105})
}
