package gateway

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/admin"
)

// Reload reads the configuration again and takes it over as a whole, or leaves everything as it was and says why. Running
// requests end under the configuration they began with; endpoints keep their identity, counters and what was learned.
// why names who asked, for the log.
func (g *Gateway) Reload(why string) (admin.ReloadResult, error) {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	if g.o.Load == nil {
		return admin.ReloadResult{}, errNoReload
	}
	res, err := g.reload(why)
	if err == nil && !res.Changed {
		g.metrics.SetReload(true, time.Time{})
		g.lastBad = ""
		return res, nil
	}
	if err != nil {
		g.metrics.SetReload(false, time.Now())
		if g.lastBad != err.Error() || why != watching {
			g.log.Error("reload refused; the configuration in use stays", zap.String("why", why), zap.Error(err))
		}
		g.lastBad = err.Error()
		return res, err
	}
	g.metrics.SetReload(true, time.Now())
	g.lastBad = ""
	return res, nil
}

const watching = "file changed"

func (g *Gateway) reload(why string) (admin.ReloadResult, error) {
	old := g.cfg.Load()
	cfg, err := g.o.Load()
	if err != nil {
		return admin.ReloadResult{}, err
	}
	res := admin.ReloadResult{File: cfg.File(), Hash: cfg.Hash(), NeedsRestart: config.NeedRestart(g.running, cfg)}
	for _, w := range cfg.Warnings() {
		res.Warnings = append(res.Warnings, w.Error())
	}
	if cfg.SameInput(old) {
		if why != watching {
			// A signal may also mean that the log file was rotated.
			if err := errors.Join(g.logs.configure(&cfg.Log), g.useUsage(cfg.Usage), g.useRecord(cfg.Record)); err != nil {
				return res, err
			}
			g.log.Info("reload: nothing has changed", zap.String("why", why), zap.String("hash", cfg.Hash()),
				zap.Strings("needs_restart", res.NeedsRestart))
		}
		return res, nil
	}
	b, err := g.build(cfg)
	if err != nil {
		return res, err
	}
	if err := g.logs.configure(&cfg.Log); err != nil {
		return res, err
	}
	if err := g.scrapers.Configure(b.scrape); err != nil {
		_ = g.logs.configure(&old.Log)
		return res, err
	}
	if err := errors.Join(g.useUsage(cfg.Usage), g.useRecord(cfg.Record)); err != nil {
		_, _ = g.useUsage(old.Usage), g.useRecord(old.Record)
		_ = g.logs.configure(&old.Log)
		return res, err
	}
	// Nothing fails from here on. Routes first: when the table shows a new pool, requests for it can be handled.
	g.handler.SetRoutes(b.routes)
	g.adapters.Configure(b.adapters)
	g.useTokens(b.tokens)
	g.useQuotas(b)
	g.metrics.SetTenants(namedTenants(cfg), g.running.Metrics.Tenants)
	g.decides.Store(b.decider())
	g.table.SetPools(b.pools, g.now())
	g.syncScrapers()
	g.discovery.SetPools(cfg.Pools)
	if b.certs != nil {
		g.server.SetCertificates(b.certs)
	}
	for name := range g.learners {
		if !hasPool(cfg, name) {
			delete(g.learners, name)
		}
	}
	g.cfg.Store(cfg)
	res.Changed = true
	g.log.Info("reloaded", zap.String("why", why), zap.String("config", cfg.File()), zap.String("hash", cfg.Hash()),
		zap.Strings("needs_restart", res.NeedsRestart), zap.Strings("warnings", res.Warnings))
	return res, nil
}

// showConfig is the configuration in use, and which of its keys wait for a restart.
func (g *Gateway) showConfig() []byte {
	cfg := g.cfg.Load()
	var b []byte
	for _, c := range config.Pending(g.running, cfg) {
		b = fmt.Appendf(b, "# restart pending: %s\n", c)
	}
	return append(b, config.Redacted(cfg)...)
}

func hasPool(c *config.Config, name string) bool {
	for i := range c.Pools {
		if c.Pools[i].Name == name {
			return true
		}
	}
	return false
}

// fullLookEvery is how many looks at the file's time and size go by until it is read whatever they say: keys,
// certificates and included secrets are files of their own.
const fullLookEvery = 15

// watch reloads when the file has changed. It asks for the file's time and size, since a notification is not to be had
// on every file system, and follows the symbolic links that ConfigMap volumes are made of.
func (g *Gateway) watch(ctx context.Context) {
	file := g.cfg.Load().File()
	seen := stamp(file)
	for looks := 1; ; looks++ {
		pause := g.o.WatchEvery - g.o.WatchEvery/10 + rand.N(g.o.WatchEvery/5+1) // many gateways, one file server
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		now := stamp(file)
		if now.same(seen) && looks%fullLookEvery != 0 {
			continue
		}
		seen = now
		_, _ = g.Reload(watching) // it has logged what is wrong
	}
}

// fileStamp is what one can tell of a file without reading it. A ConfigMap is replaced by another file, which may be of
// the same size and time.
type fileStamp struct{ os.FileInfo }

func stamp(name string) fileStamp {
	fi, err := os.Stat(name)
	if err != nil {
		return fileStamp{}
	}
	return fileStamp{fi}
}

func (a fileStamp) same(b fileStamp) bool {
	if a.FileInfo == nil || b.FileInfo == nil {
		return a.FileInfo == b.FileInfo
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
