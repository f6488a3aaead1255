package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// LabelAction is load or unload.
const LabelAction = "action"

// Metrics of managed adapters.
var (
	AdapterActions = def(Definition{
		Name: "kvgate_adapter_actions_total", Kind: Counter, Labels: []string{LabelPool, LabelAction, LabelReason, LabelResult},
		Help: "Adapters loaded and unloaded, by why: asked (a request waited), pinned, hot, restore (the endpoint had lost it), preload, room (its slot was needed). The result is ok or failed.",
	})
	AdapterActionDuration = def(Definition{
		Name: "kvgate_adapter_action_duration_seconds", Kind: Histogram, Labels: []string{LabelPool, LabelAction}, Buckets: durationBuckets,
		Help: "How long it took to load an adapter, or to unload it, its last requests included.",
	})
	AdapterReplicas = def(Definition{
		Name: "kvgate_adapter_replicas", Kind: Gauge, Labels: []string{LabelPool, LabelModel},
		Help: "Endpoints that have the adapter, of those in the registry.",
	})
	AdapterLoading = def(Definition{
		Name: "kvgate_adapter_loading", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Adapters that are being loaded.",
	})
)

// AdapterMetrics are the metrics of managed adapters.
type AdapterMetrics struct {
	actions  *prometheus.CounterVec
	duration *prometheus.HistogramVec
	replicas *prometheus.Desc
	loading  *prometheus.Desc
	state    func() []AdapterState
}

// AdapterState is how many endpoints have an adapter, or are loading it.
type AdapterState struct {
	Pool, Adapter     string
	Replicas, Loading int
}

// NewAdapterMetrics returns metrics that ask state, unless it is nil, when they are read.
func NewAdapterMetrics(state func() []AdapterState) *AdapterMetrics {
	return &AdapterMetrics{
		actions:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: AdapterActions.Name, Help: AdapterActions.Help}, AdapterActions.Labels),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: AdapterActionDuration.Name, Help: AdapterActionDuration.Help, Buckets: AdapterActionDuration.Buckets}, AdapterActionDuration.Labels),
		replicas: prometheus.NewDesc(AdapterReplicas.Name, AdapterReplicas.Help, AdapterReplicas.Labels, nil),
		loading:  prometheus.NewDesc(AdapterLoading.Name, AdapterLoading.Help, AdapterLoading.Labels, nil),
		state:    state,
	}
}

// Observe counts one load or unload.
func (m *AdapterMetrics) Observe(pool, action, why string, ok bool, took time.Duration) {
	result := "ok"
	if !ok {
		result = "failed"
	}
	m.actions.WithLabelValues(pool, action, why, result).Inc()
	m.duration.WithLabelValues(pool, action).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (m *AdapterMetrics) Describe(ch chan<- *prometheus.Desc) {
	m.actions.Describe(ch)
	m.duration.Describe(ch)
	ch <- m.replicas
	ch <- m.loading
}

// Collect implements prometheus.Collector.
func (m *AdapterMetrics) Collect(ch chan<- prometheus.Metric) {
	m.actions.Collect(ch)
	m.duration.Collect(ch)
	if m.state == nil {
		return
	}
	loading := map[string]int{}
	for _, s := range m.state() {
		ch <- prometheus.MustNewConstMetric(m.replicas, prometheus.GaugeValue, float64(s.Replicas), s.Pool, s.Adapter)
		loading[s.Pool] += s.Loading
	}
	for pool, n := range loading {
		ch <- prometheus.MustNewConstMetric(m.loading, prometheus.GaugeValue, float64(n), pool)
	}
}
