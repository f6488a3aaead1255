package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kvgate/config"
)

// A fakeAPI lists and watches as an API server does, the parts that informers use. The tests against a real one are in
// test/kubernetes.
type fakeAPI struct {
	t      *testing.T
	addr   string
	server *http.Server

	mu      sync.Mutex
	log     []fakeEvent   // event i made resource version i+1
	grown   chan struct{} // closed and replaced when log grows
	down    chan struct{} // closed when the server goes away
	objects map[string]metav1.Object
	expired int            // watches from versions below are told 410
	deny    map[string]int // status by "verb resource", or by resource
	old     bool           // knows no streaming lists
	lists   int
	watches int
}

type fakeEvent struct {
	path          string
	before, after metav1.Object // nil: it did not exist, or no longer does
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{t: t, grown: make(chan struct{}), objects: make(map[string]metav1.Object), deny: make(map[string]int)}
	f.addr = "127.0.0.1:0"
	f.start()
	t.Cleanup(f.stop)
	return f
}

func (f *fakeAPI) start() {
	l, err := net.Listen("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	f.addr = l.Addr().String()
	f.down = make(chan struct{})
	f.server = &http.Server{Handler: f}
	go f.server.Serve(l)
}

// stop breaks all connections and refuses new ones.
func (f *fakeAPI) stop() {
	select {
	case <-f.down:
	default:
		close(f.down)
		f.server.Close()
	}
}

// config is a source that asks f.
func (f *fakeAPI) config(s config.KubernetesSource) config.KubernetesSource {
	s.Kubeconfig = filepath.Join(f.t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: c, user: u, namespace: models}}],
