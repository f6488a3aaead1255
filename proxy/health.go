package proxy

import (
	"context"
	"net"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
)

// HealthOptions say when an endpoint that fails is ejected: left out of choices for a while. Zero fields mean their
// defaults.
type HealthOptions struct {
	ConsecutiveFailures int           // connection failures, timeouts and 5xx in a row; default 3
	BasePause           time.Duration // of the first ejection; each further one lasts longer by this; default 5 s
	MaxPause            time.Duration // default 2 min
	MaxEjectedRatio     float64       // of a pool, though always one; default 0.34
	PanicRatio          float64       // below this share of healthy endpoints ejections are lifted; default 0.5; negative: never
}

func (o HealthOptions) withDefaults() HealthOptions {
	def(&o.ConsecutiveFailures, 3)
	def(&o.BasePause, 5*time.Second)
	def(&o.MaxPause, 2*time.Minute)
	if o.MaxEjectedRatio == 0 {
		o.MaxEjectedRatio = 0.34
	}
	if o.PanicRatio == 0 {
		o.PanicRatio = 0.5
	}
	return o
}

// health is what passive checking knows of one endpoint. Statuses below 500 say nothing about it: neither a client's
// mistakes nor its successes at making them.
type health struct {
	failures  atomic.Int32 // in a row
	ejections atomic.Int32 // since it last answered well
	probeAt   pool.AtomicInstant
	probing   atomic.Bool
}

// probeGrace is how much longer than its pause an endpoint stays ejected if nobody probes it.
const probeGrace = 10 * time.Second

// judge takes in what an attempt says about the endpoint's health.
func (x *exchange) judge(ep *endpoint, f *failure) {
	if r := x.decision.Row; f == nil && r != nil && r.State&pool.Unreachable != 0 {
		// Slow path: the last resort was none.
		if x.h.opts.OnReached != nil {
			x.h.opts.OnReached(ep.Endpoint)
		} else {
			x.h.table.SetState(ep.Endpoint, pool.Unreachable, false, x.h.opts.Now())
		}
	}
	switch {
	case f != nil && (f.outcome == EndpointConnect || f.outcome == EndpointReset || f.outcome == EndpointTimeout),
		f == nil && x.resp.status >= 500 && !backpressure(x.resp.status):
		x.h.failed(ep, x.pool, f)
	case f == nil && x.inStream != nil && x.inStream.status >= 500 && !backpressure(x.inStream.status):
		x.h.failed(ep, x.pool, x.inStream)
	case f == nil && x.resp.status < 400 && x.inStream == nil:
		// Fast path: nothing to forgive.
		if ep.health.failures.Load() != 0 {
			ep.health.failures.Store(0)
		}
		if ep.health.ejections.Load() != 0 {
			ep.health.ejections.Store(0)
		}
	}
}

// failed counts a failure of ep, and ejects it if it was one too many.
func (h *Handler) failed(ep *endpoint, o *PoolOptions, f *failure) {
	if f != nil && f.outcome == EndpointConnect && h.opts.OnDoubt != nil {
		// Where it can't be ejected, since too few others are left, requests would come here until the next scrapes fail.
		h.opts.OnDoubt(ep.Endpoint)
	}
	if n := ep.health.failures.Add(1); int(n) < o.Health.ConsecutiveFailures {
		return
	}
	h.healthMu.Lock()
	defer h.healthMu.Unlock()
	now := h.opts.Now()
	if ep.EjectedUntil() > now {
		return
	}
	if !h.mayEject(ep.Endpoint, o, now) {
		return
	}
	from := h.states(ep, now)
	h.eject(ep, o, now)
	fields := []zap.Field{
		zap.String("endpoint", ep.ID), zap.String("from", from), zap.String("to", h.states(ep, now)),
		zap.Int32("failures", ep.health.failures.Load()), zap.Duration("pause_seconds", pause(&o.Health, ep.health.ejections.Load())),
	}
	if f != nil {
		fields = append(fields, zap.Error(f))
	}
	h.log.Warn("endpoint ejected", fields...)
}

// eject leaves ep out for the next pause.
func (h *Handler) eject(ep *endpoint, o *PoolOptions, now pool.Instant) {
	n := ep.health.ejections.Add(1)
	p := pause(&o.Health, n)
	ep.health.probeAt.Store(now.Add(p))
	ep.SetEjectedUntil(now.Add(p + probeGrace))
}

// pause is how long the nth ejection in a row lasts.
func pause(o *HealthOptions, n int32) time.Duration {
	return min(time.Duration(n)*o.BasePause, o.MaxPause)
}

// mayEject reports whether e's pool can do without it: at most a share of a pool is ejected at a time, at least one
// healthy endpoint is left, and never fewer than half.
func (h *Handler) mayEject(e *pool.Endpoint, o *PoolOptions, now pool.Instant) bool {
	s := h.table.Load()
	i := s.Pool(e.Pool)
	if i < 0 {
		return false
	}
	rows := s.PoolRows(i)
	ejected, healthy := 0, 0
	for r := range rows {
		switch {
		case rows[r].Endpoint == e:
		case rows[r].EjectedUntil() > now:
			ejected++
		case rows[r].Healthy(now):
			healthy++
		}
	}
	return healthy >= 1 && ejected+1 <= max(1, int(o.Health.MaxEjectedRatio*float64(len(rows)))) &&
		float64(healthy) >= o.Health.PanicRatio*float64(len(rows))
}

