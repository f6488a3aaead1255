package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"kvgate/config"
)

// serviceKind begins messages about Services as Kubernetes spells them.
const serviceKind = "Service"

func init() {
	register("kubernetes", "Endpoints of a Service, pods by label, or an InferencePool of a Kubernetes cluster.",
		func(d *config.Discovery) (config.KubernetesSource, bool) {
			if d.Kubernetes == nil {
				return config.KubernetesSource{}, false
			}
			return *d.Kubernetes, true
		},
		func(s config.KubernetesSource, env Env) Source { return &kube{s, env} })
}

// kube watches a cluster. This file says what follows from the objects; kubernetes_watch.go has them come.
type kube struct {
	config.KubernetesSource
	env Env
}

const (
	// However fast objects change, sets are made this far apart: a rollout of a thousand pods is a few of them.
	kubePace = 50 * time.Millisecond
	// An API server that has not answered by then is spoken of.
	kubePatience = 5 * time.Second
	// Without any change, sets are made this far apart, for the sake of what is not watched (namespaces).
	kubeLook = 30 * time.Second
)

func (s *kube) Name() string { return "kubernetes" }

func (s *kube) Run(ctx context.Context, emit func([]Target, error)) error {
	if _, err := labels.Parse(s.Selector); err != nil {
		return fmt.Errorf("selector %q: %w", s.Selector, err)
	}
	api, err := connectKubernetes(&s.KubernetesSource)
	if err != nil {
		return err
	}
	defer api.close()
	w := newKubeWatcher(ctx, s, api)
	defer w.close()

	var last []Target
	var lastErr string
	since := time.Now() // when the set became incomplete; zero while it is complete
	patience, look := time.NewTimer(kubePatience), time.NewTicker(kubeLook)
	defer patience.Stop()
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.poked:
		case <-patience.C:
		case <-look.C:
		}
		targets, failed, err := w.look(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case targets != nil:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case err == nil && time.Since(since) >= kubePatience:
			err = w.waiting()
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		// Most changes of objects change nothing here.
		if news := targets != nil && !reflect.DeepEqual(targets, last); news || failed || text != lastErr || targets != nil && last == nil {
			if targets != nil || err != nil {
				emit(slices.Clone(targets), err)
			}
			if targets != nil {
				last = targets
			}
			lastErr = text
		}
		if !sleep(ctx, kubePace) {
			return nil
		}
	}
}

// A kubeView is what is known of one namespace. Its objects must not be changed.
type kubeView struct {
	namespace string
	service   *corev1.Service // nil: it does not exist, or none was asked for
	pool      *inferencePool
	slices    []*discoveryv1.EndpointSlice
	pods      []*corev1.Pod
}

// problems are what is amiss with a set that holds all the same.
type problems struct {
	said []string
	more int
}

const maxProblems = 3

func (p *problems) add(format string, args ...any) {
	if len(p.said) == maxProblems {
		p.more++
		return
	}
	p.said = append(p.said, fmt.Sprintf(format, args...))
}

func (p *problems) err() error {
	if len(p.said) == 0 {
		return nil
	}
	text := strings.Join(p.said, "; ")
	if p.more > 0 {
		text += fmt.Sprintf("; and %d more like these", p.more)
	}
	return errors.New(text)
}

// targets returns the complete set of a namespace and what is amiss with it; or an error if the set cannot be told.
func (s *kube) targets(v *kubeView, p *problems) ([]Target, error) {
	switch {
	case s.Service != "":
		return s.serviceTargets(v, p)
	case s.InferencePool != "":
		return s.poolTargets(v, p)
	}
	out := s.podTargets(v, p, s.podPort)
	if len(out) == 0 && len(p.said) == 0 {
		p.add("%s selector %q: see kubectl get pods -n %s --show-labels", noPods(v), s.Selector, v.namespace)
	}
	return out, nil
}

func (s *kube) poolTargets(v *kubeView, p *problems) ([]Target, error) {
	switch {
	case v.pool == nil:
		p.add("InferencePool %s/%s does not exist: create it, or correct inference_pool or namespaces", v.namespace, s.InferencePool)
		return nil, nil
	case len(v.pool.Spec.Selector.MatchLabels) == 0:
		return nil, fmt.Errorf("InferencePool %s/%s selects no pods: set spec.selector.matchLabels", v.namespace, s.InferencePool)
	case len(v.pool.Spec.TargetPorts) == 0:
		return nil, fmt.Errorf("InferencePool %s/%s has no ports: set spec.targetPorts", v.namespace, s.InferencePool)
	}
	var ports []int32
	for _, tp := range v.pool.Spec.TargetPorts {
		ports = append(ports, tp.Number)
	}
	out := s.podTargets(v, p, func(*corev1.Pod) ([]int32, error) { return ports, nil })
	if len(out) == 0 && len(p.said) == 0 {
		p.add("InferencePool %s/%s: %s its selector %s", v.namespace, s.InferencePool, noPods(v), labels.Set(v.pool.Spec.Selector.MatchLabels))
	}
	return out, nil
}

