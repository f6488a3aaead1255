package metrics

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"kvgate/pool"
)

// The tests of this file hold one rule of reading each. Every page of theirs reads wrong without its rule.

func loadOf(t *testing.T, dialect, text string) *pool.Load {
	t.Helper()
	_, raw := readText(t, text, dialect)
	return raw.Load()
}

// A line that can't be read costs that line only: garbage, a second TYPE, numbers that are none.
func TestBadLinesAreSkipped(t *testing.T) {
	p, raw := readText(t, `# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 4.0
this line is not metrics
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="1" 5.0
vllm:num_requests_running{engine="1",engine="2"} 6
vllm:num_requests_running{engine="9"} 7 apples
vllm:num_requests_running{engine="8"}
vllm:num_requests_waiting{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} -nan
`, "vllm")
	l := raw.Load()
	if l.Known != pool.KnowsRunning|pool.KnowsWaiting || l.Running != 4 || l.Waiting != 2 {
		t.Errorf("load %+v", l)
	}
	if p.skipped != 5 {
		t.Errorf("%d series skipped; want 5", p.skipped)
	}
}

// What a strict reader of the text format may refuse is read all the same.
func TestWhatIsAccepted(t *testing.T) {
	f := func(what, line string, want float64) {
		t.Helper()
		_, raw := readText(t, line, "vllm")
		if len(raw.Engines) != 1 || raw.Engines[0].Running != known(want) {
			t.Errorf("%s: %+v; want running %v", what, raw.Engines, want)
		}
	}
	f("plain", "vllm:num_requests_running 4\n", 4)
	f("leading blanks", " \tvllm:num_requests_running{engine=\"0\"} 4\n", 4)
	f("trailing blanks", "vllm:num_requests_running{engine=\"0\"} 4 \t\n", 4)
	f("blanks between name, labels and value", "vllm:num_requests_running {engine=\"0\"}\t 4\n", 4)
	f("no blank before the value", "vllm:num_requests_running{engine=\"0\"}4\n", 4)
	f("CRLF", "vllm:num_requests_running{engine=\"0\"} 4.0\r\n\r\n", 4)
	f("CRLF after a comment", "# TYPE vllm:num_requests_running gauge\r\nvllm:num_requests_running 4.0\r\n", 4)
	f("blank lines", "\n  \n\nvllm:num_requests_running 4\n\n", 4)
	f("timestamp in milliseconds", "vllm:num_requests_running{engine=\"0\"} 4.0 1790347303000\n", 4)
	f("timestamp of OpenMetrics", "vllm:num_requests_running{engine=\"0\"} 4.0 1790347303.125\n", 4)
	f("EOF of OpenMetrics", "vllm:num_requests_running{engine=\"0\"} 4\n# EOF\n", 4)
	f("exemplar", "vllm:num_requests_running{engine=\"0\"} 4 # {trace_id=\"a b}\"} 0.5 1790347303.125\n", 4)
	f("exemplar after a timestamp", "vllm:num_requests_running{engine=\"0\"} 4 1790347303 # {trace_id=\"x\"} 0.5\n", 4)
	f("labels in any order", "vllm:num_requests_running{model_name=\"m\",engine=\"0\",pid=\"1\"} 4\n", 4)
	f("trailing comma", "vllm:num_requests_running{engine=\"0\",} 4\n", 4)
	f("no labels in braces", "vllm:num_requests_running{} 4\n", 4)
	f("exponent", "vllm:num_requests_running 1e+06\n", 1e6)
	f("three-digit exponent", "vllm:num_requests_running 4.5e+003\n", 4500)
	f("no HELP, no TYPE, no line feed at the end", "vllm:num_requests_running 4", 4)
}

