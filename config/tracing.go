package config

import (
	_ "embed"
	"net/url"
)

//go:embed tracing.go
var tracingSource string

func init() { sources = append(sources, tracingSource) }

// Tracing sends OpenTelemetry spans of requests to a collector: the request, its admission, its choice, each attempt and
// the time to the first token. Endpoints get a traceparent header, so that their own spans belong to the same trace.
type Tracing struct {
	// Endpoint is the collector's URL for OTLP over HTTP.
	Endpoint string `yaml:"endpoint" example:"http://127.0.0.1:4318"`
	// SampleRatio is the share of requests that are traced, 0..1, where the caller has not decided it: a traceparent that
	// comes with a request says whether it is.
	SampleRatio float64 `yaml:"sample_ratio" min:"0" max:"1"`
	// Authorization is sent to the collector as that header. ${NAME} is taken from the environment.
	Authorization Secret `yaml:"authorization" example:"${OTLP_AUTHORIZATION}"`
	// Service is what the gateway is called there: service.name.
	Service string `yaml:"service"`
}

func (t *Tracing) setDefaults(*Config) { t.SampleRatio, t.Service = 0.01, "kvgate" }

func (d *decoder) tracing(t *Tracing) {
	if t == nil || d.bad["tracing.endpoint"] {
		return
	}
	u, err := url.Parse(t.Endpoint)
	switch {
	case t.Endpoint == "":
		d.wrong("tracing.endpoint", "is missing", `name the collector: "http://127.0.0.1:4318"`)
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		d.wrong("tracing.endpoint", "it is not a URL", `write "http://127.0.0.1:4318"`)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		d.wrong("tracing.endpoint", "only scheme, host, port and path mean anything", "put credentials into authorization")
	}
	if t.Service == "" && !d.bad["tracing.service"] {
		d.wrong("tracing.service", "is empty", "write kvgate, or leave it out")
	}
}
