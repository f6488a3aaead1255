package config

import (
	_ "embed"
	"fmt"
	"strconv"
	"time"
)

//go:embed admission.go
var admissionSource string

func init() { sources = append(sources, admissionSource) }

// Admission says when requests for a pool wait in the gateway instead of in one server's queue, where nobody could go before
// them and none could be sent elsewhere any more. They wait while every endpoint has enough to do, and go on in this order:
// by priority (high, normal, low), then by tenant, the one that has been served the fewest tokens first, then as they came.
// Who must not wait is told so: 429 with a Retry-After that follows from the pace of the queue.
type Admission struct {
	// Backlog is how much prefill work may be ahead of a request on an endpoint, as time at the rate that it has been seen to
	// prefill at. More makes requests wait there; with less, servers have nothing to prefill while the next request is on its
	// way: 10ms costs up to a tenth of the throughput of short prompts.
	Backlog time.Duration `yaml:"backlog" min:"10ms" max:"1m"`
	// KVShare is the share of an endpoint's KV cache, 0..1, that may be in use or reserved by requests before it has enough.
	KVShare float64 `yaml:"kv_share" min:"0.05" max:"1"`
	// EndpointRequests is how many requests may be on one endpoint at a time, whatever they need. 0: as many as the two
	// above let there be.
	EndpointRequests int `yaml:"endpoint_requests" min:"0" max:"1000000"`
	// MaxWait is how long a request may wait; then 429 with the code queue_timeout. It is what bursts are absorbed with.
	MaxWait time.Duration `yaml:"max_wait" min:"10ms" max:"1h"`
	// StandingWait is how long requests may wait in a queue that stands: when a tenant's oldest one has been waiting for longer
	// than this for all of max_wait. Then more comes in than goes out, and waiting longer serves nobody. Such a queue serves who
	// came last first, so that those who are served are served at once, until it has drained. 0s: no queue is seen as standing.
	StandingWait time.Duration `yaml:"standing_wait" min:"0s" max:"1h"`
	// WaitForEndpoints is how long requests wait while the pool has no endpoint that is ready, so that it can be scaled from
	// zero by kvgate_pool_demand_endpoints; then 503. List the pool's models, or nobody knows whose requests they are. 0s:
	// they are refused at once.
	WaitForEndpoints time.Duration `yaml:"wait_for_endpoints" min:"0s" max:"24h"`
	// MaxWaiting is how many requests may wait. Beyond it, a tenant that has less waiting than another takes the place of
	// that one's newest request.
	MaxWaiting int `yaml:"max_waiting" min:"0" max:"1000000"`
	// MaxWaitingBytes is how much memory the bodies of waiting requests may take; limits.in_flight_body_bytes counts them too.
	MaxWaitingBytes Bytes `yaml:"max_waiting_bytes" min:"1KiB" max:"1024GiB"`
	// Shed lets a request that finds the queue full take the place of the newest one of the lowest priority below its own.
	Shed bool `yaml:"shed"`
	// TenantHeader names a request header that says on whose behalf a request is. Where clients authenticate, who they are
	// goes before it. Danger: whoever may set it takes any tenant's share; strip it from untrusted clients.
	TenantHeader string `yaml:"tenant_header" example:"X-Tenant"`
	// PriorityHeader names a request header whose value is high, normal or low; without it requests are normal. Danger: as above.
	PriorityHeader string `yaml:"priority_header" example:"X-Priority"`
	// Tenants have other shares than 1. Tenants that wait get tokens in proportion to their shares.
	Tenants []TenantShare `yaml:"tenants" example:"[{name: team-a, share: 2}]"`
}

// TenantShare is the share of one tenant.
type TenantShare struct {
	// Name is the tenant, as its key or the header says it.
	Name string `yaml:"name" example:"team-a"`
	// Share is how many tokens it gets for each one that a tenant with share 1 gets.
	Share float64 `yaml:"share" min:"0.001" max:"1000"`
}

func (a *Admission) setDefaults(*Config) {
	*a = Admission{
		Backlog: 100 * time.Millisecond, KVShare: 0.9,
		MaxWait: 10 * time.Second, StandingWait: time.Second,
		MaxWaiting: 1000, MaxWaitingBytes: 128 << 20,
		Shed: true,
	}
}

func (t *TenantShare) setDefaults(*Config) { t.Share = 1 }

// admission checks a pool's admission.
func (d *decoder) admission(at string, p *Pool) {
	a := p.Admission
	if a == nil {
		return
	}
	if a.StandingWait > a.MaxWait {
		d.wrong(d.first(at+".standing_wait", at+".max_wait"),
			fmt.Sprintf("standing_wait (%s) is longer than max_wait (%s)", formatDuration(a.StandingWait), formatDuration(a.MaxWait)),
			"lower it to "+formatDuration(a.MaxWait)+" or less, or raise max_wait")
	}
	if a.WaitForEndpoints > 0 && len(p.Models) == 0 {
		d.warn(at+".wait_for_endpoints", "while the pool has no endpoint, nobody knows which models are its own, so their requests are refused",
			"list them under models")
	}
	if b := d.root.Limits.InFlightBodyBytes; a.MaxWaitingBytes > b {
		d.warn(at+".max_waiting_bytes", a.MaxWaitingBytes.String()+" is more than all requests may take together (limits.in_flight_body_bytes: "+b.String()+")",
			"lower it, or raise in_flight_body_bytes")
	}
	for _, h := range []struct{ path, name string }{{at + ".tenant_header", a.TenantHeader}, {at + ".priority_header", a.PriorityHeader}} {
		if h.name != "" && !headerName.MatchString(h.name) {
			d.wrong(h.path, strconv.Quote(clip(h.name))+" is not a header name", "write letters, digits and \"-\"")
		}
	}
	names := map[string]int{}
	for i, t := range a.Tenants {
		path := fmt.Sprintf("%s.tenants[%d]", at, i)
		j, twice := names[t.Name]
		switch {
		case t.Name == "" && !d.bad[path]:
			d.wrong(path+".name", "a tenant's share needs a name", "write name: …")
		case twice:
			d.wrong(path+".name", fmt.Sprintf("%q has a share at tenants[%d] already", t.Name, j), "remove one of the two")
		}
		if !twice {
			names[t.Name] = i
		}
	}
}
