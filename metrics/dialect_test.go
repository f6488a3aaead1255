package metrics

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvgate/pool"
)

// Every dialect is complete: it can be found, says what it is, and reads what it detects.
func TestDialectsConform(t *testing.T) {
	if names := Names(); names[0] != Auto || !slices.IsSorted(names[1:]) || len(names) != len(Dialects())+1 {
		t.Errorf("names %q", names)
	}
	for _, want := range []string{
		"vllm", "sglang", "trtllm", "triton", "tgi", "lorax", "tei", "llamacpp", "lmdeploy", "nim", "dynamo", "max", "jetstream",
		"aphrodite", "ray", "custom", "none",
	} {
		if Lookup(want) == nil {
			t.Errorf("there is no dialect %s", want)
		}
	}
	name := regexp.MustCompile(`^[a-z]+$`)
	family := regexp.MustCompile(`^[a-z_]+:?[a-zA-Z0-9_]+$`)
	for _, d := range Dialects() {
		switch {
		case !name.MatchString(d.Name) || Lookup(d.Name) != d:
			t.Errorf("%s: not a name that is found", d.Name)
		case !strings.HasSuffix(d.Doc, ".") && !strings.HasSuffix(d.Doc, ".)"):
			t.Errorf("%s: doc %q is no sentence", d.Name, d.Doc)
		case d.Name == "none" || d.Name == Custom:
			continue
		case !slices.Contains(detectionOrder, d.Name):
			t.Errorf("%s: not detected", d.Name)
		case len(d.Paths) == 0 || len(d.Detect) == 0:
			t.Errorf("%s: paths %q, detect %q; want some of each", d.Name, d.Paths, d.Detect)
		}
		for _, f := range d.want.names {
			if !family.MatchString(f) {
				t.Errorf("%s: %q is no family", d.Name, f)
			}
		}
		for _, f := range d.Detect {
			// A page with nothing but that family is detected, and read without harm. Those of an engine that is passed
			// through are the engine's own.
			p := newPage(everyFamily(), nil)
			if err := p.read(strings.NewReader(f+" 1\n"), 1<<20, true); err != nil {
				t.Fatal(err)
			}
			if got := detect(p); got != d {
				t.Errorf("%s: a page with %s alone is detected as %v", d.Name, f, got)
			}
			p.adopt(d)
			if l := d.raw(p, sampleTime).Load(); l.Dialect != d.Name {
				t.Errorf("%s: load of %s", d.Name, l.Dialect)
			}
		}
		// An empty page is unknown in all respects.
		p := newPage(d.want, d)
		if err := p.read(strings.NewReader("other 1\n"), 1<<20, true); err != nil {
			t.Fatal(err)
		}
		if l := d.raw(p, sampleTime).Load(); l.Known != 0 || l.PromptTokens != -1 || l.Preemptions != -1 || l.StartTime != 0 {
			t.Errorf("%s: an empty page yields %+v", d.Name, l)
		}
	}
}

