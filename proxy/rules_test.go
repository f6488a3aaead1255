package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/internal/names"
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// What goes on to an endpoint: order and bytes of the client's fields, without those that are not for it.
func TestRequestHead(t *testing.T) {
	raw := "Host: client.example\r\nX-B: 1\r\nx-a:  two \r\nConnection: keep-alive, X-Nominated\r\nX-Nominated: 1\r\nTE: trailers\r\nExpect: 100-continue\r\n" +
		"Content-Length: 5\r\nAuthorization: Bearer client\r\nX-Forwarded-For: 10.1.1.1\r\nX-Forwarded-Proto: https\r\nX-Gateway-Destination: evil\r\n" +
		"X-Data-Parallel-Rank: 3\r\nX-Kvgate-Debug: 1\r\ntraceparent: 00-abc\r\nX-Request-Id: old\r\nAccept-Encoding: gzip\r\nX-Last: z\r\n\r\n"
	h := requestHead{
		method: []byte("POST"), target: []byte("/v1/x?a=%2F"), raw: []byte(raw), host: "10.0.0.1:8000", requestID: []byte("id"),
		clientIP: []byte("192.0.2.7"), clientHost: []byte("client.example"), length: 5, hasBody: true,
	}
	f := func(change func(*requestHead), want string) {
		t.Helper()
		h := h
		change(&h)
		h.lookThrough = true
		if got := string(appendRequestHead(nil, &h)); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		// The same by marks, but for what only looking through finds.
		var q requestFacts
		q.read([]byte("POST /v1/x?a=%2F HTTP/1.1\r\n" + strings.Replace(raw, ", X-Nominated\r\nX-Nominated: 1", "", 1)))
		h.raw, h.marks, h.lookThrough = q.raw, q.marks[:q.marked], false
		if got := string(appendRequestHead(nil, &h)); got != want {
			t.Errorf("by marks: got\n%s\nwant\n%s", got, want)
		}
	}
	const head = "POST /v1/x?a=%2F HTTP/1.1\r\nHost: 10.0.0.1:8000\r\nX-B: 1\r\nx-a:  two \r\n"
	const tail = "traceparent: 00-abc\r\nAccept-Encoding: gzip\r\nX-Last: z\r\nContent-Length: 5\r\n"
	f(func(*requestHead) {}, head+"Authorization: Bearer client\r\n"+tail+
		"X-Request-Id: id\r\nX-Forwarded-For: 10.1.1.1, 192.0.2.7\r\nX-Forwarded-Proto: http\r\nX-Forwarded-Host: client.example\r\n\r\n")
	f(func(h *requestHead) { h.apiKey, h.forwarded, h.https = "key", forwardedReplace, true }, head+tail+
		"Authorization: Bearer key\r\nX-Request-Id: id\r\nX-Forwarded-For: 192.0.2.7\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: client.example\r\n\r\n")
	f(func(h *requestHead) { h.dropAuth, h.forwarded = true, forwardedOff }, head+tail+"X-Request-Id: id\r\n\r\n")
}

// D2: a rewritten name, longer or shorter, leaves a valid body of exactly the announced length; T9 one id twice.
func TestRewrite(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m}, withNames(names.Options{Aliases: map[string]string{"an-alias-that-is-long": "m", "s": "m"}}))
	for _, name := range []string{"an-alias-that-is-long", "s"} {
		body := `{"a":1e2, "model" : "` + name + `","messages":[],"z":"\u00e9"}`
		a := g.do(body, "X-Request-Id: same")
		want := `{"a":1e2, "model" : "m","messages":[],"z":"\u00e9"}`
		if got := string(m.lastCall().body); a.StatusCode != 200 || got != want {
			t.Errorf("%s: %d %q", name, a.StatusCode, got)
		}
	}
}

