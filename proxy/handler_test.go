package proxy

import (
	"strings"
	"testing"
)

func TestChat(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	c := g.dial()
	for i := range 3 {
		a := c.send(post(chatPath, plainBody, "X-Request-Id: abc", "X-Odd-Name: kept")).read()
		if a.StatusCode != 200 || a.body != okBody || a.err != nil || a.Header.Get("X-Request-Id") != "abc" {
			t.Fatalf("request %d: %d %q %v %v", i, a.StatusCode, a.body, a.Header, a.err)
		}
		if string(m.lastCall().body) != plainBody {
			t.Errorf("the endpoint got %q", m.lastCall().body)
		}
	}
	if m.conns.Load() != 1 {
		t.Errorf("%d connections for three requests in a row; want 1", m.conns.Load())
	}
	a := c.send(post(chatPath, streamBody)).read()
	if a.StatusCode != 200 || !strings.HasSuffix(a.body, "data: [DONE]\n\n") || a.err != nil {
		t.Fatalf("stream: %d %q %v", a.StatusCode, a.body, a.err)
	}
	g.booked(0)
	recs := g.sink.wait(t, 4)
	r := recs[3]
	if r.Outcome != "ok" || r.Status != 200 || !r.Stream || r.InputTokens != 7 || r.OutputTokens != 3 || r.CachedTokens != 4 || r.TTFTSeconds <= 0 ||
		r.Endpoint == "" || r.Model != "m" || r.Pool != "p" || len(r.Attempts) != 1 || r.BytesOut != int64(len(a.body)) || r.API != "chat_completions" {
		t.Errorf("record of the stream: %+v", r)
	}
	if r := recs[0]; r.InputTokens != 7 || r.RequestID != "abc" || r.BytesIn != int64(len(plainBody)) {
		t.Errorf("record: %+v", r)
	}
}

func TestErrorsHaveTheRightShape(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	f := func(request string, status int, want ...string) {
		t.Helper()
		c := g.dial()
		defer c.Close()
		a := c.send(request).read()
		if a.StatusCode != status || a.err != nil {
			t.Errorf("%q: status %d; want %d (%s)", request, a.StatusCode, status, a.body)
		}
		for _, w := range want {
			if !strings.Contains(a.body, w) {
				t.Errorf("%q: body %s; want %s in it", request, a.body, w)
			}
		}
	}
	f(post(chatPath, `{"model":"n","messages":[]}`), 404, `"code":"model_not_found"`, `did you mean \"m\"`, `"param":"model"`)
	f(post(chatPath, `{"messages":[]}`), 400, `"code":"bad_request"`, `"param":"model"`)
	f(post(chatPath, `{"model":"m"`), 400, `"code":"bad_request"`)
	f(post("/v1/messages", `{"model":"nope","messages":[]}`), 404, `{"type":"error","error":{"type":"not_found_error"`)
	f(post("/metrics", `{}`), 404, `"code":"not_found"`)
	f(post("/chat/completions", `{}`), 404, `"code":"not_found"`, `did you mean /v1/chat/completions?`)
	f(post("/v1/v1/chat/completions", `{}`), 404, `"code":"not_found"`, `did you mean /v1/chat/completions?`)
	f(post("/v1/embedding", `{}`), 404, `"code":"not_found"`, `did you mean /v1/embeddings?`)
	f(post("/v1/load_lora_adapter", `{}`), 404, `"code":"not_found"`, `served are /v1/chat/completions`)
	f("GET /v1/chat/completions HTTP/1.1\r\nHost: gate\r\n\r\n", 405, `"code":"method_not_allowed"`)
	f(post(chatPath, `x`, "Content-Encoding: gzip"), 415, `"code":"unsupported_media_type"`)
	f("GET /v1/models HTTP/1.1\r\nHost: gate\r\n\r\n", 200, `{"object":"list","data":[{"id":"m"`)
	f("GET /v1/models/m HTTP/1.1\r\nHost: gate\r\n\r\n", 200, `{"id":"m"`)
	f("GET /v1/models/none HTTP/1.1\r\nHost: gate\r\n\r\n", 404, `"code":"model_not_found"`)
	if n := m.requests.Load(); n != 0 {
		t.Errorf("%d requests reached the endpoint", n)
	}
}
