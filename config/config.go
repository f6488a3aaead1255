// Package config is kvgate's file format: a strict loader whose every complaint names a line, a column and the fix,
// the defaults, and the dump that `kvgate config` prints.
//
// It knows no policy, scorer or dialect by itself: their names come in through [Options], from the registries that own
// them. It must not import scoring, metrics, proxy or any other package of ours.
package config

import (
	_ "embed"
	"fmt"
	"reflect"
	"time"
)

// source is this file. The comments on the fields below are the documentation of the keys: `kvgate config default` and
// config.example.yaml are made from them, so there is one place to write and none to forget.
//
//go:embed config.go
var source string

// sources are this file and those of sections that have one of their own.
var sources = []string{source}

// Config is one configuration file, complete: keys that the file leaves out hold their defaults, and what a pool may
// override is filled in on the pool. A Config is immutable once [Load] has returned it.
//
// Tags on fields: yaml is the key; enum the closed list of words; known the list in [Options]; min and max the range;
// example marks a key as optional and shows a value for it; path marks a file name, relative to the configuration
// file ("read" when it must be readable at load); short marks the field that a plain string stands for; number marks
// text that may be a whole number; restart marks what a reload cannot change.
type Config struct {
	// Listen is the address that clients connect to, host:port. Without a host it is every interface.
	Listen string `yaml:"listen" restart:"true" number:"true"`
	// TLS makes the client listener speak HTTPS (HTTP/1.1 over TLS 1.2 or newer). Without it, it speaks plain HTTP. A
	// reload reads the files again; to switch between the two takes a restart.
	TLS *ServerTLS `yaml:"tls" example:"" restart:"true"`
	// Admin is the second listener: /metrics, health, reload, debugging.
	Admin Admin `yaml:"admin"`
	// Log says what is logged and how.
	Log Log `yaml:"log"`
	// Limits bound what one client, or all of them together, can make the gateway hold.
	Limits Limits `yaml:"limits" restart:"true"`
	// Timeouts bound every wait. Those from connect on may be overridden in a pool.
	Timeouts Timeouts `yaml:"timeouts"`
	// Retry says when a request that failed at one endpoint may try another one.
	Retry Retry `yaml:"retry"`
	// Health says when an endpoint that fails is left alone, and for how long.
	Health Health `yaml:"health"`
	// Scrape says how the endpoints' metrics pages are read.
	Scrape Scrape `yaml:"scrape"`
	// Drain says how the gateway stops after SIGTERM.
	Drain Drain `yaml:"drain" restart:"true"`
	// State keeps what the gateway has learned across a restart.
	State State `yaml:"state"`
	// Headers says what happens to headers that proxies add.
	Headers Headers `yaml:"headers" restart:"true"`
	// Debug is about answers that say how they came about, and about decisions that are kept to be explained.
	Debug Debug `yaml:"debug" restart:"true"`
	// Names say what the names that clients ask for stand for, besides the models and adapters that endpoints serve.
	Names Names `yaml:"names"`
	// Auth says who may come in: requests need an API key or a token. Without it everybody may, and what a client sends as
	// Authorization goes on to the endpoints.
	Auth *Auth `yaml:"auth" example:""`
	// Quotas say how much each tenant may use.
	Quotas Quotas `yaml:"quotas"`
	// Usage says where records of usage go. Without a file or webhook, none are made.
	Usage *Usage `yaml:"usage" example:""`
	// Record writes what is worth knowing of finished requests into a file, without their text, for kvgate replay. Without it,
	// nothing is.
	Record *Record `yaml:"record" example:""`
	// Metrics is about the gateway's own metrics.
	Metrics Metrics `yaml:"metrics" restart:"true"`
	// Tracing sends spans to an OpenTelemetry collector. Without it there are none, and what clients send of traces is passed
	// on as it is.
	Tracing *Tracing `yaml:"tracing" example:"" restart:"true"`
	// Pools are the groups of endpoints; each serves one base model. At least one is required, and it needs a name and
	// a discovery source; everything else in this file may be left out.
	Pools []Pool `yaml:"pools"`

	file     string
	hash     string
	inputs   string
	warnings Problems
}

// ServerTLS is the certificate of the client listener.
type ServerTLS struct {
	// CertFile holds the certificate and its chain, PEM. It is read again at every reload.
	CertFile string `yaml:"cert_file" example:"tls.crt" path:"read"`
	// KeyFile holds the certificate's private key, PEM.
	KeyFile string `yaml:"key_file" example:"tls.key" path:"read"`
}

