package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Labels of the metrics below.
const (
	LabelClass  = "class"
	LabelReason = "reason"
)

// Metrics of admission. The time that requests waited is [QueueDuration].
var (
	AdmissionWaiting = def(Definition{
		Name: "kvgate_admission_waiting_requests", Kind: Gauge, Labels: []string{LabelPool, LabelClass},
		Help: "Requests that wait in the gateway for room on an endpoint, by class: high, normal or low.",
	})
	AdmissionWaitingTokens = def(Definition{
		Name: "kvgate_admission_waiting_tokens", Kind: Gauge, Labels: []string{LabelPool, LabelClass},
		Help: "Tokens, prompts and expected outputs, of the requests that wait.",
	})
	AdmissionWaitingBytes = def(Definition{
		Name: "kvgate_admission_waiting_bytes", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Bytes of the bodies of the requests that wait.",
	})
	AdmissionRefused = def(Definition{
		Name: "kvgate_admission_refused_total", Kind: Counter, Labels: []string{LabelPool, LabelClass, LabelReason},
		Help: "Requests that did not get room: full (the queue was), too_late (they would have waited too long), shed (they made room for others) or expired (they had waited too long).",
	})
	PoolDemand = def(Definition{
		Name: "kvgate_pool_demand_endpoints", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Endpoints that the pool's work takes, running and waiting: what to scale on. It has a fraction, and is above 0 while requests wait for a first endpoint.",
	})
	PoolReady = def(Definition{
		Name: "kvgate_pool_ready_endpoints", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Endpoints of the pool that may get requests.",
	})
	PoolSaturation = def(Definition{
		Name: "kvgate_pool_saturation_ratio", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Demand over ready endpoints; the demand itself where none is ready. Above 1 requests wait.",
	})
)

// AdmissionState is what the metrics of admission show of one pool.
type AdmissionState struct {
	Pool         string
	WaitingBytes int64
	Classes      []AdmissionClass
	Tenants      []AdmissionTenant // that wait; those with one label are added up
	Ready        int               // endpoints
	Demand       float64           // endpoints
}

// AdmissionTenant is what waits of one tenant in one class.
type AdmissionTenant struct {
	Class, Tenant string // Tenant as the label has it
	Waiting       int
}

// AdmissionClass is the part of a class.
type AdmissionClass struct {
	Class         string
	Waiting       int
	WaitingTokens int64
	Refused       []AdmissionRefusals
}

// AdmissionRefusals counts refusals for one reason.
type AdmissionRefusals struct {
	Reason string
	N      uint64
}

type admissionCollector struct {
	state func() []AdmissionState
	descs map[*Definition]*prometheus.Desc
}

// NewAdmissionCollector returns a collector of the metrics above, which asks state when it is read.
func NewAdmissionCollector(state func() []AdmissionState) prometheus.Collector {
	c := &admissionCollector{state, make(map[*Definition]*prometheus.Desc)}
	for _, d := range []*Definition{AdmissionWaiting, AdmissionWaitingTokens, AdmissionWaitingBytes, AdmissionRefused, AdmissionTenantWaiting, PoolDemand, PoolReady, PoolSaturation} {
		c.descs[d] = prometheus.NewDesc(d.Name, d.Help, d.Labels, nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *admissionCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *admissionCollector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *Definition, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[d], kind, v, labels...)
	}
	for _, p := range c.state() {
		send(AdmissionWaitingBytes, prometheus.GaugeValue, float64(p.WaitingBytes), p.Pool)
		send(PoolDemand, prometheus.GaugeValue, p.Demand, p.Pool)
		send(PoolReady, prometheus.GaugeValue, float64(p.Ready), p.Pool)
		send(PoolSaturation, prometheus.GaugeValue, p.Demand/float64(max(1, p.Ready)), p.Pool)
		for _, k := range p.Classes {
			send(AdmissionWaiting, prometheus.GaugeValue, float64(k.Waiting), p.Pool, k.Class)
			send(AdmissionWaitingTokens, prometheus.GaugeValue, float64(k.WaitingTokens), p.Pool, k.Class)
			for _, r := range k.Refused {
				send(AdmissionRefused, prometheus.CounterValue, float64(r.N), p.Pool, k.Class, r.Reason)
			}
		}
		waiting := make(map[[2]string]int)
		for _, t := range p.Tenants {
			waiting[[2]string{t.Class, t.Tenant}] += t.Waiting
		}
		for k, n := range waiting {
			send(AdmissionTenantWaiting, prometheus.GaugeValue, float64(n), p.Pool, k[0], k[1])
		}
	}
}