// noPods says why pods make no endpoints.
func noPods(v *kubeView) string {
	if len(v.pods) == 0 {
		return "no pod in namespace " + v.namespace + " matches"
	}
	return fmt.Sprintf("none has an address and runs of the %d pods in namespace %s that match", len(v.pods), v.namespace)
}

// podTargets makes targets of pods. Those that have ended, or have no address yet, are none.
func (s *kube) podTargets(v *kubeView, p *problems, ports func(*corev1.Pod) ([]int32, error)) []Target {
	set := newTargetSet(s, p)
	for _, pod := range v.pods {
		if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed || pod.Status.PodIP == "" {
			continue
		}
		pp, err := ports(pod)
		if err != nil {
			p.add("pod %s/%s %v: it gets no requests", pod.Namespace, pod.Name, err)
			continue
		}
		for _, port := range pp {
			t := s.podTarget(pod, pod.Status.PodIP, port, p)
			if len(pp) > 1 {
				t.Name += ":" + strconv.Itoa(int(port))
			}
			t.NotReady = !podReady(pod)
			set.add(t, pod.CreationTimestamp.Time)
		}
	}
	return set.sorted()
}

// podPort returns the port that the configuration names, or the only one that a pod has.
func (s *kube) podPort(pod *corev1.Pod) ([]int32, error) {
	if n, err := strconv.ParseUint(s.Port, 10, 16); err == nil {
		return []int32{int32(n)}, nil
	}
	var known []string
	var tcp []int32
	for _, c := range pod.Spec.Containers {
		for _, cp := range c.Ports {
			if cp.Protocol != "" && cp.Protocol != corev1.ProtocolTCP {
				continue
			}
			if s.Port != "" && cp.Name == s.Port {
				return []int32{cp.ContainerPort}, nil
			}
			tcp = append(tcp, cp.ContainerPort)
			known = append(known, portText(cp.Name, cp.ContainerPort))
		}
	}
	switch {
	case len(tcp) == 1 && s.Port == "":
		return tcp, nil
	case len(tcp) == 0:
		return nil, errors.New("declares no port; set discovery.kubernetes.port to its number")
	case s.Port == "":
		return nil, fmt.Errorf("has several ports (%s); set discovery.kubernetes.port to one of them", strings.Join(known, ", "))
	}
	return nil, fmt.Errorf("has no port named %q, only %s; correct discovery.kubernetes.port", s.Port, strings.Join(known, ", "))
}

func portText(name string, port int32) string {
	if name == "" {
		return strconv.Itoa(int(port))
	}
	return fmt.Sprintf("%s %d", name, port)
}

func podReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// serviceTargets makes targets of a Service's EndpointSlices. Its pods are watched too, since they say what is set on
// them, and that they are being deleted before the slices do.
func (s *kube) serviceTargets(v *kubeView, p *problems) ([]Target, error) {
	svc := v.service
	switch {
	case svc == nil:
		p.add("Service %s/%s does not exist: create it, or correct service or namespaces", v.namespace, s.Service)
		return nil, nil
	case svc.Spec.Type == corev1.ServiceTypeExternalName:
		return nil, fmt.Errorf("%s %s/%s is of type ExternalName and has no endpoints: use discovery.dns with name %s", serviceKind, v.namespace, s.Service, svc.Spec.ExternalName)
	}
	port, err := s.servicePort(svc)
	if err != nil {
		return nil, err
	}
	pods := make(map[types.UID]*corev1.Pod, len(v.pods))
	for _, pod := range v.pods {
		pods[pod.UID] = pod
	}
	// A pod with addresses of both families is one endpoint. The Service's own family goes first.
	family := discoveryv1.AddressTypeIPv4
	if len(svc.Spec.IPFamilies) > 0 && svc.Spec.IPFamilies[0] == corev1.IPv6Protocol {
		family = discoveryv1.AddressTypeIPv6
	}
	ordered := slices.Clone(v.slices)
	slices.SortFunc(ordered, func(a, b *discoveryv1.EndpointSlice) int {
		first := func(e *discoveryv1.EndpointSlice) int {
			if e.AddressType == family {
				return 0
			}
			return 1
		}
		return cmp.Or(first(a)-first(b), strings.Compare(string(a.AddressType), string(b.AddressType)), strings.Compare(a.Name, b.Name))
	})

	set := newTargetSet(s, p)
	families := make(map[types.UID]discoveryv1.AddressType)
	found := 0
	for _, slice := range ordered {
		i := slices.IndexFunc(slice.Ports, func(ep discoveryv1.EndpointPort) bool {
			return ep.Port != nil && (ep.Name == nil && port.Name == "" || ep.Name != nil && *ep.Name == port.Name)
		})
		if i < 0 {
			if len(slice.Endpoints) > 0 {
				p.add("EndpointSlice %s/%s has no port %s: its pods do not declare targetPort %s of the Service, and get no requests",
					slice.Namespace, slice.Name, portText(port.Name, port.Port), port.TargetPort.String())
			}
			continue
		}
		for k := range slice.Endpoints {
			e := &slice.Endpoints[k]
			if len(e.Addresses) == 0 {
				continue
			}
			found++
			var t Target
			var created time.Time
			address, number := e.Addresses[0], *slice.Ports[i].Port // further addresses are the same endpoint (its documentation)
			if ref := e.TargetRef; ref != nil && ref.Kind == "Pod" {
				if other, seen := families[ref.UID]; seen && other != slice.AddressType {
					continue
				}
				families[ref.UID] = slice.AddressType
				pod, known := pods[ref.UID]
				// Unknown are pods that are gone, or no longer selected, or too new for us to have heard what is set on them.
				gone := !known && len(svc.Spec.Selector) > 0
				if known {
					gone = pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded
				} else {
					pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: slice.Namespace, Name: ref.Name, UID: ref.UID}}
				}
				t, created = s.podTarget(pod, address, number, p), pod.CreationTimestamp.Time
				t.NotReady = gone
			} else {
				t = s.newTarget(address, number)
				t.Labels = map[string]string{"namespace": slice.Namespace}
				if ref != nil {
					t.SourceID = string(ref.UID)
				}
			}
			if e.Zone != nil {
				t.Labels["zone"] = *e.Zone
			}
			// Absent means ready, and serving where only that is absent.
			c := e.Conditions
			t.NotReady = t.NotReady || c.Ready != nil && !*c.Ready || c.Serving != nil && !*c.Serving || c.Terminating != nil && *c.Terminating
			set.add(t, created)
		}
	}
	if found == 0 && len(p.said) == 0 {
		why := "it has no selector and no EndpointSlices were made for it"
		if sel := svc.Spec.Selector; len(sel) > 0 {
			why = fmt.Sprintf("the pods that match its selector %s (%d) are not in its EndpointSlices", labels.Set(sel), len(v.pods))
			if len(v.pods) == 0 {
				why = fmt.Sprintf("no pod matches its selector %s", labels.Set(sel))
			}
		}
		p.add("Service %s/%s has no endpoints: %s", v.namespace, s.Service, why)
	}
	return set.sorted(), nil
}

// servicePort returns the port of a Service that the configuration names, by name or number, or its only one.
func (s *kube) servicePort(svc *corev1.Service) (*corev1.ServicePort, error) {
	var known []string
	ports := svc.Spec.Ports
	for i := range ports {
		if s.Port != "" && (ports[i].Name == s.Port || strconv.Itoa(int(ports[i].Port)) == s.Port) {
			return &ports[i], nil
		}
		known = append(known, portText(ports[i].Name, ports[i].Port))
	}
	for i := range ports { // people may write the port of the containers
		if s.Port != "" && ports[i].TargetPort.String() == s.Port {
			return &ports[i], nil
		}
	}
	at := svc.Namespace + "/" + svc.Name
	switch {
	case len(ports) == 0:
		return nil, fmt.Errorf("%s %s has no ports: add one to its spec.ports", serviceKind, at)
	case s.Port != "":
		return nil, fmt.Errorf("%s %s has no port %q, only %s: correct discovery.kubernetes.port", serviceKind, at, s.Port, strings.Join(known, ", "))
	case len(ports) > 1:
		return nil, fmt.Errorf("%s %s has several ports (%s): set discovery.kubernetes.port to one of them", serviceKind, at, strings.Join(known, ", "))
	}
	return &ports[0], nil
}

