package packaging

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

var (
	update = flag.Bool("update", false, "rewrite what is generated")
	binary = flag.String("kvgate", "../../kvgate", "the binary under test")
)

const (
	chartDir = "../../deploy/helm/kvgate"
	plain    = "../../deploy/kubernetes/kvgate.yaml"
)

func loadChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render returns the chart's objects by template, as `helm install RELEASE -n NAMESPACE` would make them.
func render(t *testing.T, release, namespace, values string) (map[string]string, error) {
	t.Helper()
	given := map[string]any{}
	if err := yaml.Unmarshal([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	c := loadChart(t)
	caps := common.DefaultCapabilities.Copy()
	v, err := util.ToRenderValues(c, given, common.ReleaseOptions{Name: release, Namespace: namespace, Revision: 1, IsInstall: true}, caps)
	if err != nil {
		return nil, err
	}
	out, err := engine.Engine{}.Render(c, v)
	for name, text := range out {
		if strings.TrimSpace(text) == "" || strings.HasSuffix(name, ".tpl") {
			delete(out, name)
		}
	}
	return out, err
}

// manifest is one file of all objects, by kind as Helm orders templates: by name.
func manifest(objects map[string]string) string {
	var names []string
	for name := range objects {
		if strings.HasSuffix(name, ".yaml") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		text := strings.TrimSpace(objects[name])
		fmt.Fprintf(&b, "---\n%s\n", strings.TrimSpace(strings.TrimPrefix(text, "---")))
	}
	return b.String()
}

// golden compares text with a file, or writes it with -update.
func golden(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, []byte(text)) {
		t.Errorf("%s is not what the chart makes now; run make test-packaging TESTFLAGS=-update\n%s", file, difference(string(want), text))
	}
}

// difference is the first line in which two texts differ.
func difference(a, b string) string {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(la), len(lb)) {
		x, y := "(end)", "(end)"
		if i < len(la) {
			x = la[i]
		}
		if i < len(lb) {
			y = lb[i]
		}
		if x != y {
			return fmt.Sprintf("line %d: file %q, chart %q", i+1, x, y)
		}
	}
	return ""
}

// documents are the objects of a manifest.
func documents(t *testing.T, text string) (out []map[string]any) {
	t.Helper()
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var o map[string]any
		if err := yaml.UnmarshalStrict([]byte(strings.TrimPrefix(doc, "---\n")), &o); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		if o != nil {
			out = append(out, o)
		}
	}
	return out
}

// at follows keys and indexes into an object.
func at(o any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := o.(map[string]any)
			o = m[p]
		case int:
			l, _ := o.([]any)
			if p >= len(l) {
				return nil
			}
			o = l[p]
		}
	}
	return o
}

func find(docs []map[string]any, kind string) map[string]any {
	for _, d := range docs {
		if d["kind"] == kind {
			return d
		}
	}
	return nil
}

func TestLint(t *testing.T) {
	l := lint.RunAll(chartDir, nil, "kvgate")
	for _, m := range l.Messages {
		if m.Severity > support.InfoSev {
			t.Errorf("%s: %v", m.Path, m.Err)
		}
	}
	if len(l.Messages) == 0 {
		t.Error("the linter says nothing at all; want at least that the chart has no icon")
	}
}

// Before the others, which use it: the chart knows the keys that need a restart from the reference, which is made from the program, and its schema the format of
// the configuration from the program itself.
func TestMadeForTheChart(t *testing.T) {
	reference, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|.*?\\| restart \\|").FindAllStringSubmatch(string(reference), -1) {
		keys = append(keys, m[1])
	}
	if len(keys) < 20 || slices.ContainsFunc(keys, func(k string) bool { return strings.Contains(k, "[]") }) {
		t.Fatalf("keys that need a restart: %v; want more, and none in a list", keys)
	}
	list, err := json.MarshalIndent(keys, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, chartDir+"/templates/_restart.tpl", "{{/* Made from docs/configuration.md by make test-packaging TESTFLAGS=-update. */}}\n"+
		"{{- define \"kvgate.restartKeys\" -}}\n"+string(list)+"\n{{- end -}}\n")

	out, err := exec.Command(*binary, "config", "schema").Output()
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(out, &schema); err != nil {
		t.Fatal(err)
	}
	delete(schema, "$schema")
	withoutTexts(schema, false)
	properties := schema["properties"].(map[string]any)
	schema["properties"] = "PROPERTIES"
	outer, _ := json.Marshal(schema)
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		inner, _ := json.Marshal(properties[name])
		lines = append(lines, fmt.Sprintf("      %q: %s", name, inner))
	}
	if len(lines) < 15 {
		t.Fatalf("the schema has only %d sections", len(lines))
	}
	file := chartDir + "/values.schema.json"
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	own, _, ok := strings.Cut(string(before), `    "kvgate": `)
	if !ok {
		t.Fatalf("%s has no definition of kvgate", file)
	}
	golden(t, file, own+`    "kvgate": `+strings.Replace(string(outer), `"PROPERTIES"`, "{\n"+strings.Join(lines, ",\n")+"\n    }", 1)+"\n  }\n}\n")

	rules, err := os.ReadFile(alerts)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, chartDir+"/files/alerts.yaml", string(rules))
}

