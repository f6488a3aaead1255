package packaging

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"sigs.k8s.io/yaml"
)

var promql = parser.NewParser(parser.Options{})

// targetLabels are on every series by the way it was scraped.
var targetLabels = []string{"job", "instance", "namespace", "pod", "container", "cluster"}

// A metric is one that kvgate exports.
type metric struct {
	name, kind string
	labels     []string
}

// exported is the table of docs/metrics.md, which is made from the program.
var exported = sync.OnceValue(func() (out []metric) {
	data, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		panic(err)
	}
	word := regexp.MustCompile("`([^`]+)`")
	labels := -1 // their column
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if i := slices.Index(cells, " labels "); i > 0 {
			labels = i
		}
		if len(cells) <= labels || labels < 0 || !strings.HasPrefix(cells[1], " `kvgate_") {
			continue
		}
		m := metric{name: word.FindStringSubmatch(cells[1])[1], kind: strings.TrimSpace(cells[2])}
		for _, l := range word.FindAllStringSubmatch(cells[labels], -1) {
			m.labels = append(m.labels, l[1])
		}
		out = append(out, m)
	}
	return out
})

// others are metrics of Go's own collectors that alerts and dashboards may name.
var others = []string{"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "go_goroutines"}

// problems says what a query names that kvgate does not export.
func problems(query string) (out []string) {
	expr, err := promql.ParseExpr(query)
	if err != nil {
		return []string{err.Error()}
	}
	known := targetLabels // of the series inside, for aggregations
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		v, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		i := slices.IndexFunc(exported(), func(m metric) bool {
			if m.kind == "histogram" {
				return v.Name == m.name+"_bucket" || v.Name == m.name+"_sum" || v.Name == m.name+"_count"
			}
			return v.Name == m.name
		})
		if i < 0 {
			if !slices.Contains(others, v.Name) {
				out = append(out, fmt.Sprintf("%q is no metric of kvgate", v.Name))
			}
			return nil
		}
		d := exported()[i]
		has := slices.Concat(d.labels, targetLabels)
		if strings.HasSuffix(v.Name, "_bucket") {
			has = append(has, "le")
		}
		known = slices.Concat(known, has)
		for _, m := range v.LabelMatchers {
			if m.Name != labels.MetricName && !slices.Contains(has, m.Name) {
				out = append(out, fmt.Sprintf("%s has no label %q, only %v", v.Name, m.Name, d.labels))
			}
		}
		return nil
	})
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error { // labels that the query itself makes
		if c, ok := n.(*parser.Call); ok && c.Func.Name == "label_replace" {
			if l, ok := c.Args[1].(*parser.StringLiteral); ok {
				known = append(slices.Clone(known), l.Val)
			}
		}
		return nil
	})
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		if a, ok := n.(*parser.AggregateExpr); ok {
			for _, l := range a.Grouping {
				if !slices.Contains(known, l) {
					out = append(out, fmt.Sprintf("no metric in %q has the label %q", query, l))
				}
			}
		}
		return nil
	})
	return out
}

func TestProblemsCanBeFound(t *testing.T) {
	if n := len(exported()); n < 30 {
		t.Fatalf("only %d metrics in docs/metrics.md", n)
	}
	f := func(query string, want int) {
		t.Helper()
		if got := problems(query); len(got) != want {
			t.Errorf("%s: %v; want %d problems", query, got, want)
		}
	}
	f("sum by (pool) (rate(kvgate_requests_total[5m]))", 0)
	f("histogram_quantile(0.9, sum by (le, pool) (rate(kvgate_time_to_first_token_seconds_bucket[5m])))", 0)
	f("sum(kvgate_requests_totals)", 1)
	f("kvgate_time_to_first_token_seconds", 1)
	f("kvgate_endpoint_up{pool=\"p\"}", 1)
	f("sum by (endpoint) (kvgate_snapshot_endpoints)", 1)
	f(`min by (pool) (label_replace(kvgate_endpoint_up, "pool", "$1", "endpoint", "(.+)/.+"))`, 0)
	f("min by (pool) (kvgate_endpoint_up)", 1)
	f("sum(", 1)
}

