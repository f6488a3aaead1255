package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// obvious methods need no sentence: their name is their contract.
var obvious = []string{"Error", "Unwrap", "String", "Len", "Less", "Swap", "MarshalJSON", "UnmarshalJSON", "MarshalYAML", "UnmarshalYAML"}

// docProblems finds exported names without a comment, and comments that do not start with the name.
func docProblems(f *file) (out []string) {
	if f.test || f.ast.Name.Name == "main" {
		return nil
	}
	complain := func(pos token.Pos, name string, doc *ast.CommentGroup, grouped bool) {
		text := doc.Text()
		words := strings.Fields(text)
		switch {
		case len(words) == 0 && !grouped:
			out = append(out, fmt.Sprintf("%s: %s has no comment", f.at(pos), name))
		case len(words) == 0, strings.HasPrefix(text, "Deprecated:"):
		case !slices.ContainsFunc(words[:min(3, len(words))], func(w string) bool {
			return strings.Trim(w, ".,:;()'s") == strings.Trim(name, "s") || strings.HasPrefix(w, name)
		}) && !grouped:
			out = append(out, fmt.Sprintf("%s: the comment of %s begins %q; begin with the name", f.at(pos), name, strings.Join(words[:min(4, len(words))], " ")))
		}
	}
	for _, d := range f.ast.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && (d.Recv == nil || ast.IsExported(receiver(d)) && !slices.Contains(obvious, d.Name.Name)) {
				complain(d.Pos(), d.Name.Name, d.Doc, false)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					if s.Name.IsExported() {
						doc := s.Doc
						if doc == nil && len(d.Specs) == 1 {
							doc = d.Doc
						}
						complain(s.Pos(), s.Name.Name, doc, d.Lparen.IsValid() && d.Doc != nil)
					}
				case *ast.ValueSpec:
					for _, n := range s.Names {
						if !n.IsExported() {
							continue
						}
						doc := s.Doc
						if doc == nil && !d.Lparen.IsValid() {
							doc = d.Doc
						}
						complain(n.Pos(), n.Name, doc, d.Lparen.IsValid() && (d.Doc != nil || s.Doc != nil || s.Comment != nil))
					}
				}
			}
		}
	}
	return out
}

func receiver(d *ast.FuncDecl) string {
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name
		default:
			return ""
		}
	}
}

func TestExportedNamesAreDocumented(t *testing.T) {
	for _, f := range sources(t) {
		for _, p := range docProblems(f) {
			t.Error(p)
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	docs := map[string][]string{}
	for _, f := range sources(t) {
		if f.test || strings.HasSuffix(f.ast.Name.Name, "_test") {
			continue
		}
		if _, ok := docs[f.pkg]; !ok {
			docs[f.pkg] = nil
		}
		if f.ast.Doc != nil {
			docs[f.pkg] = append(docs[f.pkg], f.name)
			want := "Package " + f.ast.Name.Name
			if f.ast.Name.Name == "main" {
				want = "Command "
			}
			if !strings.HasPrefix(f.ast.Doc.Text(), want) {
				t.Errorf("%s: the package comment does not begin with %q", f.name, want)
			}
		}
	}
	for pkg, files := range docs {
		if len(files) != 1 {
			t.Errorf("package %s: %d package comments %v; want one", pkg, len(files), files)
		}
	}
}

func TestDocRulesCanFail(t *testing.T) {
	f := func(src string, want int) {
		t.Helper()
		if got := docProblems(snippet(t, "pool/x.go", "package x\n"+src)); len(got) != want {
			t.Errorf("%q: %v; want %d problems", src, got, want)
		}
	}
	f("func A() {}", 1)
	f("// A does.\nfunc A() {}", 0)
	f("// does A.\nfunc Bcd() {}", 1)
	f("// A Thing is.\ntype Thing int", 0)
	f("type Thing int", 1)
	f("// Things.\nconst (\n\tA = 1\n\tB = 2\n)", 0)
	f("const (\n\tA = 1\n\tB = 2 // of b\n)", 1)
	f("type t int\nfunc (t) Exported() {}", 0)
	f("// T is.\ntype T int\nfunc (*T) Do() {}\nfunc (T) String() string { return \"\" }", 1)
}
