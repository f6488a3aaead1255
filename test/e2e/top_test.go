//go:build unix

package e2e

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"

	"kvgate/config"
	"kvgate/internal/gateway"
	"kvgate/internal/modelsim"
)

// A terminal keeps what a program has drawn on it. It knows as much of the language of terminals as tcell speaks.
type terminal struct {
	mu    sync.Mutex
	buf   []byte // not yet understood
	raw   bytes.Buffer
	lines [24][200]rune
	x, y  int
}

var escape = regexp.MustCompile(`^\x1b(\[([0-9;?<>=]*)[ -/]*([@-~])|\][^\x07\x1b]*(\x07|\x1b\\)|P[^\x1b]*\x1b\\|[()][A-Z0-9]|[=>78Mc\\])`)

func (m *terminal) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.raw.Write(b)
	m.buf = append(m.buf, b...)
	for len(m.buf) > 0 {
		if m.buf[0] == 0x1b {
			loc := escape.FindSubmatch(m.buf)
			if loc == nil {
				if len(m.buf) > 200 {
					m.buf = m.buf[1:]
					continue
				}
				break // the rest is to come
			}
			m.control(string(loc[2]), string(loc[3]))
			m.buf = m.buf[len(loc[0]):]
			continue
		}
		r, n := utf8.DecodeRune(m.buf)
		if r == utf8.RuneError && !utf8.FullRune(m.buf) {
			break
		}
		switch m.buf = m.buf[n:]; {
		case r == '\r':
			m.x = 0
		case r == '\n':
			m.y = min(m.y+1, len(m.lines)-1)
		case r == '\b':
			m.x = max(0, m.x-1)
		case r >= ' ' && m.x < len(m.lines[0]):
			m.lines[m.y][m.x] = r
			m.x++
		}
	}
	return len(b), nil
}

func (m *terminal) control(args, verb string) {
	var n [2]int
	for i, a := range strings.SplitN(args, ";", 2) {
		n[i], _ = strconv.Atoi(a)
	}
	switch verb {
	case "H":
		m.y, m.x = min(max(n[0]-1, 0), len(m.lines)-1), max(n[1]-1, 0)
	case "C":
		m.x += max(1, n[0])
	case "J":
		m.lines = [24][200]rune{}
	case "K":
		for x := m.x; x < len(m.lines[0]); x++ {
			m.lines[m.y][x] = ' '
		}
	}
}

// String is what it shows.
func (m *terminal) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	for _, l := range m.lines {
		text := strings.Map(func(r rune) rune {
			if r == 0 {
				return ' '
			}
			return r
		}, string(l[:]))
		b.WriteString(strings.TrimRight(text, " ") + "\n")
	}
	return b.String()
}

// until waits until it shows text.
func (m *terminal) until(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !strings.Contains(m.String(), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%q does not come up:\n%s", text, m.String())
		}
	}
}

// kvgate top on a terminal of 80 columns: it draws, sorts, filters, and leaves the terminal as it was.
func TestTopOnATerminal(t *testing.T) {
	sim, err := modelsim.New(modelsim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer sim.Close(context.Background())
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nlog: {access: off}\nlimits: {prefix_index_bytes: 1MiB}\npools:\n  - name: llama\n    discovery: {static: [\"" + sim.URL() + "\"]}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file, gateway.ConfigOptions())
	if err != nil {
		t.Fatal(err)
	}
	cfg.Drain.Delay = 0
	g, err := gateway.New(cfg, gateway.Options{LogOutput: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = g.Run(ctx)
	}()
	defer func() { stop(); <-ended }()
	<-g.Ready()

	bin := "kvgate"
	if b := os.Getenv("KVGATE_BINARY"); b != "" {
		bin = b
	}
	c := exec.Command(bin, "top", "--every", "100ms", "--admin", "http://"+g.AdminAddr())
	c.Env = append(os.Environ(), "TERM=xterm-256color", "LANG=C.UTF-8")
	tty, err := pty.StartWithSize(c, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	defer func() { _ = c.Process.Kill() }()
	var m terminal
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&m, tty)
	}()
	press := func(keys, want string) {
		t.Helper()
		if _, err := tty.WriteString(keys); err != nil {
			t.Fatal(err)
		}
		m.until(t, want)
	}
	m.until(t, "ENDPOINT")
	m.until(t, "127.0.0.1:")
	press("/", "filter:")
	press("zzz\r", "none of 1 endpoints")
	press("\x1b", "q quit")
	press("\t", "no request to show")
	press("?", "share of the KV cache")
	press("x", "ENDED")
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 24, Cols: 150}); err != nil {
		t.Fatal(err)
	}
	press("\t", "PREFILL/S")
	m.mu.Lock()
	at := m.raw.Len()
	m.mu.Unlock()
	if _, err := tty.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("after q: %v", err)
	}
	<-read
	rest := string(m.raw.Bytes()[at:])
	if !strings.Contains(rest, "\x1b[?1049l") {
		t.Errorf("the terminal is not given back: %q", rest)
	}

	// Without a terminal it says what to do instead.
	c = exec.Command(bin, "top", "--admin", "http://"+g.AdminAddr())
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // so that there is none to open
	out, err := c.CombinedOutput()
	ee, ok := errors.AsType[*exec.ExitError](err)
	if !ok || ee.ExitCode() != 1 || !strings.Contains(string(out), "try: kvgate top --once") {
		t.Errorf("without a terminal: %v %s", err, out)
	}
	out, err = exec.Command(bin, "top", "--once", "--admin", "http://"+g.AdminAddr()).Output()
	if err != nil || !strings.Contains(string(out), "ENDPOINT") || !strings.Contains(string(out), "ready") {
		t.Errorf("once: %v %s", err, out)
	}
}