const alerts = "../../deploy/prometheus/alerts.yaml"

func readAlerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(alerts, false, model.UTF8Validation, promql, slog.Default())
	for _, err := range errs {
		t.Fatal(err)
	}
	var out []rulefmt.Rule
	for _, g := range groups.Groups {
		out = append(out, g.Rules...)
	}
	return out
}

// Alerts name what is exported, how bad it is, and what to do.
func TestAlerts(t *testing.T) {
	for _, r := range readAlerts(t) {
		for _, p := range problems(r.Expr) {
			t.Errorf("%s: %s", r.Alert, p)
		}
		if !slices.Contains([]string{"warning", "critical"}, r.Labels["severity"]) || r.Annotations["summary"] == "" || len(r.Annotations["description"]) < 40 {
			t.Errorf("%s: labels %v, annotations %v; want a severity, a summary and a description", r.Alert, r.Labels, r.Annotations)
		}
	}
}

// docs/operations.md says what to do about every alert, and about no other; alerts say where.
func TestAlertsAreExplained(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for i, s := range strings.Split(string(page), "\n### ") {
		if name, text, _ := strings.Cut(s, "\n"); i > 0 {
			sections[name] = text
		}
	}
	for _, r := range readAlerts(t) {
		text, ok := sections[r.Alert]
		if !ok || !strings.Contains(text, "*Do:*") {
			t.Errorf("docs/operations.md does not say what to do about %s", r.Alert)
		}
		if want := "docs/operations.md#" + strings.ToLower(r.Alert); r.Annotations["runbook"] != want {
			t.Errorf("%s: runbook %q; want %q", r.Alert, r.Annotations["runbook"], want)
		}
		delete(sections, r.Alert)
	}
	for name := range sections {
		t.Errorf("docs/operations.md explains %s, which is no alert", name)
	}
}

// Queries in the documentation ask for what is exported.
func TestDocumentedQueries(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) < 10 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	n := 0
	for _, page := range pages {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for i, block := range strings.Split(string(data), "```promql\n") {
			if i == 0 {
				continue
			}
			queries, _, _ := strings.Cut(block, "```")
			for query := range strings.Lines(queries) {
				n++
				for _, p := range problems(query) {
					t.Errorf("%s: %s", filepath.Base(page), p)
				}
			}
		}
	}
	if n < 4 {
		t.Errorf("only %d queries were found in the documentation", n)
	}
}

