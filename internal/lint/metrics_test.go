package lint

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/telemetry"
)

var update = flag.Bool("update", false, "rewrite generated documents")

// generated compares a document with what the program says it should be, or writes it with -update.
func generated(t *testing.T, name, want string) {
	t.Helper()
	file := filepath.Join(root, filepath.FromSlash(name))
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is out of date; run make generate", name)
	}
}

func TestMetricsAreDocumented(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Made by make generate from telemetry/names.go. -->

kvgate exports these on the admin listener under ` + "`/metrics`" + `, beside Go's own ` + "`go_*` and `process_*`" + `. Times are in
seconds, sizes in bytes, shares are ratios from 0 to 1. A value that is not known has no series: so have an endpoint's KV
cache, running, waiting and foreign requests while it is ` + "`down`" + `, or when its page was last read longer ago than
` + "`scrape.stale_after`" + `. Labels are bounded: names that are configured or served always appear, names that clients make up fold
into ` + "`" + telemetry.OtherModel + "`" + ` beyond a thousand, tenants as ` + "`metrics.tenants`" + ` says, and the series of an endpoint go when it has left the table. Where OpenTelemetry's GenAI conventions have a metric that says the
same, it is named, and the buckets are the advised ones.

| name | type | unit | labels | meaning | OpenTelemetry |
|---|---|---|---|---|---|
`)
	for _, d := range telemetry.Definitions() {
		var labels []string
		for _, l := range d.Labels {
			labels = append(labels, "`"+l+"`")
		}
		otel := ""
		if d.OTel != "" {
			otel = "`" + d.OTel + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | %s |\n", d.Name, d.Kind, d.Unit(), strings.Join(labels, " "), strings.ReplaceAll(d.Help, "|", `\|`), otel)
	}
	b.WriteString("\n## What to ask\n\nOne PromQL expression for each.\n\n| metric | expression |\n|---|---|\n")
	for _, d := range telemetry.Definitions() {
		fmt.Fprintf(&b, "| `%s` | `%s` |\n", d.Name, strings.ReplaceAll(d.Example(), "|", `\|`))
	}
	b.WriteString(`
## OpenTelemetry

Metrics with a name in the last column of the first table mean what the GenAI conventions say and have the buckets that they
advise. Their attributes are these labels: ` + "`gen_ai.request.model` is `model`, `gen_ai.token.type` is `type` (`input`, `output`), `error.type` is `outcome`\nother than `ok`, `server.address` is `endpoint`" + `. A collector's Prometheus receiver with a metric transform renames them. Spans carry
the conventions' own names: see [tracing.md](tracing.md).

With ` + "`metrics.native_histograms: true`" + `, histograms have native buckets too, for a Prometheus that scrapes protobuf.
`)
	b.WriteString("\n# The access log\n\nOne JSON object per request at level info, with `msg` `request`. A field whose value is unknown is left out.\n\n`" +
		strings.Join(append([]string{"level", "ts", "msg"}, telemetry.AccessFields...), "` `") + "`\n")
	generated(t, "docs/metrics.md", b.String())
}
