package gateway

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"

	"kvgate/config"
	"kvgate/internal/admin"
	"kvgate/internal/modelsim"
	"kvgate/pool"
)

func probed(t *testing.T, text string) Probed {
	t.Helper()
	cfg, err := config.Parse("config.yaml", []byte(header+text), ConfigOptions())
	if err != nil {
		t.Fatal(err)
	}
	p, err := Probe(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

const refusedList = "/v1/models answered 401; set api_key or api_key_file of the pool"

// A server that wants a key is named as one, by a probe, in the table and, once, in the log.
func TestRefusedListOfModels(t *testing.T) {
	a := sim(t, modelsim.Options{APIKey: "k"})
	if p := probed(t, onePool(a.URL())); p.Looks[0].View.Error != refusedList {
		t.Errorf("a probe says %q; want %q", p.Looks[0].View.Error, refusedList)
	}
	if p := probed(t, onePool(a.URL())+"    api_key: k\n"); p.Looks[0].View.Error != "" || len(p.Problems) != 0 {
		t.Errorf("with the key: %+v", p)
	}
	g := start(t, onePool(a.URL()), Options{})
	eventually(t, "the table says so", func() bool {
		_, body := get(t, "http://"+g.AdminAddr()+"/debug/snapshot")
		return strings.Contains(body, refusedList)
	})
	g.write(onePool(a.URL()) + "    api_key: k\n")
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its models are known", func() bool { return g.Table().Load().TargetString(baseModel) != nil })
	if n := strings.Count(g.log.String(), refusedList); n != 1 {
		t.Errorf("%d lines in the log; want one:\n%s", n, g.log)
	}
	if _, err := g.Table().LastError(g.Table().Load().Rows[0].Endpoint); err != nil {
		t.Errorf("with the key: %v", err)
	}
}

// Names that the file and the servers don't agree on are problems of the file.
func TestNamesAmiss(t *testing.T) {
	a, b := sim(t, modelsim.Options{}), sim(t, modelsim.Options{})
	p := probed(t, onePool(a.URL())+"    models: [Llama-Typo]\n")
	if len(p.Problems) != 1 || p.Problems[0].Severity != config.Error ||
		!strings.Contains(p.Problems[0].Error(), `pools[0].models[0]: no endpoint of pool p serves "Llama-Typo"; they serve ["`+baseModel+`"]; did you mean "`+baseModel+`"?`) {
		t.Errorf("a wrong name: %v", p.Problems)
	}
	two := onePool(a.URL()) + "  - name: q\n    discovery: {static: [" + b.URL() + "]}\n"
	p = probed(t, two)
	if len(p.Problems) != 1 || p.Problems[0].Severity != config.Warning || !strings.Contains(p.Problems[0].Message, `pools p and q both serve "`+baseModel+`"`) {
		t.Errorf("a name twice: %v", p.Problems)
	}
	g := start(t, two, Options{})
	eventually(t, "a warning", func() bool { return strings.Contains(g.log.String(), "two pools serve the same name") })
	g.Table().SetState(g.Table().Load().Rows[0].Endpoint, pool.NotReady, true, g.now()) // another snapshot
	eventually(t, "it is looked at again", func() bool { return g.Table().Load().Version > 5 })
	if n := strings.Count(g.log.String(), "two pools serve the same name"); n != 1 {
		t.Errorf("%d warnings; want one", n)
	}
}

// Explain lists endpoints that nothing is known of, and writes numbers out.
func TestExplainListsAll(t *testing.T) {
	a := sim(t, modelsim.Options{})
	g := start(t, onePool(a.URL(), "http://127.0.0.1:1"), Options{})
	_, body := post(t, "http://"+g.AdminAddr()+"/debug/explain?format=text", chat(baseModel, false, 2))
	if !strings.Contains(body, "<- chosen") || !strings.Contains(body, "p/127.0.0.1:1") || !strings.Contains(body, "filtered: down") || strings.Contains(body, "e+0") {
		t.Errorf("%s", body)
	}
}

// Rules of the configuration work, are explained, are taken over at reload, and are compared with what endpoints serve.
func TestRules(t *testing.T) {
	a, b := sim(t, modelsim.Options{Models: []string{"big"}, Adapters: []string{"sql"}, Speedup: 50}), sim(t, modelsim.Options{Models: []string{"small"}, Speedup: 50})
	text := onePool(a.URL()) + "  - name: q\n    discovery: {static: [" + b.URL() + "]}\n"
	g := start(t, text+`names:
  answer_model: asked
  aliases: {gpt: big}
  rules:
    - {model: canary, split: [{model: gpt, weight: 3}, {model: small, weight: 1}], sticky: session}
    - {model: quick, to: gpt, policy: round_robin, timeouts: {total: 9s}}
    - {model: safe, to: big, fallback: [small]}
`, Options{})
	ask := func(model string, want int, text string) {
		t.Helper()
		if status, body := post(t, "http://"+g.Addr()+"/v1/chat/completions", chat(model, false, 2)); status != want || !strings.Contains(body, text) {
			t.Errorf("%s: %d %s; want %d and %s", model, status, body, want, text)
		}
	}
	eventually(t, "both are known", func() bool {
		return g.Table().Load().TargetString("big") != nil && g.Table().Load().TargetString("small") != nil
	})
	ask("gpt", 200, `"model":"gpt"`)
	ask("big:sql", 200, `"model":"big:sql"`)
	ask("canary", 200, `"model":"canary"`)
	ask("nobody", 404, "model_not_found")
	// The operator is shown the names that clients are, with what they stand for.
	var listed struct{ Data []struct{ ID string } }
	var shown admin.ModelsView
	for url, v := range map[string]any{"http://" + g.Addr() + "/v1/models": &listed, "http://" + g.AdminAddr() + "/debug/models": &shown} {
		if _, body := get(t, url); json.Unmarshal([]byte(body), v) != nil {
			t.Fatalf("%s: %s", url, body)
		}
	}
	ids, stands := map[string]bool{}, map[string]string{}
	for _, m := range listed.Data {
		ids[m.ID] = true
	}
	for _, m := range shown.Models {
		stands[m.ID] = strings.TrimSpace(m.By + " " + strings.Join(m.StandsFor, ","))
	}
	if len(ids) != len(stands) || len(shown.Models) != len(listed.Data) {
		t.Errorf("clients are told %v, operators %v", ids, stands)
	}
	if want := map[string]string{"big": "", "sql": "", "small": "", "gpt": "alias big", "canary": "rule big,small", "quick": "rule big", "safe": "rule big,small"}; !maps.Equal(stands, want) {
		t.Errorf("names stand for %q; want %q", stands, want)
	}
	explain := func(model string, want ...string) {
		t.Helper()
		_, body := post(t, "http://"+g.AdminAddr()+"/debug/explain?format=text", chat(model, false, 2))
		for _, w := range want {
			if !strings.Contains(body, w) {
				t.Errorf("explain %s: %s\nlacks %q", model, body, w)
			}
		}
	}
	explain("canary", "canary: rule names.rules[0] → ", "% of requests; ", " has weight ", "<- chosen")
	explain("safe", "safe: rule names.rules[2] → big\n", "if it can't take it: small, at q/"+b.Addr()+"\n", "<- chosen")
	explain("quick", "quick: rule names.rules[1] → gpt\ngpt: alias → big\n", "policy round_robin")
	explain("big:sql", "big:sql: base:adapter → sql, adapter on big in pool p\n", "policy auto")
	g.write(text + "names: {default_pool: q}\n")
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	ask("gpt", 200, `"model":"small"`)
	explain("gpt", "gpt: default pool → small, base model of pool q\n")

	p := probed(t, text+"names: {aliases: {x: smal, y: small, z: sql}, rules: [{model: big, fallback: [big:sql, nobody]}]}\n")
	if len(p.Problems) != 2 || !strings.Contains(p.Problems.Error(), `names.aliases.x: no endpoint serves "smal"; did you mean "small"?`) ||
		!strings.Contains(p.Problems.Error(), `names.rules[0].fallback[1]: no endpoint serves "nobody"`) {
		t.Errorf("%v", p.Problems)
	}
}

// Explain says so where a request would wait for room, and behind how many.
func TestExplainWaits(t *testing.T) {
	a := sim(t, modelsim.Options{Speedup: 1})
	g := start(t, onePool(a.URL())+"    admission: {endpoint_requests: 1}\n", Options{})
	explain := func() string {
		_, body := post(t, "http://"+g.AdminAddr()+"/debug/explain?format=text", chat(baseModel, true, 2))
		return body
	}
	if body := explain(); strings.Contains(body, "it waits") || !strings.Contains(body, "<- chosen") {
		t.Errorf("with nothing running: %s", body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 3 {
		if i == 1 { // those that come at the same instant may all find room
			eventually(t, "one runs", func() bool { return g.Table().Load().Rows[0].Booked().Requests == 1 })
		}
		wg.Go(func() {
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.Addr()+"/v1/chat/completions", strings.NewReader(chat(baseModel, true, 100_000)))
			if err != nil {
				t.Error(err)
				return
			}
			if resp, err := http.DefaultClient.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	eventually(t, "two wait", func() bool { return strings.Contains(explain(), "it waits until one of these has room, with 2 others") })
}
