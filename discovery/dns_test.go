package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"kvgate/config"
)

// startDNS serves zone, lines of a zone file, on loopback over UDP and TCP. Names in broken answer SERVFAIL.
func startDNS(t *testing.T, zone, broken string) *resolver {
	t.Helper()
	var records []dns.RR
	for line := range strings.Lines(zone) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		rr, err := dns.NewRR(line)
		if err != nil {
			t.Fatal(err)
		}
		records = append(records, rr)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		name := q.Question[0].Name
		found := false
		for _, rr := range records {
			if !strings.EqualFold(rr.Header().Name, name) {
				continue
			}
			found = true
			if rr.Header().Rrtype == q.Question[0].Qtype {
				m.Answer = append(m.Answer, rr)
			}
			if c, ok := rr.(*dns.CNAME); ok {
				m.Answer = append(m.Answer, rr)
				name = c.Target // records of the target follow in the zone
			}
		}
		if !found {
			m.Rcode = dns.RcodeNameError
		}
		if strings.HasPrefix(name, "along.") { // sends addresses along, as authoritative servers do
			for _, rr := range records {
				if rr.Header().Rrtype == dns.TypeA {
					m.Extra = append(m.Extra, rr)
				}
			}
		}
		if broken != "" && name == broken {
			m.Rcode, m.Answer = dns.RcodeServerFailure, nil
		}
		if w.RemoteAddr().Network() == "udp" {
			m.Truncate(answerBytes)
		}
		_ = w.WriteMsg(m)
	})
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", pc.LocalAddr().String())
	if err != nil {
		t.Skip("the port is taken for TCP:", err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait) // after the shutdowns
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: handler}, {Listener: l, Handler: handler}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		wg.Go(func() { _ = s.ActivateAndServe() })
		<-started
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	// The first name server does not answer at all: nothing listens there.
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver 127.0.0.2\nnameserver 127.0.0.1\nsearch ns.svc.test svc.test\noptions ndots:5 timeout:5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(pc.LocalAddr().String())
	return &resolver{confFile: conf, port: port}
}

