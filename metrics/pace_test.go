package metrics

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kvgate/pool"
)

// A paced transport notes when what was asked for, on the clock of a synctest bubble.
type paced struct {
	mu    sync.Mutex
	hosts *hosts
	delay time.Duration
	down  bool
	fail  error // nil when down: the connection is cut
	start time.Time
	at    map[string][]time.Duration // path to times since start
}

func (p *paced) RoundTrip(r *http.Request) (*http.Response, error) {
	p.mu.Lock()
	delay, down, fail := p.delay, p.down, p.fail
	p.at[r.URL.Path] = append(p.at[r.URL.Path], time.Since(p.start))
	p.mu.Unlock()
	time.Sleep(delay)
	if down && fail != nil {
		return nil, fail
	}
	if down {
		return nil, fmt.Errorf("the wire is cut")
	}
	return p.hosts.RoundTrip(r)
}

func (p *paced) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// between counts what was asked for at path from one time to another.
func (p *paced) between(path string, from, to time.Duration) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.at[path] {
		if from <= t && t < to {
			n++
		}
	}
	return n
}

// pace runs a scraper with the default options for as long as script sleeps, in a bubble with its own clock.
func pace(t *testing.T, name, dialect, page string, script func(p *paced, e *pool.Endpoint, table *pool.Table)) {
	t.Helper()
	paceAmong(t, 1, name, dialect, page, script)
}

// paceAmong is pace for one of so many endpoints.
func paceAmong(t *testing.T, endpoints int, name, dialect, page string, script func(p *paced, e *pool.Endpoint, table *pool.Table)) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := &paced{
				hosts: &hosts{answers: map[string]string{"h:8000/metrics": page, "h:8000/v1/models": modelList}},
				start: time.Now(), at: make(map[string][]time.Duration),
			}
			table := pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{})
			es, _, err := table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://h:8000", Name: name, Dialect: dialect}}, 1)
			if err != nil {
				t.Fatal(err)
			}
			o := Options{Now: func() pool.Instant { return pool.Instant(time.Since(p.start)) + 1 }}
			if err := o.fill(); err != nil {
				t.Fatal(err)
			}
			c := newClient(PoolOptions{}, &o)
			c.asker = &netHTTP{transport: p, timeout: o.Timeout}
			var floor atomic.Int64
			floor.Store(int64(endpoints) * int64(time.Second) / pagesPerSecond)
			s := newScraper(table, es[0], &o, c, nil, &floor)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { s.run(ctx) })
			script(p, es[0], table)
			cancel()
			wg.Wait()
		})
	})
}

