package names

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"kvgate/internal/caller"
	"kvgate/pool"
)

// snapshot has two pools: llama serves llama-70b with the adapters sql and a:b, qwen serves qwen.
func snapshot(t testing.TB) *pool.Snapshot {
	t.Helper()
	tb := pool.NewTable([]pool.PoolSpec{{Name: "llama", Models: []string{"llama-70b"}}, {Name: "qwen", Models: []string{"qwen"}}}, pool.Options{})
	for i, name := range []string{"llama", "qwen"} {
		if _, _, err := tb.SetEndpoints(name, []pool.Spec{{Pool: name, URL: fmt.Sprintf("http://10.0.0.%d:8000", i+1)}}, 1); err != nil {
			t.Fatal(err)
		}
	}
	e := tb.Load().Rows[0].Endpoint
	tb.SetServed(e, &pool.Served{At: 1, Models: []pool.Model{{ID: "llama-70b"}, {ID: "sql", Parent: "llama-70b"}, {ID: "a:b", Parent: "llama-70b"}}})
	tb.Flush(2)
	return tb.Load()
}

type fields map[string]string

func (f fields) Field(name string) []byte {
	if v, ok := f[strings.ToLower(name)]; ok {
		return []byte(v)
	}
	return nil
}

func resolver(t testing.TB, o Options) *Resolver {
	t.Helper()
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func to(models ...string) (out []Choice) {
	for _, m := range models {
		out = append(out, Choice{Model: m, Weight: 1})
	}
	return out
}

// The order of the ways to resolve a name, and what each leads to.
func TestResolve(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{
		Rules: []Rule{
			{Model: "gpt", Path: "/v1/embeddings", To: to("qwen")},
			{Model: "gpt", Headers: []Header{{"X-Tier", "gold"}}, To: to("sql")},
			{Model: "gpt", To: to("best")},
			{Model: "qwen", Fallback: []string{"nobody", "best"}},
			{Model: "dead", To: to("gone"), Fallback: []string{"sql"}},
			{Headers: []Header{{"X-Cheap", "1"}}, To: to("qwen")},
			{Model: "sql", To: to("sql"), Answer: AnswerAsked},
		},
		Aliases: map[string]string{"best": "llama-70b", "sql": "qwen", "other": "gpt"},
	})
	f := func(name string, fs fields, path, want string, how How) {
		t.Helper()
		got := r.Resolve(s, &Request{Name: []byte(name), Path: []byte(path), Fields: fs})
		model := ""
		if got.Target != nil {
			model = got.Target.Name
		}
		if model != want || got.How != how {
			t.Errorf("%s %v %s: %q by %s; want %q by %s", name, fs, path, model, got.How, want, how)
		}
	}
	f("gpt", nil, "", "llama-70b", ByRule)
	f("gpt", nil, "/v1/embeddings", "qwen", ByRule)
	f("gpt", fields{"x-tier": "gold"}, "", "sql", ByRule)
	f("gpt", fields{"x-tier": "silver"}, "", "llama-70b", ByRule)
	f("gpt", fields{"x-cheap": "1"}, "", "llama-70b", ByRule) // an earlier rule counts
	f("llama-70b", fields{"x-cheap": "1"}, "", "qwen", ByRule)
	f("best", nil, "", "llama-70b", ByAlias)
	f("other", nil, "", "llama-70b", ByAlias)
	f("sql", nil, "", "sql", ByRule) // its own name is what is served, not the alias
	f("llama-70b", nil, "", "llama-70b", Served)
	f("a:b", nil, "", "a:b", Served)
	f("llama-70b:sql", nil, "", "sql", OnBase)
	f("llama-70b:a:b", nil, "", "a:b", OnBase)
	f("qwen:sql", nil, "", "", Unknown)
	f("llama-70b:qwen", nil, "", "", Unknown)
	f("sql:sql", nil, "", "", Unknown)
	f(":sql", nil, "", "", Unknown)
	f("nobody", nil, "", "", Unknown)
	if got := r.Resolve(s, &Request{Name: []byte("dead")}); got.Wanted != "gone" || !got.HasFallback() || got.Target != nil {
		t.Errorf("%+v", got)
	}
	if got := r.Resolve(s, &Request{Name: []byte("sql")}); !got.Asked() || got.Rule != 6 {
		t.Errorf("%+v", got)
	}
	if got := strings.Join(r.Listed(), " "); got != "best dead gpt other qwen sql" {
		t.Errorf("listed: %s", got)
	}
	var none *Resolver
	if got := none.Resolve(s, &Request{Name: []byte("llama-70b:sql")}); got.Target == nil || got.Asked() {
		t.Errorf("%+v", got)
	}
	d := resolver(t, Options{DefaultPool: "llama", Answer: AnswerAsked})
	if got := d.Resolve(s, &Request{Name: []byte("nobody")}); got.Target == nil || got.Target.Name != "llama-70b" || got.How != ByPool || !got.Asked() {
		t.Errorf("%+v", got)
	}
	if d.Default(s).Name != "llama-70b" || r.Default(s) != nil || none.Default(s) != nil {
		t.Error("default")
	}
	if got := resolver(t, Options{DefaultPool: "gone"}).Resolve(s, &Request{Name: []byte("x")}); got.Target != nil {
		t.Errorf("%+v", got)
	}
}

