package caller

import (
	"path"
	"strings"
	"testing"

	"kvgate/pool"
)

func TestMatch(t *testing.T) {
	f := func(pattern, name string, want bool) {
		t.Helper()
		if got := Match(pattern, name); got != want {
			t.Errorf("%q matches %q: %v; want %v", pattern, name, got, want)
		}
	}
	f("", "", true)
	f("", "a", false)
	f("*", "", true)
	f("*", "org/Model:v1@x", true)
	f("llama-*", "llama-", true)
	f("llama-*", "llama", false)
	f("*-sql", "a-sql-sql", true)
	f("*-sql", "a-sqlx", false)
	f("a*b*c", "axxbxxbc", true)
	f("a*b*c", "axxbxxb", false)
	f("?ql", "sql", true)
	f("?ql", "ql", false)
	f("a.c", "abc", false)
	f("[a]", "a", false)
	f(strings.Repeat("*a", 50)+"b", strings.Repeat("a", 5000), false) // not for ever
}

// Match agrees with path.Match where that has no other rules: no slashes, brackets or backslashes.
func FuzzMatch(f *testing.F) {
	f.Add("a*b?c", "aXXbYc")
	f.Add("**", "")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		for i := range len(pattern + name) {
			if c := (pattern + name)[i]; c == '/' || c == '[' || c == '\\' || c >= 0x80 {
				t.Skip() // to path.Match it is a separator, a class, an escape or part of a rune: here it is itself
			}
		}
		if len(name) > 100 || strings.Count(pattern, "*") > 5 {
			t.Skip() // path.Match takes its time
		}
		want, err := path.Match(pattern, name)
		if err != nil {
			t.Skip() // no pattern to path.Match, so nothing to compare with
		}
		if got := Match(pattern, name); got != want {
			t.Errorf("%q matches %q: %v; want %v", pattern, name, got, want)
		}
	})
}

func TestModels(t *testing.T) {
	base := &pool.Target{Name: "org/llama", Base: "org/llama"}
	adapter := &pool.Target{Name: "sql", Adapter: true, Base: "org/llama"}
	f := func(tgt *pool.Target, want bool, patterns ...string) {
		t.Helper()
		if got := NewModels(patterns).Has(tgt); got != want {
			t.Errorf("%q has %s: %v; want %v", patterns, tgt.Name, got, want)
		}
	}
	f(base, false)
	f(base, true, "*")
	f(base, true, "x", "org/*")
	f(base, true, "org/llama")
	f(adapter, false, "org/llama") // a base model is not its adapters
	f(adapter, false, "org/*")
	f(adapter, false, "org/llama*")
	f(adapter, true, "org/*:s*")
	f(&pool.Target{Name: "a:b", Adapter: true, Base: "org/llama:v1"}, true, "org/llama:v1:a:*")
	f(&pool.Target{Name: "sql", Adapter: true, Base: "org/llama:v1"}, false, "org/llama:v1*")
	f(adapter, true, "sql")
	f(adapter, true, "org/llama:sql")
	f(adapter, true, "org/llama:*")
	f(adapter, false, "org/mistral:*")
	f(base, false, "org/llama:*")
	var nobody *Caller
	if !nobody.May(base) || nobody.TenantName() != "" {
		t.Error("without authentication nobody is kept from anything")
	}
	c := &Caller{Tenant: "a", Models: NewModels([]string{"s*", "org/llama:x"})}
	if n := testing.AllocsPerRun(100, func() { c.May(adapter); c.May(base) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestClass(t *testing.T) {
	for _, name := range Classes {
		if c, ok := ParseClass(name); !ok || c.String() != name {
			t.Errorf("%s is %v, %v", name, c, ok)
		}
	}
	if c, ok := ParseClass(""); !ok || c != Normal {
		t.Error("no class is not normal")
	}
	if _, ok := ParseClass("urgent"); ok {
		t.Error("urgent is a class")
	}
	if High <= Normal || Normal <= Low {
		t.Error("order of classes")
	}
}