func TestPace(t *testing.T) {
	const minute = time.Minute
	within := func(t *testing.T, what string, n, low, high int) {
		t.Helper()
		if n < low || n > high {
			t.Errorf("%s: %d; want %d to %d", what, n, low, high)
		}
	}
	// The first scrape comes at once. Where nothing happens the interval grows to 4 s, less up to a fifth.
	pace(t, "calm", "tgi", "tgi_batch_current_size 0\ntgi_queue_size 0\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "at once", p.between("/metrics", 0, 100*time.Millisecond), 1, 1)
		within(t, "pages in a calm minute", p.between("/metrics", minute, 2*minute), 14, 20)
		within(t, "lists in a minute", p.between("/v1/models", minute, 2*minute), 48, 61)
	})
	// Where others send load too it shrinks to 250 ms.
	pace(t, "foreign", "tgi", "tgi_batch_current_size 3\ntgi_queue_size 0\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute of foreign load", p.between("/metrics", minute, 2*minute), 235, 305)
	})
	// What we have booked ourselves is not foreign.
	pace(t, "ours", "tgi", "tgi_batch_current_size 3\ntgi_queue_size 0\n", func(p *paced, _ *pool.Endpoint, table *pool.Table) {
		var b [3]pool.Booking
		for i := range b {
			table.Load().Rows[0].Book(&b[i], pool.Claim{})
		}
		time.Sleep(2 * minute)
		within(t, "pages in a minute of our load", p.between("/metrics", minute, 2*minute), 14, 20)
	})
	pace(t, "short of space", "tgi", "tgi_batch_current_size 0\ntgi_batch_current_max_tokens 90\ntgi_batch_max_total_tokens 100\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute with little room", p.between("/metrics", minute, 2*minute), 235, 305)
	})
	// A page that takes long to come is costly for the server, whatever it says.
	pace(t, "slow page", "tgi", "tgi_batch_current_size 3\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		p.set(func() { p.delay = 100 * time.Millisecond })
		time.Sleep(2 * minute)
		within(t, "slow pages in a minute", p.between("/metrics", minute, 2*minute), 28, 36)
	})
	// Adapters may come and go on the page, unless it says that it takes none.
	pace(t, "adapters", "vllm", "vllm:num_requests_running 0\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute", p.between("/metrics", minute, 2*minute), 48, 61)
	})
	pace(t, "no adapters", "vllm", "vllm:num_requests_running 0\nvllm:lora_requests_info{max_lora=\"0\"} 1.7e9\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute", p.between("/metrics", minute, 2*minute), 14, 20)
		within(t, "lists in a minute", p.between("/v1/models", minute, 2*minute), 12, 16)
	})
	// Where there are many endpoints each is read less often, whatever it says, but no interval gets longer than the longest.
	paceAmong(t, 500, "among 500", "tgi", "tgi_batch_current_size 3\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute", p.between("/metrics", minute, 2*minute), 28, 39)
		within(t, "lists in a minute", p.between("/v1/models", minute, 2*minute), 28, 39)
	})
	paceAmong(t, 5000, "among 5,000", "tgi", "tgi_batch_current_size 3\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		time.Sleep(2 * minute)
		within(t, "pages in a minute", p.between("/metrics", minute, 2*minute), 14, 20)
	})
	// A server that fails is asked less and less often, but at least each 5 s, and at once at full pace when it's back.
	pace(t, "down", "tgi", "tgi_batch_current_size 3\n", func(p *paced, _ *pool.Endpoint, table *pool.Table) {
		p.set(func() { p.down = true })
		time.Sleep(2 * minute)
		within(t, "tries in 3 s", p.between("/metrics", 0, 3*time.Second), 2, 4)
		within(t, "tries in a minute", p.between("/metrics", minute, 2*minute), 11, 16)
		p.set(func() { p.down = false })
		time.Sleep(5 * time.Second)
		if table.Load().Rows[0].ScrapedAt == 0 {
			t.Error("not scraped within 5 s after it came back")
		}
		time.Sleep(minute)
		within(t, "pages in the minute after", p.between("/metrics", 2*minute+5*time.Second, 3*minute+5*time.Second), 235, 305)
	})
	// A hung server is asked no more often than its time-out allows, and one request at a time.
	pace(t, "hung", "tgi", "", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		p.set(func() { p.delay = time.Second; p.down = true })
		time.Sleep(minute)
		within(t, "tries in a minute", p.between("/metrics", 0, minute), 8, 16)
	})
	// A server without a list of models isn't asked for it all the time.
	pace(t, "no list", "tgi", "tgi_batch_current_size 3\n", func(p *paced, _ *pool.Endpoint, _ *pool.Table) {
		p.hosts.mu.Lock()
		delete(p.hosts.answers, "h:8000/v1/models")
		p.hosts.mu.Unlock()
		time.Sleep(2 * minute)
		within(t, "lists in two minutes", p.between("/v1/models", 0, 2*minute), 3, 6)
	})
}

