package tracing

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
)

var binary = flag.String("kvgate", "../../kvgate", "the binary under test")

const model = "meta-llama/Llama-3.1-8B-Instruct"

// freePort is a port of the loopback interface that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// A collector is the OpenTelemetry Collector's OTLP receiver, and what it took in.
type collector struct {
	url  string
	sink consumertest.TracesSink
}

func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{}
	addr := freePort(t)
	c.url = "http://" + addr
	factory := otlpreceiver.NewFactory()
	cfg := factory.CreateDefaultConfig()
	err := confmap.NewFromStringMap(map[string]any{"protocols": map[string]any{"http": map[string]any{"endpoint": addr}}}).Unmarshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r, err := factory.CreateTraces(t.Context(), receivertest.NewNopSettings(factory.Type()), cfg, &c.sink)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(context.Background(), componenttest.NewNopHost()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return c
}

// A span is one that came in, and the resource that it is of.
type span struct {
	ptrace.Span
	resource pcommon.Map
}

func (s *span) attr(key string) string {
	v, ok := s.Attributes().Get(key)
	if !ok {
		return ""
	}
	return v.AsString()
}

// spans returns what came in, of one trace or, with "", of all.
func (c *collector) spans(trace string) (out []*span) {
	for _, batch := range c.sink.AllTraces() {
		for _, rs := range batch.ResourceSpans().All() {
			for _, ss := range rs.ScopeSpans().All() {
				for _, s := range ss.Spans().All() {
					if trace == "" || s.TraceID().String() == trace {
						out = append(out, &span{s, rs.Resource().Attributes()})
					}
				}
			}
		}
	}
	return out
}

// trace waits for the spans of a request whose root has ended, by name.
func (c *collector) trace(t *testing.T, id string) map[string][]*span {
	t.Helper()
	by := map[string][]*span{}
	eventually(t, "the spans of "+id+" come in", func() bool {
		clear(by)
		root := false
		for _, s := range c.spans(id) {
			by[s.Name()] = append(by[s.Name()], s)
			root = root || s.Kind() == ptrace.SpanKindServer
		}
		return root
	})
	return by
}

// one is the only span of a name.
func one(t *testing.T, by map[string][]*span, name string) *span {
	t.Helper()
	if len(by[name]) != 1 {
		t.Fatalf("%d spans %q; want one of %v", len(by[name]), name, by)
	}
	return by[name][0]
}

// start runs kvgate until the test ends.
func start(t *testing.T, args ...string) {
	t.Helper()
	path, err := filepath.Abs(*binary)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	out, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v; make build first", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		_ = out.Close()
		if t.Failed() {
			data, _ := os.ReadFile(out.Name())
			t.Logf("kvgate %s:\n%s", args[0], data)
		}
	})
}

// seen is what of tracing got to a server with a request.
type seen struct{ server, parent, state string }

// servers are simulated ones behind proxies that note what they are sent, and refuse a request that asks for it once.
type servers struct {
	urls []string
	mu   sync.Mutex
	seen []seen
	once map[string]bool
}

func (s *servers) of(trace string) (out []seen) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.seen {
		if strings.Contains(r.parent, trace) {
			out = append(out, r)
		}
	}
	return out
}

func startServers(t *testing.T) *servers {
	t.Helper()
	s := &servers{once: map[string]bool{}}
	for range 2 {
		addr := freePort(t)
		start(t, "sim", "--listen", addr, "--speedup", "5")
		eventually(t, "a server answers", func() bool {
			resp, err := http.Get("http://" + addr + "/health")
			if err == nil {
				resp.Body.Close()
			}
			return err == nil
		})
		target, err := url.Parse("http://" + addr)
		if err != nil {
			t.Fatal(err)
		}
		front := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0)}
		ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				refuse := r.Header.Get("X-Refuse-Once")
				s.mu.Lock()
				s.seen = append(s.seen, seen{r.Host, r.Header.Get("Traceparent"), r.Header.Get("Tracestate")})
				again := s.once[refuse]
				s.once[refuse] = true
				s.mu.Unlock()
				if refuse != "" && !again {
					http.Error(w, `{"error":{"message":"busy"}}`, http.StatusServiceUnavailable)
					return
				}
			}
			front.ServeHTTP(w, r)
		}))
		t.Cleanup(ts.Close)
		s.urls = append(s.urls, ts.URL)
	}
	return s
}

// startGateway runs kvgate in front of s with a collector, and returns its URL.
func startGateway(t *testing.T, c *collector, s *servers, ratio, pool string) string {
	t.Helper()
	addr := freePort(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nlog: {access: \"off\"}\ndrain: {delay: 0s, timeout: 2s}\n"+
		"tracing: {endpoint: %q, sample_ratio: %s, service: gate}\npools:\n  - name: p\n    discovery: {static: [%q, %q]}\n%s",
		addr, freePort(t), c.url, ratio, s.urls[0], s.urls[1], pool)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, "serve", "-c", file)
	eventually(t, "the gateway is ready", func() bool {
		resp, err := http.Get("http://" + addr + "/v1/models")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(data), model)
	})
	return "http://" + addr
}

