package discovery

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"kvgate/config"
)

// By itself client-go writes to standard error. What matters of that we report as errors of the source.
func init() { klog.SetLogger(logr.Discard()) }

// An inferencePool is what we read of an InferencePool of inference.networking.k8s.io/v1 (Gateway API Inference
// Extension, api/v1/inferencepool_types.go). The published Go types bring a module with hundreds of dependencies.
type inferencePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []inferencePort `json:"targetPorts"`
	} `json:"spec"`
}

type inferencePort struct {
	Number int32 `json:"number"`
}

func (p *inferencePool) DeepCopyObject() runtime.Object {
	c := *p
	c.ObjectMeta = *p.ObjectMeta.DeepCopy()
	c.Spec.Selector.MatchLabels = maps.Clone(p.Spec.Selector.MatchLabels)
	c.Spec.TargetPorts = slices.Clone(p.Spec.TargetPorts)
	return &c
}

type inferencePoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []inferencePool `json:"items"`
}

func (l *inferencePoolList) DeepCopyObject() runtime.Object {
	c := *l
	c.Items = make([]inferencePool, len(l.Items))
	for i := range l.Items {
		c.Items[i] = *l.Items[i].DeepCopyObject().(*inferencePool)
	}
	return &c
}

// A kubeKind is a kind of object that is watched.
type kubeKind struct {
	version  schema.GroupVersion
	resource string
	object   func() runtime.Object
	list     func() runtime.Object
}

var (
	coreVersion      = corev1.SchemeGroupVersion
	sliceVersion     = discoveryv1.SchemeGroupVersion
	inferenceVersion = schema.GroupVersion{Group: "inference.networking.k8s.io", Version: "v1"}

	kubePods = kubeKind{
		coreVersion, "pods",
		func() runtime.Object { return &corev1.Pod{} }, func() runtime.Object { return &corev1.PodList{} },
	}
	kubeServices = kubeKind{
		coreVersion, "services",
		func() runtime.Object { return &corev1.Service{} }, func() runtime.Object { return &corev1.ServiceList{} },
	}
	kubeSlices = kubeKind{
		sliceVersion, "endpointslices",
		func() runtime.Object { return &discoveryv1.EndpointSlice{} }, func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
	}
	kubePools = kubeKind{
		inferenceVersion, "inferencepools",
		func() runtime.Object { return &inferencePool{} }, func() runtime.Object { return &inferencePoolList{} },
	}
)

// kubeCodecs know the kinds above only. The clientset of client-go knows all and would double the size of the binary.
var kubeCodecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(coreVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.Service{}, &corev1.ServiceList{}, &corev1.Namespace{})
	scheme.AddKnownTypes(sliceVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	scheme.AddKnownTypeWithName(inferenceVersion.WithKind("InferencePool"), &inferencePool{})
	scheme.AddKnownTypeWithName(inferenceVersion.WithKind("InferencePoolList"), &inferencePoolList{})
	for _, v := range []schema.GroupVersion{coreVersion, sliceVersion, inferenceVersion} {
		metav1.AddToGroupVersion(scheme, v)
	}
	scheme.AddUnversionedTypes(schema.GroupVersion{Version: "v1"}, &metav1.Status{})
	return serializer.NewCodecFactory(scheme)
}()

// A kubeAPI is an API server that we may ask.
type kubeAPI struct {
	host      string
	namespace string // where we are, or what the kubeconfig's context says
	http      *http.Client
	clients   map[schema.GroupVersion]rest.Interface
}

