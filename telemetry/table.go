package telemetry

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/pool"
)

// A tableCollector shows the table as it is when the metrics are read: nothing to keep up to date, nothing to delete.
type tableCollector struct {
	table *pool.Table
	now   func() pool.Instant
	stale func() time.Duration
	descs map[*Definition]*prometheus.Desc
}

var tableDefinitions = []*Definition{
	EndpointUp, EndpointInflight, EndpointPendingTokens, EndpointKVUtilization, EndpointKVCapacity, EndpointWaiting,
	EndpointRunning, EndpointForeign, ScrapeAge, SnapshotVersion, SnapshotEndpoints, SnapshotModels,
}

func newTableCollector(o *Options) *tableCollector {
	c := &tableCollector{o.Table, o.Now, o.StaleAfter, make(map[*Definition]*prometheus.Desc)}
	if c.stale == nil {
		c.stale = func() time.Duration { return math.MaxInt64 }
	}
	for _, d := range tableDefinitions {
		c.descs[d] = prometheus.NewDesc(d.Name, d.Help, d.Labels, nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *tableCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *tableCollector) Collect(ch chan<- prometheus.Metric) {
	s, now, staleAfter := c.table.Load(), c.now(), pool.Instant(c.stale())
	gauge := func(d *Definition, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[d], prometheus.GaugeValue, v, labels...)
	}
	gauge(SnapshotVersion, float64(s.Version))
	for i, p := range s.Pools {
		gauge(SnapshotEndpoints, float64(len(s.PoolRows(i))), p.Name)
	}
	names := 0
	for range s.Targets() {
		names++
	}
	gauge(SnapshotModels, float64(names))
	seen := make(map[string]bool, len(s.Rows))
	for i := range s.Rows {
		r := &s.Rows[i]
		id := r.Endpoint.ID
		if seen[id] { // a pod that replaces another under the same name: one of them, or the whole page fails
			continue
		}
		seen[id] = true
		up := 0.0
		if r.Healthy(now) {
			up = 1
		}
		b, l := r.Booked(), r.Load
		gauge(EndpointUp, up, id)
		gauge(EndpointInflight, float64(b.Requests), id)
		gauge(EndpointPendingTokens, float64(b.PendingTokens), id)
		if r.ScrapedAt != 0 {
			gauge(ScrapeAge, max(0, now.Sub(r.ScrapedAt).Seconds()), id)
		}
		if !r.Tells(now, staleAfter) {
			continue
		}
		if l.Known.Has(pool.KnowsKVCacheUtilization) {
			gauge(EndpointKVUtilization, l.KVCacheUtilization, id)
		}
		if l.Known.Has(pool.KnowsKVCapacity) {
			gauge(EndpointKVCapacity, float64(l.KVCapacityTokens), id)
		}
		if l.Known.Has(pool.KnowsWaiting) {
			gauge(EndpointWaiting, float64(l.Waiting), id)
		}
		if l.Known.Has(pool.KnowsRunning) {
			gauge(EndpointRunning, float64(l.Running), id)
		}
		gauge(EndpointForeign, float64(r.Foreign.Requests), id)
	}
}
