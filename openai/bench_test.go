//go:build unix

package openai

import (
	"syscall"
	"testing"
)

// reportCPU adds the user time per operation to a benchmark: on a machine that
// others use too, wall time says little.
func reportCPU(b *testing.B, run func()) {
	now := func() int64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return u.Utime.Nano()
	}
	start := now()
	for b.Loop() {
		run()
	}
	b.ReportMetric(float64(now()-start)/float64(b.N), "cpu-ns/op")
}
