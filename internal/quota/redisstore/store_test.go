package redisstore

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/internal/caller"
	"kvgate/internal/quota"
	"kvgate/pool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A server is a Redis or Valkey of this machine's, on a Unix socket.
type server struct {
	t    testing.TB
	bin  string
	sock string
	cmd  *exec.Cmd
}

// binary is the server that is installed. Where there is none, the test is skipped, and fails in CI, which installs one.
func binary(t testing.TB) string {
	t.Helper()
	for _, name := range []string{"redis-server", "valkey-server"} {
		if p, err := exec.LookPath(name); err == nil {
			return p
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("redis-server is not installed")
	}
	t.Skip("redis-server is not installed; apt-get install redis-server")
	return ""
}

func newServer(t testing.TB) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvgate") // short, as the name of a socket must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &server{t: t, bin: binary(t), sock: filepath.Join(dir, "s")}
	s.up()
	t.Cleanup(s.down)
	return s
}

func (s *server) up() {
	s.t.Helper()
	s.cmd = exec.Command(s.bin, "--port", "0", "--unixsocket", s.sock, "--save", "", "--appendonly", "no", "--dir", filepath.Dir(s.sock))
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	eventually(s.t, "the server listens", func() bool {
		c, err := net.Dial("unix", s.sock)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func (s *server) down() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

func (s *server) store(o Options) *Store {
	s.t.Helper()
	o.URL = "unix://" + s.sock
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second // this machine may be busy
	}
	st, err := New(o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(st.Close)
	return st
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

var llama = &pool.Target{Name: "llama", Base: "llama"}

func limit(k quota.Kind, n int64) quota.Limit {
	l := quota.Limit{Tenant: "*", Window: time.Hour}
	l.Amounts[k] = n
	return l
}

func now() int64 { return time.Now().UnixNano() }

// Several gateways, whose requests run at the same time, together take no more than there is, and see what the others have
// used and given back.
func TestShared(t *testing.T) {
	s := newServer(t)
	limits := []quota.Limit{limit(quota.Requests, 300), limit(quota.TotalTokens, 20_000)}
	var gateways []*quota.Limiter
	var stores []*Store
	for range 3 {
		st := s.store(Options{Prefix: "kvgate:"})
		stores = append(stores, st)
		gateways = append(gateways, quota.New(quota.Options{Limits: limits, Store: st}))
	}
	var passed, tokens atomic.Int64
	var wg sync.WaitGroup
	for _, l := range gateways {
		for range 4 {
			wg.Go(func() {
				var ch quota.Charge
				for range 50 {
					if l.Take(&ch, nil, "a", llama, quota.Cost{Input: 20, Output: 40}, now()) != nil {
						ch.Reset()
						continue
					}
					passed.Add(1)
					tokens.Add(60)
					ch.Settle(quota.Cost{Input: 20, Output: 40}, true, now())
				}
			})
		}
	}
	wg.Wait()
	if n := passed.Load(); n < 299 || n > 301 || tokens.Load() > 20_100 { // an hour's limit gives one back every 12 s
		t.Errorf("%d requests, %d tokens passed; want 300", n, tokens.Load())
	}
	var ch quota.Charge
	r := gateways[1].Take(&ch, nil, "a", llama, quota.Cost{}, now())
	if r == nil || r.Kind != quota.Requests || r.Used < 298 || r.Wait <= 0 || r.Wait > 13*time.Second {
		t.Fatalf("%+v", r)
	}
	if h := string(ch.AppendHeaders(nil, now())); !strings.Contains(h, "x-ratelimit-remaining-requests: 0\r\n") {
		t.Errorf("%s", h)
	}
	ch.Reset()
	// What one gives back another one has.
	big := quota.Cost{Output: 19_000}
	if r := gateways[0].Take(&ch, nil, "b", llama, big, now()); r != nil {
		t.Fatal(r)
	}
	var other quota.Charge
	if r := gateways[2].Take(&other, nil, "b", llama, big, now()); r == nil || r.Kind != quota.TotalTokens {
		t.Fatalf("%v", r)
	}
	other.Reset()
	ch.Settle(quota.Cost{Output: 10}, true, now())
	eventually(t, "it is given back", func() bool {
		if gateways[2].Take(&other, nil, "b", llama, big, now()) == nil {
			other.Settle(quota.Cost{}, false, now())
			return true
		}
		other.Reset()
		return false
	})
	// A corrected charge outlives its gateway: Close sends what waits.
	if r := gateways[0].Take(&ch, nil, "c", llama, big, now()); r != nil {
		t.Fatal(r)
	}
	ch.Settle(quota.Cost{Output: 19_999}, true, now())
	stores[0].Close()
	if r := gateways[1].Take(&ch, nil, "c", llama, quota.Cost{Output: 900}, now()); r == nil {
		t.Error("the correction was lost")
	}
	for _, st := range stores {
		if st.lost.Load() != 0 {
			t.Errorf("%d corrections were lost", st.lost.Load())
		}
	}
}

// A server that goes away makes no request wait longer than the timeout, and only the first ones; then each gateway limits by
// itself, or refuses, as it is told. When the server is back it is asked again.
func TestAway(t *testing.T) {
	s := newServer(t)
	var states []bool
	var mu sync.Mutex
	st := s.store(Options{Timeout: 200 * time.Millisecond, OnState: func(up bool, _ error) {
		mu.Lock()
		states = append(states, up)
		mu.Unlock()
	}})
	limits := []quota.Limit{limit(quota.Requests, 10)}
	open := quota.New(quota.Options{Limits: limits, Store: st})
	closed := quota.New(quota.Options{Limits: limits, Store: st, Closed: true})
	take := func(l *quota.Limiter, tenant string) *quota.Refusal {
		var ch quota.Charge
		r := l.Take(&ch, nil, tenant, llama, quota.Cost{}, now())
		ch.Settle(quota.Cost{}, true, now())
		return r
	}
	eventually(t, "the first look succeeds", func() bool { return take(open, "warm") == nil && !st.away.Load() })
	// It hangs: stopped, its socket still takes connections.
	if err := s.cmd.Process.Signal(stop); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for i := range 200 {
		if i < 9 {
			if r := take(open, "a"); r != nil {
				t.Fatalf("open: %v", r)
			}
		}
		if r := take(closed, "a"); r == nil || !r.Unchecked {
			t.Fatalf("closed: %v", r)
		}
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("209 requests took %v while the server hung", took)
	}
	for range 5 {
		take(open, "a")
	}
	if r := take(open, "a"); r == nil || r.Kind != quota.Requests {
		t.Errorf("nothing limits while the server hangs: %v", r)
	}
	if err := s.cmd.Process.Signal(resume); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is asked again", func() bool { return take(closed, "b") == nil })
	s.down()
	eventually(t, "it is missed", func() bool { r := take(closed, "c"); return r != nil && r.Unchecked })
	s.up()
	eventually(t, "it is asked again", func() bool { return take(closed, "d") == nil })
	mu.Lock()
	defer mu.Unlock()
	if fmt.Sprint(states[:4]) != "[false true false true]" {
		t.Errorf("states %v", states)
	}
}

func TestBadURL(t *testing.T) {
	if _, err := New(Options{URL: "redis://user:planted@h:notaport"}); err == nil || strings.Contains(err.Error(), "planted") {
		t.Errorf("%v", err)
	}
}

func BenchmarkTake(b *testing.B) {
	s := newServer(b)
	l := quota.New(quota.Options{Limits: []quota.Limit{limit(quota.Requests, 1e9), limit(quota.TotalTokens, 1e9)}, Store: s.store(Options{})})
	c := &caller.Caller{Key: "k", Tenant: "a"}
	var ch quota.Charge
	b.ReportAllocs()
	for b.Loop() {
		if r := l.Take(&ch, c, "a", llama, quota.Cost{Input: 10, Output: 10}, now()); r != nil {
			b.Fatal(r)
		}
		ch.Settle(quota.Cost{Input: 10, Output: 5}, true, now())
	}
}