// Dialects whose servers no sample is of, by pages after their documentation.
func TestDialectsWithoutSamples(t *testing.T) {
	f := func(dialect, page string, want pool.Load) {
		t.Helper()
		l := loadOf(t, dialect, page)
		want.PromptTokens, want.GenerationTokens, want.PrefixHitTokens, want.PrefixQueryTokens, want.Preemptions = l.PromptTokens, l.GenerationTokens, l.PrefixHitTokens, l.PrefixQueryTokens, l.Preemptions
		want.Dialect = dialect
		engines := l.Engines
		l.Engines = nil
		if !sameLoad(l, &want) {
			t.Errorf("%s:\n got %+v\nwant %+v\nengines %+v", dialect, l, &want, engines)
		}
	}
	const rwu = pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization
	f("nim", "num_requests_running{model_name=\"m\"} 3\nnum_requests_waiting{model_name=\"m\"} 1\ngpu_cache_usage_perc{model_name=\"m\"} 0.25\nnum_request_max 64\n",
		pool.Load{Known: rwu, Running: 3, Waiting: 1, KVCacheUtilization: 0.25, KVCacheUtilizationMax: 0.25})
	f("nim", vllmPage, pool.Load{Known: rwu | pool.KnowsKVCapacity, Running: 4, Waiting: 2, KVCacheUtilization: 0.5, KVCacheUtilizationMax: 0.5, KVCapacityTokens: 16000})
	f("nim", "sglang:num_running_reqs{model_name=\"m\",priority=\"\"} 3\nsglang:num_running_reqs{model_name=\"m\",priority=\"1\"} 9\n",
		pool.Load{Known: pool.KnowsRunning, Running: 3})
	f("aphrodite", strings.ReplaceAll(vllmPage, "vllm:", "aphrodite:"),
		pool.Load{Known: rwu | pool.KnowsKVCapacity, Running: 4, Waiting: 2, KVCacheUtilization: 0.5, KVCacheUtilizationMax: 0.5, KVCapacityTokens: 16000})
	f("ray", strings.ReplaceAll(vllmPage, "vllm:", "ray_vllm:"),
		pool.Load{Known: rwu | pool.KnowsKVCapacity, Running: 4, Waiting: 2, KVCacheUtilization: 0.5, KVCacheUtilizationMax: 0.5, KVCapacityTokens: 16000})
	f("lmdeploy", `lmdeploy:num_requests_running{model_name="m",engine="0"} 3
lmdeploy:num_requests_running{model_name="m",engine="1"} 4
lmdeploy:num_requests_waiting{model_name="m",engine="0"} 1
lmdeploy:num_requests_waiting{model_name="m",engine="1"} 0
lmdeploy:gpu_cache_usage_perc{model_name="m",engine="0"} 0.5
lmdeploy:gpu_cache_usage_perc{model_name="m",engine="1"} 0.25
`, pool.Load{Known: rwu, Running: 7, Waiting: 1, KVCacheUtilization: 0.375, KVCacheUtilizationMax: 0.5})
	f("tgi", "tgi_queue_size 2\ntgi_batch_current_size 3\ntgi_batch_current_max_tokens 25\ntgi_batch_max_total_tokens 100\n",
		pool.Load{Known: rwu | pool.KnowsKVCapacity, Running: 3, Waiting: 2, KVCacheUtilization: 0.25, KVCacheUtilizationMax: 0.25, KVCapacityTokens: 100})
	// A worker of Dynamo passes its engine through, with labels more; without the engine its own gauge is all there is.
	f("dynamo", `vllm:num_requests_running{engine="0",model_name="m",dynamo_namespace="n",dynamo_component="c",dynamo_endpoint="e"} 3
vllm:kv_cache_usage_perc{engine="0",model_name="m",dynamo_namespace="n",dynamo_component="c",dynamo_endpoint="e"} 0.5
`, pool.Load{Known: pool.KnowsRunning | pool.KnowsKVCacheUtilization, Running: 3, KVCacheUtilization: 0.5, KVCacheUtilizationMax: 0.5})
	f("dynamo", "dynamo_component_gpu_cache_usage_percent{dynamo_component=\"c\"} 0.75\n",
		pool.Load{Known: pool.KnowsKVCacheUtilization, KVCacheUtilization: 0.75, KVCacheUtilizationMax: 0.75})
	// A front end tells the space of one worker, and how many there are.
	f("dynamo", `dynamo_frontend_inflight_requests{model="m"} 31
dynamo_frontend_model_total_kv_blocks{model="m"} 100
dynamo_frontend_model_kv_cache_block_size{model="m"} 16
dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="1"} 8
dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="2"} 4
dynamo_frontend_lora_active_requests{lora="sql/v2"} 3
dynamo_frontend_lora_active_requests{lora="idle"} 0
`, pool.Load{Known: pool.KnowsRunning | pool.KnowsKVCapacity | pool.KnowsAdapters, Running: 31, KVCapacityTokens: 3200, Adapters: []string{"sql/v2"}})
	// Each model of a Triton has a cache of its own.
	f("triton", `nv_trt_llm_request_metrics{model="a",request_type="scheduled",version="1"} 1
nv_trt_llm_request_metrics{model="b",request_type="scheduled",version="1"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="a",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="a",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="b",version="1"} 50
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="b",version="1"} 64
`, pool.Load{Known: pool.KnowsRunning | pool.KnowsKVCapacity, Running: 3, KVCapacityTokens: 9600})
}