// Admin is the second listener.
type Admin struct {
	// Listen is its address, host:port. Danger: it has no authentication and shows endpoint addresses and profiles;
	// keep it on loopback or behind a network policy.
	Listen string `yaml:"listen" restart:"true" number:"true"`
	// Token is what actions on the admin listener ask for, as "Authorization: Bearer …": drain or readmit an endpoint,
	// change the log level, reload. Without it there are none but reload, which is then open to whoever reaches the
	// listener. ${NAME} is taken from the environment.
	Token Secret `yaml:"token" example:"${KVGATE_ADMIN_TOKEN}"`
	// TokenFile holds that token instead, in a file; white space around it is ignored.
	TokenFile string `yaml:"token_file" example:"/etc/kvgate/admin.token" path:"read"`
}

// Metrics is about the gateway's own metrics, on the admin listener under /metrics.
type Metrics struct {
	// NativeHistograms gives histograms native buckets (Prometheus 2.40 or newer, asked for in protobuf) besides the usual ones.
	NativeHistograms bool `yaml:"native_histograms"`
	// Tenants is how many tenants may have series of their own in kvgate_tenant_* and kvgate_admission_tenant_*, besides those
	// that this file names: of keys, of quotas and of shares, which always have. They get them as they come; all others are
	// counted as tenant="other". Danger: each takes some twenty series, and with tenant_header a client may make names up.
	Tenants int `yaml:"tenants" min:"0" max:"10000"`
}

// Log says what is logged and how.
type Log struct {
	// Level is the least serious level that is written: debug, info, warn or error.
	Level string `yaml:"level" enum:"debug,info,warn,error"`
	// Format is json (one object a line) or console (for people).
	Format string `yaml:"format" restart:"true" enum:"json,console"`
	// Access is the line per request: on, off, or sample, which writes access_sample_ratio of the requests that went
	// well and every one that did not.
	Access string `yaml:"access" enum:"on,off,sample"`
	// AccessSampleRatio is the share of successful requests that access: sample writes, 0..1.
	AccessSampleRatio float64 `yaml:"access_sample_ratio" min:"0" max:"1"`
	// AccessSkip are paths whose requests are not logged when they went well, such as those that health checks ask for.
	AccessSkip []string `yaml:"access_skip" example:"[/v1/models]"`
	// Slow is how long a request may take until it is logged once more, as a warning with where its time went and why it went
	// where it went, at most ten a second. 0s: never.
	Slow time.Duration `yaml:"slow" min:"0s" max:"24h"`
	// File is where the log goes. Without it, standard error. A reload opens it anew, which suits log rotation.
	File string `yaml:"file" example:"/var/log/kvgate.log" path:"any"`
}

// Limits bound what clients and endpoints can make the gateway hold. Sizes take KiB, MiB, GiB (1024) or kB, MB, GB (1000).
type Limits struct {
	// HeaderBytes is the largest request line and header block together; above it the answer is 431.
	HeaderBytes Bytes `yaml:"header_bytes" min:"4KiB" max:"40KiB"`
	// BodyBytes is the largest request body; above it the answer is 413. Bodies are held in memory until an endpoint
	// has taken them.
	BodyBytes Bytes `yaml:"body_bytes" min:"1KiB" max:"4GiB"`
	// ChunkExtensionBytes is how much the chunk extensions of a chunked body may take, all together; above it the answer is
	// 400. They carry nothing that anybody reads.
	ChunkExtensionBytes Bytes `yaml:"chunk_extension_bytes" min:"1KiB" max:"1MiB"`
	// InFlightBodyBytes is how much memory the bodies of all requests may take together; beyond it new ones get 429
	// with the code saturated. At least body_bytes, or the largest body could never pass.
	InFlightBodyBytes Bytes `yaml:"in_flight_body_bytes" min:"1KiB" max:"1024GiB"`
	// Connections is how many client connections may be open at a time. 0: half of the files that the process may
	// open. Danger: each needs up to two of those; raise that limit (ulimit -n, LimitNOFILE) with it.
	Connections int `yaml:"connections" min:"0" max:"1000000"`
	// HalfClose is what a client that has shut down its sending side, but still reads, is taken for: gone, as nearly every
	// client that does is, so its request is aborted and the GPU freed; or waiting, for those that send and then close their
	// side (nc -N, some scripts), whose answers are then written until the client has closed altogether.
	HalfClose string `yaml:"half_close" enum:"gone,waiting"`
	// EndpointConnections is how many connections to one endpoint may be open at a time. Each streaming request holds one.
	EndpointConnections int `yaml:"endpoint_connections" min:"1" max:"100000"`
	// ResponseHeaderBytes is the largest header block that an endpoint may send; above it the client gets 502.
	ResponseHeaderBytes Bytes `yaml:"response_header_bytes" min:"4KiB" max:"1MiB"`
	// PrefixIndexBytes is the memory in which the gateway remembers which endpoint holds which prompt's beginning. It is
	// taken at once and never grows. The default suits about a thousand endpoints; a fraction of it does for a few.
	PrefixIndexBytes Bytes `yaml:"prefix_index_bytes" min:"64KiB" max:"16GiB"`
}

