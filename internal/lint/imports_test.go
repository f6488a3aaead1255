package lint

import (
	"fmt"
	"go/ast"
	"path"
	"slices"
	"strings"
	"testing"
)

// allowed says which of our packages each package may import, outside its tests. "*" is all but internal/cli.
// A new package gets a line here, after a look at what it is for.
var allowed = map[string]string{
	".":                 "internal/cli",
	"config":            "",
	"pool":              "",
	"openai":            "",
	"scoring":           "pool",
	"admission":         "pool",
	"discovery":         "pool config",
	"metrics":           "pool config",
	"telemetry":         "pool internal/version",
	"proxy":             "pool openai scoring admission telemetry config internal/caller internal/names internal/quota",
	"internal/version":  "",
	"internal/adapters": "pool telemetry",
	"internal/caller":   "pool",
	"internal/capture":  "",
	"internal/names":    "pool internal/caller",
	"internal/auth":     "internal/caller",
	"internal/quota":    "pool internal/caller",
	"internal/lines":    "",
	"internal/usage":    "telemetry internal/lines",
	"internal/record":   "telemetry internal/lines scoring",
	"internal/shared":   "",
	"internal/lint":     "",
	"internal/modelsim": "openai",
	"internal/admin":    "pool openai scoring telemetry config metrics internal/capture internal/names internal/version",
	"internal/top":      "internal/admin",
	"internal/tracing":  "telemetry",
	"internal/gateway":  "*",
	"internal/cli":      "*",
	"internal/demo":     "*",
	"bench":             "*",
	"test":              "* internal/cli",
}

// only says who alone may import a package from outside, tests aside.
var only = map[string][]string{
	"github.com/valyala/fasthttp": {"proxy", "internal/modelsim", "bench", "test"},
	"go.opentelemetry.io":         {"internal/tracing", "test"},
	"github.com/gdamore/tcell/v2": {"internal/top", "internal/cli"},
	"github.com/spf13/cobra":      {"internal/cli", "bench"},
	"gopkg.in/yaml.v3":            {"config", "discovery"},
	"k8s.io":                      {"discovery", "test"},
	"net/http/pprof":              {"internal/admin"},
}

// pure packages decide without the world: no network, files or logs, and no clock. That lets the same code run in the
// proxy, in a simulation in virtual time and on a saved snapshot.
var pure = []string{"pool", "scoring", "openai", "admission", "internal/caller", "internal/names"}

var worldly = []string{"net", "net/http", "os", "os/exec", "log", "log/slog", "syscall", "github.com/valyala/fasthttp", "go.uber.org/zap"}

// top is the first of the listed packages that pkg is or lies in.
func top(pkg string) string {
	for p := pkg; p != "."; p = path.Dir(p) {
		if _, ok := allowed[p]; ok {
			return p
		}
	}
	return "."
}

func importProblems(f *file) (out []string) {
	pkg := top(f.pkg)
	if pkg == "." && f.pkg != "." {
		return []string{f.name + ": package " + f.pkg + " is not in the list of internal/lint/imports_test.go"}
	}
	for _, imp := range f.imports() {
		if own, ok := strings.CutPrefix(imp, "kvgate/"); ok {
			may := allowed[pkg]
			switch {
			case top(own) == pkg, strings.HasPrefix(may, "*") && own != "internal/cli", slices.Contains(strings.Fields(may), top(own)):
			case f.test && (own != "internal/cli" || pkg == "bench"): // tests may bring parts together; those of benchmarks start kvgate
			default:
				out = append(out, fmt.Sprintf("%s: %s must not import %s", f.name, pkg, own))
			}
			if own == "internal/shared" && !f.test && pkg != "bench" && pkg != "internal/cli" {
				out = append(out, f.name+": internal/shared is for tests and benchmarks")
			}
			continue
		}
		for lib, who := range only {
			if (imp == lib || strings.HasPrefix(imp, lib+"/")) && !f.test && !slices.Contains(who, pkg) {
				out = append(out, fmt.Sprintf("%s: %s must not import %s; only %v may", f.name, pkg, imp, who))
			}
		}
		if slices.Contains(pure, pkg) && !f.test && slices.Contains(worldly, imp) {
			out = append(out, fmt.Sprintf("%s: %s must not import %s: it decides without the world", f.name, pkg, imp))
		}
	}
	return out
}

// clockProblems finds readings of the wall clock in pure packages.
func clockProblems(f *file) (out []string) {
	if f.test || !slices.Contains(pure, top(f.pkg)) {
		return nil
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" &&
			slices.Contains([]string{"Now", "Since", "Until", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick", "Sleep"}, sel.Sel.Name) {
			out = append(out, fmt.Sprintf("%s: time.%s: time comes in as an argument here", f.at(sel.Pos()), sel.Sel.Name))
		}
		return true
	})
	return out
}

func TestImportsPointDown(t *testing.T) {
	for _, f := range sources(t) {
		for _, p := range append(importProblems(f), clockProblems(f)...) {
			t.Error(p)
		}
	}
}

func TestImportRulesCanFail(t *testing.T) {
	f := func(name, imp string, want int) {
		t.Helper()
		if got := importProblems(snippet(t, name, "package x\nimport _ \""+imp+"\"\n")); len(got) != want {
			t.Errorf("%s importing %s: %v; want %d problems", name, imp, got, want)
		}
	}
	f("pool/x.go", "kvgate/openai", 1)
	f("pool/x.go", "net/http", 1)
	f("pool/x_test.go", "os", 0)
	f("scoring/x.go", "kvgate/pool", 0)
	f("scoring/x.go", "github.com/valyala/fasthttp", 2)
	f("metrics/x.go", "github.com/valyala/fasthttp/fasthttputil", 1)
	f("proxy/x.go", "kvgate/internal/gateway", 1)
	f("internal/gateway/x.go", "kvgate/internal/cli", 1)
	f("brandnew/x.go", "os", 1)
	if got := clockProblems(snippet(t, "scoring/x.go", "package x\nimport \"time\"\nvar t = time.Now()\n")); len(got) != 1 {
		t.Errorf("time.Now in scoring: %v; want one problem", got)
	}
}
