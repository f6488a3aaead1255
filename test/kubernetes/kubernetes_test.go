package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

var (
	httpPort    = corev1.ServicePort{Name: "http", Port: 80, TargetPort: intstr.FromString("http")}
	metricsPort = corev1.ServicePort{Name: "metrics", Port: 9400, TargetPort: intstr.FromInt32(9400)}
)

// The manifests allow what kvgate does, and nothing else.
func TestLeastPrivilege(t *testing.T) {
	ns := newNamespace(t, "privilege")
	must(t, api.namespace("elsewhere"))
	cfg, err := clientcmd.BuildConfigFromFlags("", api.kubeconfig)
	must(t, err)
	c, err := clientset.NewForConfig(cfg)
	must(t, err)
	ctx := context.Background()
	_, err = c.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
	must(t, err)
	forbidden := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v; want forbidden", what, err)
		}
	}
	_, err = c.CoreV1().Pods("elsewhere").List(ctx, metav1.ListOptions{})
	forbidden("pods of another namespace", err)
	_, err = c.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	forbidden("pods of all namespaces", err)
	_, err = c.CoreV1().Secrets(ns).List(ctx, metav1.ListOptions{})
	forbidden("secrets", err)
	_, err = c.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
	forbidden("config maps", err)
	forbidden("deletion of a pod", c.CoreV1().Pods(ns).Delete(ctx, "x", metav1.DeleteOptions{}))
	_, err = c.CoreV1().Services(ns).Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
	forbidden("a new Service", err)
}

// Four endpoints are replaced one after the other under load, as a Deployment does with maxSurge 1: no client sees an
// error. A request that runs on a terminating pod ends well, while new ones go elsewhere.
func TestRollingUpdate(t *testing.T) {
	ns := newNamespace(t, "rolling")
	createService(t, ns, httpPort, metricsPort)
	type instance struct {
		pod  *corev1.Pod
		stop func(syscall.Signal)
	}
	launch := func(i int) instance {
		ip := fmt.Sprintf("%s1.%d", podRange, i)
		p := createPod(t, ns, fmt.Sprintf("llama-%d", i), ip, podOptions{})
		stop := startServer(t, ip+":8000")
		setReady(t, p, true)
		return instance{p, stop}
	}
	var running []instance
	for i := range 4 {
		running = append(running, launch(i+1))
	}
	g := startGateway(t, "  - {name: p, discovery: {kubernetes: {service: llama, port: http, namespaces: [rolling], kubeconfig: KUBECONFIG}}}\n")
	g.awaitEndpoints("llama-1", "llama-2", "llama-3", "llama-4")

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	var sent atomic.Int64
	var mu sync.Mutex
	var failures []string
	for range 6 {
		wg.Go(func() {
			for ctx.Err() == nil {
				a := g.ask(context.Background(), "llama", 30)
				sent.Add(1)
				if !a.ok() {
					mu.Lock()
					failures = append(failures, fmt.Sprintf("%d %v %.300s", a.status, a.err, a.body))
					mu.Unlock()
				}
			}
		})
	}
	progress := func(n int64) {
		t.Helper()
		from := sent.Load()
		until(t, "requests flow", func() (bool, string) { return sent.Load() >= from+n, fmt.Sprint(sent.Load()) })
	}
	progress(20)
	// A long answer on the first pod, which then has to go.
	long := make(chan answer, 1)
	go func() { long <- g.ask(context.Background(), "llama", 3000) }()
	for i, old := range running {
		launch(i + 5)
		want := []string{}
		for _, r := range running[i:] {
			want = append(want, r.pod.Name)
		}
		for k := range i + 1 {
			want = append(want, fmt.Sprintf("llama-%d", k+5))
		}
		g.awaitEndpoints(want...)
		progress(10)
		terminate(t, old.pod)
		g.awaitEndpoints(slices.DeleteFunc(want, func(s string) bool { return s == old.pod.Name })...)
		progress(10)
		// What a preStop hook and vLLM do: stop once the running requests are through.
		until(t, "the old pod is idle", func() (bool, string) {
			booked, state := g.booked(old.pod.Name)
			return booked == 0, state
		})
		old.stop(syscall.SIGTERM)
		gone(t, old.pod)
	}
	g.awaitEndpoints("llama-5", "llama-6", "llama-7", "llama-8")
	progress(20)
	cancel()
	wg.Wait()
	if a := <-long; !a.ok() {
		t.Errorf("the long answer: %d %v %.300s", a.status, a.err, a.body)
	}
	t.Logf("rolling update of 4 endpoints: %d requests, %d failed", sent.Load(), len(failures))
	if len(failures) > 0 {
		t.Errorf("%d of %d requests failed, first: %s", len(failures), sent.Load(), failures[0])
	}
}

