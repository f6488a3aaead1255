package record

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvgate/scoring"
	"kvgate/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func finished() *telemetry.Record {
	return &telemetry.Record{
		RequestID: "secret-id", Path: "/secret", ClientAddr: "10.9.9.9:1", Pool: "p", Model: "alias", Served: "llama", Tenant: "secret-tenant", Key: "secret-key",
		API: "chat_completions", Stream: true, Status: 200, Outcome: "ok", Endpoint: "http://10.1.1.1:8000", Decided: true,
		PromptTokens: 100, PromptBytes: 4200, MaxTokens: 64, Session: 77, Prefix: []uint64{1, 2, 3},
		UsageKnown: true, InputTokens: 120, OutputTokens: 30, CachedKnown: true, CachedTokens: 64, TTFTSeconds: 0.25, DurationSeconds: 1.5,
	}
}

func closed(t testing.TB, r *Recorder) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// all reads a file to its end.
func all(t testing.TB, name string) (out []Line, r *Reader, err error) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r = NewReader(f, filepath.Base(name))
	for {
		var l Line
		if err := r.Next(&l); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return out, r, err
		}
		out = append(out, l)
	}
}

func TestRoundTrip(t *testing.T) {
	name := filepath.Join(t.TempDir(), "record.jsonl")
	fleet := []Fleet{{Pool: "p", Policy: "auto", Endpoints: 2, KVTokens: 421000, AdapterSlots: 4}}
	r, err := New(Options{File: name, Fleet: func() []Fleet { return fleet }, Kvgate: "test"})
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	r.Observe(finished())
	other := finished()
	other.Prefix, other.Session, other.UsageKnown, other.Endpoint = []uint64{1, 2, 4}, 78, false, "http://10.1.1.2:8000"
	r.Observe(other)
	r.Observe(&telemetry.Record{Outcome: "not_found", Model: "made-up"})
	if err := r.Reopen(); err != nil {
		t.Fatal(err)
	}
	long := finished()
	long.Prefix = make([]uint64, 1000)
	r.Observe(long)
	closed(t, r)
	ls, rd, err := all(t, name)
	if err != nil || len(ls) != 3 || len(rd.Warnings) > 0 {
		t.Fatalf("%d lines, %v, %v", len(ls), rd.Warnings, err)
	}
	if f := rd.Fleets(); len(f) != 1 || f[0] != fleet[0] {
		t.Errorf("fleet %+v", f)
	}
	l, o := ls[0], ls[1]
	if l.InputTokens != 120 || l.OutputTokens != 30 || l.CachedTokens != 64 || l.Estimated || l.MaxTokens != 64 || l.PromptBytes != 4200 || !l.Stream ||
		l.TTFTSeconds != 0.25 || l.DurationSeconds != 1.5 || l.Model != "llama" || l.Pool != "p" || l.Outcome != "ok" || l.Status != 200 || l.Tenant != "" {
		t.Errorf("%+v", l)
	}
	if d := l.Time().Sub(before.Add(-1500 * time.Millisecond)); d < -time.Millisecond || d > 10*time.Second {
		t.Errorf("came %v after it did", d)
	}
	if !o.Estimated || o.InputTokens != 100 || o.OutputTokens != 0 {
		t.Errorf("%+v", o)
	}
	a, b := l.BlockIDs(nil), o.BlockIDs(nil)
	if len(a) != 3 || len(b) != 3 || a[0] != b[0] || a[1] != b[1] || a[2] == b[2] || a[0] == a[1] {
		t.Errorf("blocks %x and %x; want two in common", a, b)
	}
	if l.Session == "" || l.Session == o.Session || l.Session != ls[2].Session || l.Endpoint == o.Endpoint || l.Endpoint != ls[2].Endpoint {
		t.Errorf("sessions %q %q, endpoints %q %q", l.Session, o.Session, l.Endpoint, o.Endpoint)
	}
	if n := len(ls[2].BlockIDs(nil)); n != maxBlocks {
		t.Errorf("%d blocks", n)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"secret", "10.9.9.9", "10.1.1", "made-up", "alias"} {
		if bytes.Contains(text, []byte(secret)) {
			t.Errorf("%q is in the record:\n%s", secret, text)
		}
	}
	if fi, err := os.Stat(name); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
}

