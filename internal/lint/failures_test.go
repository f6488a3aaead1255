package lint

import (
	"fmt"
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	failureRow = regexp.MustCompile(`(?m)^\| (\d+) \|.*\| ([^|]*) \|$`)
	testName   = regexp.MustCompile("`(Test\\w+)`")
)

// The page on failures lists each with tests, and these exist.
func TestFailuresHaveTests(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/failures.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := map[string]bool{}
	for _, f := range sources(t) {
		if !f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				exists[fn.Name.Name] = true
			}
		}
	}
	rows := failureRow.FindAllStringSubmatch(string(page), -1)
	for i, r := range rows {
		if r[1] != fmt.Sprint(i+1) {
			t.Errorf("row %d has the number %s", i+1, r[1])
		}
		names := testName.FindAllStringSubmatch(r[2], -1)
		if len(names) == 0 {
			t.Errorf("failure %s has no test", r[1])
		}
		for _, n := range names {
			if !exists[n[1]] {
				t.Errorf("failure %s: there is no %s", r[1], n[1])
			}
		}
	}
	if len(rows) < 38 {
		t.Errorf("%d failures are listed; want 38 or more", len(rows))
	}
}

// wallClock are the files that may ask what time of day it is: for what is shown to people, shared with other gateways (the
// windows of quotas), or compared with what a server
// says of the time.
var wallClock = []string{"metrics/scraper.go", "telemetry/metrics.go", "telemetry/discovery.go", "internal/admin/feed.go", "proxy/quota.go"}

// wallClockProblems finds time taken off the monotonic clock: a wait measured so would jump with the clock.
func wallClockProblems(f *file) (out []string) {
	if f.test || slices.Contains(wallClock, f.name) ||
		!slices.Contains([]string{"proxy", "pool", "scoring", "metrics", "discovery", "telemetry", "internal/gateway", "internal/admin"}, top(f.pkg)) {
		return nil
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		switch name := sel.Sel.Name; {
		case strings.HasPrefix(name, "Unix") && len(call.Args) == 0, name == "Round" && len(call.Args) == 1 && isZero(call.Args[0]):
			out = append(out, fmt.Sprintf("%s: %s() is the time of day; measure waits with time.Since or pool.Instant", f.at(sel.Pos()), name))
		}
		return true
	})
	return out
}

func isZero(e ast.Expr) bool {
	lit, ok := e.(*ast.BasicLit)
	return ok && lit.Value == "0"
}

func TestTimeIsMonotonic(t *testing.T) {
	for _, f := range sources(t) {
		for _, p := range wallClockProblems(f) {
			t.Error(p)
		}
	}
	if got := wallClockProblems(snippet(t, "proxy/x.go", "package x\nimport \"time\"\nvar t = time.Now().UnixNano()\n")); len(got) != 1 {
		t.Errorf("UnixNano in proxy: %v; want one problem", got)
	}
}