// What a request falls back on, in order, without what nobody serves, what it had already and what it may not use.
func TestFallBack(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{
		Rules:   []Rule{{Model: "chat", To: to("llama-70b"), Fallback: []string{"nobody", "llama-70b", "small", "sql"}}},
		Aliases: map[string]string{"small": "qwen"},
	})
	chain := func(c *caller.Caller) (out []string) {
		q := &Request{Name: []byte("chat"), Caller: c}
		route := r.Resolve(s, q)
		for r.FallBack(&route, s, q) {
			if route.How != FellBack {
				t.Errorf("%+v", route)
			}
			out = append(out, route.Target.Name)
		}
		return out
	}
	if got := chain(nil); strings.Join(got, " ") != "qwen sql" {
		t.Errorf("%q", got)
	}
	if got := chain(&caller.Caller{Models: caller.NewModels([]string{"llama-70b", "sql"})}); strings.Join(got, " ") != "sql" {
		t.Errorf("%q", got)
	}
}

// A canary that can't take a request falls back on what its own name stands for.
func TestFallBackOnTheOwnName(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{Rules: []Rule{{Model: "llama-70b", To: []Choice{{Model: "llama-70b"}, {Model: "qwen", Weight: 1}}, Fallback: []string{"llama-70b"}}}})
	q := &Request{Name: []byte("llama-70b")}
	route := r.Resolve(s, q)
	if route.Target.Name != "qwen" || !r.FallBack(&route, s, q) || route.Target.Name != "llama-70b" || r.FallBack(&route, s, q) {
		t.Errorf("%+v", route)
	}
}

// What is checked is the model that is sent, however it was come to; a split leaves out what the caller may not use.
func TestForbidden(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{
		Rules:       []Rule{{Model: "split", To: to("llama-70b", "qwen")}, {Model: "one", To: to("qwen")}},
		Aliases:     map[string]string{"best": "llama-70b", "cheap": "qwen"},
		DefaultPool: "qwen",
	})
	c := &caller.Caller{Models: caller.NewModels([]string{"llama-70b", "best", "cheap", "one", "split", "nobody"})}
	f := func(name string, forbidden bool) {
		t.Helper()
		got := r.Resolve(s, &Request{Name: []byte(name), Caller: c})
		if got.Forbidden != forbidden || (got.Target == nil) != forbidden {
			t.Errorf("%s: %+v; want forbidden %v", name, got, forbidden)
		}
	}
	f("llama-70b", false)
	f("best", false)
	f("qwen", true)
	f("cheap", true)
	f("one", true)
	f("sql", true) // an adapter is not its base model
	f("llama-70b:sql", true)
	f("nobody", true) // it would be sent as qwen
	for range 100 {
		f("split", false)
	}
}

