package gateway

import (
	"kvgate/config"
	"kvgate/internal/caller"
	"kvgate/internal/quota"
	"kvgate/proxy"
)

// setQuotas has b keep cfg's limits. What was used before stays used.
func (g *Gateway) setQuotas(cfg *config.Config, b *parts) error {
	q := &cfg.Quotas
	var limits []quota.Limit
	for i := range q.Limits {
		l := newLimit(&q.Limits[i].Limit)
		l.Tenant = q.Limits[i].Tenant
		limits = append(limits, l)
	}
	for i := range cfg.Keys() {
		k := &cfg.Keys()[i]
		for j := range k.Limits {
			l := newLimit(&k.Limits[j])
			l.Key = k.ID
			limits = append(limits, l)
		}
	}
	b.routes.NeedUsage = cfg.Usage != nil || cfg.Record != nil
	b.routes.NeedPrefix = cfg.Record != nil
	if len(limits) == 0 {
		return nil
	}
	o := quota.Options{Limits: limits, Before: g.limiter}
	if q.Redis != nil {
		store, err := g.newStore(q.Redis)
		if err != nil {
			return err
		}
		b.store = store
		o.Store, o.Closed = store.Store, q.Redis.OnFailure == "closed"
	}
	b.limiter = quota.New(o)
	b.routes.Quotas = &proxy.Quotas{Limiter: b.limiter, AssumedOutputTokens: int64(q.AssumedOutputTokens), Headers: q.Headers}
	b.routes.NeedUsage = b.routes.NeedUsage || b.limiter.NeedsUsage()
	return nil
}

func newLimit(l *config.Limit) quota.Limit {
	out := quota.Limit{Patterns: l.Models, PerModel: l.PerModel, Window: l.Window, Concurrent: int64(l.Concurrent)}
	if l.Models != nil {
		out.Models = caller.NewModels(l.Models)
	}
	out.Amounts[quota.Requests] = int64(l.Requests)
	out.Amounts[quota.InputTokens] = int64(l.InputTokens)
	out.Amounts[quota.OutputTokens] = int64(l.OutputTokens)
	out.Amounts[quota.TotalTokens] = int64(l.TotalTokens)
	return out
}

// useQuotas has b's limiter and store take the place of those before. It is called with reloading held.
func (g *Gateway) useQuotas(b *parts) {
	if b.limiter != nil {
		g.limiter = b.limiter // one that is not used any more keeps its books for the next
	}
	old := g.store
	if g.store = b.store; old != nil && old != b.store {
		old.Close()
	}
}

// closeQuotas ends the store, with what has not been told it yet.
func (g *Gateway) closeQuotas() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	g.useQuotas(&parts{})
}
