package metrics

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/pool"
)

// hosts answers requests by host and path, so that detection can be tested on ports that may be taken.
type hosts struct {
	mu      sync.Mutex
	answers map[string]string // host:port/path to body; "404 x" and the like set the status
	asked   []string
}

func (h *hosts) RoundTrip(r *http.Request) (*http.Response, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key := r.URL.Host + r.URL.Path
	h.asked = append(h.asked, key)
	w := httptest.NewRecorder()
	body, ok := h.answers[key]
	if !ok {
		body = "404 {\"detail\":\"Not Found\"}"
	}
	status := 200
	if n, _ := fmt.Sscanf(body, "%d ", &status); n == 1 && len(body) > 4 && body[3] == ' ' {
		body = body[4:]
	} else {
		status = 200
	}
	w.WriteHeader(status)
	fmt.Fprint(w, body)
	res := w.Result()
	res.ContentLength = int64(len(body))
	res.Request = r
	return res, nil
}

func (h *hosts) locator(dialect *Dialect) *locator {
	return &locator{
		client:  &client{asker: &netHTTP{transport: h, timeout: time.Minute}, timeout: time.Minute, limit: 1 << 20},
		base:    "http://h:8000",
		dialect: dialect,
	}
}

func TestDetection(t *testing.T) {
	const nim = "num_requests_running{model_name=\"m\"} 3\nnum_requests_waiting{model_name=\"m\"} 1\ngpu_cache_usage_perc{model_name=\"m\"} 0.25\n"
	f := func(what string, answers map[string]string, dialect, url string, asked ...string) *source {
		t.Helper()
		h := &hosts{answers: answers}
		src, err := h.locator(nil).locate(t.Context())
		switch {
		case dialect == "":
			if err == nil {
				t.Errorf("%s: found %s at %s; want nothing", what, src.dialect.Name, src.url)
			}
		case err != nil:
			t.Errorf("%s: %v", what, err)
		case src.dialect.Name != dialect || src.url != url:
			t.Errorf("%s: found %s at %s; want %s at %s", what, src.dialect.Name, src.url, dialect, url)
		}
		if asked != nil && !slices.Equal(h.asked, asked) {
			t.Errorf("%s: asked for %q; want %q", what, h.asked, asked)
		}
		return src
	}
	f("vLLM", map[string]string{"h:8000/metrics": vllmPage}, "vllm", "http://h:8000/metrics", "h:8000/props", "h:8000/metrics")
	f("NIM 1.x", map[string]string{"h:8000/v1/metrics": nim}, "nim", "http://h:8000/v1/metrics")
	f("NIM 2.x", map[string]string{"h:8000/v1/metrics": vllmPage}, "vllm", "http://h:8000/v1/metrics")
	f("MAX", map[string]string{"h:8001/metrics": "maxserve_num_requests_running 3\n"}, "max", "http://h:8001/metrics")
	f("Triton", map[string]string{"h:8002/metrics": "nv_trt_llm_request_metrics{model=\"m\",request_type=\"scheduled\"} 1\n"}, "triton", "http://h:8002/metrics")
	f("a vLLM beside it", map[string]string{"h:8001/metrics": vllmPage, "h:8002/metrics": vllmPage}, "", "")
	f("Ollama", map[string]string{"h:8000/metrics": "404 404 page not found", "h:8000/": "Ollama is running"}, "none", "")
	f("llama.cpp", map[string]string{"h:8000/props": `{"total_slots":4,"default_generation_settings":{}}`, "h:8000/metrics": "llamacpp:requests_processing 1\n"},
		"llamacpp", "http://h:8000/metrics", "h:8000/props", "h:8000/props", "h:8000/metrics")
	f("nothing", nil, "", "", "h:8000/props", "h:8000/metrics", "h:8000/v1/metrics", "h:8001/metrics", "h:8002/metrics", "h:8000/")
	f("loading llama.cpp", map[string]string{"h:8000/props": `503 {"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`, "h:8000/metrics": "llamacpp:requests_processing 1\n"},
		"", "", "h:8000/props")
	f("everything 500", map[string]string{"h:8000/props": "500 x", "h:8000/metrics": "500 x"}, "", "", "h:8000/props", "h:8000/metrics")

	// An endpoint of its own on MAX's port is not this one's page.
	h := &hosts{answers: map[string]string{"h:8001/metrics": "maxserve_num_requests_running 3\n"}}
	l := h.locator(nil)
	l.taken = func(a string) bool { return a == "h:8001" }
	if src, err := l.locate(t.Context()); err == nil {
		t.Errorf("found %s at %s, which is another endpoint", src.dialect.Name, src.url)
	}
	if slices.Contains(h.asked, "h:8001/metrics") {
		t.Error("another endpoint's page was read")
	}
}

// A dialect that is given is looked for where its servers have their page, and nowhere else.
func TestGivenDialect(t *testing.T) {
	f := func(dialect string, asked ...string) {
		t.Helper()
		h := &hosts{}
		_, err := h.locator(Lookup(dialect)).locate(t.Context())
		if err == nil && dialect != "none" {
			t.Errorf("%s: no error", dialect)
		}
		if !slices.Equal(h.asked, asked) {
			t.Errorf("%s: asked for %q; want %q", dialect, h.asked, asked)
		}
	}
	f("vllm", "h:8000/metrics")
	f("nim", "h:8000/v1/metrics", "h:8000/metrics")
	f("trtllm", "h:8000/prometheus/metrics")
	f("max", "h:8001/metrics", "h:8000/metrics")
	f("triton", "h:8002/metrics", "h:8000/metrics")
	f("llamacpp", "h:8000/props", "h:8000/metrics")
	f("none")
}

