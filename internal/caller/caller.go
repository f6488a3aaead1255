// Package caller says who a request is from and what it may use: the tenant, the priority class and the models. It is what
// authentication finds out and what admission, quotas and the choice of a model ask.
//
// It imports nothing of kvgate's but pool, performs no IO and reads no clock.
package caller

import (
	"slices"
	"strings"

	"kvgate/pool"
)

// A Class is a priority class: requests of a higher one go first. The zero Class is Normal.
type Class int8

// The classes.
const (
	Low    Class = -1
	Normal Class = 0
	High   Class = 1
)

// Classes are the names of the classes, lowest first.
var Classes = []string{"low", "normal", "high"}

// ParseClass returns the class with this name; "" is Normal.
func ParseClass(name string) (c Class, ok bool) {
	if name == "" {
		return Normal, true
	}
	i := slices.Index(Classes, name)
	return Class(i - 1), i >= 0
}

// String returns the class's name.
func (c Class) String() string { return Classes[min(max(c, Low), High)+1] }

// A Caller is who a request is from. It is immutable, and the same for all requests with one credential. A nil Caller is
// anybody, where authentication is off: it may use everything.
type Caller struct {
	// Key names the credential, for logs and usage records. It is no secret.
	Key    string
	Tenant string
	Class  Class
	// Models are what it may use; nil is everything.
	Models *Models
}

// TenantName returns the tenant, "" of nobody in particular.
func (c *Caller) TenantName() string {
	if c == nil {
		return ""
	}
	return c.Tenant
}

// May reports whether c may use t. It does not allocate.
func (c *Caller) May(t *pool.Target) bool { return c == nil || c.Models.Has(t) }

// Models is a set of models and adapters, by names and patterns. It is immutable; nil is the set of all.
type Models struct {
	exact map[string]struct{}
	globs []string
	pairs []pair
}

// A pair is a pattern for base:adapter.
type pair struct{ base, adapter string }

// NewModels returns the set of what one of the patterns matches: "*" stands for any characters, "?" for one. Patterns are
// matched against the name of a model or adapter. One with a colon is matched against base:adapter too, what is before the
// colon against the base model alone: a pattern for a model never lets its adapters in. An empty list is the empty set.
func NewModels(patterns []string) *Models {
	m := &Models{exact: make(map[string]struct{}, len(patterns))}
	for _, p := range patterns {
		switch {
		case p == "*":
			return nil
		case strings.ContainsAny(p, "*?"):
			m.globs = append(m.globs, p)
		default:
			m.exact[p] = struct{}{}
		}
		for i := range len(p) { // names may have colons of their own
			if p[i] == ':' {
				m.pairs = append(m.pairs, pair{p[:i], p[i+1:]})
			}
		}
	}
	return m
}

// Has reports whether t is in the set. It does not allocate.
func (m *Models) Has(t *pool.Target) bool {
	if m == nil || m.has(t.Name) {
		return true
	}
	if t.Adapter {
		for i := range m.pairs {
			if p := &m.pairs[i]; Match(p.base, t.Base) && Match(p.adapter, t.Name) {
				return true
			}
		}
	}
	return false
}

func (m *Models) has(name string) bool {
	if _, ok := m.exact[name]; ok {
		return true
	}
	for _, g := range m.globs {
		if Match(g, name) {
			return true
		}
	}
	return false
}

// Match reports whether pattern matches the whole of name: "*" stands for any characters, "?" for one byte, everything else
// for itself. It takes time in proportion to the product of the lengths at most, and does not allocate.
func Match[S ~string | ~[]byte](pattern string, name S) bool {
	p, n := 0, 0
	star, from := -1, 0 // the last "*", and where in name what it stands for ends
	for n < len(name) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, n
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == name[n]):
			p++
			n++
		case star >= 0:
			from++
			p, n = star+1, from
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}
