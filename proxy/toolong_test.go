package proxy

import (
	"strings"
	"testing"

	"kvgate/pool"
)

// A prompt that surely fits no endpoint's context is refused with OpenAI's word for that, and asks no endpoint.
func TestPromptBeyondTheContext(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	e := g.table.Load().Rows[0].Endpoint
	g.table.SetServed(e, &pool.Served{At: g.now(), Models: []pool.Model{{ID: "m", MaxModelLen: 100}, {ID: "sql", Parent: "m", MaxModelLen: 100}}})
	body := func(model string, words int) string {
		return `{"model":"` + model + `","messages":[{"role":"user","content":"` + strings.Repeat("word ", words) + `"}],"max_tokens":1000}`
	}
	for i, model := range []string{"m", "sql"} {
		r := g.do(body(model, 1000))
		if r.StatusCode != 400 || !strings.Contains(r.body, `"code":"context_length_exceeded"`) || !strings.Contains(r.body, `"type":"invalid_request_error"`) ||
			!strings.Contains(r.body, "shorten it") || strings.Contains(r.body, "fewer tokens") {
			t.Errorf("%s: %d %s", model, r.StatusCode, r.body)
		}
		g.outcome(i+1, "bad_request")
	}
	if n := m.requests.Load(); n != 0 {
		t.Errorf("the endpoint was asked %d times", n)
	}
	if r := g.do(body("m", 20)); r.StatusCode != 200 { // max_tokens may be more than fits
		t.Errorf("a short prompt: %d %s", r.StatusCode, r.body)
	}
}

func TestHealthIsElsewhere(t *testing.T) {
	g := newGate(t, []*mock{newMock(t, chat)})
	r := g.dial().send("GET /health HTTP/1.1\r\nHost: gate\r\n\r\n").read()
	if r.StatusCode != 404 || !strings.Contains(r.body, "admin listener") || !strings.Contains(r.body, "/-/ready") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
}
