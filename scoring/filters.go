package scoring

import (
	"kvgate/pool"
)

// A Filter is a reason for which an endpoint does not get a request.
type Filter uint8

// The filters, in the order in which they are asked. The first that objects is the reason shown.
const (
	FilterServes   Filter = 1 << iota // it doesn't serve the model, as far as is known
	FilterDraining                    // it takes no new requests
	FilterAsleep                      // its weights are offloaded
	FilterNotReady                    // discovery says that it is not ready
	FilterDown                        // it takes no connections
	FilterEjected                     // passive health checking keeps it out
	FilterFit                         // the request doesn't fit its context or its whole KV cache
	FilterNotTried                    // this request has failed on it
)

// Filters describes the filters.
func Filters() []Info {
	return []Info{
		{Name: "serves", Doc: "The endpoint serves the model or adapter.", Formula: "row of the target"},
		{Name: "draining", Doc: "The endpoint is not draining.", Formula: "no such state"},
		{Name: "asleep", Doc: "The endpoint's weights are not offloaded.", Formula: "no such state"},
		{Name: "not_ready", Doc: "Discovery does not say that the endpoint is not ready.", Formula: "no such state"},
		{Name: "down", Doc: "The endpoint takes connections. When all are down or ejected, all are used (fail open).", Formula: "no such state"},
		{Name: "ejected", Doc: "Passive health checking has not ejected the endpoint. When all are down or ejected, all are used (fail open).", Formula: "ejected_until ≤ now"},
		{Name: "fit", Doc: "The request fits the endpoint's context length and its whole KV cache. An estimated prompt counts half, so only what surely doesn't fit is kept out.", Formula: "prompt ≤ min(max_model_len, kv_capacity)"},
		{Name: "not_tried", Doc: "The request has not failed on this endpoint before.", Formula: "endpoint ∉ tried"},
	}
}

// String returns the filter's name.
func (f Filter) String() string {
	switch f {
	case FilterServes:
		return "serves"
	case FilterDraining:
		return "draining"
	case FilterAsleep:
		return "asleep"
	case FilterNotReady:
		return "not_ready"
	case FilterDown:
		return "down"
	case FilterEjected:
		return "ejected"
	case FilterFit:
		return "fit"
	case FilterNotTried:
		return "not_tried"
	}
	return ""
}

// A tier is how willingly a row is used: rows of a tier are considered only if there is none of a lower one.
type tier uint8

const (
	tierGood    tier = iota
	tierBusy         // it asked to be left alone for a while (429 or 503 with Retry-After)
	tierEjected      // panic mode: every endpoint that serves the model is down or ejected
	tierOut          // a filter objects
)

// judge asks the filters about r. The filter returned is the one that objects; FilterDown and FilterEjected
// come with tierEjected, which is of use when nothing else is left.
func (c *Candidates) judge(r *pool.Row) (tier, Filter) {
	switch s := r.State; {
	case s&pool.Unroutable == 0:
	case s&pool.Draining != 0:
		return tierOut, FilterDraining
	case s&pool.Sleeping != 0:
		return tierOut, FilterAsleep
	default:
		return tierOut, FilterNotReady
	}
	if c.tries > 0 && c.tried(r.Endpoint) {
		return tierOut, FilterNotTried
	}
	if !c.fits(r) {
		return tierOut, FilterFit
	}
	if r.State&pool.Unreachable != 0 {
		return tierEjected, FilterDown
	}
	if r.EjectedUntil() > c.now {
		return tierEjected, FilterEjected
	}
	if r.BusyUntil() > c.now {
		return tierBusy, 0
	}
	return tierGood, 0
}

func (c *Candidates) tried(e *pool.Endpoint) bool {
	for _, t := range c.req.Tried {
		if t == e {
			return true
		}
	}
	return false
}

func (c *Candidates) fits(r *pool.Row) bool {
	if r.KVCapacity != 0 && c.least > r.KVCapacity {
		return false
	}
	// Fast path: it fits the smallest context of all.
	if c.target.MinModelLen == 0 || int64(c.least) <= c.target.MinModelLen {
		return true
	}
	if r.Served != nil {
		for i := range r.Served.Models {
			if m := &r.Served.Models[i]; m.ID == c.target.Name {
				return m.MaxModelLen == 0 || int64(c.least) <= m.MaxModelLen
			}
		}
	}
	return true
}

