package cli

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"
)

// run runs a command line and returns what it printed.
func run(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err strings.Builder
	code = Main(args, strings.NewReader(stdin), &out, &err)
	return code, out.String(), err.String()
}

func TestMistakesAreExplainedOnce(t *testing.T) {
	f := func(line string, wantCode int, wantErr string) {
		t.Helper()
		code, stdout, stderr := run(t, "", strings.Fields(line)...)
		if code != wantCode || stderr != wantErr || stdout != "" {
			t.Errorf("kvgate %s: code %d, stderr %q, stdout %q; want %d, %q and nothing", line, code, stderr, stdout, wantCode, wantErr)
		}
	}
	f("versoin", 2, "kvgate: unknown command \"versoin\" for \"kvgate\"\ntry: kvgate version\n")
	f("versoin -c x", 2, "kvgate: unknown command \"versoin\" for \"kvgate\"\ntry: kvgate version\n")
	f("frobnicate", 2, "kvgate: unknown command \"frobnicate\" for \"kvgate\"\ntry: kvgate --help\n")
	f("help frobnicate", 2, "kvgate: unknown command \"frobnicate\" for \"kvgate\"\ntry: kvgate --help\n")
	f("help serv", 2, "kvgate: unknown command \"serv\" for \"kvgate\"\ntry: kvgate serve\n")
	f("help config defalt", 2, "kvgate: unknown command \"defalt\" for \"kvgate config\"\ntry: kvgate config default\n")
	f("help serve now", 2, "kvgate: unknown command \"now\" for \"kvgate serve\"\ntry: kvgate serve --help\n")
	f("version --jsno", 2, "kvgate: unknown flag: --jsno\ntry: kvgate version --json\n")
	f("version now", 2, "kvgate: kvgate version takes no arguments; got \"now\"\ntry: kvgate version --help\n")
	f("demo --rate 0", 2, "kvgate: --rate 0; want a number above 0, up to 1000\ntry: kvgate demo --rate 6\n")
	f("demo --rate x", 2, "kvgate: --rate: \"x\"; want a number\ntry: kvgate demo --help\n")
	f("demo --policy roundrobin", 2, "kvgate: --policy: unknown \"roundrobin\"; did you mean \"round_robin\"?\ntry: kvgate demo --policy round_robin\n")
	f("sim --listen 0.0.0.0:0", 2, "kvgate: listen \"0.0.0.0:0\": not a loopback address, so others could reach it\ntry: kvgate sim --allow-remote --listen 0.0.0.0:0\n")
	f("bench policies --workload tol", 2, "kvgate: --workload: unknown \"tol\"; did you mean \"tool\"?\ntry: kvgate bench policies --workload tool\n")
	f("completion tcsh", 2, "kvgate: shell \"tcsh\" is unknown; want bash, zsh, fish or powershell\ntry: kvgate completion bash\n")
}

// What was asked for and could not be printed is a failure, whatever the command.
func TestOutputThatFails(t *testing.T) {
	for _, line := range []string{
		"version", "version --json", "--help", "help serve", "policies", "scorers", "dialects", "sources", "config default", "completion bash",
	} {
		var stderr strings.Builder
		code := Main(strings.Fields(line), strings.NewReader(""), failingWriter{}, &stderr)
		if code != 1 || !strings.HasSuffix(stderr.String(), "kvgate: no space left\n") {
			t.Errorf("kvgate %s: code %d, stderr %q; want 1 and why", line, code, stderr.String())
		}
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no space left") }

// Commands print from several goroutines, as the demo does.
func TestOutputFromSeveralGoroutines(t *testing.T) {
	var b strings.Builder
	w := &checkedWriter{w: &b}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				_, _ = w.Write([]byte("0123456789\n"))
			}
		})
	}
	wg.Wait()
	if b.String() != strings.Repeat("0123456789\n", 800) || w.failed() != nil {
		t.Errorf("lines were mixed: %d bytes, %v", b.Len(), w.failed())
	}
}

// Files without an end are refused in bounded memory.
func TestEndlessInput(t *testing.T) {
	if _, err := os.Stat("/dev/zero"); err != nil {
		t.Skip(err)
	}
	for _, line := range []string{"explain --body /dev/zero", "explain -m a --snapshot /dev/zero", "check /dev/zero"} {
		code, stdout, stderr := run(t, "", strings.Fields(line)...)
		if code != 1 || !strings.Contains(stdout+stderr, "larger than") {
			t.Errorf("kvgate %s: code %d, %q", line, code, stdout+stderr)
		}
	}
}

func TestVersion(t *testing.T) {
	code, stdout, _ := run(t, "", "version", "--json")
	var v struct {
		Version   string `json:"version"`
		GoVersion string `json:"go_version"`
	}
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 || v.Version == "" || !strings.HasPrefix(v.GoVersion, "go") {
		t.Errorf("code %d, %q: %v", code, stdout, err)
	}
	if code, stdout, _ = run(t, "", "version"); code != 0 || !strings.HasPrefix(stdout, "kvgate ") {
		t.Errorf("code %d, %q", code, stdout)
	}
}

