package telemetry

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func ofTenant(name, outcome string) *Record {
	r := okRecord("m")
	r.Tenant, r.Key, r.Outcome = name, "k", outcome
	return r
}

// Tenants that are configured have series of their own, others as many as are allowed, and nobody gets more by naming more.
func TestTenantsAreBounded(t *testing.T) {
	m := New(Options{})
	m.SetTenants([]string{"a", "b"}, 2)
	for i := range 1000 {
		m.Observe(ofTenant(fmt.Sprint("made-up-", i), "ok"))
	}
	m.Observe(ofTenant("a", "ok"))
	m.Observe(ofTenant("b", "quota"))
	m.Observe(ofTenant("made-up-1", "ok"))
	m.Observe(ofTenant("\xff", "ok"))
	m.Observe(okRecord("m")) // of nobody
	header := okRecord("m")
	header.Tenant = "c" // by a header, of a request that had to wait: the others would be missing
	m.Observe(header)
	got := page(t, m)
	wantLines(t, got,
		`kvgate_tenant_requests_total{outcome="ok",tenant="a"} 1`,
		`kvgate_tenant_requests_total{outcome="quota",tenant="b"} 1`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="made-up-0"} 1`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="made-up-1"} 2`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="other"} 999`,
		`kvgate_tenant_tokens_total{tenant="a",type="input"} 100`,
		`kvgate_tenant_tokens_total{tenant="a",type="output"} 11`,
		`kvgate_tenant_tokens_total{tenant="a",type="cached"} 64`,
		`kvgate_tenant_tokens_total{tenant="other",type="output"} 10989`,
	)
	if n := strings.Count(got, "kvgate_tenant_requests_total{"); n != 5 {
		t.Errorf("%d series of requests; want 5", n)
	}
	if l := m.TenantLabel("made-up-7"); l != OtherTenant {
		t.Errorf("label %q", l)
	}
}

// A reload may name others. Who has series keeps them until nothing has come for long, and then makes room.
func TestTenantsComeAndGo(t *testing.T) {
	tab := testTable(t, "a")
	m := New(Options{KeepUnserved: 3 * time.Second})
	m.SetTenants([]string{"a"}, 1)
	m.Observe(ofTenant("a", "ok"))
	m.Observe(ofTenant("x", "ok"))
	m.Observe(ofTenant("y", "ok"))
	m.SetTenants([]string{"y"}, 1)
	m.Observe(ofTenant("y", "ok"))
	m.Observe(ofTenant("z", "ok")) // a has the place, and x one too many
	wantLines(t, page(t, m),
		`kvgate_tenant_requests_total{outcome="ok",tenant="a"} 1`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="x"} 1`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="y"} 1`,
		`kvgate_tenant_requests_total{outcome="ok",tenant="other"} 2`,
	)
	for range 5 {
		m.Sweep(tab.Load(), time.Second)
		m.Observe(ofTenant("a", "ok"))
	}
	if got := page(t, m); strings.Contains(got, `tenant="x"`) || !strings.Contains(got, `tenant="a"`) || !strings.Contains(got, `tenant="y"`) {
		t.Errorf("x should be forgotten, and nobody else:\n%s", got)
	}
	for range 5 {
		m.Sweep(tab.Load(), time.Second)
	}
	m.Observe(ofTenant("z", "ok"))
	wantLines(t, page(t, m), `kvgate_tenant_requests_total{outcome="ok",tenant="z"} 1`)
}
