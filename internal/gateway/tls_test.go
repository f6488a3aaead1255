package gateway

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

// writeCertificate makes a certificate for 127.0.0.1 that is its own authority, as NAME.crt and NAME.key in dir.
func writeCertificate(t *testing.T, dir, name, subject string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: subject}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	ca := x509.NewCertPool()
	ca.AddCert(leaf)
	return ca
}

// behindTLS puts TLS that asks for client certificates of an authority before a server, and returns its address.
func behindTLS(t *testing.T, dir, cert string, clients *x509.CertPool, server string) string {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, cert+".crt"), filepath.Join(dir, cert+".key"))
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, NextProtos: []string{"h2", "http/1.1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer in.Close()
				out, err := net.Dial("tcp", server)
				if err != nil {
					t.Error(err)
					return
				}
				defer out.Close()
				wg.Go(func() {
					_, _ = io.Copy(out, in)
					_ = out.(*net.TCPConn).CloseWrite()
				})
				_, _ = io.Copy(in, out)
			})
		}
	})
	return ln.Addr().String()
}

// TLS on both sides, from files: an authority of one's own and a client certificate towards endpoints, scrapes included;
// towards clients HTTP/1.1 alone, and a certificate that a reload renews for new connections, or leaves if the new one is
// broken.
func TestTLSFromFiles(t *testing.T) {
	dir := t.TempDir()
	gateCA := writeCertificate(t, dir, "gate", "gate")
	clientsOfServer := writeCertificate(t, dir, "client", "gate as client")
	writeCertificate(t, dir, "server", "server")
	s := sim(t, modelsim.Options{})
	addr := behindTLS(t, dir, "server", clientsOfServer, s.Addr())
	abs := func(name string) string { return filepath.Join(dir, name) }
	text := fmt.Sprintf("tls: {cert_file: %s, key_file: %s}\n", abs("gate.crt"), abs("gate.key")) + onePool("https://"+addr) +
		fmt.Sprintf("    tls: {ca_file: %s, cert_file: %s, key_file: %s}\n", abs("server.crt"), abs("client.crt"), abs("client.key"))
	g := start(t, text, Options{})

	ask := func(ca *x509.CertPool) (int, string, error) {
		c := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true, ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: ca, NextProtos: []string{"h2", "http/1.1"}},
		}}
		resp, err := c.Post("https://"+g.Addr()+"/v1/chat/completions", "application/json", strings.NewReader(chat(baseModel, true, 3)))
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if resp.ProtoMajor != 1 || resp.TLS.NegotiatedProtocol != "http/1.1" {
			t.Errorf("%s, negotiated %q; want HTTP/1.1", resp.Proto, resp.TLS.NegotiatedProtocol)
		}
		return resp.StatusCode, string(b), err
	}
	good := func(ca *x509.CertPool) {
		t.Helper()
		if code, body, err := ask(ca); code != 200 || err != nil || !strings.HasSuffix(body, "data: [DONE]\n\n") {
			t.Errorf("%d %v %s", code, err, body)
		}
	}
	good(gateCA)
	eventually(t, "a scrape through TLS", func() bool {
		_, page := get(t, "http://"+g.AdminAddr()+"/metrics")
		return strings.Contains(page, `kvgate_endpoint_up{endpoint="p/`+addr+`"} 1`) && strings.Contains(page, `result="ok"`)
	})

	renewedCA := writeCertificate(t, dir, "gate", "gate renewed")
	if res, err := g.Reload("test"); err != nil || !res.Changed {
		t.Fatalf("%+v, %v", res, err)
	}
	good(renewedCA)
	if _, _, err := ask(gateCA); err == nil {
		t.Error("the old certificate is still in use")
	}
	if err := os.WriteFile(abs("gate.key"), []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Reload("test"); err == nil {
		t.Error("a broken key was taken over")
	}
	good(renewedCA)
}