// trtllm-serve's JSON is read once at most: each read takes from those who want it.
func TestTRTLLMIsNotDrained(t *testing.T) {
	s := newModelServer(t)
	s.serve("/v1/models", modelList)
	s.serve("/metrics", `[{"numActiveRequests":3,"numQueuedRequests":1}]`)
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "looked at often", func(*pool.Row) bool { return s.count("/prometheus/metrics") > 5 })
	if n := s.count("/metrics"); n != 1 {
		t.Errorf("/metrics was read %d times; want once", n)
	}
	_, err := r.table.LastError(r.endpoints[0])
	if err == nil || !strings.Contains(err.Error(), "return_perf_metrics: true") {
		t.Errorf("error %v; want one that says how to get a page", err)
	}
	s.serve("/prometheus/metrics", "trtllm_num_requests_running{model_name=\"m\"} 48\ntrtllm_num_requests_waiting{model_name=\"m\"} 5\n")
	row := r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 })
	if row.Load.Dialect != "trtllm" || row.Load.Running != 48 {
		t.Errorf("load %+v", row.Load)
	}
	if n := s.count("/metrics"); n != 1 {
		t.Errorf("/metrics was read %d times; want once", n)
	}
}

// A llama.cpp that sleeps is left asleep, whether its dialect is given or detected; it can still get requests.
func TestSleepingLlamaIsLeftAlone(t *testing.T) {
	for _, dialect := range []string{Auto, "llamacpp"} {
		s := newModelServer(t)
		s.serve("/props", `{"total_slots":4,"is_sleeping":true}`)
		s.serve("/models", modelList)
		touched := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "llamacpp:requests_processing 2\n") }
		s.handle("/metrics", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Process-Start-Time-Unix", "1700000000")
			touched(w, r)
		})
		r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: dialect})
		row := r.row(0, "looked at often", func(row *pool.Row) bool { return s.count("/props") > 10 && row.Served != nil && row.ScrapedAt != 0 })
		if n := s.count("/metrics") + s.count("/slots") + s.count("/lora-adapters") + s.count("/v1/models"); n != 0 {
			t.Errorf("%s: %d requests that may wake it", dialect, n)
		}
		if row.Load.Known != 0 || row.State&pool.Unroutable != 0 {
			t.Errorf("%s: load %+v, state %b; want it unknown and routable", dialect, row.Load, row.State)
		}
		if got := <-r.states; got != "unknown>asleep" {
			t.Errorf("%s: state %s", dialect, got)
		}
		s.serve("/props", `{"total_slots":4,"is_sleeping":false}`)
		row = r.row(0, "awake", func(row *pool.Row) bool { return row.Load.Running == 2 })
		if row.Load.StartTime != 1_700_000_000 {
			t.Errorf("%s: start time %v", dialect, row.Load.StartTime)
		}
		r.manager.Stop()
	}
	s := newModelServer(t)
	s.serve("/props", `{"role":"router"}`)
	s.serve("/models", modelList)
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "looked at often", func(row *pool.Row) bool { return s.count("/props") > 5 && row.Served != nil })
	if n := s.count("/metrics"); n != 0 {
		t.Errorf("router: %d requests that may load a model", n)
	}
}

// SGLang's /health generates a token; nothing asks for it, or for anything else but page and list.
func TestOnlyPageAndListAreAskedFor(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", "sglang:num_running_reqs{model_name=\"m\"} 3\n")
	s.serve("/v1/models", modelList)
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "scraped often", func(*pool.Row) bool { return s.count("/metrics") > 10 })
	r.manager.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for path, n := range s.asked {
		if path != "/metrics" && path != "/v1/models" && !(path == "/props" && n == 1) {
			t.Errorf("%s was asked for %d times", path, n)
		}
	}
}

// A server that is replaced by one of another kind is recognised anew.
func TestServerIsReplaced(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	r := newRig(t, quick(), pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "a vLLM", func(row *pool.Row) bool { return row.Load.Dialect == "vllm" })
	s.serve("/metrics", "sglang:num_running_reqs{model_name=\"m\"} 3\n")
	r.row(0, "an SGLang", func(row *pool.Row) bool { return row.Load.Dialect == "sglang" && row.Load.Running == 3 })
}

// A metrics URL of the endpoint's own goes before everything.
func TestMetricsURL(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", "vllm:num_requests_running 1\n")
	s.serve("/other/page", vllmPage)
	for _, dialect := range []string{Auto, "vllm"} {
		res, err := probe(t, pool.Spec{URL: s.URL, Dialect: dialect, MetricsURL: s.URL + "/other/page"}, Options{})
		if err != nil || res.Load.Running != 4 || res.PageURL != s.URL+"/other/page" {
			t.Errorf("%s: %+v, error %v", dialect, res, err)
		}
	}
	if s.count("/metrics") != 0 {
		t.Error("/metrics was read")
	}
}
