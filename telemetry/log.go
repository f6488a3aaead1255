package telemetry

import (
	"time"

	"go.uber.org/zap/zapcore"
)

// NewLogCore returns the core of kvgate's loggers: format is json, one object a line, or console, for people. Its keys
// are those of names.go; times are RFC 3339 in UTC.
func NewLogCore(format string, w zapcore.WriteSyncer, level zapcore.LevelEnabler) zapcore.Core {
	c := zapcore.EncoderConfig{
		TimeKey: "ts", LevelKey: "level", MessageKey: "msg", StacktraceKey: "stack", NameKey: "logger",
		EncodeTime:     utcTime,
		EncodeLevel:    zapcore.LowercaseLevelEncoder,
		EncodeDuration: zapcore.SecondsDurationEncoder,
		LineEnding:     zapcore.DefaultLineEnding,
	}
	enc := zapcore.NewJSONEncoder(c)
	if format == "console" {
		enc = zapcore.NewConsoleEncoder(c)
	}
	return zapcore.NewCore(enc, zapcore.Lock(w), level)
}

func utcTime(t time.Time, enc zapcore.PrimitiveArrayEncoder) {
	const layout = "2006-01-02T15:04:05.000Z07:00"
	if a, ok := enc.(interface{ AppendTimeLayout(time.Time, string) }); ok {
		a.AppendTimeLayout(t.UTC(), layout) // Fast path: no string is made.
		return
	}
	enc.AppendString(t.UTC().Format(layout))
}