// An endpoint that takes no connections is down after two tries in a row, and up again within 2 s of taking them; one
// failure of a server that was there is none, and a page that hangs says nothing about the server.
func TestUnreachable(t *testing.T) {
	down := func(table *pool.Table) bool { return table.Load().Rows[0].State&pool.Unreachable != 0 }
	for _, f := range []struct {
		name string
		err  error
		down bool
	}{
		{"refused", syscall.ECONNREFUSED, true},
		{"no route", syscall.EHOSTUNREACH, true},
		{"unknown name", &net.DNSError{Err: "no such host", Name: "h", IsNotFound: true}, true},
		{"cut", nil, false},
		{"hung", context.DeadlineExceeded, false},
	} {
		for _, lists := range []bool{true, false} {
			pace(t, fmt.Sprintf("%s, list %v", f.name, lists), "tgi", "tgi_batch_current_size 0\n", func(p *paced, _ *pool.Endpoint, table *pool.Table) {
				if !lists {
					p.hosts.mu.Lock()
					delete(p.hosts.answers, "h:8000/v1/models")
					p.hosts.mu.Unlock()
				}
				time.Sleep(30 * time.Second)
				if down(table) {
					t.Fatal("down from the start")
				}
				p.set(func() { p.down, p.fail = true, f.err })
				time.Sleep(6 * time.Second) // a calm page is read each 4 s
				if down(table) != f.down {
					t.Errorf("down %v after 6 s; want %v", down(table), f.down)
				}
				time.Sleep(2 * time.Minute)
				if down(table) != f.down {
					t.Errorf("down %v after two minutes; want %v", down(table), f.down)
				}
				p.set(func() { p.down = false })
				time.Sleep(2 * time.Second)
				if down(table) {
					t.Error("down 2 s after it came back")
				}
				time.Sleep(4 * time.Second)
				if s := table.Load().Rows[0].State; s&pool.Unmeasured != 0 {
					t.Errorf("state %b; want it to be measured", s)
				}
			})
		}
	}
	pace(t, "one failure", "tgi", "tgi_batch_current_size 0\n", func(p *paced, _ *pool.Endpoint, table *pool.Table) {
		time.Sleep(30 * time.Second)
		for range 20 { // one refusal at a time, whatever it was that was asked for
			p.mu.Lock()
			p.down, p.fail = true, syscall.ECONNREFUSED
			n := len(p.at["/metrics"]) + len(p.at["/v1/models"])
			p.mu.Unlock()
			for asked := n; asked == n; {
				time.Sleep(time.Millisecond)
				p.set(func() { asked = len(p.at["/metrics"]) + len(p.at["/v1/models"]); p.down = asked == n })
			}
			time.Sleep(2 * time.Millisecond)
			s := table.Load().Rows[0].State
			time.Sleep(5 * time.Second)
			if s |= table.Load().Rows[0].State; s&(pool.Unreachable|pool.Unmeasured) != 0 {
				t.Fatalf("state %b after one refusal", s)
			}
		}
	})
	pace(t, "never there", "tgi", "", func(p *paced, e *pool.Endpoint, table *pool.Table) {
		p.set(func() { p.down, p.fail = true, syscall.ECONNREFUSED })
		time.Sleep(time.Second)
		if !down(table) {
			t.Error("not down after the first refusals")
		}
		if !table.SetState(e, pool.Unreachable, false, 2) { // as a request does that gets an answer
			t.Error("nothing to clear")
		}
		time.Sleep(10 * time.Second)
		if !down(table) {
			t.Error("an answered request has the last word, though there are no connections")
		}
	})
}

// Endpoints that start together are not scraped together.
func TestJitterSpreadsEndpoints(t *testing.T) {
	specs := make([]pool.Spec, 100)
	for i := range specs {
		specs[i] = pool.Spec{Pool: "p", URL: fmt.Sprintf("http://10.0.0.%d:8000", i)}
	}
	table := pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{})
	es, _, err := table.SetEndpoints("p", specs, 1)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Now: clock}
	if err := o.fill(); err != nil {
		t.Fatal(err)
	}
	var tenth [10]int
	for _, e := range es {
		s := newScraper(table, e, &o, nil, nil, new(atomic.Int64))
		d := s.jitter(time.Second, 1)
		if d <= 0 || d > time.Second {
			t.Fatalf("first wait %v", d)
		}
		tenth[min(9, int(d/(100*time.Millisecond)))]++
		for range 100 {
			if d := s.jitter(time.Second, jitterShare); d < 800*time.Millisecond || d > time.Second {
				t.Fatalf("interval %v; want 0.8 s to 1 s", d)
			}
		}
	}
	for i, n := range tenth {
		if n < 2 || n > 25 { // 10 expected
			t.Errorf("%d of 100 endpoints start in tenth %d", n, i)
		}
	}
}