// Label values hold anything; only an unescaped quote ends them.
func TestLabelValuesHoldAnything(t *testing.T) {
	_, raw := readText(t, `tgi_batch_current_size{method="{'method': 'prefill', 'a,b=c'}"} 3
vllm:num_requests_running{model_name="a}b,c=\"d\" \\",engine="0"} 7
vllm:num_requests_waiting{model_name="a}b,c=\"d\" \\",engine="0"} 2
vllm:num_requests_running{model_name="line\nfeed",engine="0"} 1
`, "vllm")
	want := []RawEngine{
		{Model: "a}b,c=\"d\" \\", ID: "0", Running: known(7), Waiting: known(2)},
		{Model: "line\nfeed", ID: "0", Running: known(1)},
	}
	if !slices.Equal(raw.Engines, want) {
		t.Errorf("got %+v\nwant %+v", raw.Engines, want)
	}
	if l := loadOf(t, "tgi", "tgi_batch_current_size{method=\"{'method': 'prefill', 'a,b=c'}\"} 3\n"); l.Running != 3 {
		t.Errorf("running %d; want 3", l.Running)
	}
}

// Numbers that a gauge or counter can't have are no numbers.
func TestImpossibleValuesAreUnknown(t *testing.T) {
	for _, v := range []string{"NaN", "nan", "-nan", "+Inf", "-Inf", "Inf", "-1", "-0.5", "", "0x1p4", "1_0", "1e400", "four", "--1"} {
		if l := loadOf(t, "vllm", "vllm:num_requests_running "+v+"\nvllm:kv_cache_usage_perc "+v+"\nvllm:prompt_tokens_total "+v+"\n"); l.Known != 0 || l.PromptTokens != -1 {
			t.Errorf("%q: load %+v; want it unknown", v, l)
		}
	}
	if l := loadOf(t, "vllm", "vllm:num_requests_running 0\n"); l.Known != pool.KnowsRunning {
		t.Errorf("zero: %+v; want it known", l)
	}
}

// Of a page that was cut the last line is dropped unless it ended: 4 may have been 42.
func TestCutLineIsDropped(t *testing.T) {
	const text = "vllm:num_requests_running 4\nvllm:num_requests_waiting 4"
	d := Lookup("vllm")
	p := newPage(d.want, d)
	running := func() int { return len(p.samples("vllm:num_requests_running")) }
	waiting := func() int { return len(p.samples("vllm:num_requests_waiting")) }
	if err := p.read(strings.NewReader(text), 1<<20, false); err != nil || running() != 1 || waiting() != 0 {
		t.Errorf("no length known: error %v, %d and %d series; want the first alone", err, running(), waiting())
	}
	if err := p.read(strings.NewReader(text), 1<<20, true); err != nil || running() != 1 || waiting() != 1 {
		t.Errorf("whole body: error %v, %d and %d series; want both", err, running(), waiting())
	}
	if err := p.read(strings.NewReader(text), int64(len(text)), true); err != nil || waiting() != 1 {
		t.Errorf("body of the limit's size: error %v", err)
	}
	if err := p.read(strings.NewReader(text), int64(len(text))-1, true); !errors.Is(err, errTooLarge) || running() != 1 || waiting() != 0 {
		t.Errorf("body over the limit: error %v, %d and %d series; want the first alone", err, running(), waiting())
	}
	r := io.MultiReader(strings.NewReader(text), iotest.ErrReader(io.ErrUnexpectedEOF))
	if err := p.read(r, 1<<20, true); err != io.ErrUnexpectedEOF || running() != 1 || waiting() != 0 {
		t.Errorf("connection cut: error %v, %d and %d series; want the first alone", err, running(), waiting())
	}
}

// A line is put together whatever the reads cut it into, also one longer than the buffer.
func TestLinesAcrossReads(t *testing.T) {
	d := Lookup("vllm")
	p := newPage(d.want, d)
	long := strings.Repeat("x", 3*chunkBytes)
	text := vllmPage + "unwanted{a=\"" + long + "\"} 1\nvllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"" + long + "\"} 1.75e9\nvllm:num_requests_swapped 7\n"
	for _, r := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), iotest.DataErrReader(strings.NewReader(text))} {
		if err := p.read(r, 4<<20, true); err != nil {
			t.Fatal(err)
		}
		raw := d.raw(p, sampleTime)
		if l := raw.Load(); l.Running != 4 || l.Waiting != 2 || len(l.Adapters) != 1 || len(l.Adapters[0]) != len(long) {
			t.Errorf("running %d, waiting %d, %d adapters", l.Running, l.Waiting, len(l.Adapters))
		}
		if s := p.samples("vllm:num_requests_swapped"); len(s) != 1 || s[0].value != 7 {
			t.Errorf("swapped %v", s)
		}
	}
}

