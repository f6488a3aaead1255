package config

import (
	"crypto/x509"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed auth.go
var authSource string

func init() { sources = append(sources, authSource) }

// Auth says who may come in. With it every request needs a valid key or token, and neither ever reaches an endpoint.
type Auth struct {
	// KeysFile lists API keys by their hashes; `kvgate keys new` makes an entry. It may be in a Kubernetes Secret volume. A
	// reload reads it again.
	KeysFile string `yaml:"keys_file" example:"keys.yaml" path:"any"`
	// JWT accepts tokens of an identity provider, besides the keys if there are any.
	JWT *JWT `yaml:"jwt" example:""`

	keys []Key
}

// JWT says which tokens (RFC 7519) are accepted: signed with a public key of the provider's set, not expired, from the
// issuer and for the audience given.
type JWT struct {
	// Issuer is what their claim iss must be.
	Issuer string `yaml:"issuer" example:"https://login.example.com/"`
	// Audience is what their claim aud must hold one of.
	Audience []string `yaml:"audience" example:"[kvgate]"`
	// JWKSURL is where the provider's keys are (RFC 7517). While it is down, the keys that were last read stay in use for max_age.
	JWKSURL string `yaml:"jwks_url" example:"https://login.example.com/.well-known/jwks.json"`
	// JWKSFile holds them instead, in a file.
	JWKSFile string `yaml:"jwks_file" example:"jwks.json" path:"read"`
	// Refresh is the time between two looks at the keys. A token signed with a key that is not known brings the next look
	// forward, but there are ten seconds between two at least.
	Refresh time.Duration `yaml:"refresh" min:"10s" max:"24h"`
	// MaxAge is how long the keys that were read last count while the provider can't be asked. Danger: for that long, keys that it
	// has taken back meanwhile count too.
	MaxAge time.Duration `yaml:"max_age" min:"1m" max:"744h"`
	// Leeway is by how much the clocks of the provider and of this machine may differ.
	Leeway time.Duration `yaml:"leeway" min:"0s" max:"10m"`
	// TenantClaim is the claim that names the tenant; a token without it is refused.
	TenantClaim string `yaml:"tenant_claim"`
	// ModelsClaim is the claim that lists what may be used, as models does of a key. A token without it may use nothing.
	// Without this key, everything.
	ModelsClaim string `yaml:"models_claim" example:"models"`
	// ClassClaim is the claim that names the priority class: low, normal or high.
	ClassClaim string `yaml:"class_claim" example:"class"`
}

func (j *JWT) setDefaults(*Config) {
	j.Refresh, j.MaxAge, j.Leeway, j.TenantClaim = 15*time.Minute, 24*time.Hour, 30*time.Second, "sub"
}

// keysFile is what stands in a file of keys.
type keysFile struct {
	// Keys are the API keys.
	Keys []Key `yaml:"keys"`
}

// Key is one API key, without the key itself.
type Key struct {
	// ID names the key in logs and usage records.
	ID string `yaml:"id"`
	// Hash is sha256: and the SHA-256 of the key in hexadecimal.
	Hash string `yaml:"hash"`
	// Tenant is whose key it is.
	Tenant string `yaml:"tenant"`
	// Models are the models and adapters that it may use, by names and patterns; without it, all. Adapters are matched as
	// name and as base:adapter.
	Models []string `yaml:"models" example:"[llama-*]"`
	// Class is the priority class: low, normal or high.
	Class string `yaml:"class" enum:"low,normal,high"`
	// Expires is when the key stops being valid, such as 2027-01-31T00:00:00Z.
	Expires string `yaml:"expires" example:"2027-01-31T00:00:00Z"`
	// Limits are limits of this key alone, besides those of its tenant.
	Limits []Limit `yaml:"limits" example:""`

	sum [32]byte
	end time.Time
}

func (k *Key) setDefaults(*Config) { k.Class = "normal" }

// Sum is the key's SHA-256.
func (k *Key) Sum() [32]byte { return k.sum }

// End is when the key stops being valid; zero is never.
func (k *Key) End() time.Time { return k.end }

// Keys are the entries of the file of keys.
func (c *Config) Keys() []Key {
	if c.Auth == nil {
		return nil
	}
	return c.Auth.keys
}

const hashPrefix = "sha256:"

// auth checks the section auth.
func (d *decoder) auth() {
	a := d.root.Auth
	if a == nil || d.bad["auth"] {
		return
	}
	if a.KeysFile == "" && a.JWT == nil && !d.badBelow["auth"] {
		d.wrong("auth", "nobody could come in", "write keys_file or jwt, or remove auth to let everybody in")
	}
	j := a.JWT
	if j == nil || d.bad["auth.jwt"] {
		return
	}
	const at = "auth.jwt"
	switch {
	case j.JWKSURL == "" && j.JWKSFile == "" && !d.badBelow[at]:
		d.wrong(at, "has no keys to check tokens with", "write jwks_url or jwks_file")
	case j.JWKSURL != "" && j.JWKSFile != "":
		d.wrong(at+".jwks_file", "there is a jwks_url too", "keep one of the two")
	}
	if j.JWKSURL != "" {
		u, err := url.Parse(j.JWKSURL)
		switch {
		case err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" || u.User != nil:
			d.wrong(at+".jwks_url", strconv.Quote(clip(hideUser(j.JWKSURL)))+" is not a URL", `write one such as "https://login.example.com/.well-known/jwks.json"`)
		case u.Scheme == "http" && !loopback(u.Hostname()):
			d.warn(at+".jwks_url", "whoever is on the path to "+strconv.Quote(u.Host)+" can put keys of its own in, and come in with them", "write https")
		}
	}
	if j.Issuer == "" && !d.bad[at+".issuer"] {
		d.wrong(at+".issuer", "has no issuer", "write what the claim iss of your provider's tokens is")
	}
	if len(j.Audience) == 0 && !d.badBelow[at+".audience"] {
		d.wrong(at+".audience", "has no audience: tokens that were made out for others would be accepted", "write what the claim aud holds, such as [kvgate]")
	}
	if j.JWKSFile != "" {
		if data := d.read(at+".jwks_file", j.JWKSFile); data != nil {
			d.jwks(at+".jwks_file", data)
		}
	}
}

// jwks checks a set of keys as far as its JSON goes; whether each can be used is for whoever uses it to say.
func (d *decoder) jwks(path string, data []byte) {
	var set struct {
		Keys []struct {
			KID, KTY, Use string
			D             string
			X5C           []string
			Exp           json.Number
		}
	}
	if err := json.Unmarshal(data, &set); err != nil {
		d.wrong(path, "is no set of keys: "+clip(err.Error()), `it must be JSON of the form {"keys": [{"kty": …}, …]} (RFC 7517)`)
		return
	}
	usable, expired := 0, 0
	for i, k := range set.Keys {
		name := fmt.Sprintf("key %d", i)
		if k.KID != "" {
			name = "key " + strconv.Quote(clip(k.KID))
		}
		end, over := keyEnd(k.X5C, k.Exp)
		switch {
		case k.KTY == "oct":
			d.warn(path, name+" is a shared secret, which is not accepted", "use RSA, EC or OKP keys")
		case k.D != "":
			d.wrong(path, name+" is a private key", "put the public one there; who reads this file could sign tokens")
		case k.Use == "enc":
		case over && now().After(end):
			expired++
			d.warn(path, name+" expired on "+end.UTC().Format(time.DateOnly), "fetch the set again from your provider, or use jwks_url")
		default:
			usable++
		}
		delete(d.bad, path) // there may be more to say
	}
	if usable == 0 {
		message := "holds no public key"
		if expired > 0 {
			message = "every key in it has expired"
		}
		d.wrong(path, message, "fetch the set again from your provider, or use jwks_url")
	}
}

// keyEnd is when a key of a set expires: by its certificate, or by exp, which some providers add.
func keyEnd(x5c []string, exp json.Number) (end time.Time, known bool) {
	if len(x5c) > 0 {
		if der, err := base64.StdEncoding.DecodeString(x5c[0]); err == nil {
			if c, err := x509.ParseCertificate(der); err == nil {
				return c.NotAfter, true
			}
		}
	}
	if s, err := exp.Int64(); err == nil && s > 0 {
		return time.Unix(s, 0), true
	}
	return time.Time{}, false
}

// now is the clock that expiry is checked by. Tests set it.
var now = time.Now

// loadKeys reads the file of keys, and notes its problems as those of that file.
func (d *decoder) loadKeys() Problems {
	a := d.root.Auth
	if a == nil || a.KeysFile == "" || d.bad["auth.keys_file"] {
		return nil
	}
	data, err := ReadFile(a.KeysFile, maxFileBytes+1)
	if err != nil {
		d.wrong("auth.keys_file", strconv.Quote(clip(a.KeysFile))+" cannot be read: "+reason(err), "check the path and the permissions; kvgate keys new --file makes one")
		return nil
	}
	keys, problems := parseKeys(a.KeysFile, data, d.opt)
	a.keys = keys
	return problems
}

// ParseKeys reads a file of keys. The error, if any, is of type [Problems].
func ParseKeys(name string, data []byte, opt Options) ([]Key, error) {
	keys, problems := parseKeys(name, data, opt)
	if len(problems.Errors()) > 0 {
		return nil, problems
	}
	return keys, nil
}

func parseKeys(name string, data []byte, opt Options) ([]Key, Problems) {
	d := newDecoder(name, opt)
	d.least = "keys, each with id, hash and tenant"
	var f keysFile
	if n := d.parse(data); n != nil {
		d.value("", n, reflect.ValueOf(&f).Elem(), field{})
		d.keys(f.Keys)
	}
	d.problems.sort()
	return f.Keys, d.problems
}

// Entry is k as it stands in a file of keys, below the key keys.
func (k *Key) Entry() string {
	p := printer{root: Default()}
	return string(toBytes(prefix("  ", "  ", item(p.structure(reflect.ValueOf(k).Elem(), brief)))))
}

func (d *decoder) keys(keys []Key) {
	if len(keys) == 0 && !d.badBelow["keys"] {
		d.warn("keys", "there are no keys, so nobody can come in with one", "make one: kvgate keys new")
	}
	ids, sums := map[string]int{}, map[[32]byte]int{}
	for i := range keys {
		k := &keys[i]
		at := fmt.Sprintf("keys[%d]", i)
		if d.bad[at] {
			continue
		}
		switch j, twice := ids[k.ID]; {
		case k.ID == "":
			d.wrong(at+".id", "a key needs an id", "write id: …; it is what logs call the key")
		case twice:
			d.wrong(at+".id", fmt.Sprintf("%q is the id of keys[%d] already", clip(k.ID), j), "give each key its own")
		default:
			ids[k.ID] = i
		}
		if k.Tenant == "" {
			d.wrong(at+".tenant", "a key needs a tenant", "write tenant: …; whose key it is")
		}
		hexSum, ok := strings.CutPrefix(k.Hash, hashPrefix)
		sum, err := hex.DecodeString(hexSum)
		switch {
		case d.bad[at+".hash"]:
		case k.Hash == "":
			d.wrong(at+".hash", "a key needs a hash", "make one: kvgate keys new, or kvgate keys hash for a key that there is")
		case !ok || err != nil || len(sum) != len(k.sum):
			message := "is not a hash"
			if strings.HasPrefix(k.Hash, "kvg_") || strings.HasPrefix(k.Hash, "sk-") {
				message = "is the key itself" // which is not repeated here
			}
			d.wrong(at+".hash", message, `write "sha256:" and 64 hexadecimal digits; kvgate keys hash makes it of a key`)
		default:
			copy(k.sum[:], sum)
			if j, twice := sums[k.sum]; twice {
				d.wrong(at+".hash", fmt.Sprintf("is the hash of keys[%d] too", j), "remove one of the two; one key has one entry")
			}
			sums[k.sum] = i
		}
		if k.Expires != "" && !d.bad[at+".expires"] {
			t, err := parseDate(k.Expires)
			switch {
			case err != nil:
				d.wrong(at+".expires", strconv.Quote(clip(k.Expires))+" is not a time", `write one such as "2027-01-31T00:00:00Z" or "2027-01-31"`)
			case now().After(t):
				d.warn(at+".expires", "the key expired on "+t.UTC().Format(time.RFC3339), "remove the entry, or make a new key")
			}
			k.end = t
		}
		for j := range k.Limits {
			d.limit(fmt.Sprintf("%s.limits[%d]", at, j), &k.Limits[j])
		}
		d.patterns(at+".models", k.Models)
	}
}

func parseDate(s string) (time.Time, error) {
	if t, err := time.Parse(time.DateOnly, s); err == nil {
		return t, nil
	}
	return time.Parse(time.RFC3339, s)
}

// patterns checks a list of names and patterns.
func (d *decoder) patterns(at string, list []string) {
	if list != nil && len(list) == 0 && !d.bad[at] {
		d.wrong(at, "is empty, so that nothing could be used", "list models, or remove the key for all of them")
	}
	for i, p := range list {
		if slices.Index(list, p) < i && p != "" {
			d.warn(fmt.Sprintf("%s[%d]", at, i), strconv.Quote(clip(p))+" is in the list already", "remove one of the two")
		}
	}
}
