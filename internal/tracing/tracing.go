// Package tracing makes OpenTelemetry spans of requests that have ended, and sends them to a collector over OTLP (HTTP,
// protobuf). The data path only carries a trace's identity and passes it on; spans are built from records afterwards, by
// one goroutine, with the times at which things happened. It may import telemetry; nothing of ours but gateway imports it.
package tracing

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"

	"kvgate/telemetry"
)

// Options say where spans go.
type Options struct {
	Endpoint      string // URL of the collector, such as http://127.0.0.1:4318; required
	Authorization string // sent as that header; "": none
	Service       string // service.name
	Version       string // service.version
	Log           *zap.Logger
}

const (
	backlog     = 1024 // requests that wait for their spans; beyond them, traces are lost rather than requests held up
	exportEvery = 2 * time.Second
	sendTimeout = 10 * time.Second
)

// A Tracer takes finished requests; it implements [telemetry.Sink].
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	queue    chan ended
	lost     atomic.Uint64
	done     sync.WaitGroup
	closing  sync.Once
}

type ended struct {
	at time.Time
	r  telemetry.Record
}

// New returns a tracer. Close ends what it starts. It does not wait for the collector to be there.
func New(o Options) (*Tracer, error) {
	u, err := url.Parse(o.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("tracing: endpoint %q is not a URL; want http://host:4318", o.Endpoint)
	}
	opts := []otlptracehttp.Option{otlptracehttp.WithEndpoint(u.Host), otlptracehttp.WithTimeout(sendTimeout), otlptracehttp.WithCompression(otlptracehttp.GzipCompression)}
	if u.Scheme == "http" {
		opts = append(opts, otlptracehttp.WithInsecure())
	}
	if u.Path != "" && u.Path != "/" {
		opts = append(opts, otlptracehttp.WithURLPath(u.Path))
	}
	if o.Authorization != "" {
		opts = append(opts, otlptracehttp.WithHeaders(map[string]string{"Authorization": o.Authorization}))
	}
	exporter, err := otlptrace.New(context.Background(), otlptracehttp.NewClient(opts...))
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	t := &Tracer{queue: make(chan ended, backlog)}
	t.provider = sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(told{exporter, o.Log}, sdktrace.WithBatchTimeout(exportEvery)),
		sdktrace.WithSampler(sdktrace.AlwaysSample()), // who is traced was decided when the request came
		sdktrace.WithIDGenerator(given{}),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", o.Service), attribute.String("service.version", o.Version))),
	)
	t.tracer = t.provider.Tracer("kvgate")
	t.done.Go(func() {
		for e := range t.queue {
			t.spans(&e.r, e.at)
		}
	})
	return t, nil
}

// told logs what the exporter fails at: the SDK's own way of telling is for the whole process.
type told struct {
	*otlptrace.Exporter
	log *zap.Logger
}

func (e told) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if err := e.Exporter.ExportSpans(ctx, spans); err != nil {
		e.log.Warn("traces were not taken by the collector", zap.Int("spans", len(spans)), zap.Error(err))
	}
	return nil
}

// Observe implements [telemetry.Sink]. What is not sampled costs one comparison.
func (t *Tracer) Observe(r *telemetry.Record) {
	if !r.Trace.Sampled {
		return
	}
	select {
	case t.queue <- ended{time.Now(), r.Clone()}:
	default:
		t.lost.Add(1)
	}
}

// Lost counts requests whose spans there was no room for.
func (t *Tracer) Lost() uint64 { return t.lost.Load() }

// Close sends what there is, until ctx ends. Nothing may be observed any more.
func (t *Tracer) Close(ctx context.Context) error {
	var err error
	t.closing.Do(func() {
		close(t.queue)
		t.done.Wait()
		err = t.provider.Shutdown(ctx)
	})
	return err
}

