package metrics

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/shared"
)

// BenchmarkPage reads the largest sample, 590 KB, as a scraper does that has seen the page before.
func BenchmarkPage(b *testing.B) {
	text, err := os.ReadFile(filepath.Join(shared.Dir(b), "metrics-samples", "vllm-0.26-dp16-huge-histograms.prom"))
	if err != nil {
		b.Fatal(err)
	}
	page := string(text)
	d := Lookup("vllm")
	p := newPage(d.want, d)
	body := strings.NewReader("")
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		body.Reset(page)
		if err := p.read(body, 4<<20, true); err != nil {
			b.Fatal(err)
		}
		if l := d.raw(p, sampleTime).Load(); l.Running != 840 {
			b.Fatalf("running %d", l.Running)
		}
	}
}
