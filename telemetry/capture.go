package telemetry

import "github.com/prometheus/client_golang/prometheus"

// RegisterCapture has running asked whether bodies are being captured, whenever the metrics are read.
func (m *Metrics) RegisterCapture(running func() bool) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: CaptureRunning.Name, Help: CaptureRunning.Help}, func() float64 {
		if running() {
			return 1
		}
		return 0
	}))
}