// inClusterNamespace is where Kubernetes tells a pod its namespace.
const inClusterNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// connectKubernetes finds API server and credentials, without asking for anything yet.
func connectKubernetes(s *config.KubernetesSource) (*kubeAPI, error) {
	var cfg *rest.Config
	var namespace string
	if s.Kubeconfig == "" && s.Context == "" && os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		var err error
		if cfg, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("this pod has no credentials for the API server: %w: set automountServiceAccountToken: true, or kubeconfig", err)
		}
		data, err := os.ReadFile(inClusterNamespace)
		if err != nil && len(s.Namespaces) == 0 {
			return nil, fmt.Errorf("the namespace of this pod is not known: %w: set namespaces", err)
		}
		namespace = strings.TrimSpace(string(data))
	} else {
		rules := clientcmd.NewDefaultClientConfigLoadingRules()
		rules.ExplicitPath = s.Kubeconfig
		loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: s.Context})
		var err error
		cfg, err = loader.ClientConfig()
		if err == nil {
			namespace, _, err = loader.Namespace()
		}
		switch {
		case clientcmd.IsEmptyConfig(err) && s.Kubeconfig != "":
			return nil, fmt.Errorf("kubeconfig %s: it names no cluster, or its current-context is missing", s.Kubeconfig)
		case clientcmd.IsEmptyConfig(err):
			return nil, errors.New("there is no API server to ask: this is not a pod of a cluster, and there is no kubeconfig; set kubeconfig or $KUBECONFIG")
		case err != nil:
			return nil, fmt.Errorf("kubeconfig: %w", err)
		}
	}
	cfg.UserAgent = "kvgate"
	cfg.QPS = -1 // a handful of requests, each with a pause of its own after a failure
	api := &kubeAPI{host: cfg.Host, namespace: namespace, clients: make(map[schema.GroupVersion]rest.Interface)}
	var err error
	if api.http, err = rest.HTTPClientFor(cfg); err != nil {
		return nil, fmt.Errorf("credentials for the API server: %w", err)
	}
	for _, v := range []schema.GroupVersion{coreVersion, sliceVersion, inferenceVersion} {
		c := rest.CopyConfig(cfg)
		c.GroupVersion, c.APIPath, c.NegotiatedSerializer = &v, "/apis", kubeCodecs.WithoutConversion()
		if v.Group == "" {
			c.APIPath = "/api"
		}
		if v != inferenceVersion { // custom resources have JSON only
			c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
		}
		if api.clients[v], err = rest.RESTClientForConfigAndClient(c, api.http); err != nil {
			return nil, fmt.Errorf("API server %s: %w", api.host, err)
		}
	}
	return api, nil
}

func (a *kubeAPI) close() { utilnet.CloseIdleConnectionsFor(a.http.Transport) }

// missing reports whether a namespace surely does not exist.
func (a *kubeAPI) missing(ctx context.Context, namespace string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err := a.clients[coreVersion].Get().Resource("namespaces").Name(namespace).MaxRetries(0).Do(ctx).Error()
	return apierrors.IsNotFound(err)
}

// A kubeWatcher has the objects of all namespaces watched.
type kubeWatcher struct {
	s          *kube
	api        *kubeAPI
	ctx        context.Context
	cancel     context.CancelFunc
	wg         sync.WaitGroup
	poked      chan struct{} // capacity 1: something may have changed
	namespaces []*kubeNamespace

	mu     sync.Mutex // guards failed, and the errors of watches
	failed bool       // there was a failure since the last look
}

// A kubeNamespace is what is watched in one namespace. Only look touches it.
type kubeNamespace struct {
	name     string
	lead     *kubeWatch // the Service or InferencePool; nil with a selector
	slices   *kubeWatch // nil without a Service
	pods     *kubeWatch // nil until it is known which, or for Services without selector
	selector string     // of pods
	missing  bool
	asked    time.Time // whether it is missing
}

// A kubeWatch is an informer at work.
type kubeWatch struct {
	owner          *kubeWatcher
	kind           kubeKind
	namespace      string
	labels, fields string
	store          cache.Store
	informer       cache.Controller
	cancel         context.CancelFunc
	err            error // why the last attempt to list or watch failed; nil once one succeeds
}

