package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"gopkg.in/yaml.v3"
)

func TestBytes(t *testing.T) {
	ok := func(s string, want Bytes, spelled string) {
		t.Helper()
		got, fix := parseBytes(s)
		if fix != "" || got != want || got.String() != spelled {
			t.Errorf("%q is %d (%s), fix %q; want %d (%s)", s, got, got, fix, want, spelled)
		}
	}
	ok("0B", 0, "0B")
	ok("1.5KiB", 1536, "1536B")
	ok("32MiB", 32<<20, "32MiB")
	ok("2kB", 2000, "2000B")
	ok("2KB", 2000, "2000B")
	ok("1024KiB", 1<<20, "1MiB")
	ok("1TiB", 1<<40, "1TiB")

	bad := func(s, fix string) {
		t.Helper()
		if got, f := parseBytes(s); f != fix {
			t.Errorf("%q is %d, fix %q; want fix %q", s, got, f, fix)
		}
	}
	bad("", "32MiB")
	bad("32", "32MiB")
	bad("1000", "1000MiB")
	bad("33554432", "32MiB")
	bad("32 MiB", "32MiB")
	bad("32mb", "32MB")
	bad("32m", "32MiB")
	bad("32Mi", "32MiB")
	bad("4 megabytes", "4MiB")
	bad("1.5B", "32MiB")
	bad("-1MiB", "32MiB")
	bad("99999999TiB", "32MiB")
	bad("1e3KiB", "32MiB")
}

func TestDuration(t *testing.T) {
	for s, want := range map[string]string{"5s": "5s", "60s": "1m", "90m": "1h30m", "3600s": "1h", "500ms": "500ms", "0s": "0s", "1h0m5s": "1h0m5s"} {
		if d, fix := parseDuration(s); fix != "" || formatDuration(d) != want {
			t.Errorf("%q is %v (%s), fix %q; want %s", s, d, formatDuration(d), fix, want)
		}
	}
	for s, want := range map[string]string{
		"": "5s", "0": "0s", "5": "5s", "5 s": "5s", "1.5": "1.5s", "5 seconds": "5s", "2 min": "2m", "3 Hours": "3h",
		"1d": "24h", "10 ms": "10ms", "7 millis": "7ms", "never": "5s", "-5s": "5s", "9999999999999999999h": "5s", "1w": "5s",
	} {
		if d, fix := parseDuration(s); fix != want {
			t.Errorf("%q is %v, fix %q; want fix %q", s, d, fix, want)
		}
	}
}

func TestCheckURL(t *testing.T) {
	for in, want := range map[string]string{
		"http://10.0.0.1:8000": "http://10.0.0.1:8000", "HTTPS://GPU.Example:443/": "https://gpu.example", "http://h:80": "http://h",
		"http://h:443": "http://h:443", "http://[2001:DB8::1]:8000": "http://[2001:db8::1]:8000", "http://[::1]": "http://[::1]",
	} {
		if norm, message, _ := CheckURL(in); norm != want || message != "" {
			t.Errorf("%q is %q, %s; want %q", in, norm, message, want)
		}
		if again, _, _ := CheckURL(want); again != want {
			t.Errorf("%q is not normal: %q", want, again)
		}
	}
	for in, hint := range map[string]string{
		"h:8000": `write "http://h:8000"`, "": "one such as", "http://h:0": "one such as", "http://h:": "one such as", "http://a b": "one such as",
		"http://h/v1": `write "http://h"; kvgate adds the path`, "http://u@h:1": `write "http://h:1", and the key in api_key`,
		"http://h?": `write "http://h"`, "http://h#": `write "http://h"`, "unix:///run/x": "write http:// or https://", "http://h:99999": "one such as",
		"http://[::1": "one such as", "http://[10.0.0.1]:1": "one such as", "//h:1": "one such as", "http://-h": "one such as",
	} {
		if norm, message, h := CheckURL(in); norm != "" || message == "" || !strings.Contains(h, hint) {
			t.Errorf("%q is %q; %s; %s; want %q", in, norm, message, h, hint)
		}
	}
}