// nothing is the error for a request that every row was filtered for.
func (c *Candidates) nothing() error {
	fitting, tried := 0, 0
	for _, ri := range c.target.Rows {
		r := &c.snapshot.Rows[ri]
		if r.State&pool.Unroutable != 0 {
			continue
		}
		if !c.fits(r) {
			continue
		}
		fitting++
		if c.tried(r.Endpoint) {
			tried++
		}
	}
	if fitting == 0 {
		for _, ri := range c.target.Rows {
			if r := &c.snapshot.Rows[ri]; r.State&pool.Unroutable == 0 {
				return ErrTooLong
			}
		}
	}
	return ErrNoEndpoints
}

// Candidates are the rows that a request can go to, with what is booked on them read once, so that every scorer of a
// decision sees the same numbers. Positions run from 0 to Len()-1.
type Candidates struct {
	p        *Policy
	req      *Request
	snapshot *pool.Snapshot
	target   *pool.Target
	now      pool.Instant

	prompt, output, need, least int32 // tokens; least is the least the prompt can be

	tries   int
	tier    tier
	matched []match
	scale   blockScale // of matched

	index    []int32 // into snapshot.Rows
	versions []uint64
	booked   []pool.Booked
	cached   []int32
	scores   []float64
	totals   []float64
	rec      *recorder // nil in Choose
}

// Len returns the number of candidates.
func (c *Candidates) Len() int { return len(c.index) }

// Row returns the row of candidate i.
func (c *Candidates) Row(i int) *pool.Row { return &c.snapshot.Rows[c.index[i]] }

// Booked returns what this gateway holds on candidate i.
func (c *Candidates) Booked(i int) pool.Booked { return c.booked[i] }

// Cached returns how many tokens of the prompt candidate i is believed to have in its prefix cache.
func (c *Candidates) Cached(i int) int32 { return c.cached[i] }

// Now is when the decision is made.
func (c *Candidates) Now() pool.Instant { return c.now }

// PromptTokens is the length of the prompt, given or estimated.
func (c *Candidates) PromptTokens() int32 { return c.prompt }

// NeedTokens is the prompt and the output expected.
func (c *Candidates) NeedTokens() int32 { return c.need }

// Fresh reports whether the load of candidate i can be believed.
func (c *Candidates) Fresh(i int) bool { return c.Row(i).Fresh(c.now, c.p.staleAfter) }

// Requests is the number of requests on candidate i: ours now, foreign ones as of the scrape. known is false when the
// foreign ones aren't known.
func (c *Candidates) Requests(i int) (n int64, known bool) {
	r := c.Row(i)
	if !c.Fresh(i) || r.Load.Known&(pool.KnowsRunning|pool.KnowsWaiting) == 0 {
		return c.booked[i].Requests, false
	}
	return c.booked[i].Requests + int64(r.Foreign.Requests), true
}

// KV returns the KV tokens in use on candidate i and its capacity, after bookings. known is false when nothing was
// scraped that tells of foreign use.
func (c *Candidates) KV(i int) (used, capacity float64, known bool) {
	return kvUse(c.Row(i), c.booked[i].KVTokens, c.Fresh(i))
}

// gather fills c with the rows of the best tier.
func (c *Candidates) gather(rec *recorder) error {
	best := tierOut
	c.index, c.versions, c.booked, c.cached = c.index[:0], c.versions[:0], c.booked[:0], c.cached[:0]
	for _, ri := range c.target.Rows {
		r := &c.snapshot.Rows[ri]
		t, f := c.judge(r)
		if rec != nil {
			rec.judged(c, ri, t, f)
		}
		if t > best || t == tierOut {
			continue
		}
		if t < best {
			best = t
			c.index, c.versions, c.booked, c.cached = c.index[:0], c.versions[:0], c.booked[:0], c.cached[:0]
		}
		c.index = append(c.index, ri)
		c.versions = append(c.versions, r.Version()) // before Booked
		c.booked = append(c.booked, r.Booked())
		c.cached = append(c.cached, 0)
	}
	if best == tierOut {
		return c.nothing()
	}
	c.tier = best
	for _, m := range c.matched {
		if i := position(c.index, m.row); i >= 0 {
			c.cached[i] = m.tokens
		}
	}
	return nil
}