// D8: names with slashes, colons, at signs and letters beyond ASCII are found and listed; cards are the servers' own.
func TestModels(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	e := g.table.Load().Rows[0].Endpoint
	card := `{"id":"org/Model:v1@x","object":"model","odd":[1,2e1],"created":5}`
	adapter := `{"id":"ü/sql","object":"model","parent":"org/Model:v1@x","root":"/x"}`
	g.table.SetServed(e, &pool.Served{At: g.now(), Models: []pool.Model{
		{ID: "m", Card: []byte(`{"id":"m"}`)}, {ID: "org/Model:v1@x", Card: []byte(card)}, {ID: "ü/sql", Parent: "org/Model:v1@x", Card: []byte(adapter)},
	}})
	get := func(path string) reply {
		t.Helper()
		return g.dial().send("GET " + path + " HTTP/1.1\r\nHost: g\r\n\r\n").read()
	}
	if a := get("/v1/models"); a.body != `{"object":"list","data":[{"id":"m"},`+card+`,`+adapter+`]}` {
		t.Errorf("%s", a.body)
	}
	if a := get("/v1/models/org/Model:v1@x"); a.body != card {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := get("/v1/models/%C3%BC%2Fsql"); a.body != adapter {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	for _, name := range []string{"org/Model:v1@x", `\u00fc/sql`} {
		if a := g.do(`{"model":"` + name + `","messages":[]}`); a.StatusCode != 200 {
			t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
		}
	}
	// Answers come before their records: the order of the records is not that of the requests.
	if recs := g.sink.wait(t, 5); !slices.ContainsFunc(recs, func(r telemetry.Record) bool { return r.Adapter == "ü/sql" }) {
		t.Errorf("no record of the adapter: %+v", recs)
	}
}

// Whatever refers to a stored response goes where it was made.
func TestStoredResponses(t *testing.T) {
	serve := func(name string) func(*call) {
		return func(c *call) {
			if strings.Contains(string(c.body), "stream") {
				c.sse()
				c.chunk("event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_s" + name + "\",\"status\":\"in_progress\"}}\n\n")
				c.chunk("event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_s" + name + "\",\"status\":\"completed\",\"usage\":{\"input_tokens\":1,\"output_tokens\":2}}}\n\n")
				c.chunk("")
				return
			}
			c.json(200, fmt.Sprintf(`{"id":"resp_%s%d","object":"response","by":%q}`, name, c.n, name))
		}
	}
	g := newGate(t, []*mock{newMock(t, serve("a")), newMock(t, serve("b"))})
	ask := func(request string) reply { t.Helper(); return g.dial().send(request).read() }
	for i := range 10 {
		a := ask(post("/v1/responses", `{"model":"m","input":"x"}`))
		name := a.body[len(`{"id":"resp_`):][:1]
		id := strings.Split(a.body, `"`)[3]
		for _, request := range []string{
			"GET /v1/responses/" + id + " HTTP/1.1\r\nHost: g\r\n\r\n",
			"DELETE /v1/responses/" + id + " HTTP/1.1\r\nHost: g\r\n\r\n",
			"POST /v1/responses/" + id + "/cancel HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n",
			post("/v1/responses", `{"model":"m","input":"y","previous_response_id":"`+id+`"}`),
		} {
			if b := ask(request); b.StatusCode != 200 || !strings.Contains(b.body, `"by":"`+name+`"`) {
				t.Fatalf("%d: %q after %s gave %d %s", i, request, name, b.StatusCode, b.body)
			}
		}
	}
	a := ask(post("/v1/responses", `{"model":"m","input":"x","stream":true}`))
	name := string(a.body[strings.Index(a.body, "resp_s")+6])
	if b := ask("GET /v1/responses/resp_s" + name + " HTTP/1.1\r\nHost: g\r\n\r\n"); !strings.Contains(b.body, `"by":"`+name+`"`) {
		t.Errorf("streamed: %s", b.body)
	}
	if b := ask("GET /v1/responses/resp_unknown HTTP/1.1\r\nHost: g\r\n\r\n"); b.StatusCode != 404 || !strings.Contains(b.body, `"error"`) {
		t.Errorf("unknown: %d %s", b.StatusCode, b.body)
	}
	g.mocks = g.mocks[:1]
	g.announce()
	if b := ask("GET /v1/responses/resp_unknown HTTP/1.1\r\nHost: g\r\n\r\n"); b.StatusCode != 200 {
		t.Errorf("unknown, one endpoint: %d %s", b.StatusCode, b.body)
	}
}

// G4: the memory of stored responses is bounded.
func TestStoredResponsesAreBounded(t *testing.T) {
	var s storedResponses
	s.init()
	e := &pool.Endpoint{}
	for i := range 3 * storedShards * storedPerShard {
		s.add(fmt.Appendf(nil, "resp_%d", i), storedResponse{endpoint: e})
	}
	n := 0
	for i := range s.shards {
		n += len(s.shards[i].byID)
	}
	if n != storedShards*storedPerShard {
		t.Errorf("%d ids are held; want %d", n, storedShards*storedPerShard)
	}
}

// The pending tokens of a request are cleared at its first token, and those of one that isn't streamed when predicted.
func TestFirstTokenClearsPending(t *testing.T) {
	step := make(chan struct{})
	m := newMock(t, func(c *call) {
		if strings.Contains(string(c.body), "stream") {
			c.sse()
			c.event(`{"id":"x","choices":[]}`)
			<-step
			c.token("a")
			<-step
			c.finish()
			return
		}
		<-step
		chat(c)
	})
	g := newGate(t, []*mock{m})
	pending := func() int64 { return g.table.Load().Rows[0].Booked().PendingTokens }
	c := g.dial().send(post(chatPath, streamBody))
	r := c.head()
	b := make([]byte, 10)
	if _, err := r.Body.Read(b); err != nil {
		t.Fatal(err)
	}
	if pending() == 0 {
		t.Error("a chunk without choices passed for the first token")
	}
	step <- struct{}{}
	eventually(t, "the pending tokens to go", func() bool { return pending() == 0 })
	g.booked(1)
	step <- struct{}{}
	g.booked(0)
	c2 := g.dial().send(post(chatPath, plainBody))
	g.booked(1)
	eventually(t, "the pending tokens to go as predicted", func() bool { return pending() == 0 && g.table.Load().Rows[0].Booked().Requests == 1 })
	step <- struct{}{}
	c2.read()
}

// A 1.0 client gets no chunks, and its connection closed or kept as it asked.
func TestHTTP10(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	ten := func(body string, fields ...string) string {
		return strings.Replace(post(chatPath, body, fields...), "HTTP/1.1", "HTTP/1.0", 1)
	}
	a := g.dial().send(ten(streamBody)).read()
	if a.StatusCode != 200 || len(a.TransferEncoding) != 0 || !strings.HasSuffix(a.body, "[DONE]\n\n") {
		t.Errorf("%d %v %q", a.StatusCode, a.TransferEncoding, a.body)
	}
	c := g.dial()
	for range 2 {
		if a := c.send(ten(plainBody, "Connection: keep-alive")).read(); a.StatusCode != 200 || a.body != okBody {
			t.Fatalf("%d %q", a.StatusCode, a.body)
		}
	}
}

// Debug headers say where a request went, only where they are asked for; otherwise no address gets out.
func TestDebugHeaders(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m}, withOptions(func(o *Options, _ *ServerOptions) { o.DebugHeader = "X-Kvgate-Debug" }))
	for _, body := range []string{plainBody, streamBody} {
		a := g.do(body, "X-Kvgate-Debug: 1")
		outcome := "ok"
		if body == streamBody { // the head of a stream can't know how it ends
			outcome = ""
		}
		if a.Header.Get("X-Kvgate-Endpoint") == "" || a.Header.Get("X-Kvgate-Outcome") != outcome || a.Header.Get("X-Kvgate-Attempts") != "1" ||
			!strings.Contains(a.Header.Get("Server-Timing"), "first_byte;dur=") {
			t.Errorf("%v", a.Header)
		}
		if strings.Contains(m.lastCall().head, "X-Kvgate-Debug") {
			t.Error("the endpoint was told")
		}
		for name, v := range g.do(body).Header {
			if strings.HasPrefix(name, "X-Kvgate") || strings.Contains(strings.Join(v, ""), "127.0.0.1") {
				t.Errorf("%s: %v", name, v)
			}
		}
	}
}