// spans makes the spans of one request that ended at end.
func (t *Tracer) spans(r *telemetry.Record, end time.Time) {
	at := func(seconds float64) time.Time {
		return end.Add(-time.Duration((r.DurationSeconds - seconds) * float64(time.Second)))
	}
	c := &r.Trace
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: c.TraceID, SpanID: c.ParentID, TraceFlags: trace.FlagsSampled, Remote: true})
	ctx := context.Background()
	if c.ParentID != ([8]byte{}) {
		ctx = trace.ContextWithSpanContext(ctx, parent)
	}
	operation := operations[r.API]
	name := r.Path
	if operation != "" {
		name = operation
		if r.Model != "" {
			name += " " + r.Model
		}
	}
	ctx, root := t.tracer.Start(with(ctx, c.TraceID, c.SpanID), name, trace.WithTimestamp(at(0)), trace.WithSpanKind(trace.SpanKindServer))
	root.SetAttributes(attributes(r, operation)...)
	if r.Outcome != "ok" {
		root.SetAttributes(attribute.String("error.type", r.Outcome))
		if r.Outcome != "client_gone" {
			root.SetStatus(codes.Error, r.Error)
		}
	}
	child := func(name string, from float64, kind trace.SpanKind, id [8]byte) trace.Span {
		_, s := t.tracer.Start(with(ctx, c.TraceID, id), name, trace.WithTimestamp(at(from)), trace.WithSpanKind(kind))
		return s
	}
	now := r.ReadSeconds
	if r.QueueSeconds > 0 {
		s := child("admission", now, trace.SpanKindInternal, [8]byte{})
		now += r.QueueSeconds
		s.End(trace.WithTimestamp(at(now)))
	}
	if r.DecisionSeconds > 0 {
		s := child("choose", now, trace.SpanKindInternal, [8]byte{})
		s.SetAttributes(attribute.Float64("kvgate.decision.cost", r.Cost), attribute.Float64("kvgate.decision.runner_up_cost", r.RunnerUpCost),
			attribute.String("kvgate.decision.runner_up", r.RunnerUp), attribute.Int64("kvgate.decision.snapshot_version", int64(r.SnapshotVersion)),
			attribute.Int64("kvgate.prompt_tokens", r.PromptTokens), attribute.Int64("kvgate.new_tokens", r.NewTokens))
		now += r.DecisionSeconds
		s.End(trace.WithTimestamp(at(now)))
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		s := child("attempt", now, trace.SpanKindClient, c.AttemptID(i))
		s.SetAttributes(attribute.String("kvgate.endpoint", a.Endpoint), attribute.Int("kvgate.attempt", i+1))
		if a.Outcome != "ok" {
			s.SetAttributes(attribute.String("error.type", a.Outcome))
			s.SetStatus(codes.Error, a.Outcome)
		}
		last := i == len(r.Attempts)-1
		stop := now + a.Seconds
		if last {
			stop = max(now, r.DurationSeconds)
		}
		if last && r.FirstByteSeconds > r.SentSeconds && r.SentSeconds > 0 {
			inner := trace.ContextWithSpan(ctx, s)
			what := "first token"
			if !r.Stream {
				what = "answer begins"
			}
			_, f := t.tracer.Start(with(inner, c.TraceID, [8]byte{}), what, trace.WithTimestamp(at(r.SentSeconds)))
			if r.PredictedSeconds > 0 {
				f.SetAttributes(attribute.Float64("kvgate.predicted_seconds", r.PredictedSeconds))
			}
			f.End(trace.WithTimestamp(at(r.FirstByteSeconds)))
		}
		now = stop
		s.End(trace.WithTimestamp(at(stop)))
	}
	root.End(trace.WithTimestamp(end))
}

// operations are gen_ai.operation.name by API.
var operations = map[string]string{
	"chat_completions": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat", "embeddings": "embeddings",
}

// attributes are those of the OpenTelemetry GenAI and HTTP conventions, and our own.
func attributes(r *telemetry.Record, operation string) []attribute.KeyValue {
	kv := []attribute.KeyValue{
		attribute.String("http.request.method", r.Method), attribute.String("url.path", r.Path), attribute.Int("http.response.status_code", r.Status),
		attribute.String("kvgate.outcome", r.Outcome), attribute.String("kvgate.request_id", r.RequestID), attribute.Bool("kvgate.stream", r.Stream),
	}
	text := func(key, v string) {
		if v != "" {
			kv = append(kv, attribute.String(key, v))
		}
	}
	text("gen_ai.operation.name", operation)
	text("gen_ai.request.model", r.Model)
	text("kvgate.pool", r.Pool)
	text("kvgate.adapter", r.Adapter)
	text("kvgate.endpoint", r.Endpoint)
	if r.UsageKnown {
		kv = append(kv, attribute.Int64("gen_ai.usage.input_tokens", r.InputTokens), attribute.Int64("gen_ai.usage.output_tokens", r.OutputTokens))
		if r.CachedKnown {
			kv = append(kv, attribute.Int64("gen_ai.usage.cache_read.input_tokens", r.CachedTokens))
		}
	}
	if r.TTFTSeconds > 0 {
		kv = append(kv, attribute.Float64("gen_ai.server.time_to_first_token", r.TTFTSeconds))
	}
	return kv
}

// given is an ID generator for spans whose identity went out before they were made.
type given struct{}

type identity struct {
	trace trace.TraceID
	span  trace.SpanID
}

type identityKey struct{}

// with has the next span made with ctx be known by these; a zero span is drawn.
func with(ctx context.Context, traceID [16]byte, spanID [8]byte) context.Context {
	return context.WithValue(ctx, identityKey{}, identity{traceID, spanID})
}

func (g given) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	id, _ := ctx.Value(identityKey{}).(identity)
	return id.trace, g.NewSpanID(ctx, id.trace)
}

func (given) NewSpanID(ctx context.Context, _ trace.TraceID) (id trace.SpanID) {
	if given, _ := ctx.Value(identityKey{}).(identity); given.span.IsValid() {
		return given.span
	}
	binary.BigEndian.PutUint64(id[:], telemetry.RandomID())
	return id
}