func newKubeWatcher(ctx context.Context, s *kube, api *kubeAPI) *kubeWatcher {
	w := &kubeWatcher{s: s, api: api, poked: make(chan struct{}, 1)}
	w.ctx, w.cancel = context.WithCancel(ctx)
	names := s.Namespaces
	if len(names) == 0 {
		names = []string{api.namespace}
	}
	byName := func(name string) string { return fields.OneTermEqualSelector("metadata.name", name).String() }
	for _, name := range names {
		ns := &kubeNamespace{name: name}
		switch {
		case s.Service != "":
			ns.lead = w.watch(kubeServices, name, "", byName(s.Service))
			ns.slices = w.watch(kubeSlices, name, discoveryv1.LabelServiceName+"="+s.Service, "")
		case s.InferencePool != "":
			ns.lead = w.watch(kubePools, name, "", byName(s.InferencePool))
		default:
			ns.selector = s.Selector
			ns.pods = w.watch(kubePods, name, s.Selector, "")
		}
		w.namespaces = append(w.namespaces, ns)
	}
	return w
}

// close ends all watches and waits for them.
func (w *kubeWatcher) close() {
	w.cancel()
	w.wg.Wait()
}

func (w *kubeWatcher) poke() {
	select {
	case w.poked <- struct{}{}:
	default:
	}
}

func (w *kubeWatcher) watch(kind kubeKind, namespace, labels, fields string) *kubeWatch {
	k := &kubeWatch{owner: w, kind: kind, namespace: namespace, labels: labels, fields: fields}
	poke := func(any) { w.poke() }
	k.store, k.informer = cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{ListWithContextFunc: k.doList, WatchFuncWithContext: k.doWatch},
		ObjectType:    kind.object(),
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: poke, DeleteFunc: poke,
			UpdateFunc: func(any, any) { w.poke() },
		},
		Transform: strip,
	})
	ctx, cancel := context.WithCancel(w.ctx)
	k.cancel = cancel
	w.wg.Go(func() { k.informer.RunWithContext(ctx) })
	w.wg.Go(func() { // a list of nothing is news too
		select {
		case <-k.informer.HasSyncedChecker().Done():
			w.poke()
		case <-ctx.Done():
		}
	})
	return k
}

func (k *kubeWatch) request(o *metav1.ListOptions) *rest.Request {
	o.LabelSelector, o.FieldSelector = k.labels, k.fields
	return k.owner.api.clients[k.kind.version].Get().Namespace(k.namespace).Resource(k.kind.resource).
		VersionedParams(o, metav1.ParameterCodec)
}

// listTimeout bounds one list, a page of 500 objects.
const listTimeout = 30 * time.Second

func (k *kubeWatch) doList(ctx context.Context, o metav1.ListOptions) (list runtime.Object, err error) {
	err = k.try(ctx, "list", func() error {
		ctx, cancel := context.WithTimeout(ctx, listTimeout)
		defer cancel()
		list = k.kind.list()
		return k.request(&o).Do(ctx).Into(list)
	})
	return list, err
}

func (k *kubeWatch) doWatch(ctx context.Context, o metav1.ListOptions) (i watch.Interface, err error) {
	o.Watch = true
	err = k.try(ctx, "watch", func() error {
		i, err = k.request(&o).Watch(ctx)
		return err
	})
	return i, err
}

// try does something until it succeeds or ctx ends, at our own pace: the informer's own pauses grow to a minute, and it
// tells of some failures only in its log. What it must know it is told: that it has to begin anew, or with a plain list.
func (k *kubeWatch) try(ctx context.Context, verb string, do func() error) error {
	const shortest, longest = 250 * time.Millisecond, 5 * time.Second
	for pause := shortest; ; pause = min(2*pause, longest) {
		err := do()
		switch {
		case err == nil:
			k.note(nil)
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case apierrors.IsResourceExpired(err), apierrors.IsGone(err), apierrors.IsInvalid(err),
			apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge):
			return err
		}
		k.note(k.explain(verb, err))
		if !sleep(ctx, jitter(pause)) {
			return ctx.Err()
		}
	}
}

