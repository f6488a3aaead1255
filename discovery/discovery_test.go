package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is an Apply that remembers.
type recorder struct {
	mu    sync.Mutex
	calls []string
	sets  map[string][]Target
}

func (r *recorder) apply(pool string, targets []Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sets == nil {
		r.sets = make(map[string][]Target)
	}
	r.sets[pool] = targets
	r.calls = append(r.calls, pool+"="+urls(targets))
}

// take returns the calls since the last take.
func (r *recorder) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.calls) <= 2 { // pools may come in either order
		slices.Sort(r.calls)
	}
	out := strings.Join(r.calls, " ")
	r.calls = nil
	return out
}

func (r *recorder) set(pool string) []Target {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sets[pool]
}

func urls(ts []Target) string {
	var out []string
	for _, t := range ts {
		out = append(out, strings.TrimPrefix(t.URL, "http://"))
	}
	return strings.Join(out, ",")
}

func newManager(t *testing.T, r *recorder, log *zap.Logger) *Manager {
	t.Helper()
	m, err := New(Options{Apply: r.apply, Log: log, Env: Env{Dialects: []string{"auto", "vllm"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func staticPool(name string, hosts ...string) config.Pool {
	p := config.Pool{Name: name, Dialect: "auto"}
	for _, h := range hosts {
		p.Discovery.Static = append(p.Discovery.Static, config.Endpoint{URL: "http://" + h, Weight: 1})
	}
	return p
}

// A fake is a source that the test speaks through. Its registration is the test's alone.
type fake struct {
	emit    chan func(func([]Target, error)) error
	started atomic.Int32
	running atomic.Int32
}

func (f *fake) Name() string { return "fake" }

func (f *fake) Run(ctx context.Context, emit func([]Target, error)) error {
	f.started.Add(1)
	f.running.Add(1)
	defer f.running.Add(-1)
	for {
		select {
		case do := <-f.emit:
			if err := do(emit); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

func (f *fake) send(hosts ...string) {
	f.emit <- func(emit func([]Target, error)) error { emit(targets(hosts...), nil); return nil }
}

func (f *fake) fail(text string) {
	f.emit <- func(emit func([]Target, error)) error { emit(nil, errors.New(text)); return nil }
}

func targets(hosts ...string) (out []Target) {
	for _, h := range hosts {
		out = append(out, Target{URL: "http://" + h})
	}
	return out
}

// withFake registers a kind that pools with a DNS name of "fake" use, besides what they use anyhow, and takes source
// dns away. The channel is made in the bubble of the test.
func withFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{emit: make(chan func(func([]Target, error)) error)}
	before := kinds
	kinds = slices.DeleteFunc(slices.Clone(kinds), func(k Kind) bool { return k.Name == "dns" })
	register("fake", "For tests.",
		func(d *config.Discovery) (config.DNSSource, bool) {
			if d.DNS == nil {
				return config.DNSSource{}, false
			}
			return *d.DNS, true
		},
		func(config.DNSSource, Env) Source { return f })
	t.Cleanup(func() { kinds = before })
	return f
}

func fakePool(name string, port int, hosts ...string) config.Pool {
	p := staticPool(name, hosts...)
	p.Discovery.DNS = &config.DNSSource{Name: "fake", Port: port}
	return p
}

func TestStatic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recorder
		m := newManager(t, &r, nil)
		a := staticPool("a", "10.0.0.2:1", "10.0.0.1:1")
		a.Discovery.Static[0] = config.Endpoint{URL: "http://10.0.0.2:1", ID: "x", MetricsURL: "http://m/", Dialect: "vllm", Weight: 3}
		m.SetPools([]config.Pool{a, staticPool("b", "10.0.0.3:1")})
		if err := m.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := []Target{
			{Pool: "a", URL: "http://10.0.0.1:1", Dialect: "auto", Weight: 1},
			{Pool: "a", URL: "http://10.0.0.2:1", SourceID: "x", MetricsURL: "http://m/", Dialect: "vllm", Weight: 3},
		}
		if got := r.set("a"); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v", got)
		}
		if got := urls(r.set("b")); got != "10.0.0.3:1" {
			t.Error(got)
		}
	})
}

func TestReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withFake(t)
		var r recorder
		m := newManager(t, &r, nil)
		expect := func(what, want string) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			if got := r.take(); got != want {
				t.Errorf("%s: %q; want %q", what, got, want)
			}
		}
		m.SetPools([]config.Pool{fakePool("a", 1, "s:1"), staticPool("b", "b:1")})
		expect("start", "a=s:1 b=b:1")
		f.send("f:2", "f:1")
		expect("a second source", "a=f:1,f:2,s:1")
		f.send("f:1", "f:2")
		expect("the same set", "")

		m.SetPools([]config.Pool{staticPool("b", "b:1"), fakePool("a", 1, "s:1")})
		expect("the same settings", "")
		if n := f.started.Load(); n != 1 {
			t.Errorf("the source was started %d times", n)
		}

		m.SetPools([]config.Pool{fakePool("a", 1, "s:2"), staticPool("b", "b:1")})
		expect("another static list", "a=f:1,f:2,s:2")

		m.SetPools([]config.Pool{fakePool("a", 2, "s:2"), staticPool("b", "b:1")})
		expect("other settings: what was found holds", "")
		if f.started.Load() != 2 || f.running.Load() != 1 {
			t.Errorf("started %d, running %d", f.started.Load(), f.running.Load())
		}
		f.send("f:3")
		expect("until the new one finds something", "a=f:3,s:2")

		vllm := fakePool("a", 2, "s:2")
		vllm.Dialect = "vllm"
		m.SetPools([]config.Pool{vllm, staticPool("b", "b:1")})
		expect("another dialect", "a=f:3,s:2")
		if d := r.set("a")[0].Dialect; d != "vllm" {
			t.Error(d)
		}

		m.SetPools([]config.Pool{staticPool("a", "s:2")})
		expect("a source and a pool are gone", "a=s:2")
		if f.running.Load() != 0 {
			t.Error("the source still runs")
		}

		m.SetPools([]config.Pool{fakePool("a", 2)})
		expect("a new source alone, which is silent: the last set holds", "")
		f.send()
		expect("it finds none", "a=")

		m.SetPools(nil)
		expect("no pools", "")
		m.Close()
		m.SetPools([]config.Pool{staticPool("a", "s:2")})
		expect("after Close", "")
	})
}

func TestFailureKeepsTheLastSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withFake(t)
		core, logs := observer.New(zap.InfoLevel)
		var r recorder
		m := newManager(t, &r, zap.New(core))
		m.SetPools([]config.Pool{fakePool("a", 1)})
		f.send("f:1")
		for range 5 {
			f.fail("no route")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := r.take(); got != "a=f:1" {
			t.Error(got)
		}
		st := m.Status()
		if len(st) != 1 || st[0].Targets != 1 || st[0].Failures != 5 || st[0].LastError != "no route" || st[0].LastSuccess.IsZero() || st[0].FailedAt.IsZero() {
			t.Errorf("%+v", st)
		}
		// A source that gives up is started again, ever more seldom.
		for i := range 10 {
			f.emit <- func(func([]Target, error)) error { return errors.New("gave up") }
			start := time.Now()
			f.send("f:1") // taken once it runs again
			if pause := time.Since(start); pause < time.Second/2 || pause > 70*time.Second {
				t.Errorf("restart %d after %v", i, pause)
			}
		}
		f.send("f:2")
		time.Sleep(time.Second)
		synctest.Wait()
		if got := r.take(); got != "a=f:2" {
			t.Error(got)
		}
		if st := m.Status(); st[0].Failures != 0 || st[0].LastError != "" {
			t.Errorf("%+v", st)
		}
		// Once when it begins, once when it ends; not for each of the six failures at first.
		if n := logs.FilterMessageSnippet("fails").Len(); n != 10 {
			t.Errorf("%d lines about failures", n)
		}
		if n := logs.FilterMessageSnippet("works again").Len(); n != 10 {
			t.Errorf("%d lines about recoveries", n)
		}
	})
}

func TestChangesAreHandedOverTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withFake(t)
		var r recorder
		m := newManager(t, &r, nil)
		m.SetPools([]config.Pool{fakePool("a", 1)})
		start := time.Now()
		for i := range 1000 { // a rolling update, one pod a millisecond
			f.send(fmt.Sprintf("f:%d", i+1))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		calls := strings.Fields(r.take())
		if most := int(time.Since(start)/(100*time.Millisecond)) + 1; len(calls) > most || len(calls) < 5 {
			t.Errorf("%d calls", len(calls))
		}
		if calls[0] != "a=f:1" || calls[len(calls)-1] != "a=f:1000" {
			t.Errorf("first %s, last %s", calls[0], calls[len(calls)-1])
		}
	})
}

func TestMergeTakesEachEndpointOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withFake(t)
		var r recorder
		m := newManager(t, &r, nil)
		m.SetPools([]config.Pool{fakePool("a", 1, "x:1", "y:1")})
		f.send("x:1", "z:1", "z:1")
		if err := m.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if got := urls(r.set("a")); got != "x:1,y:1,z:1" {
			t.Error(got)
		}
	})
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := withFake(t)
		var r recorder
		m := newManager(t, &r, nil)
		if err := m.Wait(t.Context()); err != nil {
			t.Error("nothing to wait for:", err)
		}
		m.SetPools([]config.Pool{fakePool("a", 1, "s:1")})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := m.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error("the source has not reported:", err)
		}
		if got := r.take(); got != "a=s:1" {
			t.Error("what is known is not held up by what isn't:", got)
		}
		go f.fail("away")
		if err := m.Wait(t.Context()); err != nil {
			t.Error("a failure is a report:", err)
		}
		f.send("f:1")
		synctest.Wait()
		if err := m.Wait(t.Context()); err != nil || r.take() != "a=f:1,s:1" {
			t.Error("Wait returned before what was found was applied")
		}
	})
}

func TestNewWantsApply(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("no error")
	}
}

func TestKinds(t *testing.T) {
	var names []string
	for _, k := range Kinds() {
		if k.Name == "" || k.Doc == "" {
			t.Errorf("%+v", k)
		}
		names = append(names, k.Name)
	}
	if !slices.IsSorted(names) || !slices.Contains(names, "static") || !slices.Contains(names, "file") {
		t.Error(names)
	}
}

// Concurrent reloads, reports and readers, for the race detector.
func TestConcurrentUse(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.json")
	if err := os.WriteFile(path, []byte(`[{"targets":["h:1"]}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	var r recorder
	m := newManager(t, &r, nil)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 50 {
				p := staticPool("a", fmt.Sprintf("s:%d", g*100+i+1))
				if i%2 == 0 {
					p.Discovery.File = &config.FileSource{Path: path, Interval: time.Duration(i%3+1) * 100 * time.Millisecond}
				}
				m.SetPools([]config.Pool{p, staticPool(fmt.Sprintf("p%d", i%5), "x:1")})
				m.Status()
			}
		})
	}
	wg.Wait()
	m.SetPools([]config.Pool{staticPool("a", "end:1")})
	if err := m.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := urls(r.set("a")); got != "end:1" {
		t.Error(got)
	}
}
