package gateway

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kvgate/config"
	"kvgate/telemetry"
)

// logs is where the gateway writes, as far as a reload may change it.
type logs struct {
	level  zap.AtomicLevel
	out    output
	logger *zap.Logger
	access atomic.Pointer[telemetry.AccessLog] // never nil
}

func newLogs(c *config.Log, fallback io.Writer) (*logs, error) {
	l := &logs{level: zap.NewAtomicLevel(), out: output{fallback: fallback}}
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
		Logger: l.logger, Off: c.Access == "off", Sample: c.Access == "sample", SampleRatio: c.AccessSampleRatio,
	})
	return nil
}

// Observe implements telemetry.Sink.
func (l *logs) Observe(r *telemetry.Record) { l.access.Load().Observe(r) }

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
