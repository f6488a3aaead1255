package telemetry

import "strings"

// A Kind is the type of a metric.
type Kind string

// The kinds of metrics.
const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// A Definition is one metric family: the registry, the tests and the documentation are made from it.
type Definition struct {
	Name   string
	Kind   Kind
	Labels []string
	Help   string
	// OTel is the OpenTelemetry GenAI metric that says the same, or "".
	OTel    string
	Buckets []float64 // of histograms
	// Query is a PromQL expression that is worth asking; "" is the obvious one, see [Definition.Example].
	Query string
}

// Unit is what the values are counted in, by the end of the name.
func (d *Definition) Unit() string {
	name := strings.TrimSuffix(d.Name, "_total")
	for _, u := range []string{"timestamp_seconds", "seconds", "bytes", "tokens", "ratio", "requests"} {
		if strings.HasSuffix(name, "_"+u) {
			if u == "timestamp_seconds" {
				return "Unix time"
			}
			return u
		}
	}
	if d.Kind == Counter {
		return strings.ReplaceAll(name[strings.LastIndexByte(name, '_')+1:], "_", " ")
	}
	return "1"
}

// Example is a PromQL expression that shows the metric as people look at it.
func (d *Definition) Example() string {
	if d.Query != "" {
		return d.Query
	}
	by := ""
	if len(d.Labels) > 0 {
		by = d.Labels[0]
	}
	switch {
	case d.Kind == Counter && by != "":
		return "sum by (" + strings.Join(d.Labels, ", ") + ") (rate(" + d.Name + "[5m]))"
	case d.Kind == Counter:
		return "rate(" + d.Name + "[5m])"
	case d.Kind == Histogram && by != "":
		return "histogram_quantile(0.99, sum by (le, " + by + ") (rate(" + d.Name + "_bucket[5m])))"
	case d.Kind == Histogram:
		return "histogram_quantile(0.99, sum by (le) (rate(" + d.Name + "_bucket[5m])))"
	case by != "":
		return "max by (" + by + ") (" + d.Name + ")"
	}
	return "max(" + d.Name + ")"
}

// Labels.
const (
	LabelPool     = "pool"
	LabelModel    = "model"
	LabelOutcome  = "outcome"
	LabelCode     = "code"
	LabelType     = "type"
	LabelEndpoint = "endpoint"
	LabelResult   = "result"
	LabelEngine   = "engine"
	LabelSource   = "source"
)

// OtherModel is the value of the model label for names that clients made up beyond the bound on them.
const OtherModel = "other"

// Buckets advised by the OpenTelemetry GenAI metric conventions (gen_ai.server.*), in seconds. Queueing is measured with
// those of time to first token; a decision takes microseconds.
var (
	durationBuckets       = []float64{0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92}
	firstTokenBuckets     = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	perOutputTokenBuckets = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5}
	decisionBuckets       = []float64{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2}
	predictionBuckets     = []float64{0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10}
	overheadBuckets       = []float64{1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1}
	scrapeBuckets         = []float64{0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5}
)

