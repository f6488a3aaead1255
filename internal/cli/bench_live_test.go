package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvgate/bench/load"
	"kvgate/internal/modelsim"
)

func TestBenchLiveMistakes(t *testing.T) {
	t.Setenv("BENCH_EMPTY", " ")
	f := func(line, want string) {
		t.Helper()
		code, stdout, stderr := run(t, "", append([]string{"bench", "live"}, strings.Fields(line)...)...)
		first, rest, _ := strings.Cut(stderr, "\n")
		if code == 0 || stdout != "" || first != "kvgate: "+want || rest != "" && !strings.HasPrefix(rest, "try: ") || strings.Contains(stderr, "planted") {
			t.Errorf("%s: code %d, stdout %q, stderr %q; want %q", line, code, stdout, stderr, want)
		}
	}
	const at = "--target http://127.0.0.1:1 --model m "
	f("", "--target says what to ask")
	f("--target 127.0.0.1:1", `--target: "127.0.0.1:1" is not a URL such as http://127.0.0.1:8080`)
	f("--target http://u:planted@x", "--target: a URL with a user or password in it; give the key in a file or the environment")
	f(at+"--input pareto:1", `--input: "pareto:1"; want a number, or a distribution such as uniform:100-500`)
	f(at+"--rate 0", "a rate of 0; want requests per second, above 0 and up to 1e6")
	f(at+"--rate 5 --clients 3", "--rate and --clients: want one of the two")
	f(at+"--arrival closed", "0 clients; want 1 to 100000")
	f(at+"--arrival poisson --clients 3", "--clients goes with --arrival closed")
	f(at+"--arrival gamma", `arrival "gamma"; want poisson, constant, burst, closed`)
	f(at+"--adapter a", "--model and --adapter: want one of the two; --adapter takes models too")
	f("--target http://127.0.0.1:1 --adapter a{3..1}", `--adapter: "a{3..1}"; want whole numbers that count up, such as lora-{1..64}`)
	f(at+"--slice 5s", "slices need two targets")
	f(at+"--key-env BENCH_EMPTY", "--key-env: BENCH_EMPTY is empty")
	f(at+"--key-env BENCH_UNSET_VARIABLE", "--key-env: BENCH_UNSET_VARIABLE is not set")
	f(at+"--key-env B=PATH", `--key-env: no target is called "B"`)
	f(at+"--target http://127.0.0.1:2 --target http://127.0.0.1:3 --requests 1", "3 targets; want one, or two to be compared")
	f(at+"--extra {", "--extra: unexpected end of JSON input")
}

func TestPoliciesLiveMistakes(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		code, _, stderr := run(t, "", strings.Fields("bench policies --live "+line)...)
		if code != 2 || !strings.HasPrefix(stderr, "kvgate: "+want+"\n") {
			t.Errorf("%s: code %d, %q; want %q", line, code, stderr, want)
		}
	}
	f("--seeds 3", "--seeds works in virtual time alone, without --live")
	f("--workload tool,rag", "--live runs one workload; got 2")
	f("--policy oracle", `--policy: unknown "oracle"; want one of auto, round_robin, random, least_requests, power_of_two, consistent_hash`)
	f("--live-rate 0", "--live-rate 0, --live-speedup 2; want numbers above 0")
}

// A run from the command line: a key from a file for one server and from the environment for the other, tables, JSON and a page.
func TestBenchLive(t *testing.T) {
	key := fmt.Sprintf("planted-%d", time.Now().UnixNano())
	var targets []string
	for _, name := range []string{"x", "y"} {
		s, err := modelsim.New(modelsim.Options{Speedup: 50, APIKey: key, OnRequest: func(r *http.Request, _ []byte) {
			if r.Header.Get("Authorization") != "Bearer "+key {
				t.Errorf("a request without the key")
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close(t.Context()) }()
		targets = append(targets, "--target", name+"="+s.URL())
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "key"), []byte(key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BENCH_KEY", key)
	args := append([]string{
		"bench", "live", "--requests", "40", "--rate", "100", "--input", "uniform:10-30", "--output", "3",
		"--key-file", "x=" + filepath.Join(dir, "key"), "--key-env", "y=BENCH_KEY", "--html", filepath.Join(dir, "r.html"),
	}, targets...)
	code, stdout, stderr := run(t, "", args...)
	if code != 0 || !strings.Contains(stdout, "y against x, from 20 pairs") || strings.Count(stdout, "20 requests: 20 answered, 0 failed") != 2 {
		t.Errorf("code %d, %s\n%s", code, stderr, stdout)
	}
	if stderr != "wrote "+filepath.Join(dir, "r.html")+"\n" { // no bar where there is no terminal
		t.Errorf("stderr %q", stderr)
	}
	page, err := os.ReadFile(filepath.Join(dir, "r.html"))
	if err != nil || !strings.Contains(string(page), "<svg") {
		t.Errorf("%v, %d bytes", err, len(page))
	}
	code, asJSON, stderr := run(t, "", append(args, "--json")...)
	var r load.Result
	if err := json.Unmarshal([]byte(asJSON), &r); err != nil || code != 0 || r.Targets[1].Answered != 20 || r.Comparison.Pairs != 20 {
		t.Errorf("code %d, %v: %s", code, err, asJSON)
	}
	if all := stdout + stderr + string(page) + asJSON; strings.Contains(all, key) {
		t.Error("the key is in what was printed")
	}
	t.Setenv("BENCH_KEY", "wrong")
	code, stdout, stderr = run(t, "", "bench", "live", "--requests", "3", "--rate", "100", "--model", "m", "--key-env", "BENCH_KEY", targets[0], targets[1])
	if code != 1 || !strings.Contains(stdout, "status 401: 3") || stderr != "kvgate: no request was answered\n" {
		t.Errorf("code %d, %q\n%s", code, stderr, stdout)
	}
}
