package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve runs an admin listener on loopback and returns its URL.
func serve(t *testing.T, o Options) string {
	t.Helper()
	if o.Table == nil {
		o.Table = pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	}
	o.Now = func() pool.Instant { return 5e9 }
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := New(o)
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		s.Shutdown(context.Background())
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + ln.Addr().String()
}

func do(t *testing.T, method, url, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestReadySaysWhatIsMissing(t *testing.T) {
	var missing []string
	url := serve(t, Options{Missing: func() []string { return missing }})
	if code, body := do(t, "GET", url+"/-/ready", ""); code != 200 || body != "ready\n" {
		t.Errorf("%d %q", code, body)
	}
	missing = []string{"draining", "no endpoint is known"}
	if code, body := do(t, "GET", url+"/-/ready", ""); code != 503 || body != "not ready: draining; no endpoint is known\n" {
		t.Errorf("%d %q", code, body)
	}
	if code, _ := do(t, "GET", url+"/-/healthy", ""); code != 200 {
		t.Errorf("healthy: %d", code)
	}
}

// A page of another domain, whose name its owner has resolve to 127.0.0.1, sends its own name as host.
func TestOtherHostNamesAreRefused(t *testing.T) {
	url := serve(t, Options{})
	for host, want := range map[string]int{
		"evil.example": 403, "evil.example:9090": 403, "localhost.evil.example": 403, "": 200,
		"localhost": 200, "LOCALHOST:1": 200, "kvgate.localhost": 200, "127.0.0.1:80": 200, "[::1]:9": 200, "::1": 200, "10.0.0.3:9090": 200,
	} {
		h := []string{"Host", host}
		if host == "" {
			h = nil
		}
		if code, _ := do(t, "GET", url+"/-/healthy", "", h...); code != want {
			t.Errorf("host %q: %d; want %d", host, code, want)
		}
	}
}

func TestReload(t *testing.T) {
	var err error
	calls := 0
	url := serve(t, Options{Reload: func(context.Context) (ReloadResult, error) {
		calls++
		return ReloadResult{Changed: true, File: "f", NeedsRestart: []string{"listen"}}, err
	}})
	if code, body := do(t, "POST", url+"/-/reload", ""); code != 200 || !strings.Contains(body, `"needs_restart":["listen"]`) {
		t.Errorf("%d %s", code, body)
	}
	err = errors.New("f:1:1: x: unknown key")
	if code, body := do(t, "POST", url+"/-/reload", ""); code != 422 || !strings.Contains(body, "unknown key") {
		t.Errorf("%d %s", code, body)
	}
	calls = 0
	if code, _ := do(t, "GET", url+"/-/reload", ""); code != 405 {
		t.Errorf("GET: %d", code)
	}
	// A web page elsewhere cannot make a browser post here.
	if code, _ := do(t, "POST", url+"/-/reload", "", "Sec-Fetch-Site", "cross-site", "Origin", "http://evil.example"); code != 403 {
		t.Errorf("cross-origin: %d", code)
	}
	if calls != 0 {
		t.Errorf("%d reloads by requests that were refused", calls)
	}
}

func TestBodiesAreBounded(t *testing.T) {
	url := serve(t, Options{MaxBodyBytes: 100, Explain: func(in *Inquiry) (scoring.Explanation, error) {
		return scoring.Explanation{Model: fmt.Sprint(len(in.Body))}, nil
	}})
	if code, body := do(t, "POST", url+"/debug/explain", strings.Repeat("x", 100)); code != 200 || !strings.Contains(body, `"model":"100"`) {
		t.Errorf("at the limit: %d %s", code, body)
	}
	if code, body := do(t, "POST", url+"/debug/explain", strings.Repeat("x", 101)); code != 413 {
		t.Errorf("above it: %d %s", code, body)
	}
}

func TestExplainErrorsAreTheClients(t *testing.T) {
	url := serve(t, Options{Explain: func(in *Inquiry) (scoring.Explanation, error) {
		if in.Path != "/v1/completions" {
			return scoring.Explanation{}, fmt.Errorf("path %s", in.Path)
		}
		return scoring.Explanation{Policy: "auto", Chosen: "p/a"}, nil
	}})
	if code, body := do(t, "POST", url+"/debug/explain", "{}"); code != 400 || !strings.Contains(body, `"error":"path /v1/chat/completions"`) {
		t.Errorf("%d %s", code, body)
	}
	if code, body := do(t, "POST", url+"/debug/explain?path=/v1/completions&format=text", "{}"); code != 200 || !strings.HasPrefix(body, "policy auto") {
		t.Errorf("%d %s", code, body)
	}
}

func TestDecisionsAreBounded(t *testing.T) {
	recent := telemetry.NewRecent(50)
	url := serve(t, Options{Recent: recent})
	for i := range 200 {
		recent.Observe(&telemetry.Record{RequestID: fmt.Sprint(i), Status: 200, Outcome: "ok"})
	}
	var v DecisionsView
	for query, want := range map[string]int{"": 50, "?n=3": 3, "?n=100000000": 50} {
		code, body := do(t, "GET", url+"/debug/decisions"+query, "")
		if err := json.Unmarshal([]byte(body), &v); err != nil || code != 200 || len(v.Decisions) != want || !v.Truncated || v.Total != 200 {
			t.Errorf("%q: %d, %d decisions, %+v %v", query, code, len(v.Decisions), v.Truncated, err)
		}
		if v.Decisions[0].RequestID != "199" || v.Decisions[0].Cost != nil {
			t.Errorf("newest: %+v", v.Decisions[0])
		}
	}
	for _, n := range []string{"0", "-1", "x"} {
		if code, _ := do(t, "GET", url+"/debug/decisions?n="+n, ""); code != 400 {
			t.Errorf("n=%s: %d", n, code)
		}
	}
}

// A body that is too large is told the limit by its name, and a token that is missing from one that is wrong.
func TestRefusalsSayWhy(t *testing.T) {
	url := serve(t, Options{MaxBodyBytes: 10, Token: func() string { return "right" }, Explain: func(*Inquiry) (scoring.Explanation, error) {
		return scoring.Explanation{}, nil
	}, Reload: func(context.Context) (ReloadResult, error) { return ReloadResult{}, nil }})
	f := func(path, body string, want int, text string, header ...string) {
		t.Helper()
		if code, got := do(t, "POST", url+path, body, header...); code != want || !strings.Contains(got, text) {
			t.Errorf("%s: %d %s; want %d and %q", path, code, got, want, text)
		}
	}
	f("/debug/explain", "12345678901", 413, "limits.body_bytes, 10 bytes")
	f("/-/reload", "", 401, "none was sent")
	f("/-/reload", "", 401, "not the one", "Authorization", "Bearer wrong")
	f("/-/reload", "", 200, "", "Authorization", "Bearer right")
}

// A load older than is believed is marked in the snapshot, which keeps it, and left out where people see what is so now. Which
// adapters the gateway remembers there is no load.
func TestOldLoadIsMarked(t *testing.T) {
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	if _, _, err := tab.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://127.0.0.1:1", Name: "a"}}, 1); err != nil {
		t.Fatal(err)
	}
	e := tab.Load().Rows[0].Endpoint
	tab.Observe(e, pool.Observation{Load: &pool.Load{Known: pool.KnowsRunning | pool.KnowsAdapters, Running: 2, Adapters: []string{"sql"}}, At: 1e9})
	staleAfter := 10 * time.Second
	url := serve(t, Options{Table: tab, StaleAfter: func() time.Duration { return staleAfter }}) // at 5 s
	f := func(snapshot, live string) {
		t.Helper()
		for path, want := range map[string]string{"/debug/snapshot": snapshot, "/debug/live?once=1": live} {
			if _, body := do(t, "GET", url+path, ""); !regexp.MustCompile(want).MatchString(body) {
				t.Errorf("%s: %s; want %s", path, body, want)
			}
		}
	}
	f(`"running":2.*"scrape_age_seconds":4}`, `"running":2.*"adapters":\[.*sql`)
	staleAfter = 3 * time.Second
	f(`"running":2.*"scrape_age_seconds":4,"stale":true}`, `"running":null,"waiting":null,"foreign_requests":null,"max_adapters":null,("adapters":\[[^]]*"in_flight":0}\],)?"prefill`)
	staleAfter = 10 * time.Second
	tab.SetState(e, pool.Unreachable, true, 5e9)
	f(`"state":\["down"\].*"running":2.*"scrape_age_seconds":4}`, `"running":null,"waiting":null,"foreign_requests":null,"max_adapters":null,("adapters":\[[^]]*"in_flight":0}\],)?"prefill`)
}