// The metrics.
var (
	Requests = def(Definition{
		Name: "kvgate_requests_total", Kind: Counter, Labels: []string{LabelPool, LabelModel, LabelOutcome, LabelCode},
		Help:  "Requests that have ended, by how. The pool is empty when the model was not resolved.",
		Query: `sum by (pool) (rate(kvgate_requests_total{outcome!~"ok|client_gone"}[5m])) / sum by (pool) (rate(kvgate_requests_total[5m]))`,
	})
	RequestDuration = def(Definition{
		Name: "kvgate_request_duration_seconds", Kind: Histogram, Labels: []string{LabelPool, LabelModel}, Buckets: durationBuckets,
		Help: "From a request's first byte to the last byte of its answer.", OTel: "gen_ai.server.request.duration",
	})
	TimeToFirstToken = def(Definition{
		Name: "kvgate_time_to_first_token_seconds", Kind: Histogram, Labels: []string{LabelPool, LabelModel}, Buckets: firstTokenBuckets,
		Help: "From a streamed request's last byte to the first token of its answer.", OTel: "gen_ai.server.time_to_first_token",
	})
	TimePerOutputToken = def(Definition{
		Name: "kvgate_time_per_output_token_seconds", Kind: Histogram, Labels: []string{LabelPool, LabelModel}, Buckets: perOutputTokenBuckets,
		Help: "Time per token after the first one of a streamed answer.", OTel: "gen_ai.server.time_per_output_token",
	})
	Tokens = def(Definition{
		Name: "kvgate_tokens_total", Kind: Counter, Labels: []string{LabelPool, LabelModel, LabelType},
		Help: "Tokens as the servers counted them: input, output, and cached, which is a part of input.", OTel: "gen_ai.client.token.usage",
		Query: `sum by (pool) (rate(kvgate_tokens_total{type="cached"}[5m])) / sum by (pool) (rate(kvgate_tokens_total{type="input"}[5m]))`,
	})
	QueueDuration = def(Definition{
		Name: "kvgate_queue_duration_seconds", Kind: Histogram, Labels: []string{LabelPool}, Buckets: firstTokenBuckets,
		Help: "Waited in the gateway for admission, of requests that were chosen for.",
	})
	DecisionDuration = def(Definition{
		Name: "kvgate_decision_duration_seconds", Kind: Histogram, Labels: []string{LabelPool}, Buckets: decisionBuckets,
		Help: "Spent choosing endpoints, per request.",
	})
	PredictionRatio = def(Definition{
		Name: "kvgate_first_token_prediction_ratio", Kind: Histogram, Labels: []string{LabelPool}, Buckets: predictionBuckets,
		Help:  "Time from sending a streamed request to the first token of its answer, over what was predicted when it was chosen for: 1 is exact.",
		Query: `histogram_quantile(0.5, sum by (le, pool) (rate(kvgate_first_token_prediction_ratio_bucket[5m])))`,
	})
	Overhead = def(Definition{
		Name: "kvgate_overhead_seconds", Kind: Histogram, Labels: []string{LabelPool}, Buckets: overheadBuckets,
		Help: "The gateway's own time per request until it was on its way: from its last byte read to its last byte written to the endpoint, without waits for admission, connections and endpoints tried before.",
	})
	Attempts = def(Definition{
		Name: "kvgate_attempts_total", Kind: Counter, Labels: []string{LabelEndpoint, LabelOutcome},
		Help:  "Tries of requests against endpoints, by how they ended.",
		Query: `sum by (endpoint) (rate(kvgate_attempts_total{outcome!="ok"}[5m]))`,
	})
	RequestBytes = def(Definition{
		Name: "kvgate_request_body_bytes_total", Kind: Counter, Labels: []string{LabelPool},
		Help: "Bytes of request bodies received.",
	})
	ResponseBytes = def(Definition{
		Name: "kvgate_response_body_bytes_total", Kind: Counter, Labels: []string{LabelPool},
		Help: "Bytes of response bodies sent.",
	})

	EndpointUp = def(Definition{
		Name: "kvgate_endpoint_up", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help:  "1 if the endpoint is neither down, draining, asleep, not_ready nor ejected.",
		Query: `count by (job) (kvgate_endpoint_up == 0)`,
	})
	EndpointInflight = def(Definition{
		Name: "kvgate_endpoint_inflight_requests", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help: "Requests this gateway has sent to the endpoint and not yet seen end.",
	})
	EndpointPendingTokens = def(Definition{
		Name: "kvgate_endpoint_pending_tokens", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help: "Uncached prompt tokens of our requests there that have not reached their first token.",
	})
	EndpointKVUtilization = def(Definition{
		Name: "kvgate_endpoint_kv_cache_utilization_ratio", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help:  "Share of the KV cache in use when the endpoint was last scraped, 0..1. Absent when unknown.",
		Query: `topk(5, kvgate_endpoint_kv_cache_utilization_ratio)`,
	})
	EndpointKVCapacity = def(Definition{
		Name: "kvgate_endpoint_kv_capacity_tokens", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help:  "Tokens the KV cache holds. Absent when unknown.",
		Query: `sum(kvgate_endpoint_kv_capacity_tokens * (1 - kvgate_endpoint_kv_cache_utilization_ratio))`,
	})
	EndpointWaiting = def(Definition{
		Name: "kvgate_endpoint_waiting_requests", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help: "Requests queued in the server when it was last scraped. Absent when unknown.",
	})
	EndpointRunning = def(Definition{
		Name: "kvgate_endpoint_running_requests", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help: "Requests in the server's batch when it was last scraped. Absent when unknown.",
	})
	EndpointForeign = def(Definition{
		Name: "kvgate_endpoint_foreign_requests", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help: "Requests on the endpoint that this gateway did not send. Absent when unknown.",
	})
	ScrapeAge = def(Definition{
		Name: "kvgate_scrape_age_seconds", Kind: Gauge, Labels: []string{LabelEndpoint},
		Help:  "Age of what the endpoint's metrics page said last. Absent before the first scrape.",
		Query: `kvgate_scrape_age_seconds > 10`,
	})
	Scrapes = def(Definition{
		Name: "kvgate_scrapes_total", Kind: Counter, Labels: []string{LabelEndpoint, LabelResult},
		Help:  "Scrapes of metrics pages, by result: ok, or what went wrong.",
		Query: `sum by (endpoint, result) (rate(kvgate_scrapes_total{result!="ok"}[5m]))`,
	})
	ScrapeDuration = def(Definition{
		Name: "kvgate_scrape_duration_seconds", Kind: Histogram, Buckets: scrapeBuckets,
		Help: "Time to read one metrics page.",
	})

	DiscoveryTargets = def(Definition{
		Name: "kvgate_discovery_targets", Kind: Gauge, Labels: []string{LabelPool, LabelSource},
		Help: "Endpoints in the last set that a source of discovery found.",
	})
	DiscoveryHealthy = def(Definition{
		Name: "kvgate_discovery_healthy", Kind: Gauge, Labels: []string{LabelPool, LabelSource},
		Help:  "1 if nothing was amiss when the source last looked; otherwise its last set holds, and kvgate endpoints says why.",
		Query: "min by (pool, source) (kvgate_discovery_healthy)",
	})
	DiscoveryFailures = def(Definition{
		Name: "kvgate_discovery_failures_total", Kind: Counter, Labels: []string{LabelPool, LabelSource},
		Help: "Looks of the source that failed or found something amiss, since it was started or its settings changed.",
	})
	DiscoverySuccess = def(Definition{
		Name: "kvgate_discovery_last_success_timestamp_seconds", Kind: Gauge, Labels: []string{LabelPool, LabelSource},
		Help: "When the source last told a set, Unix time. Sources that watch tell of changes only. Absent before the first.",
	})

	SnapshotVersion = def(Definition{
		Name: "kvgate_snapshot_version", Kind: Gauge,
		Help: "Version of the table; it grows by one whenever anything in it changes.",
	})
	SnapshotEndpoints = def(Definition{
		Name: "kvgate_snapshot_endpoints", Kind: Gauge, Labels: []string{LabelPool},
		Help: "Endpoints in the table.",
	})
	SnapshotModels = def(Definition{
		Name: "kvgate_snapshot_models", Kind: Gauge,
		Help: "Names that clients may ask for: models and adapters.",
	})
	GatewayConnections = def(Definition{
		Name: "kvgate_client_connections", Kind: Gauge,
		Help: "Open connections of clients.",
	})
	GatewayBodyBytes = def(Definition{
		Name: "kvgate_in_flight_body_bytes", Kind: Gauge,
		Help: "Memory that the bodies of running requests take.",
	})
	GatewaySaturation = def(Definition{
		Name: "kvgate_gateway_saturation_ratio", Kind: Gauge,
		Help: "Share of its client connections (limits.connections) or of its memory for bodies (limits.in_flight_body_bytes) that the gateway has in use, whichever is larger, 0..1: what to scale gateways on, beside their CPU.",
	})
	ReloadSuccessful = def(Definition{
		Name: "kvgate_config_last_reload_successful", Kind: Gauge,
		Help:  "1 if the last attempt to load the configuration succeeded.",
		Query: `kvgate_config_last_reload_successful == 0`,
	})
	ReloadTimestamp = def(Definition{
		Name: "kvgate_config_last_reload_success_timestamp_seconds", Kind: Gauge,
		Help:  "When the configuration in use was loaded, Unix time.",
		Query: `time() - kvgate_config_last_reload_success_timestamp_seconds`,
	})
	Draining = def(Definition{
		Name: "kvgate_draining", Kind: Gauge,
		Help: "1 while the gateway is draining before it stops.",
	})
	LabelsFolded = def(Definition{
		Name: "kvgate_model_labels_folded_total", Kind: Counter,
		Help: "Requests counted under model=\"other\" because clients had made up too many names.",
	})
	CaptureRunning = def(Definition{
		Name: "kvgate_capture_running", Kind: Gauge,
		Help: "1 while kvgate capture is shown the bodies of requests (debug.capture), 0 otherwise.",
	})
	Recorded = def(Definition{
		Name: "kvgate_recorded_requests_total", Kind: Counter,
		Help: "Requests taken into the record for kvgate replay (record.file), those dropped later included.",
	})
	RecordDropped = def(Definition{
		Name: "kvgate_record_dropped_requests_total", Kind: Counter,
		Help:  "Requests that are missing in the record because more waited to be written than fits into memory: the disk is full or slow.",
		Query: `increase(kvgate_record_dropped_requests_total[1h]) > 0`,
	})
	BuildInfo = def(Definition{
		Name: "kvgate_build_info", Kind: Gauge, Labels: []string{"version", "revision", "goversion"},
		Help:  "1, with what was built.",
		Query: `count by (version) (kvgate_build_info)`,
	})
)

