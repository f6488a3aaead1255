// Package names finds out what a name in `model` stands for: by rules, aliases, the adapters and base models that endpoints
// serve, or a default pool, in this order. A Resolver is built from the configuration, is immutable, and does not allocate.
//
// It imports nothing of kvgate's but pool and internal/caller, performs no IO and reads no clock; randomness comes in.
package names

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"kvgate/internal/caller"
	"kvgate/pool"
)

// A Sticky says whose requests a split sends to the same model.
type Sticky uint8

// What a split can stick to.
const (
	PerRequest Sticky = iota // nothing: each request is drawn by itself
	PerSession               // the session that the body names, or its prompt_cache_key, or its user
	PerUser                  // the user that the body names
	PerTenant                // the tenant that the credential belongs to
)

// An Answer says which name of the model answers carry.
type Answer uint8

// The names an answer can carry.
const (
	AnswerDefault Answer = iota // as the Resolver's Options say
	AnswerServed                // what the endpoint wrote, byte for byte
	AnswerAsked                 // what the client asked for
)

// A Choice is one of the models that a rule sends requests to.
type Choice struct {
	Model  string  `json:"model"`
	Weight float64 `json:"weight"` // relative to the others'; 0 gets none

	hash uint64
}

// A Header is a field that a request must have, with this very value.
type Header struct{ Name, Value string }

// A Rule says what becomes of the requests it matches. The first rule that matches is the one that counts.
type Rule struct {
	Model   string   // the name that the client asks for, exactly; "" is any
	Path    string   // of the request; "" is any
	Headers []Header // all of them

	// To are the models that requests go to; one is drawn by weight. Empty: the name stays as it is. A name that is the
	// rule's own Model is looked up among what is served; any other may be a rule's or an alias in its turn.
	To     []Choice
	Sticky Sticky
	// Fallback are models to try in turn where a pool can't take the request; the rule's own Model is as in To.
	Fallback []string
	// FallbackAfter is how long a request waits for room before it goes on to a fallback that has some.
	FallbackAfter time.Duration
	Answer        Answer
}

// conditional reports whether the rule asks for more than a name.
func (r *Rule) conditional() bool { return r.Path != "" || len(r.Headers) > 0 }

// Options are what a Resolver is made of. The zero Options look names up among what is served, and nowhere else.
type Options struct {
	Rules   []Rule
	Aliases map[string]string // names, and what they stand for
	// DefaultPool is the pool that unknown names go to, as its base model; "" is none.
	DefaultPool string
	Answer      Answer
	// Rand returns uniform bits; math/rand/v2's if nil. It is called by many goroutines.
	Rand func() uint64
}

// maxDepth bounds the chain of rules and aliases from a name to a model.
const maxDepth = 8

// A Resolver resolves names. It is immutable and safe for concurrent use. A nil one is the one with no rules.
type Resolver struct {
	o      Options
	byName map[string][]int32 // numbers of the rules with this Model, ascending
	any    []int32            // and of those for any name
	listed []string
	base   atomic.Pointer[defaultBase] // of the default pool, a cache
}

// defaultBase is the default pool's base model in one snapshot.
type defaultBase struct {
	version uint64
	target  *pool.Target
}

// New returns the resolver that o describes. It fails on rules that loop.
func New(o Options) (*Resolver, error) {
	if o.Rand == nil {
		o.Rand = rand.Uint64
	}
	if o.Answer == AnswerDefault {
		o.Answer = AnswerServed
	}
	o.Rules = append([]Rule(nil), o.Rules...)
	r := &Resolver{o: o, byName: make(map[string][]int32)}
	for i := range o.Rules {
		rule := &o.Rules[i]
		rule.To = append([]Choice(nil), rule.To...)
		sum := 0.0
		for j := range rule.To {
			c := &rule.To[j]
			if c.Weight < 0 || math.IsNaN(c.Weight) || math.IsInf(c.Weight, 0) {
				return nil, fmt.Errorf("rule %d: weight %g", i, c.Weight)
			}
			sum += c.Weight
			c.hash = pool.HashName(c.Model)
		}
		if len(rule.To) > 0 && sum == 0 {
			return nil, fmt.Errorf("rule %d: the weights sum to 0", i)
		}
		if rule.Model == "" {
			r.any = append(r.any, int32(i))
			continue
		}
		if !rule.conditional() && !slices.Contains(r.listed, rule.Model) {
			r.listed = append(r.listed, rule.Model)
		}
		r.byName[rule.Model] = append(r.byName[rule.Model], int32(i))
	}
	for from := range o.Aliases {
		if !slices.Contains(r.listed, from) {
			r.listed = append(r.listed, from)
		}
	}
	slices.Sort(r.listed)
	for name := range r.byName {
		if loop := r.loop(name, nil); loop != nil {
			return nil, fmt.Errorf("rules loop: %s", strings.Join(loop, " → "))
		}
	}
	for name := range o.Aliases {
		if loop := r.loop(name, nil); loop != nil {
			return nil, fmt.Errorf("aliases loop: %s", strings.Join(loop, " → "))
		}
	}
	return r, nil
}

