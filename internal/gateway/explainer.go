package gateway

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/scoring"
)

const (
	keptExplanations   = 1024
	explainedEndpoints = 16 // told of one decision
)

// An explainer keeps the explanations of as many decisions as a small share of one core pays for: all of them where there
// are some hundred a second and a few endpoints, some of them where there is more to explain. It implements proxy.Explainer.
type explainer struct {
	share float64 // of one core; 0: nothing is explained
	log   *zap.Logger
	base  time.Time
	next  atomic.Int64 // nanoseconds after base when there is time for another one; busy while one is made
	cost  int64        // of one, in nanoseconds; of whoever set next to busy
	n     atomic.Uint64
	slots [keptExplanations]atomic.Pointer[explained]
}

type explained struct {
	n uint64
	e scoring.Explanation
}

const busy = 1<<63 - 1

func newExplainer(share float64, log *zap.Logger) *explainer {
	return &explainer{share: share, log: log, base: time.Now()}
}

// Explain implements proxy.Explainer.
func (x *explainer) Explain(p *scoring.Policy, q *scoring.Request, s *pool.Snapshot, now pool.Instant) uint64 {
	if x.share <= 0 {
		return 0
	}
	began, due := int64(time.Since(x.base)), x.next.Load()
	if began < due || !x.next.CompareAndSwap(due, busy) {
		return 0
	}
	var kept *explained
	done := make(chan struct{})
	go func() { // on a stack of its own: the stream that follows would keep it
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				x.log.Error("panic while explaining a decision", zap.Any("panic", v), zap.Stack("stack"))
			}
		}()
		e := p.Explain(q, s, now)
		e.Trim(explainedEndpoints)
		kept = &explained{x.n.Add(1), e}
	}()
	<-done
	// The least of late is what one costs: the others waited for a processor.
	end := int64(time.Since(x.base))
	if took := end - began; x.cost == 0 || took < x.cost {
		x.cost = took
	} else {
		x.cost = min(took, x.cost+x.cost/16+1)
	}
	x.next.Store(began + int64(float64(x.cost)/x.share))
	if kept == nil {
		return 0
	}
	x.slots[kept.n%keptExplanations].Store(kept)
	return kept.n
}

// get returns what was kept under n.
func (x *explainer) get(n uint64) (e scoring.Explanation, ok bool) {
	if k := x.slots[n%keptExplanations].Load(); k != nil && k.n == n {
		return k.e, true
	}
	return e, false
}