func TestLookup(t *testing.T) {
	var many strings.Builder
	for i := range 200 {
		fmt.Fprintf(&many, "many.test. 30 IN A 10.1.%d.%d\n", i/100, i%100+1)
	}
	r := startDNS(t, `
llama.ns.svc.test. 30 IN A 10.0.0.1
llama.ns.svc.test. 5 IN A 10.0.0.2
llama.ns.svc.test. 30 IN AAAA 2001:db8::1
six.test. 30 IN AAAA 2001:db8::2
alias.test. 3 IN CNAME llama.ns.svc.test.
text.test. 30 IN TXT "no address"
_http._tcp.srv.test. 20 IN SRV 0 1 8001 llama.ns.svc.test.
_http._tcp.srv.test. 20 IN SRV 0 1 8002 six.test.
_http._tcp.srv.test. 20 IN SRV 1 1 8003 spare.test.
_half._tcp.srv.test. 20 IN SRV 0 1 8001 llama.ns.svc.test.
_half._tcp.srv.test. 20 IN SRV 0 1 8001 gone.test.
_broken._tcp.srv.test. 20 IN SRV 0 1 8001 broken.test.
along.test. 20 IN SRV 0 1 8001 known.test.
known.test. 30 IN A 10.0.0.9
none.test. 20 IN SRV 0 0 0 .
`+many.String(), "broken.test.")

	f := func(typ, name, want string, ttl time.Duration) {
		t.Helper()
		a, err := r.lookup(t.Context(), &config.DNSSource{Name: name, Type: typ, Port: 8000})
		if err != nil {
			t.Errorf("%s %s: %v", typ, name, err)
			return
		}
		var got []string
		for _, addr := range a.addresses {
			got = append(got, addr.String())
		}
		slices.Sort(got)
		if g := strings.Join(got, " "); g != want || want != "" && a.ttl != ttl {
			t.Errorf("%s %s: %s for %v; want %s for %v", typ, name, g, a.ttl, want, ttl)
		}
	}
	fails := func(typ, name, want string) {
		t.Helper()
		a, err := r.lookup(t.Context(), &config.DNSSource{Name: name, Type: typ, Port: 8000})
		if err == nil || !strings.Contains(err.Error(), want) || len(a.addresses) > 0 {
			t.Errorf("%s %s: %v, %v; want %q", typ, name, a, err, want)
		}
	}
	f("a", "llama.ns.svc.test.", "10.0.0.1:8000 10.0.0.2:8000", 5*time.Second)
	f("a", "llama", "10.0.0.1:8000 10.0.0.2:8000", 5*time.Second) // through the search list
	f("a", "llama.ns", "10.0.0.1:8000 10.0.0.2:8000", 5*time.Second)
	f("a", "six.test", "[2001:db8::2]:8000", 30*time.Second)
	f("a", "nothing.test", "", 0)
	f("a", "text.test", "", 0)
	fails("a", "broken.test", "lookup of A broken.test.: name server 127.0.0.1 answers SERVFAIL")
	f("srv", "_http._tcp.srv.test", "10.0.0.1:8001 10.0.0.2:8001 [2001:db8::2]:8002", 5*time.Second)
	f("srv", "along.test", "10.0.0.9:8001", 20*time.Second)
	f("srv", "none.test", "", 0)
	fails("srv", "_half._tcp.srv.test", "names gone.test., which has no addresses")
	fails("srv", "_broken._tcp.srv.test", "SERVFAIL")

	a, err := r.lookup(t.Context(), &config.DNSSource{Name: "many.test", Type: "a", Port: 1}) // truncated over UDP
	if err != nil || len(a.addresses) != 200 {
		t.Errorf("%d addresses, %v", len(a.addresses), err)
	}

	if _, err := (&resolver{confFile: "/nonexistent", port: "53"}).lookup(t.Context(), &config.DNSSource{Name: "x"}); err == nil {
		t.Error("no resolv.conf, no error")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.lookup(ctx, &config.DNSSource{Name: "llama", Type: "a"}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// In virtual time: what answers do to the set.
func TestDNSFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type reply struct {
			hosts string // last bytes of addresses
			ttl   time.Duration
			err   error
		}
		ask := make(chan reply) // unbuffered: a lookup waits for the test
		var asked []time.Time
		s := &dnsSource{config.DNSSource{Name: "x", Scheme: "http", Interval: 10 * time.Second}, func(ctx context.Context, _ *config.DNSSource) (answer, error) {
			now := time.Now()
			select {
			case r := <-ask:
				asked = append(asked, now)
				a := answer{ttl: r.ttl}
				for h := range strings.FieldsSeq(r.hosts) {
					a.addresses = append(a.addresses, netip.MustParseAddrPort("10.0.0."+h+":1"))
				}
				return a, r.err
			case <-ctx.Done():
				return answer{}, ctx.Err()
			}
		}}
		var got []string
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- s.Run(ctx, func(ts []Target, err error) {
				if err != nil {
					got = append(got, "error: "+err.Error())
					return
				}
				got = append(got, "["+strings.ReplaceAll(strings.ReplaceAll(urls(ts), "10.0.0.", ""), ":1", "")+"]")
			})
		}()
		step := func(what string, r reply, want string) {
			t.Helper()
			ask <- r
			synctest.Wait()
			if g := strings.Join(got, " "); g != want {
				t.Errorf("%s: %s; want %s", what, g, want)
			}
			got = nil
		}
		hour := time.Hour
		step("start", reply{"2 1", hour, nil}, "[1,2]")
		step("one is missing", reply{"1", hour, nil}, "[1,2]")
		step("and back", reply{"2", hour, nil}, "[1,2]")
		step("rotates", reply{"3", hour, nil}, "[1,2,3]")
		step("missing 1", reply{"3", hour, nil}, "[2,3]")
		step("missing 2", reply{"3", hour, nil}, "[3]")
		step("a fault", reply{"", 0, errors.New("no route")}, "error: no route")
		start := time.Now()
		for time.Since(start) < 50*time.Second {
			step("empty", reply{}, "error: x has no addresses")
		}
		step("not empty after all", reply{"3", hour, nil}, "[3]")
		start = time.Now()
		for time.Since(start) < 50*time.Second {
			step("empty again", reply{}, "error: x has no addresses")
		}
		for range 3 {
			ask <- reply{}
		}
		synctest.Wait()
		if g := strings.Join(got, " "); !strings.Contains(g, "[] error: x has no addresses") {
			t.Errorf("after a minute: %s", g)
		}
		got = nil
		step("and back", reply{"4", 2 * time.Second, nil}, "[4]")

		// A short TTL is waited for, a long one is not, and none never means at once.
		for _, r := range []struct {
			ttl, want time.Duration
		}{{2 * time.Second, 2 * time.Second}, {0, time.Second}, {hour, 10 * time.Second}} {
			step("ttl", reply{"4", r.ttl, nil}, "[4]")
			step("ttl", reply{"4", r.ttl, nil}, "[4]")
			n := len(asked)
			if pause := asked[n-1].Sub(asked[n-2]); pause < r.want*9/10-time.Millisecond || pause > r.want*11/10+time.Millisecond {
				t.Errorf("TTL %v: asked again after %v", r.ttl, pause)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
