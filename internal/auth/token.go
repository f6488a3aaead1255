package auth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
	lru "github.com/hashicorp/golang-lru/v2"

	"kvgate/internal/caller"
)

// TokenOptions say which tokens are accepted.
type TokenOptions struct {
	Issuer   string   // required
	Audience []string // one of them; required
	// URL is where the keys are, or else Set holds them (RFC 7517).
	URL string
	Set []byte
	// Refresh is the time between two looks at URL; default 15 min.
	Refresh time.Duration
	// MaxAge is how long the keys read last count while URL can't be read: who has been taken out of the set in the meantime
	// comes in for that long. Default 24 h.
	MaxAge time.Duration
	Leeway time.Duration // by which clocks may differ
	// Claims that say who it is: the tenant (default sub), what may be used ("" is everything), the class ("" is normal).
	TenantClaim, ModelsClaim, ClassClaim string

	Now    func() time.Time // time.Now if nil
	Client *http.Client     // for URL; default one with a timeout of 10 s that follows no redirect
	// OnKeys is told of every look at URL: how many keys there are, or what went wrong. It must not block. May be nil.
	OnKeys func(n int, err error)
}

const (
	// maxSetBytes bounds a set of keys. The largest providers' have some 20 KB.
	maxSetBytes = 1 << 20
	// maxTokenBytes bounds a token; a header holds no more.
	maxTokenBytes = 16 << 10
	// lookAgain is the least time between two looks for a key that is not known: anybody can name one.
	lookAgain = 10 * time.Second
	// lookWait is how long a request waits for such a look.
	lookWait = 2 * time.Second
	// trustFor is how long a token that was found to be good counts without another look at its signature. A key that the
	// provider takes back keeps its tokens alive for that long.
	trustFor = time.Minute
	// trusted is how many of them are kept.
	trusted = 8192
)

// algorithms are those with a public key; with a shared one whoever can check tokens could make them.
var algorithms = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

// Tokens checks tokens. Make one with NewTokens; Close ends it. It is safe for concurrent use.
type Tokens struct {
	o      TokenOptions
	parser *jwt.Parser
	set    atomic.Pointer[keySet] // never nil; empty until there are keys
	known  *lru.Cache[[32]byte, trust]

	mu    sync.Mutex
	look  chan struct{} // closed when the look that is under way, or the last one, is done
	last  time.Time     // when a look for an unknown key began
	ctx   context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup
	start sync.Once
}

// A keySet is the provider's keys at one time.
type keySet struct {
	byID map[string]any
	all  []jwt.VerificationKey
	at   time.Time // when it was read; zero of a set that does not age
}

var noKeys = &keySet{}

// usable is the set of keys, none if they were read too long ago.
func (t *Tokens) usable(now time.Time) *keySet {
	set := t.set.Load()
	if !set.at.IsZero() && now.Sub(set.at) > t.o.MaxAge {
		return noKeys
	}
	return set
}

// trust is a token that has been found good.
type trust struct {
	who *caller.Caller
	end time.Time
	set *keySet
}

