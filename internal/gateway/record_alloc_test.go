//go:build !race

package gateway

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"kvgate/internal/record"
	"kvgate/telemetry"
)

// A gateway that records nothing does nothing for it, and one that does leaves next to no garbage.
func TestAllocationsOfRecording(t *testing.T) {
	rec := &telemetry.Record{Pool: "p", Served: "m", Outcome: "ok", Endpoint: "p/e", Prefix: make([]uint64, 80), Session: 7}
	var off recordSink
	if n := testing.AllocsPerRun(1000, func() { off.Observe(rec) }); n != 0 {
		t.Errorf("%g allocations without recording", n)
	}
	r, err := record.New(record.Options{File: filepath.Join(t.TempDir(), "r"), QueueBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var on recordSink
	on.rec = r
	on.on.Store(true)
	if n := testing.AllocsPerRun(1000, func() { on.Observe(rec) }); n > 8 {
		t.Errorf("%g allocations for each recorded request", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_ = r.Close(ctx) // what it had to drop does not matter here
}
