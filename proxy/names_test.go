package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"kvgate/internal/caller"
	"kvgate/internal/names"
	"kvgate/pool"
)

// twoPools is a gate whose pool p serves m with the adapter sql, and whose pool q serves n.
func twoPools(t testing.TB, p, q *mock, opts ...gateOption) *gate {
	t.Helper()
	other := PoolOptions{Name: "q", Timeouts: Timeouts{Connect: 2 * time.Second, Total: time.Minute}}
	g := newGate(t, []*mock{p}, append(opts, func(g *gate, _ *Options, _ *ServerOptions) { g.others = append(g.others, &other) })...)
	g.table.SetPools([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}, {Name: "q", Models: []string{"n"}}}, g.now())
	if _, _, err := g.table.SetEndpoints("q", []pool.Spec{{Pool: "q", URL: q.url()}}, g.now()); err != nil {
		t.Fatal(err)
	}
	e := g.table.Load().Rows[0].Endpoint
	g.table.SetServed(e, &pool.Served{At: g.now(), Models: []pool.Model{{ID: "m"}, {ID: "sql", Parent: "m"}}})
	return g
}

func one(model string) []names.Choice { return []names.Choice{{Model: model, Weight: 1}} }

// asked is the model that the mock was last asked for.
func asked(t testing.TB, m *mock) string {
	t.Helper()
	var b struct{ Model string }
	if err := json.Unmarshal(m.lastCall().body, &b); err != nil {
		t.Fatalf("%q: %v", m.lastCall().body, err)
	}
	return b.Model
}

func body(model string) string { return strings.Replace(plainBody, `"m"`, fmt.Sprintf("%q", model), 1) }

// SGLang wants adapters called base:adapter, and answers for the base model otherwise.
func TestAdapterNameForSGLang(t *testing.T) {
	p, q := newMock(t, chat), newMock(t, chat)
	g := twoPools(t, p, q)
	f := func(model, want string) {
		t.Helper()
		if a := g.do(body(model)); a.StatusCode != 200 || asked(t, p) != want {
			t.Errorf("%s: %d, asked for %q; want %q", model, a.StatusCode, asked(t, p), want)
		}
	}
	f("sql", "sql")
	e := g.table.Load().Rows[0].Endpoint
	g.table.Observe(e, pool.Observation{Load: &pool.Load{Dialect: "sglang"}, At: g.now(), Before: e.Booked()})
	f("sql", "m:sql")
	f("m:sql", "m:sql")
	f("m", "m")
}

