package gateway

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kvgate/config"
	"kvgate/internal/admin"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// logs is where the gateway writes, as far as a reload may change it.
type logs struct {
	level  zap.AtomicLevel
	out    output
	logger *zap.Logger
	access atomic.Pointer[telemetry.AccessLog] // never nil
	slow   atomic.Int64                        // nanoseconds from which on a request is slow; 0: none is

	explanation func(uint64) (scoring.Explanation, bool) // set before the first request
	nextSlow    atomic.Int64                             // nanoseconds since start when the next one may be logged
	start       time.Time
	unlogged    atomic.Int64 // slow requests that were too many to log
}

func newLogs(c *config.Log, fallback io.Writer) (*logs, error) {
	l := &logs{start: time.Now(), level: zap.NewAtomicLevel(), out: output{fallback: fallback}}
	l.logger = zap.New(telemetry.NewLogCore(c.Format, &l.out, l.level), zap.ErrorOutput(&l.out))
	return l, l.configure(c)
}

// configure takes over what c says. A log file is opened anew, so that a reload after a rotation moves on to the new file.
func (l *logs) configure(c *config.Log) error {
	level, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return fmt.Errorf("log.level: %w", err)
	}
	if err := l.out.open(c.File); err != nil {
		return fmt.Errorf("log.file: %w", err)
	}
	l.level.SetLevel(level)
	l.access.Store(&telemetry.AccessLog{
		Logger: l.logger, Off: c.Access == "off", Sample: c.Access == "sample", SampleRatio: c.AccessSampleRatio, Skip: c.AccessSkip,
	})
	l.slow.Store(int64(c.Slow))
	return nil
}

// Observe implements telemetry.Sink.
func (l *logs) Observe(r *telemetry.Record) {
	l.access.Load().Observe(r)
	if slow := l.slow.Load(); slow > 0 && r.DurationSeconds >= time.Duration(slow).Seconds() {
		l.logSlow(r)
	}
}

// slowEvery is the least time between two slow requests that are logged: when everything is slow, the first few say why.
const slowEvery = 100 * time.Millisecond

// logSlow logs where a slow request's time went and why it went where it went. It holds no prompt and no answer.
func (l *logs) logSlow(r *telemetry.Record) {
	now, due := int64(time.Since(l.start)), l.nextSlow.Load()
	if now < due || !l.nextSlow.CompareAndSwap(due, now+int64(slowEvery)) {
		l.unlogged.Add(1)
		return
	}
	attempts := make([]admin.AttemptView, len(r.Attempts))
	for i, a := range r.Attempts {
		attempts[i] = admin.AttemptView(a)
	}
	fields := []zap.Field{
		zap.String(telemetry.FieldRequestID, r.RequestID), zap.String(telemetry.FieldOutcome, r.Outcome), zap.String(telemetry.FieldModel, r.Model),
		zap.String(telemetry.FieldPool, r.Pool), zap.String(telemetry.FieldEndpoint, r.Endpoint),
		zap.Float64(telemetry.FieldDurationSeconds, r.DurationSeconds), zap.Float64("read_seconds", r.ReadSeconds),
		zap.Float64(telemetry.FieldQueueSeconds, r.QueueSeconds), zap.Float64("decision_seconds", r.DecisionSeconds),
		zap.Float64("sent_after_seconds", r.SentSeconds), zap.Float64("first_byte_after_seconds", r.FirstByteSeconds),
		zap.Float64("predicted_ttft_seconds", r.PredictedSeconds), zap.Float64("answered_ttft_seconds", r.AnsweredSeconds),
		zap.Int64("prompt_tokens", r.PromptTokens), zap.Int64("new_tokens", r.NewTokens), zap.Int64(telemetry.FieldOutputTokens, r.OutputTokens),
		zap.Any(telemetry.FieldAttempts, attempts),
	}
	if n := l.unlogged.Swap(0); n > 0 {
		fields = append(fields, zap.Int64("slow_requests_not_logged", n))
	}
	if l.explanation != nil && r.Explained != 0 {
		if e, ok := l.explanation(r.Explained); ok {
			fields = append(fields, zap.Reflect("explanation", e))
		}
	}
	l.logger.Warn("slow request", fields...)
}

// output is a file that can be exchanged, or the fallback.
type output struct {
	fallback io.Writer
	mu       sync.Mutex
	file     *os.File
}

func (o *output) open(name string) error {
	var f *os.File
	if name != "" {
		var err error
		// A pipe that nobody reads would block at being opened; so it is an error.
		if f, err = os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY|syscall.O_NONBLOCK, 0o644); err != nil {
			return err
		}
	}
	o.mu.Lock()
	old := o.file
	o.file = f
	o.mu.Unlock()
	if old != nil {
		_ = old.Close() // appends are written at once: nothing is lost
	}
	return nil
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file != nil {
		return o.file.Write(p)
	}
	return o.fallback.Write(p)
}

// Sync implements zapcore.WriteSyncer. A log is no database.
func (o *output) Sync() error { return nil }