clusters: [{name: c, cluster: {server: "http://%s"}}], users: [{name: u, user: {token: t}}]}`, f.addr)
	if err := os.WriteFile(s.Kubeconfig, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	s.Scheme = "http"
	return s
}

func resourcePath(o metav1.Object) string {
	prefix := map[string]string{"*v1.Pod": "/api/v1", "*v1.Service": "/api/v1", "*discovery.inferencePool": "/apis/inference.networking.k8s.io/v1"}
	plural := map[string]string{"*v1.Pod": "pods", "*v1.Service": "services", "*discovery.inferencePool": "inferencepools"}
	name := fmt.Sprintf("%T", o)
	if _, ok := o.(*discoveryv1.EndpointSlice); ok {
		return "/apis/discovery.k8s.io/v1/namespaces/" + o.GetNamespace() + "/endpointslices"
	}
	return prefix[name] + "/namespaces/" + o.GetNamespace() + "/" + plural[name]
}

func (f *fakeAPI) put(o metav1.Object) {
	if p, ok := o.(*corev1.Pod); ok {
		p.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
		o = p.DeepCopy()
	}
	switch o := o.(type) {
	case *corev1.Service:
		o.TypeMeta = metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}
	case *discoveryv1.EndpointSlice:
		o.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
	case *inferencePool:
		o.TypeMeta = metav1.TypeMeta{Kind: "InferencePool", APIVersion: inferenceVersion.String()}
	}
	f.change(o, o)
}

func (f *fakeAPI) delete(o metav1.Object) { f.change(o, nil) }

func (f *fakeAPI) change(o, after metav1.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	path := resourcePath(o)
	key := path + "/" + o.GetName()
	o.SetResourceVersion(strconv.Itoa(len(f.log) + 1))
	f.log = append(f.log, fakeEvent{path, f.objects[key], after})
	if after == nil {
		delete(f.objects, key)
	} else {
		f.objects[key] = after
	}
	close(f.grown)
	f.grown = make(chan struct{})
}

func (f *fakeAPI) set(what string, status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deny[what] = status
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	parts := strings.Split(r.URL.Path, "/")
	resource := parts[len(parts)-1]
	verb := "list"
	if q.Get("watch") != "" {
		verb = "watch"
	}
	refuse := func(code int, reason metav1.StatusReason, text string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason, Message: text})
	}
	f.mu.Lock()
	code := max(f.deny[verb+" "+resource], f.deny[resource])
	old, expired, now := f.old, f.expired, len(f.log)
	f.lists += map[string]int{"list": 1}[verb]
	f.watches += map[string]int{"watch": 1}[verb]
	f.mu.Unlock()
	from, _ := strconv.Atoi(q.Get("resourceVersion"))
	switch {
	case code == http.StatusForbidden:
		refuse(code, metav1.StatusReasonForbidden, resource+` is forbidden: User "system:serviceaccount:kvgate:kvgate" cannot `+verb+` resource "`+resource+`"`)
		return
	case code == http.StatusUnauthorized:
		refuse(code, metav1.StatusReasonUnauthorized, "Unauthorized")
		return
	case code == http.StatusNotFound:
		http.Error(w, "404 page not found", code)
		return
	case code != 0:
		refuse(code, metav1.StatusReasonInternalError, "the server is out of sorts")
		return
	case len(parts) == 5 && parts[3] == "namespaces":
		refuse(http.StatusForbidden, metav1.StatusReasonForbidden, "namespaces is forbidden")
		return
	case q.Get("sendInitialEvents") != "" && old:
		refuse(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
		return
	case verb == "watch" && q.Get("sendInitialEvents") == "" && from < expired:
		refuse(http.StatusGone, metav1.StatusReasonExpired, "too old resource version")
		return
	}
	ls, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		refuse(http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	fs, _ := fields.ParseSelector(q.Get("fieldSelector"))
	match := func(o metav1.Object) bool {
		return o != nil && ls.Matches(labels.Set(o.GetLabels())) && fs.Matches(fields.Set{"metadata.name": o.GetName()})
	}
	w.Header().Set("Content-Type", "application/json")
	if verb == "list" {
		f.mu.Lock()
		defer f.mu.Unlock()
		items := []metav1.Object{}
		for key, o := range f.objects {
			if strings.HasPrefix(key, r.URL.Path+"/") && match(o) {
				items = append(items, o)
			}
		}
		kind := map[string]string{"pods": "PodList", "services": "ServiceList", "endpointslices": "EndpointSliceList", "inferencepools": "InferencePoolList"}[resource]
		version := strings.TrimPrefix(strings.TrimPrefix(strings.Split(r.URL.Path, "/namespaces/")[0], "/apis/"), "/api/")
		json.NewEncoder(w).Encode(map[string]any{"kind": kind, "apiVersion": version, "metadata": map[string]any{"resourceVersion": strconv.Itoa(len(f.log))}, "items": items})
		return
	}

	send := func(kind string, o any) {
		json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
	}
	next := from
	if q.Get("sendInitialEvents") != "" {
		next = now
		f.mu.Lock()
		for key, o := range f.objects {
			if v, _ := strconv.Atoi(o.GetResourceVersion()); v <= now && strings.HasPrefix(key, r.URL.Path+"/") && match(o) {
				send("ADDED", o)
			}
		}
		f.mu.Unlock()
		kind := map[string]string{"pods": "Pod", "services": "Service", "endpointslices": "EndpointSlice", "inferencepools": "InferencePool"}[resource]
		version := strings.TrimPrefix(strings.TrimPrefix(strings.Split(r.URL.Path, "/namespaces/")[0], "/apis/"), "/api/")
		send("BOOKMARK", map[string]any{"kind": kind, "apiVersion": version, "metadata": map[string]any{
			"resourceVersion": strconv.Itoa(now), "annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	w.(http.Flusher).Flush()
	for {
		f.mu.Lock()
		events, grown := f.log[next:], f.grown
		next = len(f.log)
		f.mu.Unlock()
		for _, e := range events {
			if e.path != r.URL.Path {
				continue
			}
			was, is := match(e.before), e.after != nil && match(e.after)
			switch {
			case is && was:
				send("MODIFIED", e.after)
			case is:
				send("ADDED", e.after)
			case was:
				send("DELETED", e.before)
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-grown:
		case <-f.down:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// An emission is what a source said last.
type emission struct {
	mu      sync.Mutex
	targets []Target
	err     error
	count   int
	changed chan struct{}
}

func runSource(t *testing.T, s Source) *emission {
	t.Helper()
	e := &emission{changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx, e.take); err != nil {
			e.take(nil, err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return e
}

func (e *emission) take(targets []Target, err error) {
	e.mu.Lock()
	if targets != nil {
		e.targets = targets
	}
	e.err = err
	e.count++
	e.mu.Unlock()
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// text is the set in short, "!" for what is not ready, and the error.
func (e *emission) text() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, t := range e.targets {
		s := t.SourceID + "@" + strings.TrimPrefix(t.URL, "http://")
		if t.NotReady {
			s = "!" + s
		}
		out = append(out, s)
	}
	text := strings.Join(out, " ")
	if e.err != nil {
		text += " | " + e.err.Error()
	}
	return text
}

// await waits until the source has said want; "…" at its end stands for anything.
func (e *emission) await(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		got := e.text()
		if begin, ok := strings.CutSuffix(want, "…"); got == want || ok && strings.HasPrefix(got, begin) {
			return
		}
		select {
		case <-e.changed:
		case <-deadline:
			t.Fatalf("got:  %s\nwant: %s", e.text(), want)
		}
	}
}

func pod(name, ip string, ready bool, more ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: name, Namespace: "models", UID: types.UID("uid-" + name), Labels: map[string]string{"app": "llama"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet"}},
	}}
	p.Spec.Containers = []corev1.Container{{Name: "server", Image: "vllm", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8000}}}}
	p.Status.Phase, p.Status.PodIP = corev1.PodRunning, ip
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionFalse}}
	if ready {
		p.Status.Conditions[1].Status = corev1.ConditionTrue
	}
	for _, f := range more {
		f(p)
	}
	return p
}

func annotate(kv ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Annotations = make(map[string]string)
		for i := 0; i < len(kv); i += 2 {
			p.Annotations[kv[i]] = kv[i+1]
		}
	}
}

func terminating(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }

func kubeSource(s config.KubernetesSource) *kube {
	return &kube{s, Env{Dialects: []string{"auto", "vllm", "sglang"}}}
}

func TestKubernetesPods(t *testing.T) {
	f := newFakeAPI(t)
	a, b := pod("a", "10.0.0.1", true), pod("b", "10.0.0.2", false)
	f.put(a)
	f.put(b)
	f.put(pod("pending", "", false))
	f.put(pod("other", "10.0.0.9", true, func(p *corev1.Pod) { p.Labels["app"] = "other" }))
	f.put(pod("done", "10.0.0.8", false, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }))
	e := runSource(t, kubeSource(f.config(config.KubernetesSource{Selector: "app=llama"})))
	e.await(t, "uid-a@10.0.0.1:8000 !uid-b@10.0.0.2:8000")

	f.put(pod("b", "10.0.0.2", true))
	e.await(t, "uid-a@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	f.put(pod("a", "10.0.0.1", true, terminating))
	e.await(t, "!uid-a@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	// Its object lingers while another pod has its address already.
	f.put(pod("c", "10.0.0.1", false))
	f.put(pod("c", "10.0.0.1", true))
	e.await(t, "uid-c@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	f.delete(a)
	f.put(pod("b", "10.0.0.2", true, func(p *corev1.Pod) { p.Labels = nil }))
	e.await(t, "uid-c@10.0.0.1:8000")
	f.delete(pod("c", "", false))
	e.await(t, ` | none has an address and runs of the 2 pods in namespace models that match selector "app=llama": see kubectl get pods -n models --show-labels`)
	f.delete(pod("pending", "", false))
	f.delete(pod("done", "", false))
	e.await(t, ` | no pod in namespace models matches selector "app=llama": see kubectl get pods -n models --show-labels`)
	f.put(pod("d", "fd00::1", true))
	e.await(t, "uid-d@[fd00::1]:8000")
}

// What a pod says of itself, and what it may not say.
func TestKubernetesAnnotations(t *testing.T) {
	s := kubeSource(config.KubernetesSource{Selector: "x", Scheme: "http", Namespaces: []string{"models", "more"}})
	get := func(p *corev1.Pod) (Target, string) {
		t.Helper()
		var pr problems
		ts, err := s.targets(&kubeView{namespace: "models", pods: []*corev1.Pod{p}}, &pr)
		if err != nil || len(ts) != 1 {
			t.Fatalf("%v, %v, %v", ts, pr.said, err)
		}
		if err := pr.err(); err != nil {
			return ts[0], err.Error()
		}
		return ts[0], ""
	}
	got, text := get(pod("a", "10.0.0.1", true, annotate("kvgate/dialect", "sglang", "kvgate/weight", "2.5", "kvgate/role", "prefill", "kvgate/metrics-port", "9400"),
		func(p *corev1.Pod) {
			p.Labels["kvgate/weight"], p.Labels["kvgate/metrics-path"], p.Spec.NodeName = "7", "/m", "n1"
		}))
	want := Target{
		URL: "http://10.0.0.1:8000", SourceID: "uid-a", Name: "a.models", MetricsURL: "http://10.0.0.1:9400/m", Dialect: "sglang", Weight: 2.5,
		Labels: map[string]string{"namespace": "models", "pod": "a", "node": "n1", "role": "prefill"},
	}
	if !reflect.DeepEqual(got, want) || text != "" {
		t.Errorf("got %+v, %s; want %+v", got, text, want)
	}
	for kv, said := range map[string]string{
		"kvgate/dialect=vlm":          `kvgate/dialect "vlm" is not a dialect (auto, vllm, sglang)`,
		"kvgate/weight=heavy":         `kvgate/weight "heavy" is not a number above 0, up to 1000`,
		"kvgate/weight=-1":            `kvgate/weight "-1" is not a number above 0, up to 1000`,
		"kvgate/weight=NaN":           `kvgate/weight "NaN" is not a number above 0, up to 1000`,
		"kvgate/metrics-port=metrics": `kvgate/metrics-port "metrics" is not a port number`,
		"kvgate/metrics-path=metrics": `kvgate/metrics-path "metrics" is not a path that begins with a slash`,
	} {
		k, v, _ := strings.Cut(kv, "=")
		got, text := get(pod("a", "10.0.0.1", true, annotate(k, v)))
		if want := "pod models/a: " + said + "; it is ignored"; text != want {
			t.Errorf("%s: %s; want %s", kv, text, want)
		}
		if got.Dialect != "" || got.Weight != 1 || got.MetricsURL != "" || got.NotReady {
			t.Errorf("%s: %+v", kv, got)
		}
	}
}

func TestKubernetesPodPorts(t *testing.T) {
	ports := func(cp ...corev1.ContainerPort) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Containers[0].Ports = cp }
	}
	http, grpc := corev1.ContainerPort{Name: "http", ContainerPort: 8000}, corev1.ContainerPort{Name: "grpc", ContainerPort: 9000}
	udp := corev1.ContainerPort{ContainerPort: 53, Protocol: corev1.ProtocolUDP}
	check := func(port string, p *corev1.Pod, want string) {
		t.Helper()
		s := kubeSource(config.KubernetesSource{Selector: "x", Scheme: "http", Port: port})
		var pr problems
		ts, err := s.targets(&kubeView{namespace: "models", pods: []*corev1.Pod{p}}, &pr)
		if err != nil {
			t.Fatal(err)
		}
		got := urls(ts)
		if err := pr.err(); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("port %q: %s; want %s", port, got, want)
		}
	}
	check("", pod("a", "1.1.1.1", true, ports(http, udp)), "1.1.1.1:8000")
	check("http", pod("a", "1.1.1.1", true, ports(grpc, http)), "1.1.1.1:8000")
	check("7000", pod("a", "1.1.1.1", true, ports()), "1.1.1.1:7000")
	check("80", pod("a", "1.1.1.1", true, ports()), "1.1.1.1")
	check("", pod("a", "1.1.1.1", true, ports(http, grpc)), "pod models/a has several ports (http 8000, grpc 9000); set discovery.kubernetes.port to one of them: it gets no requests")
	check("htp", pod("a", "1.1.1.1", true, ports(http, grpc)), `pod models/a has no port named "htp", only http 8000, grpc 9000; correct discovery.kubernetes.port: it gets no requests`)
	check("http", pod("a", "1.1.1.1", true, ports(udp)), "pod models/a declares no port; set discovery.kubernetes.port to its number: it gets no requests")
}

func service(ports ...corev1.ServicePort) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "llama", Namespace: "models", UID: "uid-svc"}}
	s.Spec.Selector = map[string]string{"app": "llama"}
	s.Spec.Ports = ports
	return s
}

func slice(name string, port string, number int32, eps ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Namespace: "models", Labels: map[string]string{discoveryv1.LabelServiceName: "llama"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("metrics"), Port: new(int32(9400))}, {Name: &port, Port: &number}},
		Endpoints:   eps,
	}
}

// ep is an endpoint of a slice: ready, serving and terminating as the letters say, "-" for absent.
func ep(pod, ip, conditions string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{ip}}
	if pod != "" {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: pod, Namespace: "models", UID: types.UID("uid-" + pod)}
	}
	flag := func(c byte) *bool {
		switch c {
		case 'y':
			return new(true)
		case 'n':
			return new(false)
		}
		return nil
	}
	e.Conditions = discoveryv1.EndpointConditions{Ready: flag(conditions[0]), Serving: flag(conditions[1]), Terminating: flag(conditions[2])}
	return e
}

var httpPort = corev1.ServicePort{Name: "http", Port: 80, TargetPort: intstr.FromString("web")}

func TestKubernetesService(t *testing.T) {
	f := newFakeAPI(t)
	e := runSource(t, kubeSource(f.config(config.KubernetesSource{Service: "llama", Port: "http"})))
	e.await(t, " | Service models/llama does not exist: create it, or correct service or namespaces")
	f.put(service(httpPort))
	e.await(t, " | Service models/llama has no endpoints: no pod matches its selector app=llama")
	f.put(pod("a", "10.0.0.1", true, annotate("kvgate/weight", "3")))
	e.await(t, " | Service models/llama has no endpoints: the pods that match its selector app=llama (1) are not in its EndpointSlices")
	f.put(slice("s1", "http", 8000, ep("a", "10.0.0.1", "yyn"), ep("b", "10.0.0.2", "nnn"), ep("", "10.0.0.3", "---")))
	e.await(t, "uid-a@10.0.0.1:8000 !uid-b@10.0.0.2:8000 @10.0.0.3:8000")
	e.mu.Lock()
	if got := e.targets[0]; got.Weight != 3 || got.Name != "a" {
		t.Errorf("%+v", got)
	}
	e.mu.Unlock()

	// The slice speaks of a pod before we have heard of it, and of one after we have heard that it is going.
	f.put(slice("s1", "http", 8000, ep("a", "10.0.0.1", "yyn"), ep("b", "10.0.0.2", "yyn")))
	e.await(t, "uid-a@10.0.0.1:8000 !uid-b@10.0.0.2:8000")
	f.put(pod("b", "10.0.0.2", true))
	e.await(t, "uid-a@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	f.put(pod("a", "10.0.0.1", true, terminating))
	e.await(t, "!uid-a@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	f.put(pod("b", "10.0.0.2", true, func(p *corev1.Pod) { p.Labels["app"] = "quarantine" }))
	e.await(t, "!uid-a@10.0.0.1:8000 !uid-b@10.0.0.2:8000")

	// The Service comes to select other pods.
	svc := service(httpPort)
	svc.Spec.Selector["app"] = "quarantine"
	f.put(svc)
	e.await(t, "!uid-a@10.0.0.1:8000 uid-b@10.0.0.2:8000")
	f.put(slice("s1", "http", 8000, ep("b", "10.0.0.2", "nyy")))
	e.await(t, "!uid-b@10.0.0.2:8000")
	f.put(slice("s1", "http", 8000))
	f.put(slice("s2", "http", 8001, ep("b", "10.0.0.2", "yyn")))
	e.await(t, "uid-b@10.0.0.2:8001")

	// The port is renamed before the configuration is: the last set holds.
	svc = service(corev1.ServicePort{Name: "web", Port: 81})
	svc.Spec.Selector["app"] = "quarantine"
	f.put(svc)
	e.await(t, `uid-b@10.0.0.2:8001 | Service models/llama has no port "http", only web 81: correct discovery.kubernetes.port`)
}

func TestKubernetesServicePort(t *testing.T) {
	check := func(port, want string, ports ...corev1.ServicePort) {
		t.Helper()
		s := kubeSource(config.KubernetesSource{Service: "llama", Scheme: "http", Port: port})
		v := &kubeView{namespace: "models", service: service(ports...), slices: []*discoveryv1.EndpointSlice{slice("s", "http", 8000, ep("", "10.0.0.1", "y--"))}}
		var pr problems
		ts, err := s.targets(v, &pr)
		got := urls(ts)
		if err == nil {
			err = pr.err()
		}
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("port %q: %s; want %s", port, got, want)
		}
	}
	metrics := corev1.ServicePort{Name: "metrics", Port: 9400}
	numbered := corev1.ServicePort{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8000)}
	check("", "10.0.0.1:8000", httpPort)
	check("http", "10.0.0.1:8000", metrics, httpPort)
	check("80", "10.0.0.1:8000", metrics, httpPort)
	check("8000", "10.0.0.1:8000", metrics, numbered)
	check("metrics", "10.0.0.1:9400", metrics, httpPort)
	check("", "Service models/llama has several ports (metrics 9400, http 80): set discovery.kubernetes.port to one of them", metrics, httpPort)
	check("8001", `Service models/llama has no port "8001", only metrics 9400, http 80: correct discovery.kubernetes.port`, metrics, numbered)
	check("", "Service models/llama has no ports: add one to its spec.ports")
	check("", "EndpointSlice models/s has no port grpc 90: its pods do not declare targetPort rpc of the Service, and get no requests",
		corev1.ServicePort{Name: "grpc", Port: 90, TargetPort: intstr.FromString("rpc")})
}

// A pod with addresses of two families is one endpoint, and one that is in two slices too.
func TestKubernetesDualStack(t *testing.T) {
	v4, v6 := slice("s-4", "http", 8000, ep("a", "10.0.0.1", "yyn"), ep("b", "10.0.0.2", "yyn")), slice("s-6", "http", 8000, ep("a", "fd00::1", "yyn"), ep("c", "fd00::3", "yyn"))
	again := slice("s-5", "http", 8000, ep("b", "10.0.0.2", "nyy"))
	v6.AddressType = discoveryv1.AddressTypeIPv6
	s := kubeSource(config.KubernetesSource{Service: "llama", Scheme: "http"})
	check := func(svc *corev1.Service, want string) {
		t.Helper()
		svc.Spec.Selector = nil
		e := emission{}
		var pr problems
		ts, err := s.targets(&kubeView{namespace: "models", service: svc, slices: []*discoveryv1.EndpointSlice{v6, v4, again}}, &pr)
		e.targets, e.err = ts, err
		if got := e.text(); got != want {
			t.Errorf("%s; want %s", got, want)
		}
	}
	check(service(httpPort), "uid-a@10.0.0.1:8000 !uid-b@10.0.0.2:8000 uid-c@[fd00::3]:8000")
	six := service(httpPort)
	six.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	check(six, "!uid-b@10.0.0.2:8000 uid-a@[fd00::1]:8000 uid-c@[fd00::3]:8000")
}

func TestKubernetesInferencePool(t *testing.T) {
	f := newFakeAPI(t)
	f.set("inferencepools", http.StatusNotFound)
	e := runSource(t, kubeSource(f.config(config.KubernetesSource{InferencePool: "llama"})))
	e.await(t, " | API server http://"+f.addr+" knows no InferencePool (inference.networking.k8s.io/v1): install the CRDs of the Gateway API Inference Extension, or use service or selector")
	f.set("inferencepools", 0)
	e.await(t, " | InferencePool models/llama does not exist: create it, or correct inference_pool or namespaces")
	p := &inferencePool{ObjectMeta: metav1.ObjectMeta{Name: "llama", Namespace: "models"}}
	p.Spec.Selector.MatchLabels = map[string]string{"app": "llama"}
	p.Spec.TargetPorts = []inferencePort{{8000}, {8001}}
	f.put(p)
	e.await(t, " | InferencePool models/llama: no pod in namespace models matches its selector app=llama")
	f.put(pod("a", "10.0.0.1", true))
	e.await(t, "uid-a@10.0.0.1:8000 uid-a@10.0.0.1:8001")
	e.mu.Lock()
	if e.targets[1].Name != "a:8001" {
		t.Errorf("name %s", e.targets[1].Name)
	}
	e.mu.Unlock()
	p = p.DeepCopyObject().(*inferencePool)
	p.Spec.TargetPorts = nil
	f.put(p)
	e.await(t, "uid-a@10.0.0.1:8000 uid-a@10.0.0.1:8001 | InferencePool models/llama has no ports: set spec.targetPorts")
}

// What the API server refuses is said, and served when it no longer does.
func TestKubernetesRefusals(t *testing.T) {
	for _, c := range []struct {
		deny   string
		status int
		want   string
	}{
		{"pods", http.StatusForbidden, ` | not allowed to watch pods in namespace models: User "system:serviceaccount:kvgate:kvgate" cannot watch resource "pods": apply deploy/rbac in that namespace, if it exists`},
		{"watch pods", http.StatusForbidden, ` | not allowed to watch pods in namespace models: …`},
		{"pods", http.StatusUnauthorized, ` | API server http://ADDR does not accept our credentials (401): renew the token or certificate`},
		{"pods", http.StatusInternalServerError, ` | API server http://ADDR: watch pods in namespace models: …`},
	} {
		f := newFakeAPI(t)
		f.put(pod("a", "10.0.0.1", true))
		f.set(c.deny, c.status)
		e := runSource(t, kubeSource(f.config(config.KubernetesSource{Selector: "app=llama"})))
		e.await(t, strings.ReplaceAll(c.want, "ADDR", f.addr))
		f.set(c.deny, 0)
		e.await(t, "uid-a@10.0.0.1:8000")
	}
}