// definitions are all metrics in the order above.
var definitions []*Definition

func def(d Definition) *Definition {
	definitions = append(definitions, &d)
	return &d
}

// Definitions returns every metric family that kvgate exports besides Go's own (go_*, process_*). The caller must not
// change them.
func Definitions() []*Definition { return definitions }

// Fields of the access log and of state changes.
const (
	FieldRequestID       = "request_id"
	FieldMethod          = "method"
	FieldPath            = "path"
	FieldStatus          = "status"
	FieldOutcome         = "outcome"
	FieldModel           = "model"
	FieldAdapter         = "adapter"
	FieldServed          = "served_model"
	FieldTenant          = "tenant"
	FieldKey             = "key"
	FieldPool            = "pool"
	FieldEndpoint        = "endpoint"
	FieldAttempts        = "attempts"
	FieldStream          = "stream"
	FieldQueueSeconds    = "queue_seconds"
	FieldTTFTSeconds     = "ttft_seconds"
	FieldDurationSeconds = "duration_seconds"
	FieldInputTokens     = "input_tokens"
	FieldOutputTokens    = "output_tokens"
	FieldCachedTokens    = "cached_tokens"
	FieldBytesIn         = "bytes_in"
	FieldBytesOut        = "bytes_out"
	FieldClientAddr      = "client_addr"
	FieldDecisionScore   = "decision_score"
	FieldSnapshotVersion = "snapshot_version"
	FieldScrapeAge       = "scrape_age_seconds"
	FieldError           = "error"
)

// AccessFields are the fields of a request's log line in their order, after level, ts and msg.
var AccessFields = []string{
	FieldRequestID, FieldMethod, FieldPath, FieldStatus, FieldOutcome, FieldModel, FieldServed, FieldAdapter, FieldTenant, FieldKey, FieldPool, FieldEndpoint,
	FieldAttempts, FieldStream, FieldQueueSeconds, FieldTTFTSeconds, FieldDurationSeconds, FieldInputTokens,
	FieldOutputTokens, FieldCachedTokens, FieldBytesIn, FieldBytesOut, FieldClientAddr, FieldDecisionScore,
	FieldSnapshotVersion, FieldScrapeAge, FieldError,
}
