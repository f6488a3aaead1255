package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A process that runs out of descriptors serves on when it has some again. The server
// runs in a process of its own with few of them.
func TestListenerOutOfDescriptors(t *testing.T) {
	if os.Getenv("KVGATE_TEST_FEW_DESCRIPTORS") != "" {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 40, Max: 40}); err != nil {
			t.Fatal(err)
		}
		e := startEdge(t, edgeOptions{connections: 1000}, serverOptions{})
		fmt.Printf("addr=%s\n", e.addr)
		io.Copy(io.Discard, os.Stdin)
		_, _, _, errs := e.ln.stats()
		fmt.Printf("errors=%d\n", errs)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestListenerOutOfDescriptors$", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), "KVGATE_TEST_FEW_DESCRIPTORS=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	out := bufio.NewScanner(stdout)
	var addr string
	for addr == "" && out.Scan() {
		addr, _ = strings.CutPrefix(out.Text(), "addr=")
		if addr == out.Text() {
			addr = ""
		}
	}
	get := func(c net.Conn, patience time.Duration) string {
		c.SetDeadline(time.Now().Add(patience))
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
		line, _ := bufio.NewReader(c).ReadString('\n')
		return strings.TrimSpace(line)
	}
	var conns []net.Conn
	served := 0
	for range 80 {
		c, err := net.Dial("tcp4", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for _, c := range conns {
		if get(c, 500*time.Millisecond) == "" {
			break
		}
		served++
	}
	if served == 0 || served >= 40 {
		t.Errorf("%d of 80 connections served with 40 descriptors", served)
	}
	for _, c := range conns {
		c.Close()
	}
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := get(c, 20*time.Second); got != "HTTP/1.1 200 OK" {
		t.Errorf("afterwards: %q", got)
	}
	stdin.Close()
	var errs int
	for out.Scan() {
		fmt.Sscanf(out.Text(), "errors=%d", &errs)
	}
	if errs == 0 {
		t.Error("it never ran out")
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