// loop returns a chain from name that is too long or comes back to where it was, nil if there is none. Rules for any name
// apply to what clients ask for alone, so that they can't.
func (r *Resolver) loop(name string, seen []string) []string {
	chain := append(seen, name)
	if slices.Contains(seen, name) || len(seen) >= maxDepth {
		return chain
	}
	for _, i := range r.byName[name] {
		for _, c := range r.o.Rules[i].To {
			if c.Model != name {
				if l := r.loop(c.Model, chain); l != nil {
					return l
				}
			}
		}
	}
	if to, ok := r.o.Aliases[name]; ok && r.byName[name] == nil {
		return r.loop(to, chain)
	}
	return nil
}

// A Fields is the header of a request.
type Fields interface {
	// Field returns the value of the header field with this name, in any case; nil if there is none.
	Field(name string) []byte
}

// A Request is what resolving needs to know of one.
type Request struct {
	Name          []byte // as the client wrote it
	Path          []byte
	Fields        Fields
	Session, User uint64 // hashes; 0 is none
	Caller        *caller.Caller
}

// A How is what resolved a name.
type How uint8

// The ways to resolve a name, in the order in which they are tried.
const (
	Unknown How = iota
	ByRule
	ByAlias
	Served   // an adapter or a base model that endpoints serve
	OnBase   // base:adapter
	ByPool   // the default pool
	FellBack // another model in place of one that could not take the request
)

var howWords = [...]string{"unknown", "rule", "alias", "served", "base:adapter", "default pool", "fallback"}

// String returns the word for h.
func (h How) String() string { return howWords[h] }

// A Route is what a name stands for.
type Route struct {
	// Target is in the snapshot that was passed along; its Name is what the model is called at the endpoints. Nil: nobody
	// serves it, or the caller may not use it.
	Target *pool.Target
	// Forbidden: there is a model, but none that the caller may use.
	Forbidden bool
	// Wanted is the name that nobody serves, if a rule or an alias led there; "": the client's.
	Wanted string
	// How says what resolved the client's name.
	How    How
	Answer Answer // AnswerServed or AnswerAsked
	// Rule is the number of the rule that sets how the request is handled; -1 is none.
	Rule int32

	fallback []string // that are left
	own      string   // the Model of the rule that they are of
	after    time.Duration
}

// HasFallback reports whether there are models left to fall back on.
func (t *Route) HasFallback() bool { return len(t.fallback) > 0 }

// FallbackAfter is how long a request waits for room before it goes on to one of them.
func (t *Route) FallbackAfter() time.Duration { return t.after }

// Asked reports whether answers carry the name that the client asked for.
func (t *Route) Asked() bool { return t.Answer == AnswerAsked }

// Listed are the names besides those that endpoints serve which clients may ask for: of aliases, and of rules that need no
// more than a name. The caller must not change them.
func (r *Resolver) Listed() []string {
	if r == nil {
		return nil
	}
	return r.listed
}

// Resolve finds out what a request's name stands for in s. It does not allocate.
func (r *Resolver) Resolve(s *pool.Snapshot, q *Request) Route { return r.resolve(s, q, nil) }

