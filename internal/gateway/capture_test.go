package gateway

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvgate/internal/capture"
	"kvgate/internal/modelsim"
)

// askAdmin posts to the admin listener with a token.
func askAdmin(t *testing.T, r *run, path, token string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.AdminAddr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// startWithToken runs a gateway that has an admin token.
func startWithToken(t *testing.T, text string) *run {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	text = strings.Replace(header, "admin: {", "admin: {token: planted-token, ", 1) + text
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return startFile(t, file, Options{})
}

func refused(t *testing.T, resp *http.Response, status int, want string) {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status || !strings.Contains(string(b), want) {
		t.Errorf("status %d, %v: %s; want %d and %q", resp.StatusCode, err, b, status, want)
	}
	_ = resp.Body.Close()
}

// Without an admin token, without debug.capture, with a wrong token or beyond the bounds there is no capture, and the answer
// says how there would be one.
func TestCaptureIsOffUnlessAllowed(t *testing.T) {
	s := sim(t, modelsim.Options{})
	const path = "/-/capture?for=10s&max_bytes=1MiB"
	t.Run("no token", func(t *testing.T) {
		r := start(t, "debug: {capture: {}}\n"+onePool(s.URL()), Options{})
		refused(t, askAdmin(t, r, path, ""), 404, "set admin.token")
	})
	t.Run("not allowed", func(t *testing.T) {
		r := startWithToken(t, onePool(s.URL()))
		refused(t, askAdmin(t, r, path, "planted-token"), 403, "debug: {capture: {}}")
		if _, page := get(t, "http://"+r.AdminAddr()+"/metrics"); !strings.Contains(page, "\nkvgate_capture_running 0\n") {
			t.Error("the metric is not there")
		}
	})
	t.Run("allowed", func(t *testing.T) {
		r := startWithToken(t, "debug: {capture: {max_for: 10s, max_bytes: 1MiB}}\n"+onePool(s.URL()))
		refused(t, askAdmin(t, r, path, ""), 401, "admin token")
		refused(t, askAdmin(t, r, path, "wrong"), 401, "admin token")
		refused(t, askAdmin(t, r, "/-/capture?for=11s&max_bytes=1MiB", "planted-token"), 400, "at most 10s (debug.capture.max_for)")
		refused(t, askAdmin(t, r, "/-/capture?for=1s&max_bytes=2MiB", "planted-token"), 400, "debug.capture.max_bytes")
		refused(t, askAdmin(t, r, "/-/capture?for=x", "planted-token"), 400, "?for=30s&max_bytes=1MiB")
		if strings.Contains(r.log.String(), "capture of request bodies") {
			t.Errorf("a capture began:\n%s", r.log)
		}
	})
}

// A capture shows bodies as they come, without credentials, one at a time; it is logged and counted, ends by itself, and
// nothing is captured before or after.
func TestCapture(t *testing.T) {
	s := sim(t, modelsim.Options{})
	r := startWithToken(t, "debug: {capture: {}}\n"+onePool(s.URL()))
	const model = "meta-llama/Llama-3.1-8B-Instruct"
	key := fmt.Sprintf("planted-key-%d", time.Now().UnixNano())
	send := func(prompt string) {
		t.Helper()
		body := fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%q,"user":%q}`, model, prompt, key)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.Addr()+"/v1/completions?q=planted-query", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("status %d", resp.StatusCode)
		}
	}
	send("before")
	resp := askAdmin(t, r, "/-/capture?for=1m&max_bytes=400B&model="+model, "planted-token")
	if resp.StatusCode != 200 || resp.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("status %d, %v", resp.StatusCode, resp.Header)
	}
	refused(t, askAdmin(t, r, "/-/capture?for=1s&max_bytes=1KiB", "planted-token"), 409, "running already")
	if _, page := get(t, "http://"+r.AdminAddr()+"/metrics"); !strings.Contains(page, "\nkvgate_capture_running 1\n") {
		t.Error("the metric doesn't tell that a capture runs")
	}
	lines := bufio.NewScanner(resp.Body)
	all := ""
	next := func() (line capture.Request) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("no line: %v", lines.Err())
		}
		all += lines.Text() + "\n"
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		return line
	}
	send("the first")
	// It comes at once, not at the end.
	if l := next(); l.Model != model || l.Path != "/v1/completions" || l.Method != "POST" || !strings.Contains(l.Body, `"prompt":"the first"`) || l.RequestID == "" || l.Truncated {
		t.Errorf("%+v", l)
	}
	if code, _ := post(t, "http://"+r.Addr()+"/v1/completions", `{"model":"nobody","prompt":"of another model"}`); code != 404 {
		t.Errorf("status %d", code)
	}
	send(strings.Repeat("second ", 100)) // beyond the size
	if l := next(); !l.Truncated || len(l.Body) > 400 || l.BodyBytes < 700 {
		t.Errorf("%+v", l)
	}
	send("after")
	var end capture.End
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &end) != nil || end.End != capture.EndedBySize || end.Requests != 2 || end.BodyBytes != 400 || lines.Scan() {
		t.Errorf("%+v, %q", end, lines.Text())
	}
	for _, secret := range []string{key, "planted-token", "planted-query", "of another model", "before", "after"} {
		if strings.Contains(all, secret) {
			t.Errorf("%q is in the capture:\n%s", secret, all)
		}
	}
	eventually(t, "the end is logged", func() bool { return strings.Contains(r.log.String(), "capture of request bodies ended") })
	log := r.log.String()
	if strings.Count(log, "capture of request bodies began") != 1 || !strings.Contains(log, `"why":"size","requests":2`) || strings.Contains(log, "the first") || strings.Contains(log, key) {
		t.Errorf("log:\n%s", log)
	}
	eventually(t, "the metric tells the end", func() bool {
		_, page := get(t, "http://"+r.AdminAddr()+"/metrics")
		return strings.Contains(page, "\nkvgate_capture_running 0\n")
	})

	// The next one ends by time, one that nobody reads with its reader, and one that runs with the gateway.
	resp = askAdmin(t, r, "/-/capture?for=50ms&max_bytes=1KiB", "planted-token")
	b, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(b), `"end":"time","requests":0`) {
		t.Errorf("%v, %s", err, b)
	}
	eventually(t, "a second end is logged", func() bool { return strings.Count(r.log.String(), "capture of request bodies ended") == 2 })
	_ = askAdmin(t, r, "/-/capture?for=1m&max_bytes=1KiB", "planted-token").Body.Close()
	eventually(t, "a third end is logged", func() bool { return strings.Contains(r.log.String(), `"why":"the one who asked has gone"`) })
	eventually(t, "another can begin", func() bool {
		resp = askAdmin(t, r, "/-/capture?for=1m&max_bytes=1KiB", "planted-token")
		return resp.StatusCode == 200
	})
	r.stop()
	if b, err = io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), capture.EndedByStop) {
		t.Errorf("%v, %s", err, b)
	}
}
