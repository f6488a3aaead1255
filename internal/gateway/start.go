package gateway

import (
	"context"
	"time"

	"go.uber.org/zap"

	"kvgate/metrics"
)

// awaitFirstTable waits until discovery has spoken and every endpoint has been looked at once, or StartTimeout: a gateway
// that listens before that would refuse models which it knows a moment later. It reports false if ctx ended.
func (g *Gateway) awaitFirstTable(ctx context.Context) bool {
	wait, cancel := context.WithTimeout(ctx, g.o.StartTimeout)
	defer cancel()
	began, told := time.Now(), false
	tell := func(what string, fields ...zap.Field) {
		if !told && time.Since(began) > time.Second {
			told = true
			g.log.Info("waiting for "+what, fields...)
		}
	}
	found := make(chan error, 1)
	go func() { found <- g.discovery.Wait(wait) }()
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for discovered := false; ; {
		select {
		case err := <-found:
			discovered = err == nil
			found = nil
		case <-wait.Done():
			if found != nil {
				<-found
			}
			if ctx.Err() != nil {
				return false
			}
			g.log.Warn("starting although not every endpoint has been looked at", zap.Strings("missing", g.unseen()),
				zap.Bool("discovery_complete", discovered), zap.Duration("waited_seconds", g.o.StartTimeout))
			return true
		case <-t.C:
		}
		if !discovered {
			tell("discovery")
			continue
		}
		missing := g.unseen()
		if len(missing) == 0 {
			return true
		}
		tell("a first look at endpoints", zap.Strings("missing", missing))
	}
}

// unseen lists endpoints that nothing is known of yet, be it that they are down.
func (g *Gateway) unseen() (ids []string) {
	s := g.table.Load()
	for i := range s.Rows {
		r := &s.Rows[i]
		if r.Served != nil {
			continue
		}
		switch g.states.get(r.Endpoint) {
		case metrics.StateDown, metrics.StateAsleep:
		case metrics.StateUp, metrics.StateUnmeasured:
			// Its list of models is asked for next. A failure shows as an error.
			if _, err := g.table.LastError(r.Endpoint); err == nil {
				ids = append(ids, r.Endpoint.ID)
			}
		default:
			ids = append(ids, r.Endpoint.ID)
		}
	}
	return ids
}
