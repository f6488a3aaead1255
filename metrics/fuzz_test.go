package metrics

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	dto "github.com/prometheus/client_model/go"

	"kvgate/internal/shared"
)

var seedPages = []string{
	vllmPage,
	"vllm:num_requests_running{engine=\"0\",model_name=\"a}b,c=\\\"d\\\" \\\\\",} 4.5e+003 1790347303000\n",
	" \tvllm:num_requests_running { engine = \"0\" , } 4 \nvllm:num_requests_running{}7\n",
	"# TYPE vllm:num_requests_running gauge\n# HELP vllm:num_requests_running x\\n\\\\y\nvllm:num_requests_running NaN\nvllm:num_requests_running +Inf\nvllm:num_requests_running -1\n",
	"vllm:num_requests_running{a=\"\\n\"} 0x1p4\nvllm:num_requests_waiting_extra 9\nvllm:num_requests_waiting 1\n",
	"vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"a,b\"} 1.7e+09 # {x=\"y\"} 1\n# EOF\n",
	"# TYPE vllm:kv_cache_usage_perc histogram\nvllm:kv_cache_usage_perc_bucket{le=\"1\"} 1\nvllm:kv_cache_usage_perc_sum 3\n",
	"{\"vllm:num_requests_running\",engine=\"0\"} 4\n",
	"vllm:num_requests_running 4\r\n", "vllm:num_requests_running", "\n\n \n", "#", "vllm:num_requests_running{a=\"",
	"vllm:num_requests_running{a=\"\xff\"} 1\n", "vllm:num_requests_running{\"a\"=\"b\"} 1\n", "vllm:num_requests_running 1 -5\n",
}

// The line scanner agrees with the Prometheus parser on every page that both take, and survives all others.
func FuzzPage(f *testing.F) {
	for _, s := range seedPages {
		f.Add([]byte(s))
	}
	if dir, ok := shared.Find(); ok {
		names, _ := filepath.Glob(filepath.Join(dir, "metrics-samples", "*.prom"))
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && len(b) < 8<<10 {
				f.Add(b)
			}
		}
	}
	d := Lookup("vllm")
	f.Fuzz(func(t *testing.T, b []byte) {
		p := newPage(d.want, d)
		err := p.read(bytes.NewReader(b), 1<<20, true)
		if err == nil {
			d.raw(p, sampleTime).Load() // must not panic
		}
		got := scanned(p)
		// A page that was seen before is read the same way.
		if err2 := p.read(bytes.NewReader(b), 1<<20, true); (err == nil) != (err2 == nil) || !slices.Equal(scanned(p), got) {
			t.Fatalf("read again: error %v and %q; first error %v and %q", err2, scanned(p), err, got)
		}
		if err != nil {
			return
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(bytes.NewReader(b))
		if err != nil {
			return
		}
		for line := range bytes.Lines(b) {
			// Names in quotes are for servers that were asked for them; none is.
			if line = bytes.TrimLeft(line, " \t"); len(line) > 0 && line[0] == '{' {
				return
			}
		}
		want, ok := parsed(families, d.want)
		if ok && !slices.Equal(got, want) {
			t.Errorf("scanner: %q\n parser: %q", got, want)
		}
	})
}

func scanned(p *page) (lines []string) {
	for f, samples := range p.byFamily {
		for _, s := range samples {
			lines = append(lines, describe(p.want.names[f], s.labels, s.value))
		}
	}
	slices.Sort(lines)
	return lines
}

func describe(name string, labels []label, v float64) string {
	labels = slices.Clone(labels)
	slices.SortFunc(labels, func(a, b label) int { return cmp.Compare(a.name, b.name) })
	return fmt.Sprint(name, labels, v)
}

// parsed lists the samples of the wanted families; ok is false if one of them is of a kind that no gauge or counter has.
func parsed(families map[string]*dto.MetricFamily, want *wanted) (lines []string, ok bool) {
	for name, f := range families {
		histogram := f.GetType() == dto.MetricType_HISTOGRAM || f.GetType() == dto.MetricType_SUMMARY || f.GetType() == dto.MetricType_GAUGE_HISTOGRAM
		_, wanted := want.ids[name]
		for _, n := range want.names {
			if histogram && strings.HasPrefix(n, name) {
				return nil, false
			}
		}
		if !wanted {
			continue
		}
		for _, m := range f.Metric {
			v := m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue()
			if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
				continue
			}
			var labels []label
			for _, l := range m.Label {
				labels = append(labels, label{l.GetName(), l.GetValue()})
			}
			lines = append(lines, describe(name, labels, v))
		}
	}
	slices.Sort(lines)
	return lines, true
}

// No page makes a dialect panic or report what can't be.
func FuzzDialects(f *testing.F) {
	for _, s := range seedPages {
		f.Add([]byte(s), 1e9)
	}
	f.Add([]byte("vllm:lora_requests_info{max_lora=\"1e300\",running_lora_adapters=\",,\"} 3.4e+09\nvllm:num_requests_running 1e300\n"), 1.7e9)
	f.Add([]byte("sglang:cache_config_info{page_size=\"1e200\",num_pages=\"1e200\"} 1\nsglang:token_usage 0.2\n"), 0.0)
	f.Fuzz(func(t *testing.T, b []byte, now float64) {
		for _, d := range Dialects() {
			p := newPage(d.want, d)
			if p.read(bytes.NewReader(b), 1<<20, true) != nil {
				continue
			}
			l := d.raw(p, now).Load()
			ratio := func(v float64) bool { return v >= 0 && v <= 1 }
			if !ratio(l.KVCacheUtilization) || !ratio(l.KVCacheUtilizationMax) || l.KVCacheUtilization > l.KVCacheUtilizationMax+1e-9 ||
				l.Running < 0 || l.Waiting < 0 || l.KVCapacityTokens < 0 || l.MaxAdapters < 0 || l.AdapterSlotsUsed < 0 ||
				!slices.IsSorted(l.Adapters) || slices.Contains(l.Adapters, "") {
				t.Errorf("%s: %+v", d.Name, l)
			}
			for _, e := range l.Engines {
				if e.ID == "" || !ratio(e.KVCacheUtilization) || e.Running < 0 || e.Waiting < 0 || e.KVCapacityTokens < 0 {
					t.Errorf("%s: engine %+v", d.Name, e)
				}
			}
		}
	})
}
