//go:build !race

package openai

import "testing"

func TestPeekDoesNotAllocate(t *testing.T) {
	var r Request
	for name, body := range bodies(t) {
		for _, api := range jsonAPIs {
			if Peek(api, body, &r) != nil || len(r.more) > 0 {
				continue
			}
			if n := testing.AllocsPerRun(50, func() { _ = Peek(api, body, &r) }); n != 0 {
				t.Errorf("%s as %v: %v allocations; want 0", name, api, n)
			}
		}
	}
}