// note takes the outcome of an attempt.
func (k *kubeWatch) note(err error) {
	w := k.owner
	w.mu.Lock()
	changed := err != nil || k.err != nil
	k.err = err
	w.failed = w.failed || err != nil
	w.mu.Unlock()
	if changed {
		w.poke()
	}
}

// explain says what a failure means and what to do about it.
func (k *kubeWatch) explain(verb string, err error) error {
	api, unreachable := k.owner.api, (*url.Error)(nil)
	switch {
	case apierrors.IsForbidden(err):
		why := err.Error()
		if _, after, ok := strings.Cut(why, "is forbidden: "); ok {
			why = after
		}
		return fmt.Errorf("not allowed to %s %s in namespace %s: %s: apply deploy/rbac in that namespace, if it exists", verb, k.kind.resource, k.namespace, why)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("API server %s does not accept our credentials (401): renew the token or certificate", api.host)
	case apierrors.IsNotFound(err) && k.kind.version == inferenceVersion:
		return fmt.Errorf("API server %s knows no InferencePool (%s): install the CRDs of the Gateway API Inference Extension, or use service or selector", api.host, inferenceVersion)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("API server %s does not know %s of %s: is it a Kubernetes API server (1.21 or newer)?", api.host, k.kind.resource, k.kind.version)
	case errors.As(err, &unreachable):
		hint := ""
		if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
			hint = ": set certificate-authority in the kubeconfig"
		}
		return fmt.Errorf("API server %s cannot be reached: %w%s", api.host, unreachable.Err, hint)
	}
	return fmt.Errorf("API server %s: %s %s in namespace %s: %w", api.host, verb, k.kind.resource, k.namespace, err)
}

// all returns the watches of a namespace.
func (ns *kubeNamespace) all() []*kubeWatch {
	return slices.DeleteFunc([]*kubeWatch{ns.lead, ns.slices, ns.pods}, func(k *kubeWatch) bool { return k == nil })
}

// look returns the complete set as it is now, nil if it is not complete; what is amiss; and whether there was a failure
// since the last look.
func (w *kubeWatcher) look(ctx context.Context) (targets []Target, failed bool, err error) {
	complete := true
	for _, ns := range w.namespaces {
		w.follow(ns)
		for _, k := range ns.all() {
			complete = complete && k.informer.HasSynced()
		}
	}
	var p problems
	w.mu.Lock()
	failed, w.failed = w.failed, false
	seen := make(map[string]bool)
	for _, ns := range w.namespaces {
		for _, k := range ns.all() {
			if k.err != nil && !seen[k.err.Error()] { // an API server that is away is so for all
				seen[k.err.Error()] = true
				p.add("%v", k.err)
			}
		}
	}
	w.mu.Unlock()
	if !complete {
		return nil, failed, p.err()
	}
	targets = []Target{}
	for _, ns := range w.namespaces {
		before := len(p.said)
		t, err := w.s.targets(ns.view(), &p)
		if err != nil {
			return nil, failed, err
		}
		targets = append(targets, t...)
		if len(t) > 0 {
			ns.missing, ns.asked = false, time.Time{}
			continue
		}
		if time.Since(ns.asked) >= kubeLook {
			ns.missing, ns.asked = w.api.missing(ctx, ns.name), time.Now()
		}
		if ns.missing {
			p.said = append(p.said[:min(before, len(p.said))], fmt.Sprintf("namespace %s does not exist: create it, or correct namespaces", ns.name))
		}
	}
	slices.SortFunc(targets, byIdentity)
	return targets, failed, p.err()
}

