package httpcases_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"kvgate/test/httpcases"
)

// With another proxy in front, whatever the two make of a request between them, nothing
// that was smuggled, and nothing malformed, reaches an endpoint, and no client gets
// another's answer. The proxies are those that distributions package, as they come:
// without either, its test is skipped.

func TestChainNginx(t *testing.T) {
	chain(t, "nginx", func(dir, listen, gate string) (string, []string) {
		return fmt.Sprintf(`
daemon off;
worker_processes 1;
pid %[1]s/nginx.pid;
error_log %[1]s/error.log warn;
events { worker_connections 256; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	client_max_body_size 64m;
	underscores_in_headers on;
	ignore_invalid_headers off;
	upstream gate { server %[3]s max_fails=0; keepalive 8; }
	server {
		listen %[2]s;
		location / {
			proxy_pass http://gate;
			proxy_http_version 1.1;
			proxy_set_header Connection "";
			proxy_buffering off;
			proxy_request_buffering off;
		}
	}
}
`, dir, listen, gate), []string{"-p", dir, "-e", filepath.Join(dir, "error.log"), "-c"}
	})
}

func TestChainHAProxy(t *testing.T) {
	chain(t, "haproxy", func(_, listen, gate string) (string, []string) {
		return fmt.Sprintf(`
global
	maxconn 256
	tune.bufsize 65536
defaults
	mode http
	timeout connect 2s
	timeout client 10s
	timeout server 10s
	timeout http-request 5s
	retries 0
	option http-keep-alive
frontend front
	bind %s
	option accept-invalid-http-request
	default_backend gate
backend gate
	http-reuse always
	server gate %s
`, listen, gate), []string{"-db", "-f"}
	})
}

// chain plays the cases that a client makes, through the program in front of kvgate.
func chain(t *testing.T, program string, config func(dir, listen, gate string) (file string, args []string)) {
	path, err := exec.LookPath(program)
	if err != nil {
		// Debian puts servers where users don't look.
		if path, err = exec.LookPath("/usr/sbin/" + program); err != nil {
			t.Skipf("%s is not installed", program)
		}
	}
	o := httpcases.Options{
		OnlyBehind: true,
		Runner:     bounds,
		Skip: func(c *httpcases.Case) bool {
			return c.Slow || c.Category == "response" || c.Category == "limits" || c.Category == "client-gone"
		},
	}
	passed, _ := httpcases.Play(t, o, func(t *testing.T, endpoint string) string {
		gate := startGate(t, endpoint)
		listen := freeAddr(t)
		dir := t.TempDir()
		file, args := config(dir, listen, gate)
		name := filepath.Join(dir, program+".conf")
		if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		var out syncBuffer
		cmd := exec.Command(path, append(args, name)...)
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Signal(os.Interrupt)
			time.AfterFunc(2*time.Second, func() { cmd.Process.Kill() })
			cmd.Wait()
			if t.Failed() {
				t.Logf("%s said:\n%s", program, out.String())
			}
		})
		return listen
	})
	if passed < 100 {
		t.Errorf("only %d cases were played", passed)
	}
}

// freeAddr returns a loopback address that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
