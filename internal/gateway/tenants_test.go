package gateway

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"kvgate/internal/admin"
	"kvgate/internal/auth"
	"kvgate/internal/modelsim"
)

// Who waits, and who used or was refused what, is seen by tenant on the admin listener, in the live feed and in metrics.
func TestTenantsAreSeen(t *testing.T) {
	a := sim(t, modelsim.Options{Speedup: 1})
	keys := filepath.Join(t.TempDir(), "keys.yaml")
	one, two := auth.NewKey(), auth.NewKey()
	if err := os.WriteFile(keys, []byte("keys:\n"+entry(t, "a-1", one, ", class: high")+entry(t, "b-1", two, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	g := start(t, onePool(a.URL())+"    admission: {endpoint_requests: 1, max_wait: 1m, standing_wait: 0s}\nauth: {keys_file: "+keys+"}\n"+
		"quotas: {limits: [{tenant: b, requests: 3, window: 24h}, {total_tokens: 1000000}]}\n", Options{})
	eventually(t, "the model is known", func() bool { return g.Table().Load().TargetString(baseModel) != nil })
	var clients sync.WaitGroup
	send := func(key string, n, tokens int) {
		for range n {
			clients.Go(func() { g.as(key, baseModel, true, tokens) })
		}
	}
	page := func(path string) string {
		_, body := get(t, "http://"+g.AdminAddr()+path)
		return body
	}
	send(two, 1, 300)
	eventually(t, "the first one runs", func() bool { return g.Table().Load().Rows[0].Booked().Requests == 1 })
	send(one, 2, 2)
	send(two, 2, 2)
	eventually(t, "the others wait", func() bool {
		return strings.Contains(page("/metrics"), `kvgate_admission_tenant_waiting_requests{class="high",pool="p",tenant="a"} 2`) &&
			strings.Contains(page("/metrics"), `kvgate_admission_tenant_waiting_requests{class="normal",pool="p",tenant="b"} 2`)
	})
	for _, path := range []string{"/debug/waiting", "/debug/live?once=1"} {
		var v struct{ Waiting []admin.WaitingView }
		if err := json.Unmarshal([]byte(page(path)), &v); err != nil {
			t.Fatal(err)
		}
		if len(v.Waiting) != 2 {
			t.Fatalf("%s: %+v", path, v)
		}
		for i, w := range []string{"p high 2 [a 2]", "p normal 2 [b 2]"} {
			x := v.Waiting[i]
			if len(x.Tenants) != 1 || fmt.Sprintf("%s %s %d [%s %d]", x.Pool, x.Class, x.Waiting, x.Tenants[0].Tenant, x.Tenants[0].Waiting) != w || x.Tokens == 0 {
				t.Errorf("%s: %+v; want %s", path, x, w)
			}
		}
	}
	if resp, body := g.as(two, baseModel, false, 2); resp.StatusCode != 429 {
		t.Errorf("%d %s; want 429", resp.StatusCode, body)
	}
	clients.Wait()
	for _, line := range []string{
		`kvgate_tenant_requests_total{outcome="ok",tenant="a"} 2`, `kvgate_tenant_requests_total{outcome="ok",tenant="b"} 3`,
		`kvgate_tenant_requests_total{outcome="quota",tenant="b"} 1`, `kvgate_tenant_tokens_total{tenant="a",type="output"} 4`,
		`kvgate_tenant_tokens_total{tenant="b",type="output"} 304`,
	} {
		eventually(t, line, func() bool { return strings.Contains(page("/metrics"), line+"\n") })
	}
	if body := page("/metrics"); strings.Contains(body, "kvgate_admission_tenant_waiting_requests{") || strings.Contains(body, one) {
		t.Error("somebody still waits, or a key is told")
	}
}