func sameLoad(a, b *pool.Load) bool {
	adapters := slices.Equal(a.Adapters, b.Adapters)
	x, y := *a, *b
	x.Adapters, y.Adapters = nil, nil
	x.Engines, y.Engines = nil, nil
	// Loads hold slices, so they can't be compared as they are.
	return adapters && x.Known == y.Known && x.Running == y.Running && x.Waiting == y.Waiting &&
		x.KVCacheUtilization == y.KVCacheUtilization && x.KVCacheUtilizationMax == y.KVCacheUtilizationMax &&
		x.KVCapacityTokens == y.KVCapacityTokens && x.MaxAdapters == y.MaxAdapters && x.AdapterSlotsUsed == y.AdapterSlotsUsed &&
		x.Sleeping == y.Sleeping && x.StartTime == y.StartTime && x.Dialect == y.Dialect
}

// The dialect that a pool describes itself.
func TestCustomDialect(t *testing.T) {
	const page = `my_running{stage="decode",gpu="0"} 3
my_running{stage="prefill",gpu="0"} 9
my_running{stage="decode",gpu="1"} 4
my_queue 2
my_kv_used{gpu="0"} 25
my_kv_used{gpu="1"} 75
my_kv_total{gpu="0"} 100
my_kv_total{gpu="1"} 100
my_adapter_in_use{name="sql"} 1
my_adapter_in_use{name="chat"} 0
my_adapter_slots 8
my_ratio 0.125
`
	s := newModelServer(t)
	s.serve("/stats", page)
	s.serve("/v1/models", modelList)
	f := func(m Mapping, want pool.Load) {
		t.Helper()
		m.Path = "/stats"
		o := Options{Pools: map[string]PoolOptions{"p": {Custom: &m}}}
		r, err := scrapeOnce(t, s.URL, Custom, o)
		if err != nil {
			t.Error(err)
			return
		}
		want.Dialect = Custom
		if !sameLoad(r.Load, &want) {
			t.Errorf("%+v:\n got %+v\nwant %+v", m, r.Load, &want)
		}
	}
	f(Mapping{Running: `my_running{stage="decode"}`, Waiting: "my_queue", KVUsed: "my_kv_used", KVTotal: "my_kv_total", BlockTokens: 16, EngineLabel: "gpu"},
		pool.Load{
			Known:   pool.KnowsRunning | pool.KnowsWaiting | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity,
			Running: 7, Waiting: 2, KVCacheUtilization: 0.5, KVCacheUtilizationMax: 0.75, KVCapacityTokens: 3200,
		})
	f(Mapping{Running: `my_running{stage="decode",gpu="1"}`, KVCacheUtilization: "my_ratio", KVCapacityTokens: `my_kv_total{gpu="0"}`},
		pool.Load{
			Known:   pool.KnowsRunning | pool.KnowsKVCacheUtilization | pool.KnowsKVCapacity,
			Running: 4, KVCacheUtilization: 0.125, KVCacheUtilizationMax: 0.125, KVCapacityTokens: 100,
		})
	f(Mapping{Adapters: "my_adapter_in_use", AdaptersLabel: "name", MaxAdapters: "my_adapter_slots"},
		pool.Load{Known: pool.KnowsAdapters | pool.KnowsMaxAdapters, Adapters: []string{"sql"}, MaxAdapters: 8})

	if _, err := scrapeOnce(t, s.URL, Custom, Options{}); err == nil || !strings.Contains(err.Error(), "doesn't say which series") {
		t.Errorf("custom without a mapping: %v", err)
	}
}

func TestCustomMappingErrors(t *testing.T) {
	f := func(m Mapping, want string) {
		t.Helper()
		if err := m.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v; want %q in it", m, err, want)
		}
	}
	f(Mapping{}, "no series is named")
	f(Mapping{Running: "two words"}, `custom: running: "two words" is no series`)
	f(Mapping{Running: `x{y="z"`}, "is no series")
	f(Mapping{Running: "x 1\ny"}, "is no series")
	f(Mapping{Running: "x", Path: "metrics"}, "want one that begins with /")
	f(Mapping{KVUsed: "x"}, "kv_used needs kv_total")
	f(Mapping{Running: "x", BlockTokens: -1}, "block_tokens: -1")
	f(Mapping{Adapters: "x"}, "adapters needs adapters_label")
	if err := (&Mapping{Running: `x{a="b",c="d"}`}).Check(); err != nil {
		t.Error(err)
	}
}