func TestModelsAreSorted(t *testing.T) {
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p"}, {Name: "q", Models: []string{"configured"}}}, pool.Options{})
	if _, _, err := tab.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://127.0.0.1:1", Name: "a"}}, 1); err != nil {
		t.Fatal(err)
	}
	tab.SetServed(tab.Load().Rows[0].Endpoint, &pool.Served{Models: []pool.Model{
		{ID: "zeta", MaxModelLen: 4096}, {ID: "b", Parent: "zeta"}, {ID: "a", Parent: "zeta"},
	}, At: 1})
	url := serve(t, Options{Table: tab})
	_, body := do(t, "GET", url+"/debug/models", "")
	var v ModelsView
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range v.Models {
		ids = append(ids, m.ID)
	}
	if got := strings.Join(ids, " "); got != "zeta a b configured" {
		t.Errorf("%s; want base models before their adapters", got)
	}
	if v.Models[0].MaxModelLen == nil || *v.Models[0].MaxModelLen != 4096 || v.Models[3].MaxModelLen != nil || len(v.Models[3].Endpoints) != 0 {
		t.Errorf("%s", body)
	}
}

func TestLongProfilesAreRefused(t *testing.T) {
	url := serve(t, Options{})
	if code, _ := do(t, "GET", url+"/debug/pprof/profile?seconds=100000", ""); code != 400 {
		t.Errorf("%d", code)
	}
	if code, body := do(t, "GET", url+"/", ""); code != 200 || !strings.Contains(body, "/debug/snapshot") {
		t.Errorf("index: %d", code)
	}
	if code, _ := do(t, "GET", url+"/nope", ""); code != 404 {
		t.Errorf("/nope: %d", code)
	}
}
