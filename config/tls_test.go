package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writePair makes a certificate and its key, NAME.crt and NAME.key.
func writePair(t *testing.T, dir, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, b := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	writePair(t, dir, "a")
	writePair(t, dir, "b")
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(tls, endpointTLS string, want ...string) {
		t.Helper()
		text := "tls: " + tls + "\npools:\n  - name: p\n    discovery: {static: [\"https://h\"]}\n    tls: " + endpointTLS + "\n"
		c, err := Parse(filepath.Join(dir, "c.yaml"), []byte(text), testOptions())
		got := ""
		if err != nil {
			got = err.Error()
		} else if c.TLS.CertFile != filepath.Join(dir, "a.crt") {
			t.Errorf("cert_file is %q; want it beside the file", c.TLS.CertFile)
		}
		if len(want) == 0 && got != "" {
			t.Error(got)
		}
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("got:\n%s\nwant %q", got, w)
			}
		}
	}
	good := "{cert_file: a.crt, key_file: a.key}"
	f(good, "{ca_file: b.crt, cert_file: b.crt, key_file: b.key}")
	f(good, "{}")
	f("{}", "{}", ":1:6: tls.cert_file: is missing")
	f("{cert_file: a.crt, key_file: b.key}", "{cert_file: b.key, key_file: b.crt}",
		":1:18: tls.cert_file: certificate and key can't be used: private key does not match public key",
		":5:22: pools[0].tls.cert_file: certificate and key can't be used")
	f(good, "{ca_file: a.key}", ":5:20: pools[0].tls.ca_file: holds no certificate")
	f(good, "{ca_file: empty, key_file: a.key}", "pools[0].tls.ca_file: holds no certificate", "pools[0].tls.cert_file: is missing")
	f(good, "{ca_file: none.crt}", "none.crt\" cannot be read: no such file or directory")
}
