package auth

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/internal/caller"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sum(t testing.TB, key string) [32]byte {
	t.Helper()
	s, ok := Sum(key)
	if !ok {
		t.Fatalf("%d bytes are no key", len(key))
	}
	return s
}

func TestKeys(t *testing.T) {
	a, b, old := NewKey(), NewKey(), NewKey()
	at := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	now := at
	r := New([]Key{
		{ID: "a", Sum: sum(t, a), Tenant: "t", Class: caller.High, Models: []string{"llama-*"}},
		{ID: "b", Sum: sum(t, b), Tenant: "u"},
		{ID: "old", Sum: sum(t, old), Tenant: "t", End: at.Add(time.Minute)},
	}, nil, func() time.Time { return now })
	f := func(key, id string) *caller.Caller {
		t.Helper()
		who := r.Authorize([]byte(key))
		if got := ""; who != nil {
			got = who.Key
			if got != id {
				t.Errorf("%q is %q; want %q", key[:5], got, id)
			}
		} else if id != "" {
			t.Errorf("%q is nobody; want %q", key[:5], id)
		}
		return who
	}
	if who := f(a, "a"); who.Tenant != "t" || who.Class != caller.High || who.Models == nil || who != r.Authorize([]byte(a)) {
		t.Errorf("%+v", who)
	}
	if who := f(b, "b"); who.Models != nil || who.Class != caller.Normal {
		t.Errorf("%+v", who)
	}
	f(old, "old")
	if r.Named("old") == nil || r.Named("a") != r.Authorize([]byte(a)) || r.Named("c") != nil || r.Named("") != nil {
		t.Error("names of keys")
	}
	now = at.Add(time.Minute)
	f(old, "")
	if r.Named("old") != nil {
		t.Error("an expired key has a name")
	}
	f(NewKey(), "")
	f(a[:len(a)-1], "")
	f(a+"x", "")
	f(strings.ToUpper(a), "")
	s := sum(t, a)
	f(string(s[:]), "") // a hash is no key
	if r.Authorize(nil) != nil {
		t.Error("nothing is a key")
	}
	if len(a) != len(KeyPrefix)+43 || !strings.HasPrefix(a, KeyPrefix) || a == b {
		t.Errorf("%d bytes", len(a))
	}
	for _, bad := range []string{"short", strings.Repeat("a", 31), strings.Repeat("a b", 20), strings.Repeat("ü", 40), strings.Repeat("a\n", 40)} {
		if _, ok := Sum(bad); ok {
			t.Errorf("%q is good enough", bad)
		}
	}
	key := []byte(a)
	if n := testing.AllocsPerRun(100, func() { r.Authorize(key) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkAuthorizeKey(b *testing.B) {
	var keys []Key
	for range 10000 {
		keys = append(keys, Key{ID: "x", Sum: sum(b, NewKey()), Tenant: "t"})
	}
	good := NewKey()
	keys = append(keys, Key{ID: "good", Sum: sum(b, good), Tenant: "t"})
	r := New(keys, nil, nil)
	key := []byte(good)
	b.ReportAllocs()
	for b.Loop() {
		if r.Authorize(key) == nil {
			b.Fatal("not valid")
		}
	}
}
