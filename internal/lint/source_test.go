package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// root is the repository.
const root = "../.."

// A file is one parsed Go file.
type file struct {
	name string // relative to the repository, with slashes
	pkg  string // directory relative to the repository; "." is main
	test bool
	ast  *ast.File
	fset *token.FileSet
}

// sources parses every Go file of the main module.
func sources(t *testing.T) []*file {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: the rules on the whole tree are for whoever checks the whole tree")
	}
	var out []*file
	fset := token.NewFileSet()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			skip := rel != "." && (strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_") || d.Name() == "testdata" || d.Name() == "node_modules")
			if _, err := os.Stat(filepath.Join(p, "go.mod")); rel != "." && err == nil {
				skip = true // another module
			}
			if skip {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") {
			return nil
		}
		f, err := parse(fset, rel, nil)
		if err != nil {
			return err
		}
		out = append(out, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 20 {
		t.Fatalf("only %d Go files found", len(out))
	}
	return out
}

func parse(fset *token.FileSet, name string, src any) (*file, error) {
	if src == nil {
		data, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			return nil, err
		}
		src = data
	}
	tree, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	return &file{name, path.Dir(name), strings.HasSuffix(name, "_test.go"), tree, fset}, nil
}

// snippet parses src as file name, to show that a rule can fail.
func snippet(t *testing.T, name, src string) *file {
	t.Helper()
	f, err := parse(token.NewFileSet(), name, src)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *file) imports() []string {
	var out []string
	for _, i := range f.ast.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err == nil {
			out = append(out, p)
		}
	}
	return out
}

func (f *file) at(pos token.Pos) string { return f.fset.Position(pos).String() }

// tracked lists the repository's files: what git knows, or everything where there is no git.
func tracked(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "-C", root, "ls-files", "-z").Output()
	if err == nil && len(out) > 0 {
		names := strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
		return slices.DeleteFunc(names, func(n string) bool {
			fi, err := os.Stat(filepath.Join(root, n))
			return err != nil || !fi.Mode().IsRegular() // deleted and not yet committed
		})
	}
	var names []string
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && d.Name() == ".git" {
			return filepath.SkipDir
		}
		if rel, err := filepath.Rel(root, p); err == nil && d.Type().IsRegular() {
			names = append(names, filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
