package gateway

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/auth"
	"kvgate/internal/modelsim"
)

// as posts a chat request to the gateway with a key.
func (r *run) as(key, model string, stream bool, tokens int) (*http.Response, string) {
	r.t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+r.Addr()+"/v1/chat/completions", strings.NewReader(chat(model, stream, tokens)))
	if err != nil {
		r.t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, string(b)
}

// entry is what a file of keys has of key.
func entry(t *testing.T, id, key, rest string) string {
	t.Helper()
	sum, ok := auth.Sum(key)
	if !ok {
		t.Fatal("no key")
	}
	return fmt.Sprintf("  - {id: %s, hash: \"sha256:%x\", tenant: %s%s}\n", id, sum, strings.Split(id, "-")[0], rest)
}

// Keys come and go with a reload of the file that holds their hashes; a broken file changes nothing.
func TestKeysRotate(t *testing.T) {
	a := sim(t, modelsim.Options{Adapters: []string{"sql"}, Speedup: 50})
	file := filepath.Join(t.TempDir(), "keys.yaml")
	first, second := auth.NewKey(), auth.NewKey()
	write := func(entries ...string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("keys:\n"+strings.Join(entries, "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(entry(t, "a-1", first, `, models: ["meta-*"]`))
	g := start(t, onePool(a.URL())+"auth: {keys_file: "+file+"}\n", Options{})
	eventually(t, "the adapter is known", func() bool { return g.Table().Load().TargetString("sql") != nil })
	f := func(key, model string, want int) {
		t.Helper()
		if resp, body := g.as(key, model, false, 2); resp.StatusCode != want {
			t.Errorf("%s: %d %s; want %d", model, resp.StatusCode, body, want)
		}
	}
	f("", baseModel, 401)
	f(first, baseModel, 200)
	f(first, "sql", 403)
	f(second, baseModel, 401)
	write(entry(t, "a-1", first, ""), entry(t, "a-2", second, ""))
	if res, err := g.Reload("test"); err != nil || !res.Changed {
		t.Fatal(res, err)
	}
	f(first, "sql", 200)
	f(second, "sql", 200)
	write("  - {id: x, hash: nonsense}\n")
	if _, err := g.Reload("test"); err == nil || !strings.Contains(err.Error(), "keys[0].hash: is not a hash") {
		t.Errorf("%v", err)
	}
	f(first, baseModel, 200)
	write(entry(t, "a-2", second, ""))
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	f(first, baseModel, 401)
	f(second, baseModel, 200)
	for _, secret := range []string{first, second} {
		if strings.Contains(g.log.String(), secret) {
			t.Error("a key is in the log")
		}
		for _, path := range []string{"/debug/config", "/debug/decisions", "/metrics"} {
			if _, body := get(t, "http://"+g.AdminAddr()+path); strings.Contains(body, secret) {
				t.Errorf("a key is in %s", path)
			}
		}
	}
}