// Ids are of one recorder: another one's say nothing of the same prompts.
func TestSeries(t *testing.T) {
	dir := t.TempDir()
	var ids [2][]uint64
	var series [2]string
	for i := range ids {
		name := filepath.Join(dir, fmt.Sprint(i))
		r, err := New(Options{File: name, Tenants: true})
		if err != nil {
			t.Fatal(err)
		}
		r.Observe(finished())
		closed(t, r)
		ls, rd, err := all(t, name)
		if err != nil || len(ls) != 1 || ls[0].Tenant != "secret-tenant" {
			t.Fatalf("%+v, %v", ls, err)
		}
		ids[i], series[i] = ls[0].BlockIDs(nil), rd.Header().Series
	}
	if ids[0][0] == ids[1][0] || series[0] == series[1] {
		t.Errorf("blocks %x, series %q", ids, series)
	}
}

// The layout of blocks is part of the format.
func TestBlockLayout(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 256, 16: 4096, 17: 4608, 72: 32768, 73: 34816, maxBlocks: 32768 + (maxBlocks-72)*2048} {
		if got := scoring.PrefixBytes(n); got != want {
			t.Errorf("%d blocks cover %d bytes; want %d: with another layout, Version has to change", n, got, want)
		}
	}
}

// Files are bounded in size and number, each can be read by itself, and together they hold the newest requests.
func TestRotation(t *testing.T) {
	name := filepath.Join(t.TempDir(), "record.jsonl")
	const most, keep = 20_000, 2
	for _, old := range []string{".3", ".4"} { // of a time when more were kept
		if err := os.WriteFile(name+old, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := New(Options{File: name, MaxBytes: most, Keep: keep})
	if err != nil {
		t.Fatal(err)
	}
	const n = 1000
	for i := range n {
		f := finished()
		f.InputTokens = int64(i)
		r.Observe(f)
	}
	closed(t, r)
	files, err := filepath.Glob(name + "*")
	if err != nil || len(files) != keep+1 {
		t.Fatalf("%v, %v", files, err)
	}
	want := int64(n - 1)
	for _, name := range []string{name, name + ".1", name + ".2"} {
		if fi, err := os.Stat(name); err != nil || fi.Size() > most {
			t.Errorf("%s: %v bytes, %v", name, fi.Size(), err)
		}
		ls, _, err := all(t, name)
		if err != nil || len(ls) < 20 {
			t.Fatalf("%s: %d lines, %v", name, len(ls), err)
		}
		for i := len(ls) - 1; i >= 0; i, want = i-1, want-1 {
			if ls[i].InputTokens != want {
				t.Fatalf("%s: request %d; want %d", name, ls[i].InputTokens, want)
			}
		}
	}
}

// What does not fit into memory while the file takes nothing is dropped, counted, and told.
func TestDrops(t *testing.T) {
	gate := make(chan struct{})
	var told sync.Map
	begun := false
	r, err := New(Options{
		File: filepath.Join(t.TempDir(), "record.jsonl"), QueueBytes: 2000,
		Fleet: func() []Fleet {
			if begun { // asked by the goroutine that writes
				<-gate
			}
			begun = true
			return nil
		},
		OnTrouble: func(err error) { told.Store(err.Error(), true) },
	})
	if err != nil {
		t.Fatal(err)
	}
	const n = 500
	for range n {
		r.Observe(finished())
	}
	dropped := r.Dropped()
	close(gate)
	closed(t, r)
	ls, _, err := all(t, r.String())
	if err != nil {
		t.Fatal(err)
	}
	if dropped < n/2 || uint64(len(ls))+r.Dropped() != n || r.Recorded() != n {
		t.Errorf("%d written, %d dropped, %d recorded", len(ls), r.Dropped(), r.Recorded())
	}
	found := false
	told.Range(func(k, _ any) bool { found = found || strings.Contains(k.(string), "lost"); return true })
	if !found {
		t.Error("the loss was not told")
	}
}

// A recorder goes on with a file that another one was killed over.
func TestGoesOn(t *testing.T) {
	name := filepath.Join(t.TempDir(), "record.jsonl")
	once := func() {
		r, err := New(Options{File: name})
		if err != nil {
			t.Fatal(err)
		}
		r.Observe(finished())
		r.Observe(finished())
		closed(t, r)
	}
	once()
	fi, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, fi.Size()-20); err != nil {
		t.Fatal(err)
	}
	once()
	ls, r, err := all(t, name)
	if err != nil || len(ls) != 3 || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "record.jsonl:3: the line was cut off") {
		t.Fatalf("%d lines, %q, %v", len(ls), r.Warnings, err)
	}
	if ls[0].Session == ls[1].Session || ls[1].Session != ls[2].Session {
		t.Error("the ids of two recorders can be compared, or those of one can't")
	}
}

