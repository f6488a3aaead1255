package gateway

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/auth"
	"kvgate/internal/modelsim"
	"kvgate/internal/usage"
)

// Limits of tenants and keys hold across a reload, and every request is in the usage records after a clean stop, with the
// tokens that were charged: in streams too, though the client did not ask for usage.
func TestLimitsAndUsage(t *testing.T) {
	a := sim(t, modelsim.Options{Speedup: 50})
	dir := t.TempDir()
	keys, records := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "usage.jsonl")
	one, two := auth.NewKey(), auth.NewKey()
	if err := os.WriteFile(keys, []byte("keys:\n"+entry(t, "a-1", one, ", limits: [{requests: 3, window: 24h}]")+entry(t, "a-2", two, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	text := onePool(a.URL()) + "auth: {keys_file: " + keys + "}\nusage: {file: " + records + "}\nnames: {aliases: {gpt: " + baseModel + "}}\n"
	g := start(t, text+"quotas: {limits: [{tenant: a, total_tokens: 1000, window: 24h}]}\n", Options{})
	eventually(t, "the model is known", func() bool { return g.Table().Load().TargetString(baseModel) != nil })
	f := func(key string, stream bool, tokens, want int) string {
		t.Helper()
		resp, body := g.as(key, "gpt", stream, tokens)
		if resp.StatusCode != want {
			t.Errorf("%d %s; want %d", resp.StatusCode, body, want)
		}
		if want == 200 && resp.Header.Get("X-Ratelimit-Limit-Tokens") != "1000" {
			t.Errorf("%v", resp.Header)
		}
		if stream && strings.Contains(body, `"usage":{`) {
			t.Errorf("usage that nobody asked for: %s", body)
		}
		return body
	}
	f(one, false, 5, 200)
	f(one, true, 5, 200)
	f(one, true, 5, 200)
	if body := f(one, false, 5, 429); !strings.Contains(body, "limit 3 requests per 24h0m0s") {
		t.Errorf("%s", body)
	}
	f(two, true, 7, 200)
	f(two, false, 2000, 429)
	g.write(text + "quotas: {limits: [{tenant: a, total_tokens: 15, window: 24h}]}\n") // the share that was used stays used
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	f(two, false, 5, 429)
	g.stop()
	g.wait()
	data, err := os.ReadFile(records)
	if err != nil {
		t.Fatal(err)
	}
	var got []usage.Line
	for l := range bytes.Lines(data) {
		var rec usage.Line
		if err := json.Unmarshal(l, &rec); err != nil {
			t.Fatal(err)
		}
		got = append(got, rec)
	}
	if len(got) != 4 {
		t.Fatalf("%d records:\n%s", len(got), data)
	}
	streams := 0
	for _, r := range got {
		if r.Tenant != "a" || r.Model != "gpt" || r.Served != baseModel || r.Pool != "p" || r.OutputTokens == nil || *r.OutputTokens < 5 || r.InputTokens == nil || r.Outcome != "ok" {
			t.Errorf("%+v", r)
		}
		if r.Stream {
			streams++
		}
	}
	if streams != 3 || strings.Contains(string(data), one) {
		t.Errorf("%d streams:\n%s", streams, data)
	}
}
