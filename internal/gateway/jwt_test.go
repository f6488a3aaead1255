package gateway

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"kvgate/internal/modelsim"
)

// Tokens come in by the provider's keys, which the gateway waits for if it lets nobody else in, keeps across a reload, and goes on
// with while the provider is down.
func TestTokensComeIn(t *testing.T) {
	a := sim(t, modelsim.Options{Adapters: []string{"sql"}, Speedup: 50})
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var up atomic.Bool
	var looks atomic.Int64
	idp := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		looks.Add(1)
		if !up.Load() {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"k","x":%q}]}`, base64.RawURLEncoding.EncodeToString(public))
	}))
	t.Cleanup(idp.Close)
	token := func(audience string) string {
		tok := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{
			"iss": "me", "aud": audience, "sub": "u", "org": "team-a", "models": []string{"meta-*"}, "exp": time.Now().Add(time.Hour).Unix(),
		})
		tok.Header["kid"] = "k"
		s, err := tok.SignedString(private)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	text := onePool(a.URL()) + "auth: {jwt: {issuer: me, audience: [kvgate], jwks_url: \"" + idp.URL + "\", tenant_claim: org, models_claim: models}}\n"
	if p := probed(t, text); len(p.Problems) != 1 || !strings.Contains(p.Problems.Error(), "auth.jwt.jwks_url: the keys cannot be read: status 503") {
		t.Errorf("%v", p.Problems)
	}
	up.Store(true)
	g := start(t, text, Options{})
	eventually(t, "it is ready", func() bool { return g.Table().Load().TargetString("sql") != nil && len(g.missing()) == 0 })
	good := token("kvgate")
	f := func(key, model string, want int) {
		t.Helper()
		if resp, body := g.as(key, model, false, 2); resp.StatusCode != want {
			t.Errorf("%d %s; want %d", resp.StatusCode, body, want)
		}
	}
	f(good, baseModel, 200)
	f(good, "sql", 403)
	f(token("another"), baseModel, 401)
	up.Store(false)
	n := looks.Load()
	g.write(text + "log: {level: warn}\n")
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	f(good, baseModel, 200)
	if looks.Load() != n {
		t.Error("a reload that changes nothing about tokens asks the provider again")
	}
	// Without it they are not let in, and nobody is asked.
	g.write(onePool(a.URL()))
	if _, err := g.Reload("test"); err != nil {
		t.Fatal(err)
	}
	f("", baseModel, 200)
}
