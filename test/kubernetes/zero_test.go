package kubernetes

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// metric is the value of a series on the metrics page, -1 if it is not there.
func (g *gateway) metric(series string) float64 {
	_, text := g.get("/metrics")
	for line := range strings.SplitSeq(text, "\n") {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			f, err := strconv.ParseFloat(v, 64)
			must(g.t, err)
			return f
		}
	}
	return -1
}

// A pool without any pod: the gateway is ready, a request waits in it, the demand asks for an endpoint as an autoscaler reads
// it, and the request goes on when the first pod is ready.
func TestScaleFromZero(t *testing.T) {
	ns := newNamespace(t, "zero")
	createService(t, ns, httpPort)
	g := startGateway(t, `  - name: p
    models: [llama]
    discovery: {kubernetes: {service: llama, namespaces: [zero], kubeconfig: KUBECONFIG}}
    admission: {wait_for_endpoints: 1m}
`)
	g.awaitSource("p", 0, "no pod matches its selector")
	if code, text := g.get("/-/ready"); code != http.StatusOK {
		t.Errorf("/-/ready: %d %s", code, text)
	}
	if d := g.metric(`kvgate_pool_demand_endpoints{pool="p"}`); d != 0 {
		t.Errorf("demand without requests: %g", d)
	}
	waited := make(chan answer, 1)
	go func() { waited <- g.ask(context.Background(), "llama", 5) }()
	until(t, "the request asks for an endpoint", func() (bool, string) {
		d := g.metric(`kvgate_pool_demand_endpoints{pool="p"}`)
		return d > 0 && g.metric(`kvgate_admission_waiting_requests{class="normal",pool="p"}`) == 1, strconv.FormatFloat(d, 'g', -1, 64)
	})
	startServer(t, podRange+"9.1:8000")
	p := createPod(t, ns, "llama-0", podRange+"9.1", podOptions{})
	g.awaitSource("p", 1, "")
	select {
	case a := <-waited:
		t.Fatalf("the wait ended before the pod was ready: %+v", a)
	case <-time.After(200 * time.Millisecond):
	}
	began := time.Now()
	setReady(t, p, true)
	if a := <-waited; !a.ok() || a.endpoint != "llama-0" {
		t.Errorf("%+v", a)
	}
	t.Logf("answered %v after the first pod became ready", time.Since(began).Round(time.Millisecond))
	until(t, "nothing is asked for any more", func() (bool, string) {
		return g.metric(`kvgate_admission_waiting_requests{class="normal",pool="p"}`) == 0, ""
	})
}
