package names

import (
	"strings"
	"testing"
)

// What is told of a name is every way that its requests can go, and where each of them does go is among that.
func TestLeads(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{
		Rules: []Rule{
			{Model: "gpt", Path: "/v1/embeddings", To: to("qwen")},
			{Model: "gpt", To: []Choice{{Model: "best", Weight: 3}, {Model: "a:b", Weight: 1}, {Model: "qwen", Weight: 0}}},
			{Model: "best", To: to("sql"), Fallback: []string{"spare", "gone"}},
			{Model: "lost", To: to("gone")},
			{Model: "rescued", To: to("gone"), Fallback: []string{"qwen"}},
			{Model: "llama-70b", To: to("llama-70b")},
		},
		Aliases: map[string]string{"chat": "gpt", "spare": "llama-70b", "plain": "qwen", "dead": "gone"},
	})
	f := func(name, want string, by How) {
		t.Helper()
		leads, how := r.Leads(s, name)
		var got []string
		for _, l := range leads {
			got = append(got, l.Name)
		}
		if g := strings.Join(got, " "); g != want || how != by {
			t.Errorf("%s: %q by %v; want %q by %v", name, g, how, want, by)
		}
		for range 50 {
			q := Request{Name: []byte(name), Path: []byte("/v1/chat/completions")}
			if route := r.Resolve(s, &q); route.Target != nil && !strings.Contains(" "+want+" ", " "+route.Target.Name+" ") {
				t.Fatalf("%s went to %s, which is not among %q", name, route.Target.Name, want)
			}
		}
	}
	f("gpt", "qwen sql a:b llama-70b", ByRule) // no further fallback: gone is served by nobody
	f("best", "sql llama-70b", ByRule)
	f("chat", "qwen sql a:b llama-70b", ByAlias)
	f("plain", "qwen", ByAlias)
	f("dead", "", ByAlias)
	f("lost", "", ByRule)
	f("rescued", "qwen", ByRule)
	f("llama-70b", "llama-70b", ByRule) // itself
	if leads, _ := (*Resolver)(nil).Leads(s, "qwen"); leads != nil {
		t.Errorf("no rules: %v", leads)
	}

	// A rule for any name comes first, if it stands first.
	r = resolver(t, Options{Rules: []Rule{{Path: "/v1/embeddings", To: to("qwen")}, {To: to("sql")}}, Aliases: map[string]string{"x": "llama-70b"}})
	f("x", "qwen sql", ByAlias)
	// Fallbacks that fall back on each other end.
	r = resolver(t, Options{Rules: []Rule{{Model: "a", To: to("gone"), Fallback: []string{"b"}}, {Model: "b", To: to("gone"), Fallback: []string{"a", "qwen"}}}})
	f("a", "qwen", ByRule)
}
