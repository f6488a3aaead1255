package dashboard

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
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
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var (
	binary = flag.String("kvgate", "../../kvgate", "the program to look at")
	shots  = flag.String("shots", "../../dist/dashboard", "directory for screenshots")
)

// start runs kvgate with args until the test ends.
func start(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if testing.Short() {
		t.Skip("a browser and servers take their time")
	}
	bin, err := filepath.Abs(*binary)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err != nil {
		t.Fatalf("%v; make build makes it", err)
	}
	c := exec.Command(bin, args...)
	var out bytes.Buffer
	var mu sync.Mutex
	c.Stdout = writer(func(p []byte) { mu.Lock(); out.Write(p); mu.Unlock() })
	c.Stderr = c.Stdout
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			text := out.String()
			t.Logf("kvgate %s:\n%s", args[0], text[max(0, len(text)-4000):])
		}
	})
	return c
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) { w(p); return len(p), nil }

// ports finds n free ports in a row.
func ports(t *testing.T, n int) int {
	t.Helper()
	for base := 21000; base < 60000; base += 1500 {
		free := true
		for _, p := range []int{base, base + n/2, base + n - 1} {
			ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
			if err != nil {
				free = false
				break
			}
			ln.Close()
		}
		if free {
			return base
		}
	}
	t.Fatal("no free ports")
	return 0
}

// A gateway is a running kvgate.
type gateway struct {
	cmd         *exec.Cmd
	data, admin string // URLs
}

// serve runs a gateway with pools as the configuration says below `pools:`.
func serve(t *testing.T, pools string, more ...string) *gateway {
	t.Helper()
	p := ports(t, 2)
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:%d\nadmin: {listen: 127.0.0.1:%d, token_file: %s}\nlog: {access: off}\nlimits: {prefix_index_bytes: 8MiB}\n%s\npools:\n%s", p, p+1, token, strings.Join(more, "\n"), pools)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	g := &gateway{data: fmt.Sprintf("http://127.0.0.1:%d", p), admin: fmt.Sprintf("http://127.0.0.1:%d", p+1)}
	g.cmd = start(t, "serve", "-c", file, "--start-timeout", "20s")
	eventually(t, "the gateway listens", func() error {
		c, err := net.Dial("tcp", strings.TrimPrefix(g.data, "http://"))
		if err == nil {
			c.Close()
		}
		return err
	})
	return g
}

const secret = "made-up-for-this-test-only"

// sims runs n simulated servers and returns the YAML list of their URLs.
func sims(t *testing.T, n int, args ...string) (urls []string) {
	t.Helper()
	base := ports(t, n)
	start(t, append([]string{"sim", "-n", fmt.Sprint(n), "--listen", fmt.Sprintf("127.0.0.1:%d", base)}, args...)...)
	for i := range n {
		urls = append(urls, fmt.Sprintf("http://127.0.0.1:%d", base+i))
	}
	eventually(t, "the servers answer", func() error {
		resp, err := http.Get(urls[n-1] + "/v1/models")
		if err == nil {
			resp.Body.Close()
		}
		return err
	})
	return urls
}

func poolYAML(name string, urls []string, more string) string {
	return fmt.Sprintf("  - name: %s\n    discovery: {static: [%s]}\n%s", name, strings.Join(urls, ", "), more)
}

func eventually(t *testing.T, what string, fn func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = fn(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

func get(t *testing.T, url string, v any) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		t.Fatalf("%s: %v", url, err)
	}
}

// load keeps n clients asking until the test ends.
func (g *gateway) load(t *testing.T, n int, body func(i int) string) {
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { stop(); wg.Wait() })
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: n}}
	var mu sync.Mutex
	count := 0
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				count++
				i := count
				mu.Unlock()
				req, _ := http.NewRequestWithContext(ctx, "POST", g.data+"/v1/chat/completions", strings.NewReader(body(i)))
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("X-Tenant", fmt.Sprint("team-", i%3))
				resp, err := client.Do(req)
				if err != nil {
					time.Sleep(20 * time.Millisecond)
					continue
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if resp.StatusCode != 200 {
					time.Sleep(50 * time.Millisecond)
				}
			}
		})
	}
}

