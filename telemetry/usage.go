package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Usage is what the gateway itself has in use, and how much of it there is.
type Usage struct {
	Connections, MaxConnections int64 // of clients
	BodyBytes, MaxBodyBytes     int64 // memory for bodies
}

// Saturation is the share in use of what is nearest to its end, 0..1.
func (u Usage) Saturation() float64 {
	share := func(used, most int64) float64 {
		if most <= 0 {
			return 0
		}
		return min(1, max(0, float64(used)/float64(most)))
	}
	return max(share(u.Connections, u.MaxConnections), share(u.BodyBytes, u.MaxBodyBytes))
}

// registerUsage has usage asked whenever the metrics are read.
func registerUsage(r *prometheus.Registry, usage func() Usage) {
	gauge := func(d *Definition, value func(Usage) float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: d.Name, Help: d.Help}, func() float64 { return value(usage()) }))
	}
	gauge(GatewayConnections, func(u Usage) float64 { return float64(u.Connections) })
	gauge(GatewayBodyBytes, func(u Usage) float64 { return float64(u.BodyBytes) })
	gauge(GatewaySaturation, Usage.Saturation)
}
