package httpcases_test

import (
	"context"
	"net"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
	"kvgate/test/httpcases"
)

const (
	headTimeout = time.Second
	bodyTimeout = 2 * time.Second
	idleTimeout = 2 * time.Second
)

// bounds are those of the proxy's timeouts with time for a busy machine.
var bounds = httpcases.Runner{HeaderTimeout: headTimeout + 5*time.Second, BodyTimeout: bodyTimeout + 5*time.Second, IdleTimeout: idleTimeout + 5*time.Second}

// startGate serves model m from one endpoint and returns the gate's address.
func startGate(t *testing.T, endpoint string) string {
	t.Helper()
	start := time.Now()
	now := func() pool.Instant { return pool.Instant(time.Since(start)) + 1 }
	table := pool.NewTable([]pool.PoolSpec{{Name: "p", Models: []string{"m"}}}, pool.Options{})
	if _, _, err := table.SetEndpoints("p", []pool.Spec{{Pool: "p", URL: "http://" + endpoint}}, now()); err != nil {
		t.Fatal(err)
	}
	policy, err := scoring.New(scoring.Config{Name: "auto"})
	if err != nil {
		t.Fatal(err)
	}
	routes, err := proxy.NewRoutes([]proxy.PoolOptions{{
		Name: "p", Policy: policy,
		Timeouts: proxy.Timeouts{Connect: 2 * time.Second, FirstToken: 20 * time.Second, Idle: 20 * time.Second, Total: time.Minute},
	}})
	if err != nil {
		t.Fatal(err)
	}
	h, err := proxy.New(proxy.Options{Table: table, Routes: routes, Now: now, Log: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	s, err := proxy.NewServer(h, proxy.ServerOptions{
		HeaderTimeout: headTimeout, BodyTimeout: bodyTimeout, KeepAlive: idleTimeout, DrainTimeout: 5 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		s.Shutdown(ctx)
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		h.Close()
	})
	return ln.Addr().String()
}

// Every case, the slow ones included, through kvgate's data path.
func TestHTTPCases(t *testing.T) {
	const all = 213
	if passed, failed := httpcases.Play(t, httpcases.Options{Runner: bounds}, startGate); passed+failed != all {
		t.Errorf("%d cases were played; there are %d", passed+failed, all)
	}
}
