package httpcases

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Options says how Play runs cases. The zero value runs all of them.
type Options struct {
	// Skip says which cases to leave out; nil: none.
	Skip func(*Case) bool
	// Workers is how many proxies, each with its own backend, play cases side by side;
	// default 8. Playing is waiting for the most part.
	Workers int
	// Runner holds the bounds; zero durations have defaults.
	Runner Runner
	// OnlyBehind ignores what the client gets and looks at what reaches the backend: for
	// chains of proxies, where the first answers as it likes.
	OnlyBehind bool
}

// Play plays cases through proxies started by start, which is given the address of
// the one backend and returns the proxy's. It fails t for every case that fails, and
// returns how many passed and how many failed.
func Play(t *testing.T, o Options, start func(t *testing.T, backendAddr string) (proxyAddr string)) (passed, failed int) {
	t.Helper()
	all, err := Cases()
	if err != nil {
		t.Fatal(err)
	}
	if o.Skip != nil {
		all = slices.DeleteFunc(all, func(c Case) bool { return o.Skip(&c) })
	}
	// Slow cases first, or the last worker would still be waiting when all others are done.
	slices.SortStableFunc(all, func(a, b Case) int {
		switch {
		case a.Slow == b.Slow:
			return 0
		case a.Slow:
			return -1
		}
		return 1
	})
	if o.Workers == 0 {
		o.Workers = 8
	}
	work := make(chan *Case)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range min(o.Workers, len(all)) {
		b, err := NewBackend("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Close)
		r := o.Runner
		r.Backend = b
		r.Proxy = start(t, b.Addr())
		r.setDefaults()
		if err := r.Warm(30 * time.Second); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for c := range work {
				res := r.Run(c)
				good := res.Pass
				reasons := res.Reasons
				if o.OnlyBehind {
					good, reasons = len(res.Behind) == 0, res.Behind
				}
				mu.Lock()
				if good {
					passed++
				} else {
					failed++
					t.Errorf("%s %s %s (RFC %s)\n\t%s\n\tgot: %s", c.ID, c.Level, c.Title, c.RFC, strings.Join(reasons, "\n\t"), res.Got)
				}
				mu.Unlock()
			}
		})
	}
	for i := range all {
		work <- &all[i]
	}
	close(work)
	wg.Wait()
	t.Logf("%d passed, %d failed", passed, failed)
	return passed, failed
}

func (r *Runner) setDefaults() {
	for _, d := range []struct {
		p *time.Duration
		v time.Duration
	}{
		{&r.Timeout, 2500 * time.Millisecond},
		{&r.Recover, 10 * time.Second},
		{&r.HeaderTimeout, 12 * time.Second},
		{&r.BodyTimeout, 35 * time.Second},
		{&r.IdleTimeout, 95 * time.Second},
	} {
		if *d.p == 0 {
			*d.p = d.v
		}
	}
}

// Warm waits until the proxy serves sound requests.
func (r *Runner) Warm(patience time.Duration) error {
	w := *r
	w.setDefaults()
	w.Recover = patience
	if _, bad := w.canary(2); bad != "" {
		return fmt.Errorf("the proxy at %s does not serve a plain request: %s", r.Proxy, bad)
	}
	return nil
}
