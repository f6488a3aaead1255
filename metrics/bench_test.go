package metrics

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvgate/internal/shared"
)

// BenchmarkPage reads the largest sample, 590 KB, as a scraper does that has seen the page before.
func BenchmarkPage(b *testing.B) {
	text, err := os.ReadFile(filepath.Join(shared.Dir(b), "metrics-samples", "vllm-0.26-dp16-huge-histograms.prom"))
	if err != nil {
		b.Fatal(err)
	}
	page := string(text)
	d := Lookup("vllm")
	p := newPage(d.want, d)
	body := strings.NewReader("")
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	start := cpuTime(b)
	for b.Loop() {
		body.Reset(page)
		if err := p.read(body, 4<<20, true); err != nil {
			b.Fatal(err)
		}
		if l := d.raw(p, sampleTime).Load(); l.Running != 840 {
			b.Fatalf("running %d", l.Running)
		}
	}
	// The machine may be busy with other things; this is what the page costs.
	b.ReportMetric(float64((cpuTime(b)-start).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// cpuTime is the processor time that this process has used.
func cpuTime(t testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