// withoutTexts leaves of a schema what it checks.
func withoutTexts(o any, names bool) {
	switch o := o.(type) {
	case map[string]any:
		if !names {
			for _, text := range []string{"description", "default", "examples", "title"} {
				delete(o, text)
			}
		}
		for key, v := range o {
			withoutTexts(v, key == "properties" && !names)
		}
	case []any:
		for _, v := range o {
			withoutTexts(v, false)
		}
	}
}

// Every case of testdata/values renders to the file of that name, and its configuration is one that kvgate takes.
func TestRender(t *testing.T) {
	files, err := filepath.Glob("testdata/values/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			values, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			objects, err := render(t, "gate", "inference", string(values))
			if err != nil {
				t.Fatal(err)
			}
			text := manifest(objects)
			golden(t, filepath.Join("testdata/rendered", filepath.Base(file)), text)
			checkConfig(t, text)
		})
	}
}

// checkConfig has kvgate check the configuration that a manifest holds. What it names by files and environment variables is
// in Secrets, so that their absence is all that it may complain of.
func checkConfig(t *testing.T, text string) {
	t.Helper()
	cm := find(documents(t, text), "ConfigMap")
	conf, _ := at(cm, "data", "kvgate.yaml").(string)
	file := filepath.Join(t.TempDir(), "kvgate.yaml")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(*binary, "check", "--json", file)
	c.Env = append(os.Environ(), "ENDPOINT_API_KEY=set")
	out, err := c.Output()
	var report struct {
		OK       bool `json:"ok"`
		Problems []struct{ Message, Severity string }
	}
	if json.Unmarshal(out, &report) != nil {
		t.Fatalf("kvgate check: %v %s", err, out)
	}
	for _, p := range report.Problems {
		if p.Severity != "warning" && !strings.Contains(p.Message, "no such file") {
			t.Errorf("%s in\n%s", p.Message, conf)
		}
	}
}

// deploy/kubernetes/kvgate.yaml is the chart with its defaults, for those who do not use Helm.
func TestPlainManifest(t *testing.T) {
	objects, err := render(t, "kvgate", "kvgate", "")
	if err != nil {
		t.Fatal(err)
	}
	text := manifest(objects)
	text = strings.ReplaceAll(text, "\n        app.kubernetes.io/managed-by: Helm", "")
	text = strings.ReplaceAll(text, "\n    app.kubernetes.io/managed-by: Helm", "")
	golden(t, plain, `# kvgate for a cluster without Helm: kubectl apply -f kvgate.yaml
# Made from the chart in deploy/helm by make test-packaging TESTFLAGS=-update. The pools are in the ConfigMap below.
apiVersion: v1
kind: Namespace
metadata:
  name: kvgate
`+text)
	if strings.Contains(text, "Helm") {
		t.Error("it speaks of Helm")
	}
}

// The grace period covers the drain, however it is written.
func TestGracePeriod(t *testing.T) {
	f := func(drain string, want float64) {
		t.Helper()
		objects, err := render(t, "g", "n", "config: {drain: "+drain+"}")
		if err != nil {
			t.Errorf("%s: %v", drain, err)
			return
		}
		d := find(documents(t, manifest(objects)), "Deployment")
		if got := at(d, "spec", "template", "spec", "terminationGracePeriodSeconds"); got != want {
			t.Errorf("drain %s: %v s; want %v", drain, got, want)
		}
	}
	f("{}", 5+120+15)
	f("{delay: 0s, timeout: 0s}", 15)
	f("{delay: 500ms, timeout: 1h30m}", 1+5400+15)
	f("{delay: 10s}", 10+120+15)
	f("{timeout: 1.5s}", 5+2+15)
}

