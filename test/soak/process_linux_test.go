package soak

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvgate/internal/cli"
)

// asProgram in the environment makes this test's binary the program kvgate.
const asProgram = "KVGATE_SOAK_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		// The test holds the other end: without it, nobody is left to end this process.
		go func() {
			_, _ = io.Copy(io.Discard, os.NewFile(3, "parent"))
			os.Exit(3)
		}()
		os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// A process is kvgate with some arguments, started, ended and started again.
type process struct {
	t    testing.TB
	args []string
	env  []string // besides this process's own
	said output   // standard error and output of all its lives

	mu   sync.Mutex
	cmd  *exec.Cmd
	held *os.File // this test's end of the pipe
	done chan struct{}
	code int // of the last exit
}

// output is a buffer of what processes say, which the test reads meanwhile.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func (p *process) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	r, w, err := os.Pipe()
	if err != nil {
		p.t.Errorf("%s: %v", p.args[0], err)
		return
	}
	defer r.Close()
	cmd := exec.Command(os.Args[0], p.args...)
	cmd.Env = append(append(os.Environ(), asProgram+"=1"), p.env...)
	cmd.ExtraFiles = []*os.File{r}
	cmd.Stdout, cmd.Stderr = &p.said, &p.said
	if err := cmd.Start(); err != nil {
		w.Close()
		p.t.Errorf("%s: %v", p.args[0], err)
		return
	}
	done := make(chan struct{})
	p.cmd, p.held, p.done = cmd, w, done
	go func() {
		_ = cmd.Wait()
		w.Close()
		p.mu.Lock()
		p.code = cmd.ProcessState.ExitCode()
		p.mu.Unlock()
		close(done)
	}()
}

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(s) // it may have ended
	}
}

// end has a signal end the process, SIGKILL if it doesn't, and waits for that.
func (p *process) end(s syscall.Signal) {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done == nil {
		return
	}
	p.signal(s)
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		p.t.Errorf("%s did not end on %v", p.args[0], s)
		p.signal(syscall.SIGKILL)
		<-done
	}
}

func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// freePort returns a port that nobody listens on, and that the system gives to nobody who wants any: a server that is
// killed must find its own free when it comes back.
func freePort(t testing.TB) int {
	t.Helper()
	for range 1000 {
		nextPort++
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", nextPort))
		if err == nil {
			ln.Close()
			return nextPort
		}
	}
	t.Fatal("no port is free")
	return 0
}

var nextPort = 12000 + os.Getpid()%18000

// within calls f until it reports true, and returns false if it didn't in time.
func within(limit time.Duration, f func() bool) bool {
	for end := time.Now().Add(limit); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

var httpClient = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// get returns the body of url, "" if there is none to be had.
func get(url string) string {
	resp, err := httpClient.Get(url)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		return ""
	}
	return string(b)
}

// send makes a request with a body and reports whether the answer was 200.
func send(method, url, body string) bool {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return false
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == 200
}

// descriptors is how many files the process has open.
func descriptors(pid int) int {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return -1
	}
	return len(list)
}

// memoryKB is a line of the process's status: VmRSS, VmHWM.
func memoryKB(pid int, name string) (kb int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if _, after, ok := strings.Cut(string(b), name+":"); ok {
		_, _ = fmt.Sscan(after, &kb)
	}
	return kb
}
