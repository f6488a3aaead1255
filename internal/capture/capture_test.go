package capture

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// captured runs a session in which take does what it does, and returns the lines.
func captured(t *testing.T, o Options, take func(s *Session)) (lines []Request, end End) {
	t.Helper()
	s, err := New(o, Limits{time.Minute, 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	take(s)
	var out bytes.Buffer
	detached := 0
	end, err = s.Write(t.Context(), nil, func() { detached++ }, &out)
	if err != nil || detached != 1 {
		t.Fatalf("%v, detached %d times", err, detached)
	}
	all := strings.Split(strings.TrimSpace(out.String()), "\n")
	for _, line := range all[:len(all)-1] {
		var r Request
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		lines = append(lines, r)
	}
	var last End
	if err := json.Unmarshal([]byte(all[len(all)-1]), &last); err != nil || last != end {
		t.Errorf("the last line is %s; want %+v", all[len(all)-1], end)
	}
	return lines, end
}

func give(s *Session, model, head, body string) {
	s.Take([]byte("id"), []byte("POST"), []byte("/v1/completions"), []byte(model), []byte(head), []byte(body))
}

func TestEndsByTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		lines, end := captured(t, Options{For: 30 * time.Second, MaxBytes: 1000, Model: "m"}, func(s *Session) {
			give(s, "m", "Host: x\r\nUser-Agent: me\r\n", `{"model":"m"}`)
			give(s, "other", "", `{"model":"other"}`)
		})
		if time.Since(began) != 30*time.Second || end != (End{End: EndedByTime, Requests: 1, BodyBytes: 13}) {
			t.Errorf("%+v after %s", end, time.Since(began))
		}
		want := Request{
			Time: began.UTC(), RequestID: "id", Method: "POST", Path: "/v1/completions", Model: "m",
			Headers: []string{"Host: x", "User-Agent: me"}, BodyBytes: 13, Body: `{"model":"m"}`,
		}
		if len(lines) != 1 || fmt.Sprint(lines[0]) != fmt.Sprint(want) {
			t.Errorf("%+v; want %+v", lines, want)
		}
	})
}

func TestEndsBySize(t *testing.T) {
	lines, end := captured(t, Options{For: time.Minute, MaxBytes: 100}, func(s *Session) {
		give(s, "", "", strings.Repeat("a", 60))
		give(s, "", "", strings.Repeat("b", 38)+"éé")
		give(s, "", "", "c") // no more
	})
	if end.End != EndedBySize || end.Requests != 2 || end.BodyBytes != 100 || len(lines) != 2 {
		t.Fatalf("%+v, %+v", end, lines)
	}
	if r := lines[1]; !r.Truncated || r.Body != strings.Repeat("b", 38)+"é" || r.BodyBytes != 42 {
		t.Errorf("%+v", r)
	}
	if _, end = captured(t, Options{For: time.Minute, MaxBytes: 5}, func(s *Session) { give(s, "", "", "12345") }); end.End != EndedBySize || end.Requests != 1 {
		t.Errorf("%+v; a body that fills the room ends it", end)
	}
}

