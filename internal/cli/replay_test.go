package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// replayed is a record of a request a second, of two pools if wanted.
func replayed(pools ...string) string {
	var b strings.Builder
	b.WriteString(`{"kvgate_record":1,"series":"a","started":"2026-01-05T08:00:00Z"}` + "\n")
	for _, p := range pools {
		fmt.Fprintf(&b, `{"fleet":{"pool":%q,"policy":"auto","endpoints":2,"kv_tokens":100000}}`+"\n", p)
	}
	for i := range 200 {
		fmt.Fprintf(&b, `{"at":%d.5,"pool":%q,"model":"m","in":%d,"out":%d,"cached":0,"stream":true,"ttft":0.05,"duration":0.9,"status":200,"outcome":"ok"}`+"\n",
			1767600000+i, pools[i%len(pools)], 100+7*i, 50+i%90)
	}
	return b.String()
}

// runs a command line and returns its exit code and what it printed.
func runs(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = Main(args, strings.NewReader(""), &out, &err)
	return code, out.String(), err.String()
}

func TestReplay(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	one, two := file("one", replayed("p")), file("two", replayed("p", "q"))
	f := func(code int, want string, args ...string) string {
		t.Helper()
		c, out, errs := runs(append([]string{"replay"}, args...)...)
		if c != code || !strings.Contains(out+errs, want) {
			t.Errorf("%q: exit %d; want %d and %q in\n%s%s", args, c, code, want, out, errs)
		}
		return out
	}
	f(0, "auto: 2 endpoints: 100.0 % within the SLO", one)
	f(0, "least_requests: 1 endpoint: 100.0 % within the SLO; 3: 100.0 %", one, "--policy", "auto,least_requests", "--replicas", "1,3")
	f(0, "auto: 1 endpoint is enough to have 99.0 % within the SLO", one, "--find-capacity", "--want", "0.99")
	f(0, "calibrated: prefill takes", one, "--calibrate")
	f(0, "SLO: first token within 300ms, each further one within 20ms", one, "--slo-ttft", "300ms", "--slo-tpot", "20ms")
	f(0, "10000 tokens/s of prompts, 20.0 ms per output token alone, KV cache of 50000 tokens", one, "--prefill-rate", "10000", "--token-time", "20ms", "--kv-tokens", "50000")
	f(0, "Traffic: 2 times as fast", one, "--speed", "2")
	f(0, "of pool q", two, "--pool", "q")
	f(0, "queue=2+prefix=3: 2 endpoints", one, "--policy", "queue=2+prefix=3")
	if out := f(0, "", one, "--csv", "--replicas", "1,2"); strings.Count(out, "\n") != 3 || !strings.HasPrefix(out, "policy,endpoints,") {
		t.Errorf("%s", out)
	}
	var v struct {
		Comparison struct{ Endpoints int }
		Runs       []struct {
			Attainment float64 `json:"slo_attainment"`
		}
		Capacities []struct{ Endpoints *int }
	}
	if err := json.Unmarshal([]byte(f(0, "", one, "--json", "--find-capacity")), &v); err != nil || v.Comparison.Endpoints != 2 || len(v.Runs) != 1 || v.Runs[0].Attainment != 1 || len(v.Capacities) != 1 || *v.Capacities[0].Endpoints != 1 {
		t.Errorf("%v %+v", err, v)
	}

	// One clear error, with what to do.
	f(2, `--profile: unknown "8b-h10"; did you mean "8b-h100"?`, one, "--profile", "8b-h10")
	f(2, `--policy: unknown "leest_requests"; did you mean "least_requests"?`, one, "--policy", "leest_requests")
	f(2, `"best=1" is not a scorer and its weight`, one, "--policy", "best=1")
	f(2, "--replicas 0; want 1 to 1024", one, "--replicas", "0")
	f(2, "--speed 0; want more than 0", one, "--speed", "0")
	f(2, "--want 2; want a share", one, "--want", "2")
	f(2, "--slo-ttft -1s; want more than 0", one, "--slo-ttft", "-1s")
	f(2, "--json and --csv", one, "--json", "--csv")
	f(2, "--calibrate finds what", one, "--calibrate", "--token-time", "1ms")
	f(2, `--from "monday"; want a date`, one, "--from", "monday")
	f(2, "needs a record")
	f(2, "--prefill-rate, --token-time: 1000000 tokens/s of prompts: a step of 2048", one, "--prefill-rate", "1e6")
	f(2, "a KV cache of 7 tokens; want 1024 or more", one, "--kv-tokens", "7")
	f(1, "no such file", filepath.Join(dir, "none"))
	f(1, "empty: the file is empty; want a record", file("empty", ""))
	f(1, "newer:1: the record is of version 2; this kvgate reads version 1", file("newer", strings.Replace(replayed("p"), ":1,", ":2,", 1)))
	f(1, "choose one with --pool", two)
	f(1, "replayed at most: take a part", one, "--max-requests", "100")
	f(1, "fit into the KV cache of 1024 tokens", file("long", strings.ReplaceAll(replayed("p"), `"in":`, `"in":9`)), "--kv-tokens", "1024")
	// A crash cut off the last line; one in the middle is an error.
	text := replayed("p")
	f(0, "warning: "+filepath.Join(dir, "cut")+":202: the line was cut off in writing", file("cut", text[:len(text)-20]))
	f(1, "bad:100: not a request's record", file("bad", strings.Replace(text, `{"at":1767600097.5`, `{"at"`, 1)))
}

// Every replay that docs/capacity.md tells of works.
func TestCapacityPage(t *testing.T) {
	page := pages(t)["docs/capacity.md"]
	dir := t.TempDir()
	var rec, use, trace strings.Builder
	rec.WriteString(replayed("llama")[:strings.Index(replayed("llama"), `{"at"`)])
	for i := range 400 {
		at := 1767600000 + 25*i // 8:00 to 10:46
		model := `"m"`
		if i%3 == 0 {
			model = fmt.Sprintf(`"lora-%d","adapter":true`, i%4)
		}
		fmt.Fprintf(&rec, `{"at":%d,"pool":"llama","model":%s,"in":%d,"out":%d,"stream":true,"ttft":0.09,"duration":1.5,"status":200,"outcome":"ok"}`+"\n", at, model, 600+i, 50+i%90)
		fmt.Fprintf(&use, `{"time":"%s","request_id":"r","served_model":"m","pool":"llama","stream":true,"status":200,"outcome":"ok","input_tokens":500,"output_tokens":%d,"ttft_seconds":0.1,"duration_seconds":1}`+"\n",
			time.Unix(int64(at), 0).UTC().Format(time.RFC3339), 40+i%50)
		fmt.Fprintf(&trace, `{"timestamp":%d,"input_length":1200,"output_length":50,"hash_ids":[0,%d,%d]}`+"\n", 1000*i, i, i+1)
	}
	for name, text := range map[string]string{"record.jsonl": rec.String(), "record.jsonl.1": rec.String(), "usage.jsonl": use.String(), "mooncake.jsonl": trace.String()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	n := 0
	for _, f := range fences("docs/capacity.md", page) {
		if f.language != "sh" {
			continue
		}
		for line := range strings.Lines(f.text) {
			for _, words := range ours(strings.TrimSpace(line)) {
				n++
				if code, out, errs := runs(words...); code != 0 || out == "" {
					t.Errorf("%s: exit %d\n%s%s", line, code, out, errs)
				}
			}
		}
	}
	if n < 12 {
		t.Errorf("only %d commands", n)
	}
}
