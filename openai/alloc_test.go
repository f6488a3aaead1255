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

func TestStreamDoesNotAllocate(t *testing.T) {
	var s Stream
	for _, c := range sseSamples(t) {
		for _, size := range []int{len(c.body), 100} {
			run := func() {
				s.Reset()
				for p := c.body; len(p) > 0; {
					n := min(size, len(p))
					s.Feed(p[:n])
					p = p[n:]
				}
				s.Finish()
				_, _, _, _ = s.Complete(), s.Usage(), s.ID(), s.Terminal()
			}
			if n := testing.AllocsPerRun(10, run); n != 0 {
				t.Errorf("%s in pieces of %d: %v allocations; want 0", c.file, size, n)
			}
		}
	}
}

func TestJSONScanDoesNotAllocate(t *testing.T) {
	var j JSONScan
	body := []byte(`{"id":"chatcmpl-1","choices":[{"message":{"content":"a\"\u00e9"},"finish_reason":"st\u006fp"}],"usage":{"prompt_tokens":31,"completion_tokens":7}}`)
	run := func() {
		j.Reset()
		for i := range body {
			j.Feed(body[i : i+1])
		}
		_, _, _ = j.Complete(), j.Usage(), j.ID()
	}
	if n := testing.AllocsPerRun(10, run); n != 0 {
		t.Errorf("%v allocations; want 0", n)
	}
}

func TestFindRouteDoesNotAllocate(t *testing.T) {
	get, path := []byte("GET"), []byte("/v1/responses/resp_1")
	if n := testing.AllocsPerRun(10, func() { FindRoute(get, path) }); n != 0 {
		t.Errorf("%v allocations; want 0", n)
	}
}

func TestAppendErrorDoesNotAllocate(t *testing.T) {
	buf := make([]byte, 0, 512)
	e := &APIError{Status: 502, Type: "server_error", Code: "endpoint_reset", Message: "the answer was cut off"}
	if n := testing.AllocsPerRun(10, func() { buf = AppendStreamError(buf[:0], Messages, true, e) }); n != 0 {
		t.Errorf("%v allocations; want 0", n)
	}
}