// Timeouts bound every wait.
type Timeouts struct {
	// Header is how long a client may take to send a request's header, from its first byte; then 408.
	Header time.Duration `yaml:"header" restart:"true" min:"10ms" max:"1h"`
	// Body is how long a client may take to send a request's body, and one second more for each 16 KiB of it; then 408.
	Body time.Duration `yaml:"body" restart:"true" min:"10ms" max:"24h"`
	// Write is how long a client may take to accept one chunk of an answer; then the request is aborted. Danger: while
	// a client stalls, its request keeps KV cache on the endpoint.
	Write time.Duration `yaml:"write" restart:"true" min:"10ms" max:"1h"`
	// KeepAlive is how long a client connection may stay open between two requests. Keep it longer than the idle
	// timeout of a load balancer in front (often 60s), or that one reuses connections just as they close.
	KeepAlive        time.Duration `yaml:"keep_alive" restart:"true" min:"10ms" max:"24h"`
	EndpointTimeouts `yaml:",inline"`
}

// EndpointTimeouts are the waits on endpoints. A pool may override each.
type EndpointTimeouts struct {
	// Connect is how long a TCP (and TLS) connection to an endpoint may take; then another endpoint is tried.
	Connect time.Duration `yaml:"connect" min:"10ms" max:"5m"`
	// FirstToken is how long a streamed answer may take to its first byte, counted from the request's last byte; then
	// 504. It must cover queueing and the prefill of your longest prompt. 0s: no limit.
	FirstToken time.Duration `yaml:"first_token" min:"0s" max:"24h"`
	// Idle is the longest silence between two chunks of a streamed answer; then it is cut off with an error event. 0s: no limit.
	Idle time.Duration `yaml:"idle" min:"0s" max:"24h"`
	// Total is how long an attempt may take in all, streamed or not; then 504, or a cut stream. Answers that are not
	// streamed are silent until they are complete: this is their only limit. 0s: no limit.
	Total time.Duration `yaml:"total" min:"0s" max:"24h"`
	// EndpointIdle is how long an unused connection to an endpoint is kept. Danger: it must be shorter than the
	// server's own keep-alive (uvicorn, so vLLM and SGLang: 5s), or requests meet connections that are just closing.
	EndpointIdle time.Duration `yaml:"endpoint_idle" min:"0s" max:"1h"`
}

// Retry says when another endpoint may be tried: only before a byte of an answer has been sent, and only when the first
// endpoint surely did no work.
type Retry struct {
	// MaxAttempts is how many endpoints one request may try, the first included. 1 switches retries off.
	MaxAttempts int `yaml:"max_attempts" min:"1" max:"5"`
	// BudgetRatio is the share of active requests that may be retries, 0..1. It keeps an outage from being multiplied.
	BudgetRatio float64 `yaml:"budget_ratio" min:"0" max:"1"`
	// BudgetMin is how many retries may run at a time however few requests are active.
	BudgetMin int `yaml:"budget_min" min:"0" max:"10000"`
	// ReplayUnanswered also retries a request that was sent in full on a connection that then died without a byte of
	// answer. Danger: the first endpoint may have run it, so a prompt can cost its GPU time twice.
	ReplayUnanswered bool `yaml:"replay_unanswered"`
}

