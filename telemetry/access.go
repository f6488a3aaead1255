package telemetry

import (
	"math/rand/v2"
	"slices"
	"sync"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// AccessLog writes one line per request. It holds no body and no header; strings from clients are quoted and cut.
type AccessLog struct {
	// Logger takes the lines, at info. Its core must not keep fields: zap's own encode them at once.
	Logger *zap.Logger
	// Off writes nothing.
	Off bool
	// SampleRatio is the share of requests with outcome ok that is written, 0..1, if Sample is set. Every other request
	// is written always.
	Sample      bool
	SampleRatio float64
	// Skip are paths whose requests with outcome ok are not written.
	Skip []string
	// Random is a uniform number in [0,1); rand.Float64 if nil.
	Random func() float64
}

// maxLoggedBytes bounds what a client's string can add to a line.
const maxLoggedBytes = 256

var fieldsPool = sync.Pool{New: func() any { return new([32]zap.Field) }}

// Observe implements [Sink].
func (l *AccessLog) Observe(r *Record) {
	if l.Off || r.Outcome == "ok" && (l.Sample && l.random() >= l.SampleRatio || slices.Contains(l.Skip, r.Path)) {
		return
	}
	ce := l.Logger.Check(zapcore.InfoLevel, "request")
	if ce == nil {
		return
	}
	l.write(ce, r)
}

// write is apart from Observe so that requests which are not logged don't need its 2 KB of stack: the goroutine of a
// client's connection would keep twice the stack it needs for as long as it lives.
//
//go:noinline
func (l *AccessLog) write(ce *zapcore.CheckedEntry, r *Record) {
	buf := fieldsPool.Get().(*[32]zap.Field)
	f := buf[:0]
	text := func(key, v string) {
		if v != "" {
			f = append(f, zap.String(key, clip(v)))
		}
	}
	text(FieldRequestID, r.RequestID)
	text(FieldMethod, r.Method)
	text(FieldPath, r.Path)
	f = append(f, zap.Int(FieldStatus, r.Status))
	text(FieldOutcome, r.Outcome)
	text(FieldModel, r.Model)
	if r.Served != r.Model {
		text(FieldServed, r.Served)
	}
	text(FieldAdapter, r.Adapter)
	text(FieldTenant, r.Tenant)
	text(FieldKey, r.Key)
	text(FieldPool, r.Pool)
	text(FieldEndpoint, r.Endpoint)
	f = append(f, zap.Int(FieldAttempts, len(r.Attempts)), zap.Bool(FieldStream, r.Stream),
		zap.Float64(FieldQueueSeconds, r.QueueSeconds))
	if r.TTFTSeconds > 0 {
		f = append(f, zap.Float64(FieldTTFTSeconds, r.TTFTSeconds))
	}
	f = append(f, zap.Float64(FieldDurationSeconds, r.DurationSeconds))
	if r.UsageKnown {
		f = append(f, zap.Int64(FieldInputTokens, r.InputTokens), zap.Int64(FieldOutputTokens, r.OutputTokens))
		if r.CachedKnown {
			f = append(f, zap.Int64(FieldCachedTokens, r.CachedTokens))
		}
	}
	f = append(f, zap.Int64(FieldBytesIn, r.BytesIn), zap.Int64(FieldBytesOut, r.BytesOut))
	text(FieldClientAddr, r.ClientAddr)
	if r.Decided {
		f = append(f, zap.Float64(FieldDecisionScore, r.Cost), zap.Uint64(FieldSnapshotVersion, r.SnapshotVersion))
		if r.ScrapeAgeSeconds >= 0 {
			f = append(f, zap.Float64(FieldScrapeAge, r.ScrapeAgeSeconds))
		}
	}
	text(FieldError, r.Error)
	ce.Write(f...)
	clear(f) // the fields alias the request's buffers
	fieldsPool.Put(buf)
}

func (l *AccessLog) random() float64 {
	if l.Random != nil {
		return l.Random()
	}
	return rand.Float64()
}

// clip cuts s to maxLoggedBytes without splitting a character.
func clip(s string) string {
	if len(s) <= maxLoggedBytes {
		return s
	}
	n := maxLoggedBytes
	for n > maxLoggedBytes-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