// Of two namespaces one may not be read: part of a set is no set.
func TestKubernetesNamespaces(t *testing.T) {
	f := newFakeAPI(t)
	f.put(pod("a", "10.0.0.1", true))
	f.put(pod("a", "10.0.0.2", true, func(p *corev1.Pod) { p.Namespace, p.UID = "more", "uid-more" }))
	s := f.config(config.KubernetesSource{Selector: "app=llama", Namespaces: []string{"models", "more"}})
	e := runSource(t, kubeSource(s))
	e.await(t, "uid-a@10.0.0.1:8000 uid-more@10.0.0.2:8000")
	e.mu.Lock()
	if e.targets[0].Name != "a.models" || e.targets[1].Name != "a.more" {
		t.Errorf("%+v", e.targets)
	}
	e.mu.Unlock()
}

// The API server is away at the start, comes, goes, and has forgotten its history when it comes back.
func TestKubernetesServerAway(t *testing.T) {
	t.Parallel()
	for _, old := range []bool{false, true} {
		f := newFakeAPI(t)
		f.old = old
		f.put(pod("a", "10.0.0.1", true))
		f.stop()
		e := runSource(t, kubeSource(f.config(config.KubernetesSource{Selector: "app=llama"})))
		e.await(t, " | API server http://"+f.addr+" cannot be reached: …")
		f.start()
		e.await(t, "uid-a@10.0.0.1:8000")
		f.stop()
		e.await(t, "uid-a@10.0.0.1:8000 | API server http://"+f.addr+" cannot be reached: …")
		f.delete(pod("a", "", true))
		f.put(pod("b", "10.0.0.2", true))
		f.mu.Lock()
		f.expired = len(f.log) + 1
		f.mu.Unlock()
		f.start()
		e.await(t, "uid-b@10.0.0.2:8000")
		f.mu.Lock()
		f.expired = 0
		f.mu.Unlock()
		f.put(pod("b", "10.0.0.2", false))
		e.await(t, "!uid-b@10.0.0.2:8000")
		f.stop()
	}
}