// Health says when an endpoint is ejected: left out of the choice for a while because it failed. Statuses 4xx never
// count, 429 and 503 are back-pressure.
type Health struct {
	// ConsecutiveFailures is how many connection failures or 5xx in a row eject an endpoint.
	ConsecutiveFailures int `yaml:"consecutive_failures" min:"1" max:"1000"`
	// BasePause is how long the first ejection lasts; each further one lasts longer, up to max_pause.
	BasePause time.Duration `yaml:"base_pause" min:"10ms" max:"1h"`
	// MaxPause is the longest ejection.
	MaxPause time.Duration `yaml:"max_pause" min:"10ms" max:"24h"`
	// MaxEjectedRatio is the share of a pool that may be ejected at a time, 0..1; one endpoint always may, the last never.
	MaxEjectedRatio float64 `yaml:"max_ejected_ratio" min:"0" max:"1"`
	// PanicRatio is the share of a pool, 0..1, below which healthy endpoints are too few to carry the load: then all
	// are tried, ejected or not. 0 switches this off.
	PanicRatio float64 `yaml:"panic_ratio" min:"0" max:"1"`
	// SlowStart is how long an endpoint that comes back takes to reach its full share. 0s: at once.
	SlowStart time.Duration `yaml:"slow_start" min:"0s" max:"1h"`
}

// Scrape says how the endpoints' metrics pages are read. Scraping never delays a request.
type Scrape struct {
	// Interval is the time between two scrapes of an endpoint, give or take a tenth.
	Interval time.Duration `yaml:"interval" min:"20ms" max:"10m"`
	// Adaptive scrapes more often where others send load or KV space is short, and more seldom where our own bookings
	// explain everything: between a quarter of the interval and four times it, and never longer than half of stale_after.
	// Within that, no more than 250 pages a second are read, of all endpoints together.
	Adaptive bool `yaml:"adaptive"`
	// Timeout is how long one scrape may take.
	Timeout time.Duration `yaml:"timeout" min:"10ms" max:"1m"`
	// MaxBytes is the most that is read of one page; the rest is ignored.
	MaxBytes Bytes `yaml:"max_bytes" min:"16KiB" max:"256MiB"`
	// StaleAfter is the age at which a scrape is no longer believed; the endpoint is then judged by our bookings alone.
	StaleAfter time.Duration `yaml:"stale_after" min:"100ms" max:"1h"`
}

// Drain says how the gateway stops.
type Drain struct {
	// Delay is how long it goes on accepting requests after SIGTERM, with /-/ready already failing, so that load
	// balancers notice.
	Delay time.Duration `yaml:"delay" min:"0s" max:"1h"`
	// Timeout is how long running requests may take after that; then streams end with an error event. Give the service
	// manager more than delay and timeout together (terminationGracePeriodSeconds, TimeoutStopSec).
	Timeout time.Duration `yaml:"timeout" min:"0s" max:"24h"`
}

// State keeps what the gateway has learned across a restart: which prompts' beginnings and which adapters it sent where,
// how fast each endpoint is, how long the answers of each model are.
type State struct {
	// File is written when the gateway stops and read when it starts. Its directory must exist and be writable. Of an
	// endpoint whose process is another by then only its speed is believed. Without it, a start knows nothing.
	File string `yaml:"file" example:"/var/lib/kvgate/state" path:"any"`
	// MaxAge is how old a file may be to be believed.
	MaxAge time.Duration `yaml:"max_age" min:"1s" max:"168h"`
}

// Headers says what happens to headers that proxies add.
type Headers struct {
	// RequestID is keep (a client's X-Request-Id is used, one is made where it is missing) or replace (always made).
	RequestID string `yaml:"request_id" enum:"keep,replace"`
	// Forwarded is append (to a client's X-Forwarded-For), replace (what a client sent is dropped; right when kvgate
	// is the first proxy) or off (none is sent on). It also rules X-Forwarded-Proto and X-Forwarded-Host.
	Forwarded string `yaml:"forwarded" enum:"append,replace,off"`
}

