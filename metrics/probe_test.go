package metrics

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvgate/pool"
)

func scrapeOnce(t testing.TB, url, dialect string, o Options) (Result, error) {
	t.Helper()
	return probe(t, pool.Spec{URL: url, Dialect: dialect}, o)
}

func probe(t testing.TB, spec pool.Spec, o Options) (Result, error) {
	t.Helper()
	tab := pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{})
	spec.Pool = "p"
	es, _, err := tab.SetEndpoints("p", []pool.Spec{spec}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if o.Timeout == 0 {
		o.Timeout = 20e9
	}
	return ScrapeOnce(t.Context(), es[0], o)
}

// What is complete of a page that was cut is shown, and the scrape has failed.
func TestProbeOfACutPage(t *testing.T) {
	s := newModelServer(t)
	s.handle("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, "vllm:num_requests_running 4\nvllm:num_requests_waiting 1")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	r, err := scrapeOnce(t, s.URL, "vllm", Options{})
	if faultOf(err) != FaultReset || r.Load == nil || r.Load.Known != pool.KnowsRunning || r.Load.Running != 4 {
		t.Errorf("%+v, error %v", r.Load, err)
	}
}

// A probe says what it understood, what it didn't, and what to do.
func TestProbeExplains(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage+"vllm:num_requests_swapped NaN\n")
	s.serve("/v1/models", modelList)
	r, err := scrapeOnce(t, s.URL, Auto, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Dialect != "vllm" || r.PageURL != s.URL+"/metrics" || len(r.Models) != 1 || r.ModelsErr != nil || r.PageBytes == 0 {
		t.Errorf("%+v", r)
	}
	if want := []string{"running", "waiting", "kv_cache_utilization", "kv_capacity_tokens"}; !slices.Equal(r.Understood, want) {
		t.Errorf("understood %q; want %q", r.Understood, want)
	}
	if want := []string{"adapters", "max_adapters", "adapter_slots_used", "sleeping"}; !slices.Equal(r.Missing, want) {
		t.Errorf("missing %q; want %q", r.Missing, want)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "1 series were dropped") {
		t.Errorf("notes %q", r.Notes)
	}

	f := func(answers map[string]string, dialect, fix string) Result {
		t.Helper()
		s := newModelServer(t)
		for path, body := range answers {
			s.serve(path, body)
		}
		r, err := scrapeOnce(t, s.URL, dialect, Options{})
		if err == nil || !strings.Contains(err.Error(), fix) {
			t.Errorf("%v: error %v; want %q in it", answers, err, fix)
		}
		return r
	}
	f(nil, Auto, "--enable-metrics")
	f(map[string]string{"/metrics": "go_goroutines 1\n"}, Auto, "dialect: custom")
	f(map[string]string{"/metrics": "sglang:num_running_reqs 1\n"}, "vllm", "set dialect: auto")
	f(map[string]string{"/metrics": "<html>"}, Auto, "set metrics_url")
	f(map[string]string{"/props": `{"total_slots":1}`}, Auto, "start llama.cpp's server with --metrics")
	r = f(map[string]string{"/metrics": `[]`}, Auto, "return_perf_metrics")
	if r.Load != nil || r.ModelsErr == nil {
		t.Errorf("%+v", r)
	}

	s = newModelServer(t)
	s.serve("/", "Ollama is running")
	r, err = scrapeOnce(t, s.URL, Auto, Options{})
	if err != nil || r.Dialect != "none" || len(r.Notes) != 1 {
		t.Errorf("Ollama: %+v, error %v", r, err)
	}
	s.serve("/props", `{"total_slots":1,"is_sleeping":true}`)
	r, err = scrapeOnce(t, s.URL, Auto, Options{})
	if err != nil || r.Dialect != "llamacpp" || r.Load != nil || len(r.Notes) != 1 {
		t.Errorf("sleeping llama.cpp: %+v, error %v", r, err)
	}
	if _, err := scrapeOnce(t, s.URL, "vlm", Options{}); err == nil || !strings.Contains(err.Error(), `unknown dialect "vlm"; known dialects: [auto aphrodite`) {
		t.Errorf("unknown dialect: %v", err)
	}
}

func TestModelLists(t *testing.T) {
	f := func(body string, want ...pool.Model) {
		t.Helper()
		got, err := parseModels([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		if !sameModels(got, want) {
			t.Errorf("%s: got %+v; want %+v", body, got, want)
		}
	}
	f(`{"object":"list","data":[]}`)
	f(`{"data":[{"id":"m","parent":null,"max_model_len":40960},{"id":"a","parent":"m","max_model_len":null,"root":"/a"}]}`,
		pool.Model{ID: "m", MaxModelLen: 40960}, pool.Model{ID: "a", Parent: "m", MaxModelLen: 40960})
	f(`{"models":[{"name":"x"}],"object":"list","data":[{"id":"m"},{"id":"m"},{"id":""}]}`, pool.Model{ID: "m"})
	f(`{"data":[{"id":"m","parent":"m","max_model_len":-1}]}`, pool.Model{ID: "m"})
	const card = `{"id":"m",  "unknown":{"x":[1e2]}}`
	if got, err := parseModels([]byte(`{"data":[` + card + `]}`)); err != nil || string(got[0].Card) != card {
		t.Errorf("card %s, error %v; want it unchanged", got[0].Card, err)
	}
	for _, bad := range []string{"", "[]", "null", `{"data":null}`, `{"data":{}}`, `{"data":[1]}`, `{"data":[{"id":5}]}`, "<html>", `{"object":"list"}`} {
		if got, err := parseModels([]byte(bad)); err == nil {
			t.Errorf("%q: %+v; want an error", bad, got)
		}
	}
}

func FuzzModels(f *testing.F) {
	f.Add([]byte(modelList))
	f.Add([]byte(`{"data":[{"id":"a","parent":"m"},null]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		models, err := parseModels(b)
		if err == nil && !sameModels(models, models) {
			t.Error("a list differs from itself")
		}
		_, _ = iterationStats(b)
	})
}

// An https endpoint is verified by the pool's roots.
func TestTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, vllmPage) }))
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	o := Options{Pools: map[string]PoolOptions{"p": {TLS: &tls.Config{RootCAs: roots}}}}
	if r, err := scrapeOnce(t, s.URL, "vllm", o); err != nil || r.Load.Running != 4 {
		t.Errorf("%+v, error %v", r, err)
	}
}