func TestNames(t *testing.T) {
	p, q := newMock(t, chat), newMock(t, chat)
	g := twoPools(t, p, q, withNames(names.Options{
		Rules: []names.Rule{
			{Model: "gpt", Headers: []names.Header{{Name: "X-Tier", Value: "cheap"}}, To: one("n")},
			{Model: "gpt", Path: "/v1/completions", To: one("sql")},
			{Model: "gpt", To: one("m")},
			{Model: "lost", To: one("nowhere")},
		},
		Aliases:     map[string]string{"an alias": "n"},
		DefaultPool: "",
	}), func(g *gate, _ *Options, _ *ServerOptions) {
		g.routes = append(g.routes, func(r *Routes) { r.ModelHeaders = true })
	})
	f := func(model string, to *mock, want, base string, fields ...string) {
		t.Helper()
		a := g.do(body(model), fields...)
		if a.StatusCode != 200 || asked(t, to) != want {
			t.Errorf("%s: %d %s; the server was asked for %q, want %q", model, a.StatusCode, a.body, asked(t, to), want)
		}
		h := to.lastCall().req.Header
		if len(h.Values("X-Gateway-Model-Name")) != 1 || h.Get("X-Gateway-Model-Name") != want || h.Get("X-Gateway-Base-Model-Name") != base {
			t.Errorf("%s: the server was told %v", model, h)
		}
	}
	f("gpt", p, "m", "m", "X-Gateway-Model-Name: evil")
	g.sink.wait(t, 1) // records come after answers, and that of the next request may be sooner
	f("gpt", q, "n", "n", "x-TIER: cheap", "x_gateway_base_model_name: evil")
	f("an alias", q, "n", "n")
	f("m", p, "m", "m")
	f("m:sql", p, "sql", "m")
	f("sql", p, "sql", "m")
	if a := g.dial().send(post("/v1/completions", `{"model":"gpt","prompt":"x"}`)).read(); a.StatusCode != 200 || asked(t, p) != "sql" {
		t.Errorf("by path: %d, %q", a.StatusCode, asked(t, p))
	}
	if a := g.do(body("gtp")); a.StatusCode != 404 || !strings.Contains(a.body, `did you mean \"gpt\"`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := g.do(body("lost")); a.StatusCode != 503 || strings.Contains(a.body, "nowhere") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	a := g.dial().send("GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n").read()
	var list struct{ Data []struct{ ID string } }
	if err := json.Unmarshal([]byte(a.body), &list); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(list.Data); got != "[{m} {sql} {n} {an alias} {gpt}]" {
		t.Errorf("%s", got)
	}
	if a := g.dial().send("GET /v1/models/an%20alias HTTP/1.1\r\nHost: g\r\n\r\n").read(); a.StatusCode != 200 || !strings.Contains(a.body, `"id":"an alias"`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	// The record has the name that the client asked for.
	for _, r := range g.sink.wait(t, 8)[:1] {
		if r.Model != "gpt" || r.Pool != "p" {
			t.Errorf("%+v", r)
		}
	}
}

// A default pool takes what nobody knows, under its own name; with headers off nothing is told.
func TestDefaultPool(t *testing.T) {
	p, q := newMock(t, chat), newMock(t, chat)
	g := twoPools(t, p, q, withNames(names.Options{DefaultPool: "q", Answer: names.AnswerAsked}))
	if a := g.do(body("whatever")); a.StatusCode != 200 || asked(t, q) != "n" {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := g.dial().send(post("/tokenize", `{"prompt":"x"}`)).read(); a.StatusCode != 200 || q.lastCall().req.URL.Path != "/tokenize" || string(q.lastCall().body) != `{"prompt":"x"}` {
		t.Errorf("without a name: %d", a.StatusCode)
	}
	if strings.Contains(q.lastCall().head, "X-Gateway") {
		t.Errorf("%s", q.lastCall().head)
	}
}

// The client sees the name that it asked for, in whole answers and in every event, wherever the endpoint's writes are cut;
// all other bytes are the endpoint's.
func TestAskedNameInAnswers(t *testing.T) {
	const chunk = `{"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"the \"model\":\"m\""}}]}`
	stream := "data: " + chunk + "\n\n: ping\n\ndata: " + chunk + "\n\ndata: [DONE]\n\n"
	cut := 0
	m := newMock(t, func(c *call) {
		switch {
		case !bytes.Contains(c.body, []byte(`"stream":true`)):
			c.json(200, `{"id":"x","model":"m","choices":[{"message":{"content":"\"model\":\"m\""}}]}`)
		default:
			c.sse()
			c.chunk(stream[:cut])
			if cut < len(stream) { // an empty chunk is the last one
				c.chunk(stream[cut:])
			}
			c.chunk("")
		}
	})
	g := newGate(t, []*mock{m}, withNames(names.Options{Rules: []names.Rule{{Model: "gpt \"4\"", To: one("m"), Answer: names.AnswerAsked}}}))
	ask := func(extra string) reply {
		return g.do(`{"model":"gpt \"4\"","messages":[]`+extra+`}`, "Accept-Encoding: gzip")
	}
	want := `{"id":"x","model":"gpt \"4\"","choices":[{"message":{"content":"\"model\":\"m\""}}]}`
	if a := ask(""); a.StatusCode != 200 || a.body != want || a.err != nil {
		t.Errorf("%d %s %v", a.StatusCode, a.body, a.err)
	}
	if h := m.lastCall().req.Header; h.Get("Accept-Encoding") != "" {
		t.Errorf("a compressed answer was asked for: %v", h)
	}
	want = strings.ReplaceAll(stream, `"x","model":"m"`, `"x","model":"gpt \"4\""`)
	for cut = 1; cut < len(stream); cut++ {
		if a := ask(`,"stream":true`); a.body != want || a.err != nil {
			t.Fatalf("cut at %d: %q, %v; want %q", cut, a.body, a.err, want)
		}
	}
	// By its own name nothing is changed.
	if a := g.do(`{"model":"m","messages":[],"stream":true}`); a.body != stream {
		t.Errorf("%q", a.body)
	}
	// HTTP/1.0 gets it too, ended by closing.
	const old = `{"model":"gpt \"4\"","messages":[]}`
	if a := g.dial().send(fmt.Sprintf("POST %s HTTP/1.0\r\nHost: g\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(old), old)).read(); !strings.Contains(a.body, `"model":"gpt \"4\""`) || a.err != nil {
		t.Errorf("HTTP/1.0: %q, %v", a.body, a.err)
	}
}

// A model that can't take a request is replaced by the next of its chain, and the answer says so.
func TestFallback(t *testing.T) {
	full := func(c *call) {
		c.json(503, `{"error":{"message":"full","type":"server_error","code":503}}`, "Retry-After: 1")
	}
	p, q := newMock(t, chat), newMock(t, chat)
	g := twoPools(t, p, q, withNames(names.Options{Rules: []names.Rule{
		{Model: "m", Fallback: []string{"nobody", "n"}},
		{Model: "gone", To: one("nowhere"), Fallback: []string{"n"}},
		{Model: "last", To: one("n"), Fallback: []string{"nobody"}},
	}}))
	f := func(model, fallback string, status int) reply {
		t.Helper()
		a := g.do(body(model))
		if a.StatusCode != status || a.Header.Get("X-Kvgate-Fallback") != fallback {
			t.Errorf("%s: %d, fallback %q, %s; want %d, %q", model, a.StatusCode, a.Header.Get("X-Kvgate-Fallback"), a.body, status, fallback)
		}
		return a
	}
	f("m", "", 200)
	f("gone", "n", 200)
	p.setServe(full)
	f("m", "n", 200) // full
	if asked(t, q) != "n" {
		t.Errorf("asked for %q", asked(t, q))
	}
	q.setServe(full)
	a := f("m", "n", 503) // both: the last answer is the servers' own
	if !strings.Contains(a.body, `"full"`) {
		t.Errorf("%s", a.body)
	}
	f("last", "", 503)
	p.setServe(func(c *call) { c.json(400, `{"error":{"message":"bad"}}`) })
	f("m", "", 400) // the client's own fault
	p.setServe(func(c *call) { c.json(500, `{"error":{"message":"bad"}}`) })
	f("m", "", 500) // it may have been executed
	q.setServe(chat)
	p.kill()
	f("m", "n", 200) // refused
	g.table.SetEndpoints("p", nil, g.now())
	f("m", "n", 200) // no endpoint
	g.booked(0)
	var last int
	for _, r := range g.sink.wait(t, 9) {
		last = max(last, len(r.Attempts))
	}
	if last < 2 {
		t.Errorf("attempts of both models are not in the record")
	}
}

// A stream that a chat didn't ask to report usage is asked for it all the same where the gateway needs it, and the client
// sees nothing of that.
func TestNeedUsage(t *testing.T) {
	m := newMock(t, func(c *call) {
		if !bytes.Contains(c.body, []byte(`"stream":true`)) {
			c.json(200, okBody)
			return
		}
		c.sse()
		c.token("a")
		if bytes.Contains(c.body, []byte(`"include_usage":true`)) {
			c.event(`{"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`)
		}
		c.event("[DONE]")
		c.chunk("")
	})
	g := newGate(t, []*mock{m}, withNames(names.Options{Aliases: map[string]string{"alias": "m"}}), func(g *gate, _ *Options, _ *ServerOptions) {
		g.routes = append(g.routes, func(r *Routes) { r.NeedUsage = true })
	})
	n := 0
	f := func(body string, shown bool) {
		t.Helper()
		a := g.do(body)
		if strings.Contains(a.body, `"usage"`) != shown || !strings.HasSuffix(a.body, "data: [DONE]\n\n") {
			t.Errorf("%s: %q", body, a.body)
		}
		n++
		if r := g.sink.wait(t, n)[n-1]; !r.UsageKnown || r.OutputTokens != 3 {
			t.Errorf("%s: usage is not known: %+v", body, r)
		}
		if !json.Valid(m.lastCall().body) {
			t.Errorf("%s", m.lastCall().body)
		}
	}
	f(`{"model":"m","messages":[],"stream":true}`, false)
	f(`{"model":"alias","messages":[],"stream":true,"stream_options":{"include_usage":false}}`, false)
	f(`{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}`, true)
	f(`{"model":"alias","messages":[],"stream":true,"stream_options":null}`, false)
	if a := g.do(plainBody); a.body != okBody || !bytes.Equal(m.lastCall().body, []byte(plainBody)) {
		t.Errorf("not streamed: %s", a.body)
	}
}

// G7: what a key may use is checked on the model that is sent, however it was come to, and nothing shows that there is more.
func TestForbiddenModels(t *testing.T) {
	p, q := newMock(t, chat), newMock(t, chat)
	serve := func(c *call) { c.json(200, fmt.Sprintf(`{"id":"resp_%d","object":"response"}`, c.n)) }
	p.setServe(serve)
	q.setServe(serve)
	only := func(models ...string) *caller.Models { return caller.NewModels(models) }
	g := twoPools(t, p, q, withAuth(keys{
		"all": {Tenant: "a"}, "m": {Tenant: "a", Models: only("m", "to-n", "n2")}, "n": {Tenant: "b", Models: only("n")}, "all-b": {Tenant: "b"},
	}), withNames(names.Options{Rules: []names.Rule{
		{Model: "split", To: []names.Choice{{Model: "m", Weight: 1}, {Model: "n", Weight: 1}}},
		{Model: "to-n", To: one("n")},
		{Model: "back", To: one("nowhere"), Fallback: []string{"n"}},
		{Model: "any"},
	}, Aliases: map[string]string{"n2": "n"}}))
	as := func(key, request string) reply {
		t.Helper()
		return g.dial().send(strings.Replace(request, "\r\n", "\r\nAuthorization: Bearer "+key+"\r\n", 1)).read()
	}
	f := func(key, model string, want int) {
		t.Helper()
		if a := as(key, post(chatPath, body(model))); a.StatusCode != want || want == 403 && !strings.Contains(a.body, `"code":"forbidden"`) {
			t.Errorf("%s asks for %s: %d %s; want %d", key, model, a.StatusCode, a.body, want)
		}
	}
	n := q.requests.Load()
	f("m", "m", 200)
	f("m", "n", 403)
	f("m", "to-n", 403)
	f("m", "n2", 403)
	f("m", "sql", 403)
	f("m", "m:sql", 403)
	f("m", "back", 503)
	for range 20 {
		f("m", "split", 200)
	}
	if q.requests.Load() != n {
		t.Error("a forbidden model was asked")
	}
	f("n", "back", 200)
	f("all", "sql", 200)
	if a := as("m", post(chatPath+"?model=n", body("m"))); a.StatusCode != 200 {
		t.Errorf("%d", a.StatusCode)
	}
	if q.requests.Load() != n+1 {
		t.Error("the query chose the model")
	}
	if a := as("m", post(chatPath+"?model=m", body("n"))); a.StatusCode != 403 {
		t.Errorf("%d", a.StatusCode)
	}
	if a := as("m", "GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"); a.body != `{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"kvgate"},{"id":"split","object":"model","created":0,"owned_by":"kvgate"}]}` {
		t.Errorf("%s", a.body)
	}
	for _, id := range []string{"n", "sql", "n2", "to-n"} {
		if a := as("m", "GET /v1/models/"+id+" HTTP/1.1\r\nHost: g\r\n\r\n"); a.StatusCode != 404 {
			t.Errorf("%s: %d %s", id, a.StatusCode, a.body)
		}
	}
	if a := as("m", post(chatPath, body("sqk"))); a.StatusCode != 404 || strings.Contains(a.body, "sql") {
		t.Errorf("%s", a.body)
	}
	// A stored response is its tenant's, and of a model that may be used.
	a := as("all", post("/v1/responses", `{"model":"n","input":"x"}`))
	id := strings.Split(a.body, `"`)[3]
	g.sink.wait(t, 5)
	for key, want := range map[string]int{"all": 200, "m": 404, "n": 404, "all-b": 404} {
		if a := as(key, "GET /v1/responses/"+id+" HTTP/1.1\r\nHost: g\r\n\r\n"); a.StatusCode != want {
			t.Errorf("%s reads the response: %d %s; want %d", key, a.StatusCode, a.body, want)
		}
		model := map[string]string{"m": "m"}[key]
		if model == "" {
			model = "n"
		}
		if a := as(key, post("/v1/responses", `{"model":"`+model+`","input":"y","previous_response_id":"`+id+`"}`)); a.StatusCode != want {
			t.Errorf("%s goes on from the response: %d %s; want %d", key, a.StatusCode, a.body, want)
		}
	}
	if a := as("all", "GET /v1/responses/resp_unknown HTTP/1.1\r\nHost: g\r\n\r\n"); a.StatusCode != 404 {
		t.Errorf("unknown: %d", a.StatusCode)
	}
}
