package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/metrics"
	"kvgate/pool"
	"kvgate/scoring"
)

// Check builds everything that cfg asks for, starts nothing, and reports what cannot be built.
func Check(cfg *config.Config) error {
	_, err := unstarted().build(cfg)
	return err
}

// unstarted is a gateway that can build and nothing else.
func unstarted() *Gateway {
	return &Gateway{log: zap.NewNop(), start: time.Now(), learners: make(map[string]*scoring.Learner)}
}

// A Look is what one scrape of an endpoint showed.
type Look struct {
	View       pool.EndpointView
	Understood []string // numbers that its page tells
	Missing    []string // numbers that it does not
	Notes      []string // what is odd
}

// maxLooks is how many endpoints are looked at together.
const maxLooks = 32

// Probe finds cfg's endpoints and looks once at each, the way a gateway would. It returns when all have been looked at or
// ctx ends; what could not be read by then says so in its View.
func Probe(ctx context.Context, cfg *config.Config) (Probed, error) {
	g := unstarted()
	b, err := g.build(cfg)
	if err != nil {
		return Probed{}, err
	}
	b.scrape.OnState, b.scrape.OnScrape, b.scrape.OnRefused = nil, nil, nil
	g.table = pool.NewTable(b.pools, pool.Options{})
	found, err := g.findOnce(ctx, cfg)
	if err != nil {
		return Probed{}, err
	}
	var looks []Look
	places := make(chan struct{}, maxLooks)
	results := make([]metrics.Result, len(found))
	errs := make([]error, len(found))
	var wg sync.WaitGroup
	for i, e := range found {
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			start := g.now()
			results[i], errs[i] = metrics.ScrapeOnce(ctx, e, b.scrape)
			g.table.Observe(e, pool.Observation{Load: results[i].Load, At: g.now(), Took: g.now().Sub(start), Err: errs[i]})
			if e, ok := errors.AsType[*metrics.Error](errs[i]); ok {
				down := e.Fault.Unconnected() && results[i].ModelsErr != nil
				g.table.SetState(found[i], pool.Unreachable, down, g.now())
				g.table.SetState(found[i], pool.Unmeasured, !down, g.now())
			}
			if results[i].ModelsErr == nil {
				g.table.SetServed(e, &pool.Served{Models: results[i].Models, At: g.now()})
			}
		})
	}
	wg.Wait()
	s, now := g.table.Load(), g.now()
	for i, e := range found {
		for r := range s.Rows {
			if s.Rows[r].Endpoint != e {
				continue
			}
			l := Look{View: s.Rows[r].View(now), Understood: results[i].Understood, Missing: results[i].Missing, Notes: results[i].Notes}
			if e, ok := errors.AsType[*metrics.Error](results[i].ModelsErr); ok && e.Fault == metrics.FaultUnauthorized && errs[i] == nil {
				l.View.Error = e.Error() // requests would be refused, too
			}
			if errs[i] != nil {
				l.View.Error = errs[i].Error()
				// It answers, though not with a page that is understood: it can still serve.
				l.View.Healthy = l.View.Healthy && results[i].ModelsErr == nil
			}
			looks = append(looks, l)
		}
	}
	return Probed{looks, slices.Concat(namesAmiss(cfg, s), targetsAmiss(cfg, s), g.probeAuth(ctx, cfg))}, nil
}

// A Probed is what looking at every endpoint showed.
type Probed struct {
	Looks    []Look
	Problems config.Problems // of the names that the configuration and the endpoints use
}

// namesAmiss compares the names in cfg with those that the endpoints serve.
func namesAmiss(cfg *config.Config, s *pool.Snapshot) (ps config.Problems) {
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		var served []string
		for _, r := range s.PoolRows(s.Pool(p.Name)) {
			if r.Served == nil {
				continue
			}
			for _, m := range r.Served.Models {
				if !slices.Contains(served, m.ID) {
					served = append(served, m.ID)
				}
			}
		}
		for j, name := range p.Models {
			if len(served) == 0 || slices.Contains(served, name) {
				continue
			}
			slices.Sort(served)
			msg := fmt.Sprintf("no endpoint of pool %s serves %q; they serve %q", p.Name, name, served[:min(len(served), 10)])
			hint := config.Suggest(name, served)
			if hint == "" && len(served) == 1 {
				hint = served[0]
			}
			if hint != "" {
				hint = fmt.Sprintf("did you mean %q?", hint)
			}
			ps = append(ps, config.Problem{File: cfg.File(), Path: fmt.Sprintf("pools[%d].models[%d]", i, j), Message: msg, Hint: hint, Severity: config.Error})
		}
	}
	for _, sh := range s.Shared {
		ps = append(ps, config.Problem{
			File: cfg.File(), Path: "pools", Severity: config.Warning,
			Message: fmt.Sprintf("pools %s and %s both serve %q; %s gets all of its requests", sh.Pool, sh.Other, sh.Name, sh.Pool),
		})
	}
	return ps
}

// findOnce runs discovery until every source has spoken once, and returns the endpoints in the order of the table.
func (g *Gateway) findOnce(ctx context.Context, cfg *config.Config) ([]*pool.Endpoint, error) {
	var failed error
	d, err := g.newDiscovery(func(name string, targets []pool.Spec) {
		if _, _, err := g.table.SetEndpoints(name, targets, g.now()); err != nil {
			failed = err
		}
	})
	if err != nil {
		return nil, err
	}
	d.SetPools(cfg.Pools)
	err = d.Wait(ctx)
	status := d.Status()
	d.Close()
	if err != nil {
		return nil, fmt.Errorf("discovery: %w", err)
	}
	if failed != nil {
		return nil, failed
	}
	for _, st := range status {
		if st.LastError != "" {
			return nil, fmt.Errorf("pool %s: source %s: %s", st.Pool, st.Source, st.LastError)
		}
	}
	s := g.table.Load()
	var out []*pool.Endpoint
	for i := range s.Rows {
		out = append(out, s.Rows[i].Endpoint)
	}
	return out, nil
}
