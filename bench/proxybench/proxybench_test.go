//go:build linux

package proxybench_test

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/bench/proxybench"
	"kvgate/internal/cli"
)

// The test's binary is kvgate too, so that the processes which a run starts are the code under test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "kvgate" {
		os.Exit(cli.Main(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// A tiny run of kvgate alone: every kind of traffic gets through, is counted, and is reported.
func TestRun(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it starts half a dozen processes")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var r *proxybench.Report
	// A window of a quick run is a fraction of a second: on a machine that is busy with something else, nothing may get
	// through in one of them. Three in a row is a fault.
	for range 3 {
		var progress bytes.Buffer
		r, err = proxybench.Run(t.Context(), proxybench.Options{
			Self: []string{self, "kvgate"}, Dir: t.TempDir(), Quick: true, Progress: &progress,
			Scenarios: []string{"1KB", "1KB-1000rps", "SSE", "SSE-5000", "connect", "TLS"}, Candidates: []string{"kvgate 64"},
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, progress.String())
		}
		if !slices.ContainsFunc(r.Samples, func(s proxybench.Sample) bool { return s.Requests == 0 && s.Chunks == 0 }) {
			break
		}
	}
	found := map[string]bool{}
	for _, s := range r.Samples {
		found[s.Scenario+" "+s.Candidate] = true
		if s.Requests == 0 && s.Chunks == 0 {
			t.Errorf("%s, %s: no requests", s.Scenario, s.Candidate)
		}
		if s.CPUSeconds <= 0 {
			t.Errorf("%s, %s: no processor time", s.Scenario, s.Candidate)
		}
		if strings.HasPrefix(s.Scenario, "SSE") && s.Chunks == 0 {
			t.Errorf("%s, %s: no chunks", s.Scenario, s.Candidate)
		}
		if s.Scenario == "1KB-1000rps" && (s.Seconds < 0.1 || s.P50 <= 0 || s.P50 > s.P999) {
			t.Errorf("latencies %v %v %v in %v s", s.P50, s.P99, s.P999, s.Seconds)
		}
	}
	for _, name := range []string{"1KB kvgate 64", "1KB-1000rps kvgate 64", "SSE kvgate 64", "SSE-5000 kvgate 64", "connect kvgate 64", "TLS kvgate 64"} {
		if !found[name] {
			t.Errorf("%s was not measured", name)
		}
	}
	for name, write := range map[string]func(*bytes.Buffer) error{
		"text": func(b *bytes.Buffer) error { return r.WriteText(b) }, "markdown": func(b *bytes.Buffer) error { return r.WriteMarkdown(b) },
		"CSV": func(b *bytes.Buffer) error { return r.WriteCSV(b) },
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(b.String(), "kvgate 64") {
			t.Errorf("%s: no line of kvgate in\n%s", name, b.String())
		}
	}
}

func TestUnknownNames(t *testing.T) {
	for _, o := range []proxybench.Options{{Scenarios: []string{"3KB"}}, {Candidates: []string{"kvgate 65"}}} {
		o.Self = []string{"kvgate"}
		if _, err := proxybench.Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "there are") {
			t.Errorf("%+v: %v; want an error that says what there is", o, err)
		}
	}
}

// Medians are of rounds, and ratios of what was measured in the same round.
func TestLines(t *testing.T) {
	r := &proxybench.Report{}
	for round, cpu := range []float64{2, 4, 9} {
		for name, factor := range map[string]float64{"nginx": 1, "kvgate 64": float64(1 + round)} {
			r.Samples = append(r.Samples, proxybench.Sample{Scenario: "1KB", Candidate: name, Round: round, Seconds: 2, Requests: 1000, CPUSeconds: cpu / 1000 * factor})
		}
	}
	lines := r.Lines()
	if len(lines) != 2 || lines[0].Candidate != "nginx" || lines[1].Candidate != "kvgate 64" {
		t.Fatalf("%+v", lines)
	}
	f := func(what string, got proxybench.Spread, median, least, most float64) {
		t.Helper()
		for _, x := range [][2]float64{{got.Median, median}, {got.Min, least}, {got.Max, most}} {
			if d := x[0] - x[1]; d > 1e-9 || d < -1e-9 {
				t.Errorf("%s: %+v; want %v, %v to %v", what, got, median, least, most)
				return
			}
		}
	}
	f("nginx", lines[0].CPU, 4, 2, 9)
	f("kvgate", lines[1].CPU, 8, 2, 27)
	f("ratio", lines[1].Ratio, 2, 1, 3)
	f("requests per second", lines[0].RPS, 500, 500, 500)
}

func TestPlot(t *testing.T) {
	r := &proxybench.Report{Samples: []proxybench.Sample{
		{Scenario: "1KB", Candidate: "nginx", Seconds: 1, Requests: 10, CPUSeconds: 0.1},
		{Scenario: "1KB", Candidate: "kvgate 64", Seconds: 1, Requests: 10, CPUSeconds: 0.1},
	}}
	began := time.Now()
	file, err := r.Plot(t.TempDir(), "svg")
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil || !bytes.Contains(b, []byte("<svg")) || !bytes.Contains(b, []byte("kvgate 64")) {
		t.Errorf("%v; no plot of kvgate in %d bytes after %v", err, len(b), time.Since(began))
	}
}

// What a small request costs, counted and not timed: this holds on any machine. The floor is two system calls that write
// and two that read; beside them one recv, the live check of the kept connection. Scrapes of the endpoints are in the numbers
// too, hence the room.
func TestCostPerRequest(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it starts processes and takes seconds")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, err := proxybench.Run(t.Context(), proxybench.Options{
		Self: []string{self, "kvgate"}, Dir: t.TempDir(), Rounds: 1, Window: time.Second,
		Scenarios: []string{"1KB", "SSE"}, Candidates: []string{"kvgate 8"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range r.Lines() {
		reads, writes := 2.6, 2.3 // per request
		allocations := 6.0
		if l.Scenario == "SSE" {
			reads, writes = 1.3, 1.2 // per chunk
			allocations = 30
		}
		t.Logf("%s: %.2f reads, %.2f writes, %.2f allocations", l.Scenario, l.Reads.Median, l.Writes.Median, l.Allocations.Median)
		if l.Reads.Median > reads || l.Writes.Median > writes {
			t.Errorf("%s: %.2f reads and %.2f writes; want at most %.1f and %.1f", l.Scenario, l.Reads.Median, l.Writes.Median, reads, writes)
		}
		if raceEnabled {
			continue
		}
		if l.Allocations.Median > allocations {
			t.Errorf("%s: %.2f allocations per request; want at most %.0f", l.Scenario, l.Allocations.Median, allocations)
		}
		if l.Errors > 0 {
			t.Errorf("%s: %d errors", l.Scenario, l.Errors)
		}
	}
}