// A Step is what one rule or look-up did, for explanations.
type Step struct {
	Name string `json:"name"`           // that was looked up
	By   string `json:"by"`             // what found it; "" if nothing did
	To   string `json:"to"`             // what it stands for
	Rule *int32 `json:"rule,omitempty"` // its number in the configuration
	// Not says why the step came to nothing: a rule that does not match, a name that nobody serves, a model that the caller
	// may not use.
	Not string `json:"not,omitempty"`
	// What is what a name that is served is: an adapter or a base model, and where.
	What string `json:"what,omitempty"`
	// Share is the share of requests that a rule sends this way, where it sends some another way; 0 otherwise.
	Share float64 `json:"share,omitempty"`
	// Others are the rule's other choices, and their weights, as they are configured.
	Others []Choice `json:"others,omitempty"`
	// LeftOut are choices that take no part, since nobody serves them or the caller may not use them.
	LeftOut []string `json:"left_out,omitempty"`
}

// String returns the step as a line for people.
func (s Step) String() string {
	var b strings.Builder
	b.WriteString(s.Name + ":")
	if s.By != "" {
		b.WriteString(" " + s.By)
	}
	if s.Rule != nil {
		fmt.Fprintf(&b, " names.rules[%d]", *s.Rule)
	}
	if s.Not != "" {
		b.WriteString(" " + s.Not)
		return b.String()
	}
	if s.To != s.Name {
		b.WriteString(" → " + s.To)
	}
	if s.Share > 0 {
		fmt.Fprintf(&b, " (%.3g%% of requests", 100*s.Share)
		for _, o := range s.Others {
			fmt.Fprintf(&b, "; %s has weight %g", o.Model, o.Weight)
		}
		for _, o := range s.LeftOut {
			fmt.Fprintf(&b, "; %s takes no part: nobody serves it, or not for this caller", o)
		}
		b.WriteByte(')')
	}
	if s.What != "" {
		b.WriteString(", " + s.What)
	}
	return b.String()
}

// Explain is Resolve, and tells its steps.
func (r *Resolver) Explain(s *pool.Snapshot, q *Request) (Route, []Step) {
	var steps []Step
	t := r.resolve(s, q, &steps)
	return t, steps
}

func (r *Resolver) resolve(s *pool.Snapshot, q *Request, steps *[]Step) Route {
	t := Route{Rule: -1, Answer: AnswerServed}
	if r == nil {
		t.take(s, q, text(q.Name), Served, steps)
		return t
	}
	t.Answer = AnswerDefault
	name := text(q.Name)
	r.follow(&t, s, q, name, 0, steps)
	if t.Answer == AnswerDefault {
		t.Answer = r.o.Answer
	}
	if t.How == Unknown && r.o.DefaultPool != "" && !t.Forbidden {
		if base := r.defaultBase(s); base != nil {
			t.How, t.Wanted = ByPool, ""
			t.set(q, base)
			t.note(steps, s, name, ByPool, base)
		}
	}
	return t
}

// follow goes from name to a model, depth steps from what the client asked for.
func (r *Resolver) follow(t *Route, s *pool.Snapshot, q *Request, name string, depth int, steps *[]Step) {
	if i := r.match(q, name, depth, steps); i >= 0 && depth < maxDepth {
		rule := &r.o.Rules[i]
		// What more than one rule of a chain sets is as the first one says.
		if t.Answer == AnswerDefault {
			t.Answer = rule.Answer
		}
		if t.fallback == nil {
			t.fallback, t.own, t.after = rule.Fallback, rule.Model, rule.FallbackAfter
		}
		if t.Rule < 0 {
			t.Rule = i
		}
		to, share := r.draw(rule, s, q, name, depth)
		if depth == 0 {
			t.How = ByRule
		}
		if steps != nil {
			n := i
			step := Step{Name: name, By: ByRule.String(), To: to, Rule: &n, Share: share}
			for _, c := range rule.To {
				if c.Model != to {
					step.Others = append(step.Others, c)
					if c.Weight > 0 && share > 0 && !r.usable(s, q, c.Model, name, depth) {
						step.LeftOut = append(step.LeftOut, c.Model)
					}
				}
			}
			note(steps, step)
		}
		if to != name {
			r.follow(t, s, q, to, depth+1, steps)
			return
		}
	} else if to, ok := r.o.Aliases[name]; ok && depth < maxDepth {
		if depth == 0 {
			t.How = ByAlias
		}
		note(steps, Step{Name: name, By: ByAlias.String(), To: to})
		r.follow(t, s, q, to, depth+1, steps)
		return
	}
	t.take(s, q, name, t.How, steps)
}

