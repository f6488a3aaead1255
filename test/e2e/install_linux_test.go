package e2e

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/unit"
	"golang.org/x/sys/unix"

	"kvgate/config"
)

// inside marks the copy of this test that has a machine of its own (network, files and users), and names a directory for it.
const inside = "KVGATE_TEST_INSIDE"

const vmPage = "../../docs/install-vm.md"

// Every command of docs/install-vm.md is run as it stands there, by one shell, on a machine of its own: a network namespace in
// which the servers have the addresses that the page says, and copies of /etc and /usr/local/bin that are thrown away. The
// servers are simulated, sudo and systemctl are stand-ins, and what systemctl does is done by the test with the shipped units.
func TestInstallOnAVM(t *testing.T) { onAMachine(t, installOnAVM, "curl", "useradd") }

// onAMachine runs this test again with f, as root of namespaces of its own: users, network and mounts. tools must be installed.
func onAMachine(t *testing.T, f func(*testing.T), tools ...string) {
	t.Helper()
	if os.Getenv(inside) != "" {
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		f(t)
		return
	}
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("this test needs root")
		}
		t.Skip("it needs root: it makes users and files, in namespaces of its own")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	self, err := os.Executable()
	must(t, err)
	c := exec.Command(self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
	c.Env = append(os.Environ(), inside+"="+t.TempDir())
	all := []syscall.SysProcIDMap{{Size: 65536}}
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: all, GidMappings: all, GidMappingsEnableSetgroups: true, Pdeathsig: syscall.SIGKILL,
	}
	runtime.LockOSThread() // the signal comes when the thread ends that started it
	defer runtime.UnlockOSThread()
	out, err := c.CombinedOutput()
	t.Logf("%s", out)
	switch {
	case err == nil && bytes.Contains(out, []byte("--- SKIP: "+t.Name())):
		t.Skip("skipped inside")
	case err != nil, !bytes.Contains(out, []byte("--- PASS: "+t.Name())):
		t.Errorf("inside: %v", err)
	}
}

// A machine is what the page is tried on.
type machine struct {
	t     *testing.T
	units map[string][]*unit.UnitOption // by file name, as of the last daemon-reload
	*manager
	service *process
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func installOnAVM(t *testing.T) {
	scratch := os.Getenv(inside) // what is mounted there goes with this process
	must(t, unix.Mount("tmpfs", scratch, "tmpfs", 0, ""))
	for _, dir := range []string{"/etc", "/usr/local"} {
		upper, work := filepath.Join(scratch, dir, "upper"), filepath.Join(scratch, dir, "work")
		must(t, os.MkdirAll(upper, 0o755))
		must(t, os.MkdirAll(work, 0o755))
		must(t, unix.Mount("overlay", dir, "overlay", 0, "lowerdir="+dir+",upperdir="+upper+",workdir="+work))
	}
	bringUp(t, "127.0.0.1", "10.0.0.11", "10.0.0.12")

	binary := kvgateBinary(t)
	for _, address := range []string{"10.0.0.11:8000", "10.0.0.12:8000"} {
		c := exec.Command(binary, "sim", "--listen", address, "--allow-remote", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--speedup", "50")
		must(t, c.Start())
		t.Cleanup(func() {
			c.Process.Kill()
			c.Wait()
		})
		awaitURL(t, "http://"+address+"/health")
	}

	// The clone after make build.
	clone := filepath.Join(scratch, "clone")
	must(t, os.MkdirAll(clone, 0o755))
	must(t, os.CopyFS(filepath.Join(clone, "deploy"), os.DirFS("../../deploy")))
	data, err := os.ReadFile(binary)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(clone, "kvgate"), data, 0o755))

	page, err := os.ReadFile(vmPage)
	must(t, err)
	var script strings.Builder
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllSubmatch(page, -1)
	if len(blocks) < 8 {
		t.Fatalf("%d blocks of commands", len(blocks))
	}
	for i, b := range blocks {
		fmt.Fprintf(&script, "echo '== block %d'\n%s\n", i+1, b[1])
	}
	m := &machine{t: t}
	m.listen(filepath.Join(scratch, "manager"))
	c := exec.Command("/bin/bash", "-euo", "pipefail")
	c.Dir = clone
	c.Stdin = strings.NewReader(script.String())
	c.Env = append(os.Environ(), managerSocket+"="+filepath.Join(scratch, "manager"))
	began := time.Now()
	out, err := c.CombinedOutput()
	t.Logf("%v\n%s", time.Since(began).Round(time.Millisecond), out)
	if err != nil {
		t.Fatalf("a command of the page fails: %v", err)
	}
	for _, want := range []string{
		"/etc/kvgate/config.yaml: ok: 1 pool, 2 endpoints, policy auto", "llama/10.0.0.11:8000: speaks vllm; models: meta-llama/Llama-3.1-8B-Instruct",
		"ready\n", `"finish_reason"`, "llama  static  2", "<- chosen", "policy: least_requests", `kvgate_endpoint_up{endpoint="llama/10.0.0.12:8000"} 1`,
	} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("nothing printed %q", want)
		}
	}
	if m.service == nil {
		t.Fatal("there is no service at work")
	}
	if got := m.owner(); got != "kvgate" {
		t.Errorf("the service runs as %s; want kvgate", got)
	}
}

