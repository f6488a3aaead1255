package config

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed names.go
var namesSource string

func init() { sources = append(sources, namesSource) }

// Names say what clients may ask for besides what endpoints serve.
type Names struct {
	// DefaultPool is the pool that takes names which nobody knows, as its base model. Without it they get 404.
	DefaultPool string `yaml:"default_pool" example:"llama-70b"`
	// AnswerModel is the name of the model that answers carry: served (what the endpoint wrote, byte for byte) or asked
	// (what the client asked for, where an alias or a rule made another one of it). Rules may say it for themselves.
	AnswerModel string `yaml:"answer_model" enum:"served,asked"`
	// ModelHeaders has endpoints told the model and its base model in X-Gateway-Model-Name and
	// X-Gateway-Base-Model-Name. What clients send under these names never reaches them.
	ModelHeaders bool `yaml:"model_headers"`
	// Aliases are other names of models and adapters. base:adapter always stands for the adapter.
	Aliases map[string]string `yaml:"aliases" example:"{gpt-4o: meta-llama/Llama-3.3-70B-Instruct}"`
	// Rules say what becomes of requests; the first that matches counts, before aliases and what endpoints serve.
	Rules []Rule `yaml:"rules" example:""`
}

// Rule is what becomes of the requests that it matches.
type Rule struct {
	// Model is the name that the client asks for, exactly. Without it, any name.
	Model string `yaml:"model" example:"chat"`
	// Path is the path of the request. Without it, any.
	Path string `yaml:"path" example:"/v1/chat/completions"`
	// Headers are header fields that the request must have, each with this very value.
	Headers map[string]string `yaml:"headers" example:"{X-Tier: gold}"`
	// To is the model, adapter, alias or other rule's name that the request goes to. Without it, and without split, the name
	// stays as it is.
	To string `yaml:"to" example:"meta-llama/Llama-3.3-70B-Instruct"`
	// Split sends requests to several models instead, by weight: a canary. A model that nobody serves, or that the caller may
	// not use, gets none.
	Split []Split `yaml:"split" example:"[{model: llama-70b, weight: 95}, {model: llama-70b-v2, weight: 5}]"`
	// Sticky says whose requests split sends to the same model: none (each is drawn by itself), session (session_id,
	// prompt_cache_key or user of the body), user or tenant. A greater weight only moves what moves to that model.
	Sticky string `yaml:"sticky" enum:"none,session,user,tenant"`
	// Fallback are models to try in turn where the pool of the one before has no endpoint that takes the request or stays
	// saturated for fallback_after. The answer says so in X-Kvgate-Fallback.
	Fallback []string `yaml:"fallback" example:"[llama-8b]"`
	// FallbackAfter is how long a request waits in the gateway, where its pool has admission or adapters, before it goes on to
	// a fallback that has room; while none has, it goes on waiting. 0s: at once.
	FallbackAfter time.Duration `yaml:"fallback_after" min:"0s" max:"1h"`
	// AnswerModel is as in names.answer_model, for this rule.
	AnswerModel string `yaml:"answer_model" example:"asked" enum:"served,asked"`
	// Policy chooses the endpoints of these requests instead of the pool's policy.
	Policy *Policy `yaml:"policy" example:"{weights: {queue: 2, kv_cache: 2}}"`
	// Timeouts of these requests, instead of the pool's.
	Timeouts *RuleTimeouts `yaml:"timeouts" example:""`
}

// Split is a share of the requests of a rule.
type Split struct {
	// Model is the model, adapter, alias or other rule's name that they go to.
	Model string `yaml:"model" example:"llama-70b"`
	// Weight is the share, relative to the other weights of the rule.
	Weight float64 `yaml:"weight" min:"0" max:"1000000"`
}

// RuleTimeouts are waits on endpoints that a rule may override.
type RuleTimeouts struct {
	// FirstToken is as in timeouts.
	FirstToken *time.Duration `yaml:"first_token" example:"30s" min:"0s" max:"24h"`
	// Idle is as in timeouts.
	Idle *time.Duration `yaml:"idle" example:"1m" min:"0s" max:"24h"`
	// Total is as in timeouts.
	Total *time.Duration `yaml:"total" example:"10m" min:"0s" max:"24h"`
}

// Over returns t with what r says instead.
func (r *RuleTimeouts) Over(t EndpointTimeouts) EndpointTimeouts {
	if r == nil {
		return t
	}
	for _, o := range []struct {
		from *time.Duration
		to   *time.Duration
	}{{r.FirstToken, &t.FirstToken}, {r.Idle, &t.Idle}, {r.Total, &t.Total}} {
		if o.from != nil {
			*o.to = *o.from
		}
	}
	return t
}

func (r *Rule) setDefaults(*Config) { r.Sticky, r.FallbackAfter = "none", time.Second }

func (s *Split) setDefaults(*Config) { s.Weight = 1 }