// total ends what neither first_token nor idle does.
func TestTotalTimeout(t *testing.T) {
	m := newMock(t, func(c *call) { c.waitClosed(10 * time.Second) })
	g := newGate(t, []*mock{m}, withPool(func(o *PoolOptions) { o.Timeouts.Total = 150 * time.Millisecond }))
	if a := g.do(plainBody); a.StatusCode != 504 || !strings.Contains(a.body, "endpoint_timeout") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	m.setServe(func(c *call) {
		c.sse()
		for range 1000 {
			if c.token("a"); c.done {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	if a := g.do(streamBody); a.StatusCode != 200 || a.err == nil || !strings.Contains(a.body, "endpoint_timeout") {
		t.Errorf("%d %v", a.StatusCode, a.err)
	}
}

// Backpressure is heeded for as long as the endpoint says.
func TestRetryAfterIsHeeded(t *testing.T) {
	a := newMock(t, func(c *call) { c.json(503, `{}`, "Retry-After: 20") })
	b := newMock(t, chat)
	g := newGate(t, []*mock{a, b})
	for range 30 {
		if r := g.do(plainBody); r.StatusCode != 200 {
			t.Fatalf("%d", r.StatusCode)
		}
	}
	if n := a.requests.Load(); n > 1 {
		t.Errorf("a busy endpoint was asked %d times", n)
	}
}

// Every outcome is complete, and no two share a word.
func TestOutcomes(t *testing.T) {
	var words []string
	for o := range Outcomes {
		words = append(words, o.String())
		if o.String() == "" || outcomeOf(o.String()) != o {
			t.Errorf("outcome %d is called %q", o, o)
		}
		if ours := o.Status() != 0 && o != ClientGone; ours && (o.ErrorType() == "" || statusTexts[o.Status()] == "") {
			t.Errorf("%s: type %q, status %d", o, o.ErrorType(), o.Status())
		}
	}
	slices.Sort(words)
	if len(slices.Compact(words)) != int(numOutcomes) {
		t.Errorf("words are shared: %v", words)
	}
}

// A policy that asks for prefixes gets them: one prompt keeps going to one endpoint, others to others.
func TestPromptsAreHashed(t *testing.T) {
	mocks := []*mock{newMock(t, chat), newMock(t, chat), newMock(t, chat), newMock(t, chat)}
	p, err := scoring.New(scoring.Config{Name: "consistent_hash"})
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, mocks, withPool(func(o *PoolOptions) { o.Policy = p }))
	used := func() (n int) {
		for _, m := range mocks {
			if m.requests.Load() > 0 {
				n++
			}
		}
		return n
	}
	ask := func(i int) {
		t.Helper()
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%s"}]}`, strings.Repeat(fmt.Sprint("prompt ", i, " "), 200))
		if a := g.do(body); a.StatusCode != 200 {
			t.Fatalf("%d %s", a.StatusCode, a.body)
		}
	}
	for range 10 {
		ask(1)
	}
	if n := used(); n != 1 {
		t.Errorf("one prompt went to %d endpoints", n)
	}
	for i := range 40 {
		ask(i)
	}
	if n := used(); n != len(mocks) {
		t.Errorf("40 prompts went to %d endpoints of %d", n, len(mocks))
	}
}

// However many Connection fields an answer has, they are one list: close anywhere in it ends the connection, and what is
// named anywhere in it goes no further.
func TestResponseConnection(t *testing.T) {
	f := func(version, connection string, keepAlive bool) {
		t.Helper()
		head := strings.ReplaceAll(connection, "|", "\r\n") + "\r\nX-Gone: 1\r\nX-Kept: 2\r\nContent-Length: 0\r\n\r\n"
		var r response
		got, err := parseResponse(nil, []byte(head), 200, version == "1.0", false, "", &r)
		want := "X-Gone: 1\r\nX-Kept: 2\r\n"
		if strings.Contains(strings.ToLower(connection), "x-gone") {
			want = "X-Kept: 2\r\n"
		}
		if err != nil || r.keepAlive != keepAlive || string(got) != want {
			t.Errorf("%s %q: kept alive %v, fields %q, %v", version, connection, r.keepAlive, got, err)
		}
	}
	for _, c := range []string{
		"Connection: close", "Connection: Close", "Connection: close|Connection: keep-alive", "Connection: keep-alive|Connection: close",
		"Connection: keep-alive, close", "Connection: close|Connection: x-gone", "Connection: x-gone|connection: close|Connection: keep-alive",
	} {
		f("1.1", c, false)
		f("1.0", c, false)
	}
	for _, c := range []string{
		"Connection: keep-alive", "Connection: keep-alive|Connection: keep-alive", "Connection: x-gone|Connection: keep-alive",
		"Connection: keep-alive|Connection: x-gone", "Connection: x-gone, keep-alive",
	} {
		f("1.1", c, true)
		f("1.0", c, true)
	}
	f("1.1", "TE: none", true)
	f("1.0", "TE: none", false)
	f("1.1", "Connection: x-gone", true)
	f("1.0", "Connection: x-gone", false)
}

// A redirect to the endpoint itself leads clients to the gateway, and nowhere else; others are left as they are.
func TestRedirects(t *testing.T) {
	const origin = "http://10.0.0.1:80"
	f := func(location, want string) {
		t.Helper()
		var r response
		got, err := parseResponse(nil, []byte("Location: "+location+"\r\nContent-Length: 0\r\n\r\n"), 307, false, false, origin, &r)
		if err != nil || string(got) != "Location: "+want+"\r\n" {
			t.Errorf("%s: got %q, %v; want %s", location, got, err, want)
		}
	}
	f(origin+"/v1/models", "/v1/models")
	f(origin+"/v1/models?a=http://b", "/v1/models?a=http://b")
	f(origin, "/")
	f(origin+"?a=1", "/?a=1")
	f(origin+"#a", "/#a")
	f(origin+"//other.example/x", "/.//other.example/x")
	f("/v1/models/", "/v1/models/")
	f("models/", "models/")
	for _, other := range []string{origin + "80/x", origin + ".example/x", origin + "@other.example/x", "http://10.0.0.2/x", "https://10.0.0.1:80/x"} {
		f(other, other)
	}
}

// Whoever reads the log of a request that found nobody left to take it wants to know who failed it.
func TestRecordNamesTheLastEndpoint(t *testing.T) {
	dead := func() *mock { m := newMock(t, chat); m.kill(); return m }
	for _, mocks := range [][]*mock{{dead()}, {dead(), dead()}} {
		g := newGate(t, mocks, withPool(func(o *PoolOptions) { o.Retry.MaxAttempts = 4 }))
		if a := g.do(plainBody); a.StatusCode != 502 {
			t.Errorf("status %d; want 502", a.StatusCode)
		}
		r := g.sink.wait(t, 1)[0]
		if len(r.Attempts) != len(mocks) {
			t.Fatalf("%d attempts; want %d", len(r.Attempts), len(mocks))
		}
		if last := r.Attempts[len(r.Attempts)-1].Endpoint; r.Endpoint != last || !r.Decided || r.Outcome != "endpoint_connect" {
			t.Errorf("endpoint %q, outcome %s; want %q", r.Endpoint, r.Outcome, last)
		}
	}
}

// A pool whose endpoints have never said what they serve leaves wrong names open for a minute, and no longer.
func TestUntoldPools(t *testing.T) {
	const began = pool.Instant(1e9)
	table := pool.NewTable([]pool.PoolSpec{{Name: "told", Models: []string{"m"}}, {Name: "new"}}, pool.Options{})
	at := func(d time.Duration, want bool) {
		t.Helper()
		if got := untold(table.Load(), began.Add(d)); got != want {
			t.Errorf("%v after the start: %v, want %v", d, got, want)
		}
	}
	at(0, true)
	at(2*time.Minute, false) // nobody is there to tell
	if _, _, err := table.SetEndpoints("new", []pool.Spec{{Pool: "new", URL: "http://127.0.0.1:1"}}, began.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	at(time.Hour+time.Second, true)
	at(time.Hour+2*time.Minute, false)
}

func TestDistanceOfNames(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"llama", "Llama", 0},
		{"lama", "llama", 1},
		{"", "abc", 3},
		{"llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", 1},
		{"meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct", 1},
		{"other/m", "org/m", 4},
	} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q and %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
