package kubernetes

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
	"sigs.k8s.io/yaml"
)

var (
	binary = flag.String("kvgate", "../../kvgate", "the binary under test")
	rounds = flag.Int("rounds", 50, "pods whose way from ready to the first request is measured")
)

// inside marks the copy of this test that runs in the network namespace.
const inside = "KVGATE_TEST_NETWORK_NAMESPACE"

// A published is a file of a published module.
type published struct{ module, sum, file string }

// CRDs are taken from their published modules.
var (
	inferenceCRD = published{
		"sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070=",
		"config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
	}
	otherCRDs = []published{
		{
			"github.com/prometheus-operator/prometheus-operator@v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
			"example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
		},
		{
			"github.com/prometheus-operator/prometheus-operator@v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
			"example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
		},
		{
			"sigs.k8s.io/gateway-api@v1.6.3", "h1:lKpJa5bGlraC/QeACvCpsHLdmO6y0iKfzVl6gzaFEYc=",
			"config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
		},
		{
			"github.com/kedacore/keda/v2@v2.21.0", "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
			"config/crd/bases/keda.sh_scaledobjects.yaml",
		},
	}
)

// api is the cluster that all tests share.
var api *cluster

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	code := 1
	if os.Getenv(inside) == "" {
		code, err = outside()
	} else if api, err = startCluster(); err == nil {
		code = m.Run()
		api.stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/kubernetes:", err)
		code = 1
	}
	os.Exit(code)
}

// outside prepares what needs the network, and runs this test again in a network namespace of its own.
func outside() (int, error) {
	klog.LogToStderr(false)
	if _, err := exec.LookPath("etcd"); err != nil {
		return 1, errors.New("etcd is not installed: apt-get install etcd-server, or put an etcd 3.4 or newer into PATH")
	}
	kvgate, err := filepath.Abs(*binary)
	if err == nil {
		_, err = os.Stat(kvgate)
	}
	if err != nil {
		return 1, fmt.Errorf("the binary under test: %w: run make build", err)
	}
	server, err := buildAPIServer()
	if err != nil {
		return 1, err
	}
	crd, err := inferenceCRD.download()
	if err != nil {
		return 1, err
	}
	var crds []string
	for _, p := range append(otherCRDs, inferenceCRD) {
		file, err := p.download()
		if err != nil {
			return 1, err
		}
		crds = append(crds, file)
	}
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	c := exec.Command(self, os.Args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = nil, os.Stdout, os.Stderr
	c.Env = append(os.Environ(), inside+"=1", "KVGATE_BINARY="+kvgate, "KUBE_APISERVER="+server, "INFERENCE_CRD="+crd, "TEST_CRDS="+strings.Join(crds, string(os.PathListSeparator)))
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := c.Start(); err != nil {
		return 1, fmt.Errorf("a user and network namespace cannot be made: %w: this takes Linux with unprivileged user namespaces, or root", err)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		for s := range signals {
			c.Process.Signal(s)
		}
	}()
	if err := c.Wait(); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 {
			return exit.ExitCode(), nil
		}
		return 1, err
	}
	return 0, nil
}

// buildAPIServer builds a kube-apiserver of the version in go.mod, once for all runs.
func buildAPIServer() (string, error) {
	version, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, "kvgate-test", "kube-apiserver-"+strings.TrimSpace(string(version)))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	began := time.Now()
	fmt.Printf("building %s from the module proxy, once; this takes about ten minutes of CPU\n", filepath.Base(path))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	partial := fmt.Sprintf("%s.%d", path, os.Getpid())
	defer os.Remove(partial)
	c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", partial, "k8s.io/kubernetes/cmd/kube-apiserver")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	c.Stderr = os.Stderr
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("building kube-apiserver: %w", err)
	}
	fmt.Printf("built within %v\n", time.Since(began).Round(time.Second))
	return path, os.Rename(partial, path)
}

// download returns the file's path.
func (p published) download() (string, error) {
	c := exec.Command("go", "mod", "download", "-json", p.module)
	c.Dir = os.TempDir() // outside of this module, whose requirements it must not change
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("go mod download %s: %w: %s", p.module, err, out)
	}
	var m struct{ Dir, Sum string }
	if err := json.Unmarshal(out, &m); err != nil {
		return "", err
	}
	if m.Sum != p.sum {
		return "", fmt.Errorf("%s has the checksum %s; want %s", p.module, m.Sum, p.sum)
	}
	return filepath.Join(m.Dir, p.file), nil
}

// podRange are the addresses of pods: all of them are this machine's own.
const podRange = "10.244."

// bringUp makes loopback and the pods' addresses work in a new network namespace, and gives the new mount namespace a /run of
// its own, where pods find their credentials.
func bringUp() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mounts: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("/run: %w", err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("lo up: %w", err)
	}
	for _, a := range []struct {
		request uint
		ip      []byte
	}{{unix.SIOCSIFADDR, []byte{10, 244, 0, 1}}, {unix.SIOCSIFNETMASK, []byte{255, 255, 0, 0}}} {
		alias, err := unix.NewIfreq("lo:1")
		if err == nil {
			err = alias.SetInet4Addr(a.ip)
		}
		if err == nil {
			err = unix.IoctlIfreq(fd, a.request, alias)
		}
		if err != nil {
			return fmt.Errorf("addresses of pods: %w", err)
		}
	}
	return nil
}