// What a reload takes up does not roll the pods; what needs a restart does.
func TestRollOnChange(t *testing.T) {
	sum := func(values string) any {
		t.Helper()
		objects, err := render(t, "g", "n", values)
		if err != nil {
			t.Fatal(err)
		}
		return at(find(documents(t, manifest(objects)), "Deployment"), "spec", "template", "metadata", "annotations", "checksum/config")
	}
	const pools = "pools: [{name: a, discovery: {static: ['http://10.0.0.1:8000']}}]"
	base := sum("config: {" + pools + "}")
	f := func(values string, rolls bool) {
		t.Helper()
		if got := sum(values) != base; got != rolls {
			t.Errorf("%s: rolls: %v; want %v", values, got, rolls)
		}
	}
	f("config: {"+pools+"}", false)
	f("config: {pools: [{name: b, discovery: {static: ['http://10.0.0.2:8000']}}]}", false)
	f("config: {scrape: {interval: 2s}, retry: {max_attempts: 3}, health: {slow_start: 1s}, "+pools+"}", false)
	f("config: {limits: {body_bytes: 1MiB}, "+pools+"}", true)
	f("config: {drain: {timeout: 1m}, "+pools+"}", true)
	f("config: {debug: {headers: true}, "+pools+"}", true)
	f("config: {debug: {capture: {}}, "+pools+"}", true)
	f("config: {log: {level: debug, access_skip: [/v1/models]}, timeouts: {first_token: 1m}, admin: {token: x}, "+pools+"}", false)
	f("config: {log: {format: console}, "+pools+"}", true)
	f("config: {timeouts: {keep_alive: 2m}, "+pools+"}", true)
	f("tls: {secretName: x}", true)
	f("{rollOnChange: always, config: {"+pools+"}}", true)
}

// The rules that the operator gets are those of deploy/prometheus, word for word.
func TestPrometheusRule(t *testing.T) {
	objects, err := render(t, "g", "n", "prometheusRule: {enabled: true, labels: {release: prometheus}}")
	if err != nil {
		t.Fatal(err)
	}
	rule := find(documents(t, manifest(objects)), "PrometheusRule")
	data, err := os.ReadFile(alerts)
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]any
	if err := yaml.Unmarshal(data, &want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(rule["spec"], any(want)) || at(rule, "spec", "groups", 0, "rules", 5) == nil {
		t.Errorf("rules %v; want %v", rule["spec"], want)
	}
	if got := at(rule, "metadata", "labels", "release"); got != "prometheus" {
		t.Errorf("label release %q; want prometheus", got)
	}
}

// What the configuration has written is on a volume, once for each directory, unless the values mount one there.
func TestVolumes(t *testing.T) {
	f := func(values, wantMounts, wantVolumes string) {
		t.Helper()
		objects, err := render(t, "g", "n", values)
		if err != nil {
			t.Fatal(err)
		}
		pod := at(find(documents(t, manifest(objects)), "Deployment"), "spec", "template", "spec")
		list := func(o any, keys ...string) string {
			var out []string
			for _, v := range o.([]any)[1:] { // without the configuration
				var words []string
				for _, k := range keys {
					if text := at(v, k); text != nil {
						words = append(words, fmt.Sprint(text))
					}
				}
				out = append(out, strings.Join(words, " "))
			}
			return strings.Join(out, "; ")
		}
		mounts := list(at(pod, "containers", 0, "volumeMounts"), "name", "mountPath", "subPathExpr")
		volumes := list(at(pod, "volumes"), "name", "emptyDir", "persistentVolumeClaim")
		if mounts != wantMounts || volumes != wantVolumes {
			t.Errorf("%s: mounts %q, volumes %q; want %q, %q", values, mounts, volumes, wantMounts, wantVolumes)
		}
	}
	const all = "config: {state: {file: /var/lib/kvgate/state}, usage: {file: /var/lib/kvgate/usage, webhook: {url: 'https://x', spool: /spool/usage}}, record: {file: /record/r}}"
	f("", "", "")
	f(all, "data-0 /var/lib/kvgate; data-1 /spool; data-2 /record",
		"data-0 map[sizeLimit:4Gi]; data-1 map[sizeLimit:4Gi]; data-2 map[sizeLimit:4Gi]")
	f("{data: {claim: c}, "+all+"}", "data /var/lib/kvgate $(POD_NAME)/var/lib/kvgate; data /spool $(POD_NAME)/spool; data /record $(POD_NAME)/record",
		"data map[claimName:c]")
	f("{volumes: [{name: mine}], volumeMounts: [{name: mine, mountPath: /var/lib/}, {name: mine, mountPath: /rec}], "+all+"}",
		"data-0 /spool; data-1 /record; mine /var/lib/; mine /rec", "data-0 map[sizeLimit:4Gi]; data-1 map[sizeLimit:4Gi]; mine")
}