func TestSplit(t *testing.T) {
	s := snapshot(t)
	o := Options{Rules: []Rule{
		{Model: "sql", To: []Choice{{Model: "llama-70b", Weight: 95}, {Model: "qwen", Weight: 5}}},
		{Model: "sticky", Sticky: PerSession, To: []Choice{{Model: "llama-70b", Weight: 90}, {Model: "qwen", Weight: 10}, {Model: "sql", Weight: 0}}},
		{Model: "user", Sticky: PerUser, To: to("llama-70b", "qwen")},
		{Model: "tenant", Sticky: PerTenant, To: to("llama-70b", "qwen")},
	}}
	r := resolver(t, o)
	share := func(name string, q Request, n int, each func(i int, q *Request)) float64 {
		t.Helper()
		canary := 0
		q.Name = []byte(name)
		for i := range n {
			if each != nil {
				each(i, &q)
			}
			switch got := r.Resolve(s, &q); got.Target.Name {
			case "qwen":
				canary++
			case "llama-70b":
			default:
				t.Fatalf("%s", got.Target.Name)
			}
		}
		return float64(canary) / float64(n)
	}
	const n = 40000
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 5*math.Sqrt(want*(1-want)/n) { // five standard deviations
			t.Errorf("%s: %.4f; want %.4f", what, got, want)
		}
	}
	near("drawn", share("sql", Request{}, n, nil), 0.05)
	near("sticky without a session", share("sticky", Request{}, n, nil), 0.1)
	near("by session", share("sticky", Request{}, n, func(i int, q *Request) { q.Session = pool.HashName(fmt.Sprint(i)) }), 0.1)
	near("by user", share("user", Request{}, n, func(i int, q *Request) { q.User = pool.HashName(fmt.Sprint(i)) }), 0.5)
	near("by tenant", share("tenant", Request{}, n, func(i int, q *Request) { q.Caller = &caller.Caller{Tenant: fmt.Sprint(i)} }), 0.5)
	for i := range 200 { // the same again
		q := Request{Session: pool.HashName(fmt.Sprint(i))}
		if got := share("sticky", q, 20, nil); got != 0 && got != 1 {
			t.Fatalf("session %d is split: %g", i, got)
		}
	}
	// More weight for the canary moves sessions to it and none away from it.
	o.Rules[1].To = []Choice{{Model: "llama-70b", Weight: 70}, {Model: "qwen", Weight: 30}}
	more := resolver(t, o)
	for i := range 5000 {
		q := Request{Name: []byte("sticky"), Session: pool.HashName(fmt.Sprint(i))}
		if was, is := r.Resolve(s, &q), more.Resolve(s, &q); was.Target.Name == "qwen" && is.Target.Name != "qwen" {
			t.Fatalf("session %d went back", i)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	f := func(o Options, want string) {
		t.Helper()
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	f(Options{Aliases: map[string]string{"a": "b", "b": "a"}}, "loop")
	f(Options{Aliases: map[string]string{"a": "a"}}, "loop")
	f(Options{Rules: []Rule{{Model: "a", To: to("b")}}, Aliases: map[string]string{"b": "a"}}, "a → b → a")
	f(Options{Rules: []Rule{{Model: "a", To: to("x", "b")}, {Model: "b", To: to("c")}, {Model: "c", To: to("a")}}}, "loop")
	f(Options{Rules: []Rule{{Model: "a", To: []Choice{{Model: "x"}}}}}, "sum to 0")
	f(Options{Rules: []Rule{{Model: "a", To: []Choice{{Model: "x", Weight: -1}}}}}, "weight -1")
	long := map[string]string{}
	for i := range 20 {
		long[fmt.Sprint(i)] = fmt.Sprint(i + 1)
	}
	f(Options{Aliases: long}, "loop")
}

func TestExplain(t *testing.T) {
	r := resolver(t, Options{Rules: []Rule{{Model: "gpt", To: []Choice{{Model: "best", Weight: 3}, {Model: "qwen", Weight: 0}}}}, Aliases: map[string]string{"best": "llama-70b"}})
	_, steps := r.Explain(snapshot(t), &Request{Name: []byte("gpt")})
	var got []string
	for _, s := range steps {
		got = append(got, s.Name+" "+s.By+" "+s.To)
	}
	if strings.Join(got, ", ") != "gpt rule best, best alias llama-70b, llama-70b served llama-70b" {
		t.Errorf("%q", got)
	}
}

func TestResolveDoesNotAllocate(t *testing.T) {
	s := snapshot(t)
	r := resolver(t, Options{
		Rules:       []Rule{{Model: "split", Sticky: PerSession, To: to("best", "qwen"), Fallback: []string{"sql"}}, {Path: "/x", Headers: []Header{{"a", "b"}}, To: to("qwen")}},
		Aliases:     map[string]string{"best": "llama-70b"},
		DefaultPool: "qwen",
	})
	q := &Request{Path: []byte("/x"), Fields: fields{}, Session: 7, Caller: &caller.Caller{Models: caller.NewModels([]string{"llama*", "qwen"})}}
	for _, name := range []string{"split", "best", "llama-70b", "llama-70b:sql", "nobody"} {
		q.Name = []byte(name)
		if n := testing.AllocsPerRun(200, func() { r.Resolve(s, q) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	s := snapshot(b)
	r := resolver(b, Options{
		Rules:   []Rule{{Model: "split", Sticky: PerSession, To: to("best", "qwen")}},
		Aliases: map[string]string{"best": "llama-70b"},
	})
	for _, name := range []string{"llama-70b", "best", "split"} {
		b.Run(name, func(b *testing.B) {
			q := &Request{Name: []byte(name), Session: 7, Caller: &caller.Caller{Models: caller.NewModels([]string{"llama*", "qwen"})}}
			b.ReportAllocs()
			for b.Loop() {
				r.Resolve(s, q)
			}
		})
	}
}
