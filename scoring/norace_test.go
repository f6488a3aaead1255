//go:build !race

package scoring

import (
	"testing"

	"kvgate/pool"
)

const raceDetector = false

func TestChooseDoesNotAllocate(t *testing.T) {
	everyPolicy(t, func(t *testing.T, c Config) {
		c.Index = NewIndex(1 << 20)
		s := newTable(t, 64, nil).Load()
		p := newPolicy(t, c)
		var b pool.Booking
		for _, model := range []string{"m", "a1"} {
			req := prompt(s, text(1, 8000))
			req.Target = s.TargetString(model)
			req.Session = 5
			if n := testing.AllocsPerRun(200, func() {
				req.Prefix[20]++ // another prompt each time
				d, err := p.Choose(req, s, second0+1, &b)
				if err != nil {
					t.Fatal(err)
				}
				p.FirstToken(&d, 1e8)
				b.End()
				p.End(&d, Usage{PromptTokens: 2000, CachedTokens: 100, OutputTokens: 100, Duration: 1e9})
			}); n != 0 {
				t.Errorf("%s: %v allocations per decision; want 0", model, n)
			}
		}
	})
}

func TestHashPrefixDoesNotAllocate(t *testing.T) {
	body := text(1, 100_000)
	dst := make([]uint64, 0, 1024)
	if n := testing.AllocsPerRun(100, func() {
		dst = HashPrefix(dst[:0], 1, body[:1000], body[1000:1001], body[1001:])
	}); n != 0 {
		t.Errorf("%v allocations; want 0", n)
	}
}