// What is no metrics page leaves the load unknown, and says what it is.
func TestWhatIsNoPage(t *testing.T) {
	f := func(status int, body string, want Fault) {
		t.Helper()
		s := newModelServer(t)
		s.handle("/metrics", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		})
		r, err := scrapeOnce(t, s.URL, "vllm", Options{})
		if got := faultOf(err); got != want || r.Load != nil {
			t.Errorf("%d %q: fault %q, load %+v; want %q and none", status, body, got, r.Load, want)
		}
	}
	f(404, "404 page not found", FaultNotFound)
	f(404, vllmPage, FaultNotFound)
	f(501, `{"error":{"code":501,"message":"not supported"}}`, FaultNotFound)
	f(500, vllmPage, FaultStatus)
	f(503, "", FaultStatus)
	f(401, "", FaultUnauthorized)
	f(200, "\n <!doctype html><html>", FaultHTML)
	f(200, " {\"detail\":\"Not Found\"}", FaultJSON)
	f(200, "[]", FaultJSON)
	f(200, "", FaultEmpty)
	f(200, "# HELP vllm:x none\n\n", FaultEmpty)
	f(200, "go_goroutines 12\nprocess_start_time_seconds 1.7e9\n", FaultUnrecognized)
}

// Absent gauges are unknown, whatever else the page tells.
func TestAbsentIsUnknown(t *testing.T) {
	l := loadOf(t, "vllm", "vllm:num_requests_running{engine=\"0\"} 0\n")
	if l.Known != pool.KnowsRunning {
		t.Errorf("known %b; want running alone", l.Known)
	}
	// What is swapped out is no queue: it says nothing of requests that have not begun.
	if l := loadOf(t, "vllm", "vllm:num_requests_swapped 3\n"); l.Known.Has(pool.KnowsWaiting) {
		t.Errorf("waiting is known from swapped alone: %+v", l)
	}
}

// Nothing asks for compression or OpenMetrics; what comes compressed all the same is read under the same limit.
func TestCompressionIsNotAskedForButRead(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	fmt.Fprint(z, vllmPage)
	z.Close()
	for _, encoding := range []string{"gzip", "X-GZIP", ""} {
		s := newModelServer(t)
		s.handle("/metrics", func(w http.ResponseWriter, r *http.Request) {
			if h := r.Header.Values("Accept-Encoding"); len(h) > 0 {
				t.Errorf("Accept-Encoding: %v", h)
			}
			if a := r.Header.Get("Accept"); strings.Contains(a, "openmetrics") {
				t.Errorf("Accept: %s", a)
			}
			if encoding != "" {
				w.Header().Set("Content-Encoding", encoding)
			}
			w.Write(zipped.Bytes())
		})
		r, err := scrapeOnce(t, s.URL, "vllm", Options{})
		if err != nil || r.Load.Running != 4 {
			t.Errorf("encoding %q: error %v", encoding, err)
		}
		if r, err := scrapeOnce(t, s.URL, "vllm", Options{MaxPageBytes: int64(len(vllmPage)) - 1}); faultOf(err) != FaultTooLarge {
			t.Errorf("encoding %q over the limit: error %v, load %+v", encoding, err, r.Load)
		}
	}
	s := newModelServer(t)
	s.handle("/metrics", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "zstd")
		fmt.Fprint(w, "xxxxxxxxxxxx")
	})
	if _, err := scrapeOnce(t, s.URL, "vllm", Options{}); faultOf(err) != FaultEncoding {
		t.Errorf("zstd: %v", err)
	}
}

// OpenMetrics, which vLLM's Rust front end sends whatever it is asked for, is read.
func TestOpenMetricsIsRead(t *testing.T) {
	l := loadOf(t, "vllm", `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="1"} 21
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="m",engine="1"} 118001
vllm:prompt_tokens_created{model_name="m",engine="1"} 1.75801020e9
# EOF
`)
	if l.Running != 21 || l.PromptTokens != 118001 {
		t.Errorf("load %+v", l)
	}
}

