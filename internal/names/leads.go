package names

import (
	"slices"

	"kvgate/pool"
)

// Leads returns what requests for name, one of [Resolver.Listed], may end as in s: of each rule and alias on the way what
// it draws from, in the order of the configuration, and then the fallbacks. Empty: nobody serves any of it. by is what
// resolves the name first. It is for people and allocates.
func (r *Resolver) Leads(s *pool.Snapshot, name string) (to []*pool.Target, by How) {
	if r == nil {
		return nil, Unknown
	}
	by = ByRule
	if _, ok := r.o.Aliases[name]; ok && len(r.byName[name]) == 0 {
		by = ByAlias
	}
	w := walk{r: r, s: s}
	w.follow(name, 0)
	for i := 0; i < len(w.fallback) && i < maxWalk; i++ { // a fallback may have fallbacks
		w.follow(w.fallback[i], 1)
	}
	return w.to, by
}

// maxWalk bounds how many fallbacks of one name are followed.
const maxWalk = 64

// A walk goes every way from a name where a request goes one.
type walk struct {
	r        *Resolver
	s        *pool.Snapshot
	to       []*pool.Target
	fallback []string
}

// follow takes in what name leads to, depth steps from what clients ask for; see [Resolver.follow].
func (w *walk) follow(name string, depth int) {
	if depth < maxDepth {
		rules := slices.Clone(w.r.byName[name])
		if depth == 0 {
			rules = append(rules, w.r.any...)
			slices.Sort(rules)
		}
		for _, i := range rules {
			rule := &w.r.o.Rules[i]
			for _, c := range rule.To {
				switch {
				case c.Weight == 0:
				case c.Model == name:
					w.take(name)
				default:
					w.follow(c.Model, depth+1)
				}
			}
			if len(rule.To) == 0 {
				w.take(name)
			}
			for _, f := range rule.Fallback {
				if !slices.Contains(w.fallback, f) {
					w.fallback = append(w.fallback, f)
				}
			}
			if !rule.conditional() {
				return
			}
		}
		if to, ok := w.r.o.Aliases[name]; ok {
			w.follow(to, depth+1)
			return
		}
	}
	w.take(name)
}

func (w *walk) take(name string) {
	if t, _ := lookUp(w.s, name); t != nil && !slices.Contains(w.to, t) {
		w.to = append(w.to, t)
	}
}