// The rules for prometheus-adapter in docs/scaling.md ask for what is exported, and do not bind external metrics to the
// namespace of who asks, which is not the gateway's.
func TestAdapterRules(t *testing.T) {
	page, err := os.ReadFile("../../docs/scaling.md")
	if err != nil {
		t.Fatal(err)
	}
	type rule struct {
		SeriesQuery, MetricsQuery string
		Resources                 struct {
			Namespaced *bool
			Overrides  map[string]struct{ Resource string }
		}
	}
	var all struct{ Rules, ExternalRules []rule }
	for _, text := range strings.Split(string(page), "```") {
		if !strings.HasPrefix(text, "\nrules:") && !strings.HasPrefix(text, "\nexternalRules:") {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(text), &all); err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
	if len(all.Rules) != 1 || len(all.ExternalRules) != 1 {
		t.Fatalf("%d rules and %d external ones; want one of each", len(all.Rules), len(all.ExternalRules))
	}
	if n := all.ExternalRules[0].Resources.Namespaced; n == nil || *n {
		t.Error("the external rule is bound to the namespace of the HorizontalPodAutoscaler")
	}
	for _, label := range []string{"namespace", "pod"} {
		if got := all.Rules[0].Resources.Overrides[label].Resource; got != label {
			t.Errorf("the label %s of the rule for pods is resource %q", label, got)
		}
	}
	for _, r := range slices.Concat(all.Rules, all.ExternalRules) {
		name, _, _ := strings.Cut(r.SeriesQuery, "{")
		query := strings.NewReplacer("<<.Series>>", name, "<<.LabelMatchers>>", "", "<<.GroupBy>>", "pod").Replace(r.MetricsQuery)
		for _, p := range append(problems(r.SeriesQuery), problems(query)...) {
			t.Errorf("%s: %s", r.SeriesQuery, p)
		}
	}
}

// Each alert's expression yields series when it should and none when it should not: testdata/alerts/NAME.test, in the
// language of promqltest, with EXPR for the expression.
func TestAlertsFire(t *testing.T) {
	for _, r := range readAlerts(t) {
		t.Run(r.Alert, func(t *testing.T) {
			script, err := os.ReadFile(filepath.Join("testdata/alerts", r.Alert+".test"))
			if err != nil {
				t.Fatalf("%v: every alert needs a test", err)
			}
			text := string(script)
			if strings.Count(text, "EXPR") < 2 {
				t.Error("want a moment at which it fires and one at which it does not")
			}
			engine := promqltest.NewTestEngine(t, false, 5*time.Minute, promqltest.DefaultMaxSamplesPerQuery)
			promqltest.RunTest(t, strings.ReplaceAll(text, "EXPR", strings.Join(strings.Fields(r.Expr), " ")), engine)
		})
	}
}

// A panel is what we read of one of Grafana's.
type panel struct {
	ID      int     `json:"id"`
	Type    string  `json:"type"`
	Title   string  `json:"title"`
	Panels  []panel `json:"panels"`
	GridPos struct{ H, W, X, Y int }
	Targets []struct {
		Expr, RefID, LegendFormat string
		Datasource                struct{ UID string }
	} `json:"targets"`
	FieldConfig struct{ Defaults struct{ Unit string } }
	Description string `json:"description"`
}

// Every query of the dashboard parses and names what is exported; every panel has a title, a unit and a place of its own.
func TestDashboard(t *testing.T) {
	data, err := os.ReadFile("../../deploy/grafana/kvgate.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		UID, Title string
		Panels     []panel
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	if d.UID == "" || d.Title == "" {
		t.Error("the dashboard has no uid or title")
	}
	variables := map[string]string{"__rate_interval": "5m"}
	for _, v := range d.Templating.List {
		variables[v.Name] = ".*"
		if v.Type == "query" {
			m := regexp.MustCompile(`^label_values\((.+), *(\w+)\)$`).FindStringSubmatch(v.Definition)
			if m == nil {
				t.Errorf("variable %s: %q is not label_values(metric, label)", v.Name, v.Definition)
				continue
			}
			for _, p := range problems("sum by (" + m[2] + ") (" + m[1] + ")") {
				t.Errorf("variable %s: %s", v.Name, p)
			}
		}
	}
	ids, queries := map[int]bool{}, 0
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 || p.Title == "" {
			t.Errorf("panel %q has the number %d, which is not its own", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("panel %q lies over %q, or beyond the edge", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 || p.FieldConfig.Defaults.Unit == "" || p.Description == "" {
			t.Errorf("panel %q has no query, no unit or no description", p.Title)
		}
		for _, q := range p.Targets {
			queries++
			if q.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q: datasource %q; want the variable", p.Title, q.Datasource.UID)
			}
			expr := regexp.MustCompile(`\$\{?(\w+)\}?`).ReplaceAllStringFunc(q.Expr, func(v string) string {
				name := strings.Trim(v, "${}")
				if _, ok := variables[name]; !ok {
					t.Errorf("panel %q: there is no variable %s", p.Title, v)
				}
				return variables[name]
			})
			for _, problem := range problems(expr) {
				t.Errorf("panel %q: %s", p.Title, problem)
			}
		}
	}
	if queries < 20 {
		t.Errorf("only %d queries", queries)
	}
}
