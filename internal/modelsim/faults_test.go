package modelsim

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// dial opens a connection that the test owns byte by byte.
func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

func request(path, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: sim\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
}

// exchangeRaw sends a request and returns all bytes until the connection ends,
// and how it ended: nil is FIN.
func exchangeRaw(t *testing.T, s *Server, req string) (string, error) {
	t.Helper()
	c := dial(t, s)
	if _, err := io.WriteString(c, req); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

var streaming = chat("hello big wide world out there", `,"stream":true,"max_tokens":12`)

func setFaults(t *testing.T, s *Server, faults ...Fault) {
	t.Helper()
	if err := s.SetFaults(faults...); err != nil {
		t.Fatal(err)
	}
}

// healthy checks that the server answers in full. It does so on a new connection:
// the client's idle one may be from before a restart.
func healthy(t *testing.T, s *Server) {
	t.Helper()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	if resp, body := post(t, s, "/v1/chat/completions", streaming); resp.StatusCode != 200 || !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("not healthy: %d %s", resp.StatusCode, body)
	}
}

func TestFaultBeforeHeaders(t *testing.T) {
	s := start(t, Options{})
	for _, kind := range []FaultKind{FaultReset, FaultClose, FaultGarbage} {
		setFaults(t, s, Fault{Kind: kind, Count: 1})
		got, err := exchangeRaw(t, s, request("/v1/chat/completions", streaming))
		switch {
		case kind == FaultReset && (!errors.Is(err, syscall.ECONNRESET) || got != ""):
			t.Errorf("reset: %q, %v; want RST and nothing", got, err)
		case kind == FaultClose && (err != nil || got != ""):
			t.Errorf("close: %q, %v; want FIN and nothing", got, err)
		case kind == FaultGarbage && (err != nil || strings.HasPrefix(got, "HTTP/")):
			t.Errorf("garbage: %q, %v; want what is no HTTP", got, err)
		}
	}
	eventually(t, "three requests counted, none executed", func() bool {
		st := s.Stats()
		return st.Executed == 0 && st.Errored == 3
	})
	healthy(t, s)
}

func TestFaultStatus(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s,
		Fault{Kind: FaultStatus, Count: 2, RetryAfterSeconds: 7},
		Fault{Kind: FaultStatus, Count: 1, Status: 429, Body: `{"error":"Model is overloaded","error_type":"overloaded"}`},
		Fault{Kind: FaultStatus, Status: 500, Path: "/v1/models"},
	)
	for i, want := range []int{503, 503, 429, 200} {
		resp, body := post(t, s, "/v1/chat/completions", streaming)
		if resp.StatusCode != want {
			t.Errorf("request %d: %d %s; want %d", i, resp.StatusCode, body, want)
		}
		if want == 503 && (resp.Header.Get("Retry-After") != "7" || !strings.Contains(body, `{"error":{"message":`)) {
			t.Errorf("503: Retry-After %q, %s", resp.Header.Get("Retry-After"), body)
		}
		if want == 429 && !strings.Contains(body, "overloaded") {
			t.Errorf("429: %s", body)
		}
	}
	if code, _ := get(t, s, "/v1/models"); code != 500 {
		t.Errorf("/v1/models: %d; want 500", code)
	}
	if st := s.Stats(); st.Executed != 1 {
		t.Errorf("executed %d; want 1", st.Executed)
	}
}

// The answer is there though most of the body was never sent.
func TestFaultEarlyStatus(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s, Fault{Kind: FaultEarlyStatus, Status: 429})
	c := dial(t, s)
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: sim\r\nContent-Length: 100000000\r\n\r\n{")
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "HTTP/1.1 429 ") {
		t.Errorf("%q, %v", line, err)
	}
}

