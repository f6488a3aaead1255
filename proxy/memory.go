package proxy

import (
	"math"
	"runtime/debug"
	"runtime/metrics"
)

// A memoryGuard keeps the gateway below the memory limit of the Go runtime (GOMEMLIMIT), if there is one: beyond that
// limit the collector would take all processor time, and beyond the container's, which is a little higher, the kernel
// would end the process and every stream in it.
//
// Two things are done. The bytes of request bodies in flight are bounded by what the limit leaves for them, where that is
// less than what is configured. And while what is in use comes close to the limit all the same, no body gets memory.
type memoryGuard struct {
	limit   int64 // bytes; 0: none
	samples [3]metrics.Sample
}

const (
	// bodyShare is the part of the free memory that bodies in flight may take. The rest is for answers, for connections,
	// for what a body is copied into when it grows or gets another model's name, and for the collector to be seldom.
	bodyShare = 0.5
	// tightShare is the part of the limit that may be in use, after a collection, before bodies are refused.
	tightShare = 0.85
)

func newMemoryGuard() *memoryGuard {
	g := &memoryGuard{samples: [3]metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
	}}
	if limit := debug.SetMemoryLimit(-1); limit != math.MaxInt64 {
		g.limit = limit
	}
	return g
}

// bodies returns how many bytes of bodies there is room for, configured at most.
func (g *memoryGuard) bodies(configured int64) int64 {
	if g.limit == 0 {
		return configured
	}
	metrics.Read(g.samples[:])
	free := g.limit - int64(g.samples[1].Value.Uint64()) - int64(g.samples[2].Value.Uint64())
	return min(configured, max(0, int64(bodyShare*float64(free))))
}

// tight reports whether what was in use after the last collection is close to the limit.
func (g *memoryGuard) tight() bool {
	if g.limit == 0 {
		return false
	}
	metrics.Read(g.samples[:])
	inUse := g.samples[0].Value.Uint64() + g.samples[1].Value.Uint64()
	return float64(inUse) > tightShare*float64(g.limit)
}