// ask sends a chat request and reads its answer to the end.
func ask(t *testing.T, gateway, model string, stream bool, tokens int, header ...string) (status int) {
	t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": model, "stream": stream, "max_tokens": tokens, "messages": []map[string]string{{"role": "user", "content": "Say something."}},
		"stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, gateway+"/v1/chat/completions", strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode
}

const parentID = "b7ad6b7169203331"

func traceID(n int) string { return fmt.Sprintf("0af7651916cd43dd8448eb211c8031%02x", n) }

func traceparent(n int, flags string) string {
	return "00-" + traceID(n) + "-" + parentID + "-" + flags
}

// A request that a first endpoint refuses and a second one answers: every span is there, below its parent, within its
// parent's time, with the attributes of the conventions, and each endpoint is told its attempt as its parent.
func TestSpans(t *testing.T) {
	c, s := startCollector(t), startServers(t)
	g := startGateway(t, c, s, "0", "")
	if status := ask(t, g, model, true, 20, "Traceparent", traceparent(1, "01"), "Tracestate", "vendor=1", "X-Refuse-Once", "a", "X-Request-Id", "the-id"); status != 200 {
		t.Fatalf("status %d", status)
	}
	by := c.trace(t, traceID(1))
	root := one(t, by, "chat "+model)
	if root.ParentSpanID().String() != parentID || root.Kind() != ptrace.SpanKindServer || root.Status().Code() == ptrace.StatusCodeError {
		t.Errorf("the request's span: parent %s, kind %s, status %s", root.ParentSpanID(), root.Kind(), root.Status().Code())
	}
	if v, _ := root.resource.Get("service.name"); v.AsString() != "gate" {
		t.Errorf("service.name %q", v.AsString())
	}
	for key, want := range map[string]string{
		"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "gen_ai.usage.output_tokens": "20", "http.request.method": "POST",
		"url.path": "/v1/chat/completions", "http.response.status_code": "200", "kvgate.outcome": "ok", "kvgate.pool": "p", "kvgate.request_id": "the-id", "kvgate.stream": "true",
	} {
		if got := root.attr(key); got != want {
			t.Errorf("%s is %q; want %q", key, got, want)
		}
	}
	for _, key := range []string{"gen_ai.usage.input_tokens", "gen_ai.server.time_to_first_token", "kvgate.endpoint"} {
		if v := root.attr(key); v == "" || v == "0" {
			t.Errorf("%s is %q", key, v)
		}
	}
	choose, first := one(t, by, "choose"), one(t, by, "first token")
	if len(by["attempt"]) != 2 || len(c.spans(traceID(1))) != 5 {
		t.Fatalf("spans %v; want two attempts and five in all", by)
	}
	attempts := by["attempt"]
	if attempts[0].attr("kvgate.attempt") != "1" {
		attempts[0], attempts[1] = attempts[1], attempts[0]
	}
	if choose.attr("kvgate.decision.snapshot_version") == "" || choose.attr("kvgate.prompt_tokens") == "" {
		t.Errorf("choose: %v", choose.Attributes().AsRaw())
	}
	if attempts[0].Status().Code() != ptrace.StatusCodeError || attempts[0].attr("error.type") != "endpoint_status" || attempts[1].Status().Code() == ptrace.StatusCodeError ||
		attempts[0].attr("kvgate.endpoint") == attempts[1].attr("kvgate.endpoint") || attempts[1].attr("kvgate.endpoint") != root.attr("kvgate.endpoint") {
		t.Errorf("attempts %v, %v", attempts[0].Attributes().AsRaw(), attempts[1].Attributes().AsRaw())
	}
	below(t, root, choose)
	below(t, root, attempts[0])
	below(t, root, attempts[1])
	below(t, attempts[1], first)
	if attempts[0].EndTimestamp() > attempts[1].StartTimestamp() || choose.EndTimestamp() > attempts[0].StartTimestamp() {
		t.Error("the attempts overlap, or begin before the choice")
	}

	told := s.of(traceID(1))
	if len(told) != 2 || told[0].server == told[1].server {
		t.Fatalf("the servers were sent %v", told)
	}
	for i, a := range attempts {
		if a.Kind() != ptrace.SpanKindClient || told[i].parent != "00-"+traceID(1)+"-"+a.SpanID().String()+"-01" || told[i].state != "vendor=1" {
			t.Errorf("attempt %d is %s, the server was told %+v", i+1, a.SpanID(), told[i])
		}
	}
}

