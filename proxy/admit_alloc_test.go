//go:build !race

package proxy

import (
	"runtime"
	"testing"
)

// A request that finds room costs no more for a pool with admission.
func TestAdmissionAllocatesNothing(t *testing.T) {
	per := func(opts ...gateOption) float64 {
		c := instantGate(t, streamReply, opts...)
		request := []byte(post(chatPath, streamBody))
		loop(t, c.Conn, request, []byte("0\r\n\r\n"), 500)
		var before, after runtime.MemStats
		const n = 2000
		runtime.ReadMemStats(&before)
		loop(t, c.Conn, request, []byte("0\r\n\r\n"), n)
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs-before.Mallocs) / n
	}
	without, with := per(), per(admitting(100))
	t.Logf("%.2f allocations per request without admission, %.2f with it", without, with)
	if with > without+0.1 {
		t.Errorf("%.2f allocations per request with admission; %.2f without", with, without)
	}
}