// tendEvery is how often idle connections and ejected endpoints are looked after.
const tendEvery = 100 * time.Millisecond

// tend closes connections that have been idle for long, probes ejected endpoints whose pause is over, and lifts
// ejections where too few endpoints are left. It runs until the handler is closed.
func (h *Handler) tend() {
	t := time.NewTicker(tendEvery)
	defer t.Stop()
	for {
		select {
		case <-h.ctx.Done():
			return
		case <-t.C:
		}
		h.tendOnce()
	}
}

// tendOnce is what tend does each time. A panic in it must not end the process.
func (h *Handler) tendOnce() {
	defer func() {
		if v := recover(); v != nil {
			h.panicked(v)
		}
	}()
	if tight := h.memory.tight(); tight != h.budget.tight.Load() {
		h.budget.tight.Store(tight)
		h.log.Warn("memory in use and GOMEMLIMIT", zap.Bool("tight", tight), zap.Int64("limit_bytes", h.memory.limit))
	}
	routes, now := h.routes.Load(), h.opts.Now()
	for _, ep := range h.endpoints.all() {
		o := routes.pools[ep.Pool]
		if o == nil {
			ep.conns.expire(time.Now(), false)
			continue
		}
		ep.conns.expire(time.Now().Add(-o.Timeouts.EndpointIdle), false)
		at := ep.health.probeAt.Load()
		switch {
		case at == 0:
		case !inTable(h.table.Load(), ep.Endpoint): // discovery has dropped it
			ep.health.probeAt.Store(0)
		case at <= now && !ep.health.probing.Swap(true):
			h.wg.Go(func() {
				defer ep.health.probing.Store(false)
				h.probe(ep, o)
			})
		case at > now && !h.down(ep) && h.panicking(ep.Endpoint, o, now):
			h.readmit(ep, "too few endpoints are left")
		}
	}
}

// down reports whether ep takes no connections: then there is nothing to readmit.
func (h *Handler) down(ep *endpoint) bool {
	r := rowOf(h.table.Load(), ep.Endpoint)
	return r != nil && r.State&pool.Unreachable != 0
}

// states is what holds of ep at now, for the log; gone if discovery has dropped it.
func (h *Handler) states(ep *endpoint, now pool.Instant) string {
	if r := rowOf(h.table.Load(), ep.Endpoint); r != nil {
		return r.StateWords(now)
	}
	return "gone"
}

// rowOf is e's row in s, nil if there is none.
func rowOf(s *pool.Snapshot, e *pool.Endpoint) *pool.Row {
	if i := s.Pool(e.Pool); i >= 0 {
		rows := s.PoolRows(i)
		for r := range rows {
			if rows[r].Endpoint == e {
				return &rows[r]
			}
		}
	}
	return nil
}

// panicking reports whether so few of e's pool are healthy that the ejected ones are better tried than spared.
func (h *Handler) panicking(e *pool.Endpoint, o *PoolOptions, now pool.Instant) bool {
	s := h.table.Load()
	i := s.Pool(e.Pool)
	if i < 0 {
		return false
	}
	rows, healthy := s.PoolRows(i), 0
	for r := range rows {
		if rows[r].Healthy(now) {
			healthy++
		}
	}
	return healthy == 0 || float64(healthy) < o.Health.PanicRatio*float64(len(rows))
}

// probe looks whether an ejected endpoint accepts connections again. If it does, it gets requests, and the first that
// fails ejects it again for longer.
func (h *Handler) probe(ep *endpoint, o *PoolOptions) {
	ctx, cancel := context.WithTimeout(h.ctx, o.Timeouts.Connect)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", ep.Address)
	if err != nil {
		h.healthMu.Lock()
		h.eject(ep, o, h.opts.Now())
		h.healthMu.Unlock()
		return
	}
	_ = c.Close()
	h.readmit(ep, "it accepts connections")
}

// readmit ends an ejection.
func (h *Handler) readmit(ep *endpoint, why string) {
	routes := h.routes.Load()
	h.healthMu.Lock()
	defer h.healthMu.Unlock()
	if ep.health.probeAt.Load() == 0 {
		return
	}
	ep.health.probeAt.Store(0)
	if o := routes.pools[ep.Pool]; o != nil {
		ep.health.failures.Store(int32(o.Health.ConsecutiveFailures - 1)) // half open
	}
	now := h.opts.Now()
	from := h.states(ep, now)
	ep.Readmit(now)
	h.roomMade()
	h.log.Info("endpoint readmitted", zap.String("endpoint", ep.ID), zap.String("from", from), zap.String("to", h.states(ep, now)), zap.String("why", why))
}
