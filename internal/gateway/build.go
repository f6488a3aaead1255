package gateway

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"time"

	"kvgate/config"
	"kvgate/discovery"
	"kvgate/internal/adapters"
	"kvgate/internal/names"
	"kvgate/internal/quota"
	"kvgate/metrics"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// ConfigOptions are the names that a configuration may use, from the registries that own them.
func ConfigOptions() config.Options {
	o := config.Options{Dialects: metrics.Names(), Policies: scoring.PolicyNames(), ScorerName: scoring.ScorerName}
	for _, s := range scoring.Scorers() {
		o.Scorers = append(o.Scorers, s.Name)
	}
	return o
}

// parts are what a reload replaces, built completely before any of it is used.
type parts struct {
	pools    []pool.PoolSpec
	policies map[string]*scoring.Policy // by pool
	routes   *proxy.Routes
	names    *names.Resolver
	tokens   *tokens // nil: none are accepted
	limiter  *quota.Limiter
	store    *store // nil: counts are the gateway's own
	scrape   metrics.Options
	certs    []tls.Certificate // of the client listener
	adapters []adapters.PoolOptions
}

// decider is what decides on requests.
func (b *parts) decider() *decider { return &decider{b.names, b.policies} }

// build makes everything that cfg asks for and can be replaced. It starts nothing.
func (g *Gateway) build(cfg *config.Config) (*parts, error) {
	b := &parts{policies: make(map[string]*scoring.Policy, len(cfg.Pools)), scrape: g.scrapeOptions(cfg)}
	var routes []proxy.PoolOptions
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		b.pools = append(b.pools, pool.PoolSpec{Name: p.Name, Models: p.Models, Loadable: loadable(p)})
		policy, err := g.policy(cfg, p)
		if err != nil {
			return nil, fmt.Errorf("pool %s: policy: %w", p.Name, err)
		}
		b.policies[p.Name] = policy
		tlsConfig, err := endpointTLS(p.TLS)
		if err != nil {
			return nil, fmt.Errorf("pool %s: tls: %w", p.Name, err)
		}
		custom := mapping(p.Custom)
		if custom != nil {
			if err := custom.Check(); err != nil {
				return nil, fmt.Errorf("pool %s: %w", p.Name, err)
			}
		}
		b.scrape.Pools[p.Name] = metrics.PoolOptions{APIKey: p.APIKey.Reveal(), TLS: tlsConfig, Custom: custom}
		managed, isManaged := adapterOptions(p, tlsConfig)
		if isManaged {
			b.adapters = append(b.adapters, managed)
		}
		routes = append(routes, proxy.PoolOptions{
			Name:     p.Name,
			Policy:   policy,
			Timeouts: timeouts(p),
			Retry: proxy.Retry{
				MaxAttempts: cfg.Retry.MaxAttempts, BudgetRatio: cfg.Retry.BudgetRatio, BudgetMin: cfg.Retry.BudgetMin,
				ReplayUnanswered: cfg.Retry.ReplayUnanswered,
			},
			Health: proxy.HealthOptions{
				ConsecutiveFailures: cfg.Health.ConsecutiveFailures, BasePause: cfg.Health.BasePause, MaxPause: cfg.Health.MaxPause,
				MaxEjectedRatio: cmp.Or(cfg.Health.MaxEjectedRatio, 1e-9), PanicRatio: cmp.Or(cfg.Health.PanicRatio, -1),
			},
			TLS:       tlsConfig,
			APIKey:    p.APIKey.Reveal(),
			Admission: admissionOptions(p.Admission),
		})
		if isManaged && !managed.DryRun {
			o := &routes[len(routes)-1]
			o.Adapters, o.AdapterWait = poolAdapters{g, p.Name}, p.Adapters.Wait
		}
	}
	var err error
	if b.routes, err = proxy.NewRoutes(routes); err != nil {
		return nil, err
	}
	if err := g.setNames(cfg, b, routes); err != nil {
		return nil, err
	}
	if err := g.setAuth(cfg, b); err != nil {
		return nil, err
	}
	if err := g.setQuotas(cfg, b); err != nil {
		return nil, err
	}
	if cfg.TLS != nil {
		c, err := tls.LoadX509KeyPair(cfg.TLS.CertFile, cfg.TLS.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("tls: %w", err)
		}
		b.certs = []tls.Certificate{c}
	}
	return b, nil
}