// Series are grouped by model and engine: copies (processes, ranks) collapse to the largest, groups add up, utilization
// has a mean and a maximum.
func TestEnginesAddUpAndCopiesDoNot(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:num_requests_running{engine="0",model_name="m",pid="1"} 5
vllm:num_requests_running{engine="0",model_name="m",pid="2"} 0
vllm:num_requests_running{engine="10",model_name="m",pid="1"} 3
vllm:num_requests_running{engine="2",model_name="m",pid="1"} 1
vllm:num_requests_waiting{engine="0",model_name="m"} 0
vllm:num_requests_waiting{engine="2",model_name="m"} 50
vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="1"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="2"} 0.6
vllm:kv_cache_usage_perc{engine="2",model_name="m"} 0.2
vllm:prompt_tokens_total{engine="0",model_name="m"} 100
vllm:prompt_tokens_total{engine="2",model_name="m"} 50
`)
	if l.Running != 9 || l.Waiting != 50 || l.KVCacheUtilizationMax != 0.6 || l.KVCacheUtilization != 0.4 || l.PromptTokens != 150 {
		t.Errorf("load %+v", l)
	}
	var ids []string
	for _, e := range l.Engines {
		ids = append(ids, e.ID)
	}
	if want := []string{"0", "2", "10"}; !slices.Equal(ids, want) {
		t.Errorf("engines %v; want %v", ids, want)
	}
	if e := l.Engines[2]; e.Known != pool.KnowsRunning || e.Running != 3 {
		t.Errorf("engine 10: %+v; want running alone to be known", e)
	}
	l = loadOf(t, "sglang", `sglang:num_running_reqs{model_name="m",dp_rank="0",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 9
sglang:num_running_reqs{model_name="m",dp_rank="0",tp_rank="1",pp_rank="0",moe_ep_rank="1"} 9
sglang:num_running_reqs{model_name="m",dp_rank="1",tp_rank="2",pp_rank="1",moe_ep_rank="2"} 4
sglang:num_running_reqs{model_name="m",dp_rank="1",tp_rank="3",pp_rank="1",moe_ep_rank="3"} 3
sglang:cached_tokens_total{model_name="m",cache_source="device",tp_rank="0"} 70
sglang:cached_tokens_total{model_name="m",cache_source="device",tp_rank="1"} 70
sglang:cached_tokens_total{model_name="m",cache_source="host",tp_rank="0"} 5
`)
	if l.Running != 13 || len(l.Engines) != 2 || l.PrefixHitTokens != 75 {
		t.Errorf("sglang load %+v", l)
	}
}

// The mean over engines weighs their capacities.
func TestMeanUtilizationIsWeightedByCapacity(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:kv_cache_usage_perc{engine="0"} 0.9
vllm:kv_cache_usage_perc{engine="1"} 0.1
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1
vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="300"} 1
`)
	if l.KVCacheUtilization != 0.3 || l.KVCacheUtilizationMax != 0.9 || l.KVCapacityTokens != 6400 || l.Engines[1].KVCapacityTokens != 4800 {
		t.Errorf("load %+v", l)
	}
}

// SGLang with priority scheduling repeats its totals split by priority.
func TestPrioritySplitsAreIgnored(t *testing.T) {
	const page = `sglang:num_queue_reqs{model_name="m",priority=""} 5
sglang:num_queue_reqs{model_name="m",priority="1"} 7
sglang:num_queue_reqs{model_name="m",priority="0"} 2
`
	if l := loadOf(t, "sglang", page); l.Waiting != 5 {
		t.Errorf("waiting %d; want 5", l.Waiting)
	}
	p, _ := readText(t, page, "")
	p.adopt(detect(p))
	if l := p.dialect.raw(p, sampleTime).Load(); l.Waiting != 5 {
		t.Errorf("detected: waiting %d; want 5", l.Waiting)
	}
}

