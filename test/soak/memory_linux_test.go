package soak

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// More request bytes than the process may have memory: what fits is served, the rest is told to come back, and the process
// stays below GOMEMLIMIT, whatever is configured for bodies.
func TestMemoryLimit(t *testing.T) {
	const limitMB, clients, bodyMB = 128, 64, 8
	dir := t.TempDir()
	server, listen, admin := freePort(t), freePort(t), freePort(t)
	url := func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }
	config := filepath.Join(dir, "config.yaml")
	text := fmt.Sprintf("listen: 127.0.0.1:%d\nadmin: {listen: \"127.0.0.1:%d\"}\nlimits: {prefix_index_bytes: 1MiB, in_flight_body_bytes: 4GiB}\ndrain: {delay: 0s, timeout: 1s}\n"+
		"pools: [{name: p, discovery: {static: [%q]}}]\n", listen, admin, url(server))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	sim := &process{t: t, args: []string{"sim", "--listen", fmt.Sprintf("127.0.0.1:%d", server), "--model", "m", "--speedup", "50"}}
	gate := &process{t: t, args: []string{"serve", "-c", config, "--watch", "-1s"}, env: []string{fmt.Sprintf("GOMEMLIMIT=%dMiB", limitMB)}}
	for _, p := range []*process{sim, gate} {
		p.start()
		t.Cleanup(func() { p.end(syscall.SIGKILL) })
	}
	if !within(time.Minute, func() bool {
		return strings.HasPrefix(get(url(admin)+"/-/ready"), "ready") && get(url(server)+"/v1/models") != ""
	}) {
		t.Fatalf("not ready: %s", gate.said.String())
	}
	if !send("POST", url(server)+"/sim/faults", `{"kind":"hang"}`) {
		t.Fatal("the server does not take its fault")
	}
	body := `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"padding":"` + strings.Repeat("y", bodyMB<<20) + `"}`
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	post := func() (int, string) {
		resp, err := client.Post(url(listen)+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err.Error()
		}
		return resp.StatusCode, string(b)
	}
	var served, refused atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			switch status, answer := post(); {
			case status == 200:
				served.Add(1)
			case status == 429 && strings.Contains(answer, `"code":"saturated"`),
				// It had more to send than the gateway waits for after a refusal, and then found the connection closed.
				status == 0 && (strings.Contains(answer, "broken pipe") || strings.Contains(answer, "connection reset")):
				refused.Add(1)
			default:
				t.Errorf("%d %.300s", status, answer)
			}
		})
	}
	// All are either refused or with the server, which hangs.
	held := func() (n int64) {
		_, after, _ := strings.Cut(get(url(admin)+"/metrics"), "kvgate_endpoint_inflight_requests{endpoint=\"p/127.0.0.1:"+fmt.Sprint(server)+"\"} ")
		_, _ = fmt.Sscan(after, &n)
		return n
	}
	if !within(time.Minute, func() bool { return held()+refused.Load() == clients }) {
		t.Errorf("%d are held and %d refused; want %d in all", held(), refused.Load(), clients)
	}
	if !send("DELETE", url(server)+"/sim/faults", "") {
		t.Error("the server does not clear its fault")
	}
	wg.Wait()
	peak := memoryKB(gate.pid(), "VmHWM") >> 10
	t.Logf("%d bodies of %d MiB: %d served, %d refused, %d MiB resident at most, with a limit of %d MiB", clients, bodyMB, served.Load(), refused.Load(), peak, limitMB)
	if served.Load() == 0 || refused.Load() == 0 {
		t.Error("want some of each")
	}
	// The program itself, which the runtime does not count, is resident too.
	if peak > limitMB+40 && !race {
		t.Errorf("%d MiB were resident; the limit is %d MiB", peak, limitMB)
	}
	if !within(20*time.Second, func() bool { status, _ := post(); return status == 200 }) {
		t.Error("it does not recover")
	}
	gate.end(syscall.SIGTERM)
	if gate.code != 0 {
		t.Errorf("code %d: %s", gate.code, tail(gate.said.String()))
	}
}
