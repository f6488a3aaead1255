package discovery

import (
	"context"

	"kvgate/config"
)

func init() {
	register("static", "Endpoints listed in the configuration.",
		func(d *config.Discovery) ([]config.Endpoint, bool) { return d.Static, len(d.Static) > 0 },
		func(s []config.Endpoint, _ Env) Source { return static(s) })
}

type static []config.Endpoint

func (s static) Name() string { return "static" }

func (s static) Run(ctx context.Context, emit func([]Target, error)) error {
	out := make([]Target, len(s))
	for i, e := range s {
		out[i] = Target{URL: e.URL, SourceID: e.ID, MetricsURL: e.MetricsURL, Dialect: e.Dialect, Weight: e.Weight}
	}
	emit(out, nil)
	<-ctx.Done()
	return nil
}