func TestSampling(t *testing.T) {
	const window = time.Minute
	at := time.Date(2026, 1, 5, 0, 0, 30, 0, time.UTC)
	for _, share := range []float64{0.1, 0.25, 0.5, 1} {
		n := 0
		for i := range 1000 {
			a := sampled(at.Add(time.Duration(i)*window), window, share)
			if a != sampled(at.Add(time.Duration(i)*window+29*time.Second), window, share) {
				t.Fatalf("window %d is half recorded", i)
			}
			if a {
				n++
			}
		}
		if d := float64(n) - 1000*share; d < -2 || d > 2 {
			t.Errorf("%d of 1000 windows; want %g", n, 1000*share)
		}
	}
}

func TestBadFiles(t *testing.T) {
	const head = `{"kvgate_record":1,"series":"a","started":"2026-01-05T00:00:00Z"}` + "\n"
	const good = `{"at":1767571200.5,"pool":"p","model":"m","in":10,"out":5,"status":200,"outcome":"ok"}` + "\n"
	f := func(text string, lines int, want string) {
		t.Helper()
		r := NewReader(strings.NewReader(text), "r")
		n := 0
		var err error
		for {
			var l Line
			if err = r.Next(&l); err != nil {
				break
			}
			n++
		}
		got := err.Error()
		if err == io.EOF {
			got = strings.Join(r.Warnings, "; ")
		}
		if n != lines || !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%.60q: %d lines, %q; want %d and %q", text, n, got, lines, want)
		}
	}
	f("", 0, "r: the file is empty; want a record")
	f(head, 0, "")
	f(head+good+good, 2, "")
	f(strings.Replace(head, ":1,", ":2,", 1)+good, 0, "r:1: the record is of version 2; this kvgate reads version 1")
	f("t_ms,in,out\n1,2,3\n", 0, "r:1: no record")
	// cut off by a crash: at the end, and where another recorder went on
	f(head+good+good[:30], 1, "r:3: the line was cut off in writing")
	f(head+good+good[:30]+"\n"+head+good, 2, "r:3: the line was cut off in writing")
	// but not in the middle of others
	f(head+good+good[:30]+"\n"+good, 1, "r:3: not a request's record")
	f(head+good[:30]+"\n", 0, "r:2: not a request's record")
	f(head+strings.Replace(good, "10", "-10", 1), 0, "r:2: -10 tokens in")
	f(head+strings.Replace(good, `"p"`, `""`, 1), 0, `r:2: no "pool"`)
	f(head+strings.Replace(good, `"in"`, `"blocks":"AAAA","in"`, 1), 0, `r:2: "blocks" are 3 bytes`)
	f(head+`{"fleet":{"endpoints":1}}`+"\n", 0, "r:2: fleet: pool")
	f(head+strings.Repeat("x", maxLineBytes+70_000), 0, "r:2: a line of more than")
	f("\n"+head+"\n"+good, 1, "")
}

func FuzzReader(f *testing.F) {
	f.Add([]byte(`{"kvgate_record":1,"series":"a","started":"2026-01-05T00:00:00Z","sample":0.5,"window_seconds":300}
{"fleet":{"pool":"p","policy":"auto","endpoints":2,"kv_tokens":421000}}
{"at":1767571200.5,"pool":"p","model":"m","in":10,"out":5,"blocks":"AAECAwQF","status":200,"outcome":"ok"}
`))
	f.Add([]byte("{\"kvgate_record\":1}\n{\"at\":1,"))
	f.Add([]byte("{\"kvgate_record\":1}\n{\"at\"\n{\"kvgate_record\":1}\n"))
	f.Add([]byte("{\"kvgate_record\":9}\n"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b), "r")
		n := 0
		for {
			var l Line
			err := r.Next(&l)
			if err == io.EOF {
				break
			}
			if err != nil {
				if !strings.HasPrefix(err.Error(), "r:") {
					t.Fatalf("%v says not where", err)
				}
				break
			}
			if n++; l.Check() != nil || len(l.BlockIDs(nil)) != len(l.Blocks)/idBytes || n > len(b) {
				t.Fatalf("%+v", l)
			}
		}
		if r.Number() > bytes.Count(b, []byte("\n"))+2 {
			t.Fatalf("line %d of %d", r.Number(), bytes.Count(b, []byte("\n")))
		}
	})
}

func BenchmarkObserve(b *testing.B) {
	r, err := New(Options{File: filepath.Join(b.TempDir(), "record.jsonl"), QueueBytes: 1 << 30})
	if err != nil {
		b.Fatal(err)
	}
	rec := finished()
	rec.Prefix = make([]uint64, 80) // 48 KB of prompt
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(rec)
	}
	b.StopTimer()
	closed(b, r)
}
