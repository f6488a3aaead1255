//go:build !race

package telemetry

import (
	"io"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func TestObservingDoesNotAllocate(t *testing.T) {
	m := New(Options{})
	l := &AccessLog{Logger: zap.New(NewLogCore("json", zapcore.AddSync(io.Discard), zapcore.InfoLevel))}
	d := NewRecent(8)
	r := okRecord("m")
	for name, s := range map[string]Sink{"metrics": m, "access log": l, "recent": d, "all": Sinks{m, l, d}} {
		s.Observe(r)
		if n := testing.AllocsPerRun(1000, func() { s.Observe(r) }); n != 0 {
			t.Errorf("%s: %v allocations per request; want 0", name, n)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	m := New(Options{})
	l := &AccessLog{Logger: zap.New(NewLogCore("json", zapcore.AddSync(io.Discard), zapcore.InfoLevel))}
	r := okRecord("m")
	b.Run("metrics", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			m.Observe(r)
		}
	})
	b.Run("access", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			l.Observe(r)
		}
	})
	d := NewRecent(256)
	b.Run("recent", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			d.Observe(r)
		}
	})
}