// What a pod may say of itself. An annotation goes before a label of the same name.
const (
	kubeDialect     = "kvgate/dialect"
	kubeWeight      = "kvgate/weight"       // above 0, up to 1000
	kubeRole        = "kvgate/role"         // such as prefill or decode; becomes the label role
	kubeMetricsPort = "kvgate/metrics-port" // where its metrics are, if not on the endpoint's port
	kubeMetricsPath = "kvgate/metrics-path"
	kubePrefix      = "kvgate/"
)

func (s *kube) newTarget(address string, port int32) Target {
	url := s.Scheme + "://" + net.JoinHostPort(address, strconv.Itoa(int(port)))
	if norm, message, _ := config.CheckURL(url); message == "" {
		url = norm
	}
	return Target{URL: url, Weight: 1}
}

// podTarget makes a target of a pod's port, with what the pod says of itself.
func (s *kube) podTarget(pod *corev1.Pod, address string, port int32, p *problems) Target {
	t := s.newTarget(address, port)
	t.SourceID, t.Name = string(pod.UID), pod.Name
	if len(s.Namespaces) > 1 {
		t.Name += "." + pod.Namespace
	}
	t.Labels = map[string]string{"namespace": pod.Namespace, "pod": pod.Name}
	if pod.Spec.NodeName != "" {
		t.Labels["node"] = pod.Spec.NodeName
	}
	said := func(key string) string { return cmp.Or(pod.Annotations[key], pod.Labels[key]) }
	wrong := func(key, v, want string) {
		p.add("pod %s/%s: %s %q is not %s; it is ignored", pod.Namespace, pod.Name, key, v, want)
	}
	if v := said(kubeDialect); v != "" {
		if s.env.Dialects == nil || slices.Contains(s.env.Dialects, v) {
			t.Dialect = v
		} else {
			wrong(kubeDialect, v, "a dialect ("+strings.Join(s.env.Dialects, ", ")+")")
		}
	}
	if v := said(kubeWeight); v != "" {
		if w, err := strconv.ParseFloat(v, 64); err == nil && w > 0 && w <= 1000 {
			t.Weight = w
		} else {
			wrong(kubeWeight, v, "a number above 0, up to 1000")
		}
	}
	if v := said(kubeRole); v != "" {
		t.Labels["role"] = v
	}
	metricsPort, path := said(kubeMetricsPort), said(kubeMetricsPath)
	if n, err := strconv.ParseUint(metricsPort, 10, 16); metricsPort != "" && (err != nil || n == 0) {
		wrong(kubeMetricsPort, metricsPort, "a port number")
		metricsPort = ""
	}
	if path != "" && !strings.HasPrefix(path, "/") {
		wrong(kubeMetricsPath, path, "a path that begins with a slash")
		path = ""
	}
	if metricsPort != "" || path != "" {
		t.MetricsURL = s.Scheme + "://" + net.JoinHostPort(address, cmp.Or(metricsPort, strconv.Itoa(int(port)))) + cmp.Or(path, "/metrics")
	}
	return t
}

// A targetSet has one target per address.
type targetSet struct {
	s       *kube
	p       *problems
	byURL   map[string]int
	targets []Target
	created []time.Time
}

func newTargetSet(s *kube, p *problems) *targetSet {
	return &targetSet{s: s, p: p, byURL: make(map[string]int)}
}

// add takes t, of a pod created at that time. One endpoint may be in two slices: then it is ready if both say so. Two
// pods may have one address: a pod that has gone while its object lingers, and the one that has the address now.
func (ts *targetSet) add(t Target, created time.Time) {
	i, there := ts.byURL[t.URL]
	switch {
	case !there:
		ts.byURL[t.URL] = len(ts.targets)
		ts.targets = append(ts.targets, t)
		ts.created = append(ts.created, created)
	case ts.targets[i].SourceID == t.SourceID:
		ts.targets[i].NotReady = ts.targets[i].NotReady || t.NotReady
	case ts.targets[i].NotReady && !t.NotReady,
		ts.targets[i].NotReady == t.NotReady && created.After(ts.created[i]):
		ts.targets[i], ts.created[i] = t, created
	}
}

// sorted returns the targets by address; never nil.
func (ts *targetSet) sorted() []Target {
	out := append([]Target{}, ts.targets...)
	slices.SortFunc(out, byIdentity)
	return out
}