// A hang ends when the fault is cleared, or when the client leaves.
func TestFaultHangBeforeHeaders(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s, Fault{Kind: FaultHang})
	done := make(chan string, 1)
	go func() {
		resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(streaming))
		if err != nil {
			done <- err.Error()
			return
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		done <- string(b)
	}()
	leaver := dial(t, s)
	io.WriteString(leaver, request("/v1/completions", `{"prompt":"x"}`))
	eventually(t, "both in", func() bool { return s.Stats().Requests == 2 })
	select {
	case got := <-done:
		t.Fatalf("answered while hanging: %s", got)
	default:
	}
	leaver.Close()
	eventually(t, "leaver gone", func() bool { return len(s.Aborts()) == 1 })
	if st := s.Stats(); st.Executed != 0 || s.Aborts()[0].Path != "/v1/completions" {
		t.Errorf("executed %d, aborts %+v", st.Executed, s.Aborts())
	}
	setFaults(t, s)
	if got := <-done; !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Errorf("after clearing: %s", got)
	}
}

func TestFaultSlow(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s, Fault{Kind: FaultSlow, DelaySeconds: 0.2})
	begun := time.Now()
	healthy(t, s)
	if took := time.Since(begun); took < 200*time.Millisecond {
		t.Errorf("answered after %v; want 0.2 s at least", took)
	}
}

func TestFaultsOfStreams(t *testing.T) {
	s := start(t, Options{})
	f := func(kind FaultKind, wantErr error, check func(raw string) bool, what string) {
		t.Helper()
		setFaults(t, s, Fault{Kind: kind, Events: 3, Count: 1})
		got, err := exchangeRaw(t, s, request("/v1/chat/completions", streaming))
		if !errors.Is(err, wantErr) {
			t.Errorf("%s: ended with %v; want %v", kind, err, wantErr)
		}
		// Three events of the chat come through: the role, two words.
		if n := strings.Count(got, `"delta":{`); n != 3 || !strings.Contains(got, `" big"`) || strings.Contains(got, `"finish_reason":"`) {
			t.Errorf("%s: %d events in %s", kind, n, got)
		}
		if !check(got) {
			t.Errorf("%s: want %s:\n%s", kind, what, got)
		}
		eventually(t, "engine is rid of it", func() bool { st := s.Stats(); return st.InFlight == 0 && st.Engine.Running == 0 })
	}
	noEnd := func(raw string) bool { return !strings.HasSuffix(raw, "0\r\n\r\n") }
	f(FaultResetStream, syscall.ECONNRESET, noEnd, "no last chunk")
	f(FaultCloseStream, nil, noEnd, "no last chunk")
	f(FaultBadChunk, nil, func(raw string) bool { return strings.HasSuffix(raw, "zz\r\nnot a chunk\r\n") }, "a bad chunk")
	setFaults(t, s, Fault{Kind: FaultCutMidEvent, Events: 3, Count: 1})
	if got, err := exchangeRaw(t, s, request("/v1/chat/completions", streaming)); err != nil || strings.Count(got, "data: ") != 4 || strings.Contains(got, `" wide"`) || !noEnd(got) {
		t.Errorf("cut_mid_event: %v\n%s", err, got)
	}

	// These end their response, and the connection lives on.
	g := func(fault Fault, path, body string, check func(body string) bool) {
		t.Helper()
		fault.Count = 1
		setFaults(t, s, fault)
		resp, got := post(t, s, path, body)
		if resp.StatusCode != 200 || !check(got) {
			t.Errorf("%s %s: %d\n%s", fault.Kind, path, resp.StatusCode, got)
		}
	}
	g(Fault{Kind: FaultEndEarly, Events: 3}, "/v1/chat/completions", streaming, func(b string) bool {
		return strings.Count(b, "data: ") == 3 && !strings.Contains(b, "[DONE]")
	})
	g(Fault{Kind: FaultErrorEvent}, "/v1/chat/completions", streaming, func(b string) bool {
		return strings.HasPrefix(b, `data: {"error": {"message": "EngineCore encountered`) && strings.HasSuffix(b, "\"code\": 500}}\n\ndata: [DONE]\n\n") && strings.Count(b, "data: ") == 2
	})
	g(Fault{Kind: FaultErrorEvent, Events: 2}, "/v1/messages", `{"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"x y z"}]}`, func(b string) bool {
		return strings.HasPrefix(b, "event: message_start\n") && strings.Contains(b, "event: error\ndata: {\"type\":\"error\"") && !strings.Contains(b, "message_stop")
	})
	g(Fault{Kind: FaultErrorEvent, Events: 3}, "/v1/responses", `{"max_output_tokens":9,"stream":true,"input":"x y z"}`, func(b string) bool {
		return strings.Contains(b, "event: error\ndata: {\"type\":\"error\",") && !strings.Contains(b, "response.completed")
	})
	g(Fault{Kind: FaultQueueFull}, "/v1/chat/completions", streaming, func(b string) bool {
		return b == `data: {"error": {"object": "error", "message": "The request queue is full.", "type": "Service Unavailable", "param": null, "code": 503}}`+"\n\ndata: [DONE]\n\n"
	})
	g(Fault{Kind: FaultFinishError, Events: 2}, "/v1/chat/completions", streaming, func(b string) bool {
		return strings.Contains(b, `"content":"hello"`) && strings.HasSuffix(b, `data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}`+"\n\ndata: [DONE]\n\n")
	})
	g(Fault{Kind: FaultFinishAbort, Events: 3}, "/v1/chat/completions", streaming, func(b string) bool {
		return strings.Contains(b, `" big"`) && !strings.Contains(b, `" wide"`) && strings.Contains(b, `"finish_reason":"abort"`) && strings.HasSuffix(b, "data: [DONE]\n\n")
	})
	g(Fault{Kind: FaultJSONInStream}, "/v1/chat/completions", streaming, func(b string) bool { return strings.Contains(b, `"object":"chat.completion"`) })
	healthy(t, s)
	if st := s.Stats(); st.Engine.KVBlocksUsed != 0 || st.InFlight != 0 {
		t.Errorf("left over: %+v", st)
	}
}

