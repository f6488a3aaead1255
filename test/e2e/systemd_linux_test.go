package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvgate/internal/modelsim"
)

// A manager does for kvgate what systemd does: it holds the listening sockets and hears what the service says of itself.
type manager struct {
	t      *testing.T
	dir    string
	socket *net.TCPListener    // of clients
	files  []*os.File          // handed over
	names  string              // of the files, with colons
	heard  chan string         // messages of sd_notify, one field a line
	user   *syscall.Credential // of what it starts; nil: its own
}

// newManager returns a manager that holds a socket at the address.
func newManager(t *testing.T, address string) *manager {
	t.Helper()
	m := &manager{t: t, dir: t.TempDir(), names: "listen", heard: make(chan string, 1000)}
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	m.socket = ln.(*net.TCPListener)
	m.hand(m.socket.File())
	t.Cleanup(func() { m.socket.Close() })
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(m.dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			m.heard <- string(buf[:n])
		}
	})
	t.Cleanup(func() {
		conn.Close()
		reading.Wait()
	})
	return m
}

// hand adds a file to those that are handed over.
func (m *manager) hand(f *os.File, err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
	m.files = append(m.files, f)
	m.t.Cleanup(func() { f.Close() })
}

// A process is a kvgate that the manager has started.
type process struct {
	*exec.Cmd
	log  *bytes.Buffer // to be read after wait
	done chan error
}

// kvgateBinary is the program under test.
func kvgateBinary(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("KVGATE_BINARY")
	if binary == "" {
		var err error
		if binary, err = exec.LookPath("kvgate"); err != nil {
			t.Fatal(err)
		}
	}
	return binary
}

// start runs kvgate serve on a configuration.
func (m *manager) start(file string, environment ...string) *process {
	m.t.Helper()
	return m.exec([]string{kvgateBinary(m.t), "serve", "-c", file, "--watch", "-1s"}, environment...)
}

// exec runs a command line with the sockets. LISTEN_PID must be the process's own number, which a shell can tell it.
func (m *manager) exec(command []string, environment ...string) *process {
	m.t.Helper()
	u := &process{exec.Command("/bin/sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`}, command...)...), new(bytes.Buffer), make(chan error, 1)}
	u.Stderr = u.log
	u.SysProcAttr = &syscall.SysProcAttr{Credential: m.user}
	u.ExtraFiles = m.files
	u.Env = append(os.Environ(), "LISTEN_FDS="+strconv.Itoa(len(m.files)), "LISTEN_FDNAMES="+m.names, "NOTIFY_SOCKET="+filepath.Join(m.dir, "notify"))
	u.Env = append(u.Env, environment...)
	if err := u.Start(); err != nil {
		m.t.Fatal(err)
	}
	go func() { u.done <- u.Wait() }()
	m.t.Cleanup(func() {
		u.Process.Kill()
		u.wait(m.t)
		if m.t.Failed() {
			m.t.Logf("the log of a process:\n%s", u.log)
		}
	})
	return u
}

// wait waits for the end and returns the exit code.
func (u *process) wait(t *testing.T) int {
	t.Helper()
	select {
	case err := <-u.done:
		u.done <- err
	case <-time.After(30 * time.Second):
		t.Fatal("kvgate does not end")
	}
	return u.ProcessState.ExitCode()
}

// await waits for a message with a field, and returns its lines by field.
func (m *manager) await(field string) map[string]string {
	m.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		select {
		case text := <-m.heard:
			fields := map[string]string{}
			for line := range strings.Lines(text) {
				k, v, ok := strings.Cut(strings.TrimRight(line, "\n"), "=")
				if !ok {
					m.t.Fatalf("kvgate says %q, which is no list of fields", text)
				}
				fields[k] = v
			}
			if _, ok := fields[field]; ok {
				return fields
			}
		case <-deadline:
			m.t.Fatalf("kvgate never says %s", field)
		}
	}
}

func startSim(t *testing.T) *modelsim.Server {
	t.Helper()
	s, err := modelsim.New(modelsim.Options{Models: []string{"m"}, Speedup: 100})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

// freePort is one that nothing listens on.
func freePort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// ask sends a request on a connection of its own.
func ask(url string) error {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := c.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","stream":true,"max_tokens":20,"messages":[{"role":"user","content":"x"}]}`))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !bytes.Contains(body, []byte("data: [DONE]")) {
		return fmt.Errorf("%d %s, %v", resp.StatusCode, body, err)
	}
	return nil
}

// As systemd runs it: the socket is open before kvgate runs and while it is restarted, and no client is refused.
func TestUnderAServiceManager(t *testing.T) {
	server := startSim(t)
	m := newManager(t, "127.0.0.1:0")
	url := "http://" + m.socket.Addr().String()
	file := filepath.Join(m.dir, "config.yaml")
	write := func(more string) {
		t.Helper()
		text := fmt.Sprintf("listen: %q\nadmin: {listen: \"127.0.0.1:%d\"}\ndrain: {delay: 100ms, timeout: 20s}\nlog: {access: \"off\"}\npools: [{name: p, discovery: {static: [%q]}}]\n",
			m.socket.Addr(), freePort(t), server.URL())
		if err := os.WriteFile(file, []byte(text+more), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("")

	// Who comes before it runs is served when it does.
	early := make(chan error, 1)
	go func() { early <- ask(url) }()
	u := m.start(file, "WATCHDOG_USEC=300000")
	if f := m.await("READY"); f["READY"] != "1" || f["STATUS"] != "serving on "+m.socket.Addr().String() {
		t.Errorf("ready: %v", f)
	}
	if err := <-early; err != nil {
		t.Errorf("a client that came early: %v", err)
	}
	for range 3 {
		m.await("WATCHDOG")
	}

	// A reload has a beginning, told by the clock that systemd's own request is told by, and an end.
	reload := func(want string) {
		t.Helper()
		var before, after unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &before)
		u.Process.Signal(syscall.SIGHUP)
		f := m.await("RELOADING")
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &after)
		if at, err := strconv.ParseInt(f["MONOTONIC_USEC"], 10, 64); f["RELOADING"] != "1" || err != nil || at < before.Nano()/1000 || at > after.Nano()/1000 {
			t.Errorf("reloading: %v, between %d and %d", f, before.Nano()/1000, after.Nano()/1000)
		}
		if f := m.await("READY"); !strings.HasPrefix(f["STATUS"], want) {
			t.Errorf("reloaded: %v; want %q", f, want)
		}
	}
	reload("serving on ")
	write("poools: []\n")
	reload("reload refused, what was in use stays: ")
	write("")
	reload("serving on ")

	// Restarts under load, each client on a new connection: some wait, none is refused or cut off.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var clients sync.WaitGroup
	var sent, failed atomic.Int64
	for range 8 {
		clients.Go(func() {
			for ctx.Err() == nil {
				if err := ask(url); err != nil {
					t.Log(err)
					failed.Add(1)
				}
				sent.Add(1)
			}
		})
	}
	flow := func() {
		t.Helper()
		from := sent.Load()
		for deadline := time.Now().Add(30 * time.Second); sent.Load() < from+40; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("requests do not flow")
			}
		}
	}
	for range 3 {
		flow()
		u.Process.Signal(syscall.SIGTERM)
		if f := m.await("STOPPING"); f["STOPPING"] != "1" || f["EXTEND_TIMEOUT_USEC"] != "35100000" {
			t.Errorf("stopping: %v", f)
		}
		if code := u.wait(t); code != 0 {
			t.Errorf("exit code %d", code)
		}
		u = m.start(file)
		m.await("READY")
	}
	flow()
	cancel()
	clients.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), sent.Load())
	}
	t.Logf("%d requests on new connections over 3 restarts, %d failed", sent.Load(), failed.Load())
	u.Process.Signal(syscall.SIGTERM)
	u.wait(t)
	if !strings.Contains(u.log.String(), "listening on a socket of the service manager") {
		t.Error("the log does not say whose socket it is")
	}
}

