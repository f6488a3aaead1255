package discovery

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvgate/config"
)

var fileEnv = Env{Dialects: []string{"auto", "vllm"}}

func TestParseTargets(t *testing.T) {
	want := []Target{
		{URL: "http://10.0.0.1:8000", Weight: 1},
		{URL: "https://10.0.0.2:8443", Weight: 1, MetricsURL: "https://10.0.0.2:8443/m", Labels: map[string]string{"zone": "a"}},
		{URL: "https://gpu:8443", Weight: 1, MetricsURL: "https://gpu:8443/m", Labels: map[string]string{"zone": "a"}},
		{URL: "http://10.0.0.4:8000", SourceID: "x", Weight: 0.5, Dialect: "vllm", MetricsURL: "http://10.0.0.4:9/m"},
	}
	for _, name := range []string{"targets.good.yaml", "targets.good.json"} {
		got, err := ReadFile(filepath.Join("testdata", name), fileEnv)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if got, err := parseTargets("t.yaml", []byte("[]"), fileEnv); err != nil || len(got) > 0 {
		t.Error("no endpoints:", got, err)
	}
}

func TestParseTargetsRefuses(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		for _, name := range []string{"t.yaml", "t.json"} {
			if name == "t.json" && !strings.HasPrefix(text, "[") {
				continue
			}
			got, err := parseTargets(name, []byte(text), fileEnv)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), name+": ") || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %q yields %v, error %v; want %q", name, text, got, err, want)
			}
		}
	}
	f(" \n", "it is empty")
	f("# nothing", "EOF")
	f("null", "it holds null")
	f("a: b", "cannot unmarshal")
	f("- target: [x]", "field target not found in type a group")
	f("[]\n---\n[]", "there is ")
	f(`[{"targets":["ftp://x"]}]`, `group 1: target "ftp://x" has the scheme "ftp"; write http:// or https://`)
	f(`[{"targets":["a:1"]},{"targets":["a:1/v1"]}]`, `group 2: target "http://a:1/v1" has a path; write "http://a:1"`)
	f(`[{"targets":["a:1","b:1"]},{"targets":["http://A:1"]}]`, `group 2: "http://a:1" is listed twice`)
	f(`[{"targets":["a:1"],"labels":{"__dialect__":"vlm"}}]`, `__dialect__ "vlm" is not a dialect; known: auto, vllm`)
	f(`[{"targets":["a:1"],"labels":{"__weight__":"NaN"}}]`, `__weight__ "NaN" is not a number above 0`)
	f(`[{"targets":["a:1"],"labels":{"__metrics_path__":"m"}}]`, "does not begin with a slash")
	f(`[{"targets":["a:1"],"labels":{"__metrics_url__":"m"}}]`, "is not a URL")
	f(`[{"targets":["a:1","b:1"],"labels":{"__id__":"x"}}]`, "an id belongs to one")
	f(`[{"targets":["u:hunter2@a:1"]}]`, "holds a user name or password")
}

func TestFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		var r recorder
		m := newManager(t, &r, nil)
		m.SetPools([]config.Pool{{Name: "a", Dialect: "auto", Discovery: config.Discovery{File: &config.FileSource{Path: path, Interval: 5 * time.Second}}}})
		expect := func(what, calls, lastError string) {
			t.Helper()
			time.Sleep(7 * time.Second)
			synctest.Wait()
			if got := r.take(); got != calls {
				t.Errorf("%s: %q; want %q", what, got, calls)
			}
			if got := m.Status()[0].LastError; !strings.Contains(got, lastError) || lastError == "" && got != "" {
				t.Errorf("%s: error %q; want %q", what, got, lastError)
			}
		}
		expect("no file yet", "", "no such file")
		write("- targets: [x:1, y:1]\n")
		expect("it comes", "a=x:1,y:1", "")
		expect("no change", "", "")
		write("- targets: [x:1\n")
		expect("bad content", "", "t.yaml: yaml: line 1")
		write("")
		expect("cut off", "", "it is empty")
		write("- targets: [x:1, y:1]\n# a comment\n")
		expect("the same again", "", "")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		expect("removed", "", "no such file")
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		expect("a directory", "", "not a regular file")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		write("- targets: [z:1]\n")
		expect("another set", "a=z:1", "")
		write("[]\n")
		expect("none", "a=", "")
	})
}

// Kubernetes replaces a ConfigMap by renaming the link ..data to another directory.
func TestFileInConfigMap(t *testing.T) {
	dir := t.TempDir()
	put := func(version, text string) {
		t.Helper()
		d := filepath.Join(dir, version)
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, "t.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		// The same time and length, as two quick updates may have.
		when := time.Unix(1_700_000_000, 0)
		if err := os.Chtimes(filepath.Join(d, "t.yaml"), when, when); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(version, filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	put("..1", "- targets: [x:1]\n")
	if err := os.Symlink(filepath.Join("..data", "t.yaml"), filepath.Join(dir, "t.yaml")); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		var r recorder
		m := newManager(t, &r, nil)
		m.SetPools([]config.Pool{{Name: "a", Discovery: config.Discovery{File: &config.FileSource{Path: filepath.Join(dir, "t.yaml"), Interval: time.Second}}}})
		if err := m.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		put("..2", "- targets: [y:1]\n")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := r.take(); got != "a=x:1 a=y:1" {
			t.Error(got)
		}
	})
}

// A writer that is caught between two writes is waited for.
func TestFileHalfWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.yaml")
	if err := os.WriteFile(path, []byte("- targets: [x:1]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		f := &file{config.FileSource{Path: path}, fileEnv}
		go func() {
			time.Sleep(25 * time.Millisecond)
			_ = os.WriteFile(path, []byte("- targets: [x:1]\n- targets: [y:1]\n"), 0o600)
		}()
		data, err := f.settled(t.Context())
		if err != nil || strings.Count(string(data), "targets") != 2 {
			t.Errorf("%q, %v", data, err)
		}
	})
}

func FuzzParseTargets(f *testing.F) {
	for _, name := range []string{"targets.good.yaml", "targets.good.json"} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, name == "targets.good.json")
	}
	f.Add([]byte("- &a {targets: [a:1], labels: *a}"), false)
	f.Add([]byte("- targets: &a [*a]"), false)
	f.Add([]byte("[null, {}]"), true)
	f.Fuzz(func(t *testing.T, data []byte, isJSON bool) {
		if len(data) > 1<<16 {
			return
		}
		name := "t.yaml"
		if isJSON {
			name = "t.json"
		}
		targets, err := parseTargets(name, data, fileEnv)
		if err != nil {
			if len(targets) > 0 {
				t.Fatal("part of a set")
			}
			return
		}
		seen := map[string]bool{}
		for _, g := range targets {
			norm, message, _ := config.CheckURL(g.URL)
			if message != "" || norm != g.URL || !(g.Weight > 0) || seen[g.URL] {
				t.Errorf("%+v: %s", g, message)
			}
			seen[g.URL] = true
		}
	})
}
