package cli

import (
	"bytes"
	"strings"
	"testing"

	"kvgate/pool"
)

// What an endpoint said before it went down, or longer ago than a load is believed, is not shown as what it does now.
func TestEndpointTableShowsNoOldLoad(t *testing.T) {
	f := func(state string, stale bool, want string) {
		t.Helper()
		v := pool.EndpointView{ID: "p/a", Dialect: "vllm", State: []string{state}, Load: pool.LoadView{
			Known: true, KVCacheUtilization: new(0.25), KVCapacityTokens: new(int64(1000)), Running: new(int32(2)), Waiting: new(int32(1)),
			Adapters: []string{"sql"}, MaxAdapters: new(int32(4)), ScrapeAgeSeconds: new(14.0), Stale: stale,
		}, Booked: pool.BookedView{Requests: 3, PendingTokens: 70}}
		var b bytes.Buffer
		endpointTable(&b, []pool.EndpointView{v})
		_, row, _ := strings.Cut(b.String(), "\n")
		if got := strings.Join(strings.Fields(row), " "); got != want {
			t.Errorf("%s, stale %v: %q; want %q", state, stale, got, want)
		}
	}
	f("up", false, "p/a vllm up 25% 1000 2 1 1/4 3 70 14.0s")
	f("unmeasured", true, "p/a vllm unmeasured ? ? ? ? ? 3 70 14.0s (stale)")
	f("down", false, "p/a vllm down ? ? ? ? ? 3 70 14.0s")
	f("down", true, "p/a vllm down ? ? ? ? ? 3 70 14.0s (stale)")
}