// targets are the names that r sends requests to, by their paths below r's.
func (r *Rule) targets(yield func(path, name string) bool) {
	if r.To != "" && !yield(".to", r.To) {
		return
	}
	for i := range r.Split {
		if n := r.Split[i].Model; n != "" && !yield(fmt.Sprintf(".split[%d].model", i), n) {
			return
		}
	}
	for i, n := range r.Fallback {
		if n != "" && !yield(fmt.Sprintf(".fallback[%d]", i), n) {
			return
		}
	}
}

// NameTarget is a name that an alias or a rule leads to, and where the file says so.
type NameTarget struct{ Path, Name string }

// Targets are all names that aliases and rules lead to and that are not names of theirs: endpoints must serve them.
func (n *Names) Targets() (out []NameTarget) {
	add := func(path, name string) {
		if _, alias := n.Aliases[name]; !alias && !n.hasRule(name) {
			out = append(out, NameTarget{path, name})
		}
	}
	for _, from := range slices.Sorted(maps.Keys(n.Aliases)) {
		add(join("names.aliases", from), n.Aliases[from])
	}
	for i := range n.Rules {
		for path, name := range n.Rules[i].targets {
			if name == n.Rules[i].Model {
				out = append(out, NameTarget{fmt.Sprintf("names.rules[%d]%s", i, path), name})
				continue
			}
			add(fmt.Sprintf("names.rules[%d]%s", i, path), name)
		}
	}
	return out
}

func (n *Names) hasRule(name string) bool {
	return slices.ContainsFunc(n.Rules, func(r Rule) bool { return r.Model == name })
}

// names checks the section names.
func (d *decoder) names() {
	n := &d.root.Names
	if p := n.DefaultPool; p != "" && !slices.ContainsFunc(d.root.Pools, func(o Pool) bool { return o.Name == p }) {
		var known []string
		for i := range d.root.Pools {
			known = append(known, d.root.Pools[i].Name)
		}
		d.wrong("names.default_pool", strconv.Quote(clip(p))+" is not the name of a pool", hintFor(p, "pools", known))
	}
	for _, from := range slices.Sorted(maps.Keys(n.Aliases)) {
		path := join("names.aliases", from)
		switch to := n.Aliases[from]; {
		case to == from:
			d.wrong(path, strconv.Quote(clip(from))+" stands for itself", "remove it, or write another model")
		case n.hasRule(from):
			if i := slices.IndexFunc(n.Rules, func(r Rule) bool { return r.Model == from && r.Path == "" && len(r.Headers) == 0 }); i >= 0 {
				d.wrong(path, fmt.Sprintf("is never reached: names.rules[%d] is for the same name, and rules come first", i), "remove one of the two")
			}
		default:
			for i := range d.root.Pools {
				if k := slices.Index(d.root.Pools[i].Models, from); k >= 0 {
					d.warn(path, fmt.Sprintf("hides the model of that name at pools[%d].models[%d]", i, k), "use another name, unless that is meant")
				}
			}
		}
	}
	for i := range n.Rules {
		d.rule(fmt.Sprintf("names.rules[%d]", i), i, &n.Rules[i])
	}
	d.loops()
	d.nowhere()
}

func (d *decoder) rule(at string, i int, r *Rule) {
	if d.bad[at] {
		return
	}
	if r.Model == "" && r.Path == "" && len(r.Headers) == 0 && !d.badBelow[at] {
		d.wrong(at, "matches every request", "write model, path or headers; names.default_pool is for names that nobody knows")
	}
	if r.Path != "" && (r.Path[0] != '/' || strings.ContainsAny(r.Path, "?# ")) {
		d.wrong(at+".path", strconv.Quote(clip(r.Path))+" is not a path", `write one such as "/v1/chat/completions"`)
	}
	for _, h := range slices.Sorted(maps.Keys(r.Headers)) {
		switch {
		case !headerName.MatchString(h):
			d.wrong(join(at+".headers", h), strconv.Quote(clip(h))+" is not a header name", "write letters, digits and \"-\"")
		case strings.EqualFold(h, "authorization"), strings.EqualFold(h, "x-api-key"), strings.EqualFold(h, "api-key"):
			d.wrong(join(at+".headers", h), "holds a secret, which has no place in a file like this", "write sticky: tenant, or give the key models of its own")
		}
	}
	if r.To != "" && len(r.Split) > 0 {
		d.wrong(at+".split", "there is to as well", "keep one of the two")
	}
	sum, seen := 0.0, map[string]int{}
	for k := range r.Split {
		s := &r.Split[k]
		sp := fmt.Sprintf("%s.split[%d]", at, k)
		if s.Model == "" {
			d.wrong(sp+".model", "has no model", "write model: …")
		} else if j, twice := seen[s.Model]; twice {
			d.wrong(sp+".model", fmt.Sprintf("%q is at %s.split[%d] already", clip(s.Model), at, j), "add the weights up in one of them")
		}
		seen[s.Model] = k
		sum += s.Weight
	}
	if len(r.Split) > 0 && sum == 0 && !d.badBelow[at+".split"] {
		d.wrong(at+".split", "the weights sum to 0, so that no model would get a request", "give one a weight above 0")
	}
	if r.Sticky != "none" && len(r.Split) == 0 {
		d.warn(at+".sticky", "has no effect without split", "remove it")
	}
	if r.FallbackAfter != time.Second && len(r.Fallback) == 0 {
		d.warn(at+".fallback_after", "has no effect without fallback", "remove it, or write fallback")
	}
	if r.To == "" && len(r.Split) == 0 && len(r.Fallback) == 0 && r.AnswerModel == "" && r.Policy == nil && r.Timeouts == nil && !d.badBelow[at] {
		d.warn(at, "changes nothing", "write to, split, fallback, policy, timeouts or answer_model")
	}
	for k, f := range r.Fallback {
		fp := fmt.Sprintf("%s.fallback[%d]", at, k)
		switch {
		case f == r.To && f != "", f == r.Model && r.To == "" && len(r.Split) == 0 && f != "":
			d.wrong(fp, strconv.Quote(clip(f))+" is what the rule falls back from", "remove it, or write another model")
		case slices.Index(r.Fallback, f) < k && f != "":
			d.wrong(fp, strconv.Quote(clip(f))+" is in the list already", "remove one of the two")
		}
	}
	if r.Policy != nil {
		d.policy(at+".policy", r.Policy)
	}
	for j := range i {
		if o := &d.root.Names.Rules[j]; o.covers(r) {
			d.wrong(at, fmt.Sprintf("is never reached: names.rules[%d] comes first and matches all of its requests", j), "put it before that one, or remove it")
			break
		}
	}
}