func TestVersionFlags(t *testing.T) {
	_, want, _ := run(t, "", "version")
	for _, flag := range []string{"--version", "-v"} {
		if code, stdout, stderr := run(t, "", flag); code != 0 || stdout != want || stderr != "" {
			t.Errorf("%s: code %d, stdout %q, stderr %q; want %q", flag, code, stdout, stderr, want)
		}
	}
}

// Shells offer what can be typed, and nothing else.
func TestCompletionOffersValues(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		args := append([]string{"__complete"}, strings.Split(line, " ")...)
		code, stdout, _ := run(t, "", args...)
		if code != 0 || !strings.Contains("\n"+stdout, "\n"+want) {
			t.Errorf("%q: code %d, %q; want %q", line, code, stdout, want)
		}
	}
	f("demo --policy ", "round_robin\n")
	f("demo --policy auto,", "auto,least_requests\n")
	f("explain --policy ", "auto\n")
	f("sim --profile ", "8b-h100\n")
	f("sim --dialect ", "vllm-0.8\n")
	f("bench policies --workload ", "conversation\n")
	f("bench policies --policy ", "oracle\n")
	f("help ser", "serve\t")
	f("hel", "help\t")
	if _, stdout, _ := run(t, "", "__complete", ""); strings.Contains(stdout, "no-help") {
		t.Errorf("a stub is offered: %s", stdout)
	}
}

func TestCompletionAndManualPages(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, stdout, stderr := run(t, "", "completion", shell); code != 0 || !strings.Contains(stdout, "kvgate") {
			t.Errorf("%s: code %d, %d bytes, %s", shell, code, len(stdout), stderr)
		}
	}
	dir := t.TempDir()
	if code, _, stderr := run(t, "", "man", dir); code != 0 {
		t.Fatal(stderr)
	}
	if page, err := os.ReadFile(dir + "/kvgate-version.1"); err != nil || !strings.Contains(string(page), "version") {
		t.Errorf("no page for version: %v", err)
	}
}

// Every command has one sentence, an example, and exit codes in its help.
func TestHelpIsComplete(t *testing.T) {
	each(newRoot(&env{lookup: os.LookupEnv}), func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short description %q; want one without a full stop", c.CommandPath(), c.Short)
		}
		if !strings.HasPrefix(c.Example, "  kvgate") && !strings.HasPrefix(c.Example, "  source") {
			t.Errorf("%s: no example", c.CommandPath())
		}
		args := append(strings.Fields(c.CommandPath())[1:], "--help")
		code, stdout, stderr := run(t, "", args...)
		wantCodes := c.Name() == "kvgate" || c.Name() == "help" || c.Name() == "serve" || c.Name() == "check"
		if code != 0 || strings.Contains(stdout, "Exit codes:") != wantCodes || !strings.Contains(stdout, "Usage:") || stderr != "" {
			t.Errorf("%v: code %d, stderr %q, stdout\n%s", args, code, stderr, stdout)
		}
		root := c.Name() == "kvgate" || c.Name() == "help"
		if strings.Contains(stdout, "check --strict found") != (root || c.Name() == "check") || strings.Contains(stdout, "told to stop twice") != (root || c.Name() == "serve") {
			t.Errorf("%v: exit codes that it can't have, or not those it can:\n%s", args, stdout)
		}
	})
}

// What failed of a check is what is said to have failed: a file that is right is not blamed for servers that are down.
func TestProbeBlamesServers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("pools: [{name: p, discovery: {static: ['http://127.0.0.1:1', 'http://127.0.0.1:2']}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := run(t, "", "check", "--probe", file)
	if code != 1 || stderr != "kvgate: 2 of 2 endpoints could not be read\n" {
		t.Errorf("%d %q", code, stderr)
	}
	if !strings.Contains(stdout, "scrape http://127.0.0.1:1/metrics: ") || strings.Contains(stdout, "/props") {
		t.Errorf("the page that a user expects is not named:\n%s", stdout)
	}
}

func TestEnvironmentSetsFlags(t *testing.T) {
	var got string
	c := &cobra.Command{Use: "x", Run: func(*cobra.Command, []string) {}}
	c.Flags().StringVar(&got, "log-level", "info", "level")
	envFlags(c, "log-level")
	lookup := func(name string) (string, bool) { return "debug", name == "KVGATE_LOG_LEVEL" }
	if err := fromEnvironment(c, lookup); err != nil || got != "debug" {
		t.Errorf("flag is %q, %v; want debug from the environment", got, err)
	}
	c = &cobra.Command{Use: "x"}
	c.Flags().StringVar(&got, "log-level", "info", "level")
	envFlags(c, "log-level")
	if err := c.ParseFlags([]string{"--log-level=warn"}); err != nil {
		t.Fatal(err)
	}
	if err := fromEnvironment(c, lookup); err != nil || got != "warn" {
		t.Errorf("flag is %q, %v; the command line wins over the environment", got, err)
	}
}
