package proxybench

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A process is a candidate that runs, with its children.
type process struct {
	cmd  *exec.Cmd
	log  string // file with what it said
	done chan error
	pids []int
}

// cpus returns the processors that this process may use.
func cpus() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	var out []int
	for i := 0; len(out) < set.Count(); i++ {
		if set.IsSet(i) {
			out = append(out, i)
		}
	}
	return out, nil
}

// pin has the thread of the caller, and what it starts, run on these processors. The caller must have locked its
// thread.
func pin(to []int) error {
	var set unix.CPUSet
	for _, i := range to {
		set.Set(i)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("affinity: %w", err)
	}
	return nil
}

// pinProcess pins every thread that this process has.
func pinProcess(to []int) error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	var set unix.CPUSet
	for _, i := range to {
		set.Set(i)
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("affinity: %w", err)
		}
	}
	return nil
}

// startProcess starts cmd on these processors.
func startProcess(cmd *exec.Cmd, dir, name string, on, back []int) (*process, error) {
	p := &process{cmd: cmd, log: filepath.Join(dir, name+".log"), done: make(chan error, 1)}
	out, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	// A child begins with the affinity of the thread that starts it, and dies with it.
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := pin(on); err != nil {
		return nil, err
	}
	err = cmd.Start()
	if err := pin(back); err != nil {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() { p.done <- cmd.Wait() }()
	p.pids = []int{cmd.Process.Pid}
	return p, nil
}

// settle finds the process's children, once it is up.
func (p *process) settle() {
	p.pids = p.pids[:1]
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.pids[0]))
	for _, t := range tasks {
		b, err := os.ReadFile(t)
		if err != nil {
			continue
		}
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				p.pids = append(p.pids, pid)
			}
		}
	}
}

// stop ends the process: kindly, for children's sake, and soon unkindly, since there is nothing to be lost.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-p.done:
		return
	case <-time.After(100 * time.Millisecond):
	}
	for _, pid := range p.pids[1:] {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// said is the end of what the process wrote.
func (p *process) said() string {
	b, _ := os.ReadFile(p.log)
	b = bytes.TrimSpace(b)
	return string(b[max(0, len(b)-500):])
}

// exited reports whether the process has ended by itself, and how.
func (p *process) exited() (error, bool) {
	select {
	case err := <-p.done:
		p.done <- err
		return err, true
	default:
		return nil, false
	}
}

// cpu is the processor time, user and system, that the process and its children have taken. It is exact to the
// nanosecond (clock_getcpuclockid(3)), where /proc/PID/stat counts ticks of 10 ms.
func (p *process) cpu() (time.Duration, error) {
	var sum time.Duration
	for _, pid := range p.pids {
		var ts unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
			return 0, fmt.Errorf("processor time of %d: %w", pid, err)
		}
		sum += time.Duration(ts.Nano())
	}
	return sum, nil
}

// usage is what a process has used since it began.
type usage struct {
	cpu, system          time.Duration // system is a part of cpu, and counted in ticks of 10 ms
	reads, writes, waits int           // system calls that read or write, recv and send aside; times that a thread went to sleep
}

// usage returns zeros for direct.
func (r *running) usage() (u usage, err error) {
	p := r.process
	if p == nil {
		return u, nil
	}
	p.settle() // a master may answer before its worker is there
	if u.cpu, err = p.cpu(); err != nil {
		return u, err
	}
	for _, pid := range p.pids {
		// Fields are counted from behind the name, which may hold anything: stime is the 15th.
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])); len(f) > 12 {
			n, _ := strconv.Atoi(f[12])
			u.system += time.Duration(n) * 10 * time.Millisecond
		}
		u.reads += field(fmt.Sprintf("/proc/%d/io", pid), "syscr:")
		u.writes += field(fmt.Sprintf("/proc/%d/io", pid), "syscw:")
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, t := range tasks {
			u.waits += field(t, "voluntary_ctxt_switches:")
		}
	}
	return u, nil
}

// field is the number behind name in a file of /proc; 0 if there is none.
func field(file, name string) int {
	b, _ := os.ReadFile(file)
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name); ok {
			n, _ := strconv.Atoi(strings.TrimSpace(v))
			return n
		}
	}
	return 0
}

// resident is the memory in use, bytes.
func (p *process) resident() int64 {
	var sum int64
	for _, pid := range p.pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			continue
		}
		if f := strings.Fields(string(b)); len(f) > 1 {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			sum += n * int64(os.Getpagesize())
		}
	}
	return sum
}