// Debug is about answers that say how they came about, and about decisions that are kept to be explained.
type Debug struct {
	// Headers adds X-Kvgate-Endpoint, X-Kvgate-Attempts and Server-Timing to every answer, and X-Kvgate-Outcome where the whole
	// answer is there when its head is sent, unlike a stream's. Danger: clients then see the addresses of your endpoints.
	Headers bool `yaml:"headers"`
	// RequestHeader names a request header that asks for them, for one request, when its value is 1 or true. Danger:
	// whoever may set it sees addresses; strip it from untrusted clients.
	RequestHeader string `yaml:"request_header" example:"X-Kvgate-Debug"`
	// ExplainShare is the share of one core, 0..0.5, that may go into explaining decisions while they are made. What is
	// explained is shown by the dashboard and logged with slow requests. 0 switches it off.
	ExplainShare float64 `yaml:"explain_share" min:"0" max:"0.5"`
	// Capture allows whoever has admin.token to look at what clients send: kvgate capture shows the bodies of requests, without
	// credentials, for a bounded time and size. Without it nobody can, and no body is ever shown. Danger: prompts are what your
	// users wrote.
	Capture *Capture `yaml:"capture" example:""`
}

// Capture bounds what kvgate capture may be asked for.
type Capture struct {
	// MaxFor is the longest time.
	MaxFor time.Duration `yaml:"max_for" min:"1s" max:"1h"`
	// MaxBytes is the most bytes of bodies, all together. They are held in memory until they are written.
	MaxBytes Bytes `yaml:"max_bytes" min:"1KiB" max:"256MiB"`
}

// Pool is a group of endpoints that serve the same base model.
type Pool struct {
	// Name identifies the pool in logs and metrics: letters, digits, ".", "_" and "-".
	Name string `yaml:"name"`
	// Models are names of the base model that clients may ask for, besides those that the endpoints say they serve.
	// Not needed where the endpoints tell. Adapters need no entry.
	Models []string `yaml:"models" example:"[meta-llama/Llama-3.3-70B-Instruct]"`
	// Dialect is the kind of model server: auto finds out; `kvgate dialects` lists the others; custom needs the key custom.
	Dialect string `yaml:"dialect" known:"dialect"`
	// Discovery says where the endpoints are. Sources may be combined.
	Discovery Discovery `yaml:"discovery"`
	// Policy says how an endpoint is chosen: auto, a simple policy such as round_robin or least_requests, or weights.
	Policy Policy `yaml:"policy"`
	// Admission holds requests in the gateway while every endpoint of the pool has enough to do. Without it they go on at
	// once, and wait in the servers.
	Admission *Admission `yaml:"admission" example:""`
	// Adapters has LoRA adapters loaded and unloaded as they are needed. Without it, the servers' own are used as they are.
	Adapters *Adapters `yaml:"adapters" example:""`
	// Timeouts overrides the waits on endpoints for this pool; what it leaves out is as in the timeouts above.
	Timeouts EndpointTimeouts `yaml:"timeouts"`
	// TLS is for endpoints whose URLs begin with https.
	TLS *EndpointTLS `yaml:"tls" example:""`
	// APIKey is sent to the endpoints as "Authorization: Bearer …" instead of what the client sent. ${NAME} is taken
	// from the environment; an unset variable is an error.
	APIKey Secret `yaml:"api_key" example:"${ENDPOINT_API_KEY}"`
	// APIKeyFile holds that key instead, in a file; white space around it is ignored.
	APIKeyFile string `yaml:"api_key_file" example:"/etc/kvgate/endpoint.key" path:"read"`
	// Custom tells dialect custom which series mean what.
	Custom *Custom `yaml:"custom" example:""`
}

// Discovery says where a pool's endpoints are.
type Discovery struct {
	// Static lists endpoints: plain URLs, or objects where more is to be said.
	Static []Endpoint `yaml:"static" example:"[\"http://10.0.0.11:8000\", \"http://10.0.0.12:8000\"]"`
	// File reads endpoints from a file that is watched: YAML or JSON in the form of Prometheus' file_sd, a list of
	// {targets: [URL, …], labels: {…}}. A plain string is its path.
	File *FileSource `yaml:"file" example:""`
	// DNS looks endpoints up by name, at the name servers of /etc/resolv.conf. An address that answers no longer hold is
	// dropped after the third such answer, the last ones only after a minute: DNS errs more often than servers vanish.
	// With scheme https set tls.server_name, since endpoints are then addressed by IP.
	DNS *DNSSource `yaml:"dns" example:""`
	// Kubernetes watches the endpoints of a Service, pods by label, or an InferencePool. A pod is known by its UID; it
	// gets requests while it is ready and not being deleted. The service account needs the Role of deploy/rbac in each
	// namespace. Annotations of a pod, or labels, set what is its own: kvgate/dialect, kvgate/weight, kvgate/role,
	// kvgate/metrics-port and kvgate/metrics-path. Exactly one of service, selector and inference_pool is needed.
	Kubernetes *KubernetesSource `yaml:"kubernetes" example:""`
}

