package telemetry

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// LabelTenant is who a request is from.
const LabelTenant = "tenant"

// OtherTenant is the value of the tenant label for tenants beyond the bound on them.
const OtherTenant = "other"

// Metrics of tenants.
var (
	TenantRequests = def(Definition{
		Name: "kvgate_tenant_requests_total", Kind: Counter, Labels: []string{LabelTenant, LabelOutcome},
		Help:  "Requests of authenticated tenants that have ended, by how: quota, saturated and queue_timeout are those that were refused. Tenants beyond metrics.tenants are counted as other.",
		Query: `sum by (tenant, outcome) (rate(kvgate_tenant_requests_total{outcome=~"quota|saturated|queue_timeout"}[5m]))`,
	})
	TenantTokens = def(Definition{
		Name: "kvgate_tenant_tokens_total", Kind: Counter, Labels: []string{LabelTenant, LabelType},
		Help:  "Tokens of authenticated tenants as the servers counted them: input, output, and cached, which is a part of input. Of streams only if the client asked for their usage, or usage or a limit on tokens is configured.",
		Query: `topk(10, sum by (tenant) (increase(kvgate_tenant_tokens_total{type!="cached"}[1d])))`,
	})
	AdmissionTenantWaiting = def(Definition{
		Name: "kvgate_admission_tenant_waiting_requests", Kind: Gauge, Labels: []string{LabelPool, LabelClass, LabelTenant},
		Help:  "Requests that wait in the gateway for room on an endpoint, of tenants. Absent for a tenant that has none; requests of no tenant are in kvgate_admission_waiting_requests alone.",
		Query: `topk(10, sum by (pool, tenant) (kvgate_admission_tenant_waiting_requests))`,
	})
)

// tenants are the handles of tenants' series.
type tenants struct {
	requests, tokens *prometheus.CounterVec

	series atomic.Pointer[map[string]*tenantSeries] // never nil; readers take no lock
	mu     sync.Mutex                               // serialises writers of series, and guards what follows
	named  map[string]bool                          // have series of their own always
	most   int                                      // others that may
	others int                                      // of them

	full atomic.Bool // others is most: who has no series gets none
}

type tenantSeries struct {
	label                 string
	input, output, cached prometheus.Counter
	outcomes              atomic.Pointer[[]outcomeCounter]
	used                  atomic.Uint32 // the generation of the latest request
}

// SetTenants has the named tenants, and as many others as come first, have series of their own.
func (m *Metrics) SetTenants(named []string, others int) {
	t := &m.tenants
	t.mu.Lock()
	defer t.mu.Unlock()
	t.named, t.most, t.others = make(map[string]bool, len(named)), others, 0
	for _, n := range named {
		t.named[n] = true
	}
	kept := maps.Clone(*t.series.Load()) // so that no counter goes back
	for name := range t.named {
		if kept[name] == nil {
			kept[name] = m.newTenant(name)
		}
	}
	for name := range kept {
		if name != OtherTenant && !t.named[name] {
			t.others++
		}
	}
	if kept[OtherTenant] == nil {
		kept[OtherTenant] = m.newTenant(OtherTenant)
	}
	t.series.Store(&kept)
	t.full.Store(t.others >= t.most)
}

// TenantLabel is the value of the tenant label for a tenant. A tenant that is new takes one of the places for others.
func (m *Metrics) TenantLabel(name string) string { return m.tenant(name).label }

func (m *Metrics) tenant(name string) *tenantSeries {
	t := &m.tenants
	all := *t.series.Load()
	if s := all[name]; s != nil { // Fast path.
		return s
	}
	if t.full.Load() || len(name) > maxLabelBytes || !utf8.ValidString(name) {
		return all[OtherTenant]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all = *t.series.Load()
	if s := all[name]; s != nil {
		return s
	}
	if t.others >= t.most {
		return all[OtherTenant]
	}
	t.others++
	t.full.Store(t.others >= t.most)
	name = strings.Clone(name)
	s := m.newTenant(name)
	next := maps.Clone(all)
	next[name] = s
	t.series.Store(&next)
	return s
}

func (m *Metrics) newTenant(name string) *tenantSeries {
	t := &m.tenants
	s := &tenantSeries{label: name}
	s.used.Store(m.generation.Load())
	s.input, s.output, s.cached = t.tokens.WithLabelValues(name, "input"), t.tokens.WithLabelValues(name, "output"), t.tokens.WithLabelValues(name, "cached")
	return s
}

// observeTenant counts r for its tenant. Only who has authenticated is one: what a header says is asked only of requests that wait.
func (m *Metrics) observeTenant(r *Record) {
	if r.Key == "" || r.Tenant == "" {
		return
	}
	s := m.tenant(r.Tenant)
	if g := m.generation.Load(); s.used.Load() != g {
		s.used.Store(g)
	}
	count(m, &s.outcomes, r.Outcome, 0, func(outcome string, _ int) prometheus.Counter {
		return m.tenants.requests.WithLabelValues(s.label, outcome)
	})
	if !r.UsageKnown {
		return
	}
	s.input.Add(float64(max(0, r.InputTokens)))
	s.output.Add(float64(max(0, r.OutputTokens)))
	if r.CachedKnown {
		s.cached.Add(float64(max(0, r.CachedTokens)))
	}
}

// sweep forgets tenants that the configuration doesn't name and that have sent nothing for keep sweeps.
func (t *tenants) sweep(generation, keep uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var next map[string]*tenantSeries
	for name, s := range *t.series.Load() {
		if t.named[name] || name == OtherTenant || generation-s.used.Load() < keep {
			continue
		}
		if next == nil {
			next = maps.Clone(*t.series.Load())
		}
		delete(next, name)
	}
	if next == nil {
		return
	}
	old := *t.series.Load()
	t.series.Store(&next)
	for name := range old {
		if next[name] == nil {
			t.others--
			t.requests.DeletePartialMatch(prometheus.Labels{LabelTenant: name})
			t.tokens.DeletePartialMatch(prometheus.Labels{LabelTenant: name})
		}
	}
	t.full.Store(t.others >= t.most)
}