// follow has those pods watched that the Service or InferencePool selects now.
func (w *kubeWatcher) follow(ns *kubeNamespace) {
	if ns.lead == nil || !ns.lead.informer.HasSynced() {
		return
	}
	selected := map[string]string(nil)
	switch o := only[runtime.Object](ns.lead.store).(type) {
	case *corev1.Service:
		selected = o.Spec.Selector
	case *inferencePool:
		selected = o.Spec.Selector.MatchLabels
	}
	selector := labels.Set(selected).String()
	if selector == ns.selector {
		return
	}
	if ns.pods != nil {
		ns.pods.cancel()
		ns.pods = nil
	}
	ns.selector = selector
	if selector != "" {
		ns.pods = w.watch(kubePods, ns.name, selector, "")
	}
}

// only returns the one object of a store, or nil.
func only[T any](s cache.Store) (o T) {
	if list := s.List(); len(list) > 0 {
		o, _ = list[0].(T)
	}
	return o
}

func (ns *kubeNamespace) view() *kubeView {
	v := &kubeView{namespace: ns.name}
	if ns.lead != nil {
		v.service, v.pool = only[*corev1.Service](ns.lead.store), only[*inferencePool](ns.lead.store)
	}
	if ns.slices != nil {
		v.slices = objects(ns.slices.store, func(o *discoveryv1.EndpointSlice) string { return o.Name })
	}
	if ns.pods != nil {
		v.pods = objects(ns.pods.store, func(o *corev1.Pod) string { return o.Name })
	}
	return v
}

// objects returns what a store holds, by name.
func objects[T any](s cache.Store, name func(T) string) []T {
	list := s.List()
	out := make([]T, 0, len(list))
	for _, o := range list {
		if o, ok := o.(T); ok {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b T) int { return strings.Compare(name(a), name(b)) })
	return out
}

// waiting says what has not been answered yet.
func (w *kubeWatcher) waiting() error {
	var what []string
	for _, ns := range w.namespaces {
		for _, k := range ns.all() {
			if !k.informer.HasSynced() {
				what = append(what, k.kind.resource+" in namespace "+ns.name)
			}
		}
	}
	return fmt.Errorf("API server %s has not answered yet: waiting for %s", w.api.host, strings.Join(what, ", "))
}

// strip drops what we do not read before an object is stored: a pod is mostly that.
func strip(o any) (any, error) {
	switch o := o.(type) {
	case *corev1.Pod:
		p := &corev1.Pod{ObjectMeta: stripMeta(&o.ObjectMeta)}
		p.Spec.NodeName = o.Spec.NodeName
		for _, c := range o.Spec.Containers {
			if len(c.Ports) > 0 {
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Ports: c.Ports})
			}
		}
		p.Status.Phase, p.Status.PodIP = o.Status.Phase, o.Status.PodIP
		for _, c := range o.Status.Conditions {
			if c.Type == corev1.PodReady {
				p.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
			}
		}
		return p, nil
	case *corev1.Service:
		s := &corev1.Service{ObjectMeta: stripMeta(&o.ObjectMeta)}
		s.Spec.Type, s.Spec.ExternalName = o.Spec.Type, o.Spec.ExternalName
		s.Spec.Ports, s.Spec.Selector, s.Spec.IPFamilies = o.Spec.Ports, o.Spec.Selector, o.Spec.IPFamilies
		return s, nil
	case *discoveryv1.EndpointSlice:
		o.ObjectMeta = stripMeta(&o.ObjectMeta)
	case *inferencePool:
		o.ObjectMeta = stripMeta(&o.ObjectMeta)
	}
	return o, nil
}

func stripMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp,
		Labels: ours(m.Labels), Annotations: ours(m.Annotations),
	}
}

// ours returns what is meant for us; nil if there is none.
func ours(m map[string]string) (out map[string]string) {
	for k, v := range m {
		if strings.HasPrefix(k, kubePrefix) {
			if out == nil {
				out = make(map[string]string)
			}
			out[k] = v
		}
	}
	return out
}