func TestSuggest(t *testing.T) {
	words := []string{"queue", "kv_cache", "kv_headroom", "lora_affinity", "lru", "prefix", "listen"}
	for word, want := range map[string]string{
		"queeu": "queue", "kvCache": "kv_cache", "KVCache": "kv_cache", "loraAffinty": "lora_affinity", "listn": "listen",
		"perfix": "prefix", "lur": "lru", "x": "", "power_draw": "", "": "", strings.Repeat("q", 1<<20): "",
	} {
		if got := suggest(word, words); got != want {
			t.Errorf("%.20q suggests %q; want %q", word, got, want)
		}
	}
	for _, s := range [][2]string{{"kvCache", "kv_cache"}, {"HTTPServer", "http_server"}, {"kv-cache", "kv_cache"}, {"Queue", "queue"}, {"a_B", "a_b"}, {"", ""}} {
		if got := snakeCase(s[0]); got != s[1] {
			t.Errorf("snakeCase(%q) is %q", s[0], got)
		}
	}
}

func TestSecretDoesNotShow(t *testing.T) {
	type holder struct {
		Key Secret `json:"key" yaml:"key"`
		Ptr *Secret
	}
	s := NewSecret("hunter2")
	h := holder{Key: s, Ptr: &s}
	var out bytes.Buffer
	for _, verb := range []string{"%s", "%v", "%+v", "%#v", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+" ", s)
		fmt.Fprintf(&out, verb+" ", h)
		fmt.Fprintf(&out, verb+" ", &h)
		fmt.Fprintf(&out, verb+" ", []Secret{s})
	}
	j, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	y, err := yaml.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	out.Write(j)
	out.Write(y)
	log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&out), zap.DebugLevel))
	log.Info("m", zap.Any("a", s), zap.Any("b", h), zap.Stringer("c", s), zap.Reflect("d", &h))
	log.Sugar().Infow("m", "a", s, "b", h)
	if strings.Contains(out.String(), "hunter2") || strings.Contains(out.String(), fmt.Sprintf("%x", "hunter2")) {
		t.Errorf("the secret shows:\n%s", &out)
	}
	if !strings.Contains(string(j), `"key":"[redacted]"`) || !strings.Contains(string(y), "key: '[redacted]'") {
		t.Errorf("not marked as redacted:\n%s\n%s", j, y)
	}
	if s.Reveal() != "hunter2" || (Secret{}).String() != "" {
		t.Error("Reveal or the empty secret")
	}
}

func TestSecretSources(t *testing.T) {
	c, err := Load("testdata/full.good.yaml", testOptions())
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Pools[0].APIKey.Reveal(); got != "Bearer-from-env" {
		t.Errorf("from the environment: %q", got)
	}
	if got := c.Pools[1].APIKey.Reveal(); got != "file-key" {
		t.Errorf("from a file: %q", got)
	}
}

// No message may hold a secret, whatever is wrong with it.
func TestProblemsHoldNoSecret(t *testing.T) {
	for _, v := range []string{
		"hunter22", "[hunter22]", "{a: hunter22}", `"hunter22 \n"`, "!!str hunter22", "12345678hunter22", `"${hunter22 x}"`,
		`{? [hunter22] : a}`,
	} {
		text := "pools: [{name: a, discovery: {static: [\"http://u:hunter22@h:1\", \"u:hunter22@h:1\", \"://hunter22@\"]}, api_key: " + v + "}]\nx: 1\n"
		_, err := Parse("c.yaml", []byte(text), testOptions())
		if err == nil || strings.Contains(err.Error(), "hunter22") {
			t.Errorf("%s: %v", v, err)
		}
	}
}

func TestContract(t *testing.T) {
	c, err := Load("testdata/contract.good.yaml", testOptions())
	if err != nil {
		t.Fatal(err)
	}
	p := c.Pools[0]
	want := Default()
	want.Pools = []Pool{{
		Name:      "llama-70b",
		Models:    []string{"meta-llama/Llama-3.3-70B-Instruct"},
		Dialect:   "auto",
		Discovery: Discovery{Static: []Endpoint{{URL: "http://10.0.0.11:8000", Weight: 1}, {URL: "http://10.0.0.12:8000", Weight: 1}}},
		Policy:    Policy{Name: "auto"},
		Timeouts:  want.Timeouts.EndpointTimeouts,
	}}
	equalConfigs(t, "contract", c, want)
	if p.Timeouts.EndpointIdle != 4*time.Second {
		t.Error("endpoint_idle is not inherited")
	}
}

