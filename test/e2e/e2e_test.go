// Package e2e runs scripts against kvgate as a process of its own: flags, files, signals, exit codes and what it prints.
// The scripts are testdata/*.txtar, in the language of rogpeppe/go-internal/testscript, with a few commands added here.
// With KVGATE_BINARY set they run that binary instead of this test's own copy of the program.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"kvgate/internal/cli"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"kvgate": func() { os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) },
		"http":   func() { os.Exit(httpCommand(os.Args[1:])) },
		// For the commands of docs/install-vm.md.
		"sudo":      func() { os.Exit(sudoCommand(os.Args[1:])) },
		"systemctl": func() { os.Exit(systemctlCommand(os.Args[1:])) },
	})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		Setup:               setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":   code,
			"signal": signal,
			"until":  until,
			"subst":  subst,
		},
	})
}

// setup gives a script free ports and, if one is named, the binary to test.
func setup(e *testscript.Env) error {
	var open []net.Listener
	for i := range 6 {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		open = append(open, ln)
		e.Setenv(fmt.Sprintf("PORT%d", i+1), strconv.Itoa(ln.Addr().(*net.TCPAddr).Port))
	}
	for _, ln := range open {
		ln.Close()
	}
	if bin := os.Getenv("KVGATE_BINARY"); bin != "" {
		dir := filepath.Join(e.WorkDir, ".bin")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := os.Symlink(bin, filepath.Join(dir, "kvgate")); err != nil {
			return err
		}
		e.Setenv("PATH", dir+string(os.PathListSeparator)+e.Getenv("PATH"))
	}
	return nil
}

// code runs a command and checks its exit code: code 2 kvgate serve
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N command...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if ee, ok := errors.AsType[*exec.ExitError](err); ok {
		got = ee.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d; want %d", got, want)
	}
}

// signal sends a signal to the background command that has a word in its command line: signal TERM serve
func signal(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: signal HUP|TERM|INT WORD")
	}
	s, ok := map[string]syscall.Signal{"HUP": syscall.SIGHUP, "TERM": syscall.SIGTERM, "INT": syscall.SIGINT}[args[0]]
	if !ok {
		ts.Fatalf("signal %s is unknown", args[0])
	}
	for _, c := range ts.BackgroundCmds() {
		if slices.Contains(c.Args, args[1]) {
			ts.Check(c.Process.Signal(s))
			return
		}
	}
	ts.Fatalf("no background command with %s", args[1])
}

// until runs a command again and again until its output matches: until PATTERN command...
func until(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: until PATTERN command...")
	}
	re, err := regexp.Compile(args[0])
	ts.Check(err)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		_ = ts.Exec(args[1], args[2:]...)
		if re.MatchString(ts.ReadFile("stdout")) || re.MatchString(ts.ReadFile("stderr")) {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("never printed %s", args[0])
		}
	}
}

// subst replaces $NAME in files by the script's variables: subst FILE...
func subst(ts *testscript.TestScript, neg bool, args []string) {
	for _, name := range args {
		text := os.Expand(ts.ReadFile(name), func(v string) string {
			if v == "KEY" { // for the program to expand
				return "${KEY}"
			}
			return ts.Getenv(v)
		})
		ts.Check(os.WriteFile(ts.MkAbs(name), []byte(text), 0o600))
	}
}

// httpCommand is `http [-d BODY|@FILE] [-H "Name: value"]... METHOD URL`. It prints the status on the first line, then
// the body, and fails only where there is no answer or it is cut off.
func httpCommand(args []string) int {
	var body string
	var heads bool
	header := http.Header{}
	for len(args) > 2 {
		switch args[0] {
		case "-i": // as curl's: the answer's header too
			heads, args = true, args[1:]
			continue
		case "-K": // a file with an API key
			data, err := os.ReadFile(args[1])
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 2
			}
			header.Set("Authorization", "Bearer "+strings.TrimSpace(string(data)))
		case "-d":
			body = args[1]
			if file, ok := strings.CutPrefix(body, "@"); ok {
				data, err := os.ReadFile(file)
				if err != nil {
					fmt.Fprintln(os.Stderr, err)
					return 2
				}
				body = string(data)
			}
		case "-H":
			k, v, _ := strings.Cut(args[1], ":")
			header.Add(k, strings.TrimSpace(v))
		default:
			fmt.Fprintf(os.Stderr, "http: unknown flag %s\n", args[0])
			return 2
		}
		args = args[2:]
	}
	if len(args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: http [-i] [-d BODY] [-H HEADER] [-K FILE] METHOD URL")
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, args[0], args[1], strings.NewReader(body))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	req.Header = header
	if body != "" && header.Get("Content-Type") == "" {
		header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer resp.Body.Close()
	fmt.Println(resp.StatusCode)
	if heads {
		_ = resp.Header.Write(os.Stdout)
	}
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		fmt.Fprintf(os.Stderr, "cut off: %v\n", err)
		return 1
	}
	return 0
}
