package gateway

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/auth"
	"kvgate/internal/caller"
)

// setAuth has b let in whom cfg says. Where what cfg says of tokens is the same as before, the provider's keys are not read
// again.
func (g *Gateway) setAuth(cfg *config.Config, b *parts) error {
	a := cfg.Auth
	if a == nil {
		return nil
	}
	var keys []auth.Key
	for i := range cfg.Keys() {
		k := &cfg.Keys()[i]
		class, _ := caller.ParseClass(k.Class)
		keys = append(keys, auth.Key{ID: k.ID, Sum: k.Sum(), Tenant: k.Tenant, Class: class, Models: k.Models, End: k.End()})
	}
	if a.JWT != nil {
		t, err := g.newTokens(a.JWT)
		if err != nil {
			return fmt.Errorf("auth: %w", err)
		}
		b.tokens = t
	}
	var tokens *auth.Tokens
	if b.tokens != nil {
		tokens = b.tokens.Tokens
	}
	b.routes.Auth = auth.New(keys, tokens, nil)
	return nil
}

// tokens are the Tokens of what a configuration says.
type tokens struct {
	*auth.Tokens
	jwt config.JWT
	set []byte
}

func (g *Gateway) newTokens(j *config.JWT) (*tokens, error) {
	t := &tokens{jwt: *j}
	if j.JWKSFile != "" {
		var err error
		if t.set, err = os.ReadFile(j.JWKSFile); err != nil {
			return nil, err
		}
	}
	if old := g.tokens; old != nil && reflect.DeepEqual(old.jwt, t.jwt) && string(old.set) == string(t.set) {
		return old, nil
	}
	var told string // what went wrong, so that it is said once
	var err error
	t.Tokens, err = auth.NewTokens(auth.TokenOptions{
		Issuer: j.Issuer, Audience: j.Audience, URL: j.JWKSURL, Set: t.set, Refresh: j.Refresh, MaxAge: j.MaxAge, Leeway: j.Leeway,
		TenantClaim: j.TenantClaim, ModelsClaim: j.ModelsClaim, ClassClaim: j.ClassClaim,
		OnKeys: func(n int, err error) { // one look at a time
			switch {
			case err != nil && told != err.Error():
				told = err.Error()
				g.log.Warn("the keys of the identity provider cannot be read; those that are known stay for a while", zap.String("url", j.JWKSURL), zap.Duration("max_age_seconds", j.MaxAge), zap.Error(err))
			case err == nil && told != "":
				told = ""
				g.log.Info("the keys of the identity provider can be read again", zap.String("url", j.JWKSURL), zap.Int("keys", n))
			}
		},
	})
	return t, err
}

// useTokens has t, which may be nil, take the place of the tokens before. It is called with reloading held.
func (g *Gateway) useTokens(t *tokens) {
	old := g.tokens
	if t != nil {
		g.ring.Store(t.Tokens)
	}
	if g.tokens = t; t != nil && g.serving {
		t.Start()
	}
	if old != nil && old != t {
		old.Close()
	}
}

// startTokens begins to read the provider's keys.
func (g *Gateway) startTokens() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	g.serving = true
	if g.tokens != nil {
		g.tokens.Start()
	}
}

// closeTokens ends that.
func (g *Gateway) closeTokens() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	g.serving = false
	g.useTokens(nil)
}

// authMissing says what keeps everybody out.
func (g *Gateway) authMissing() []string {
	cfg := g.cfg.Load()
	if a := cfg.Auth; a == nil || a.JWT == nil || len(cfg.Keys()) > 0 {
		return nil
	}
	if t := g.ring.Load(); t != nil && t.Ready() {
		return nil
	}
	return []string{"the keys of the identity provider have not been read yet, or too long ago"}
}

// probeAuth reads the provider's keys once and says what is wrong with them.
func (g *Gateway) probeAuth(ctx context.Context, cfg *config.Config) config.Problems {
	if cfg.Auth == nil || cfg.Auth.JWT == nil || cfg.Auth.JWT.JWKSURL == "" {
		return nil
	}
	t, err := g.newTokens(cfg.Auth.JWT)
	if err == nil {
		defer t.Close()
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = t.Probe(ctx)
	}
	if err == nil {
		return nil
	}
	return config.Problems{{
		File: cfg.File(), Path: "auth.jwt.jwks_url", Message: "the keys cannot be read: " + err.Error(), Hint: "check the address, and that it can be reached from here",
		Severity: config.Error,
	}}
}