// The newer name of vLLM's KV usage goes before the older.
func TestNewerKVNameIsPreferred(t *testing.T) {
	if l := loadOf(t, "vllm", "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.25\n"); l.KVCacheUtilization != 0.25 {
		t.Errorf("utilization %v; want 0.25", l.KVCacheUtilization)
	}
	if l := loadOf(t, "vllm", "vllm:gpu_cache_usage_perc 0.9\nvllm:cpu_cache_usage_perc 1\n"); l.KVCacheUtilization != 0.9 {
		t.Errorf("utilization %v; want 0.9", l.KVCacheUtilization)
	}
}

// The label holds the first served name only, so no model name filters, and no engine must be "0".
func TestModelAndEngineLabelsAreNotFilters(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:num_requests_waiting{engine="3",model_name="never-asked-for"} 2
vllm:num_requests_waiting{engine="3",model_name="other"} 3
`)
	if l.Waiting != 5 {
		t.Errorf("waiting %d; want 5", l.Waiting)
	}
	// Two names for one engine share its KV space.
	l = loadOf(t, "vllm", `vllm:num_requests_waiting{model_name="a"} 2
vllm:num_requests_waiting{model_name="b"} 3
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
`)
	if l.KVCapacityTokens != 1600 {
		t.Errorf("capacity %d; want 1600", l.KVCapacityTokens)
	}
}

// The largest value, which is a time, names the series that speaks of now, wherever it stands; look-alikes don't.
func TestNewestAdapterSeriesWins(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7390000001e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.739000003e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters="x"} 1.739e+09
vllm:lora_requests_info_created{max_lora="9",running_lora_adapters="created"} 1.9e+09
`)
	if want := []string{"a", "b", "c"}; !slices.Equal(l.Adapters, want) || l.MaxAdapters != 4 {
		t.Errorf("adapters %q of %d; want %q of 4", l.Adapters, l.MaxAdapters, want)
	}
	// Idle: the newest series is empty, which is known.
	l = loadOf(t, "vllm", `vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 1.7390000001e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.739000003e+09
`)
	if !l.Known.Has(pool.KnowsAdapters) || len(l.Adapters) != 0 {
		t.Errorf("adapters %q; want none, and known", l.Adapters)
	}
}

// Several processes that share one page add up their times.
func TestAdapterTimesOfSeveralProcesses(t *testing.T) {
	l := loadOf(t, "vllm", fmt.Sprintf(`vllm:lora_requests_info{max_lora="4",running_lora_adapters="both"} %d
vllm:lora_requests_info{max_lora="4",running_lora_adapters="newest"} %d
vllm:lora_requests_info{max_lora="4",running_lora_adapters="three"} %d
`, 2*(sampleTime-20), sampleTime-10, 3*(sampleTime-30)))
	if want := []string{"newest"}; !slices.Equal(l.Adapters, want) {
		t.Errorf("adapters %q; want %q", l.Adapters, want)
	}
}

