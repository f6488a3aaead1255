package proxybench

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// bench is a run.
type bench struct {
	o      Options
	engine *engine
	dir    string

	allCPUs, proxyCPUs, loadCPUs []int
	report                       *Report
}

// Run measures. It pins the calling process to one processor, where there are two, and leaves it there.
func Run(ctx context.Context, o Options) (*Report, error) {
	o.Rounds, o.Window = cmp.Or(o.Rounds, 5), cmp.Or(o.Window, time.Second)
	if len(o.Self) == 0 {
		return nil, errors.New("bench: no command that runs kvgate")
	}
	scenarios, err := choose(o.Scenarios, o.Candidates)
	if err != nil {
		return nil, err
	}
	b := &bench{o: o, dir: o.Dir, report: &Report{}}
	if b.dir == "" {
		if b.dir, err = os.MkdirTemp("", "kvgate-bench-"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(b.dir)
	}
	if err := writeCertificate(b.dir); err != nil {
		return nil, err
	}
	if o.ProfileDir != "" {
		if err := os.MkdirAll(o.ProfileDir, 0o755); err != nil {
			return nil, err
		}
	}
	raiseFiles()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := b.placeCPUs(); err != nil {
		return nil, err
	}
	for i := range scenarios {
		s := &scenarios[i]
		if o.Quick {
			if !s.shorten() {
				continue
			}
			b.o.Rounds, b.o.Window = 1, 200*time.Millisecond
		}
		if err := b.scenario(ctx, s); err != nil {
			return b.report, fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return b.report, nil
}

// shorten makes the scenario a smoke test, and reports whether it can be one.
func (s *Scenario) shorten() bool {
	s.Window = 0
	s.Conns = min(s.Conns, 100)
	s.Gap = min(s.Gap, 10*time.Millisecond)
	s.Candidates = slices.DeleteFunc(slices.Clone(s.Candidates), func(name string) bool {
		return !slices.Contains([]string{direct, nginx, reverseProxy, kvgate64, kvgate100}, name)
	})
	return !slices.Contains([]string{"16KB", "1KB-4000rps", "SSE-1000"}, s.Name) && len(s.Candidates) > 0
}

// placeCPUs gives the candidates a processor of their own.
func (b *bench) placeCPUs() error {
	var err error
	if b.allCPUs, err = cpus(); err != nil {
		return err
	}
	b.proxyCPUs, b.loadCPUs = b.allCPUs, b.allCPUs
	if n := len(b.allCPUs); n > 1 {
		b.proxyCPUs, b.loadCPUs = b.allCPUs[:1], b.allCPUs[n-1:]
	}
	b.report.Processors = len(b.allCPUs)
	return pinProcess(b.loadCPUs)
}

// raiseFiles lets this process and those it starts open as many files as they may.
func raiseFiles() {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) == nil && r.Cur < r.Max {
		r.Cur = r.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &r)
	}
}

func (b *bench) say(format string, args ...any) {
	if b.o.Progress != nil {
		fmt.Fprintf(b.o.Progress, format+"\n", args...)
	}
}

// scenario runs all rounds of s.
func (b *bench) scenario(ctx context.Context, s *Scenario) error {
	var err error
	if b.engine, err = newEngine(newAnswers(cmp.Or(s.PageBytes, 3<<10))); err != nil {
		return err
	}
	defer b.engine.close()
	b.engine.serving = serving{chunks: max(s.Chunks, 2), gap: s.Gap}
	var up []*running
	defer func() {
		for _, r := range up {
			r.stop()
		}
	}()
	var cs []candidate
	for _, name := range s.Candidates {
		c, _ := candidateByName(name)
		if err := b.engine.listen(max(1, c.endpoints)); err != nil {
			return err
		}
		if c.cores > len(b.allCPUs) {
			continue
		}
		r, err := b.start(c, s)
		if errors.Is(err, errAbsent) {
			b.say("%s: %s is not installed", s.Name, name)
			continue
		} else if err != nil {
			return err
		}
		cs = append(cs, c)
		if s.Memory {
			r.stop()
		} else {
			up = append(up, r)
		}
	}
	failed := make(map[string]bool)
	for round := range b.o.Rounds {
		for i := range cs {
			if err := ctx.Err(); err != nil {
				return err
			}
			// Whoever comes first in one round comes last in the next.
			k := (i + round) % len(cs)
			if failed[cs[k].name] {
				continue
			}
			if err := b.turn(cs[k], up, k, s, round); err != nil {
				if cs[k].endpoints > 0 {
					return fmt.Errorf("%s: %w", cs[k].name, err)
				}
				// A peer that can't do it is no reason to know nothing of the others.
				failed[cs[k].name] = true
				b.say("%s: %s takes no further part: %v", s.Name, cs[k].name, err)
			}
		}
		b.say("%s: round %d of %d", s.Name, round+1, b.o.Rounds)
	}
	for _, r := range up {
		if err := b.extras(r, s); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// turn is one candidate's turn.
func (b *bench) turn(c candidate, up []*running, k int, s *Scenario, round int) error {
	var r *running
	if s.Memory {
		var err error
		if r, err = b.start(c, s); err != nil {
			return err
		}
		defer r.stop()
	} else {
		r = up[k]
	}
	sample, err := b.measure(r, s)
	if err != nil {
		return err
	}
	sample.Scenario, sample.Candidate, sample.Round = s.Name, c.name, round
	b.report.Samples = append(b.report.Samples, *sample)
	return nil
}

// load is what clients do in s.
func (b *bench) load(r *running, s *Scenario) *load {
	l := &load{
		addr: r.addr, template: newRequest("gateway.example", s.BodyBytes, s.Chunks > 0, s.Fresh),
		conns: s.Conns, rate: s.Rate, stream: s.Chunks > 0, fresh: s.Fresh, once: s.Idle,
		ramp: time.Duration(s.Conns) * time.Millisecond / 4,
	}
	if s.Gap > 0 {
		// Streams begin so that they are spread over the time that one takes, as far as that is short.
		l.ramp = max(l.ramp, min(2*time.Second, s.Gap*time.Duration(s.Chunks)))
	}
	return l
}

const (
	warmUp         = 300 * time.Millisecond
	profileSeconds = 5
	maxErrors      = 0.001 // share of requests
)

// measure has the clients do s against r, and measures a window of it.
func (b *bench) measure(r *running, s *Scenario) (*Sample, error) {
	e := b.engine
	var before runtimeNumbers
	var own float64 // allocations that asking takes
	if r.isKvgate() {
		for range 2 {
			var n runtimeNumbers
			if err := e.runWhile(func() (err error) { n, err = r.numbers(); return err }); err != nil {
				return nil, err
			}
			own = n.mallocs - before.mallocs
			before = n
		}
	}
	var resident int64
	if s.Memory && r.process != nil {
		// What a process takes once, whatever the number of connections, it takes now.
		warm := b.load(r, &Scenario{BodyBytes: 4 << 10, Conns: 32}) // prompts long enough to fill all of kvgate's prefix index
		e.start(warm)
		e.runFor(2 * warmUp)
		e.stop()
		e.runFor(50 * time.Millisecond)
		resident = r.process.resident()
	}
	window := cmp.Or(s.Window, b.o.Window)
	e.clear()
	var sample *Sample
	var err error
	total := 0 // requests since before
	switch {
	case s.Scrape:
		e.runFor(2 * time.Second)
		sample, err = b.window(r, window)
	case s.TLS:
		sample, total, err = b.measureTLS(r, s, window)
	default:
		l := b.load(r, s)
		e.start(l)
		e.runFor(l.ramp + warmUp)
		total = e.count.requests
		if s.Gap > 0 && total == 0 {
			e.runFor(min(s.Gap*time.Duration(s.Chunks), time.Second)) // the first streams aren't over yet
		}
		e.clear()
		sample, err = b.window(r, window)
		total += sample.Requests
		if s.Idle {
			sample.Requests = 0 // late ones, if any
		}
		if s.Memory && r.process != nil {
			sample.ConnBytes = float64(r.process.resident()-resident) / float64(s.Conns)
		}
		if s.Memory && r.isKvgate() && b.o.ProfileDir != "" && err == nil {
			err = e.runWhile(func() error {
				return errors.Join(
					r.profile("pprof/heap?gc=1", filepath.Join(b.o.ProfileDir, s.Name+"-heap.pprof")),
					r.profile("pprof/profile?seconds=2", filepath.Join(b.o.ProfileDir, s.Name+"-cpu.pprof")),
					r.profile("../metrics", filepath.Join(b.o.ProfileDir, s.Name+"-metrics.txt")))
			})
		}
		e.stop()
	}
	if err != nil {
		return nil, err
	}
	if n := sample.Errors; float64(n) > maxErrors*float64(max(sample.Requests, s.Conns)) {
		return nil, fmt.Errorf("%d errors in %d requests; the first: %w", n, sample.Requests, e.count.firstError)
	}
	e.runFor(100 * time.Millisecond)
	if r.isKvgate() && total > 0 {
		var after runtimeNumbers
		if err := e.runWhile(func() (err error) { after, err = r.numbers(); return err }); err != nil {
			return nil, err
		}
		sample.Allocations = max(0, after.mallocs-before.mallocs-own) / float64(total)
		sample.GCSeconds, sample.GCOf = after.gcSeconds-before.gcSeconds, after.cpuSeconds-before.cpuSeconds
	}
	return sample, nil
}

// window measures what happens from now on.
func (b *bench) window(r *running, d time.Duration) (*Sample, error) {
	s := &Sample{}
	before, err := r.usage()
	if err != nil {
		return s, err
	}
	began := time.Now()
	b.engine.runFor(d)
	s.Seconds = time.Since(began).Seconds()
	after, err := r.usage()
	if err != nil {
		return s, err
	}
	c := &b.engine.count
	s.CPUSeconds, s.SystemSeconds = (after.cpu - before.cpu).Seconds(), (after.system - before.system).Seconds()
	s.Reads, s.Writes, s.Waits = after.reads-before.reads, after.writes-before.writes, after.waits-before.waits
	s.Requests, s.Chunks, s.Errors = c.requests, c.chunks, c.errors
	if c.requests > 0 {
		s.P50, s.P99, s.P999 = quantile(c, 50), quantile(c, 99), quantile(c, 99.9)
	}
	return s, nil
}

func quantile(c *counts, q float64) float64 { return float64(c.latency.ValueAtQuantile(q)) / 1e9 }

// measureTLS is measure with clients that speak TLS, each in a goroutine.
func (b *bench) measureTLS(r *running, s *Scenario, window time.Duration) (*Sample, int, error) {
	e := b.engine
	var done atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, s.Conns)
	ctx, stop := context.WithCancel(context.Background())
	for i := range s.Conns {
		wg.Go(func() {
			if err := tlsClient(ctx, r.addr.String(), newRequest("gateway.example", s.BodyBytes, false, false), i, &done); err != nil {
				errs <- err
			}
		})
	}
	e.runFor(2 * warmUp)
	n := done.Load()
	sample, err := b.window(r, window)
	sample.Requests = int(done.Load() - n)
	stop()
	_ = e.runWhile(func() error { wg.Wait(); return nil })
	select {
	case failed := <-errs:
		err = errors.Join(err, failed)
	default:
	}
	return sample, int(done.Load()), err
}

func tlsClient(ctx context.Context, addr string, t *request, number int, done *atomic.Int64) error {
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: &tls.Config{InsecureSkipVerify: true}} // a certificate of our own, on loopback
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer c.Close()
	buf := make([]byte, 64<<10)
	var p parser
	for i := uint64(1); ctx.Err() == nil; i++ {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write(t.stamp(number, uint64(number)<<32|i)); err != nil {
			return err
		}
		for whole := false; !whole; {
			n, err := c.Read(buf)
			if err != nil {
				return err
			}
			if _, whole, err = p.feed(buf[:n]); err != nil {
				return err
			}
		}
		if !strings.HasPrefix(string(p.first), string(ok200)) {
			return fmt.Errorf("answer: %q; want status 200", p.first)
		}
		done.Add(1)
	}
	return nil
}

// extras are looks at a candidate that would disturb a measurement.
func (b *bench) extras(r *running, s *Scenario) error {
	if r.process == nil || s.TLS || s.Memory {
		return nil
	}
	e := b.engine
	name := regexp.MustCompile(`\W+`).ReplaceAllString(s.Name+"-"+r.name, "-")
	if b.o.ProfileDir != "" && r.isKvgate() {
		e.clear()
		e.start(b.load(r, s))
		e.runFor(warmUp)
		err := e.runWhile(func() error {
			return errors.Join(
				r.profile("pprof/profile?seconds="+strconv.Itoa(profileSeconds), filepath.Join(b.o.ProfileDir, name+"-cpu.pprof")),
				r.profile("pprof/allocs", filepath.Join(b.o.ProfileDir, name+"-allocs.pprof")),
				r.profile("pprof/mutex", filepath.Join(b.o.ProfileDir, name+"-mutex.pprof")))
		})
		e.stop()
		e.runFor(50 * time.Millisecond)
		if err != nil {
			return err
		}
	}
	if !b.o.Strace {
		return nil
	}
	return b.strace(r, s, name)
}

// strace counts system calls.
func (b *bench) strace(r *running, s *Scenario, name string) error {
	if _, err := exec.LookPath("strace"); err != nil {
		b.say("strace is not installed")
		return nil
	}
	e := b.engine
	out := filepath.Join(cmp.Or(b.o.ProfileDir, b.dir), name+"-strace.txt")
	args := []string{"-f", "-c", "-U", "calls,name", "-o", out}
	for _, pid := range r.process.pids {
		args = append(args, "-p", strconv.Itoa(pid))
	}
	cmd := exec.Command("strace", args...)
	cmd.Stderr = io.Discard
	if err := cmd.Start(); err != nil {
		return err
	}
	// No request may pass before strace is there.
	traced := func() bool {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.process.pids[len(r.process.pids)-1]))
		return !strings.Contains(string(status), "TracerPid:\t0\n")
	}
	end := e.now() + int64(5*time.Second)
	e.run(func(now int64) bool { return traced() || now > end }, end)
	e.runFor(200 * time.Millisecond)
	e.clear()
	e.start(b.load(r, s))
	e.runFor(2 * time.Second)
	n := e.count.requests
	e.stop()
	_ = cmd.Process.Signal(unix.SIGINT)
	err := e.runWhile(cmd.Wait)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) { // it ends by the signal
		return err
	}
	table, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) != 2 || n == 0 {
			continue
		}
		calls, err := strconv.Atoi(f[0])
		if err != nil {
			continue
		}
		b.report.Syscalls = append(b.report.Syscalls, Syscall{s.Name, r.name, f[1], float64(calls) / float64(n)})
	}
	b.report.Syscalls = slices.DeleteFunc(b.report.Syscalls, func(c Syscall) bool { return c.PerRequest < 0.005 })
	return nil
}
