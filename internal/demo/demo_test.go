package demo

import (
	"bytes"
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// fasthttp's cleaner of idle workers looks up every 10 s whether it is still wanted; nobody can wake it.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"))
}

// A screen can be read while it is written.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestDemoEndsWithATable(t *testing.T) {
	t.Parallel()
	var out screen
	sums, err := Run(t.Context(), Options{Out: &out, Length: time.Second, PerSecond: 10})
	if err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, s := range sums {
		if s.Failed > 0 || s.Requests < 3 || s.TTFTMean <= 0 || s.TTFTP99 < s.TTFTP50 {
			t.Errorf("%+v", s)
		}
		row := regexp.MustCompile(`(?m)^\s*` + s.Policy + `\s+\d+\s+0\s+\d+\.\d\d s\s+\d+\.\d\d s\s+\d+\.\d\d s\s+\d+\s+\d+\s+\d+%\s*$`)
		if !row.MatchString(text) {
			t.Errorf("no row for %s in:\n%s", s.Policy, text)
		}
	}
	if len(sums) != 2 || sums[0].Requests != sums[1].Requests {
		t.Errorf("the policies did not get the same requests: %+v", sums)
	}
	if n := strings.Count(text, " -> "); n != sums[0].Requests+sums[1].Requests {
		t.Errorf("%d requests were shown; want %d", n, sums[0].Requests+sums[1].Requests)
	}
	if strings.Contains(text, "\x1b") {
		t.Error("colours without a terminal")
	}
	tie := regexp.MustCompile(`cost (\d+), [a-z]+-\d (\d+)(.*)`)
	for _, m := range tie.FindAllStringSubmatch(text, -1) {
		cost, _ := strconv.Atoi(m[1])
		other, _ := strconv.Atoi(m[2])
		if said := strings.Contains(m[3], "near tie: its home"); other < cost && !said || other > cost && said {
			t.Errorf("%s", m[0])
		}
	}
	for _, want := range []string{
		"its turn", "cost ", "llama-1", "qwen-1", "TTFT mean", "preemptions  ", "adapter loads  ", "sent at", "less is better",
		"Where it comes from, auto against round_robin: ", "kvgate demo --policy least_requests,auto", "Near tie: its home: of",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
}

// Some requests are shown by default, all if asked for, and lines are whole where there is no terminal.
func TestDemoShowsSomeRequests(t *testing.T) {
	t.Parallel()
	f := func(o Options, least, most int) {
		t.Helper()
		var out screen
		o.Out, o.Length, o.PerSecond, o.Policies = &out, 500*time.Millisecond, 50, []string{"auto"}
		sums, err := Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if most == 0 {
			least, most = sums[0].Requests, sums[0].Requests
		}
		if n := strings.Count(out.String(), " -> "); n < least || n > most {
			t.Errorf("%+v: %d of %d requests were shown; want %d to %d", o, n, sums[0].Requests, least, most)
		}
		if cut := strings.Contains(out.String(), "…"); cut != (o.Width > 0) {
			t.Errorf("%+v: lines cut: %v in\n%s", o, cut, out.String())
		}
	}
	f(Options{}, 10, shown)
	f(Options{Verbose: true, Width: 60}, 0, 0)
}

func TestKeepStaysUp(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out screen
	done := make(chan error, 1)
	go func() {
		_, err := Run(ctx, Options{
			Out: &out, Color: true, Length: 300 * time.Millisecond, PerSecond: 10, Policies: []string{"auto"}, Keep: true,
			Listen: "127.0.0.1:0", AdminAddr: "127.0.0.1:0", Self: "./kvgate",
		})
		done <- err
	}()
	models := regexp.MustCompile(`curl -s (http://127\.0\.0\.1:\d+/v1/models)(?s:.*)\./kvgate top --admin http://127\.0\.0\.1:\d+\n(?s:.*)http://127\.0\.0\.1:\d+/dashboard/\n`)
	var url string
	for deadline := time.Now().Add(30 * time.Second); url == ""; time.Sleep(10 * time.Millisecond) {
		if m := models.FindStringSubmatch(out.String()); m != nil {
			url = m[1]
		} else if time.Now().After(deadline) {
			t.Fatalf("no commands to try in:\n%s", out.String())
		}
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(url)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("%s: status %d", url, resp.StatusCode)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not stop")
	}
}

// The same seed is the same traffic, or the comparison would not be fair.
func TestTrafficIsReproducible(t *testing.T) {
	a, b := calls(7, 5*time.Second, 5), calls(7, 5*time.Second, 5)
	if len(a) < 10 || len(a) != len(b) {
		t.Fatalf("%d and %d calls", len(a), len(b))
	}
	for i := range a {
		if a[i].at != b[i].at || !bytes.Equal(a[i].body, b[i].body) {
			t.Fatalf("call %d differs", i)
		}
	}
}
