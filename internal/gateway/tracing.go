package gateway

import (
	"context"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/tracing"
	"kvgate/internal/version"
)

// lastTraces is how long the end of a gateway waits for the collector to take the last spans.
const lastTraces = 3 * time.Second

// newTracer is nil where the configuration asks for no traces.
func newTracer(c *config.Tracing, log *zap.Logger) (*tracing.Tracer, error) {
	if c == nil {
		return nil, nil
	}
	return tracing.New(tracing.Options{
		Endpoint: c.Endpoint, Authorization: c.Authorization.Reveal(), Service: c.Service, Version: version.Get().Version, Log: log,
	})
}

func traceRatio(c *config.Tracing) float64 {
	if c == nil {
		return 0
	}
	return c.SampleRatio
}

// closeTracer sends the last spans. No request may be running.
func (g *Gateway) closeTracer() {
	if g.tracer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastTraces)
	defer cancel()
	if err := g.tracer.Close(ctx); err != nil {
		g.log.Warn("the last traces were not sent", zap.Error(err))
	}
}