func TestFullFile(t *testing.T) {
	c, err := Load("testdata/full.good.yaml", testOptions())
	if err != nil {
		t.Fatal(err)
	}
	eq := func(what string, got, want any) {
		t.Helper()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %+v; want %+v", what, got, want)
		}
	}
	p := c.Pools[0]
	eq("weights", p.Policy, Policy{Weights: map[string]float64{"queue": 2, "kv_cache": 0, "lora_affinity": 1.5, "running_requests": 1}})
	eq("static", p.Discovery.Static, []Endpoint{
		{URL: "http://gpu-a.example:8000", Weight: 1},
		{URL: "https://[2001:db8::1]", ID: "gpu-b", MetricsURL: "http://10.0.0.2:9400/metrics?x=1", Dialect: "tgi", Weight: 0.5},
	})
	eq("file", *p.Discovery.File, FileSource{Path: absolute("testdata/targets.yaml"), Interval: 5 * time.Second})
	eq("dns", *p.Discovery.DNS, DNSSource{Name: "llama.models.svc.cluster.local", Type: "a", Port: 8000, Scheme: "http", Interval: 10 * time.Second})
	eq("kubernetes", *p.Discovery.Kubernetes, KubernetesSource{
		Selector: "app=llama, tier in (prod,canary),!old", Port: "8000", Namespaces: []string{"models", "models-2"},
		Scheme: "https", Kubeconfig: absolute("testdata/kube.yaml"), Context: "prod",
	})
	// A pool inherits what the file says above, even where that comes after it in the file.
	eq("timeouts", p.Timeouts, EndpointTimeouts{Connect: 500 * time.Millisecond, FirstToken: 5 * time.Minute, Total: 2 * time.Hour, EndpointIdle: 4 * time.Second})
	eq("by alias", c.Pools[1].Timeouts, p.Timeouts)
	eq("body", c.Limits.BodyBytes, Bytes(1536<<20))
}

func absolute(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		panic(err)
	}
	return abs
}

// Other spellings of scorers are as their registry has it.
func TestScorerSpellings(t *testing.T) {
	opt := testOptions()
	opt.ScorerName = func(s string) (string, bool) { return "kv_cache", s == "kvCacheUtilizationScorer" }
	text := `pools: [{name: a, discovery: {static: ["http://h:1"]}, policy: {weights: {kvCacheUtilizationScorer: 1, runningRequests: 2}}}]`
	c, err := Parse("c.yaml", []byte(text), opt)
	if err != nil {
		t.Fatal(err)
	}
	if w := c.Pools[0].Policy.Weights; !reflect.DeepEqual(w, map[string]float64{"kv_cache": 1, "running_requests": 2}) {
		t.Error(w)
	}
}

func TestSizeIsBounded(t *testing.T) {
	refused := func(what, text, want string) {
		t.Helper()
		start := time.Now()
		_, err := Parse("c.yaml", []byte(text), testOptions())
		if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 1<<20 {
			t.Errorf("%s: %.300v; want %q", what, err, want)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("%s: took %v", what, took)
		}
	}
	refused("large", strings.Repeat("#\n", 3<<20), "larger than 4MiB")
	// A thousand pools of a thousand endpoints, in 15 KB.
	bomb := "pools:\n  - discovery: {static: &s [" + strings.Repeat("a,", 2000) + "]}\n  - &d {discovery: {static: *s}}\n" + strings.Repeat("  - *d\n", 2000)
	refused("bomb", bomb, "the file holds too many values, or aliases to them")
	refused("many problems", strings.Repeat("- a\n", 1000), "where keys belong")
	refused("deep", strings.Repeat("[", 20000), "not valid YAML")
	var keys strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&keys, "k%d: 1\n", i)
	}
	refused("unknown keys", keys.String(), "more than 200 problems; mend these first")
	refused("itself", "pools: &p [*p]\n", "pools[0]: a list where keys belong")
	refused("itself, as a map", "admin: &a {listen: *a}\n", "a mapping where a single value belongs")
	refused("binary", "pools: \xff\n", "c.yaml:1:8: is not UTF-8 text")
	refused("latin", "# \xc3\xa9\xe9\n", "c.yaml:1:4: is not UTF-8 text")
}

func TestFilesThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(filepath.Join(dir, "none.yaml"), testOptions())
	ps, ok := errors.AsType[Problems](err)
	if !ok || len(ps) != 1 || ps[0].Line != 0 || ps[0].Message != "cannot be read: no such file or directory" {
		t.Errorf("%#v", err)
	}
	if _, err = Load(dir, testOptions()); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Error(err)
	}
	// A device that never ends, where a key should be.
	text := `pools: [{name: a, discovery: {static: ["http://h:1"]}, api_key_file: /dev/zero}]`
	if _, err := Parse("c.yaml", []byte(text), testOptions()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

func TestSameInput(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	load := func() *Config {
		t.Helper()
		c, err := Load(filepath.Join(dir, "c.yaml"), testOptions())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	write("c.yaml", `pools: [{name: a, discovery: {static: ["http://h:1"]}, api_key_file: key}]`)
	write("key", "one\n")
	a := load()
	if !a.SameInput(load()) || a.Hash() != load().Hash() || len(a.Hash()) != 64 {
		t.Error("the same files differ")
	}
	write("key", "two\n")
	b := load()
	if a.SameInput(b) || a.Hash() != b.Hash() {
		t.Error("a new key is a new input, of the same file")
	}
	write("c.yaml", `pools: [{name: b, discovery: {static: ["http://h:1"]}, api_key_file: key}]`)
	if c := load(); b.SameInput(c) || b.Hash() == c.Hash() {
		t.Error("another file is the same")
	}
	if a.SameInput(nil) || Default().SameInput(Default()) {
		t.Error("nothing was loaded")
	}
}

func TestNeedRestart(t *testing.T) {
	a, b := Default(), Default()
	b.Retry.MaxAttempts, b.Timeouts.Connect, b.Log.File, b.Pools = 1, 1, "x", []Pool{{}}
	if keys := NeedRestart(a, b); len(keys) > 0 {
		t.Errorf("%v", keys)
	}
	b.Listen, b.TLS, b.Limits.HeaderBytes, b.Admin.Listen = ":1", &ServerTLS{}, 1, ":2"
	if keys := NeedRestart(a, b); !slices.Equal(keys, []string{"listen", "tls", "admin.listen", "limits.header_bytes"}) {
		t.Errorf("%v", keys)
	}
	a.TLS = &ServerTLS{CertFile: "other"}
	if keys := NeedRestart(a, b); slices.Contains(keys, "tls") {
		t.Error("another certificate needs no restart")
	}
}

func TestProblemJSON(t *testing.T) {
	_, err := Parse("c.yaml", []byte("listn: 1\n"), testOptions())
	ps, _ := errors.AsType[Problems](err)
	got, _ := json.Marshal(ps[1])
	want := `{"file":"c.yaml","line":1,"column":1,"path":"pools","message":"there are no pools","hint":"write at least one, with name and discovery","severity":"error"}`
	if string(got) != want && len(ps) == 2 {
		got, _ = json.Marshal(ps[0])
	}
	if len(ps) != 2 || string(got) != want {
		t.Errorf("%d problems; %s", len(ps), got)
	}
}

// Whatever the bytes, the loader returns; what it accepts is sound and survives being dumped.
func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/*.yaml", examplePath} {
		files, _ := filepath.Glob(pattern)
		for _, name := range files {
			data, err := os.ReadFile(name)
			if err != nil {
				f.Fatal(err)
			}
			_, body := splitHeader(string(data))
			f.Add([]byte(body))
		}
	}
	f.Add([]byte("a: &a [*a]\n"))
	f.Add([]byte("<<: {}\n"))
	f.Add([]byte("? ? a\n"))
	f.Add([]byte("%YAML 1.1\n---\n"))
	f.Add([]byte("\ufeffpools: []\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<16 {
			return
		}
		c, err := Parse("testdata/fuzz.yaml", data, testOptions())
		if err != nil {
			ps, ok := errors.AsType[Problems](err)
			if !ok || len(ps.Errors()) == 0 {
				t.Fatalf("%v has no problems", err)
			}
			lines := 1 + bytes.Count(data, []byte("\n"))
			for _, other := range []string{"\r", "\u0085", "\u2028", "\u2029"} { // YAML counts these too
				lines += bytes.Count(data, []byte(other))
			}
			for _, p := range ps {
				if p.Message == "" || strings.ContainsAny(p.Error(), "\n\r") || p.Line > lines {
					t.Errorf("problem %+v in %d lines", p, lines)
				}
			}
			return
		}
		if len(c.Pools) == 0 {
			t.Fatal("no pools")
		}
		for _, p := range c.Pools {
			if p.Name == "" || (p.Policy.Name == "") == (p.Policy.Weights == nil) {
				t.Errorf("pool %+v", p)
			}
			for _, e := range p.Discovery.Static {
				if norm, message, _ := CheckURL(e.URL); message != "" || norm != e.URL {
					t.Errorf("URL %q: %s", e.URL, message)
				}
			}
		}
		again, err := Parse("dump.yaml", Redacted(c), testOptions())
		if err != nil {
			t.Fatalf("the dump does not load: %v\n%s", err, Redacted(c))
		}
		equalConfigs(t, "fuzz", c, again)
	})
}

// What is no file is an error, or is read, and never waited for without end.
func TestPipes(t *testing.T) {
	name := filepath.Join(t.TempDir(), "pipe")
	if err := mkfifo(name); err != nil {
		t.Skip(err)
	}
	if _, err := Load(name, testOptions()); err == nil || !strings.Contains(err.Error(), "a pipe that nobody writes into") {
		t.Errorf("nobody writes: %v", err)
	}
	// As shells make them of a command's output.
	written := make(chan error, 1)
	go func() {
		for {
			f, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteString(`pools: [{name: a, discovery: {static: ["http://h:1"]}}]`)
				f.Close()
			}
			if !errors.Is(err, syscall.EPIPE) { // who reads came too early, and has gone
				written <- err
				return
			}
		}
	}()
	var c *Config
	var err error
	for range 1000 { // until the writer is there
		if c, err = Load(name, testOptions()); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err != nil || len(c.Pools) != 1 {
		t.Errorf("read from a pipe: %v", err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	// One that is open for writing and stays silent.
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	if _, err := readFile(name, 100, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), "has not come to its end within 50ms") {
		t.Errorf("silent: %v", err)
	}
	// Where a key or a certificate should be, a pipe is an error at once.
	text := `pools: [{name: a, discovery: {static: ["http://h:1"]}, api_key_file: ` + name + `}]`
	if _, err := Parse("c.yaml", []byte(text), testOptions()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

// Files that will be written need a directory; one that is not here may be elsewhere, so it is a warning, with its place.
func TestPlacesThatAreNotThere(t *testing.T) {
	for path, line := range map[string]string{
		"log.file":            "log: {file: gone/kvgate.log}",
		"state.file":          "state: {file: gone/state}",
		"record.file":         "record: {file: gone/record.jsonl}",
		"usage.file":          "usage: {file: gone/usage.jsonl}",
		"usage.webhook.spool": `usage: {webhook: {url: "http://127.0.0.1:9/", spool: gone/spool}}`,
	} {
		for there, want := range map[string]int{"gone/": 1, "": 0} {
			text := strings.ReplaceAll(line, "gone/", there) + "\npools: [{name: p, discovery: {static: [\"http://127.0.0.1:8000\"]}}]\n"
			c, err := Parse(filepath.Join(t.TempDir(), "c.yaml"), []byte(text), testOptions())
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			n := 0
			for _, w := range c.Warnings() {
				if w.Path == path && w.Line == 1 && strings.Contains(w.Message, "no directory") {
					n++
				}
			}
			if n != want {
				t.Errorf("%s in %q: warnings %v; want %d of a directory", path, there, c.Warnings(), want)
			}
		}
	}
}
