package metrics

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/pool"
)

func TestMain(m *testing.M) {
	if os.Getenv(pageServersEnv) != "" {
		servePages()
		return
	}
	goleak.VerifyTestMain(m)
}

var clockStart = time.Now()

func clock() pool.Instant { return pool.Instant(time.Since(clockStart)) + 1 }

// A modelServer answers what its test tells it to, and counts what it was asked for.
type modelServer struct {
	*httptest.Server
	mu      sync.Mutex
	answers map[string]http.HandlerFunc
	asked   map[string]int
	keys    []string
}

func newModelServer(t testing.TB) *modelServer {
	s := &modelServer{answers: make(map[string]http.HandlerFunc), asked: make(map[string]int)}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		h := s.answers[r.URL.Path]
		s.asked[r.URL.Path]++
		s.keys = append(s.keys, r.Header.Get("Authorization"))
		s.mu.Unlock()
		if h == nil {
			http.NotFound(w, r)
			return
		}
		h(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *modelServer) handle(path string, h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[path] = h
}

func (s *modelServer) serve(path, body string) {
	s.handle(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
}

func (s *modelServer) count(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[path]
}

// A rig is a table with endpoints and a manager that scrapes them.
type rig struct {
	t         testing.TB
	table     *pool.Table
	manager   *Manager
	endpoints []*pool.Endpoint
	states    chan string
}

// quick makes scraping fast enough for tests; intervals keep their order.
func quick() Options {
	return Options{
		Interval: 10 * time.Millisecond, MinInterval: 5 * time.Millisecond, MaxInterval: 20 * time.Millisecond,
		MaxBackoff: 20 * time.Millisecond, ModelsInterval: 10 * time.Millisecond, SlowModelsInterval: 20 * time.Millisecond,
		Timeout: 10 * time.Second, Now: clock,
	}
}

func newRig(t testing.TB, o Options, specs ...pool.Spec) *rig {
	t.Helper()
	r := &rig{t: t, table: pool.NewTable([]pool.PoolSpec{{Name: "p"}}, pool.Options{}), states: make(chan string, 1000)}
	for i := range specs {
		specs[i].Pool = "p"
	}
	var err error
	if r.endpoints, _, err = r.table.SetEndpoints("p", specs, clock()); err != nil {
		t.Fatal(err)
	}
	onState := o.OnState
	o.OnState = func(e *pool.Endpoint, from, to State, err error) {
		r.states <- fmt.Sprintf("%s>%s", from, to)
		if onState != nil {
			onState(e, from, to, err)
		}
	}
	if r.manager, err = NewManager(r.table, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.manager.Stop)
	if err := r.manager.Sync(r.endpoints); err != nil {
		t.Fatal(err)
	}
	return r
}

// row waits until the row of endpoint i satisfies ok.
func (r *rig) row(i int, what string, ok func(*pool.Row) bool) *pool.Row {
	r.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		s := r.table.Load()
		for j := range s.Rows {
			if row := &s.Rows[j]; row.Endpoint == r.endpoints[i] && ok(row) {
				return row
			}
		}
		if time.Now().After(deadline) {
			n, err := r.table.LastError(r.endpoints[i])
			r.t.Fatalf("endpoint %d: not %s in time; last error after %d failures: %v", i, what, n, err)
		}
		time.Sleep(time.Millisecond) // polls; nothing is assumed after it
	}
}

const vllmPage = `# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
`

const modelList = `{"object":"list","data":[{"id":"m","object":"model","parent":null,"max_model_len":4096}]}`

func TestScraperFeedsTheTable(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	s.serve("/v1/models", modelList)
	var scrapes atomic.Int64
	o := quick()
	o.Pools = map[string]PoolOptions{"p": {APIKey: "k1"}}
	o.OnScrape = func(_ *pool.Endpoint, r Scrape) {
		if r.Fault == FaultNone && r.PageBytes == int64(len(vllmPage)) {
			scrapes.Add(1)
		}
	}
	r := newRig(t, o, pool.Spec{URL: s.URL, Dialect: Auto})
	row := r.row(0, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 && row.Served != nil })
	l := row.Load
	if l.Running != 4 || l.Waiting != 2 || l.KVCacheUtilization != 0.5 || l.KVCapacityTokens != 16000 || l.Dialect != "vllm" {
		t.Errorf("load %+v", l)
	}
	if tg := r.table.Load().TargetString("m"); tg == nil || tg.MaxModelLen != 4096 || len(tg.Rows) != 1 {
		t.Errorf("model m: %+v", tg)
	}
	if got := <-r.states; got != "unknown>up" {
		t.Errorf("state %s", got)
	}
	r.manager.Stop()
	if scrapes.Load() == 0 {
		t.Error("no scrape was reported")
	}
	for _, k := range s.keys {
		if k != "Bearer k1" {
			t.Errorf("Authorization %q", k)
		}
	}
}

// What an endpoint says that it serves is read again when that turns out wrong, long before it is due, and not for each
// request that finds out.
func TestReadModels(t *testing.T) {
	s := newModelServer(t)
	s.serve("/metrics", vllmPage)
	s.serve("/v1/models", modelList)
	o := quick()
	o.ModelsInterval, o.SlowModelsInterval = time.Hour, time.Hour
	r := newRig(t, o, pool.Spec{URL: s.URL, Dialect: Auto})
	r.row(0, "served", func(row *pool.Row) bool { return row.Served != nil })
	if n := s.count("/v1/models"); n != 1 {
		t.Fatalf("the list was read %d times", n)
	}
	s.serve("/v1/models", strings.ReplaceAll(modelList, `"m"`, `"other"`))
	for range 1000 {
		r.manager.ReadModels(r.endpoints[0])
	}
	r.row(0, "read again", func(row *pool.Row) bool { return row.Served.Models[0].ID == "other" })
	if n := s.count("/v1/models"); n > 3 {
		t.Errorf("1,000 requests for the list made %d readings", n-1)
	}
	// So is whether it is there at all, which takes two looks.
	s.Close()
	r.row(0, "down", func(row *pool.Row) bool {
		r.manager.ReadModels(r.endpoints[0])
		return row.State&pool.Unreachable != 0
	})
	r.manager.Stop()
	r.manager.ReadModels(r.endpoints[0]) // nothing left to do it
}
