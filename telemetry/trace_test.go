package telemetry

import (
	"strings"
	"testing"
)

func TestTraceparent(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	f := func(header string, continued, sampled bool) {
		t.Helper()
		c, got := NewTrace([]byte(header), 0)
		if got != continued || c.Sampled != sampled {
			t.Errorf("%q: continued %v, sampled %v; want %v, %v", header, got, c.Sampled, continued, sampled)
		}
		if c.TraceID == [16]byte{} || c.SpanID == [8]byte{} || !got && c.ParentID != [8]byte{} {
			t.Errorf("%q: %+v", header, c)
		}
	}
	f(good, true, true)
	f(good[:53]+"00", true, false)
	f(good[:53]+"03", true, true) // flags that are not known yet
	f("01"+good[2:]+"-more", true, true)
	f("01"+good[2:], true, true)
	// Whatever is not right begins a trace of its own.
	f("", false, false)
	f(good+"-more", false, false)
	f("01"+good[2:]+"more", false, false)
	f("ff"+good[2:], false, false)
	f(strings.ToUpper(good), false, false)
	f(good[:54], false, false)
	f("00-00000000000000000000000000000000-b7ad6b7169203331-01", false, false)
	f("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", false, false)
	f("00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01", false, false)
	f(strings.Replace(good, "-", "_", 1), false, false)

	c, _ := NewTrace([]byte(good), 0)
	seen := map[[8]byte]bool{c.SpanID: true, c.ParentID: true}
	for i := range 5 {
		out := string(c.AppendTraceparent(nil, i))
		back, ok := NewTrace([]byte(out), 0)
		if !ok || back.TraceID != c.TraceID || back.ParentID != c.AttemptID(i) || !back.Sampled || seen[back.ParentID] {
			t.Errorf("attempt %d: %s", i, out)
		}
		seen[back.ParentID] = true
	}
	if c, _ := NewTrace(nil, 1); !c.Sampled {
		t.Error("not sampled with a ratio of 1")
	}
	n := 0
	for range 10_000 {
		if c, _ := NewTrace(nil, 0.1); c.Sampled {
			n++
		}
	}
	if n < 800 || n > 1200 {
		t.Errorf("%d of 10,000 sampled with a ratio of 0.1", n)
	}
}

func FuzzTraceparent(f *testing.F) {
	f.Add("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.Add("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x")
	f.Fuzz(func(t *testing.T, s string) {
		c, ok := NewTrace([]byte(s), 0)
		if out := string(c.AppendTraceparent(nil, 0)); len(out) != 55 || ok && out[:36] != "00"+s[2:36] {
			t.Errorf("%q became %q", s, out)
		}
	})
}