// Mistakes are refused before anything is installed, by name.
func TestMistakes(t *testing.T) {
	f := func(values, want string) {
		t.Helper()
		_, err := render(t, "g", "n", values)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", values, err, want)
		}
	}
	f("replica: 3", "'replica' not allowed")
	f("replicas: two", "replicas")
	f("config: {pools: []}", "config/pools")
	f("config: {pools: [{name: a}]}", "discovery")
	f("config: {listen: ':9'}", "config/listen")
	f("config: {admin: {listen: ':9'}}", "admin/listen")
	f("config: {drain: {timeout: 120}}", "drain/timeout")
	f("config: {state: {file: state}}", "state/file")
	f("config: {record: {file: /record}}", "record/file")
	f("config: {usage: {webhook: {spool: spool}}}", "webhook/spool")
	f("config: {limits: {body_byte: 1MiB}}", "'body_byte' not allowed")
	f("config: {pools: [{name: a, discovery: {kubernetes: {service: a, namespace: b}}}]}", "'namespace' not allowed")
	f("config: {pools: [{name: a, policy: fastest, discovery: {kubernetes: {service: a}}}]}", "pools/0/policy")
	f("config: {timeouts: {idle: 30}}", "timeouts/idle")
	f("rollOnChange: never", "rollOnChange")
	f("serviceAccount: {create: false}", "serviceAccount.name: name an existing service account")
	f("httpRoute: {enabled: true}", "httpRoute.parentRefs: name the Gateway")
	f("autoscaling: {enabled: true, minReplicas: 9, maxReplicas: 3}", "autoscaling.minReplicas (9) is above autoscaling.maxReplicas (3)")
	f("autoscaling: {enabled: true, cpuUtilization: 0}", "set saturation or cpuUtilization above 0")
}

// The chart's Role is the one of deploy/rbac, in each namespace that is discovered in.
func TestRoles(t *testing.T) {
	data, err := os.ReadFile("../../deploy/rbac/role.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var shipped map[string]any
	if err := yaml.Unmarshal(data, &shipped); err != nil {
		t.Fatal(err)
	}
	namespaces := func(values string) string {
		t.Helper()
		objects, err := render(t, "g", "home", values)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, d := range documents(t, manifest(objects)) {
			if d["kind"] == "Role" {
				if !reflect.DeepEqual(d["rules"], shipped["rules"]) {
					t.Errorf("rules %v; want those of deploy/rbac: %v", d["rules"], shipped["rules"])
				}
				out = append(out, at(d, "metadata", "namespace").(string))
			}
		}
		token := at(find(documents(t, manifest(objects)), "Deployment"), "spec", "template", "spec", "automountServiceAccountToken")
		return fmt.Sprint(out, token)
	}
	f := func(pools, want string) {
		t.Helper()
		if got := namespaces("config: {pools: [" + pools + "]}"); got != want {
			t.Errorf("%s: %s; want %s", pools, got, want)
		}
	}
	f("{name: a, discovery: {kubernetes: {service: x}}}", "[home] true")
	f("{name: a, discovery: {kubernetes: {service: x, namespaces: [b, a]}}}, {name: b, discovery: {kubernetes: {service: w}}}, {name: c, discovery: {kubernetes: {service: z, namespaces: [a]}}}", "[a b home] true")
	f("{name: a, discovery: {static: ['http://10.0.0.1:8000']}}", "[] false")
	f("{name: a, discovery: {kubernetes: {service: x, kubeconfig: /etc/other}}}", "[] false")
}

// Large numbers stay numbers on their way through the chart.
func TestNumbersOfTheConfiguration(t *testing.T) {
	objects, err := render(t, "g", "n", "config: {limits: {connections: 1000000}}")
	if err != nil {
		t.Fatal(err)
	}
	text := manifest(objects)
	checkConfig(t, text)
	if !strings.Contains(text, "connections: 1000000\n") {
		t.Error("connections is not 1000000")
	}
}
