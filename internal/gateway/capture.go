package gateway

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/capture"
	"kvgate/telemetry"
)

// captures lets one capture of bodies run at a time, if the configuration allows any.
type captures struct {
	limits  *config.Capture // of the configuration that the gateway was started with; nil: none is allowed
	running atomic.Bool
	stop    context.Context // ends with the gateway
	end     context.CancelFunc
}

func (c *captures) init(limits *config.Capture) {
	c.limits = limits
	c.stop, c.end = context.WithCancel(context.Background())
}

// capture begins a capture for whoever is at the address from.
func (g *Gateway) capture(o capture.Options, from string) (run func(context.Context, io.Writer) error, err error) {
	c := &g.captures
	if c.limits == nil {
		return nil, capture.ErrOff
	}
	s, err := capture.New(o, capture.Limits{For: c.limits.MaxFor, MaxBytes: int64(c.limits.MaxBytes)})
	if err != nil {
		return nil, err
	}
	if !c.running.CompareAndSwap(false, true) {
		return nil, capture.ErrBusy
	}
	g.log.Warn("capture of request bodies began", zap.Duration("for", o.For), zap.Int64("max_bytes", o.MaxBytes),
		zap.String(telemetry.FieldModel, o.Model[:min(len(o.Model), 256)]), zap.String(telemetry.FieldClientAddr, from))
	g.handler.SetCapturer(s)
	began := time.Now()
	return func(ctx context.Context, w io.Writer) error {
		detach := func() { g.handler.SetCapturer(nil) }
		defer func() {
			detach()
			c.running.Store(false)
		}()
		end, err := s.Write(ctx, c.stop.Done(), detach, w)
		g.log.Warn("capture of request bodies ended", zap.String("why", end.End), zap.Int("requests", end.Requests), zap.Int64("body_bytes", end.BodyBytes),
			zap.Uint64("dropped", end.Dropped), zap.Float64(telemetry.FieldDurationSeconds, time.Since(began).Seconds()))
		return err
	}, nil
}