// Whoever asked goes away, the gateway stops, or the reader takes nothing more: it ends, and says why.
func TestEndsBeforeItsTime(t *testing.T) {
	f := func(want string, ctx context.Context, stopping chan struct{}) {
		t.Helper()
		s, err := New(Options{For: time.Minute, MaxBytes: 10}, Limits{time.Minute, 10})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if end, err := s.Write(ctx, stopping, func() {}, &out); err != nil || end.End != want {
			t.Errorf("%+v, %v; want %s", end, err, want)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	f(EndedByAsk, gone, nil)
	stopped := make(chan struct{})
	close(stopped)
	f(EndedByStop, t.Context(), stopped)
	s, _ := New(Options{For: time.Minute, MaxBytes: 10}, Limits{time.Minute, 10})
	give(s, "", "", "x")
	if end, err := s.Write(t.Context(), nil, func() {}, brokenPipe{}); err == nil || end.End != EndedByAsk {
		t.Errorf("%+v, %v", end, err)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, errors.New("gone") }

// Requests that come faster than they are written are dropped and counted; nobody waits.
func TestDrops(t *testing.T) {
	lines, end := captured(t, Options{For: 10 * time.Millisecond, MaxBytes: 1 << 20}, func(s *Session) {
		for range queued + 7 {
			give(s, "", "", "x")
		}
	})
	if len(lines) != queued || end.Requests != queued || end.Dropped != 7 {
		t.Errorf("%d lines, %+v", len(lines), end)
	}
}

func TestLimits(t *testing.T) {
	for _, o := range []Options{{}, {For: time.Second}, {MaxBytes: 1}, {For: time.Hour, MaxBytes: 1}, {For: time.Second, MaxBytes: 11}, {For: -1, MaxBytes: 1}} {
		if _, err := New(o, Limits{time.Minute, 10}); err == nil || !strings.Contains(err.Error(), "debug.capture.max") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// Binary bodies come as base64, redacted all the same.
func TestBinary(t *testing.T) {
	lines, _ := captured(t, Options{For: 10 * time.Millisecond, MaxBytes: 1 << 20}, func(s *Session) {
		give(s, "", "Authorization: Bearer abc123456789\r\n", "\xff\xfe abc123456789 \x00")
	})
	if r := lines[0]; r.Body != "" || string(r.Binary) != "\xff\xfe [redacted] \x00" {
		t.Errorf("%+v", r)
	}
}

// A credential gets into no capture, wherever it stands.
func TestRedaction(t *testing.T) {
	secret := fmt.Sprintf("planted%dQ", time.Now().UnixNano())
	for _, head := range []string{
		"Authorization: Bearer " + secret, "authorization:" + secret, "X-Api-Key: " + secret, "Cookie: a=b; session=" + secret + "; c=d",
		"X-Custom: " + secret, "Proxy-Authorization: Basic " + secret, "X-Password: " + secret,
	} {
		for _, cut := range []bool{false, true} {
			fields, secrets := redactHead([]byte("Host: x\r\n" + head + "\r\nAccept: */*\r\n"))
			body := []byte(`{"model":"m","prompt":"my key is ` + secret + `, keep it"}`)
			if cut {
				body = body[:len(body)-18]
			}
			all := strings.Join(fields, "\n") + string(redactBody(body, secrets, cut))
			if strings.Contains(all, secret) || cut && strings.Contains(all, secret[:10]) || !strings.Contains(all, Redacted) || !strings.Contains(all, "Accept: */*") || !strings.Contains(all, `"model":"m"`) {
				t.Errorf("%q, cut %v: %s", head, cut, all)
			}
		}
	}
	f := func(body, want string) {
		t.Helper()
		if got := string(redactBody([]byte(body), nil, false)); got != want {
			t.Errorf("%s: %s; want %s", body, got, want)
		}
	}
	f(`{"api_key":"abc","x":1}`, `{"api_key":"[redacted]","x":1}`)
	f(`{"OPENAI-API-KEY" : "a\"b","x":1}`, `{"OPENAI-API-KEY" : "[redacted]","x":1}`)
	f(`{"client_secret":"cut of`, `{"client_secret":"[redacted]`)
	f(`{"access_token":"t","max_tokens":5,"stop_token_ids":[1],"token":"z"}`, `{"access_token":"[redacted]","max_tokens":5,"stop_token_ids":[1],"token":"[redacted]"}`)
	f(`{"content":"use Bearer 0123456789abcdef ok"}`, `{"content":"use [redacted] ok"}`)
	f(`{"content":"sk-proj-0123456789abcdef01 and hf_0123456789abcdef01"}`, `{"content":"[redacted] and [redacted]"}`)
	f(`{"content":"the bearer of this"}`, `{"content":"the bearer of this"}`)

	// A word in a field that is no credential leaves bodies as they are.
	fields, secrets := redactHead([]byte("X-Title: assistant\r\nX-Stainless-Lang: python\r\n folded\r\n"))
	if len(secrets) != 0 || !slices.Contains(fields, "X-Title: [redacted]") || !slices.Contains(fields, "X-Stainless-Lang: python") {
		t.Errorf("%q, %q", fields, secrets)
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("Authorization: Bearer abcdefgh12345678", "body abcdefgh12345678", true)
	f.Add("A: b\r\n c", `{"api_key":"`, false)
	f.Fuzz(func(t *testing.T, head, body string, cut bool) {
		const secret = "S3cretS3cretS3cret"
		fields, secrets := redactHead([]byte(head + "\r\nX-Api-Key: " + secret + "\r\n"))
		all := strings.Join(fields, "\n") + "\n" + string(redactBody([]byte(body+" "+secret+" "+body), secrets, cut))
		if strings.Contains(all, secret) && !strings.Contains(head, secret) && !strings.Contains(body, secret) {
			t.Errorf("%q: the key is in %q", head, all)
		}
	})
}
