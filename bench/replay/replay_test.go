package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/bench/policies"
	"kvgate/internal/modelsim"
	"kvgate/internal/record"
	"kvgate/internal/shared"
	"kvgate/scoring"
	"kvgate/telemetry"
)

func profile(t testing.TB) modelsim.Profile {
	t.Helper()
	p, err := modelsim.ProfileByName("")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// write writes a file and returns its name.
func write(t testing.TB, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "record.jsonl")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

const head = `{"kvgate_record":1,"series":"a","started":"2026-01-05T00:00:00Z"}` + "\n"

// chats records conversations with a real recorder and a clock of their own: n requests at a rate, of turns that begin alike.
func chats(t testing.TB, n int, rate float64) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "record.jsonl")
	var now atomic.Int64
	now.Store(time.Date(2026, 1, 5, 9, 0, 0, 0, time.UTC).UnixNano())
	r, err := record.New(record.Options{
		File: name, Now: func() time.Time { return time.Unix(0, now.Load()) },
		Fleet: func() []record.Fleet {
			return []record.Fleet{{Pool: "p", Policy: "auto", Endpoints: 3, KVTokens: 200_000}}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	prompts := make([][]byte, 40)
	for i := range prompts {
		prompts[i] = []byte(strings.Repeat("be helpful and brief. ", 100))
	}
	var prefix []uint64
	for range n {
		now.Add(int64(rnd.ExpFloat64() / rate * 1e9))
		i := rnd.IntN(len(prompts))
		for range 500 + rnd.IntN(8000) {
			prompts[i] = append(prompts[i], byte('a'+rnd.IntN(26)))
		}
		if len(prompts[i]) > 120_000 {
			prompts[i] = prompts[i][:2200]
		}
		prefix = scoring.HashPrefix(prefix[:0], 7, prompts[i])
		r.Observe(&telemetry.Record{
			Pool: "p", Served: "m", Stream: true, Status: 200, Outcome: "ok", PromptBytes: int64(len(prompts[i])), Prefix: prefix, Session: uint64(i + 1),
			UsageKnown: true, InputTokens: int64(len(prompts[i]) / 4), OutputTokens: int64(20 + rnd.IntN(300)), MaxTokens: 400, TTFTSeconds: 0.1, DurationSeconds: 0,
		})
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Fatal(err)
	}
	return name
}

func read(t testing.TB, o ReadOptions, files ...string) *Recording {
	t.Helper()
	r, err := Read(files, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// What a recorder wrote has the lengths, times and shared prefixes of what came.
func TestReadRecord(t *testing.T) {
	r := read(t, ReadOptions{}, chats(t, 400, 20))
	w := r.Workload
	if len(w.Requests) != 400 || r.Pool != "p" || r.Fleet.Endpoints != 3 || !r.Prefixes || r.Failed+r.Rejected+r.Guessed != 0 || len(r.Measured) != 400 {
		t.Fatalf("%+v", r)
	}
	if rate := w.Rate(); rate < 15 || rate > 25 {
		t.Errorf("rate %g", rate)
	}
	seen := map[uint64]bool{}
	var tokens, found int
	last := map[uint64][]uint64{} // blocks of each session
	for i, q := range w.Requests {
		if i > 0 && q.At < w.Requests[i-1].At {
			t.Fatalf("request %d comes before the one before it", i)
		}
		if most := q.In / blockTokens; len(q.Blocks) > most || len(q.Blocks) < most-40 { // a block of 2,048 bytes may be left over
			t.Errorf("request %d: %d blocks of %d tokens", i, len(q.Blocks), q.In)
		}
		tokens += q.In
		for _, id := range q.Blocks {
			if !seen[id] {
				break
			}
			found += blockTokens
		}
		for _, id := range q.Blocks {
			seen[id] = true
		}
		before := last[q.Session]
		if n := len(before); n > 0 && len(q.Blocks) >= n && !slices.Equal(q.Blocks[:n], before) {
			t.Errorf("request %d does not begin as the turn before it", i)
		}
		last[q.Session] = q.Blocks
	}
	if len(last) != 40 {
		t.Errorf("%d sessions", len(last))
	}
	if share := float64(found) / float64(tokens); share < 0.7 || share > 0.95 {
		t.Errorf("%.2f of the tokens were seen before", share)
	}
}

// The same replay gives the same result, to the last digit.
func TestDeterminism(t *testing.T) {
	n := 300
	if raceEnabled {
		n = 60
	}
	name := chats(t, n, 10)
	var out [2]bytes.Buffer
	for i := range out {
		r := read(t, ReadOptions{}, name)
		p, err := New(r, Options{Server: profile(t), Policies: []string{"auto", "least_requests", "queue=2+prefix=3", "consistent_hash", "oracle"}, Replicas: []int{1, 2}})
		if err != nil {
			t.Fatal(err)
		}
		rep := Report{Replay: p, Profile: "x"}
		if rep.Runs, err = p.Runs(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(rep.Runs) != 10 {
			t.Fatalf("%d runs", len(rep.Runs))
		}
		if err := rep.WriteCSV(&out[i]); err != nil {
			t.Fatal(err)
		}
	}
	if out[0].String() != out[1].String() {
		t.Errorf("%s\nand\n%s", &out[0], &out[1])
	}
}

// The smallest fleet is the one at which the SLO holds, and one endpoint less does not hold it.
func TestFindCapacity(t *testing.T) {
	if raceEnabled {
		t.Skip("half a minute under the race detector, with nothing concurrent in it")
	}
	r := read(t, ReadOptions{}, chats(t, 800, 40))
	p, err := New(r, Options{Server: profile(t), SLOTTFT: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.FindCapacity(t.Context(), "auto", 0.95)
	if err != nil {
		t.Fatal(err)
	}
	if c.Replicas < 2 || c.Run.Attainment < 0.95 || c.Below >= 0.95 || c.Run.Replicas != c.Replicas {
		t.Errorf("%+v: %+v", c, c.Run)
	}
	var out bytes.Buffer
	rep := Report{Replay: p, Profile: "8b-h100", Want: 0.95, Capacities: []*Capacity{c}}
	if err := rep.WriteText(&out); err != nil || !strings.Contains(out.String(), fmt.Sprintf("auto: %s are enough to have 95.0 %% within the SLO", endpoints(c.Replicas))) {
		t.Errorf("%v\n%s", err, &out)
	}
	faster, err := New(r, Options{Server: profile(t), SLOTTFT: time.Second, Speed: 3})
	if err != nil {
		t.Fatal(err)
	}
	more, err := faster.FindCapacity(t.Context(), "auto", 0.95)
	if err != nil || more.Replicas <= c.Replicas {
		t.Errorf("three times the traffic takes %+v, %v; before it was %d", more, err, c.Replicas)
	}
}

// served has r say that it was served as a simulation of these servers serves it.
func served(t testing.TB, r *Recording, server modelsim.Profile) {
	t.Helper()
	p, err := New(r, Options{Server: server, Replicas: []int{3}})
	if err != nil {
		t.Fatal(err)
	}
	o := p.options(3)
	o.WarmUp = 1e-9
	o.Each = func(s policies.Outcome) {
		m := &r.Measured[p.indices[s.Index]]
		m.TTFT, m.TPOT, m.E2E, m.Cached = s.TTFT, s.TPOT, s.E2E, int64(s.Cached)
	}
	if _, err := p.run("auto", o); err != nil {
		t.Fatal(err)
	}
}

// Servers that are slower or faster than their profile are found out from what was measured.
func TestCalibrate(t *testing.T) {
	if raceEnabled {
		t.Skip("a minute under the race detector, with nothing concurrent in it")
	}
	server := profile(t)
	server.KVTokens = 200_000
	for _, f := range [][2]float64{{1, 1}, {1.7, 0.6}, {0.5, 2}} {
		r := read(t, ReadOptions{}, chats(t, 600, 4))
		served(t, r, server.Scaled(f[0], f[1]))
		p, err := New(r, Options{Server: server})
		if err != nil {
			t.Fatal(err)
		}
		before, err := p.Compare()
		if err != nil || before == nil {
			t.Fatalf("%v, %v", before, err)
		}
		c, err := p.Calibrate()
		if err != nil {
			t.Fatal(err)
		}
		after, err := p.Compare()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%v: off by %.2f, found %+v, off by %.3f", f, before.Off(), c, after.Off())
		if f[0] == 1 && before.Off() > 1.001 || after.Off() > 1.3 {
			t.Errorf("%v: off by %.3f, and by %.3f once calibrated", f, before.Off(), after.Off())
		}
		if c.Prefill/f[0] < 0.8 || c.Prefill/f[0] > 1.25 || c.Decode/f[1] < 0.9 || c.Decode/f[1] > 1.1 {
			t.Errorf("%v: found %+v", f, c)
		}
	}
}

// Which part of a record is taken.
func TestParts(t *testing.T) {
	var b strings.Builder
	b.WriteString(head)
	at := 1767600000.0
	for i := range 1000 { // one a second, and those of the middle are long
		tokens := 10
		if i >= 400 && i < 500 {
			tokens = 500
		}
		fmt.Fprintf(&b, `{"at":%f,"pool":"p","model":"m","in":%d,"out":5,"status":200,"outcome":"ok"}`+"\n", at+float64(i), tokens)
	}
	name := write(t, b.String())
	f := func(o ReadOptions, requests int, from float64) {
		t.Helper()
		r := read(t, o, name)
		if n := len(r.Workload.Requests); n != requests || r.From.Unix() != int64(from) {
			t.Errorf("%+v: %d requests from %v; want %d from %v", o, n, r.From.Unix(), requests, int64(from))
		}
	}
	f(ReadOptions{}, 1000, at)
	f(ReadOptions{For: 10 * time.Second}, 11, at)
	f(ReadOptions{From: time.Unix(int64(at)+100, 0), For: 10 * time.Second}, 11, at+100)
	f(ReadOptions{Busiest: 99 * time.Second}, 100, at+400)
	f(ReadOptions{Busiest: time.Hour}, 1000, at)
	f(ReadOptions{From: time.Unix(int64(at)+450, 0), Busiest: 99 * time.Second}, 100, at+450)
	for o, want := range map[ReadOptions]string{
		{Requests: 999}:                      "record.jsonl: pool p: 1000 requests from 2026-01-05T08:00:00Z to 2026-01-05T08:16:39Z; 999 are replayed at most: take a part with --busiest 1h",
		{From: time.Unix(int64(at)+5000, 0)}: "0 requests",
		{Pool: "q"}:                          `pool "q": no request of it is recorded; there are p (1000 requests)`,
	} {
		if _, err := Read([]string{name}, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v; want %q", o, err, want)
		}
	}
}

// Windows of sampling are played one after the other, without what was not recorded between them.
func TestSampledWindows(t *testing.T) {
	var b strings.Builder
	b.WriteString(strings.Replace(head, `}`, `,"sample":0.1,"window_seconds":60}`, 1))
	for window := range 4 {
		for i := range 30 {
			fmt.Fprintf(&b, `{"at":%d,"pool":"p","model":"m","in":10,"out":5,"status":200,"outcome":"ok"}`+"\n", 1767600000+window*600+2*i)
		}
	}
	r := read(t, ReadOptions{}, write(t, b.String()))
	for i, q := range r.Workload.Requests {
		if q.At != time.Duration(2*i)*time.Second {
			t.Fatalf("request %d comes at %v", i, q.At)
		}
	}
}

// Every kind of request that a record can hold.
func TestKinds(t *testing.T) {
	text := head + `{"fleet":{"pool":"p","policy":"auto","endpoints":2,"adapter_slots":2}}` + "\n"
	line := func(at int, rest string) {
		text += fmt.Sprintf(`{"at":%d,"pool":"p",%s}`+"\n", 1767600000+at, rest)
	}
	line(0, `"model":"m","in":100,"out":50,"stream":true,"ttft":0.5,"duration":1.5,"status":200,"outcome":"ok"`)
	line(1, `"model":"sql","adapter":true,"in":100,"out":150,"status":200,"outcome":"ok"`)
	line(2, `"model":"m","in":100,"estimated":true,"max":20,"status":429,"outcome":"saturated"`)
	line(3, `"model":"m","bytes":4000,"estimated":true,"status":499,"outcome":"client_gone"`)
	line(4, `"model":"m","in":100,"status":400,"outcome":"endpoint_status"`)
	line(5, `"model":"m","in":100,"status":429,"outcome":"quota"`)
	line(6, `"model":"chat","adapter":true,"in":1000000,"out":1,"status":200,"outcome":"ok"`)
	r := read(t, ReadOptions{}, write(t, text))
	q := r.Workload.Requests
	if len(q) != 5 || r.Failed != 2 || r.Rejected != 2 || r.Guessed != 2 || r.Workload.Adapters != 2 {
		t.Fatalf("%+v", r)
	}
	if q[1].Adapter != 1 || q[4].Adapter != 2 || q[0].Adapter != 0 || !q[1].NotStreamed || q[0].NotStreamed || q[2].Out != 20 || q[3].In != 1001 || q[3].Out != 67 {
		t.Errorf("%+v", q)
	}
	if m := r.Measured[0]; m.TTFT != 500*time.Millisecond || m.TPOT != time.Second/49 || m.E2E != 1500*time.Millisecond || r.Measured[2].Failed != true {
		t.Errorf("%+v", r.Measured)
	}
	p, err := New(r, Options{Server: profile(t)})
	if err != nil || p.TooLong != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	rep := Report{Replay: p, Profile: "8b-h100"}
	if rep.Comparison, err = p.Compare(); err != nil || rep.Comparison == nil || rep.Comparison.Replicas != 2 {
		t.Fatalf("%+v, %v", rep.Comparison, err)
	}
	if rep.Runs, err = p.Runs(t.Context()); err != nil {
		t.Fatal(err)
	}
	var out, js bytes.Buffer
	if err := rep.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2 were refused or failed", "2 more were wrong", "2 have an answer of unknown length", "1 more fit into no server", "2 adapters on 2 slots", "measured", "auto: 2 endpoints: 100.0 % within the SLO"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("lacks %q:\n%s", want, &out)
		}
	}
	if err := rep.WriteJSON(&js); err != nil || !json.Valid(js.Bytes()) {
		t.Errorf("%v %s", err, &js)
	}
}

func TestUsageRecords(t *testing.T) {
	line := func(sec int, tokens string) string {
		return fmt.Sprintf(`{"time":"2026-01-05T08:00:%02dZ","request_id":"r","tenant":"","key":"","model":"a","served_model":"m","adapter":"","pool":"p","api":"chat_completions","stream":true,"status":200,"outcome":"ok",%s,"queue_seconds":0,"ttft_seconds":0.2,"duration_seconds":2}`, sec, tokens) + "\n"
	}
	text := line(10, `"input_tokens":70,"output_tokens":11,"cached_tokens":64`) + line(20, `"input_tokens":null,"output_tokens":null,"cached_tokens":null`)
	r := read(t, ReadOptions{}, write(t, text+line(30, `"input_tokens":7,"output_tokens":1,"cached_tokens":null`)[:50]))
	q := r.Workload.Requests
	if len(q) != 2 || r.Prefixes || r.Guessed != 1 || q[1].At != 10*time.Second || q[0].In != 70 || q[1].Out != 11 || len(r.Warnings) != 1 || r.From.Unix() != 1767600008 {
		t.Errorf("%+v", r)
	}
	if _, err := New(r, Options{Server: profile(t)}); err == nil || !strings.Contains(err.Error(), "--replicas") {
		t.Errorf("%v", err)
	}
	if _, err := Read([]string{write(t, text+"{bad}\n"+text)}, ReadOptions{}); err == nil || !strings.Contains(err.Error(), "record.jsonl:3: not a usage record") {
		t.Errorf("%v", err)
	}
}

func TestTraces(t *testing.T) {
	f := func(text string, blocks int) {
		t.Helper()
		r := read(t, ReadOptions{}, write(t, text))
		if n := len(r.Workload.Requests); n != 2 || len(r.Workload.Requests[1].Blocks) != blocks || r.Workload.Requests[1].At != time.Second {
			t.Errorf("%q: %+v", text, r.Workload)
		}
		p, err := New(r, Options{Server: profile(t), Replicas: []int{1}})
		if err != nil {
			t.Fatal(err)
		}
		if c, err := p.Compare(); c != nil || err != nil {
			t.Errorf("%+v, %v", c, err)
		}
		if _, err := p.Runs(t.Context()); err != nil {
			t.Error(err)
		}
	}
	f("t_ms,in,out\n0,100,5\n1000,2000,7\n", 0)
	f("t_ms,in,out,blocks\n0,100,5,0\n1000,2000,7,0-3\n", 3)
	f("t_ms,in,out,blocks16,x\n0,100,5,0-5,1\n1000,64,7,0-18446744073709551615,2\n", 4)
	f(`{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}`+"\n"+`{"timestamp":1000,"input_length":1100,"output_length":5,"hash_ids":[1,2,3]}`+"\n", 2)
	file := filepath.Join(shared.Dir(t), "traces", "mooncake_conversation.csv")
	r := read(t, ReadOptions{For: 5 * time.Minute, TraceSpread: 3 * time.Second}, file)
	if n := len(r.Workload.Requests); n < 500 || !r.Prefixes {
		t.Errorf("%d requests", n)
	}
}

func TestBadFiles(t *testing.T) {
	good := `{"at":1767600000,"pool":"p","model":"m","in":10,"out":5,"status":200,"outcome":"ok"}` + "\n"
	for text, want := range map[string]string{
		"":                                   "record.jsonl: the file is empty; want a record",
		"hello\n":                            `record.jsonl:1: it begins "hello"; want a record of kvgate serve`,
		"{}\n":                               `record.jsonl:1: it begins "{}"`,
		head:                                 "record.jsonl: no request is recorded",
		head + good:                          "pool p: 1 requests",
		head + good + good:                   "pool p: all requests came at once",
		head + good + "{\n" + good:           "record.jsonl:3: not a request's record",
		strings.Replace(head, ":1", ":7", 1): "record.jsonl:1: the record is of version 7; this kvgate reads version 1",
		head + good + strings.Replace(good, `"p"`, `"q"`, 1): "requests of several pools are recorded: p (1 requests), q (1 requests); choose one with --pool",
		"t_ms,in,out\n":                       "want two at least",
		"t_ms,in,out\n0,x,1\n":                "record.jsonl:2:",
		"t_ms,in,out\nNaN,1,1\n":              "record.jsonl:2: NaN ms",
		"t_ms,in,out\n0,1e9,1\n":              "record.jsonl:2:",
		"t_ms,in,out,blocks7\n0,1,1\n1,1,1\n": "want 16, 32 or a multiple of 64",
		`{"timestamp":0,"input_length":1,"output_length":5,"hash_ids":[1]}` + "\n{\n": "record.jsonl:2:",
	} {
		if _, err := Read([]string{write(t, text)}, ReadOptions{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.50q: %v; want %q", text, err, want)
		}
	}
	if _, err := Read([]string{filepath.Join(t.TempDir(), "none")}, ReadOptions{}); !os.IsNotExist(err) {
		t.Errorf("%v", err)
	}
	two := []string{write(t, head+good), write(t, "t_ms,in,out\n0,1,1\n")}
	if _, err := Read(two, ReadOptions{}); err == nil || !strings.Contains(err.Error(), "want files of one kind") {
		t.Errorf("%v", err)
	}
	for name, want := range map[string]string{"best": "unknown", "weighted": "unknown", "queue=x": "not a scorer and its weight", "nope=1": "not a scorer", "queue=0": "not a scorer and its weight"} {
		if _, err := Policy(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("policy %s: %v", name, err)
		}
	}
}
