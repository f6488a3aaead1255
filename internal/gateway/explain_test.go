package gateway

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/internal/admin"
	"kvgate/internal/auth"
	"kvgate/internal/modelsim"
	"kvgate/scoring"
)

// Explain decides by header, key and limit as the gateway does for the request itself: both are asked, and must agree.
func TestExplainIsWhatHappens(t *testing.T) {
	a := sim(t, modelsim.Options{Models: []string{"big"}, Adapters: []string{"sql"}, Speedup: 50})
	b := sim(t, modelsim.Options{Models: []string{"small"}, Speedup: 50})
	keys := filepath.Join(t.TempDir(), "keys.yaml")
	all, small, gone := auth.NewKey(), auth.NewKey(), auth.NewKey()
	if err := os.WriteFile(keys, []byte("keys:\n"+entry(t, "all-1", all, ", class: high, limits: [{requests: 100, window: 24h}]")+
		entry(t, "some-1", small, ", models: [small, canary], limits: [{requests: 4, window: 24h}]")+
		entry(t, "old-1", gone, `, expires: "2026-01-01"`)), 0o600); err != nil {
		t.Fatal(err)
	}
	text := onePool(a.URL()) + "  - name: q\n    discovery: {static: [" + b.URL() + "]}\nauth: {keys_file: " + keys + "}\n" + `names:
  aliases: {gpt: big}
  rules:
    - {model: gpt, headers: {X-Canary: "1"}, to: small}
    - {model: canary, split: [{model: big, weight: 1}, {model: small, weight: 99}]}
    - {model: safe, to: absent, fallback: [small]}
`
	g := start(t, text, Options{})
	eventually(t, "both are known", func() bool {
		return g.Table().Load().TargetString("big") != nil && g.Table().Load().TargetString("small") != nil
	})
	explain := func(key, keyID, canary, model string) (e scoring.Explanation, text string) {
		t.Helper()
		for _, format := range []string{"", "&format=text"} {
			r, err := http.NewRequest(http.MethodPost, "http://"+g.AdminAddr()+"/debug/explain?key="+keyID+format, strings.NewReader(chat(model, false, 2)))
			if err != nil {
				t.Fatal(err)
			}
			if key != "" {
				r.Header.Add(admin.InquiryField, "Authorization: Bearer "+key)
			}
			if canary != "" {
				r.Header.Add(admin.InquiryField, "x-canary: "+canary)
			}
			resp, body := do(t, r)
			if resp.StatusCode != 200 {
				return e, body
			}
			if text = body; format == "" && json.Unmarshal([]byte(body), &e) != nil {
				t.Fatalf("%s", body)
			}
			if key != "" && strings.Contains(body, key) {
				t.Errorf("the key is told: %s", body)
			}
		}
		return e, text
	}
	// f compares what is explained, by key and by its name, with what happens.
	f := func(key, keyID, canary, model string, want ...string) {
		t.Helper()
		r, err := http.NewRequest(http.MethodPost, "http://"+g.Addr()+"/v1/chat/completions", strings.NewReader(chat(model, false, 2)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+key)
		if canary != "" {
			r.Header.Set("X-Canary", canary)
		}
		for i, id := range []string{"", keyID} {
			k := key
			if i == 1 {
				if k = ""; id == "" {
					continue
				}
			}
			e, text := explain(k, id, canary, model)
			if i == 0 {
				resp, body := do(t, r)
				status, message := 200, ""
				if e.Refused != nil {
					status, message = e.Refused.Status, e.Refused.Message
					message, _, _ = strings.Cut(strings.ReplaceAll(message, `"`, `\"`), "; try again in ")
				}
				if resp.StatusCode != status || !strings.Contains(body, message) {
					t.Errorf("%s: explained as %d %s; happened %d %s", model, status, message, resp.StatusCode, body)
				}
			}
			for _, w := range want {
				if !strings.Contains(text, w) {
					t.Errorf("%s (key %q): %s\nlacks %q", model, id, text, w)
				}
			}
		}
	}
	f(all, "all-1", "", "gpt", "gpt: rule names.rules[0] does not match: there is no header X-Canary\ngpt: alias → big\nbig: served, base model of pool p\n",
		"from key all-1, tenant all, priority high\n", "limit 100 requests per 24h0m0s: ", " used, 1 asked: fits\n", "<- chosen")
	f(all, "all-1", "2", "gpt", "the header X-Canary has another value\n")
	f(all, "all-1", "1", "gpt", "gpt: rule names.rules[0] → small\nsmall: served, base model of pool q\n")
	f(all, "all-1", "", "big:sql", "big:sql: base:adapter → sql, adapter on big in pool p\n")
	f(all, "all-1", "", "sqll", "sqll: no rule or alias matches, no adapter or base model", `refused: 404 model_not_found: the model "sqll" does not exist; did you mean "sql" or "small"?`)
	f(all, "all-1", "", "safe", "safe: rule names.rules[2] → absent\n", "safe: fallback → small\n", "<- chosen")
	f(small, "some-1", "", "big", "big: served → big, which this caller may not use\n", `refused: 403 forbidden: this key may not use the model "big"`)
	f(small, "some-1", "", "sqll", "refused: 404 model_not_found", `did you mean "small"?`) // sql is not for it to know of
	f(small, "some-1", "", "canary", "canary: rule names.rules[1] → small (100% of requests; big has weight 1; big takes no part", "<- chosen")
	f(small, "some-1", "1", "gpt", "gpt: rule names.rules[0] → small\n")
	for range 4 {
		g.as(small, "small", false, 2)
	}
	f(small, "some-1", "", "small", "limit 4 requests per 24h0m0s: 4 used, 1 asked: does not fit\n", "refused: 429 quota: rate limit reached: limit 4 requests per 24h0m0s", "Retry-After: ")
	f(gone, "", "", "small", "refused: 401 unauthorized")
	f("kvg_nonsense", "", "", "small", "refused: 401 unauthorized")

	if _, text := explain("", "", "", "big"); !strings.Contains(text, "no key was given") || !strings.Contains(text, "<- chosen") {
		t.Errorf("without a key: %s", text)
	}
	if _, text := explain("", "old-1", "", "big"); !strings.Contains(text, "there is none of that name, or it has expired") {
		t.Errorf("an expired key: %s", text)
	}
	// Explaining has charged nothing.
	if e, text := explain("", "all-1", "", "big"); len(e.Limits) != 1 || e.Limits[0].Used > 5 {
		t.Errorf("%s", text)
	}
	for _, secret := range []string{all, small, gone} {
		if strings.Contains(g.log.String(), secret) {
			t.Error("a key is in the log")
		}
	}
}

func do(t *testing.T, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b strings.Builder
	if err := resp.Write(&b); err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(b.String(), "\r\n\r\n")
	return resp, body
}
