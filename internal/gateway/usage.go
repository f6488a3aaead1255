package gateway

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/usage"
	"kvgate/telemetry"
)

// usageSink hands records to the recorder that the configuration in use asks for, if it does.
type usageSink struct {
	mu  sync.RWMutex // held for reading while a record is handed over, so that none comes after the end
	rec *usage.Recorder
	cfg *config.Usage
}

// Observe implements telemetry.Sink.
func (u *usageSink) Observe(r *telemetry.Record) {
	u.mu.RLock()
	if u.rec != nil {
		u.rec.Observe(r)
	}
	u.mu.RUnlock()
}

// usageClose is how long what waits for a destination may take to get there when the gateway stops.
const usageClose = 10 * time.Second

// useUsage has records go where c says. The same file is opened anew.
func (g *Gateway) useUsage(c *config.Usage) error {
	u := &g.usage
	if u.cfg != nil && reflect.DeepEqual(u.cfg, c) {
		return u.rec.Reopen()
	}
	var next *usage.Recorder
	if c != nil {
		o := usage.Options{File: c.File, OnTrouble: func(err error) { g.log.Warn("usage records", zap.Error(err)) }}
		if w := c.Webhook; w != nil {
			o.URL, o.Token, o.Interval, o.Spool = w.URL, w.Token.Reveal(), w.Interval, w.Spool
		}
		var err error
		if next, err = usage.New(o); err != nil {
			return err
		}
	}
	u.mu.Lock()
	old := u.rec
	u.rec, u.cfg = next, c
	u.mu.Unlock()
	if old != nil {
		g.endRecorder(old)
	}
	return nil
}

func (g *Gateway) endRecorder(old *usage.Recorder) {
	ctx, cancel := context.WithTimeout(context.Background(), usageClose)
	defer cancel()
	if err := old.Close(ctx); err != nil {
		g.log.Error("usage records", zap.Error(err))
	}
}

// startUsage begins to write records, if there are to be any.
func (g *Gateway) startUsage() error {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	return g.useUsage(g.cfg.Load().Usage)
}

// closeUsage writes what waits. No request runs any more.
func (g *Gateway) closeUsage() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	if err := g.useUsage(nil); err != nil {
		panic(fmt.Sprintf("BUG: %v", err))
	}
}
