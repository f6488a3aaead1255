package telemetry

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

func TestRecentKeepsTheNewest(t *testing.T) {
	d := NewRecent(4)
	if got := d.Last(10, nil); len(got) != 0 {
		t.Errorf("%d requests before the first", len(got))
	}
	buf := []byte("request-0") // as the proxy does: one buffer, used again
	for i := range 10 {
		buf[len(buf)-1] = byte('0' + i)
		r := okRecord(string(buf))
		r.RequestID = string(buf)
		d.Observe(r)
		r.Attempts[0].Outcome = "overwritten"
	}
	got := d.Last(3, nil)
	if len(got) != 3 || got[0].RequestID != "request-9" || got[2].RequestID != "request-7" || got[0].Number != 10 {
		t.Errorf("last three: %+v", got)
	}
	if a := got[0].Attempts; len(a) != 2 || a[0].Outcome != "endpoint_connect" {
		t.Errorf("attempts %+v", a)
	}
	if got := d.Last(100, nil); len(got) != 4 {
		t.Errorf("%d requests from a ring of 4", len(got))
	}
}

// What a reader holds never changes, whatever is written meanwhile.
func TestRecentRecordsAreTheReadersOwn(t *testing.T) {
	d := NewRecent(2)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				v := strings.Repeat(fmt.Sprint(g), 1+i%50)
				r := okRecord(v)
				r.RequestID, r.Path = v, v
				d.Observe(r)
			}
		})
	}
	for range 500 {
		for _, r := range d.Last(2, nil) {
			if r.RequestID != r.Model || r.Path != r.Model || strings.Trim(r.Model, r.Model[:1]) != "" {
				t.Fatalf("torn: %q %q %q", r.RequestID, r.Model, r.Path)
			}
		}
	}
	wg.Wait()
}