// Endpoint is one entry of discovery.static.
type Endpoint struct {
	// URL is scheme://host:port, without a path.
	URL string `yaml:"url" example:"http://10.0.0.11:8000" short:"true"`
	// ID is what tells this server from another one at the same address. Change it and what is known of the old one is forgotten.
	ID string `yaml:"id" example:"gpu-a"`
	// MetricsURL is where its metrics are, if not where its dialect has them.
	MetricsURL string `yaml:"metrics_url" example:"http://10.0.0.11:9400/metrics"`
	// Dialect overrides the pool's.
	Dialect string `yaml:"dialect" example:"vllm" known:"dialect"`
	// Weight is how much this endpoint can take relative to the others: 2 is twice as much. The policies auto and
	// least_requests heed it; auto also learns by itself how fast each endpoint is.
	Weight float64 `yaml:"weight" example:"1" min:"0.001" max:"1000"`
}

// FileSource is a watched file of endpoints.
type FileSource struct {
	// Path is the file. Its directory may be a Kubernetes ConfigMap volume.
	Path string `yaml:"path" example:"targets.yaml" path:"any" short:"true"`
	// Interval is the time between two looks at the file.
	Interval time.Duration `yaml:"interval" min:"100ms" max:"1h"`
}

// DNSSource is a name that resolves to endpoints.
type DNSSource struct {
	// Name is the host name, such as a headless service, or with type srv the full SRV name.
	Name string `yaml:"name" example:"llama.models.svc.cluster.local"`
	// Type is a (A records, or AAAA where there are none) or srv.
	Type string `yaml:"type" enum:"a,srv"`
	// Port is the endpoints' port. With type srv the records say it.
	Port int `yaml:"port" example:"8000" min:"1" max:"65535"`
	// Scheme is http or https.
	Scheme string `yaml:"scheme" enum:"http,https"`
	// Interval is the longest time between two lookups. Records with a shorter TTL are looked up again when it is over,
	// at most once a second.
	Interval time.Duration `yaml:"interval" min:"100ms" max:"1h"`
}

// KubernetesSource is what to watch in a Kubernetes cluster.
type KubernetesSource struct {
	// Service names a Service, whose EndpointSlices are the endpoints.
	Service string `yaml:"service" example:"llama"`
	// Selector selects pods by their labels instead, without a Service.
	Selector string `yaml:"selector" example:"app=llama,tier in (prod, canary)"`
	// InferencePool names an InferencePool (inference.networking.k8s.io/v1), whose selector and targetPorts say the rest.
	InferencePool string `yaml:"inference_pool" example:"llama"`
	// Port is the endpoints' port, by name or number: with service one of the Service's, with selector one of the
	// pod's. Not needed where there is only one.
	Port string `yaml:"port" example:"http" number:"true"`
	// Namespaces are where to look. Without it, the namespace that the gateway runs in, or the one of the kubeconfig's context.
	Namespaces []string `yaml:"namespaces" example:"[models]"`
	// Scheme is http or https. With https set tls.server_name, since endpoints are addressed by IP.
	Scheme string `yaml:"scheme" enum:"http,https"`
	// Kubeconfig is a file with the address of the API server and credentials. Without it those of the pod that the
	// gateway runs in, and outside of a cluster what kubectl would use: $KUBECONFIG or ~/.kube/config.
	Kubeconfig string `yaml:"kubeconfig" example:"/etc/kvgate/kubeconfig" path:"any"`
	// Context is the context of the kubeconfig to use, if not its current one.
	Context string `yaml:"context" example:"prod"`
}

// Policy says how an endpoint is chosen: by name, or as a weighted sum of scores. Exactly one is set.
type Policy struct {
	// Name is a policy: auto, round_robin, random, least_requests, power_of_two, consistent_hash.
	Name string `yaml:"name" known:"policy" short:"true" example:"auto"`
	// Weights make a policy out of scorers: each endpoint's scores, 0..1, are multiplied by them and summed, and the
	// highest sum wins. `kvgate scorers` lists the names. camelCase spellings (kvCache) are accepted.
	Weights map[string]float64 `yaml:"weights" known:"scorer" example:"{queue: 2, kv_cache: 2, prefix: 3, lora_affinity: 1}"`
}

