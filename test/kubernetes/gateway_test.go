package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A gateway is kvgate serve at work.
type gateway struct {
	t           testing.TB
	cmd         *exec.Cmd
	log         string
	data, admin string // URLs
	http        *http.Client
}

// startGateway runs kvgate with pools, YAML below the key pools with KUBECONFIG for the path of the service account's.
func startGateway(t testing.TB, pools string) *gateway {
	t.Helper()
	g := newGateway(t, fmt.Sprintf("http://127.0.0.1:%d", api.nextPort), fmt.Sprintf("http://127.0.0.1:%d", api.nextPort+1))
	api.nextPort += 2
	config := fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nlog: {access: \"off\"}\ndebug: {headers: true}\ndrain: {delay: 0s, timeout: 2s}\nscrape: {interval: 2s}\npools:\n%s",
		strings.TrimPrefix(g.data, "http://"), strings.TrimPrefix(g.admin, "http://"), strings.ReplaceAll(pools, "KUBECONFIG", api.kubeconfig))
	file := filepath.Join(t.TempDir(), "kvgate.yaml")
	must(t, os.WriteFile(file, []byte(config), 0o600))
	g.run(process(os.Getenv("KVGATE_BINARY"), "serve", "-c", file, "--start-timeout", "3s"))
	until(t, "the data listener is open", func() (bool, string) {
		resp, err := g.http.Get(g.data + "/v1/models")
		if err != nil {
			return false, err.Error()
		}
		resp.Body.Close()
		return true, ""
	})
	return g
}

// newGateway returns a gateway that is to listen at these URLs.
func newGateway(t testing.TB, data, admin string) *gateway {
	return &gateway{
		t: t, data: data, admin: admin, log: filepath.Join(t.TempDir(), "log"),
		http: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}},
	}
}

