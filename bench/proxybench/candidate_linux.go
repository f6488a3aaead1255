package proxybench

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	_ "embed"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"text/template"
	"time"
)

var (
	//go:embed nginx.conf.tmpl
	nginxConf string
	//go:embed haproxy.cfg.tmpl
	haproxyConf string
	//go:embed kvgate.yaml.tmpl
	kvgateConf string
)

// A running candidate.
type running struct {
	candidate
	process *process // nil: direct
	addr    netip.AddrPort
	admin   string // kvgate's admin listener
}

func (r *running) stop() {
	if r.process != nil {
		r.process.stop()
	}
}

// errAbsent says that a candidate isn't installed.
var errAbsent = errors.New("not installed")

// confData is what the configurations are made of.
type confData struct {
	Dir, Listen, Admin, Server, AccessLog string
	Certificate, Key, Bundle              string
	Servers                               []string
	Model                                 string
	Scrape, Whole                         bool
}

// start starts a candidate and waits until it serves.
func (b *bench) start(c candidate, s *Scenario) (*running, error) {
	r := &running{candidate: c}
	if c.name == direct {
		r.addr = b.engine.addrs[0]
		return r, nil
	}
	dir, err := os.MkdirTemp(b.dir, "candidate-")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	r.addr = ports[0]
	d := confData{Dir: dir, Listen: r.addr.String(), Admin: ports[1].String(), Server: b.engine.addrs[0].String(), AccessLog: "off", Model: modelName, Scrape: s.Scrape, Whole: c.whole}
	if c.accessLog {
		d.AccessLog = "/dev/null"
	}
	for _, a := range b.engine.addrs[:max(1, c.endpoints)] {
		d.Servers = append(d.Servers, a.String())
	}
	if s.TLS {
		d.Certificate, d.Key, d.Bundle = filepath.Join(b.dir, "tls.crt"), filepath.Join(b.dir, "tls.key"), filepath.Join(b.dir, "tls.pem")
	}
	var cmd *exec.Cmd
	switch c.name {
	case nginx, nginxLog, nginxWhole:
		cmd, err = packaged("nginx", nginxConf, d, func(conf string) []string {
			return []string{"-p", dir, "-e", filepath.Join(dir, "start.log"), "-c", conf}
		})
	case haproxy:
		cmd, err = packaged("haproxy", haproxyConf, d, func(conf string) []string { return []string{"-db", "-f", conf} })
	case reverseProxy, fastHTTP:
		args := append(b.o.Self[1:len(b.o.Self):len(b.o.Self)], "bench", "proxy-small", strings.ToLower(c.name), d.Listen, d.Server)
		if s.TLS {
			args = append(args, d.Certificate, d.Key)
		}
		cmd = exec.Command(b.o.Self[0], args...)
	default:
		r.admin = d.Admin
		var conf string
		if conf, err = writeConf(kvgateConf, d, "kvgate.yaml"); err == nil {
			args := append(b.o.Self[1:len(b.o.Self):len(b.o.Self)], "serve", "-c", conf)
			cmd = exec.Command(b.o.Self[0], args...)
			if c.other {
				cmd = exec.Command(b.o.Against, "serve", "-c", conf)
			}
		}
	}
	if err != nil {
		return nil, err
	}
	on := b.proxyCPUs
	if c.cores > 1 {
		on = b.allCPUs
	}
	if r.process, err = startProcess(cmd, dir, "out", on, b.loadCPUs); err != nil {
		return nil, err
	}
	if err := b.engine.runWhile(func() error { return r.ready() }); err != nil {
		said := r.process.said()
		r.stop()
		return nil, fmt.Errorf("%s: %w; it said: %s", c.name, err, said)
	}
	r.process.settle()
	return r, nil
}

// packaged is the command that runs a proxy that is installed, or errAbsent.
func packaged(program, conf string, d confData, args func(conf string) []string) (*exec.Cmd, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/" + program); err != nil {
			return nil, errAbsent
		}
	}
	file, err := writeConf(conf, d, program+".conf")
	if err != nil {
		return nil, err
	}
	return exec.Command(path, args(file)...), nil
}

func writeConf(text string, d confData, name string) (string, error) {
	t, err := template.New(name).Parse(text)
	if err != nil {
		return "", err
	}
	file := filepath.Join(d.Dir, name)
	f, err := os.Create(file)
	if err != nil {
		return "", err
	}
	return file, errors.Join(t.Execute(f, d), f.Close())
}

// ready waits until the candidate accepts connections, and kvgate until it knows its endpoints.
func (r *running) ready() error {
	end := time.Now().Add(30 * time.Second)
	for time.Now().Before(end) {
		if err, gone := r.process.exited(); gone {
			return fmt.Errorf("it has ended: %w", err)
		}
		if r.up() {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return errors.New("it does not serve after 30 s")
}

func (r *running) up() bool {
	if r.admin != "" {
		resp, err := client.Get("http://" + r.admin + "/-/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			return false
		}
	}
	c, err := net.DialTimeout("tcp", r.addr.String(), time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

var client = &http.Client{Timeout: 20 * time.Second}

// runtimeNumbers are what kvgate says of its own memory management, cumulative.
type runtimeNumbers struct{ mallocs, gcSeconds, cpuSeconds float64 }

func (r *running) numbers() (n runtimeNumbers, err error) {
	resp, err := client.Get("http://" + r.admin + "/metrics")
	if err != nil {
		return n, err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return n, err
	}
	for _, x := range []struct {
		name string
		to   *float64
	}{{"go_memstats_mallocs_total", &n.mallocs}, {"go_cpu_classes_gc_total_cpu_seconds_total", &n.gcSeconds}, {"process_cpu_seconds_total", &n.cpuSeconds}} {
		m := regexp.MustCompile(`(?m)^` + x.name + ` (\S+)`).FindSubmatch(page)
		if m == nil {
			return n, fmt.Errorf("no %s on the page of metrics", x.name)
		}
		if *x.to, err = strconv.ParseFloat(string(m[1]), 64); err != nil {
			return n, err
		}
	}
	return n, nil
}

// profile saves a page of kvgate's admin listener, by its path below /debug.
func (r *running) profile(path, file string) error {
	resp, err := client.Get("http://" + r.admin + "/debug/" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		return fmt.Errorf("/debug/%s: status %d; want 200", path, resp.StatusCode)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, resp.Body)
	return errors.Join(err, f.Close())
}

// freePorts returns addresses on loopback that nobody listens on.
func freePorts(n int) (out []netip.AddrPort, err error) {
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer ln.Close()
		out = append(out, ln.Addr().(*net.TCPAddr).AddrPort())
	}
	return out, nil
}

// writeCertificate makes a certificate for loopback, which lives as long as the run.
func writeCertificate(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	secret := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "tls.crt"), cert, 0o600),
		os.WriteFile(filepath.Join(dir, "tls.key"), secret, 0o600),
		os.WriteFile(filepath.Join(dir, "tls.pem"), append(cert, secret...), 0o600))
}