// EndpointTLS says how https endpoints are verified.
type EndpointTLS struct {
	// CAFile holds the authorities that may have signed the endpoints' certificates, PEM. Without it, the system's.
	CAFile string `yaml:"ca_file" example:"ca.crt" path:"read"`
	// CertFile holds a client certificate for endpoints that ask for one (mTLS), PEM.
	CertFile string `yaml:"cert_file" example:"client.crt" path:"read"`
	// KeyFile holds its private key, PEM.
	KeyFile string `yaml:"key_file" example:"client.key" path:"read"`
	// ServerName is the name that certificates must carry, where endpoints are addressed by IP.
	ServerName string `yaml:"server_name" example:"llama.internal"`
	// InsecureSkipVerify accepts any certificate. Danger: anyone on the path can then read prompts and answers.
	InsecureSkipVerify bool `yaml:"insecure_skip_verify"`
}

// Custom maps series of an unknown model server to the fields of a load. Each value is a metric name, or one of its
// series: name{label="value"}. What is left out stays unknown.
type Custom struct {
	// Path is where the metrics page is on each endpoint.
	Path string `yaml:"path"`
	// Running counts requests being worked on.
	Running string `yaml:"running" example:"my_active_requests"`
	// Waiting counts requests queued in the server.
	Waiting string `yaml:"waiting" example:"my_queue_length{stage=\"prefill\"}"`
	// KVCacheUtilization is the share of KV cache in use as a ratio 0..1, not percent; or else give the next two.
	KVCacheUtilization string `yaml:"kv_cache_utilization" example:"my_kv_used_ratio"`
	// KVUsed counts tokens or blocks of KV cache in use.
	KVUsed string `yaml:"kv_used" example:"my_kv_blocks_used"`
	// KVTotal counts tokens or blocks that there are, in the unit of kv_used.
	KVTotal string `yaml:"kv_total" example:"my_kv_blocks"`
	// BlockTokens is how many tokens a block holds, where kv_used and kv_total count blocks.
	BlockTokens int `yaml:"block_tokens" example:"16" min:"1" max:"65536"`
	// KVCapacityTokens is how many tokens the KV cache holds, where kv_total doesn't tell.
	KVCapacityTokens string `yaml:"kv_capacity_tokens" example:"my_kv_capacity_tokens"`
	// Adapters is a metric with a series above 0 for each LoRA adapter that is in use or resident.
	Adapters string `yaml:"adapters" example:"my_adapter_info"`
	// AdaptersLabel is its label that names them, separated by commas if there are several.
	AdaptersLabel string `yaml:"adapters_label" example:"adapter"`
	// MaxAdapters is how many adapters fit.
	MaxAdapters string `yaml:"max_adapters" example:"my_adapter_slots"`
	// EngineLabel tells the engines of one server apart, where a page has several.
	EngineLabel string `yaml:"engine_label" example:"engine"`
}

// Default is the configuration of a file that says nothing. It has no pools, so it is not complete by itself.
func Default() *Config {
	return &Config{
		Listen: ":8080",
		Admin:  Admin{Listen: "127.0.0.1:9090"},
		Log:    Log{Level: "info", Format: "json", Access: "on", AccessSampleRatio: 0.01},
		Limits: Limits{
			HeaderBytes:         40 << 10, // so that 32 KiB of header fields pass with any request line
			BodyBytes:           32 << 20,
			ChunkExtensionBytes: 16 << 10,
			InFlightBodyBytes:   512 << 20,
			EndpointConnections: 4096,
			HalfClose:           "gone",
			ResponseHeaderBytes: 32 << 10,
			PrefixIndexBytes:    64 << 20,
		},
		Timeouts: Timeouts{
			Header:    10 * time.Second,
			Body:      30 * time.Second,
			Write:     30 * time.Second,
			KeepAlive: 90 * time.Second,
			EndpointTimeouts: EndpointTimeouts{
				Connect:      2 * time.Second,
				FirstToken:   2 * time.Minute,
				Idle:         2 * time.Minute,
				Total:        30 * time.Minute,
				EndpointIdle: 4 * time.Second,
			},
		},
		Retry: Retry{MaxAttempts: 2, BudgetRatio: 0.2, BudgetMin: 3},
		Health: Health{
			ConsecutiveFailures: 3,
			BasePause:           5 * time.Second,
			MaxPause:            2 * time.Minute,
			MaxEjectedRatio:     0.34, // a third, and one of three in spite of rounding
			PanicRatio:          0.5,
			SlowStart:           10 * time.Second,
		},
		Scrape: Scrape{
			Interval:   time.Second,
			Adaptive:   true,
			Timeout:    time.Second,
			MaxBytes:   4 << 20,
			StaleAfter: 10 * time.Second,
		},
		Drain:   Drain{Delay: 5 * time.Second, Timeout: 2 * time.Minute},
		State:   State{MaxAge: 15 * time.Minute},
		Headers: Headers{RequestID: "keep", Forwarded: "append"},
		Names:   Names{AnswerModel: "served"},
		Quotas:  Quotas{AssumedOutputTokens: 1000, Headers: true},
		Debug:   Debug{ExplainShare: 0.005},
	}
}

