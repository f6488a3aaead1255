package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"

	"kvgate/internal/caller"
)

// A provider is an identity provider that can be taken down and whose keys can change.
type provider struct {
	*httptest.Server
	mu    sync.Mutex
	set   []byte
	fail  bool
	looks atomic.Int64
}

func newProvider(t testing.TB, set []byte) *provider {
	p := &provider{set: set}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.looks.Add(1)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.fail {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write(p.set)
	}))
	t.Cleanup(p.Close)
	return p
}

func (p *provider) serve(set []byte, fail bool) {
	p.mu.Lock()
	p.set, p.fail = set, fail
	p.mu.Unlock()
}

// publish makes a set of public keys by id.
func publish(t testing.TB, keys map[string]crypto.Signer) []byte {
	t.Helper()
	var set jwkset.JWKSMarshal
	for id, k := range keys {
		j, err := jwkset.NewJWKFromKey(k.Public(), jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: id}})
		if err != nil {
			t.Fatal(err)
		}
		set.Keys = append(set.Keys, j.Marshal())
	}
	b, err := json.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func rsaKey(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func ecKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func sign(t testing.TB, m jwt.SigningMethod, key any, kid string, claims jwt.MapClaims) string {
	t.Helper()
	tok := jwt.NewWithClaims(m, claims)
	if kid != "" {
		tok.Header["kid"] = kid
	}
	s, err := tok.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A clock that tests move.
type clock struct{ at atomic.Int64 }

func newClock() *clock {
	c := &clock{}
	c.at.Store(time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC).UnixNano())
	return c
}

func (c *clock) now() time.Time          { return time.Unix(0, c.at.Load()) }
func (c *clock) advance(d time.Duration) { c.at.Add(int64(d)) }

const issuer, audience = "https://login.example/", "kvgate"

func claims(c *clock, change ...func(jwt.MapClaims)) jwt.MapClaims {
	m := jwt.MapClaims{"iss": issuer, "aud": []string{"other", audience}, "sub": "u1", "org": "team-a", "exp": c.now().Add(time.Hour).Unix(), "models": "llama-* sql", "class": "high"}
	for _, f := range change {
		f(m)
	}
	return m
}

func keyring(t testing.TB, c *clock, o TokenOptions) (*Keyring, *Tokens) {
	t.Helper()
	o.Issuer, o.Audience, o.Now = issuer, []string{audience}, c.now
	tok, err := NewTokens(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tok.Close)
	return New(nil, tok, c.now), tok
}

func TestTokens(t *testing.T) {
	c := newClock()
	r1, e1 := rsaKey(t), ecKey(t)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	set := publish(t, map[string]crypto.Signer{"r1": r1, "e1": e1, "ed": ed})
	ring, _ := keyring(t, c, TokenOptions{Set: set, Leeway: 30 * time.Second, TenantClaim: "org", ModelsClaim: "models", ClassClaim: "class"})
	good := func(what, token string) *caller.Caller {
		t.Helper()
		who := ring.Authorize([]byte(token))
		if who == nil {
			t.Errorf("%s: refused", what)
			return &caller.Caller{}
		}
		return who
	}
	bad := func(what, token string) {
		t.Helper()
		if who := ring.Authorize([]byte(token)); who != nil {
			t.Errorf("%s: accepted as %+v", what, who)
		}
	}
	who := good("RS256", sign(t, jwt.SigningMethodRS256, r1, "r1", claims(c)))
	if who.Tenant != "team-a" || who.Key != "jwt:u1" || who.Class != caller.High || who.Models == nil {
		t.Errorf("%+v", who)
	}
	good("PS256", sign(t, jwt.SigningMethodPS256, r1, "r1", claims(c)))
	good("ES256", sign(t, jwt.SigningMethodES256, e1, "e1", claims(c)))
	good("EdDSA", sign(t, jwt.SigningMethodEdDSA, ed, "ed", claims(c)))
	good("without kid", sign(t, jwt.SigningMethodES256, e1, "", claims(c)))
	good("aud is a text", sign(t, jwt.SigningMethodES256, e1, "e1", claims(c, func(m jwt.MapClaims) { m["aud"] = audience })))
	good("within the leeway", sign(t, jwt.SigningMethodES256, e1, "e1", claims(c, func(m jwt.MapClaims) { m["exp"], m["nbf"] = c.now().Unix()-29, c.now().Unix()+29 })))
	if who := good("unknown class", sign(t, jwt.SigningMethodES256, e1, "e1", claims(c, func(m jwt.MapClaims) { m["class"] = "god" }))); who.Class != caller.Normal {
		t.Errorf("%+v", who)
	}
	if who := good("no models", sign(t, jwt.SigningMethodES256, e1, "e1", claims(c, func(m jwt.MapClaims) { delete(m, "models") }))); who.Models == nil {
		t.Error("a token without the claim may use everything")
	}

	es := func(change func(jwt.MapClaims)) string {
		return sign(t, jwt.SigningMethodES256, e1, "e1", claims(c, change))
	}
	bad("expired", es(func(m jwt.MapClaims) { m["exp"] = c.now().Unix() - 31 }))
	bad("no expiry", es(func(m jwt.MapClaims) { delete(m, "exp") }))
	bad("not yet", es(func(m jwt.MapClaims) { m["nbf"] = c.now().Unix() + 60 }))
	bad("issuer", es(func(m jwt.MapClaims) { m["iss"] = "https://login.example" }))
	bad("no issuer", es(func(m jwt.MapClaims) { delete(m, "iss") }))
	bad("audience", es(func(m jwt.MapClaims) { m["aud"] = "kvgate2" }))
	bad("no audience", es(func(m jwt.MapClaims) { delete(m, "aud") }))
	bad("no tenant", es(func(m jwt.MapClaims) { delete(m, "org") }))
	bad("odd tenant", es(func(m jwt.MapClaims) { m["org"] = 5 }))
	bad("long tenant", es(func(m jwt.MapClaims) { m["org"] = strings.Repeat("x", 300) }))
	bad("another's key", sign(t, jwt.SigningMethodES256, ecKey(t), "e1", claims(c)))
	bad("unknown kid", sign(t, jwt.SigningMethodES256, e1, "e2", claims(c)))
	bad("none", sign(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, "e1", claims(c)))
	// The public key as a shared secret: the oldest trick.
	pub, err := x509.MarshalPKIXPublicKey(r1.Public())
	if err != nil {
		t.Fatal(err)
	}
	bad("HS256 with the public key", sign(t, jwt.SigningMethodHS256, pub, "r1", claims(c)))
	token := sign(t, jwt.SigningMethodES256, e1, "e1", claims(c))
	parts := strings.Split(token, ".")
	bad("cut", token[:len(token)-2])
	bad("no signature", parts[0]+"."+parts[1]+".")
	bad("claims exchanged", parts[0]+"."+strings.Split(es(func(m jwt.MapClaims) { m["org"] = "team-b" }), ".")[1]+"."+parts[2])
	bad("four parts", token+".x")
	crit := jwt.NewWithClaims(jwt.SigningMethodES256, claims(c))
	crit.Header["kid"], crit.Header["crit"] = "e1", []string{"x"}
	s, err := crit.SignedString(e1)
	if err != nil {
		t.Fatal(err)
	}
	bad("critical", s)

	// A token that was good stops being so when it expires, also where it is remembered.
	good("fresh", token)
	c.advance(time.Hour + 29*time.Second)
	good("leeway", token)
	c.advance(2 * time.Second)
	bad("expired now", token)
}

// Keys that the provider adds are found by tokens that use them; those it takes back are forgotten; while it is down, those
// that are known stay.
func TestKeyRotation(t *testing.T) {
	c := newClock()
	a, b := ecKey(t), ecKey(t)
	p := newProvider(t, publish(t, map[string]crypto.Signer{"a": a}))
	var failures atomic.Int64
	ring, tok := keyring(t, c, TokenOptions{URL: p.URL, Refresh: time.Hour, TenantClaim: "org", OnKeys: func(_ int, err error) {
		if err != nil {
			failures.Add(1)
		}
	}})
	tokenA := []byte(sign(t, jwt.SigningMethodES256, a, "a", claims(c)))
	tokenB := []byte(sign(t, jwt.SigningMethodES256, b, "b", claims(c)))
	is := func(what string, token []byte, want bool) {
		t.Helper()
		if got := ring.Authorize(token) != nil; got != want {
			t.Errorf("%s: accepted %v; want %v", what, got, want)
		}
	}
	p.serve(p.set, true)
	tok.Start()
	is("down from the start", tokenA, false)
	if tok.Ready() {
		t.Error("ready without keys")
	}
	if failures.Load() == 0 {
		t.Error("nobody was told")
	}
	p.serve(publish(t, map[string]crypto.Signer{"a": a}), false)
	c.advance(lookAgain)
	is("up", tokenA, true)
	is("not published", tokenB, false)
	looks := p.looks.Load()
	for i := range 50 { // kids that people make up don't become looks
		is("made up", []byte(sign(t, jwt.SigningMethodES256, b, fmt.Sprint(i), claims(c))), false)
	}
	if n := p.looks.Load() - looks; n > 1 {
		t.Errorf("%d looks for made-up keys", n)
	}
	p.serve(publish(t, map[string]crypto.Signer{"a": a, "b": b}), false)
	c.advance(lookAgain)
	is("published", tokenB, true)
	is("the old one", tokenA, true)
	p.serve(nil, true)
	c.advance(lookAgain)
	<-tok.lookNow()
	is("down later", tokenA, true)
	p.serve(publish(t, map[string]crypto.Signer{"b": b}), false)
	<-tok.lookNow()
	is("taken back", tokenA, false)
	is("the new one", tokenB, true)
	for _, bad := range []string{"", "x", "{}", `{"keys":[]}`, `{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}`, strings.Repeat(" ", maxSetBytes+1)} {
		p.serve([]byte(bad), false)
		<-tok.lookNow()
		is("keys stay", tokenB, true)
	}
}

// While the provider is down its keys count for a while, and no longer; those of tokens that were found good just before neither.
func TestKeysAge(t *testing.T) {
	c := newClock()
	a := ecKey(t)
	p := newProvider(t, publish(t, map[string]crypto.Signer{"a": a}))
	ring, tok := keyring(t, c, TokenOptions{URL: p.URL, Refresh: time.Hour, MaxAge: 2 * time.Hour, TenantClaim: "org"})
	tok.Start()
	<-tok.lookNow()
	is := func(what string, want bool) {
		t.Helper()
		token := []byte(sign(t, jwt.SigningMethodES256, a, "a", claims(c)))
		for range 2 { // the second time it is known
			if got := ring.Authorize(token) != nil; got != want || tok.Ready() != want {
				t.Errorf("%s: accepted %v, ready %v; want %v", what, got, tok.Ready(), want)
			}
		}
	}
	is("up", true)
	p.serve(nil, true)
	c.advance(2*time.Hour - time.Second)
	<-tok.lookNow()
	is("down for a while", true)
	c.advance(2 * time.Second)
	is("down for too long", false)
	p.serve(publish(t, map[string]crypto.Signer{"a": a}), false)
	c.advance(lookAgain)
	<-tok.lookNow()
	is("up again", true)
}

func TestTokensAreBounded(t *testing.T) {
	c := newClock()
	k := ecKey(t)
	ring, tok := keyring(t, c, TokenOptions{Set: publish(t, map[string]crypto.Signer{"a": k})})
	for i := range 50 {
		if ring.Authorize([]byte(sign(t, jwt.SigningMethodES256, k, "a", claims(c, func(m jwt.MapClaims) { m["sub"] = fmt.Sprint(i) })))) == nil {
			t.Fatal("refused")
		}
	}
	if n := tok.known.Len(); n != 50 {
		t.Errorf("%d tokens are remembered", n)
	}
	if _, err := NewTokens(TokenOptions{Issuer: "x", Audience: []string{"y"}, Set: []byte("{}")}); err == nil {
		t.Error("no keys are fine")
	}
	token := []byte(sign(t, jwt.SigningMethodES256, k, "a", claims(c)))
	ring.Authorize(token)
	if n := testing.AllocsPerRun(100, func() { ring.Authorize(token) }); n != 0 {
		t.Errorf("%v allocations for a token that is known", n)
	}
}

func BenchmarkAuthorizeToken(b *testing.B) {
	c := newClock()
	k, e := rsaKey(b), ecKey(b)
	ring, tok := keyring(b, c, TokenOptions{Set: publish(b, map[string]crypto.Signer{"a": k, "e": e})})
	rs, es := []byte(sign(b, jwt.SigningMethodRS256, k, "a", claims(c))), []byte(sign(b, jwt.SigningMethodES256, e, "e", claims(c)))
	run := func(name string, token []byte, known bool) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !known {
					tok.known.Purge()
				}
				if ring.Authorize(token) == nil {
					b.Fatal("refused")
				}
			}
		})
	}
	run("known", rs, true)
	run("RS256", rs, false)
	run("ES256", es, false)
}
