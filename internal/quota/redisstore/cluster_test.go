package redisstore

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"kvgate/internal/quota"
)

// A fleet is several servers of this machine's, on loopback ports.
type fleet struct {
	t     testing.TB
	bin   string
	dir   string
	addrs []string
}

func newFleet(t testing.TB) *fleet {
	t.Helper()
	return &fleet{t: t, bin: binary(t), dir: t.TempDir()}
}

// start starts a server with these arguments and returns its client.
func (f *fleet) start(password string, args ...string) *redis.Client {
	f.t.Helper()
	var cmd *exec.Cmd
	var addr string
	for range 10 { // a port may be taken meanwhile
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			f.t.Fatal(err)
		}
		port := ln.Addr().(*net.TCPAddr).Port
		ln.Close()
		if port > 55000 { // a cluster's servers talk at 10,000 above
			port -= 20000
		}
		addr = fmt.Sprintf("127.0.0.1:%d", port)
		dir := filepath.Join(f.dir, fmt.Sprint(port))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			f.t.Fatal(err)
		}
		if strings.HasSuffix(args[0], ".conf") {
			if err := os.WriteFile(filepath.Join(dir, "s.conf"), []byte(args[1]), 0o600); err != nil {
				f.t.Fatal(err)
			}
			cmd = exec.Command(f.bin, filepath.Join(dir, "s.conf"), "--sentinel", "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", dir)
		} else {
			cmd = exec.Command(f.bin, append([]string{"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir}, args...)...)
		}
		if err := cmd.Start(); err != nil {
			f.t.Fatal(err)
		}
		client := redis.NewClient(&redis.Options{Addr: addr, Password: password, MaxRetries: -1})
		gone := make(chan struct{})
		go func() { _ = cmd.Wait(); close(gone) }()
		up := false
		for end := time.Now().Add(20 * time.Second); !up && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			select {
			case <-gone:
				end = time.Now()
			default:
				up = client.Ping(context.Background()).Err() == nil
			}
		}
		if up {
			f.addrs = append(f.addrs, addr)
			f.t.Cleanup(func() {
				_ = client.Close()
				_ = cmd.Process.Kill()
				<-gone
			})
			return client
		}
		_ = client.Close()
		_ = cmd.Process.Kill()
		<-gone
	}
	f.t.Fatal("no server came up")
	return nil
}

func (f *fleet) store(o Options) *Store {
	f.t.Helper()
	o.Timeout, o.Prefix = 5*time.Second, "kvgate:" // this machine may be busy
	st, err := New(o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(st.Close)
	return st
}

// counts checks that two gateways share what many tenants use, of several limits at once.
func counts(t *testing.T, a, b *Store) {
	t.Helper()
	limits := []quota.Limit{limit(quota.Requests, 4), limit(quota.TotalTokens, 1000)}
	limits[1].Window = 2 * time.Hour
	one, two := quota.New(quota.Options{Limits: limits, Store: a, Closed: true}), quota.New(quota.Options{Limits: limits, Store: b, Closed: true})
	var ch quota.Charge
	for i := range 40 {
		tenant := fmt.Sprintf("tenant {%d}", i)
		for k, l := range []*quota.Limiter{one, two, one, two} {
			if r := l.Take(&ch, nil, tenant, llama, quota.Cost{Input: 100}, now()); r != nil {
				t.Fatalf("%s, %d: %v", tenant, k, r)
			}
			ch.Settle(quota.Cost{Input: 90}, true, now())
		}
		if r := two.Take(&ch, nil, tenant, llama, quota.Cost{Input: 100}, now()); r == nil || r.Kind != quota.Requests {
			t.Fatalf("%s: a fifth request: %v", tenant, r)
		}
		ch.Reset()
	}
	eventually(t, "corrections arrive", func() bool {
		states, err := two.Look(nil, "tenant {0}", llama, quota.Cost{}, now())
		return err == nil && len(states) == 2 && states[1].Used >= 355 && states[1].Used <= 361
	})
	if n := a.lost.Load() + b.lost.Load(); n != 0 {
		t.Errorf("%d corrections were lost", n)
	}
}

// On a cluster all that a request is charged to is on one server, however many there are.
func TestCluster(t *testing.T) {
	f := newFleet(t)
	ctx := context.Background()
	var nodes []*redis.Client
	for i := range 3 {
		c := f.start("planted", "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--requirepass", "planted", "--masterauth", "planted")
		nodes = append(nodes, c)
		if err := c.ClusterAddSlotsRange(ctx, i*5461, min((i+1)*5461-1+i/2*2, 16383)).Err(); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			host, port, _ := net.SplitHostPort(f.addrs[0])
			if err := c.ClusterMeet(ctx, host, port).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range nodes {
		eventually(t, "the cluster is complete", func() bool {
			info, err := c.ClusterInfo(ctx).Result()
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		})
	}
	o := Options{Addresses: f.addrs[:1], Password: "planted"}
	counts(t, f.store(o), f.store(o))
	for i, c := range nodes {
		if n := c.DBSize(ctx).Val(); n == 0 {
			t.Errorf("node %d has nothing: the cluster is not used", i)
		}
	}
	o.Password = "wrong"
	st := f.store(o)
	l := quota.New(quota.Options{Limits: []quota.Limit{limit(quota.Requests, 4)}, Store: st, Closed: true})
	var ch quota.Charge
	if r := l.Take(&ch, nil, "a", llama, quota.Cost{}, now()); r == nil || !r.Unchecked {
		t.Errorf("with a wrong password: %v", r)
	}
}

// Sentinels say which server it is.
func TestSentinel(t *testing.T) {
	f := newFleet(t)
	f.start("planted", "--requirepass", "planted")
	host, port, _ := net.SplitHostPort(f.addrs[0])
	f.start("", "s.conf", fmt.Sprintf("sentinel monitor limits %s %s 1\nsentinel auth-pass limits planted\n", host, port))
	o := Options{Addresses: f.addrs[1:], Master: "limits", Password: "planted"}
	counts(t, f.store(o), f.store(o))
}