// below reports a span that is not its parent's child, or not within its time.
func below(t *testing.T, parent, child *span) {
	t.Helper()
	if child.ParentSpanID() != parent.SpanID() || child.TraceID() != parent.TraceID() {
		t.Errorf("%s has the parent %s; want %s, %s", child.Name(), child.ParentSpanID(), parent.Name(), parent.SpanID())
	}
	const slack = uint64(time.Millisecond)
	if from, to := uint64(child.StartTimestamp()), uint64(child.EndTimestamp()); from > to || from+slack < uint64(parent.StartTimestamp()) || to > uint64(parent.EndTimestamp())+slack {
		t.Errorf("%s, %s to %s, is not within %s, %s to %s", child.Name(), child.StartTimestamp().AsTime(), child.EndTimestamp().AsTime(), parent.Name(), parent.StartTimestamp().AsTime(), parent.EndTimestamp().AsTime())
	}
}

// A request that has to wait shows for how long; one whose answer isn't streamed shows when it began; one that is refused is
// an error without an attempt.
func TestSpansOfOtherRequests(t *testing.T) {
	c, s := startCollector(t), startServers(t)
	g := startGateway(t, c, s, "0", "    admission: {endpoint_requests: 1}\n")
	var wg sync.WaitGroup
	for n := range 5 {
		wg.Go(func() {
			if status := ask(t, g, model, false, 500, "Traceparent", traceparent(n, "01")); status != 200 {
				t.Errorf("status %d", status)
			}
		})
	}
	wg.Wait()
	waited := 0
	for n := range 5 {
		by := c.trace(t, traceID(n))
		root := one(t, by, "chat "+model)
		below(t, one(t, by, "attempt"), one(t, by, "answer begins"))
		if a := by["admission"]; len(a) == 1 && a[0].EndTimestamp() > a[0].StartTimestamp() {
			waited++
			below(t, root, a[0])
			if a[0].EndTimestamp() > one(t, by, "attempt").StartTimestamp() {
				t.Error("an attempt began before its request was let in")
			}
		}
	}
	if waited == 0 { // two endpoints take one request each at a time, for more than half a second
		t.Error("none of 5 requests shows that it waited")
	}

	if status := ask(t, g, "nobody", true, 5, "Traceparent", traceparent(9, "01")); status != 404 {
		t.Errorf("status %d", status)
	}
	by := c.trace(t, traceID(9))
	if root := one(t, by, "chat nobody"); root.Status().Code() != ptrace.StatusCodeError || root.attr("error.type") != "model_not_found" || len(by) != 1 {
		t.Errorf("%v, %v", root.Attributes().AsRaw(), by)
	}
}

// Who calls decides whether it is sampled, and without a caller's word sample_ratio does. Endpoints are told in any case.
func TestSampling(t *testing.T) {
	c, s := startCollector(t), startServers(t)
	none := startGateway(t, c, s, "0", "")
	for _, header := range [][]string{{"Traceparent", traceparent(1, "00")}, {}, {"Traceparent", "00-" + strings.Repeat("0", 32) + "-" + parentID + "-01"}} {
		if status := ask(t, none, model, true, 2, header...); status != 200 {
			t.Errorf("status %d", status)
		}
	}
	if told := s.of(traceID(1)); len(told) != 1 || !strings.HasSuffix(told[0].parent, "-00") || strings.Contains(told[0].parent, parentID) {
		t.Errorf("of a trace that isn't sampled the server was told %v", told)
	}
	ask(t, none, model, true, 2, "Traceparent", traceparent(2, "01"))
	c.trace(t, traceID(2)) // what came before it would have come before it
	for _, sp := range c.spans("") {
		if sp.TraceID().String() != traceID(2) {
			t.Errorf("a span %q of a request that isn't sampled", sp.Name())
		}
	}

	c = startCollector(t)
	half := startGateway(t, c, s, "0.5", "")
	const n = 100
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range n / 4 {
				ask(t, half, model, true, 1)
			}
		})
	}
	wg.Wait()
	ask(t, half, model, true, 1, "Traceparent", traceparent(3, "01"))
	c.trace(t, traceID(3))
	roots := 0
	for _, sp := range c.spans("") {
		if sp.Kind() == ptrace.SpanKindServer && sp.TraceID().String() != traceID(3) {
			roots++
			if !sp.ParentSpanID().IsEmpty() {
				t.Errorf("a trace that begins here has the parent %s", sp.ParentSpanID())
			}
		}
	}
	// Binomial(100, 0.5): five deviations to either side.
	if roots < 25 || roots > 75 {
		t.Errorf("%d of %d requests are sampled at a ratio of 0.5", roots, n)
	}
}
