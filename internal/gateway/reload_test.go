package gateway

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

// A configMap is a volume as a kubelet makes it: files are links into ..data, which is a link to a directory that is
// replaced as a whole.
type configMap struct {
	t       *testing.T
	dir     string
	version string
}

func newConfigMap(t *testing.T) *configMap { return &configMap{t: t, dir: t.TempDir()} }

// put replaces all files. Their times are the same each time, as those of two quick updates may be.
func (c *configMap) put(files map[string]string) {
	c.t.Helper()
	must := func(err error) {
		c.t.Helper()
		if err != nil {
			c.t.Fatal(err)
		}
	}
	version, err := os.MkdirTemp(c.dir, "..")
	must(err)
	when := time.Unix(1_700_000_000, 0)
	for name, text := range files {
		file := filepath.Join(version, name)
		must(os.WriteFile(file, []byte(text), 0o600))
		must(os.Chtimes(file, when, when))
		if c.version == "" {
			must(os.Symlink(filepath.Join("..data", name), filepath.Join(c.dir, name)))
		}
	}
	must(os.Symlink(filepath.Base(version), filepath.Join(c.dir, "..data_tmp")))
	must(os.Rename(filepath.Join(c.dir, "..data_tmp"), filepath.Join(c.dir, "..data")))
	if c.version != "" {
		must(os.RemoveAll(c.version))
	}
	c.version = version
}

// The configuration is a ConfigMap: a swap of the link is seen at the next look, whatever the file's time and size.
func TestReloadOfAConfigMap(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	m := newConfigMap(t)
	// Of one size, whatever the ports.
	text := func(url string) map[string]string {
		return map[string]string{"config.yaml": header + onePool(url) + "#" + strings.Repeat(" ", 40-len(url)) + "\n"}
	}
	m.put(text(a.URL()))
	g := startFile(t, filepath.Join(m.dir, "config.yaml"), Options{WatchEvery: 200 * time.Millisecond})
	began := time.Now()
	m.put(text(b.URL()))
	eventually(t, "the other endpoint", func() bool {
		rows := g.Table().Load().Rows
		return len(rows) == 1 && rows[0].Endpoint.URL == b.URL()
	})
	if took, full := time.Since(began), fullLookEvery*200*time.Millisecond; took > full*2/3 {
		t.Errorf("seen after %v; want sooner than by the look that comes every %v whatever the file says", took, full)
	}
	// The same content in another file is no news.
	at := g.cfg.Load()
	m.put(text(b.URL()))
	if res, err := g.Reload("test"); err != nil || res.Changed || g.cfg.Load() != at {
		t.Errorf("identical content: %+v, %v", res, err)
	}
}

// pair returns a certificate for 127.0.0.1 and its key, PEM.
func pair(t *testing.T, name string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
}

// Certificate and keys are files of their own: their renewal is a reload although the configuration is as it was, and half
// of one is refused.
func TestReloadOfCertificatesAndKeys(t *testing.T) {
	a := sim(t, modelsim.Options{APIKey: "second-key"})
	m := newConfigMap(t)
	text := header + "tls: {cert_file: tls.crt, key_file: tls.key}\npools:\n  - name: p\n    api_key_file: endpoint.key\n    discovery: {static: [" + a.URL() + "]}\n"
	cert1, key1 := pair(t, "first")
	cert2, key2 := pair(t, "second")
	m.put(map[string]string{"config.yaml": text, "tls.crt": cert1, "tls.key": key1, "endpoint.key": "first-key\n"})
	g := startFile(t, filepath.Join(m.dir, "config.yaml"), Options{WatchEvery: 10 * time.Millisecond})
	shown := func() string {
		c, err := tls.Dial("tcp", g.Addr(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := shown(); got != "first" {
		t.Errorf("certificate %s", got)
	}
	eventually(t, "the list of models is refused", func() bool { return strings.Contains(g.log.String(), "list of models refused") })

	m.put(map[string]string{"config.yaml": text, "tls.crt": cert2, "tls.key": key1, "endpoint.key": "second-key\n"})
	eventually(t, "half of a pair is refused", func() bool { return strings.Contains(g.log.String(), "certificate and key can't be used") })
	if got := shown(); got != "first" {
		t.Errorf("after a refused reload: certificate %s", got)
	}
	if g.cfg.Load().Pools[0].APIKey.Reveal() != "first-key" {
		t.Error("a refused reload has taken over the key")
	}

	m.put(map[string]string{"config.yaml": text, "tls.crt": cert2, "tls.key": key2, "endpoint.key": "second-key\n"})
	eventually(t, "the new certificate", func() bool { return shown() == "second" })
	eventually(t, "the endpoint accepts the new key", func() bool { return strings.Contains(g.log.String(), "list of models accepted again") })
	// Each swap may also be seen half done, since files are read one after the other: that is another refusal, once.
	if n := strings.Count(g.log.String(), `"reload refused`); n < 1 || n > 3 {
		t.Errorf("the refusal is logged %d times; want once, however often it is looked at", n)
	}
	for _, secret := range []string{"first-key", "second-key", "PRIVATE KEY"} {
		if strings.Contains(g.log.String(), secret) {
			t.Errorf("the log holds %q", secret)
		}
	}
}

// A gateway in which requests wait for a first endpoint is ready for them, and not when nothing waits any more.
func TestReadyToWaitForEndpoints(t *testing.T) {
	targets := filepath.Join(t.TempDir(), "targets.yaml")
	if err := os.WriteFile(targets, []byte("[]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	pools := "pools:\n  - name: p\n    models: [m]\n    discovery: {file: " + targets + "}\n"
	g := start(t, pools+"    admission: {wait_for_endpoints: 1m}\n", Options{})
	if code, body := get(t, "http://"+g.AdminAddr()+"/-/ready"); code != 200 {
		t.Errorf("where requests wait: %d %s", code, body)
	}
	g.write(pools)
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	if code, body := get(t, "http://"+g.AdminAddr()+"/-/ready"); code != 503 || !strings.Contains(body, "no endpoint is known") {
		t.Errorf("where none waits: %d %s", code, body)
	}
}