// NewTokens returns what checks tokens. It asks nobody before Start.
func NewTokens(o TokenOptions) (*Tokens, error) {
	if o.Refresh == 0 {
		o.Refresh = 15 * time.Minute
	}
	if o.MaxAge == 0 {
		o.MaxAge = 24 * time.Hour
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.TenantClaim == "" {
		o.TenantClaim = "sub"
	}
	if o.Client == nil {
		o.Client = &http.Client{Timeout: 10 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	if o.Issuer == "" || len(o.Audience) == 0 {
		return nil, errors.New("jwt: no issuer or no audience")
	}
	t := &Tokens{
		o: o,
		parser: jwt.NewParser(jwt.WithValidMethods(algorithms), jwt.WithIssuer(o.Issuer), jwt.WithAudience(o.Audience...),
			jwt.WithLeeway(o.Leeway), jwt.WithExpirationRequired(), jwt.WithTimeFunc(o.Now)),
	}
	t.known, _ = lru.New[[32]byte, trust](trusted) // fails for sizes below 1 only
	t.set.Store(&keySet{})
	t.ctx, t.stop = context.WithCancel(context.Background())
	if o.URL == "" {
		set, err := parseSet(o.Set)
		if err != nil {
			return nil, fmt.Errorf("jwt: %w", err)
		}
		t.set.Store(set)
	}
	return t, nil
}

// Start begins to look at the URL for keys, now and again, until Close. It may be called more than once.
func (t *Tokens) Start() {
	if t.o.URL == "" {
		return
	}
	t.start.Do(func() {
		first := t.lookNow()
		t.wg.Go(func() {
			<-first
			tick := time.NewTicker(t.o.Refresh)
			defer tick.Stop()
			for {
				select {
				case <-t.ctx.Done():
					return
				case <-tick.C:
					<-t.lookNow()
				}
			}
		})
	})
}

// Close ends what Start began.
func (t *Tokens) Close() {
	t.mu.Lock()
	t.stop()
	t.mu.Unlock()
	t.wg.Wait()
}

// Ready reports whether there are keys, and they were not read too long ago.
func (t *Tokens) Ready() bool { return len(t.usable(t.o.Now()).all) > 0 }

// lookNow begins a look at the URL, unless one is under way, and returns what is closed when it is done.
func (t *Tokens) lookNow() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.look != nil {
		select {
		case <-t.look:
		default:
			return t.look
		}
	}
	done := make(chan struct{})
	t.look = done
	if t.ctx.Err() != nil {
		close(done)
		return done
	}
	t.wg.Go(func() {
		defer close(done)
		set, err := t.fetch(t.ctx)
		if err == nil {
			set.at = t.o.Now()
			t.set.Store(set)
		}
		if t.o.OnKeys != nil && t.ctx.Err() == nil {
			n := 0
			if set != nil {
				n = len(set.all)
			}
			t.o.OnKeys(n, err)
		}
	})
	return done
}

// fetch reads the keys at the URL once, and changes nothing.
func (t *Tokens) fetch(ctx context.Context) (*keySet, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.o.URL, nil)
	if err != nil {
		return nil, err
	}
	resp, err := t.o.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d; want 200", resp.StatusCode)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxSetBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxSetBytes {
		return nil, fmt.Errorf("larger than %d bytes", maxSetBytes)
	}
	return parseSet(data)
}

// parseSet reads a set of keys. Keys that can't be used are passed over; a set without one that can is an error.
func parseSet(data []byte) (*keySet, error) {
	var set jwkset.JWKSMarshal
	if err := json.Unmarshal(data, &set); err != nil {
		return nil, fmt.Errorf("set of keys: %w", err)
	}
	s := &keySet{byID: make(map[string]any)}
	var why error
	for _, m := range set.Keys {
		if m.USE == jwkset.UseEnc {
			continue
		}
		k, err := jwkset.NewJWKFromMarshal(m, jwkset.JWKMarshalOptions{}, jwkset.JWKValidateOptions{})
		if err != nil {
			why = err
			continue
		}
		if _, secret := k.Key().([]byte); secret {
			continue
		}
		if m.KID != "" {
			s.byID[m.KID] = k.Key()
		}
		s.all = append(s.all, k.Key())
	}
	if len(s.all) == 0 {
		return nil, errors.Join(errors.New("set of keys: none can be used"), why)
	}
	return s, nil
}

var errUnknownKey = errors.New("signed with a key that is not known")

// key finds the key that token says it is signed with.
func (s *keySet) key(token *jwt.Token) (any, error) {
	if _, critical := token.Header["crit"]; critical { // RFC 7515 4.1.11: extensions that must be understood, and we know none
		return nil, errors.New("critical header parameters")
	}
	if id, ok := token.Header["kid"].(string); ok && id != "" {
		if k := s.byID[id]; k != nil {
			return k, nil
		}
		return nil, errUnknownKey
	}
	if len(s.all) == 0 {
		return nil, errUnknownKey
	}
	return jwt.VerificationKeySet{Keys: s.all}, nil
}

