package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

// plainManifest is what kubectl apply -f takes, and where the charts are that test/packaging has rendered.
const (
	plainManifest = "../../deploy/kubernetes/kvgate.yaml"
	rendered      = "../packaging/testdata/rendered/*.yaml"
)

// objects reads a manifest.
func objects(t testing.TB, text string) (out []*unstructured.Unstructured) {
	t.Helper()
	for doc := range strings.SplitSeq("\n"+text, "\n---\n") {
		o := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict([]byte(doc), &o.Object); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		if len(o.Object) > 0 {
			out = append(out, o)
		}
	}
	return out
}

// A client that finds the resource of any kind, as kubectl does.
type applier struct {
	t      testing.TB
	mapper *restmapper.DeferredDiscoveryRESTMapper
}

func newApplier(t testing.TB) *applier {
	return &applier{t, restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(api.client.Discovery()))}
}

// apply has the API server take an object, or with dry only check it: with every unknown or doubled field an error.
func (a *applier) apply(o *unstructured.Unstructured, dry bool) (*unstructured.Unstructured, error) {
	m, err := a.mapper.RESTMapping(o.GroupVersionKind().GroupKind(), o.GroupVersionKind().Version)
	if err != nil {
		return nil, err
	}
	var to dynamic.ResourceInterface = api.dynamic.Resource(m.Resource)
	if m.Scope.Name() == "namespace" {
		to = api.dynamic.Resource(m.Resource).Namespace(o.GetNamespace())
	}
	data, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	options := metav1.PatchOptions{FieldManager: "test", FieldValidation: metav1.FieldValidationStrict, Force: new(true)}
	if dry {
		options.DryRun = []string{metav1.DryRunAll}
	}
	return to.Patch(context.Background(), o.GetName(), types.ApplyPatchType, data, options)
}

// installCRDs makes the kinds known that the chart and the documents use, from their published modules.
func installCRDs(t testing.TB) *applier {
	t.Helper()
	for _, file := range strings.Split(os.Getenv("TEST_CRDS"), string(os.PathListSeparator)) {
		data, err := os.ReadFile(file)
		must(t, err)
		must(t, api.applyText("", string(data)))
	}
	a := newApplier(t)
	for _, k := range []schema.GroupVersionKind{
		{Group: "monitoring.coreos.com", Version: "v1", Kind: "PodMonitor"},
		{Group: "monitoring.coreos.com", Version: "v1", Kind: "PrometheusRule"},
		{Group: "gateway.networking.k8s.io", Version: "v1", Kind: "HTTPRoute"},
		{Group: "keda.sh", Version: "v1alpha1", Kind: "ScaledObject"},
		{Group: "inference.networking.k8s.io", Version: "v1", Kind: "InferencePool"},
	} {
		until(t, k.Kind+" is known", func() (bool, string) {
			a.mapper.Reset()
			_, err := a.mapper.RESTMapping(k.GroupKind(), k.Version)
			return err == nil, fmt.Sprint(err)
		})
	}
	return a
}