// covers reports whether r matches whatever o does.
func (r *Rule) covers(o *Rule) bool {
	if r.Model != "" && r.Model != o.Model || r.Path != "" && r.Path != o.Path {
		return false
	}
	for h, v := range r.Headers {
		found := false
		for oh, ov := range o.Headers {
			found = found || strings.EqualFold(h, oh) && v == ov
		}
		if !found {
			return false
		}
	}
	return true
}

// maxNameSteps bounds the chain from a name to a model, as the gateway does.
const maxNameSteps = 8

// loops finds chains of aliases and rules that come back to where they were, or are too long.
func (d *decoder) loops() {
	n := &d.root.Names
	told := map[string]bool{} // names of loops that were complained about
	var follow func(start, path, name string, seen []string)
	follow = func(start, path, name string, seen []string) {
		if d.bad[start] || told[name] {
			return
		}
		if slices.Contains(seen, name) || len(seen) > maxNameSteps {
			what := "loops: "
			if !slices.Contains(seen, name) {
				what = "takes too many steps: "
			}
			for _, s := range seen {
				told[s] = true
			}
			d.wrong(path, what+clip(strings.Join(append(seen, name), " → ")), "have it end at a model that endpoints serve")
			return
		}
		seen = append(slices.Clone(seen), name)
		ruled := false
		for i := range n.Rules {
			r := &n.Rules[i]
			if r.Model != name {
				continue
			}
			ruled = true
			for p, to := range r.targets {
				if to != name && !strings.HasPrefix(p, ".fallback") {
					follow(start, path, to, seen)
				}
			}
		}
		if to, ok := n.Aliases[name]; ok && !ruled && to != name {
			follow(start, path, to, seen)
		}
	}
	for _, from := range slices.Sorted(maps.Keys(n.Aliases)) {
		follow(join("names.aliases", from), join("names.aliases", from), from, nil)
	}
	for i := range n.Rules {
		r := &n.Rules[i]
		for p, to := range r.targets {
			if r.Model != "" && to != r.Model && !strings.HasPrefix(p, ".fallback") {
				path := fmt.Sprintf("names.rules[%d]%s", i, p)
				follow(path, path, to, []string{r.Model})
			}
		}
	}
}

// nowhere finds names that lead nowhere, as far as that can be told without asking the endpoints: adapters need no entry, so
// only a name that looks like a known one is complained about.
func (d *decoder) nowhere() {
	var known []string
	for i := range d.root.Pools {
		if len(d.root.Pools[i].Models) == 0 {
			return // its endpoints say what they serve
		}
		known = append(known, d.root.Pools[i].Models...)
	}
	n := &d.root.Names
	known = append(known, slices.Sorted(maps.Keys(n.Aliases))...)
	for i := range n.Rules {
		if m := n.Rules[i].Model; m != "" {
			known = append(known, m)
		}
	}
	for _, t := range n.Targets() {
		if base, _, ok := strings.Cut(t.Name, ":"); slices.Contains(known, t.Name) || ok && slices.Contains(known, base) {
			continue
		}
		if s := suggest(t.Name, known); s != "" {
			d.warn(t.Path, strconv.Quote(clip(t.Name))+" is no model of a pool, no alias and no rule's; only an adapter could be called that", "did you mean "+strconv.Quote(s)+"?")
		}
	}
}
