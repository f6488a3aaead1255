package scoring

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"kvgate/pool"
)

// An Info describes something that is named in configuration.
type Info struct {
	Name    string `json:"name"`
	Doc     string `json:"doc"`
	Formula string `json:"formula"`
}

// A Scorer writes to out[i] how much it likes candidate i: 0 is worst, 1 is best. It writes every element of out, which is
// as long as there are candidates, keeps neither argument, does not allocate, treats what is unknown never better than the
// worst that is known, and is called concurrently.
type Scorer interface {
	Score(req *Request, c *Candidates, out []float64)
}

// A ChoiceObserver is a [Scorer] that wants to know which endpoint was chosen. Chosen is called concurrently.
type ChoiceObserver interface {
	Chosen(req *Request, row *pool.Row)
}

type scorerEntry struct {
	Info
	make func() Scorer
}

var scorers []scorerEntry

// RegisterScorer adds a scorer. It is called from init functions, and panics on a name that is taken.
func RegisterScorer(info Info, make func() Scorer) {
	if slices.ContainsFunc(scorers, func(e scorerEntry) bool { return e.Name == info.Name }) {
		panic("BUG: scorer " + info.Name + " is registered twice")
	}
	scorers = append(scorers, scorerEntry{info, make})
	slices.SortFunc(scorers, func(a, b scorerEntry) int { return cmp.Compare(a.Name, b.Name) })
}

// Scorers describes the registered scorers, by name.
func Scorers() []Info {
	out := make([]Info, len(scorers))
	for i, e := range scorers {
		out[i] = e.Info
	}
	return out
}

// pluginNames are the names of llm-d's scorers, folded, where they are not ours.
var pluginNames = map[string]string{
	"prefixcache": "prefix", "preciseprefixcache": "prefix", "sessionaffinity": "session", "activerequest": "running_requests",
	"runningrequestssize": "running_requests", "nohitlru": "lru", "latency": "predicted_latency",
}

// ScorerName returns the registered name that s spells, such as kv_cache for kvCache, kv-cache, KV_CACHE or llm-d's
// kv-cache-utilization-scorer; ok is false if there is none.
func ScorerName(s string) (name string, ok bool) {
	fold := func(s string) string {
		s = strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(s))
		s = strings.TrimSuffix(s, "scorer")
		return strings.TrimSuffix(s, "utilization")
	}
	f := fold(s)
	if n := pluginNames[f]; n != "" {
		return n, true
	}
	for _, e := range scorers {
		if fold(e.Name) == f {
			return e.Name, true
		}
	}
	return "", false
}

// policyEntry is a policy that has a name of its own.
type policyEntry struct {
	Info
	pick func(p *Policy, req *Request, c *Candidates) int
}

const (
	autoName           = "auto"
	weightedName       = "weighted"
	consistentHashName = "consistent_hash"
)

// policies are the named policies. A map would be shorter to look up and have no order to show them in.
var policies = []policyEntry{
	{Info{autoName, "Sends each request where it costs least, counted in prefill tokens.", autoFormula}, nil},
	roundRobin,
	randomPolicy,
	leastRequests,
	powerOfTwo,
	consistentHash,
}

// Policies describes the named policies.
func Policies() []Info {
	out := make([]Info, len(policies))
	for i, e := range policies {
		out[i] = e.Info
	}
	return out
}

// PolicyNames are the names of [Policies].
func PolicyNames() []string {
	out := make([]string, len(policies))
	for i, e := range policies {
		out[i] = e.Name
	}
	return out
}

func (p *Policy) setWeights(weights map[string]float64) error {
	for key, w := range weights {
		name, ok := ScorerName(key)
		switch {
		case !ok:
			var names []string
			for _, e := range scorers {
				names = append(names, e.Name)
			}
			return fmt.Errorf("unknown scorer %q; want one of %s", key, strings.Join(names, ", "))
		case math.IsNaN(w), math.IsInf(w, 0), w < 0:
			return fmt.Errorf("weight of %s is %v; want a number that is not negative", key, w)
		case slices.ContainsFunc(p.scorers, func(s weighted) bool { return s.name == name }):
			return fmt.Errorf("scorer %s is given twice, once as %s", name, key)
		case w == 0:
			continue
		}
		i := slices.IndexFunc(scorers, func(e scorerEntry) bool { return e.Name == name })
		p.scorers = append(p.scorers, weighted{scorers[i].make(), name, w})
	}
	if len(p.scorers) == 0 {
		return fmt.Errorf("all weights are 0; want at least one above")
	}
	slices.SortFunc(p.scorers, func(a, b weighted) int { return cmp.Compare(a.name, b.name) })
	p.pick = pickWeighted
	return nil
}
