package proxy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/scoring"
)

// Fault 19: a drain lets streams run for its time, then ends each with an error event and a cut, and counts them.
func TestDrain(t *testing.T) {
	streams := 1000
	if testing.Short() {
		streams = 100
	}
	finish := make(chan struct{})
	m := newMock(t, func(c *call) {
		c.sse()
		c.token("a")
		if bytes.Contains(c.body, []byte("finishes")) {
			<-finish
			c.token("b")
			c.finish()
			return
		}
		c.waitClosed(time.Minute)
	})
	g := newGate(t, []*mock{m}, withOptions(func(_ *Options, s *ServerOptions) { s.DrainTimeout = 500 * time.Millisecond }))
	clients := make([]*client, streams)
	for i := range clients {
		body := streamBody
		if i%10 == 0 {
			body = strings.Replace(streamBody, "hello", "finishes", 1)
		}
		clients[i] = g.dial().send(post(chatPath, body))
	}
	eventually(t, "all streams to run", func() bool { return m.requests.Load() == int64(streams) })
	idle := g.dial()
	idle.send(post(chatPath, `{"model":"none"}`)).read()
	var cut, whole atomic.Int64
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			a := c.read()
			switch {
			case a.err == nil && strings.HasSuffix(a.body, "[DONE]\n\n"):
				whole.Add(1)
			case a.err != nil && strings.Contains(a.body, `"code":"draining"`) && !strings.Contains(a.body, "[DONE]"):
				cut.Add(1)
			default:
				t.Errorf("a stream ended with %v: %q", a.err, a.body)
			}
		})
	}
	done := make(chan Drained)
	go func() { done <- g.s.Shutdown(context.Background()) }()
	eventually(t, "the listener to close", func() bool {
		c, err := net.Dial("tcp", g.addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if b, err := idle.br.ReadByte(); err != io.EOF {
		t.Errorf("an idle connection got %q, %v; want its end", b, err)
	}
	close(finish)
	d := <-done
	wg.Wait()
	if int(cut.Load()) != d.Cut || d.Cut != streams-streams/10 || int(whole.Load()) != streams/10 {
		t.Errorf("%+v, %d cut, %d whole", d, cut.Load(), whole.Load())
	}
	for _, r := range g.sink.wait(t, streams+1) {
		if r.Outcome != "ok" && r.Outcome != "draining" && r.Outcome != "model_not_found" {
			t.Fatalf("outcome %s", r.Outcome)
		}
	}
	if err := <-g.served; err != nil {
		t.Error(err)
	}
	g.down = true
	g.h.Close()
	g.booked(0)
}

// While draining, answers close their connections and new requests are told to go elsewhere.
func TestDrainDelay(t *testing.T) {
	m := newMock(t, chat)
	g := newGate(t, []*mock{m})
	g.h.draining.Store(true)
	if a := g.do(plainBody); a.StatusCode != 200 || !a.Close {
		t.Errorf("%d, close %v", a.StatusCode, a.Close)
	}
	g.h.refusing.Store(true)
	if a := g.do(plainBody); a.StatusCode != 503 || !strings.Contains(a.body, `"draining"`) || !a.Close {
		t.Errorf("%d %s, close %v", a.StatusCode, a.body, a.Close)
	}
}

// A reload under load costs no request; those that run keep what they began with.
func TestReloadUnderLoad(t *testing.T) {
	m := newMock(t, func(c *call) { time.Sleep(time.Millisecond); chat(c) })
	g := newGate(t, []*mock{m, newMock(t, m.serve)})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var n atomic.Int64
	for range 8 {
		wg.Go(func() {
			c := g.dial()
			for {
				select {
				case <-stop:
					return
				default:
				}
				if a := c.send(post(chatPath, plainBody)).read(); a.StatusCode != 200 {
					t.Errorf("%d %s", a.StatusCode, a.body)
					return
				}
				n.Add(1)
			}
		})
	}
	for i := range 50 {
		p, err := scoring.New(scoring.Config{Name: []string{"auto", "round_robin"}[i%2]})
		if err != nil {
			t.Fatal(err)
		}
		o := g.o
		o.Policy = p
		r, err := NewRoutes([]PoolOptions{o})
		if err != nil {
			t.Fatal(err)
		}
		g.h.SetRoutes(r)
		g.announce()
		before := n.Load()
		eventually(t, "requests", func() bool { return n.Load() > before+5 })
	}
	close(stop)
	wg.Wait()
	g.booked(0)
}

// certificate makes a CA and a certificate of it for 127.0.0.1.
func certificate(t *testing.T, name string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	ca := x509.NewCertPool()
	ca.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, ca
}

// TLS on both sides, with client certificates towards endpoints, renewal of our own, and a client that goes.
func TestTLS(t *testing.T) {
	endpointCert, endpointCA := certificate(t, "endpoint")
	gateCert, gateCA := certificate(t, "gate")
	renewed, renewedCA := certificate(t, "gate renewed")
	clientCert, clientCA := certificate(t, "gate as client")
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{endpointCert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clientCA})
	if err != nil {
		t.Fatal(err)
	}
	m := startMock(t, ln, func(c *call) {
		if strings.Contains(string(c.body), "wait") {
			c.waitClosed(10 * time.Second)
			return
		}
		chat(c)
	})
	g := newGate(t, []*mock{m},
		withPool(func(o *PoolOptions) {
			o.TLS = &tls.Config{RootCAs: endpointCA, Certificates: []tls.Certificate{clientCert}}
		}),
		withOptions(func(_ *Options, s *ServerOptions) { s.TLS = &tls.Config{Certificates: []tls.Certificate{gateCert}} }))
	dial := func(ca *x509.CertPool) *client {
		t.Helper()
		c, err := tls.Dial("tcp", g.addr, &tls.Config{RootCAs: ca})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second))
		return &client{t, c, newReader(c)}
	}
	c := dial(gateCA)
	for range 3 {
		if a := c.send(post(chatPath, streamBody)).read(); a.StatusCode != 200 || !strings.HasSuffix(a.body, "[DONE]\n\n") {
			t.Fatalf("%d %q", a.StatusCode, a.body)
		}
	}
	if m.conns.Load() != 1 {
		t.Errorf("%d connections to the endpoint; want 1", m.conns.Load())
	}
	if p := m.lastCall().req.Header.Get("X-Forwarded-Proto"); p != "https" {
		t.Errorf("X-Forwarded-Proto %q", p)
	}
	g.s.SetCertificates([]tls.Certificate{renewed})
	if a := c.send(post(chatPath, plainBody)).read(); a.StatusCode != 200 {
		t.Error("a connection from before the renewal broke")
	}
	if a := dial(renewedCA).send(post(chatPath, plainBody)).read(); a.StatusCode != 200 {
		t.Errorf("%d", a.StatusCode)
	}
	before := m.requests.Load()
	gone := dial(renewedCA)
	gone.send(post(chatPath, strings.Replace(plainBody, "hello", "wait", 1)))
	eventually(t, "the request to arrive", func() bool { return m.requests.Load() > before })
	gone.Conn.(*tls.Conn).NetConn().Close()
	select {
	case <-m.closed:
	case <-time.After(10 * time.Second):
		t.Error("the endpoint was not told that the client has gone")
	}
}