const (
	etcdURL = "http://127.0.0.1:2379"
	apiURL  = "https://127.0.0.1:6443"
)

type cluster struct {
	dir    string
	etcd   *exec.Cmd
	server *exec.Cmd

	serverEnded chan struct{} // closed then
	adminToken  string
	rest        *rest.Config
	client      *clientset.Clientset
	dynamic     dynamic.Interface
	cancel      context.CancelFunc
	kubeconfig  string // of the service account kvgate
	nextPort    int
}

func startCluster() (_ *cluster, err error) {
	klog.LogToStderr(false)
	go starter()
	if err := bringUp(); err != nil {
		return nil, err
	}
	c := &cluster{nextPort: 20000, adminToken: rand.Text()}
	if c.dir, err = os.MkdirTemp("", "kvgate-kubernetes-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	if log, err := os.Create(filepath.Join(c.dir, "controller.log")); err == nil {
		klog.SetOutput(log)
	}
	if err := c.files(); err != nil {
		return nil, err
	}
	c.etcd = process("etcd", "--data-dir", filepath.Join(c.dir, "etcd"), "--listen-client-urls", etcdURL, "--advertise-client-urls", etcdURL,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--unsafe-no-fsync")
	if err := start(c.logTo(c.etcd, "etcd.log")); err != nil {
		return nil, err
	}
	if err := c.startServer(); err != nil {
		return nil, err
	}
	c.rest = &rest.Config{Host: apiURL, BearerToken: c.adminToken, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(c.dir, "apiserver.crt")}}
	if c.client, err = clientset.NewForConfig(c.rest); err != nil {
		return nil, err
	}
	if c.dynamic, err = dynamic.NewForConfig(c.rest); err != nil {
		return nil, err
	}
	return c, c.populate()
}

// files writes keys and tokens, made for this run.
func (c *cluster) files() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{
		"sa.key":     pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		"sa.pub":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"tokens.csv": []byte(c.adminToken + `,admin,admin,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(filepath.Join(c.dir, name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func process(name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// starts are processes to be started by a thread that lives as long as the test: Linux sends Pdeathsig when the thread
// that started a process ends, not the process of that thread, and the runtime ends threads as it likes.
var starts = make(chan func())

func starter() {
	runtime.LockOSThread()
	for f := range starts {
		f()
	}
}

func start(c *exec.Cmd) error {
	done := make(chan error)
	starts <- func() { done <- c.Start() }
	return <-done
}

func (c *cluster) logTo(cmd *exec.Cmd, name string) *exec.Cmd {
	f, err := os.OpenFile(filepath.Join(c.dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		cmd.Stdout, cmd.Stderr = f, f
	}
	return cmd
}

func (c *cluster) startServer() error {
	file := func(name string) string { return filepath.Join(c.dir, name) }
	c.server = process(os.Getenv("KUBE_APISERVER"), "--etcd-servers", etcdURL, "--bind-address=127.0.0.1", "--secure-port=6443", "--advertise-address="+podRange+"0.1",
		"--endpoint-reconciler-type=none", "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
		"--token-auth-file", file("tokens.csv"), "--cert-dir", c.dir, "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-signing-key-file", file("sa.key"),
		"--service-account-key-file", file("sa.pub"))
	if err := start(c.logTo(c.server, "apiserver.log")); err != nil {
		return err
	}
	ended := make(chan struct{})
	c.serverEnded = ended
	go func(server *exec.Cmd) {
		err := server.Wait()
		fmt.Fprintln(server.Stderr, "ended:", err)
		close(ended)
	}(c.server)
	hc, err := rest.HTTPClientFor(&rest.Config{BearerToken: c.adminToken, TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
	if err != nil {
		return err
	}
	defer hc.CloseIdleConnections()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline, over := time.After(2*time.Minute), false; !over; {
		select {
		case <-tick.C:
		case <-ended:
			over = true
		case <-deadline:
			over = true
		}
		resp, err := hc.Get(apiURL + "/readyz")
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
	}
	log, _ := os.ReadFile(file("apiserver.log"))
	return fmt.Errorf("kube-apiserver does not become ready:\n%s", log[max(0, len(log)-4000):])
}

// killServer ends the API server without a word, as a lost node does.
func (c *cluster) killServer() {
	c.server.Process.Kill()
	<-c.serverEnded
}

// populate makes what all tests need: the service account with its manifest, the CRD, and the EndpointSlice controller.
func (c *cluster) populate() error {
	ctx := context.Background()
	if err := c.namespace("kvgate"); err != nil {
		return err
	}
	if err := c.apply("kvgate", "../../deploy/rbac/serviceaccount.yaml"); err != nil {
		return err
	}
	token, err := c.client.CoreV1().ServiceAccounts("kvgate").CreateToken(ctx, "kvgate", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token of the service account: %w", err)
	}
	c.kubeconfig = filepath.Join(c.dir, "kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: kvgate, namespace: kvgate}}]
clusters: [{name: test, cluster: {server: %q, certificate-authority: apiserver.crt}}]
users: [{name: kvgate, user: {token: %q}}]
`, apiURL, token.Status.Token)
	if err := os.WriteFile(c.kubeconfig, []byte(text), 0o600); err != nil {
		return err
	}

	// The controller wants to know of pods' nodes.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	if _, err := c.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	run, cancel := context.WithCancel(ctx)
	c.cancel = cancel
	f := informers.NewSharedInformerFactory(c.client, 0)
	controller := endpointslice.NewController(run, f.Core().V1().Pods(), f.Core().V1().Services(), f.Core().V1().Nodes(), f.Discovery().V1().EndpointSlices(),
		100, c.client, 0)
	f.Start(run.Done())
	go controller.Run(run, 5)
	return nil
}

func (c *cluster) stop() {
	if c.cancel != nil {
		c.cancel()
	}
	if c.serverEnded != nil {
		c.killServer()
	}
	if c.etcd != nil && c.etcd.Process != nil {
		c.etcd.Process.Kill()
		c.etcd.Wait()
	}
	if os.Getenv("KVGATE_TEST_KEEP") == "" {
		os.RemoveAll(c.dir)
	}
}

func (c *cluster) namespace(name string) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := c.client.CoreV1().Namespaces().Create(context.Background(), ns, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	return nil
}

// resources of the manifests that are applied.
var resources = map[string]schema.GroupVersionResource{
	"ServiceAccount":           {Version: "v1", Resource: "serviceaccounts"},
	"Role":                     {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
	"RoleBinding":              {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"},
	"CustomResourceDefinition": {Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
	"InferencePool":            {Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"},
}

// apply creates what a manifest holds.
func (c *cluster) apply(namespace, file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return c.applyText(namespace, string(data))
}

func (c *cluster) applyText(namespace, text string) error {
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(doc), &o.Object); err != nil {
			return err
		}
		if len(o.Object) == 0 {
			continue
		}
		r, known := resources[o.GetKind()]
		if !known {
			return fmt.Errorf("kind %q is not applied here", o.GetKind())
		}
		var to dynamic.ResourceInterface = c.dynamic.Resource(r)
		if o.GetKind() != "CustomResourceDefinition" {
			to = c.dynamic.Resource(r).Namespace(namespace)
		}
		_, err := to.Apply(context.Background(), o.GetName(), &o, metav1.ApplyOptions{FieldManager: "test", Force: true})
		if err != nil {
			return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	return nil
}

// newNamespace makes a namespace that the service account of kvgate may read.
func newNamespace(t *testing.T, name string) string {
	t.Helper()
	must(t, api.namespace(name))
	must(t, api.apply(name, "../../deploy/rbac/role.yaml"))
	must(t, api.apply(name, "../../deploy/rbac/rolebinding.yaml"))
	return name
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type podOptions struct {
	annotations map[string]string
	port        int32 // 8000
	ready       bool
}

// createPod makes a pod as the scheduler and a kubelet would.
func createPod(t testing.TB, namespace, name, ip string, o podOptions) *corev1.Pod {
	t.Helper()
	if o.port == 0 {
		o.port = 8000
	}
	grace := int64(30)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{"app": "llama"}, Annotations: o.annotations},
		Spec: corev1.PodSpec{
			NodeName: "node-1", TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "server", Image: "example/vllm", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: o.port}}}},
		},
	}
	p, err := api.client.CoreV1().Pods(namespace).Create(context.Background(), p, metav1.CreateOptions{})
	must(t, err)
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{
		{Type: corev1.PodReady, Status: conditionStatus(o.ready)},
	}}
	p, err = api.client.CoreV1().Pods(namespace).UpdateStatus(context.Background(), p, metav1.UpdateOptions{})
	must(t, err)
	return p
}

func conditionStatus(b bool) corev1.ConditionStatus {
	if b {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}

func setReady(t testing.TB, p *corev1.Pod, ready bool) {
	t.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, conditionStatus(ready))
	_, err := api.client.CoreV1().Pods(p.Namespace).Patch(context.Background(), p.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	must(t, err)
}

// terminate asks for a pod's end, as kubectl delete does: it lingers until gone is called, as a kubelet would.
func terminate(t testing.TB, p *corev1.Pod) {
	t.Helper()
	must(t, api.client.CoreV1().Pods(p.Namespace).Delete(context.Background(), p.Name, metav1.DeleteOptions{}))
}

func gone(t testing.TB, p *corev1.Pod) {
	t.Helper()
	now := int64(0)
	must(t, api.client.CoreV1().Pods(p.Namespace).Delete(context.Background(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
}

func createService(t *testing.T, namespace string, ports ...corev1.ServicePort) {
	t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "llama", Namespace: namespace}}
	s.Spec.Selector, s.Spec.Ports = map[string]string{"app": "llama"}, ports
	_, err := api.client.CoreV1().Services(namespace).Create(context.Background(), s, metav1.CreateOptions{})
	must(t, err)
}
