package proxy

import (
	"strings"
	"testing"
)

const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// told returns what the endpoint is told of the trace.
func told(m *mock) (parents, states []string) {
	h := m.lastCall().req.Header
	return h.Values("Traceparent"), h.Values("Tracestate")
}

func TestTraceContextIsPassedOn(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m}, withOptions(func(o *Options, _ *ServerOptions) { o.Trace, o.TraceRatio = true, 0 }))
	n := 0
	f := func(continued, sampled bool, fields ...string) {
		t.Helper()
		if a := g.do(plainBody, fields...); a.StatusCode != 200 {
			t.Fatalf("%d %s", a.StatusCode, a.body)
		}
		n++
		r := g.sink.wait(t, n)[n-1]
		parents, states := told(m)
		if len(parents) != 1 || parents[0] != string(r.Trace.AppendTraceparent(nil, 0)) || r.Trace.Sampled != sampled {
			t.Errorf("%q: the endpoint got %q, the record has %+v", fields, parents, r.Trace)
		}
		if got := strings.HasPrefix(parents[0], traceparent[:36]); got != continued {
			t.Errorf("%q: continued %v; want %v", fields, got, continued)
		}
		if !continued && len(states) > 0 || continued && len(states) != 1 {
			t.Errorf("%q: tracestate %q", fields, states)
		}
	}
	f(true, true, "traceparent: "+traceparent, "tracestate: a=1,b=2")
	f(true, false, "TraceParent: "+traceparent[:53]+"00", "tracestate: a=1")
	f(false, false)
	f(false, false, "traceparent: 00-abc-def-01", "tracestate: a=1")
	f(false, false, "traceparent: "+traceparent, "traceparent: "+traceparent)
}

func TestWithoutTracingHeadersGoThrough(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	g.do(plainBody, "traceparent: 00-abc", "tracestate: a=1")
	parents, states := told(m)
	if len(parents) != 1 || parents[0] != "00-abc" || len(states) != 1 || states[0] != "a=1" {
		t.Errorf("the endpoint got %q and %q", parents, states)
	}
	if r := g.sink.wait(t, 1)[0]; r.Trace.Sampled || r.Trace.TraceID != [16]byte{} {
		t.Errorf("a trace: %+v", r.Trace)
	}
}
