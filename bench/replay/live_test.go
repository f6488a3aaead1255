package replay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/config"
	"kvgate/internal/gateway"
	"kvgate/internal/modelsim"
)

const model = "meta-llama/Llama-3.1-8B-Instruct"

// gate starts a gateway in front of n simulated servers that records into the file it returns, and what ends it.
func gate(t *testing.T, n int, speedup float64, kvTokens int) (url, file string, end func()) {
	t.Helper()
	var urls []string
	for range n {
		s, err := modelsim.New(modelsim.Options{Speedup: speedup, KVTokens: kvTokens})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		urls = append(urls, s.URL())
	}
	dir := t.TempDir()
	file = filepath.Join(dir, "record.jsonl")
	name := filepath.Join(dir, "config.yaml")
	text := "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\nlog: {access: 'off'}\ndrain: {delay: 0s, timeout: 10s}\nscrape: {interval: 50ms}\npools:\n  - name: p\n    discovery: {static: [" +
		strings.Join(urls, ", ") + "]}\nrecord: {file: " + file + "}\n"
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(name, gateway.ConfigOptions())
	if err != nil {
		t.Fatal(err)
	}
	g, err := gateway.New(cfg, gateway.Options{LogOutput: io.Discard, WatchEvery: -1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := g.Run(ctx)
		done <- err
	}()
	select {
	case <-g.Ready():
	case err := <-done:
		t.Fatal(err)
	case <-time.After(20 * time.Second):
		t.Fatal("the gateway is not ready")
	}
	ended := sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(ended)
	return "http://" + g.Addr(), file, ended
}

// What a gateway recorded of real servers, when simulated, comes out about as it was measured.
func TestRecordedRunIsPredicted(t *testing.T) {
	const servers, requests, rate, chats = 2, 120, 15.0, 12
	url, file, end := gate(t, servers, 1, 100_000)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}, Timeout: time.Minute}
	defer client.CloseIdleConnections()
	rnd := rand.New(rand.NewPCG(5, 6))
	prompts := make([]string, chats)
	for i := range prompts {
		prompts[i] = fmt.Sprint("chat ", i, " plantedprompt ")
	}
	words := strings.Fields("the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after words called just where most know")
	var wg sync.WaitGroup
	began := time.Now()
	at := time.Duration(0)
	for range requests {
		at += time.Duration(rnd.ExpFloat64() / rate * 1e9)
		i := rnd.IntN(chats)
		var more strings.Builder
		for range 100 + rnd.IntN(1500) {
			more.WriteString(words[rnd.IntN(len(words))] + " ")
		}
		prompts[i] += more.String()
		body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":%d,"user":"planteduser%d","messages":[{"role":"user","content":%q}]}`, model, 20+rnd.IntN(60), i, prompts[i])
		time.Sleep(time.Until(began.Add(at))) // arrivals are what this is about
		wg.Go(func() {
			resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
				t.Errorf("%d %.200s %v", resp.StatusCode, b, err)
			}
		})
	}
	wg.Wait()
	end()
	data, err := os.ReadFile(file)
	if err != nil || bytes.Contains(data, []byte("planted")) {
		t.Fatalf("%v, or something of a prompt is in the record", err)
	}

	r := read(t, ReadOptions{}, file)
	if n := len(r.Workload.Requests); n != requests || r.Failed+r.Rejected+r.Guessed > 0 || r.Fleet.Endpoints != servers || r.Fleet.Policy != "auto" || r.Fleet.KVTokens < 99_000 || r.Fleet.KVTokens > 100_000 {
		t.Fatalf("%d requests, %+v", n, r)
	}
	server := profile(t)
	server.KVTokens = int(r.Fleet.KVTokens)
	p, err := New(r, Options{Server: server})
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.Compare()
	if err != nil || c == nil {
		t.Fatalf("%v, %v", c, err)
	}
	var out bytes.Buffer
	rep := Report{Replay: p, Profile: server.Name, Comparison: c}
	if err := rep.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", &out)
	// Live, a step that is late on a busy machine delays everybody; hence the width.
	m, s := c.Measured, c.Simulated
	if raceEnabled {
		return // servers, gateway and clients are all too slow to be what is simulated
	}
	within := func(what string, a, b, factor float64) {
		t.Helper()
		if a <= 0 || b <= 0 || a/b > factor || b/a > factor {
			t.Errorf("%s: %g measured, %g simulated; want them within a factor of %g", what, a, b, factor)
		}
	}
	within("TTFT mean", m.TTFTMean.Seconds(), s.TTFTMean.Seconds(), 2.5)
	within("TTFT p50", m.TTFTP50.Seconds(), s.TTFTP50.Seconds(), 2.5)
	within("TPOT p50", m.TPOTP50.Seconds(), s.TPOTP50.Seconds(), 2)
	within("duration p50", m.E2EP50.Seconds(), s.E2EP50.Seconds(), 2)
	if d := m.HitRatio - s.HitRatio; m.HitRatio < 0.3 || d < -0.15 || d > 0.15 {
		t.Errorf("hit ratio: %g measured, %g simulated", m.HitRatio, s.HitRatio)
	}
}