// A server that takes the connection and says nothing is spoken of.
func TestKubernetesServerSilent(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := &fakeAPI{t: t, addr: l.Addr().String()}
	e := runSource(t, kubeSource(f.config(config.KubernetesSource{Service: "llama"})))
	e.await(t, " | API server http://"+f.addr+" has not answered yet: waiting for services in namespace models, endpointslices in namespace models")
}

func TestKubernetesCredentials(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("KUBECONFIG", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	fails := func(s config.KubernetesSource, want string) {
		t.Helper()
		s.Selector = "app=llama"
		err := kubeSource(s).Run(t.Context(), func([]Target, error) { t.Error("emitted") })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
	fails(config.KubernetesSource{}, "this is not a pod of a cluster, and there is no kubeconfig; set kubeconfig or $KUBECONFIG")
	fails(config.KubernetesSource{Kubeconfig: filepath.Join(dir, "none")}, "none: no such file or directory")
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, []byte("apiVersion: v1\nkind: Config\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	fails(config.KubernetesSource{Kubeconfig: empty}, "it names no cluster, or its current-context is missing")
	f := &fakeAPI{t: t, addr: "127.0.0.1:1"}
	s := f.config(config.KubernetesSource{})
	s.Context = "prod"
	fails(s, `"prod" does not exist`)
	t.Setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "1")
	if _, err := os.Stat(inClusterNamespace); err != nil {
		fails(config.KubernetesSource{}, "set automountServiceAccountToken: true, or kubeconfig")
	}
}

// A thousand pods at once are a few sets, and ten thousand updates leave nothing behind.
func TestKubernetesChurn(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	s := kubeSource(f.config(config.KubernetesSource{Selector: "app=llama"}))
	ip := func(i int) string { return fmt.Sprintf("10.0.%d.%d", i/250, i%250+1) }
	for i := range 1000 {
		f.put(pod(fmt.Sprint("p", i), ip(i), true))
	}
	e := runSource(t, s)
	all := func(n int) {
		t.Helper()
		deadline := time.After(30 * time.Second)
		for {
			e.mu.Lock()
			ready := 0
			for _, t := range e.targets {
				if !t.NotReady {
					ready++
				}
			}
			e.mu.Unlock()
			if ready == n {
				return
			}
			select {
			case <-e.changed:
			case <-deadline:
				t.Fatalf("%d ready; want %d", ready, n)
			}
		}
	}
	all(1000)
	e.mu.Lock()
	before := e.count
	e.mu.Unlock()
	began := time.Now()
	for round := range 10 {
		for i := range 1000 {
			f.put(pod(fmt.Sprint("p", i), ip(i), round%2 == 1, annotate("kvgate/weight", fmt.Sprint(round+1))))
		}
	}
	all(1000)
	e.mu.Lock()
	sets := e.count - before
	e.mu.Unlock()
	if limit := int(time.Since(began)/kubePace) + 2; sets > limit {
		t.Errorf("%d sets for 10000 updates within %v; want at most %d", sets, time.Since(began), limit)
	}
}

// What is stored of a pod is what is read of it.
func TestKubernetesStrip(t *testing.T) {
	o, err := strip(pod("a", "10.0.0.1", true, annotate("kvgate/role", "x", "big", strings.Repeat("x", 1<<16)), terminating))
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > 600 || slices.ContainsFunc([]string{"managedFields", "image", "big"}, func(s string) bool { return strings.Contains(string(data), s) }) {
		t.Errorf("%d bytes: %s", len(data), data)
	}
	p := o.(*corev1.Pod)
	if p.DeletionTimestamp == nil || p.Annotations["kvgate/role"] != "x" || p.Spec.Containers[0].Ports[0].ContainerPort != 8000 {
		t.Errorf("%+v", p)
	}
}