// booked returns the requests that the gateway has on an endpoint; 0 if the endpoint is gone.
func (g *gateway) booked(name string) (int, string) {
	_, text := g.get("/debug/snapshot")
	var s struct {
		Endpoints []struct {
			ID     string
			Booked struct{ Requests int }
		}
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return -1, text
	}
	for _, e := range s.Endpoints {
		if strings.HasSuffix(e.ID, "/"+name) {
			return e.Booked.Requests, fmt.Sprintf("%+v", e)
		}
	}
	return 0, "gone"
}

// The time from a pod's becoming ready to the first request that reaches it.
func TestReadyToFirstRequest(t *testing.T) {
	ns := newNamespace(t, "latency")
	startServer(t, "0.0.0.0:8001")
	createService(t, ns, httpPort)
	for _, kind := range []string{"selector: app=llama", "service: llama"} {
		base := createPod(t, ns, "base", podRange+"2.1", podOptions{port: 8001, ready: true})
		g := startGateway(t, "  - {name: p, policy: round_robin, discovery: {kubernetes: {"+kind+", port: http, namespaces: [latency], kubeconfig: KUBECONFIG}}}\n")
		g.awaitEndpoints("base")
		var took []time.Duration
		for i := range *rounds {
			name := fmt.Sprintf("pod-%d", i)
			p := createPod(t, ns, name, fmt.Sprintf("%s3.%d", podRange, i+1), podOptions{port: 8001})
			until(t, "the pod is known, and not ready", func() (bool, string) {
				for _, e := range g.endpoints() {
					if e.ID == "p/"+name {
						return e.is("not_ready") && len(e.Models) > 0, fmt.Sprintf("%+v", e)
					}
				}
				return false, "none"
			})
			began := time.Now()
			setReady(t, p, true)
			until(t, "a request reaches "+name, func() (bool, string) {
				sent := time.Now()
				a := g.ask(context.Background(), "llama", 1)
				if a.endpoint == name {
					took = append(took, sent.Sub(began))
				}
				return a.endpoint == name, fmt.Sprintf("%d from %s", a.status, a.endpoint)
			})
			gone(t, p)
			g.awaitEndpoints("base")
		}
		slices.Sort(took)
		t.Logf("%s: pod ready to first request over %d pods: median %v, 95th percentile %v, longest %v", kind, len(took),
			took[len(took)/2].Round(time.Millisecond), took[len(took)*95/100].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
		gone(t, base)
	}
}

// A new pod on an address that another one had is another endpoint, also when it has its name too.
func TestAddressReuse(t *testing.T) {
	ns := newNamespace(t, "reuse")
	ip := podRange + "4.1"
	stop := startServer(t, ip+":8000")
	g := startGateway(t, "  - {name: p, discovery: {kubernetes: {selector: app=llama, namespaces: [reuse], kubeconfig: KUBECONFIG}}}\n")
	g.awaitSource("p", 0, `no pod in namespace reuse matches selector "app=llama"`)
	first := createPod(t, ns, "llama-0", ip, podOptions{ready: true})
	g.awaitEndpoints("llama-0")
	if a := g.ask(context.Background(), "llama", 5); !a.ok() {
		t.Fatalf("%+v", a)
	}
	gone(t, first)
	second := createPod(t, ns, "llama-0", ip, podOptions{ready: true, annotations: map[string]string{"kvgate/dialect": "vllm"}})
	added := func() int { return strings.Count(g.logged(), `"endpoint added"`) }
	until(t, "the second pod is an endpoint of its own", func() (bool, string) { return added() == 2, fmt.Sprint(added()) })
	g.awaitEndpoints("llama-0")
	// The object of the second lingers while a third has its address.
	terminate(t, second)
	g.awaitEndpoints()
	createPod(t, ns, "llama-1", ip, podOptions{ready: true})
	g.awaitEndpoints("llama-1")
	if a := g.ask(context.Background(), "llama", 5); !a.ok() || a.endpoint != "llama-1" {
		t.Fatalf("%+v", a)
	}
	stop(syscall.SIGKILL)
}

// An InferencePool, and what is said while its CRD is missing.
func TestInferencePool(t *testing.T) {
	ns := newNamespace(t, "inference")
	startServer(t, podRange+"5.1:8000")
	startServer(t, podRange+"5.1:8001")
	createPod(t, ns, "llama-0", podRange+"5.1", podOptions{ready: true})
	g := startGateway(t, "  - {name: p, discovery: {kubernetes: {inference_pool: llama, namespaces: [inference], kubeconfig: KUBECONFIG}}}\n")
	g.awaitSource("p", 0, "knows no InferencePool (inference.networking.k8s.io/v1): install the CRDs of the Gateway API Inference Extension")
	must(t, api.apply("", os.Getenv("INFERENCE_CRD")))
	g.awaitSource("p", 0, "InferencePool inference/llama does not exist")
	until(t, "an InferencePool is taken", func() (bool, string) {
		err := api.applyText(ns, `
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llama}
spec:
  selector: {matchLabels: {app: llama}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: none, port: {number: 9002}}
`)
		return err == nil, fmt.Sprint(err)
	})
	g.awaitSource("p", 2, "")
	g.awaitEndpoints("llama-0:8000", "llama-0:8001")
	if a := g.ask(context.Background(), "llama", 5); !a.ok() {
		t.Fatalf("%+v", a)
	}
}

// Each mistake has its own words, which name the fix.
func TestMistakesAreSaid(t *testing.T) {
	ns := newNamespace(t, "mistakes")
	createService(t, ns, httpPort, metricsPort)
	createPod(t, ns, "llama-0", podRange+"6.1", podOptions{ready: true, annotations: map[string]string{"kvgate/weight": "heavy"}})
	must(t, api.namespace("closed"))
	pools := ""
	pool := func(name, source string) {
		pools += fmt.Sprintf("  - {name: %s, models: [%s], discovery: {kubernetes: {%s, kubeconfig: KUBECONFIG}}}\n", name, name, source)
	}
	pool("no-service", "service: lama, namespaces: [mistakes]")
	pool("several-ports", "service: llama, namespaces: [mistakes]")
	pool("wrong-port", "service: llama, port: htp, namespaces: [mistakes]")
	pool("no-pods", "selector: app=lama, namespaces: [mistakes]")
	pool("wrong-pod-port", "selector: app=llama, port: htp, namespaces: [mistakes]")
	pool("no-namespace", "selector: app=llama, namespaces: [nowhere]")
	pool("closed", "service: llama, port: http, namespaces: [closed]")
	pool("bad-annotation", "selector: app=llama, namespaces: [mistakes]")
	g := startGateway(t, pools)
	g.awaitSource("no-service", 0, "Service mistakes/lama does not exist: create it, or correct service or namespaces")
	g.awaitSource("several-ports", 0, "Service mistakes/llama has several ports (http 80, metrics 9400): set discovery.kubernetes.port to one of them")
	g.awaitSource("wrong-port", 0, `Service mistakes/llama has no port "htp", only http 80, metrics 9400: correct discovery.kubernetes.port`)
	g.awaitSource("no-pods", 0, `no pod in namespace mistakes matches selector "app=lama"`)
	g.awaitSource("wrong-pod-port", 0, `pod mistakes/llama-0 has no port named "htp", only http 8000; correct discovery.kubernetes.port`)
	g.awaitSource("no-namespace", 0, `pods in namespace nowhere: User "system:serviceaccount:kvgate:kvgate" cannot`)
	g.awaitSource("closed", 0, `services in namespace closed: User "system:serviceaccount:kvgate:kvgate" cannot`)
	g.awaitSource("closed", 0, "apply deploy/rbac in that namespace, if it exists")
	g.awaitSource("bad-annotation", 1, `pod mistakes/llama-0: kvgate/weight "heavy" is not a number above 0, up to 1000; it is ignored`)

	// The fix works without a restart.
	must(t, api.apply("closed", "../../deploy/rbac/role.yaml"))
	must(t, api.apply("closed", "../../deploy/rbac/rolebinding.yaml"))
	g.awaitSource("closed", 0, "Service closed/llama does not exist")
	createService(t, "closed", httpPort)
	g.awaitSource("closed", 0, "Service closed/llama has no endpoints: no pod matches its selector app=llama")
	createPod(t, "closed", "llama-0", podRange+"6.2", podOptions{ready: true})
	g.awaitSource("closed", 1, "")
}

// With the right to see that a namespace does not exist, that is said.
func TestMissingNamespace(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "admin")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}], users: [{name: u, user: {token: %q}}]}`,
		apiURL, filepath.Join(api.dir, "apiserver.crt"), api.adminToken)
	must(t, os.WriteFile(kubeconfig, []byte(text), 0o600))
	g := startGateway(t, fmt.Sprintf("  - {name: p, discovery: {kubernetes: {service: llama, namespaces: [nowhere], kubeconfig: %q}}}\n", kubeconfig))
	g.awaitSource("p", 0, "namespace nowhere does not exist: create it, or correct namespaces")
	if code, text := g.get("/-/ready"); code != http.StatusServiceUnavailable || !strings.Contains(text, "pool p: kubernetes: namespace nowhere does not exist") {
		t.Errorf("/-/ready: %d %s", code, text)
	}
}

// The API server is killed and comes back: requests go on, what has changed since is found out. A gateway that starts
// meanwhile says what it waits for, and serves when it comes.
func TestServerLost(t *testing.T) {
	ns := newNamespace(t, "lost")
	createService(t, ns, httpPort)
	startServer(t, podRange+"7.1:8000")
	startServer(t, podRange+"7.2:8000")
	first := createPod(t, ns, "llama-1", podRange+"7.1", podOptions{ready: true})
	const pools = "  - {name: p, models: [llama], discovery: {kubernetes: {service: llama, namespaces: [lost], kubeconfig: KUBECONFIG}}}\n"
	g := startGateway(t, pools)
	g.awaitEndpoints("llama-1")

	api.killServer()
	restarted := false
	defer func() {
		if !restarted {
			must(t, api.startServer())
		}
	}()
	g.awaitSource("p", 1, "API server https://127.0.0.1:6443 cannot be reached: ")
	for range 20 {
		if a := g.ask(context.Background(), "llama", 5); !a.ok() {
			t.Fatalf("while the API server is away: %+v", a)
		}
	}
	late := startGateway(t, pools)
	late.awaitSource("p", 0, "API server https://127.0.0.1:6443 cannot be reached: ")
	if code, text := late.get("/-/ready"); code != http.StatusServiceUnavailable || !strings.Contains(text, "pool p: kubernetes: API server https://127.0.0.1:6443 cannot be reached") {
		t.Errorf("/-/ready: %d %s", code, text)
	}
	if a := late.ask(context.Background(), "llama", 5); a.status != http.StatusServiceUnavailable {
		t.Errorf("without endpoints: %+v", a)
	}

	must(t, api.startServer())
	restarted = true
	began := time.Now()
	late.awaitEndpoints("llama-1")
	t.Logf("served %v after the API server was ready", time.Since(began).Round(time.Millisecond))
	if a := late.ask(context.Background(), "llama", 5); !a.ok() {
		t.Errorf("after the API server came: %+v", a)
	}
	g.awaitSource("p", 1, "")
	createPod(t, ns, "llama-2", podRange+"7.2", podOptions{ready: true})
	gone(t, first)
	g.awaitEndpoints("llama-2")
	late.awaitEndpoints("llama-2")
}

// A thousand pods: how much memory, how fast a change of all of them, and nothing left behind by ten thousand updates.
func TestThousandPods(t *testing.T) {
	ns := newNamespace(t, "thousand")
	const n = 1000
	each := func(f func(i int)) {
		var wg sync.WaitGroup
		next := atomic.Int64{}
		for range 16 {
			wg.Go(func() {
				for i := int(next.Add(1)); i <= n; i = int(next.Add(1)) {
					f(i - 1)
				}
			})
		}
		wg.Wait()
	}
	pods := make([]*corev1.Pod, n)
	name := func(i int) string { return fmt.Sprintf("llama-%d", i) }
	each(func(i int) {
		pods[i] = createPod(t, ns, name(i), fmt.Sprintf("%s%d.%d", podRange, 100+i/250, i%250+1), podOptions{})
	})
	g := startGateway(t, "  - {name: empty, models: [x], discovery: {kubernetes: {selector: app=none, namespaces: [thousand], kubeconfig: KUBECONFIG}}}\n")
	g.awaitSource("empty", 0, "no pod in namespace thousand matches")
	bare := g.heap()
	g = startGateway(t, "  - {name: p, models: [llama], discovery: {kubernetes: {selector: app=llama, namespaces: [thousand], kubeconfig: KUBECONFIG}}}\n")
	g.awaitSource("p", n, "")
	ready := func(want int) {
		t.Helper()
		until(t, fmt.Sprintf("%d endpoints are ready", want), func() (bool, string) {
			got := 0
			for _, e := range g.endpoints() {
				if !e.is("not_ready") {
					got++
				}
			}
			return got == want, fmt.Sprint(got)
		})
	}
	began := time.Now()
	each(func(i int) { setReady(t, pods[i], true) })
	written := time.Now()
	ready(n)
	t.Logf("%d pods became ready within %v; the gateway had them all %v after the last", n, written.Sub(began).Round(time.Millisecond), time.Since(written).Round(time.Millisecond))

	settle := func() int64 {
		t.Helper()
		ready(n)
		return g.heap()
	}
	before := settle()
	var heaps []float64
	for round := range 10 {
		each(func(i int) {
			patch := fmt.Sprintf(`{"metadata":{"annotations":{"kvgate/weight":"%d"}}}`, round+1)
			_, err := api.client.CoreV1().Pods(ns).Patch(context.Background(), name(i), types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
			if err != nil {
				t.Error(err)
			}
		})
		heaps = append(heaps, mib(settle()))
	}
	after := settle()
	t.Logf("heap without endpoints %.1f MiB, with %d pods %.1f MiB, after %d updates %.1f MiB (after each thousand %.1f); resident %.1f MiB",
		mib(bare), n, mib(before), 10*n, mib(after), heaps, mib(g.rss()))
	if after > before+16<<20 {
		t.Errorf("%d updates have grown the heap from %.1f to %.1f MiB", 10*n, mib(before), mib(after))
	}
	must(t, api.client.CoreV1().Pods(ns).DeleteCollection(context.Background(), metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{}))
	g.awaitSource("p", 0, "no pod in namespace thousand matches")
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }
