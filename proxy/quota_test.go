package proxy

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/internal/quota"
	"kvgate/pool"
)

// limited has a gate with these limits, of the tenants that keys are of.
func limited(l *quota.Limiter, assumed int64) gateOption {
	return func(g *gate, _ *Options, _ *ServerOptions) {
		g.routes = append(g.routes, func(r *Routes) {
			r.Auth = keys{"a": {Key: "ka", Tenant: "a"}, "b": {Key: "kb", Tenant: "b"}}
			r.Quotas = &Quotas{Limiter: l, AssumedOutputTokens: assumed, Headers: true}
			r.NeedUsage = l.NeedsUsage()
		})
	}
}

func limit(k quota.Kind, n int64, window time.Duration) quota.Limit {
	l := quota.Limit{Tenant: "*", Window: window}
	if k == quota.Concurrent {
		l.Concurrent = n
	} else {
		l.Amounts[k] = n
	}
	return l
}

// used asks how much of a limit is left by what a refusal says.
func used(t *testing.T, l *quota.Limiter, tenant string) int64 {
	t.Helper()
	var ch quota.Charge
	r := l.Take(&ch, nil, tenant, &targetM, quota.Cost{Input: 1 << 40, Output: 1 << 40}, quotaNow())
	if r == nil {
		t.Fatal("no limit of tokens")
	}
	return r.Used
}

var targetM = pool.Target{Name: "m", Base: "m"}

// N requests at once can't overrun a limit; each refusal is a 429 that says when to come again, and headers tell what is left.
func TestQuotaOfRequests(t *testing.T) {
	var running, most atomic.Int64
	m := newMock(t, func(c *call) {
		n := running.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(5 * time.Millisecond) // work takes time
		running.Add(-1)
		chat(c)
	})
	l := quota.New(quota.Options{Limits: []quota.Limit{limit(quota.Requests, 20, time.Hour), limit(quota.Concurrent, 4, time.Hour)}})
	g := newGate(t, []*mock{m}, limited(l, 100))
	var passed, refused atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 10 {
				a := g.do(plainBody, "Authorization: Bearer a")
				switch a.StatusCode {
				case 200:
					passed.Add(1)
				case 429:
					refused.Add(1)
					if a.Header.Get("Retry-After") == "" || !strings.Contains(a.body, `"code":"quota"`) || !strings.Contains(a.body, `"type":"rate_limit_error"`) {
						t.Errorf("%v %s", a.Header, a.body)
					}
				default:
					t.Errorf("%d %s", a.StatusCode, a.body)
				}
			}
		})
	}
	wg.Wait()
	if passed.Load() > 20 || m.requests.Load() != passed.Load() || most.Load() > 4 || passed.Load() < 4 {
		t.Errorf("%d passed, %d refused, %d reached the endpoint, %d at a time", passed.Load(), refused.Load(), m.requests.Load(), most.Load())
	}
	a := g.do(plainBody, "Authorization: Bearer b")
	h := a.Header
	if a.StatusCode != 200 || h.Get("X-Ratelimit-Limit-Requests") != "20" || h.Get("X-Ratelimit-Remaining-Requests") != "19" || h.Get("X-Ratelimit-Reset-Requests") != "3m0s" {
		t.Errorf("%d %v", a.StatusCode, h)
	}
}

// Tokens are charged by what is asked for and corrected by what comes: in whole answers, in streams, in those that the client
// leaves, and not at all where no server did anything.
func TestQuotaOfTokens(t *testing.T) {
	m := newMock(t, chat)
	l := quota.New(quota.Options{Limits: []quota.Limit{limit(quota.TotalTokens, 10_000, 24*time.Hour)}})
	g := newGate(t, []*mock{m}, limited(l, 1000), withNames(names.Options{Aliases: map[string]string{"alias": "m"}}))
	settled := func(what string, want int64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s: %d tokens used, not %d", what, want, used(t, l, "a")), func() bool { return used(t, l, "a") == want })
	}
	ask := func(body string) reply { t.Helper(); return g.do(body, "Authorization: Bearer a") }
	if a := ask(plainBody); a.StatusCode != 200 || a.Header.Get("X-Ratelimit-Limit-Tokens") != "10000" {
		t.Errorf("%d %v", a.StatusCode, a.Header)
	}
	settled("whole", 10)
	if a := ask(streamBody); !strings.Contains(a.body, "three") || strings.Contains(a.body, "usage") {
		t.Errorf("%s", a.body)
	}
	settled("streamed", 20)
	if !bytes.Contains(m.lastCall().body, []byte(`"include_usage":true`)) {
		t.Errorf("usage was not asked for: %s", m.lastCall().body)
	}
	// More than there is is refused with no use; so is a request that the whole limit has no room for.
	if a := ask(`{"model":"m","messages":[],"max_tokens":9990}`); a.StatusCode != 429 || a.Header.Get("Retry-After") == "" || a.Header.Get("X-Ratelimit-Remaining-Tokens") != "9980" {
		t.Errorf("%d %v %s", a.StatusCode, a.Header, a.body)
	}
	if a := ask(`{"model":"m","messages":[],"max_tokens":5000,"n":3}`); a.StatusCode != 429 || a.Header.Get("Retry-After") != "" || !strings.Contains(a.body, "larger than the rate limit") {
		t.Errorf("%d %v %s", a.StatusCode, a.Header, a.body)
	}
	settled("refused", 20)
	// What servers refuse costs no tokens.
	m.setServe(func(c *call) { c.json(400, `{"error":{"message":"bad"}}`) })
	ask(plainBody)
	m.setServe(func(c *call) { c.json(503, `{"error":{"message":"full"}}`) })
	ask(plainBody)
	m.setServe(func(c *call) { c.json(500, `{"error":{"message":"oops"}}`) })
	ask(plainBody)
	m.setServe(func(c *call) { c.reset() })
	ask(plainBody)
	settled("server failed", 20)
	// While a stream runs it is charged what it may come to; a client that leaves pays for what it has got.
	held := make(chan bool)
	m.setServe(func(c *call) {
		c.sse()
		for range 5 {
			c.token("x")
		}
		held <- true
		c.waitClosed(10 * time.Second)
	})
	c := g.dial()
	c.send(post(chatPath, streamBody, "Authorization: Bearer a"))
	<-held
	buf := make([]byte, 1)
	if _, err := c.br.Read(buf); err != nil {
		t.Fatal(err)
	}
	during := used(t, l, "a")
	if during < 1020 {
		t.Errorf("%d tokens used while it runs; want the 1000 that are assumed, and the prompt", during)
	}
	c.Close()
	settled("left", during-1000+5)
	g.booked(0)
}

// A request that falls back is charged for the model that serves it.
func TestQuotaFollowsTheModel(t *testing.T) {
	p, q := newMock(t, func(c *call) { c.json(503, `{"error":{"message":"full"}}`) }), newMock(t, chat)
	byModel := limit(quota.TotalTokens, 1000, 24*time.Hour)
	byModel.PerModel = true
	only := limit(quota.Requests, 1, 24*time.Hour)
	only.Models, only.Patterns = caller.NewModels([]string{"n"}), []string{"n"}
	l := quota.New(quota.Options{Limits: []quota.Limit{byModel, only}})
	g := twoPools(t, p, q, limited(l, 100), withNames(names.Options{Rules: []names.Rule{{Model: "m", Fallback: []string{"n"}}}}))
	if a := g.do(plainBody, "Authorization: Bearer a"); a.StatusCode != 200 || a.Header.Get("X-Kvgate-Fallback") != "n" {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	eventually(t, "nothing of m is used", func() bool { return used(t, l, "a") == 0 })
	// The second one for n is over the limit: it gets what m's endpoint said.
	if a := g.do(plainBody, "Authorization: Bearer a"); a.StatusCode != 503 || q.requests.Load() != 1 {
		t.Errorf("%d %s; n was asked %d times", a.StatusCode, a.body, q.requests.Load())
	}
}