// authorize returns whose token it is, or nil. sum is the token's hash.
func (t *Tokens) authorize(token []byte, sum [32]byte, now time.Time) *caller.Caller {
	set := t.usable(now)
	// Fast path: it was good a moment ago, and the keys are the same.
	if k, ok := t.known.Get(sum); ok && k.set == set && now.Before(k.end) {
		return k.who
	}
	if len(token) > maxTokenBytes {
		return nil
	}
	who, end, err := t.check(token, set)
	if errors.Is(err, errUnknownKey) && t.lookForUnknown(now) {
		set = t.usable(now)
		who, end, err = t.check(token, set)
	}
	if err != nil {
		return nil
	}
	if limit := now.Add(trustFor); end.After(limit) {
		end = limit
	}
	t.known.Add(sum, trust{who, end, set})
	return who
}

// lookForUnknown has the keys read again because of a token that is signed with an unknown one, if that was not done just
// before, and waits for it. It reports whether there was a look.
func (t *Tokens) lookForUnknown(now time.Time) bool {
	if t.o.URL == "" {
		return false
	}
	t.mu.Lock()
	if now.Sub(t.last) < lookAgain && !t.last.IsZero() {
		look := t.look
		t.mu.Unlock()
		return wait(look) // another request has it read
	}
	t.last = now
	t.mu.Unlock()
	return wait(t.lookNow())
}

func wait(done <-chan struct{}) bool {
	if done == nil {
		return false
	}
	timer := time.NewTimer(lookWait)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// check checks a token's signature and claims. end is when it stops being valid.
func (t *Tokens) check(token []byte, set *keySet) (who *caller.Caller, end time.Time, err error) {
	claims := jwt.MapClaims{}
	if _, err := t.parser.ParseWithClaims(string(token), claims, set.key); err != nil {
		return nil, end, err
	}
	exp, err := claims.GetExpirationTime()
	if err != nil || exp == nil {
		return nil, end, errors.New("no expiry")
	}
	who = &caller.Caller{}
	if who.Tenant, _ = claims[t.o.TenantClaim].(string); who.Tenant == "" || len(who.Tenant) > maxTenantBytes {
		return nil, end, errors.New("no tenant")
	}
	sub, _ := claims["sub"].(string)
	who.Key = "jwt:" + sub[:min(len(sub), maxTenantBytes)]
	if c := t.o.ModelsClaim; c != "" {
		who.Models = caller.NewModels(texts(claims[c]))
	}
	if c := t.o.ClassClaim; c != "" {
		word, _ := claims[c].(string)
		if class, ok := caller.ParseClass(word); ok {
			who.Class = class
		}
	}
	return who, exp.Add(t.o.Leeway), nil
}

// maxTenantBytes bounds names that come from tokens.
const maxTenantBytes = 256

// texts are the texts in a claim: one, separated by spaces as in scope, or a list.
func texts(v any) (out []string) {
	switch v := v.(type) {
	case string:
		start := -1
		for i := 0; i <= len(v); i++ {
			if i < len(v) && v[i] != ' ' {
				if start < 0 {
					start = i
				}
				continue
			}
			if start >= 0 {
				out = append(out, v[start:i])
			}
			start = -1
		}
	case []any:
		for _, e := range v {
			if s, ok := e.(string); ok {
				out = append(out, s)
			}
		}
	}
	return out
}

// Probe reads the keys at the URL once, and returns how many can be used. It changes nothing.
func (t *Tokens) Probe(ctx context.Context) (int, error) {
	if t.o.URL == "" {
		return len(t.set.Load().all), nil
	}
	set, err := t.fetch(ctx)
	if err != nil {
		return 0, err
	}
	return len(set.all), nil
}
