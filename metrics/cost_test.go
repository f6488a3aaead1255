package metrics

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/internal/shared"
	"kvgate/pool"
)

// pageServers makes this test binary a process with as many model servers, whose page is the file that pageServersFile
// names: what they cost must not count.
const (
	pageServersEnv  = "KVGATE_TEST_PAGE_SERVERS"
	pageServersFile = "KVGATE_TEST_PAGE_FILE"
)

func servePages() {
	var n int
	fmt.Sscan(os.Getenv(pageServersEnv), &n)
	page, err := os.ReadFile(os.Getenv(pageServersFile))
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(page)))
		w.Write(page)
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, modelList) })
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		go http.Serve(l, mux)
		fmt.Println("http://" + l.Addr().String())
	}
	io.Copy(io.Discard, os.Stdin) // until the test ends
}

// largePage is what a vLLM with eight engines shows: 300 KB.
func largePage(t testing.TB) string {
	b, err := os.ReadFile(filepath.Join(shared.Dir(t), "metrics-samples", "vllm-0.26-dp16-huge-histograms.prom"))
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	for line := range strings.Lines(string(b)) {
		skip := false
		for e := 8; e < 16; e++ {
			skip = skip || strings.Contains(line, fmt.Sprintf(`engine="%d"`, e))
		}
		if !skip {
			page.WriteString(line)
		}
	}
	return page.String()
}

// startPages starts n servers of page in another process, and returns their URLs.
func startPages(t testing.TB, n int, page string) (urls []string) {
	file := filepath.Join(t.TempDir(), "page")
	if err := os.WriteFile(file, []byte(page), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", pageServersEnv, n), pageServersFile+"="+file)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Wait()
	})
	lines := bufio.NewScanner(stdout)
	for len(urls) < n && lines.Scan() {
		urls = append(urls, lines.Text())
	}
	return urls
}

// smallPage has 2 KB.
var smallPage = vllmPage + strings.Repeat("# HELP what nobody reads on a page of this size, which is small\n", 27)

// BenchmarkScrape reads pages of 2 KB and of 300 KB, and a list of models, as a scraper does that has seen them before, and reports the
// processor time of each: over the wire and, to compare with, over net/http.
func BenchmarkScrape(b *testing.B) {
	large := largePage(b)
	for _, page := range []struct{ name, text, path string }{
		{"2KB", smallPage, "/metrics"},
		{"300KB", large, "/metrics"},
		{"list", "", "/v1/models"},
	} {
		u := startPages(b, 1, page.text)[0] + page.path
		o := Options{Now: clock, Timeout: 10 * time.Second}
		if err := o.fill(); err != nil {
			b.Fatal(err)
		}
		for _, over := range []string{"net-http", "wire"} {
			b.Run(page.name+"/"+over, func(b *testing.B) {
				c := newClient(PoolOptions{}, &o)
				if over == "net-http" {
					c.asker = &netHTTP{&http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 1, ReadBufferSize: 16 << 10}, o.Timeout}
				}
				defer c.close()
				d := Lookup("vllm")
				p := newPage(d.want, d)
				b.ReportAllocs()
				start := cpuTime(b)
				for b.Loop() {
					var err error
					if page.text == "" {
						_, err = c.models(b.Context(), u)
					} else {
						_, err = c.page(b.Context(), u, p)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-µs/op")
			})
		}
	}
}

// BenchmarkHundredEndpoints scrapes 100 servers with pages of 300 KB once a second, for ten seconds, and reports how many
// processor cores that takes.
func BenchmarkHundredEndpoints(b *testing.B) {
	benchmarkEndpoints(b, 100, largePage(b), Options{Interval: time.Second, MinInterval: time.Second, MaxInterval: time.Second})
}

// BenchmarkThousandEndpoints is the same for 1,000 servers with small pages, read as often as by default.
func BenchmarkThousandEndpoints(b *testing.B) {
	benchmarkEndpoints(b, 1000, smallPage, Options{})
}

// BenchmarkSixtyFourEndpoints is the same for 64.
func BenchmarkSixtyFourEndpoints(b *testing.B) {
	benchmarkEndpoints(b, 64, smallPage, Options{})
}

func benchmarkEndpoints(b *testing.B, endpoints int, page string, o Options) {
	const period = 10 * time.Second
	specs := make([]pool.Spec, 0, endpoints)
	for _, u := range startPages(b, endpoints, page) {
		specs = append(specs, pool.Spec{URL: u, Dialect: "vllm"})
	}
	var scrapes atomic.Int64
	o.Timeout, o.Now = 10*time.Second, clock
	o.OnScrape = func(_ *pool.Endpoint, s Scrape) {
		if s.Fault == FaultNone {
			scrapes.Add(1)
		}
	}
	var cpu, wall time.Duration
	var rate float64
	for b.Loop() {
		r := newRig(b, o, specs...)
		for i := range r.endpoints {
			r.row(i, "scraped", func(row *pool.Row) bool { return row.ScrapedAt != 0 })
		}
		start, used := time.Now(), cpuTime(b)
		scrapes.Store(0)
		time.Sleep(period) // the period that is measured
		cpu, wall = cpu+cpuTime(b)-used, wall+time.Since(start)
		rate = float64(scrapes.Load()) / time.Since(start).Seconds()
		r.manager.Stop()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(cpu.Seconds()/wall.Seconds(), "cores")
	b.ReportMetric(rate, "scrapes/s")
	b.ReportMetric(float64(len(page)), "page-B")
	b.ReportMetric(float64(m.HeapInuse+m.StackInuse)/1e6, "MB")
}
