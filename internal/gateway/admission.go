package gateway

import (
	"slices"

	"kvgate/admission"
	"kvgate/config"
	"kvgate/internal/admin"
	"kvgate/proxy"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// admissionOptions is what a says to the data path; nil where nothing waits.
func admissionOptions(a *config.Admission) *proxy.AdmissionOptions {
	if a == nil {
		return nil
	}
	o := &proxy.AdmissionOptions{
		Options: admission.Options{
			MaxWaiting: a.MaxWaiting, MaxBytes: int64(a.MaxWaitingBytes),
			MaxWait: a.MaxWait, StandingWait: a.StandingWait, Shed: a.Shed,
			Weights: make(map[string]float64, len(a.Tenants)),
		},
		Limits:       scoring.Limits{Backlog: a.Backlog, KVShare: a.KVShare, Requests: a.EndpointRequests},
		EndpointWait: a.WaitForEndpoints,
		TenantHeader: a.TenantHeader, ClassHeader: a.PriorityHeader,
	}
	for _, t := range a.Tenants {
		o.Weights[t.Name] = t.Share
	}
	return o
}

// admissionState is what the metrics show of admission.
func (g *Gateway) admissionState() (pools []telemetry.AdmissionState) {
	for _, s := range g.handler.Admission() {
		p := telemetry.AdmissionState{Pool: s.Pool, WaitingBytes: s.Bytes, Ready: s.Ready, Demand: s.Endpoints}
		for _, c := range admission.Classes() {
			k := telemetry.AdmissionClass{Class: c.String(), Waiting: s.Waiting[c], WaitingTokens: s.Tokens[c]}
			for _, why := range admission.Reasons() {
				k.Refused = append(k.Refused, telemetry.AdmissionRefusals{Reason: why.String(), N: s.Refused[c][why]})
			}
			p.Classes = append(p.Classes, k)
		}
		for _, t := range s.Tenants {
			if t.Tenant != "" {
				p.Tenants = append(p.Tenants, telemetry.AdmissionTenant{Class: t.Class.String(), Tenant: g.metrics.TenantLabel(t.Tenant), Waiting: t.Waiting})
			}
		}
		pools = append(pools, p)
	}
	return pools
}

// shownTenants are told of one pool and class.
const shownTenants = 20

// waitingRequests is what the dashboard shows of admission: where requests wait or have been refused.
func (g *Gateway) waitingRequests() []admin.WaitingView {
	rows := []admin.WaitingView{}
	for _, p := range g.handler.Admission() {
		for _, c := range admission.Classes() {
			v := admin.WaitingView{Pool: p.Pool, Class: c.String(), Waiting: int64(p.Waiting[c]), Tokens: p.Tokens[c], Tenants: viewTenants(p.Tenants, c)}
			for _, n := range p.Refused[c] {
				v.Refused += n
			}
			if v.Waiting > 0 || v.Refused > 0 {
				rows = append(rows, v)
			}
		}
	}
	return rows
}

// viewTenants are the tenants that wait in a class, of all that do.
func viewTenants(all []admission.TenantStats, c admission.Class) (out []admin.WaitingTenant) {
	var others admin.WaitingTenant
	for _, t := range all {
		switch {
		case t.Class != c:
		case len(out) < shownTenants:
			out = append(out, admin.WaitingTenant{Tenant: t.Tenant, Waiting: t.Waiting, Tokens: t.Tokens})
		default:
			others.Others++
			others.Waiting += t.Waiting
			others.Tokens += t.Tokens
		}
	}
	if others.Others > 0 {
		return append(out, others)
	}
	if len(out) == 1 && out[0].Tenant == "" {
		return nil
	}
	return out
}

// namedTenants are the tenants that cfg names.
func namedTenants(cfg *config.Config) (names []string) {
	for i := range cfg.Keys() {
		names = append(names, cfg.Keys()[i].Tenant)
	}
	for i := range cfg.Quotas.Limits {
		if t := cfg.Quotas.Limits[i].Tenant; !config.IsPattern(t) {
			names = append(names, t)
		}
	}
	for i := range cfg.Pools {
		if a := cfg.Pools[i].Admission; a != nil {
			for _, t := range a.Tenants {
				names = append(names, t.Name)
			}
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(n string) bool { return n == "" })
}

// waitsForEndpoints reports whether requests may wait for a pool's first endpoint. Then the gateway is ready without any: if it
// were taken out of its load balancer, nobody could wait in it, and nothing would ask for that endpoint.
func (g *Gateway) waitsForEndpoints() bool {
	for _, p := range g.cfg.Load().Pools {
		if p.Admission != nil && p.Admission.WaitForEndpoints > 0 {
			return true
		}
	}
	return false
}
