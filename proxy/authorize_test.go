package proxy

import (
	"strings"
	"testing"

	"kvgate/internal/caller"
)

// keys is an Authorizer that knows its keys by heart.
type keys map[string]*caller.Caller

func (k keys) Authorize(credential []byte) *caller.Caller { return k[string(credential)] }

func withAuth(k keys) gateOption {
	return func(g *gate, _ *Options, _ *ServerOptions) {
		g.routes = append(g.routes, func(r *Routes) { r.Auth = k })
	}
}

// G5: whatever is not exactly one valid credential is answered with one constant text, before the body is read, and reaches
// neither the endpoint nor the records.
func TestUnauthorized(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m}, withAuth(keys{"sk-good": {Key: "k", Tenant: "t", Class: caller.High}}))
	ok := func(fields ...string) {
		t.Helper()
		if a := g.do(plainBody, fields...); a.StatusCode != 200 {
			t.Errorf("%q: %d %s", fields, a.StatusCode, a.body)
		}
		if head := m.lastCall().head; strings.Contains(strings.ToLower(head), "authorization") || strings.Contains(strings.ToLower(head), "api-key") {
			t.Errorf("%q: the endpoint got\n%s", fields, head)
		}
	}
	ok("Authorization: Bearer sk-good")
	ok("authorization:   bearer   sk-good  ")
	ok("x-api-key: sk-good")
	ok("api-key: sk-good")
	n := m.requests.Load()
	text := ""
	bad := func(fields ...string) {
		t.Helper()
		a := g.do(plainBody, fields...)
		if text == "" {
			text = a.body
		}
		if a.body != text || a.StatusCode != 401 || a.Header.Get("WWW-Authenticate") != "Bearer" || !strings.Contains(a.body, `"code":"unauthorized"`) || strings.Contains(a.body, "sk-") {
			t.Errorf("%q: %d %s", fields, a.StatusCode, a.body)
		}
	}
	bad()
	bad("Authorization: Bearer sk-bad")
	bad("Authorization: Bearer")
	bad("Authorization: Bearer ")
	bad("Authorization: sk-good")
	bad("Authorization: Basic sk-good")
	bad("Authorization: Bearer sk-good, Bearer sk-good")
	bad("Authorization: Bearer sk-good", "Authorization: Bearer sk-good")
	bad("Authorization: Bearer sk-good", "Authorization: Bearer sk-bad")
	bad("Authorization: Bearer sk-bad", "Authorization: Bearer sk-good")
	bad("Authorization: Bearer sk-good", "x-api-key: sk-good")
	bad("Authorization: Bearer sk-good sk-good")
	bad("Authorization_: Bearer sk-good")
	bad("Proxy-Authorization: Bearer sk-good")
	if m.requests.Load() != n {
		t.Error("something reached the endpoint")
	}
	// G6: what is routed is what is asked about; nothing is served beside it.
	for _, target := range []string{"/v1/models", "/v1/models/m", "/v1/responses/resp_1", "http://gate/v1/models"} {
		if a := g.dial().send("GET " + target + " HTTP/1.1\r\nHost: gate\r\n\r\n").read(); a.StatusCode != 401 && a.StatusCode != 404 || strings.Contains(a.body, `"id"`) {
			t.Errorf("%s: %d %s", target, a.StatusCode, a.body)
		}
	}
	for _, r := range g.sink.wait(t, 15) {
		if strings.Contains(r.Error+r.Path+r.Model, "sk-") {
			t.Errorf("a record holds a key: %+v", r)
		}
	}
	// A body that nobody reads does not stay in the way.
	c := g.dial()
	if a := c.send(post(chatPath, plainBody)).read(); a.StatusCode != 401 {
		t.Errorf("%d", a.StatusCode)
	}
	// Anthropic's clients get an error of their kind.
	if a := g.dial().send(post("/v1/messages", plainBody)).read(); a.StatusCode != 401 || !strings.Contains(a.body, `"type":"authentication_error"`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}
