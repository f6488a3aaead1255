package config

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the expectations in testdata and the generated files")

// testOptions stands for the registries. Only A_KEY is set in the environment.
func testOptions() Options {
	return Options{
		Dialects: []string{"vllm", "sglang", "tgi", "llamacpp"},
		Policies: []string{"auto", "round_robin", "random", "least_requests", "power_of_two", "consistent_hash"},
		Scorers: []string{
			"queue", "kv_cache", "kv_headroom", "prefix", "running_requests", "lora_affinity", "predicted_latency", "lru", "session",
		},
		Env: func(name string) (string, bool) { return "from-env", name == "A_KEY" },
	}
}

func TestGoodFiles(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.good.yaml")
	if len(files) == 0 {
		t.Fatal("no files")
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			c, err := Load(f, testOptions())
			if err != nil {
				t.Fatal(err)
			}
			if w := c.Warnings(); len(w) > 0 {
				t.Errorf("warnings:\n%v", w)
			}
		})
	}
}

// Each bad file begins with a comment that holds the problems it must yield, one a line, without the file's name.
func TestBadFiles(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.bad.yaml")
	if len(files) == 0 {
		t.Fatal("no files")
	}
	problems := func(f string) string {
		c, err := Load(f, testOptions())
		ps, ok := err.(Problems)
		if err == nil {
			ps, ok = c.Warnings(), true
		}
		if !ok || len(ps) == 0 {
			t.Fatalf("%s: error %v is no list of problems", f, err)
		}
		return strings.NewReplacer(f+":", "", absolute("testdata"), "testdata").Replace(ps.Error())
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			for range 3 { // an update moves lines, and with them the positions in the expectations
				data, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				header, body := splitHeader(string(data))
				got := problems(f)
				if got == header {
					return
				}
				if !*update {
					t.Errorf("got:\n%s\nwant:\n%s", got, header)
					return
				}
				text := "# " + strings.ReplaceAll(got, "\n", "\n# ") + "\n#\n" + body
				if err := os.WriteFile(f, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// splitHeader cuts the expectations, which end with a line that holds only "#", from the rest of a bad file.
func splitHeader(s string) (header, body string) {
	if !strings.HasPrefix(s, "# ") {
		return "", s
	}
	header, body, ok := strings.Cut(s, "\n#\n")
	if !ok {
		return "", s
	}
	return strings.ReplaceAll(header[2:], "\n# ", "\n"), body
}