// bringUp gives the loopback device its addresses.
func bringUp(t *testing.T, addresses ...string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, err)
	defer unix.Close(fd)
	for i, a := range addresses {
		name := "lo"
		if i > 0 {
			name = fmt.Sprintf("lo:%d", i)
			alias, err := unix.NewIfreq(name)
			must(t, err)
			must(t, alias.SetInet4Addr(net.ParseIP(a).To4()))
			must(t, unix.IoctlIfreq(fd, unix.SIOCSIFADDR, alias))
		}
		up, err := unix.NewIfreq(name)
		must(t, err)
		up.SetUint16(unix.IFF_UP)
		must(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, up))
	}
}

func awaitURL(t *testing.T, url string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get(url)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", url, err)
		}
	}
}

// listen takes orders of systemctl, one at a time.
func (m *machine) listen(path string) {
	m.t.Helper()
	ln, err := net.Listen("unix", path)
	must(m.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(c).ReadString('\n')
			answer := "ok"
			if err := m.order(strings.Fields(line)); err != nil {
				answer = err.Error()
			}
			fmt.Fprintln(c, answer)
			c.Close()
		}
	}()
	m.t.Cleanup(func() {
		ln.Close()
		<-done
	})
}

// order does what systemctl was told.
func (m *machine) order(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "daemon-reload":
		m.units = map[string][]*unit.UnitOption{}
		files, err := filepath.Glob("/etc/systemd/system/kvgate.*")
		if err != nil {
			return err
		}
		for _, file := range files {
			f, err := os.Open(file)
			if err != nil {
				return err
			}
			options, err := unit.DeserializeOptions(f)
			f.Close()
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			m.units[filepath.Base(file)] = options
		}
		return nil
	case len(args) == 4 && args[0] == "enable" && args[1] == "--now":
		if !slices.Equal(args[2:], []string{"kvgate.socket", "kvgate.service"}) {
			return fmt.Errorf("unknown units %v", args[2:])
		}
		if m.get("kvgate.socket", "Install", "WantedBy") == "" || m.get("kvgate.service", "Install", "WantedBy") == "" {
			return errors.New("a unit that is not wanted by anything cannot be enabled")
		}
		m.manager = newManager(m.t, ":"+m.get("kvgate.socket", "Socket", "ListenStream"))
		m.names = m.get("kvgate.socket", "Socket", "FileDescriptorName")
		return m.start()
	case len(args) == 2 && args[0] == "reload" && args[1] == "kvgate":
		check := exec.Command("/bin/sh", "-c", m.get("kvgate.service", "Service", "ExecReload"))
		if out, err := check.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		m.service.Process.Signal(syscall.SIGHUP)
		m.await("RELOADING")
		m.await("READY")
		return nil
	case len(args) == 2 && args[0] == "restart" && args[1] == "kvgate":
		m.service.Process.Signal(syscall.SIGTERM)
		m.await("STOPPING")
		if code := m.service.wait(m.t); code != 0 {
			return fmt.Errorf("exit code %d", code)
		}
		return m.start()
	}
	return fmt.Errorf("not known here: %v", args)
}

