package proxy

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const soakClients = 24

// Servers that fail at random in every way there is, under many clients, some of whom leave: no answer is anyone else's,
// none looks complete that isn't, nothing stays booked, and no goroutine stays behind. KVGATE_SOAK sets the duration,
// KVGATE_SOAK_SEED what happens.
func TestFaultSoak(t *testing.T) {
	duration := time.Second
	if d, err := time.ParseDuration(os.Getenv("KVGATE_SOAK")); err == nil {
		duration = d
	}
	var seed uint64 = 1
	_, _ = fmt.Sscan(os.Getenv("KVGATE_SOAK_SEED"), &seed)
	goroutines := runtime.NumGoroutine()

	var executed sync.Map // nonce → times that a mock began to answer it
	nonce := func(c *call) string {
		_, after, _ := strings.Cut(string(c.body), "nonce-")
		n, _, _ := strings.Cut(after, `"`)
		return n
	}
	script := func(i int) func(*call) {
		var mu sync.Mutex
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		return func(c *call) {
			mu.Lock()
			fate, at := r.IntN(100), r.IntN(4)
			mu.Unlock()
			id := nonce(c)
			stream := strings.Contains(string(c.body), "stream")
			switch {
			case fate < 4:
				c.json(503, `{"error":"overloaded"}`)
				return
			case fate < 6:
				c.reset()
				return
			case fate < 8:
				c.waitClosed(5 * time.Second)
				return
			case fate < 10:
				c.raw("garbage\r\n\r\n")
				c.done = true
				return
			}
			times, _ := executed.LoadOrStore(id, new(atomic.Int64))
			times.(*atomic.Int64).Add(1)
			if !stream {
				body := fmt.Sprintf(`{"id":"x","nonce":"nonce-%s","choices":[]}`, id)
				switch {
				case fate < 13:
					c.json(500, body)
				case fate < 16:
					c.raw(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body[:10]))
					c.reset()
				case fate < 19: // an answer with another one behind it that nobody asked for
					extra := "HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n" + `{"nonce":"nonce-evil"}`
					c.raw(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s%s", len(body), body, extra))
				default:
					c.json(200, body)
				}
				return
			}
			c.sse()
			for k := range 4 {
				if k == at {
					switch {
					case fate < 14:
						c.reset()
						return
					case fate < 17:
						c.raw("xyz\r\n")
						c.done = true
						return
					case fate < 19:
						c.waitClosed(5 * time.Second)
						return
					case fate < 22:
						c.event(`{"error":{"message":"boom","code":500}}`)
					}
				}
				c.token("nonce-" + id)
			}
			c.finish()
		}
	}
	mocks := []*mock{newMock(t, script(0)), newMock(t, script(1)), newMock(t, script(2))}
	g := newGate(t, mocks, withPool(func(o *PoolOptions) {
		o.Timeouts = Timeouts{Connect: time.Second, FirstToken: 200 * time.Millisecond, Idle: 200 * time.Millisecond, Total: 400 * time.Millisecond}
		o.Health = HealthOptions{BasePause: 20 * time.Millisecond, MaxPause: 100 * time.Millisecond}
	}))
	stop := time.Now().Add(duration)
	ended := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { // fault 38: at every moment, retries are within their budget
		limit := int64(retryBudget(&g.o.Retry, soakClients))
		for {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
			if n := g.h.retrying.Load(); n > limit {
				t.Errorf("%d requests are being retried; want %d at most", n, limit)
				return
			}
		}
	})
	var wg sync.WaitGroup
	var sent, whole, failed, cut, left atomic.Int64
	for w := range soakClients {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(100+w)))
			var c *client
			for i := 0; time.Now().Before(stop); i++ {
				if c == nil {
					c = g.dial()
				}
				id := fmt.Sprintf("%d-%d", w, i)
				stream := r.IntN(2) == 0
				body := fmt.Sprintf(`{"model":"m","messages":[],"stop":"nonce-%s"}`, id)
				if stream {
					body = fmt.Sprintf(`{"model":"m","messages":[],"stream":true,"stop":"nonce-%s"}`, id)
				}
				c.send(post(chatPath, body))
				sent.Add(1)
				if r.IntN(20) == 0 { // leave
					time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
					c.Close()
					c = nil
					left.Add(1)
					continue
				}
				a := c.read()
				if strings.Count(a.body, "nonce-") != strings.Count(a.body, "nonce-"+id+`"`) {
					t.Errorf("request %s got an answer of another one: %q", id, a.body)
				}
				switch {
				case a.err != nil:
					cut.Add(1)
					if strings.Contains(a.body, "[DONE]") {
						t.Errorf("a cut stream says [DONE]: %q", a.body)
					}
				case a.StatusCode != 200:
					failed.Add(1)
				case stream && (strings.Count(a.body, "nonce-") != 4 || !strings.HasSuffix(a.body, "data: [DONE]\n\n")), !stream && !strings.HasSuffix(a.body, "[]}"):
					t.Errorf("an answer looks complete and isn't: %q", a.body)
				default:
					whole.Add(1)
				}
				if a.err != nil || a.Close {
					c.Close()
					c = nil
				}
			}
			if c != nil {
				c.Close()
			}
		})
	}
	wg.Wait()
	close(ended)
	watching.Wait()
	executed.Range(func(id, n any) bool {
		if n.(*atomic.Int64).Load() > 1 {
			t.Errorf("request %v was executed %d times", id, n.(*atomic.Int64).Load())
		}
		return true
	})
	g.booked(0)
	g.sink.wait(t, int(sent.Load()))
	if n := len(g.sink.wait(t, 0)); int64(n) != sent.Load() {
		t.Errorf("%d requests, %d records", sent.Load(), n)
	}
	g.close()
	for _, m := range mocks {
		m.kill()
	}
	eventually(t, "the goroutines to end", func() bool { return runtime.NumGoroutine() <= goroutines+2 })
	t.Logf("%d sent: %d whole, %d failed, %d cut, %d left", sent.Load(), whole.Load(), failed.Load(), cut.Load(), left.Load())
	if whole.Load() == 0 || cut.Load() == 0 || failed.Load() == 0 {
		t.Error("the soak did not reach every kind of end")
	}
}
