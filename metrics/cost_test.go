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

// BenchmarkHundredEndpoints scrapes 100 servers with pages of 300 KB once a second, for ten seconds, and reports how many
// processor cores that takes.
func BenchmarkHundredEndpoints(b *testing.B) {
	const endpoints, period = 100, 10 * time.Second
	page := largePage(b)
	file := filepath.Join(b.TempDir(), "page")
	if err := os.WriteFile(file, []byte(page), 0o600); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", pageServersEnv, endpoints), pageServersFile+"="+file)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer cmd.Wait()
	defer stdin.Close()
	specs := make([]pool.Spec, 0, endpoints)
	lines := bufio.NewScanner(stdout)
	for len(specs) < endpoints && lines.Scan() {
		specs = append(specs, pool.Spec{URL: lines.Text(), Dialect: "vllm"})
	}

	var scrapes atomic.Int64
	o := Options{
		Interval: time.Second, MinInterval: time.Second, MaxInterval: time.Second, Timeout: 10 * time.Second, Now: clock,
		OnScrape: func(_ *pool.Endpoint, s Scrape) {
			if s.Fault == FaultNone {
				scrapes.Add(1)
			}
		},
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