// chat is a request with a prompt of about words words; those with the same group share a prefix of half of that.
func chat(model string, i, group, words, output int) string {
	prefix := strings.Repeat(fmt.Sprintf("group %d shares this sentence. ", i%group), words/8)
	rest := strings.Repeat(fmt.Sprintf("request %d is alone here. ", i), words/8)
	return fmt.Sprintf(`{"model":%q,"stream":true,"stream_options":{"include_usage":true},"max_tokens":%d,"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, model, output, prefix, rest)
}

// A page is a tab of the browser.
type page struct {
	t      *testing.T
	ctx    context.Context
	mu     sync.Mutex
	faults []string // what the console complained of
}

var chromium = sync.OnceValue(func() string {
	for _, name := range []string{os.Getenv("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path
		}
	}
	return ""
})

// open opens the dashboard in a browser of its own.
func (g *gateway) open(t *testing.T, path string, width, height int64, scheme string) *page {
	t.Helper()
	if chromium() == "" {
		t.Fatal("chromium is not installed: apt-get install chromium")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(chromium()), chromedp.NoSandbox,
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("no-proxy-server", true), chromedp.WSURLReadTimeout(time.Minute))
	alloc, stopAlloc := chromedp.NewExecAllocator(context.Background(), opts...)
	ctx, stop := chromedp.NewContext(alloc)
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	t.Cleanup(func() { cancel(); stop(); stopAlloc() })
	p := &page{t: t, ctx: ctx}
	chromedp.ListenTarget(ctx, func(ev any) {
		fault := ""
		switch ev := ev.(type) {
		case *runtime.EventExceptionThrown:
			fault = ev.ExceptionDetails.Error()
		case *runtime.EventConsoleAPICalled:
			if ev.Type == runtime.APITypeError {
				fault = fmt.Sprint(ev.Args)
			}
		case *log.EventEntryAdded:
			if ev.Entry.Level == log.LevelError {
				fault = ev.Entry.Text + " " + ev.Entry.URL
			}
		}
		if fault != "" {
			p.mu.Lock()
			p.faults = append(p.faults, fault)
			p.mu.Unlock()
		}
	})
	p.run(log.Enable(), chromedp.EmulateViewport(width, height),
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}),
		chromedp.Navigate(g.admin+"/dashboard/"+path))
	p.until(`document.querySelector("#status-text").textContent !== "connecting" && document.querySelectorAll(".figure").length === 8`)
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, f := range p.faults {
			t.Errorf("the browser's console: %s", f)
		}
	})
	return p
}

func (p *page) run(actions ...chromedp.Action) {
	p.t.Helper()
	if err := chromedp.Run(p.ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// eval returns what the JavaScript is worth.
func eval[T any](p *page, js string) (v T) {
	p.t.Helper()
	p.run(chromedp.Evaluate(js, &v))
	return v
}

// until waits until the JavaScript is true.
func (p *page) until(js string) {
	p.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if eval[bool](p, "!!("+js+")") {
			return
		}
		if time.Now().After(deadline) {
			text := eval[string](p, `document.body.innerText`)
			p.t.Fatalf("not true within a minute: %s\nthe page:\n%s", js, text[:min(len(text), 3000)])
		}
	}
}

func (p *page) text(selector string) string {
	p.t.Helper()
	return eval[string](p, fmt.Sprintf(`(document.querySelector(%q) || {innerText: "(missing)"}).innerText`, selector))
}

// shot keeps what the window shows.
func (p *page) shot(name string) {
	p.t.Helper()
	var png []byte
	p.run(chromedp.CaptureScreenshot(&png))
	if err := os.MkdirAll(*shots, 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(*shots, name+".png"), png, 0o644); err != nil {
		p.t.Fatal(err)
	}
}

// theme switches between light and dark.
func (p *page) theme(scheme string) {
	p.run(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}))
}

// processorTime is how much processor time a process has used.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Skip("no /proc to read processor times from")
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	var ticks int64
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
