package lint

import (
	"bytes"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// leaks are what no tracked file may hold, whatever the machine.
var leaks = []*regexp.Regexp{
	regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY`),
	regexp.MustCompile(`\bAKIA[0-9A-Z]{16}\b`),
	regexp.MustCompile(`\bgh[pousr]_[A-Za-z0-9]{36}\b`),
	regexp.MustCompile(`\bsk-[A-Za-z0-9]{32,}\b`),
	regexp.MustCompile(`/(home|Users)/[a-z][a-z0-9_-]+/`),
}

// machineLeaks are what would give this machine away: where the repository and the home directory are, and the hosts
// that modules come from.
func machineLeaks(t *testing.T) (out []string) {
	t.Helper()
	top, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	dirs := []string{filepath.Dir(top)}
	if home, err := os.UserHomeDir(); err == nil {
		dirs = append(dirs, home)
	}
	common := []string{"/", "/tmp", "/src", "/app", "/go", "/opt", "/usr/src", "/var/tmp", filepath.Clean(os.TempDir())}
	for _, d := range dirs {
		if !slices.Contains(common, d) {
			out = append(out, d+"/")
		}
	}
	proxies, err := exec.Command("go", "env", "GOPROXY").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range strings.FieldsFunc(strings.TrimSpace(string(proxies)), func(r rune) bool { return r == ',' || r == '|' }) {
		if u, err := url.Parse(p); err == nil && u.Hostname() != "" {
			out = append(out, u.Hostname())
		}
	}
	return out
}

func leakProblems(name string, data []byte, machine []string) (out []string) {
	for _, re := range leaks {
		if m := re.Find(data); m != nil && !bytes.Contains(m, []byte("0123456789")) { // tests plant keys that count up
			out = append(out, name+": looks like a secret or a machine's path: "+string(m[:min(len(m), 24)]))
		}
	}
	for _, m := range machine {
		if bytes.Contains(data, []byte(m)) {
			out = append(out, name+": names this machine: "+m)
		}
	}
	return out
}

func TestTrackedFilesGiveNothingAway(t *testing.T) {
	machine := machineLeaks(t)
	for _, name := range tracked(t) {
		if name == "go.sum" || strings.HasSuffix(name, "/go.sum") || name == "internal/lint/tree_test.go" {
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range leakProblems(name, data, machine) {
			t.Error(p)
		}
	}
}

func TestLeakRulesCanFail(t *testing.T) {
	f := func(text string, want int) {
		t.Helper()
		if got := leakProblems("x", []byte(text), []string{"/secret/place/"}); len(got) != want {
			t.Errorf("%q: %v; want %d problems", text, got, want)
		}
	}
	f("-----BEGIN EC PRIVATE "+"KEY-----", 1)
	f("cd /secret/place/x", 1)
	f("key: sk-"+strings.Repeat("a1", 20), 1)
	f("ls /home/"+"someone/x", 1)
	f("curl http://127.0.0.1:8080/v1/models -H 'Authorization: Bearer sk-test'", 0)
}

// A reader who stops after the first screen has seen how to run it.
func TestReadmeBeginsWithTheTwoCommands(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(data), "\n")
	first := strings.Join(lines[:min(15, len(lines))], "\n")
	for _, want := range []string{"make demo", "make test"} {
		if !strings.Contains(first, want) {
			t.Errorf("%q is not in the first 15 lines of README.md", want)
		}
	}
}

// What README.md and the Makefile tell people to run exists.
func TestMakeTargetsThatAreNamedExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z][a-z-]*):`).FindAllSubmatch(makefile, -1) {
		targets[string(m[1])] = true
	}
	named := regexp.MustCompile("(?:`|^|\\s)make ([a-z][a-z-]*)(?:`|\\s|$)")
	for _, name := range tracked(t) {
		if !strings.HasSuffix(name, ".md") && name != ".ci/run" {
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for block := range strings.SplitSeq(string(data), "\n") {
			code := strings.Contains(block, "`make ") || strings.HasPrefix(strings.TrimSpace(block), "make ")
			for _, m := range named.FindAllStringSubmatch(block, -1) {
				if code && !targets[m[1]] {
					t.Errorf("%s names make %s, which the Makefile lacks", name, m[1])
				}
			}
		}
	}
}
