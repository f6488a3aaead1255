// Package discovery finds the endpoints of each pool: sources say where they are, a [Manager] runs the sources and hands
// every pool its complete set. A new source is one file: its Run, and a register line; its keys are a struct in config.
//
// It must not import proxy, metrics or scoring: it knows where endpoints are, not how they are.
package discovery

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"kvgate/config"
	"kvgate/pool"
)

// A Target is where one endpoint is. Sources leave Pool empty, and Dialect too where the pool's holds; the [Manager]
// fills them in.
type Target = pool.Spec

// A Source finds the endpoints of one pool.
type Source interface {
	// Name is the kind of source: static, file, dns, kubernetes.
	Name() string

	// Run calls emit with the complete set of targets each time it may have changed, or with what kept it from finding
	// out: then the last set holds. With both, the set is complete and the error says what is amiss all the same; a set
	// without targets must then not be nil. It never emits part of a set. The slice belongs to the receiver. Run returns when
	// ctx ends; if it returns earlier, it is started again after a pause.
	Run(ctx context.Context, emit func([]Target, error)) error
}

// Env is what a source may need besides its configuration.
type Env struct {
	Dialects []string // known dialects, to refuse others; nil accepts any
}

// A Kind is a registered kind of source.
type Kind struct {
	Name, Doc string

	// settings returns what the configuration says about this kind, comparable with reflect.DeepEqual; ok is false if
	// the pool does not use it.
	settings func(*config.Discovery) (settings any, ok bool)
	open     func(settings any, env Env) Source
}

var kinds []Kind

// register adds a kind of source. It is called from init functions only.
func register[S any](name, doc string, settings func(*config.Discovery) (S, bool), open func(S, Env) Source) {
	if slices.ContainsFunc(kinds, func(k Kind) bool { return k.Name == name }) {
		panic("BUG: source " + name + " registered twice")
	}
	kinds = append(kinds, Kind{
		Name: name, Doc: doc,
		settings: func(d *config.Discovery) (any, bool) { return settings(d) },
		open:     func(s any, env Env) Source { return open(s.(S), env) },
	})
	slices.SortFunc(kinds, func(a, b Kind) int { return strings.Compare(a.Name, b.Name) })
}

// Kinds lists the registered kinds by name.
func Kinds() []Kind { return slices.Clone(kinds) }

// jitter returns d give or take a tenth, so that many gateways do not ask at the same instant.
func jitter(d time.Duration) time.Duration {
	return d - d/10 + rand.N(d/5+1)
}

// sleep waits for d or until ctx ends, and reports whether it was the former.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
