package telemetry

import "github.com/prometheus/client_golang/prometheus"

// RegisterRecorded has counts asked how many requests were recorded, and how many of them dropped, whenever the metrics are
// read.
func (m *Metrics) RegisterRecorded(counts func() (recorded, dropped uint64)) {
	counter := func(d *Definition, value func() uint64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: d.Name, Help: d.Help}, func() float64 { return float64(value()) }))
	}
	counter(Recorded, func() uint64 { n, _ := counts(); return n })
	counter(RecordDropped, func() uint64 { _, n := counts(); return n })
}