// Every object that the chart makes, in every case that it is rendered for, and every object in the documents, is one that
// the API server takes; so are the pods, under the strictest of the pod security standards.
func TestManifestsAreTaken(t *testing.T) {
	a := installCRDs(t)
	for _, ns := range []string{"inference", "models", "models-canary", "kvgate", "strict"} {
		must(t, api.namespace(ns))
	}
	_, err := api.client.CoreV1().Namespaces().Patch(context.Background(), "strict", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`), metav1.PatchOptions{})
	must(t, err)
	texts := map[string]string{}
	files, err := filepath.Glob(rendered)
	must(t, err)
	files = append(files, plainManifest, "../../deploy/rbac/role.yaml", "../../deploy/rbac/rolebinding.yaml", "../../deploy/rbac/serviceaccount.yaml")
	for _, file := range files {
		data, err := os.ReadFile(file)
		must(t, err)
		texts[file] = string(data)
	}
	block := regexp.MustCompile("(?s)```yaml\n(apiVersion: .*?)```")
	for _, page := range []string{"../../docs/install-kubernetes.md", "../../docs/scaling.md"} {
		data, err := os.ReadFile(page)
		must(t, err)
		for i, m := range block.FindAllStringSubmatch(string(data), -1) {
			texts[fmt.Sprintf("%s, block %d", page, i+1)] = m[1]
		}
	}
	kinds := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		for _, o := range objects(t, texts[name]) {
			kinds[o.GetKind()]++
			if o.GetNamespace() == "" {
				o.SetNamespace("models")
			}
			if o.GetKind() == "Namespace" {
				o.SetNamespace("")
			}
			if _, err := a.apply(o, true); err != nil {
				t.Errorf("%s: %s %s: %v", name, o.GetKind(), o.GetName(), err)
			}
			if o.GetKind() != "Deployment" || !strings.Contains(name, "kvgate.yaml") && !strings.Contains(name, "rendered") {
				continue
			}
			template, _, err := unstructured.NestedMap(o.Object, "spec", "template")
			must(t, err)
			pod := &unstructured.Unstructured{Object: template}
			pod.SetAPIVersion("v1")
			pod.SetKind("Pod")
			pod.SetName("kvgate-0")
			pod.SetNamespace("strict")
			unstructured.RemoveNestedField(pod.Object, "spec", "priorityClassName") // it may be used in kube-system only
			if _, err := a.apply(pod, true); err != nil {
				t.Errorf("%s: its pod: %v", name, err)
			}
		}
	}
	for _, want := range []string{"Deployment", "Service", "ConfigMap", "Role", "RoleBinding", "ServiceAccount", "PodDisruptionBudget", "HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule", "NetworkPolicy", "Ingress", "HTTPRoute", "InferencePool", "ScaledObject"} {
		if kinds[want] == 0 {
			t.Errorf("no %s among what was checked", want)
		}
	}
	t.Logf("taken: %v", kinds)

	// The check can fail.
	for _, bad := range []string{
		"apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: models}\nspec: {ports: [{port: 80, tragetPort: 8080}]}",
		"apiVersion: monitoring.coreos.com/v1\nkind: PodMonitor\nmetadata: {name: x, namespace: models}\nspec: {selector: {}, endpoints: []}",
	} {
		if _, err := a.apply(objects(t, bad)[0], true); err == nil {
			t.Errorf("taken although it is wrong:\n%s", bad)
		}
	}
}

// The plain manifest is applied, and kvgate runs as its pod would: with the arguments, the configuration, the environment and
// the mounted token of that service account. It finds model servers, and a changed ConfigMap is taken up.
func TestInstalledInACluster(t *testing.T) {
	a := newApplier(t)
	data, err := os.ReadFile(plainManifest)
	must(t, err)
	// The service account of other tests has the same name; it and what it may do elsewhere are as the manifest says too.
	var deployment *unstructured.Unstructured
	for _, o := range objects(t, string(data)) {
		got, err := a.apply(o, false)
		if err != nil {
			t.Fatalf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
		if got.GetKind() == "Deployment" {
			deployment = got
		}
	}
	ctx := context.Background()
	template := &corev1.PodTemplateSpec{}
	raw, _, err := unstructured.NestedMap(deployment.Object, "spec", "template")
	must(t, err)
	text, err := json.Marshal(raw)
	must(t, err)
	must(t, json.Unmarshal(text, template))
	if template.Spec.AutomountServiceAccountToken == nil || !*template.Spec.AutomountServiceAccountToken {
		t.Fatal("the pod gets no token")
	}

	// What a kubelet does: token, CA and namespace, and the ConfigMap.
	token, err := api.client.CoreV1().ServiceAccounts("kvgate").CreateToken(ctx, template.Spec.ServiceAccountName, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(t, err)
	const credentials = "/var/run/secrets/kubernetes.io/serviceaccount"
	must(t, os.MkdirAll(credentials, 0o755))
	ca, err := os.ReadFile(filepath.Join(api.dir, "apiserver.crt"))
	must(t, err)
	for name, content := range map[string]string{"token": token.Status.Token, "ca.crt": string(ca), "namespace": "kvgate"} {
		must(t, os.WriteFile(filepath.Join(credentials, name), []byte(content), 0o600))
	}
	cm, err := api.client.CoreV1().ConfigMaps("kvgate").Get(ctx, "kvgate", metav1.GetOptions{})
	must(t, err)
	dir := t.TempDir()
	volume := filepath.Join(dir, "config")
	mount := func(version, content string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Join(volume, version), 0o755))
		must(t, os.WriteFile(filepath.Join(volume, version, "kvgate.yaml"), []byte(content), 0o600))
		must(t, os.Symlink(version, filepath.Join(volume, "..data_tmp")))
		must(t, os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")))
	}
	mount("..1", cm.Data["kvgate.yaml"])
	must(t, os.Symlink("..data/kvgate.yaml", filepath.Join(volume, "kvgate.yaml")))

	c := template.Spec.Containers[0]
	var args []string
	for _, arg := range c.Args {
		args = append(args, strings.Replace(arg, "/etc/kvgate/config", volume, 1))
	}
	cmd := process(os.Getenv("KVGATE_BINARY"), args...)
	cmd.Env = []string{"KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443"}
	for _, e := range c.Env {
		cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
	}
	port := func(name string) int32 {
		for _, p := range c.Ports {
			if p.Name == name {
				return p.ContainerPort
			}
		}
		t.Fatalf("the pod has no port %s", name)
		return 0
	}
	g := newGateway(t, fmt.Sprintf("http://127.0.0.1:%d", port("http")), fmt.Sprintf("http://127.0.0.1:%d", port("admin")))
	g.run(cmd)
	probe := func(path string) (bool, string) {
		code, body := g.get(path)
		return code == 200, fmt.Sprintf("%d %s", code, body)
	}
	until(t, "it lives", func() (bool, string) { return probe(c.LivenessProbe.HTTPGet.Path) })
	until(t, "it says what keeps it from being ready", func() (bool, string) {
		ok, said := probe(c.ReadinessProbe.HTTPGet.Path)
		return !ok && strings.Contains(said, `no pod in namespace kvgate matches selector "app.kubernetes.io/component=model-server"`), said
	})
	startServer(t, podRange+"8.1:8000")
	labelled := func(name, ip string, labels map[string]string) {
		t.Helper()
		p := createPod(t, "kvgate", name, ip, podOptions{ready: true})
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
		must(t, err)
		_, err = api.client.CoreV1().Pods("kvgate").Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		must(t, err)
	}
	labelled("llama-0", podRange+"8.1", map[string]string{"app.kubernetes.io/component": "model-server"})
	until(t, "it is ready", func() (bool, string) { return probe(c.ReadinessProbe.HTTPGet.Path) })
	if a := g.ask(ctx, "llama", 5); a.status != 200 {
		t.Errorf("%+v", a)
	}

	// A new ConfigMap needs no new pod.
	startServer(t, podRange+"8.2:8000")
	labelled("llama-1", podRange+"8.2", map[string]string{"tier": "other"})
	mount("..2", strings.Replace(cm.Data["kvgate.yaml"], "app.kubernetes.io/component=model-server", "tier=other", 1))
	g.awaitEndpoints("llama-1")
	g.cmd.Process.Signal(syscall.SIGHUP)
	until(t, "identical input is no news", func() (bool, string) {
		return strings.Contains(g.logged(), "nothing has changed"), ""
	})
}