// The defaults of what a file may hold any number of, or none. root holds what stands above it in the file.

func (p *Pool) setDefaults(root *Config) {
	p.Dialect = "auto"
	p.Policy = Policy{Name: "auto"}
	p.Timeouts = root.Timeouts.EndpointTimeouts
}

func (c *Capture) setDefaults(*Config) { c.MaxFor, c.MaxBytes = time.Minute, 16<<20 }

func (e *Endpoint) setDefaults(*Config) { e.Weight = 1 }

func (f *FileSource) setDefaults(*Config) { f.Interval = 5 * time.Second }

func (s *DNSSource) setDefaults(*Config) {
	s.Type, s.Scheme, s.Interval = "a", "http", 10*time.Second
}

func (s *KubernetesSource) setDefaults(*Config) { s.Scheme = "http" }

func (c *Custom) setDefaults(*Config) { c.Path = "/metrics" }

// File is the name of the file c was loaded from.
func (c *Config) File() string { return c.file }

// Hash identifies the bytes of the file: SHA-256 in hexadecimal.
func (c *Config) Hash() string { return c.hash }

// SameInput reports whether c and o were loaded from the same bytes, counting the secrets, certificates and keys that
// the file refers to. Reloading the same input changes nothing.
func (c *Config) SameInput(o *Config) bool { return o != nil && c.inputs != "" && c.inputs == o.inputs }

// Warnings are what is legal in the file and probably not meant.
func (c *Config) Warnings() Problems { return c.warnings }

// NeedRestart lists the keys that differ between two configurations and that a reload cannot change. Of tls only
// whether it is there counts.
func NeedRestart(before, after *Config) (keys []string) {
	for _, c := range Pending(before, after) {
		keys = append(keys, c.Key)
	}
	return keys
}

// A Change is a key with a value in use and another one in the file.
type Change struct{ Key, Running, File string }

// String is the change for people.
func (c Change) String() string { return c.Key + ": running " + c.Running + ", file " + c.File }

// Pending lists what NeedRestart does, with both values.
func Pending(before, after *Config) (changes []Change) {
	show := func(v reflect.Value) string {
		if v.Kind() == reflect.Pointer { // it counts that it is there
			if v.IsNil() {
				return "none"
			}
			return "set"
		}
		if s := fmt.Sprint(v.Interface()); s != "" {
			return s
		}
		return `""`
	}
	var walk func(path string, a, b reflect.Value, all bool)
	walk = func(path string, a, b reflect.Value, all bool) {
		for _, f := range fieldsOf(a.Type()) {
			x, y := a.FieldByIndex(f.index), b.FieldByIndex(f.index)
			restart := all || f.restart
			switch {
			case f.typ.Kind() == reflect.Struct && f.typ != secretType:
				walk(join(path, f.name), x, y, restart)
			case !restart:
			case f.typ.Kind() == reflect.Pointer && x.IsNil() != y.IsNil(),
				f.typ.Kind() != reflect.Pointer && !reflect.DeepEqual(x.Interface(), y.Interface()):
				changes = append(changes, Change{join(path, f.name), show(x), show(y)})
			}
		}
	}
	walk("", reflect.ValueOf(before).Elem(), reflect.ValueOf(after).Elem(), false)
	return changes
}