// The second socket is the admin listener's if it says so; sockets elsewhere than configured are used and warned of.
func TestInheritedAdminListener(t *testing.T) {
	server := startSim(t)
	m := newManager(t, "127.0.0.1:0")
	admin, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	m.hand(admin.File())
	m.names += ":admin"
	file := filepath.Join(m.dir, "config.yaml")
	text := fmt.Sprintf("listen: \"127.0.0.1:%d\"\nadmin: {listen: %q}\ndrain: {delay: 0s}\npools: [{name: p, discovery: {static: [%q]}}]\n", freePort(t), admin.Addr(), server.URL())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	u := m.start(file)
	m.await("READY")
	resp, err := http.Get("http://" + admin.Addr().String() + "/-/ready")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("ready: %s", resp.Status)
	}
	if err := ask("http://" + m.socket.Addr().String()); err != nil {
		t.Error(err)
	}
	u.Process.Signal(syscall.SIGTERM)
	u.wait(t)
	if !strings.Contains(u.log.String(), `which is not where the configuration says: make the two agree","key":"listen"`) {
		t.Error("no warning of the address that is not heeded")
	}
}

// What cannot be listened on is refused, with the fix.
func TestInheritedSocketOfAnotherKind(t *testing.T) {
	server := startSim(t)
	m := newManager(t, "127.0.0.1:0")
	file := filepath.Join(m.dir, "config.yaml")
	text := fmt.Sprintf("listen: %q\nadmin: {listen: \"127.0.0.1:%d\"}\npools: [{name: p, discovery: {static: [%q]}}]\n", m.socket.Addr(), freePort(t), server.URL())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	un, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(m.dir, "stream"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer un.Close()
	m.hand(un.File())
	m.names += ":kvgate.socket"
	u := m.start(file)
	if code := u.wait(t); code != 1 || !strings.Contains(u.log.String(), "kvgate: socket 2 (kvgate.socket) of the service manager cannot be used: it is a unix socket; want a listening TCP socket\ntry: ListenStream=8080 in the socket unit") {
		t.Errorf("exit code %d, %s", code, u.log)
	}
}