// Without a stream the same faults cut the body in two.
func TestFaultsOfWholeAnswers(t *testing.T) {
	s := start(t, Options{})
	whole := chat("hello", `,"max_tokens":3`)
	for _, kind := range []FaultKind{FaultResetStream, FaultCloseStream} {
		setFaults(t, s, Fault{Kind: kind, Count: 1})
		got, err := exchangeRaw(t, s, request("/v1/chat/completions", whole))
		if errors.Is(err, syscall.ECONNRESET) != (kind == FaultResetStream) {
			t.Errorf("%s: ended with %v", kind, err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(got)), nil)
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		b, err := io.ReadAll(resp.Body)
		if !errors.Is(err, io.ErrUnexpectedEOF) || int64(len(b)) != resp.ContentLength/2 {
			t.Errorf("%s: %d of %d bytes, %v; want half", kind, len(b), resp.ContentLength, err)
		}
	}
	setFaults(t, s, Fault{Kind: FaultQueueFull, Count: 1})
	if resp, body := post(t, s, "/v1/chat/completions", whole); resp.StatusCode != 503 || !strings.HasPrefix(body, `{"object":"error"`) {
		t.Errorf("queue_full: %d %s", resp.StatusCode, body)
	}
	setFaults(t, s, Fault{Kind: FaultFinishError, Count: 1})
	if resp, body := post(t, s, "/v1/chat/completions", whole); resp.StatusCode != 500 {
		t.Errorf("finish_error: %d %s", resp.StatusCode, body)
	}
	healthy(t, s)
}

// A stream that hangs is silent until the fault is cleared, and can be left.
func TestFaultHangMidStream(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s, Fault{Kind: FaultHangStream, Events: 3, Count: 2})
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(streaming))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	for range 6 { // three events
		if line, err := br.ReadString('\n'); err != nil {
			t.Fatalf("%q, %v", line, err)
		}
	}
	leaver := dial(t, s)
	io.WriteString(leaver, request("/v1/chat/completions", streaming))
	eventually(t, "its events", func() bool { return s.Stats().Executed == 2 })
	leaver.Close()
	eventually(t, "leaver gone", func() bool { return s.Stats().Aborted == 1 })
	if n := br.Buffered(); n > 0 {
		t.Errorf("%d bytes while hanging", n)
	}
	setFaults(t, s)
	rest, err := io.ReadAll(br)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("after clearing: %v %s", err, rest)
	}
}

