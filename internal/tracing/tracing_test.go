package tracing

import (
	"compress/gzip"
	"context"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"kvgate/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A receiver takes OTLP over HTTP, as a collector does.
type receiver struct {
	mu      sync.Mutex
	spans   []*otlp.Span
	service string
	header  http.Header
	status  int
}

func (c *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), 400)
			return
		}
		body = z
	}
	data, err := io.ReadAll(body)
	var req collector.ExportTraceServiceRequest
	if err != nil || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" || proto.Unmarshal(data, &req) != nil {
		http.Error(w, "not OTLP", 400)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.header = r.Header
	if c.status != 0 {
		w.WriteHeader(c.status)
		return
	}
	for _, rs := range req.ResourceSpans {
		for _, kv := range rs.Resource.Attributes {
			if kv.Key == "service.name" {
				c.service = kv.Value.GetStringValue()
			}
		}
		for _, ss := range rs.ScopeSpans {
			c.spans = append(c.spans, ss.Spans...)
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func start(t *testing.T) (*receiver, *Tracer) {
	t.Helper()
	c := &receiver{}
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	tr, err := New(Options{Endpoint: s.URL, Service: "gate", Version: "v1", Authorization: "Bearer made-up"})
	if err != nil {
		t.Fatal(err)
	}
	return c, tr
}

func finish(t *testing.T, tr *Tracer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := tr.Close(ctx); err != nil {
		t.Error(err)
	}
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func record() *telemetry.Record {
	r := &telemetry.Record{
		RequestID: "r1", Method: "POST", Path: "/v1/chat/completions", API: "chat_completions", Status: 200, Outcome: "ok", Pool: "p", Model: "m", Endpoint: "p/b",
		Stream: true, ReadSeconds: 0.01, QueueSeconds: 0.1, DecisionSeconds: 0.001, SentSeconds: 0.4, FirstByteSeconds: 0.9, DurationSeconds: 2, TTFTSeconds: 0.9,
		Attempts:   []telemetry.Attempt{{Endpoint: "p/a", Outcome: "endpoint_connect", Seconds: 0.25}, {Endpoint: "p/b", Outcome: "ok", Seconds: 1.6}},
		UsageKnown: true, InputTokens: 100, OutputTokens: 20, PredictedSeconds: 0.3, Decided: true,
	}
	r.Trace, _ = telemetry.NewTrace([]byte(parent), 0)
	return r
}

func TestSpansOfARequest(t *testing.T) {
	c, tr := start(t)
	r := record()
	model := []byte("m") // lent, as the proxy does
	r.Model = string(model)
	tr.Observe(r)
	unsampled := *r
	unsampled.Trace.Sampled = false
	tr.Observe(&unsampled)
	tr.Observe(&telemetry.Record{Outcome: "ok"}) // no trace at all
	finish(t, tr)

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.service != "gate" || c.header.Get("Authorization") != "Bearer made-up" {
		t.Errorf("service %q, headers %v", c.service, c.header)
	}
	by := map[string][]*otlp.Span{}
	for _, s := range c.spans {
		by[s.Name] = append(by[s.Name], s)
		if got := hex.EncodeToString(s.TraceId); got != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("%s is of trace %s", s.Name, got)
		}
		if s.EndTimeUnixNano < s.StartTimeUnixNano {
			t.Errorf("%s ends before it begins", s.Name)
		}
	}
	if len(c.spans) != 6 || len(by["chat m"]) != 1 || len(by["admission"]) != 1 || len(by["choose"]) != 1 || len(by["attempt"]) != 2 || len(by["first token"]) != 1 {
		t.Fatalf("%d spans: %v", len(c.spans), by)
	}
	root := by["chat m"][0]
	if hex.EncodeToString(root.ParentSpanId) != "b7ad6b7169203331" || string(root.SpanId) != string(r.Trace.SpanID[:]) || root.Kind != otlp.Span_SPAN_KIND_SERVER {
		t.Errorf("the request's span: %v", root)
	}
	attrs := map[string]string{}
	for _, kv := range root.Attributes {
		attrs[kv.Key] = kv.Value.String()
	}
	for key, want := range map[string]string{
		"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": "100", "gen_ai.usage.output_tokens": "20",
		"http.response.status_code": "200", "kvgate.endpoint": "p/b", "kvgate.outcome": "ok",
	} {
		if !strings.Contains(attrs[key], want) {
			t.Errorf("%s is %q; want %s", key, attrs[key], want)
		}
	}
	near := func(what string, got uint64, seconds float64) {
		t.Helper()
		want := float64(root.StartTimeUnixNano) + seconds*1e9
		if d := float64(got) - want; d < -2e6 || d > 2e6 {
			t.Errorf("%s is off by %.1f ms", what, d/1e6)
		}
	}
	near("the end", root.EndTimeUnixNano, 2)
	near("admission's begin", by["admission"][0].StartTimeUnixNano, 0.01)
	near("admission's end", by["admission"][0].EndTimeUnixNano, 0.11)
	for i, s := range by["attempt"] {
		id := r.Trace.AttemptID(i)
		if string(s.SpanId) != string(id[:]) || string(s.ParentSpanId) != string(root.SpanId) || s.Kind != otlp.Span_SPAN_KIND_CLIENT {
			t.Errorf("attempt %d is not what the endpoint was told: %v", i, s)
		}
	}
	first := by["first token"][0]
	if string(first.ParentSpanId) != string(by["attempt"][1].SpanId) {
		t.Error("the first token is not within the attempt that it came of")
	}
	near("the first token", first.EndTimeUnixNano, 0.9)
	if by["attempt"][0].Status.GetCode() != otlp.Status_STATUS_CODE_ERROR || by["attempt"][1].Status.GetCode() == otlp.Status_STATUS_CODE_ERROR {
		t.Error("which attempt failed is not told")
	}
}

// A collector that is gone or says no costs traces, nothing else; nor does the end of the gateway wait for it for long.
func TestCollectorThatFails(t *testing.T) {
	c, tr := start(t)
	c.mu.Lock()
	c.status = 400
	c.mu.Unlock()
	for range 3 * backlog {
		tr.Observe(record())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = tr.Close(ctx)
	for _, bad := range []string{"", "127.0.0.1:4318", "ftp://127.0.0.1", "http://"} {
		if _, err := New(Options{Endpoint: bad}); err == nil || !strings.Contains(err.Error(), "want http://") {
			t.Errorf("endpoint %q: %v", bad, err)
		}
	}
}
