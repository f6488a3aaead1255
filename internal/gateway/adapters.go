package gateway

import (
	"crypto/tls"

	"kvgate/config"
	"kvgate/internal/adapters"
	"kvgate/pool"
	"kvgate/telemetry"
)

// adapterOptions is what p says about its adapters; ok is false where they are not managed.
func adapterOptions(p *config.Pool, tlsConfig *tls.Config) (o adapters.PoolOptions, ok bool) {
	a := p.Adapters
	if a == nil || len(a.Registry) == 0 {
		return o, false
	}
	o = adapters.PoolOptions{
		Pool: p.Name,
		Plan: adapters.PlanOptions{PerEndpoint: a.PerEndpoint, MaxLoading: a.Loading, Hold: a.Hold, Preload: a.Preload},

		LoadTimeout: a.LoadTimeout, DryRun: a.DryRun, APIKey: p.APIKey.Reveal(), TLS: tlsConfig,
	}
	for _, e := range a.Registry {
		o.Registry = append(o.Registry, adapters.Adapter{Name: e.Name, Source: e.Source, Base: e.Base, Pin: e.Pin, Min: e.MinReplicas, Max: e.MaxReplicas})
	}
	return o, true
}

// loadable are the adapters that p's endpoints can be had to serve.
func loadable(p *config.Pool) (models []pool.Model) {
	if p.Adapters == nil || p.Adapters.DryRun {
		return nil
	}
	for _, e := range p.Adapters.Registry {
		base := e.Base
		if base == "" {
			base = p.Name
			if len(p.Models) > 0 {
				base = p.Models[0]
			}
		}
		models = append(models, pool.Model{ID: e.Name, Parent: base})
	}
	return models
}

// poolAdapters asks for adapters of a pool.
type poolAdapters struct {
	g    *Gateway
	pool string
}

// Want implements proxy.Adapters.
func (a poolAdapters) Want(t *pool.Target) error {
	if p := a.g.adapters.Pool(a.pool); p != nil {
		return p.Want(t)
	}
	return adapters.ErrNotLoaded
}

// Short implements proxy.Adapters.
func (a poolAdapters) Short(t *pool.Target) {
	if p := a.g.adapters.Pool(a.pool); p != nil {
		p.Short(t)
	}
}

// newAdapters makes the manager, which does nothing until it is configured: it needs the data path.
func (g *Gateway) newAdapters() {
	m := telemetry.NewAdapterMetrics(g.adapterState)
	g.metrics.Registry().MustRegister(m)
	g.adapters = adapters.NewManager(adapters.Options{
		Table: g.table, Now: g.now, Log: g.log, Metrics: m,
		Changed: func() { g.handler.RoomMade() },
		Relist:  g.scrapers.ReadModels,
	})
}

func (g *Gateway) adapterState() (all []telemetry.AdapterState) {
	for _, s := range g.adapters.Status() {
		all = append(all, telemetry.AdapterState{Pool: s.Pool, Adapter: s.Name, Replicas: len(s.On), Loading: len(s.Loading)})
	}
	return all
}