// timeouts are the waits on p's endpoints.
func timeouts(p *config.Pool) proxy.Timeouts {
	return proxy.Timeouts{
		Connect: p.Timeouts.Connect, FirstToken: p.Timeouts.FirstToken, Idle: p.Timeouts.Idle,
		Total: p.Timeouts.Total, EndpointIdle: some(p.Timeouts.EndpointIdle),
	}
}

// some is d, or next to nothing where the configuration says none and zero would mean a default.
func some(d time.Duration) time.Duration { return max(d, 1) }

// policy builds the policy of p. What a pool has learned goes on in its next policy.
func (g *Gateway) policy(cfg *config.Config, p *config.Pool) (*scoring.Policy, error) {
	learner := g.learners[p.Name]
	if learner == nil {
		learner = scoring.NewLearner()
		g.learners[p.Name] = learner
	}
	return scoring.New(scoring.Config{
		Name: p.Policy.Name, Weights: p.Policy.Weights, Rand: g.o.Rand,
		StaleAfter: cfg.Scrape.StaleAfter, SlowStart: some(cfg.Health.SlowStart), Learner: learner, Index: g.index,
	})
}

func (g *Gateway) scrapeOptions(cfg *config.Config) metrics.Options {
	s := &cfg.Scrape
	o := metrics.Options{
		Interval: s.Interval, MinInterval: s.Interval, MaxInterval: s.Interval,
		Timeout: s.Timeout, MaxPageBytes: int64(s.MaxBytes), Now: g.now,
		Pools:   make(map[string]metrics.PoolOptions, len(cfg.Pools)),
		OnState: g.onState, OnScrape: g.onScrape, OnRefused: g.onRefused,
	}
	if s.Adaptive {
		o.MinInterval = s.Interval / 4
		o.MaxInterval = max(s.Interval, min(4*s.Interval, s.StaleAfter/2))
	}
	return o
}

// mapping is what the dialect custom means in a pool.
func mapping(c *config.Custom) *metrics.Mapping {
	if c == nil {
		return nil
	}
	return &metrics.Mapping{
		Path: c.Path, Running: c.Running, Waiting: c.Waiting,
		KVCacheUtilization: c.KVCacheUtilization, KVUsed: c.KVUsed, KVTotal: c.KVTotal, BlockTokens: c.BlockTokens, KVCapacityTokens: c.KVCapacityTokens,
		Adapters: c.Adapters, AdaptersLabel: c.AdaptersLabel, MaxAdapters: c.MaxAdapters, EngineLabel: c.EngineLabel,
	}
}

// endpointTLS is how endpoints of a pool are verified; nil is the system's way.
func endpointTLS(t *config.EndpointTLS) (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName, InsecureSkipVerify: t.InsecureSkipVerify}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file: %s holds no PEM certificate", t.CAFile)
		}
	}
	if t.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("cert_file: %w", err)
		}
		c.Certificates = []tls.Certificate{cert}
	}
	return c, nil
}

// newDiscovery returns a manager that hands what it finds to apply.
func (g *Gateway) newDiscovery(apply func(string, []discovery.Target)) (*discovery.Manager, error) {
	return discovery.New(discovery.Options{Apply: apply, Log: g.log, Env: discovery.Env{Dialects: ConfigOptions().Dialects}})
}

// sources is how discovery is doing, for the metrics.
func (g *Gateway) sources() (out []telemetry.Source) {
	for _, s := range g.discovery.Status() {
		out = append(out, telemetry.Source{Pool: s.Pool, Kind: s.Source, Targets: s.Targets, Healthy: s.LastError == "" && !s.LastSuccess.IsZero(), Failures: s.Failed, LastSuccess: s.LastSuccess})
	}
	return out
}
