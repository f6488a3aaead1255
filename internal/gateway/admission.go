package gateway

import (
	"kvgate/admission"
	"kvgate/config"
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
		pools = append(pools, p)
	}
	return pools
}

// A waitingView is one pool's requests of one class that wait for admission.
type waitingView struct {
	Pool    string `json:"pool"`
	Class   string `json:"class"`
	Waiting int64  `json:"waiting"`
	Tokens  int64  `json:"prompt_tokens"`
	Refused uint64 `json:"refused"` // since the start
}

// waitingRequests is what the dashboard shows of admission: where requests wait or have been refused.
func (g *Gateway) waitingRequests() any {
	rows := []waitingView{}
	for _, p := range g.admissionState() {
		for _, c := range p.Classes {
			v := waitingView{Pool: p.Pool, Class: c.Class, Waiting: int64(c.Waiting), Tokens: c.WaitingTokens}
			for _, r := range c.Refused {
				v.Refused += r.N
			}
			if v.Waiting > 0 || v.Refused > 0 {
				rows = append(rows, v)
			}
		}
	}
	return rows
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
