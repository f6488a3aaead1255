package gateway

import (
	"fmt"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kvgate/pool"
	"kvgate/telemetry"
)

// drainEndpoint has the endpoint take no new requests, or take them again. What runs there ends there. It holds until the
// endpoint is readmitted or leaves discovery.
func (g *Gateway) drainEndpoint(id string, on bool) (found, changed bool) {
	from := ""
	s, now := g.table.Load(), g.now()
	for i := range s.Rows {
		r := &s.Rows[i]
		if r.Endpoint.ID != id {
			continue
		}
		found = true
		from = r.StateWords(now)
		if g.table.SetState(r.Endpoint, pool.Draining, on, now) {
			changed = true
		}
		if !on && r.EjectedUntil() > now {
			r.Endpoint.Readmit(now)
			changed = true
		}
	}
	if changed {
		what := "endpoint readmitted"
		if on {
			what = "endpoint draining"
		}
		to := ""
		for i, rows := 0, g.table.Load().Rows; i < len(rows); i++ {
			if rows[i].Endpoint.ID == id {
				to = rows[i].StateWords(now)
			}
		}
		g.log.Info(what, zap.String(telemetry.FieldEndpoint, id), zap.String("from", from), zap.String("to", to), zap.String("why", "admin request"))
	}
	return found, changed
}

// setLogLevel changes the level until the next reload.
func (g *Gateway) setLogLevel(level string) error {
	l, err := zapcore.ParseLevel(level)
	if err != nil || l > zapcore.ErrorLevel {
		return fmt.Errorf("level %q; want debug, info, warn or error", level[:min(len(level), 20)])
	}
	if from := g.logs.level.Level(); from != l {
		g.logs.level.SetLevel(l)
		g.log.Warn("log level changed", zap.Stringer("from", from), zap.Stringer("to", l), zap.String("why", "admin request"))
	}
	return nil
}
