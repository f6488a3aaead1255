//go:build !race

package metrics

import (
	"strings"
	"testing"
)

// A page that was seen before is read without allocating, whatever is on it that nobody wants.
func TestReadingAPageAgainDoesNotAllocate(t *testing.T) {
	d := Lookup("vllm")
	p := newPage(d.want, d)
	text := largePage(t)
	r := strings.NewReader("")
	read := func() {
		r.Reset(text)
		if err := p.read(r, 4<<20, true); err != nil {
			t.Fatal(err)
		}
	}
	read()
	// A collection in between may empty the pool of buffers, once or twice in a hundred pages.
	if n := testing.AllocsPerRun(100, read); n > 1 {
		t.Errorf("%v allocations per page; want none", n)
	}
}