// take looks name up among what is served.
func (t *Route) take(s *pool.Snapshot, q *Request, name string, how How, steps *[]Step) {
	target, found := lookUp(s, name)
	if target == nil {
		note(steps, Step{Name: name, Not: "no rule or alias matches, no adapter or base model that is served, and not base:adapter"})
		if how == ByRule || how == ByAlias {
			t.Wanted = name
		}
		t.How = Unknown
		return
	}
	if how != ByRule && how != ByAlias {
		how = found
	}
	t.How = how
	t.set(q, target)
	t.note(steps, s, name, found, target)
}

// note tells that name was found to be target.
func (t *Route) note(steps *[]Step, s *pool.Snapshot, name string, by How, target *pool.Target) {
	if steps == nil {
		return
	}
	step := Step{Name: name, By: by.String(), To: target.Name, What: "base model of pool " + s.Pools[target.Pool].Name}
	if target.Adapter {
		step.What = "adapter on " + target.Base + " in pool " + s.Pools[target.Pool].Name
	}
	if t.Forbidden {
		step.Not = "→ " + target.Name + ", which this caller may not use"
	}
	note(steps, step)
}

// set has t be target, if the caller may use it.
func (t *Route) set(q *Request, target *pool.Target) {
	if t.Forbidden = !q.Caller.May(target); !t.Forbidden {
		t.Target = target
	}
}

// lookUp finds name among what is served, or as base:adapter.
func lookUp(s *pool.Snapshot, name string) (*pool.Target, How) {
	if t := s.TargetString(name); t != nil {
		return t, Served
	}
	// Slow path: names may have colons of their own, so each is tried, the last one first.
	for i := strings.LastIndexByte(name, ':'); i > 0; i = strings.LastIndexByte(name[:i], ':') {
		adapter := s.TargetString(name[i+1:])
		if adapter == nil || !adapter.Adapter {
			continue
		}
		if base := s.TargetString(name[:i]); adapter.Base == name[:i] || base != nil && !base.Adapter && base.Pool == adapter.Pool {
			return adapter, OnBase
		}
	}
	return nil, Unknown
}

// match returns the number of the first rule that matches, or -1. Rules for any name are for what clients ask for.
func (r *Resolver) match(q *Request, name string, depth int, steps *[]Step) int32 {
	named := r.byName[name]
	var others []int32
	if depth == 0 {
		others = r.any
	}
	for len(named) > 0 || len(others) > 0 {
		var i int32
		if len(others) == 0 || len(named) > 0 && named[0] < others[0] {
			i, named = named[0], named[1:]
		} else {
			i, others = others[0], others[1:]
		}
		if r.o.Rules[i].matches(q) {
			return i
		}
		if steps != nil {
			n := i // i itself is not to escape
			note(steps, Step{Name: name, By: ByRule.String(), Rule: &n, Not: "does not match: " + r.o.Rules[i].mismatch(q)})
		}
	}
	return -1
}

func (r *Rule) matches(q *Request) bool {
	if r.Path != "" && string(q.Path) != r.Path {
		return false
	}
	for i := range r.Headers {
		if q.Fields == nil || string(q.Fields.Field(r.Headers[i].Name)) != r.Headers[i].Value {
			return false
		}
	}
	return true
}

// mismatch says what of q the rule asks for and does not find. Values are not told: a header may hold a secret.
func (r *Rule) mismatch(q *Request) string {
	if r.Path != "" && string(q.Path) != r.Path {
		return "it is for the path " + r.Path
	}
	for i := range r.Headers {
		h := &r.Headers[i]
		switch v := q.Fields; {
		case v == nil || v.Field(h.Name) == nil:
			return "there is no header " + h.Name
		case string(v.Field(h.Name)) != h.Value:
			return "the header " + h.Name + " has another value"
		}
	}
	return ""
}

