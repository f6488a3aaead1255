package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A Source is how one source of discovery is doing.
type Source struct {
	Pool, Kind  string
	Targets     int       // in the last set
	Healthy     bool      // nothing is amiss
	Failures    uint64    // so far
	LastSuccess time.Time // zero: never
}

// A sourceCollector shows the sources as they are when the metrics are read.
type sourceCollector struct {
	sources func() []Source
	descs   map[*Definition]*prometheus.Desc
}

func newSourceCollector(sources func() []Source) *sourceCollector {
	c := &sourceCollector{sources, make(map[*Definition]*prometheus.Desc)}
	for _, d := range []*Definition{DiscoveryTargets, DiscoveryHealthy, DiscoveryFailures, DiscoverySuccess} {
		c.descs[d] = prometheus.NewDesc(d.Name, d.Help, d.Labels, nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *sourceCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *sourceCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.sources() {
		put := func(d *Definition, kind prometheus.ValueType, v float64) {
			ch <- prometheus.MustNewConstMetric(c.descs[d], kind, v, s.Pool, s.Kind)
		}
		healthy := 0.0
		if s.Healthy {
			healthy = 1
		}
		put(DiscoveryTargets, prometheus.GaugeValue, float64(s.Targets))
		put(DiscoveryHealthy, prometheus.GaugeValue, healthy)
		put(DiscoveryFailures, prometheus.CounterValue, float64(s.Failures))
		if !s.LastSuccess.IsZero() {
			put(DiscoverySuccess, prometheus.GaugeValue, float64(s.LastSuccess.UnixMilli())/1000)
		}
	}
}