// get returns the value of a unit's key, "" if it is not there.
func (m *machine) get(file, section, key string) string {
	for _, o := range m.units[file] {
		if o.Section == section && o.Name == key {
			return o.Value
		}
	}
	return ""
}

// start runs the service as its unit says and waits until it is ready.
func (m *machine) start() error {
	if t := m.get("kvgate.service", "Service", "Type"); t != "notify-reload" {
		return fmt.Errorf("type %q", t)
	}
	u, err := user.Lookup(m.get("kvgate.service", "Service", "User"))
	if err != nil {
		return err
	}
	uid, _ := strconv.ParseUint(u.Uid, 10, 32)
	gid, _ := strconv.ParseUint(u.Gid, 10, 32)
	m.user = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	watchdog, err := time.ParseDuration(m.get("kvgate.service", "Service", "WatchdogSec"))
	if err != nil {
		return err
	}
	// The message's way is open to all, as systemd's is.
	for _, dir := range []string{m.dir, filepath.Dir(m.dir)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(m.dir, "notify"), 0o777); err != nil {
		return err
	}
	m.service = m.exec(strings.Fields(m.get("kvgate.service", "Service", "ExecStart")), fmt.Sprintf("WATCHDOG_USEC=%d", watchdog.Microseconds()))
	m.await("READY")
	return nil
}

// owner is who the service runs as.
func (m *machine) owner() string {
	var st syscall.Stat_t
	if err := syscall.Stat(fmt.Sprintf("/proc/%d", m.service.Process.Pid), &st); err != nil {
		return err.Error()
	}
	u, err := user.LookupId(strconv.Itoa(int(st.Uid)))
	if err != nil {
		return err.Error()
	}
	return u.Username
}

// The units agree with each other and with the program.
func TestUnits(t *testing.T) {
	read := func(name string) map[string]string {
		t.Helper()
		f, err := os.Open(filepath.Join("../../deploy/systemd", name))
		must(t, err)
		defer f.Close()
		options, err := unit.DeserializeOptions(f)
		must(t, err)
		out := map[string]string{}
		for _, o := range options {
			out[o.Name] = o.Value
		}
		return out
	}
	service, socket := read("kvgate.service"), read("kvgate.socket")
	d := config.Default().Drain
	if stop, err := time.ParseDuration(service["TimeoutStopSec"]); err != nil || stop < d.Delay+d.Timeout+10*time.Second {
		t.Errorf("TimeoutStopSec=%s; want more than the drain's %v", service["TimeoutStopSec"], d.Delay+d.Timeout)
	}
	if _, port, _ := net.SplitHostPort(config.Default().Listen); socket["ListenStream"] != port {
		t.Errorf("ListenStream=%s; want the default port %s", socket["ListenStream"], port)
	}
	if socket["FileDescriptorName"] == "admin" {
		t.Error("the clients' socket is named as the admin listener's")
	}
	if service["Requires"] != "kvgate.socket" || service["Also"] != "kvgate.socket" {
		t.Errorf("the service does not bring its socket: %v", service)
	}
	// Flags that do not exist end the program with code 2.
	for _, line := range []string{service["ExecStart"], service["ExecReload"]} {
		words := strings.Fields(line)
		if words[0] != "/usr/local/bin/kvgate" {
			t.Errorf("%s is not where the page installs it", words[0])
		}
		c := exec.Command(kvgateBinary(t), append(slices.Clone(words[1:]), "--help")...)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", line, err, out)
		}
	}
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Log("systemd-analyze is not there to be asked")
		return
	}
	out, _ := exec.Command("systemd-analyze", "verify", "--man=no", "../../deploy/systemd/kvgate.service", "../../deploy/systemd/kvgate.socket").CombinedOutput()
	for line := range strings.Lines(string(out)) {
		switch {
		case strings.Contains(line, "is not executable"): // it is not installed here
		case strings.Contains(line, "notify-reload"): // older than 253
		case strings.Contains(line, "kvgate."):
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
}