// draw returns which of the rule's models the request goes to, and the share of requests that do. Models that nobody serves,
// or that the caller may not use, take no part, so that a canary is for those who may see it.
func (r *Resolver) draw(rule *Rule, s *pool.Snapshot, q *Request, name string, depth int) (to string, share float64) {
	switch len(rule.To) {
	case 0:
		return name, 0
	case 1:
		return rule.To[0].Model, 0
	}
	sum, all := 0.0, 0.0
	for i := range rule.To {
		c := &rule.To[i]
		all += c.Weight
		if r.usable(s, q, c.Model, name, depth) {
			sum += c.Weight
		}
	}
	every := sum == 0 // none is usable: draw one all the same, for what is said of it
	if every {
		sum = all
	}
	key := rule.key(q)
	at := float64(r.o.Rand()>>11) / (1 << 53) * sum
	best := math.Inf(1)
	for i := range rule.To {
		c := &rule.To[i]
		if c.Weight == 0 || !every && !r.usable(s, q, c.Model, name, depth) {
			continue
		}
		if key != 0 {
			// Weighted rendezvous hashing: the choice with the least -ln(u)/w, for a u in (0,1) of the key and the choice.
			// A key changes its model only towards one whose weight has grown.
			u := (float64(pool.Rendezvous(c.hash, key)>>11) + 0.5) / (1 << 53)
			if v := -math.Log(u) / c.Weight; v < best {
				best, to, share = v, c.Model, c.Weight/sum
			}
			continue
		}
		to, share = c.Model, c.Weight/sum
		if at < c.Weight {
			break
		}
		at -= c.Weight
	}
	return to, share
}

// usable reports whether a choice leads to a model that the caller may use.
func (r *Resolver) usable(s *pool.Snapshot, q *Request, choice, name string, depth int) bool {
	t := Route{Rule: -1}
	if choice == name {
		t.take(s, q, choice, Unknown, nil)
	} else {
		r.follow(&t, s, q, choice, depth+1, nil)
	}
	return t.Target != nil
}

// key is what the rule's split sticks to; 0 is nothing.
func (r *Rule) key(q *Request) uint64 {
	switch r.Sticky {
	case PerSession:
		return q.Session
	case PerUser:
		return q.User
	case PerTenant:
		if n := q.Caller.TenantName(); n != "" {
			return pool.HashName(n)
		}
	}
	return 0
}

// FallBack moves t on to the next model of its chain that is served in s and that the caller may use, and reports whether
// there was one.
func (r *Resolver) FallBack(t *Route, s *pool.Snapshot, q *Request) bool {
	for len(t.fallback) > 0 {
		name := t.fallback[0]
		t.fallback = t.fallback[1:]
		next := Route{Rule: -1}
		if name == t.own { // what is served under it, and not the rule once more
			next.take(s, q, name, Unknown, nil)
		} else {
			r.follow(&next, s, q, name, 1, nil)
		}
		if next.Target == nil || t.Target != nil && next.Target.Name == t.Target.Name {
			continue
		}
		t.Target, t.Forbidden, t.Wanted, t.How = next.Target, false, "", FellBack
		t.Rule = next.Rule
		return true
	}
	return false
}

// defaultBase is the base model of the default pool: the first by name of those that it serves.
func (r *Resolver) defaultBase(s *pool.Snapshot) *pool.Target {
	if b := r.base.Load(); b != nil && b.version == s.Version && b.target != nil && s.TargetString(b.target.Name) == b.target {
		return b.target
	}
	b := &defaultBase{version: s.Version}
	n := int32(s.Pool(r.o.DefaultPool))
	for t := range s.Targets() {
		if t.Pool == n && !t.Adapter && (b.target == nil || t.Name < b.target.Name) {
			b.target = t
		}
	}
	r.base.Store(b)
	return b.target
}

// Default returns what a request without a name goes to: the default pool's base model, nil if there is none.
func (r *Resolver) Default(s *pool.Snapshot) *pool.Target {
	if r == nil || r.o.DefaultPool == "" {
		return nil
	}
	return r.defaultBase(s)
}

func note(steps *[]Step, s Step) {
	if steps != nil {
		s.Name = strings.Clone(s.Name) // it may be the request's memory
		*steps = append(*steps, s)
	}
}