// Names are split at commas and trimmed, and empty ones dropped.
func TestAdapterNamesAreTrimmed(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:lora_requests_info{max_lora="4",running_lora_adapters=" b , a,,",waiting_lora_adapters=", "} 1.739e9`+"\n")
	if want := []string{"a", "b"}; !slices.Equal(l.Adapters, want) {
		t.Errorf("adapters %q; want %q", l.Adapters, want)
	}
}

// The two lists are one set: four slots of which two are taken have two free.
func TestAdapterListsAreOneSet(t *testing.T) {
	l := loadOf(t, "vllm", `vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="a,b"} 1.739e9`+"\n")
	if want := []string{"a", "b"}; !slices.Equal(l.Adapters, want) || l.MaxAdapters != 4 {
		t.Errorf("adapters %q of %d; want %q of 4", l.Adapters, l.MaxAdapters, want)
	}
}

// A ratio just above 1 is 1; beyond that it isn't one. Nothing is taken for a percentage.
func TestRatiosAboveOne(t *testing.T) {
	f := func(value string, want float64, ok bool, anomalies int) {
		t.Helper()
		_, raw := readText(t, "vllm:kv_cache_usage_perc "+value+"\n", "vllm")
		l := raw.Load()
		if l.KVCacheUtilization != want || l.Known.Has(pool.KnowsKVCacheUtilization) != ok || raw.Anomalies != anomalies {
			t.Errorf("%s: %v (known: %v), %d anomalies", value, l.KVCacheUtilization, l.Known.Has(pool.KnowsKVCacheUtilization), raw.Anomalies)
		}
	}
	f("1", 1, true, 0)
	f("1.0001", 1, true, 1)
	f("1.05", 1, true, 1)
	f("1.06", 0, false, 1)
	f("45", 0, false, 1)
}

// Capacity is what the server says, or block size times blocks, with decoys and "None" left alone.
func TestCapacity(t *testing.T) {
	f := func(labels string, want int64) {
		t.Helper()
		l := loadOf(t, "vllm", "vllm:num_requests_running{engine=\"0\"} 1\nvllm:cache_config_info{"+labels+"} 1\n")
		if l.KVCapacityTokens != want || l.Known.Has(pool.KnowsKVCapacity) != (want > 0) {
			t.Errorf("%s: capacity %d; want %d", labels, l.KVCapacityTokens, want)
		}
	}
	f(`block_size="16",num_gpu_blocks="100",engine="0"`, 1600)
	f(`block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1500",engine="0"`, 1500)
	f(`block_size="16",num_gpu_blocks="None"`, 0)
	f(`mamba_block_size="1000000",user_specified_block_size="32",_block_size_resolved="True",block_size="16",num_gpu_blocks="10",num_gpu_blocks_override="99"`, 160)
	f(`block_size="None",num_gpu_blocks="100"`, 0)
}

// Waiting is everybody who waits: swapped out, between prefill and decode servers, in front of the engine. Deferred
// requests are in the queue already.
func TestWaitingAddsUp(t *testing.T) {
	f := func(dialect, page string, want int32) {
		t.Helper()
		if l := loadOf(t, dialect, page); l.Waiting != want || !l.Known.Has(pool.KnowsWaiting) {
			t.Errorf("%s: waiting %d (known %b); want %d", dialect, l.Waiting, l.Known, want)
		}
	}
	f("vllm", "vllm:num_requests_waiting 7\nvllm:num_requests_swapped 5\n", 12)
	f("vllm", "vllm:num_requests_waiting 18\nvllm:num_requests_waiting_by_reason{reason=\"deferred\"} 18\nvllm:num_requests_waiting_by_reason{reason=\"capacity\"} 0\n", 18)
	f("sglang", "sglang:num_queue_reqs 1\nsglang:num_decode_prealloc_queue_reqs 17\nsglang:num_decode_transfer_queue_reqs 6\nsglang:num_grammar_queue_reqs 2\n", 26)
	f("lmdeploy", "lmdeploy:num_requests_waiting{engine=\"0\"} 2\nlmdeploy:num_api_requests_waiting 3\n", 5)
	f("lmdeploy", "lmdeploy:num_requests_waiting{engine=\"0\"} 2\nlmdeploy:num_requests_waiting{engine=\"1\"} 4\nlmdeploy:num_api_requests_waiting 3\n", 9)
	f("max", "maxserve_num_requests_queued 7\nmaxserve_num_requests_awaiting_admission 1\n", 8)
	f("triton", "nv_trt_llm_request_metrics{model=\"m\",request_type=\"waiting\"} 3\nnv_inference_pending_request_count{model=\"m\"} 2\nnv_inference_pending_request_count{model=\"other\"} 9\n", 5)
}

// An engine whose weights are offloaded looks idle, and isn't.
func TestSleepState(t *testing.T) {
	f := func(page string, sleeping, ok bool) {
		t.Helper()
		if l := loadOf(t, "vllm", "vllm:num_requests_running 0\n"+page); l.Sleeping != sleeping || l.Known.Has(pool.KnowsSleeping) != ok {
			t.Errorf("%q: sleeping %v (known: %v)", page, l.Sleeping, l.Known.Has(pool.KnowsSleeping))
		}
	}
	f("", false, false)
	f("vllm:engine_sleep_state{sleep_state=\"awake\"} 1\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 0\n", false, true)
	f("vllm:engine_sleep_state{sleep_state=\"awake\"} 0\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 1\n", true, true)
}