func TestFaultsOfMetrics(t *testing.T) {
	s := start(t, Options{})
	setFaults(t, s, Fault{Kind: FaultMetricsFrozen})
	_, before := get(t, s, "/metrics")
	healthy(t, s)
	if _, after := get(t, s, "/metrics"); after != before {
		t.Error("frozen page moved")
	}
	setFaults(t, s)
	if _, after := get(t, s, "/metrics"); after == before {
		t.Error("page still frozen")
	}

	setFaults(t, s, Fault{Kind: FaultMetricsGarbage})
	if _, body := get(t, s, "/metrics"); !strings.Contains(body, "<html>") {
		t.Errorf("garbage: %s", body)
	}
	setFaults(t, s, Fault{Kind: FaultMetricsHuge, Bytes: 3 << 20})
	if _, body := get(t, s, "/metrics"); len(body) < 3<<20 || !strings.Contains(body, "vllm:num_requests_running") {
		t.Errorf("huge: %d bytes", len(body))
	}
	setFaults(t, s, Fault{Kind: FaultMetricsRedirect, Body: "/health"})
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Get(s.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 302 || resp.Header.Get("Location") != "/health" {
		t.Errorf("redirect: %d to %q", resp.StatusCode, resp.Header.Get("Location"))
	}

	// Compressed though nobody asked: 64 MiB from some 64 kB.
	setFaults(t, s, Fault{Kind: FaultMetricsGzipBomb, Bytes: 64 << 20})
	raw, err := exchangeRaw(t, s, "GET /metrics HTTP/1.1\r\nHost: sim\r\nConnection: close\r\n\r\n")
	if err != nil {
		t.Fatal(err)
	}
	resp, err = http.ReadResponse(bufio.NewReader(strings.NewReader(raw)), nil)
	if err != nil || resp.Header.Get("Content-Encoding") != "gzip" {
		t.Fatalf("bomb: %v %v", resp, err)
	}
	z, err := gzip.NewReader(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, z)
	if err != nil || n != 64<<20 || len(raw) > 1<<20 {
		t.Errorf("bomb: %d bytes inflate to %d, %v", len(raw), n, err)
	}

	// A hanging page does not hold up requests.
	setFaults(t, s, Fault{Kind: FaultMetricsHang})
	c := dial(t, s)
	io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: sim\r\n\r\n")
	healthy(t, s)
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if b, err := io.ReadAll(c); len(b) > 0 || err == nil {
		t.Errorf("hanging page answered %q", b)
	}
	setFaults(t, s)
}

func refused(s *Server) bool {
	c, err := net.Dial("tcp", s.Addr())
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// A killed process cuts its streams, refuses, and comes back knowing nothing.
func TestFaultOOM(t *testing.T) {
	s := start(t, Options{Adapters: []string{"a"}, Speedup: 5})
	post(t, s, "/v1/load_lora_adapter", `{"lora_name":"b","lora_path":"/b"}`)
	_, made := post(t, s, "/v1/responses", `{"input":"x","max_output_tokens":1}`)
	startedAt := s.Stats().StartedAt
	c := dial(t, s)
	io.WriteString(c, request("/v1/chat/completions", chat("x", `,"stream":true,"max_tokens":100000`)))
	br := bufio.NewReader(c)
	if _, err := br.ReadString('{'); err != nil {
		t.Fatal(err)
	}
	setFaults(t, s, Fault{Kind: FaultOOM})
	rest, _ := io.ReadAll(br)
	if strings.Contains(string(rest), "[DONE]") || strings.HasSuffix(string(rest), "0\r\n\r\n") {
		t.Error("stream of a killed process ended cleanly")
	}
	if !refused(s) || s.Stats().Listening {
		t.Error("port of a killed process accepts")
	}
	addr := s.Addr()
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	healthy(t, s)
	st := s.Stats()
	if s.Addr() != addr || !st.StartedAt.After(startedAt) || st.Engine.Finished != 1 {
		t.Errorf("after restart: %s (was %s), started %v, %d finished", s.Addr(), addr, st.StartedAt, st.Engine.Finished)
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(made, `{"id":"`), `"`)
	if code, _ := get(t, s, "/v1/responses/"+id); code != 404 {
		t.Errorf("a response outlived its process: %d", code)
	}
	if _, cards := get(t, s, "/v1/models"); strings.Contains(cards, `"id":"b"`) || !strings.Contains(cards, `"id":"a"`) {
		t.Errorf("adapters after restart: %s", cards)
	}
	setFaults(t, s, Fault{Kind: FaultOOM, DelaySeconds: 0.05})
	eventually(t, "back by itself", func() bool { return !refused(s) })
	healthy(t, s)
}

// The port refuses while open connections go on.
func TestFaultRefuse(t *testing.T) {
	s := start(t, Options{})
	c := dial(t, s)
	br := bufio.NewReader(c)
	ask := func() {
		t.Helper()
		io.WriteString(c, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %v", resp, err)
		}
	}
	ask()
	setFaults(t, s, Fault{Kind: FaultRefuse})
	if !refused(s) {
		t.Error("not refused")
	}
	ask()
	setFaults(t, s, Fault{Kind: FaultAccept})
	healthy(t, s)
	setFaults(t, s, Fault{Kind: FaultRefuse, DelaySeconds: 0.05})
	eventually(t, "open by itself", func() bool { return !refused(s) })
	ask()
}

// A sleeping engine looks idle and healthy, aborts what it had and lets new
// requests hang.
func TestFaultSleep(t *testing.T) {
	s := start(t, Options{Speedup: 5})
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(chat("x", `,"stream":true,"max_tokens":100000`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	if _, err := br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	setFaults(t, s, Fault{Kind: FaultSleep, Status: 2})
	rest, err := io.ReadAll(br)
	if err != nil || !strings.Contains(string(rest), `"finish_reason":"abort"`) || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("stream of an engine that went to sleep: %v %s", err, rest)
	}
	if code, body := get(t, s, "/is_sleeping"); code != 200 || body != `{"is_sleeping":true}` {
		t.Errorf("/is_sleeping: %d %s", code, body)
	}
	if code, _ := get(t, s, "/health"); code != 200 {
		t.Errorf("/health asleep: %d", code)
	}
	_, page := get(t, s, "/metrics")
	for state, want := range map[string]string{"awake": "0.0", "weights_offloaded": "0.0", "discard_all": "1.0"} {
		if got := metric(t, page, `vllm:engine_sleep_state{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct",sleep_state="`+state+`"}`); got != want {
			t.Errorf("%s %s; want %s", state, got, want)
		}
	}
	leaver := dial(t, s)
	io.WriteString(leaver, request("/v1/chat/completions", chat("x", `,"max_tokens":2`)))
	eventually(t, "waits", func() bool { return s.Stats().InFlight == 1 })
	leaver.Close()
	eventually(t, "left", func() bool { return s.Stats().InFlight == 0 })
	done := make(chan int, 1)
	go func() {
		resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(chat("x", `,"max_tokens":2`)))
		if err != nil {
			done <- 0
			return
		}
		resp.Body.Close()
		done <- resp.StatusCode
	}()
	eventually(t, "waits", func() bool { return s.Stats().InFlight == 1 })
	setFaults(t, s, Fault{Kind: FaultWake})
	if code := <-done; code != 200 {
		t.Errorf("after waking: %d", code)
	}
}

// A dead engine behind a living API server.
func TestFaultDead(t *testing.T) {
	s := start(t, Options{Speedup: 5})
	resp, err := http.Post(s.URL()+"/v1/chat/completions", "application/json", strings.NewReader(chat("x", `,"stream":true,"max_tokens":100000`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	if _, err := br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	setFaults(t, s, Fault{Kind: FaultDead})
	if rest, err := io.ReadAll(br); err != nil || !strings.HasSuffix(string(rest), "\"code\": 500}}\n\ndata: [DONE]\n\n") {
		t.Errorf("stream: %v %s", err, rest)
	}
	if resp, body := post(t, s, "/v1/chat/completions", streaming); resp.StatusCode != 500 || !strings.Contains(body, "EngineCore") {
		t.Errorf("request: %d %s", resp.StatusCode, body)
	}
	if code, body := get(t, s, "/health"); code != 503 || body != "" {
		t.Errorf("/health: %d %q; want 503 and nothing", code, body)
	}
	setFaults(t, s, Fault{Kind: FaultRestart})
	healthy(t, s)
}

// Idle connections end after the keep-alive, those in use do not.
func TestFaultKeepAlive(t *testing.T) {
	s := start(t, Options{Speedup: 1})
	setFaults(t, s, Fault{Kind: FaultKeepAlive, DelaySeconds: 0.05})
	c := dial(t, s)
	// Longer than the keep-alive, in use all along.
	io.WriteString(c, request("/v1/chat/completions", chat("x", `,"max_tokens":30`)))
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(resp.Body); err != nil || resp.Close {
		t.Errorf("answer: %v, close %t", err, resp.Close)
	}
	if _, err := br.ReadByte(); err != io.EOF {
		t.Errorf("idle connection: %v; want FIN", err)
	}
}

func TestControlEndpoint(t *testing.T) {
	s := start(t, Options{ControlListen: "127.0.0.1:0"})
	do := func(method, url, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	if code, got := do("POST", s.URL()+"/sim/faults", `[{"kind":"status","status":418,"count":1,"skip":1}]`); code != 200 || !strings.Contains(got, `"status":418`) {
		t.Errorf("POST: %d %s", code, got)
	}
	healthy(t, s) // skipped
	if resp, _ := post(t, s, "/v1/chat/completions", streaming); resp.StatusCode != 418 {
		t.Errorf("status %d; want 418", resp.StatusCode)
	}
	if _, got := do("GET", s.URL()+"/sim/faults", ""); got != "[]\n" {
		t.Errorf("a spent fault is listed: %s", got)
	}
	if code, got := do("POST", s.URL()+"/sim/faults", `{"kind":"stauts"}`); code != 400 || !strings.Contains(got, "unknown") {
		t.Errorf("misspelt kind: %d %s", code, got)
	}
	do("POST", s.URL()+"/sim/faults", `{"kind":"hang"}`)
	do("DELETE", s.URL()+"/sim/faults", "")
	healthy(t, s)
	if code, got := do("POST", s.URL()+"/sim/fill", `{"fraction":0.5}`); code != 200 || !strings.Contains(got, `"KVBlocksUsed"`) || s.Stats().Engine.KVUtilization() < 0.4 {
		t.Errorf("fill: %d %s", code, got)
	}
	// Killed through its own port it still answers first; revived through the
	// control port, which stays.
	if code, _ := do("POST", s.URL()+"/sim/faults", `{"kind":"oom"}`); code != 200 {
		t.Errorf("oom: %d", code)
	}
	eventually(t, "refused", func() bool { return refused(s) })
	if code, _ := do("POST", "http://"+s.ControlAddr()+"/sim/faults", `{"kind":"restart"}`); code != 200 {
		t.Errorf("restart: %d", code)
	}
	eventually(t, "back", func() bool { return !refused(s) })
	healthy(t, s)
}

// Every fault has a test: this list grows with the constants.
func TestFaultKindsAreKnown(t *testing.T) {
	s := start(t, Options{})
	all := append(slices.Clone(requestFaults), FaultKeepAlive)
	for _, k := range all {
		if err := s.SetFaults(Fault{Kind: k, DelaySeconds: 1}); err != nil {
			t.Error(err)
		}
	}
	if err := s.SetFaults(Fault{Kind: "nonsense"}); err == nil {
		t.Error("nonsense accepted")
	}
}
