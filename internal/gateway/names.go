package gateway

import (
	"fmt"
	"maps"
	"slices"

	"kvgate/config"
	"kvgate/internal/names"
	"kvgate/pool"
	"kvgate/proxy"
	"kvgate/scoring"
)

// resolver is what resolves names as cfg says.
func resolver(cfg *config.Config, rand func(n uint64) uint64) (*names.Resolver, error) {
	n := &cfg.Names
	if n.DefaultPool == "" && len(n.Aliases) == 0 && len(n.Rules) == 0 {
		return nil, nil
	}
	o := names.Options{Aliases: n.Aliases, DefaultPool: n.DefaultPool, Answer: answer(n.AnswerModel)}
	if rand != nil {
		o.Rand = func() uint64 { return rand(1<<53) << 11 }
	}
	for i := range n.Rules {
		r := &n.Rules[i]
		rule := names.Rule{Model: r.Model, Path: r.Path, Fallback: r.Fallback, FallbackAfter: r.FallbackAfter, Answer: answer(r.AnswerModel)}
		for _, h := range slices.Sorted(maps.Keys(r.Headers)) {
			rule.Headers = append(rule.Headers, names.Header{Name: h, Value: r.Headers[h]})
		}
		if r.To != "" {
			rule.To = []names.Choice{{Model: r.To, Weight: 1}}
		}
		for _, s := range r.Split {
			rule.To = append(rule.To, names.Choice{Model: s.Model, Weight: s.Weight})
		}
		switch r.Sticky {
		case "session":
			rule.Sticky = names.PerSession
		case "user":
			rule.Sticky = names.PerUser
		case "tenant":
			rule.Sticky = names.PerTenant
		}
		o.Rules = append(o.Rules, rule)
	}
	return names.New(o)
}

func answer(word string) names.Answer {
	switch word {
	case "asked":
		return names.AnswerAsked
	case "served":
		return names.AnswerServed
	}
	return names.AnswerDefault
}

// setNames has routes resolve names as cfg says, and handle what rules have policies or timeouts of their own for as they
// say. pools are the pools' own options.
func (g *Gateway) setNames(cfg *config.Config, b *parts, pools []proxy.PoolOptions) (err error) {
	if b.names, err = resolver(cfg, g.o.Rand); err != nil {
		return fmt.Errorf("names: %w", err)
	}
	b.routes.Names, b.routes.ModelHeaders = b.names, cfg.Names.ModelHeaders
	for i := range cfg.Names.Rules {
		r := &cfg.Names.Rules[i]
		if r.Policy == nil && r.Timeouts == nil {
			continue
		}
		for k, o := range pools { // which one the rule's requests go to is known when they come
			p := cfg.Pools[k]
			p.Timeouts = r.Timeouts.Over(p.Timeouts)
			o.Timeouts = timeouts(&p)
			if r.Policy != nil {
				p.Policy = *r.Policy
				if o.Policy, err = g.policy(cfg, &p); err != nil {
					return fmt.Errorf("names.rules[%d]: policy: %w", i, err)
				}
			}
			if err := b.routes.SetSpecial(i, o); err != nil {
				return fmt.Errorf("names.rules[%d]: %w", i, err)
			}
		}
	}
	return nil
}

// A decider is what decides on requests: names and policies of one configuration.
type decider struct {
	names    *names.Resolver
	policies map[string]*scoring.Policy // by pool
}

// targetsAmiss finds aliases and rules that lead to names which no endpoint serves.
func targetsAmiss(cfg *config.Config, s *pool.Snapshot) (ps config.Problems) {
	var served []string
	for t := range s.Targets() {
		served = append(served, t.Name)
	}
	if len(served) == 0 {
		return nil
	}
	slices.Sort(served)
	var none *names.Resolver
	for _, t := range cfg.Names.Targets() {
		q := names.Request{Name: []byte(t.Name)}
		if r := none.Resolve(s, &q); r.Target != nil {
			continue
		}
		hint := "GET /v1/models lists what is served"
		if m := config.Suggest(t.Name, served); m != "" {
			hint = fmt.Sprintf("did you mean %q?", m)
		}
		ps = append(ps, config.Problem{File: cfg.File(), Path: t.Path, Message: fmt.Sprintf("no endpoint serves %q", t.Name), Hint: hint, Severity: config.Error})
	}
	return ps
}