// run starts the process, which is ended with the test.
func (g *gateway) run(cmd *exec.Cmd) {
	t := g.t
	t.Helper()
	log, err := os.Create(g.log)
	must(t, err)
	defer log.Close()
	g.cmd = cmd
	g.cmd.Stdout, g.cmd.Stderr = log, log
	must(t, start(g.cmd))
	t.Cleanup(func() {
		g.http.CloseIdleConnections()
		g.cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(20*time.Second, func() { g.cmd.Process.Kill() })
		g.cmd.Wait()
		late.Stop()
		if t.Failed() {
			lines := strings.Split(g.logged(), "\n")
			t.Logf("the gateway's log:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
		// What client-go has to say must not get into the log on ways of its own.
		for line := range strings.SplitSeq(strings.TrimSpace(g.logged()), "\n") {
			if line != "" && !strings.HasPrefix(line, "{") {
				t.Errorf("a line of the log is no JSON: %s", line)
			}
		}
	})
}

func (g *gateway) logged() string {
	data, _ := os.ReadFile(g.log)
	return string(data)
}

// until waits for something, and says what it saw last if it does not come.
func until(t testing.TB, what string, f func() (bool, string)) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute) // a busy machine may take most of one
	for {
		ok, saw := f()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s; saw %s", what, saw)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (g *gateway) get(path string) (int, string) {
	resp, err := g.http.Get(g.admin + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data)
}

// A source is a row of /debug/sources.
type source struct {
	Pool      string `json:"pool"`
	Targets   int    `json:"targets"`
	LastError string `json:"last_error"`
}

// awaitSource waits until a pool's source has n targets and an error that holds want; "" is none.
func (g *gateway) awaitSource(pool string, n int, want string) {
	g.t.Helper()
	until(g.t, fmt.Sprintf("pool %s has %d targets and says %q", pool, n, want), func() (bool, string) {
		_, text := g.get("/debug/sources")
		var list []source
		if json.Unmarshal([]byte(text), &list) != nil {
			return false, text
		}
		for _, s := range list {
			if s.Pool == pool {
				return s.Targets == n && (s.LastError == "") == (want == "") && strings.Contains(s.LastError, want), fmt.Sprintf("%+v", s)
			}
		}
		return false, text
	})
}

// An endpoint is what /debug/snapshot says of one.
type endpoint struct {
	ID      string   `json:"id"`
	URL     string   `json:"url"`
	Dialect string   `json:"dialect"`
	Healthy bool     `json:"healthy"`
	State   []string `json:"state"`
	Models  []string `json:"models"`
}

func (e *endpoint) is(state string) bool { return strings.Contains(strings.Join(e.State, ","), state) }

func (g *gateway) endpoints() (list []endpoint) {
	_, text := g.get("/debug/snapshot")
	var s struct{ Endpoints []endpoint }
	if json.Unmarshal([]byte(text), &s) != nil {
		return nil
	}
	return s.Endpoints
}

// awaitEndpoints waits until exactly these endpoints are ready and known to serve a model: IDs without the pool.
func (g *gateway) awaitEndpoints(want ...string) {
	g.t.Helper()
	until(g.t, fmt.Sprintf("the endpoints are %v", want), func() (bool, string) {
		list := g.endpoints()
		ready := map[string]bool{}
		for _, e := range list {
			if _, name, _ := strings.Cut(e.ID, "/"); !e.is("not_ready") && len(e.Models) > 0 {
				ready[name] = true
			}
		}
		ok := len(ready) == len(want)
		for _, name := range want {
			ok = ok && ready[name]
		}
		return ok, fmt.Sprintf("%+v", list)
	})
}

// An answer is what a client got.
type answer struct {
	status   int
	endpoint string // ID without the pool
	body     string
	err      error
}

func (a answer) ok() bool {
	return a.err == nil && a.status == http.StatusOK && strings.Contains(a.body, "data: [DONE]")
}

// ask sends one streamed request and reads its answer to the end.
func (g *gateway) ask(ctx context.Context, model string, tokens int) (a answer) {
	body, _ := json.Marshal(map[string]any{
		"model": model, "stream": true, "max_tokens": tokens, "ignore_eos": true,
		"messages": []map[string]string{{"role": "user", "content": "How far is it to the moon?"}},
	})
	req, err := http.NewRequestWithContext(ctx, "POST", g.data+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := g.http.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	_, a.endpoint, _ = strings.Cut(resp.Header.Get("X-Kvgate-Endpoint"), "/")
	a.status, a.body, a.err = resp.StatusCode, string(data), err
	return a
}

// rss is the gateway's resident memory in bytes.
func (g *gateway) rss() int64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.cmd.Process.Pid))
	must(g.t, err)
	for line := range strings.SplitSeq(string(data), "\n") {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			must(g.t, err)
			return kib << 10
		}
	}
	g.t.Fatal("no VmRSS")
	return 0
}

// heap is the gateway's live heap in bytes after a collection, which asking for this profile makes: the least of three, since
// what is allocated between the two requests counts as well.
func (g *gateway) heap() int64 {
	least := math.Inf(1)
	for range 3 {
		g.get("/debug/pprof/heap?gc=1&debug=1")
		v := g.metric("go_memstats_heap_alloc_bytes")
		if v < 0 {
			g.t.Fatal("no go_memstats_heap_alloc_bytes in /metrics")
		}
		least = min(least, v)
	}
	return int64(least)
}

// startServer runs a simulated model server at an address of a pod's, and returns what ends it.
func startServer(t testing.TB, address string, args ...string) (stop func(syscall.Signal)) {
	t.Helper()
	c := process(os.Getenv("KVGATE_BINARY"), append([]string{"sim", "--listen", address, "--allow-remote", "--model", "llama", "--speedup", "50"}, args...)...)
	var log bytes.Buffer
	c.Stderr = &log
	must(t, start(c))
	var once sync.Once
	stop = func(s syscall.Signal) {
		once.Do(func() {
			c.Process.Signal(s)
			late := time.AfterFunc(20*time.Second, func() { c.Process.Kill() })
			c.Wait()
			late.Stop()
		})
	}
	t.Cleanup(func() { stop(syscall.SIGKILL) })
	until(t, "the model server at "+address+" answers", func() (bool, string) {
		resp, err := http.Get("http://" + strings.Replace(address, "0.0.0.0", podRange+"0.1", 1) + "/health")
		if err != nil {
			return false, err.Error()
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK, resp.Status
	})
	return stop
}
