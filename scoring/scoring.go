// Package scoring decides which endpoint serves a request. A decision is a function of a [Request], a [pool.Snapshot], the
// live counters of its endpoints and what has been learned of them; it performs no IO and takes no locks.
//
// It must not import a network or logging package, nor proxy, config or metrics, and it reads no wall clock: time and
// randomness come in as arguments and fields, so that the same code runs in the gateway, in a virtual-time simulation and
// in `kvgate explain`.
package scoring

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// MaxTried is how many endpoints a [Request] can exclude.
const MaxTried = 4

// A Request is the little that a decision needs to know of a request. It is not changed by this package.
type Request struct {
	// Target is what the request's model stands for, looked up in the very snapshot that is passed along.
	Target *pool.Target

	PromptTokens int32 // length of the prompt, if known or estimated by the caller; 0: estimated from PromptBytes
	PromptBytes  int32 // length of the prompt as it stands in the body
	ExactPrompt  bool  // PromptTokens is exact: the prompt came as token ids
	MaxTokens    int32 // most output tokens per answer that the request allows; 0 is unknown
	N            int32 // answers asked for; 0 counts as 1
	Stream       bool
	Priority     int8

	// Prefix holds the chained hashes of the prompt's blocks from its start, as made by [HashPrefix]; nil if nobody asked.
	Prefix []uint64
	// BlockTokens is the number of tokens that each element of Prefix stands for, where blocks were cut by tokens; 0 where
	// HashPrefix cut them by bytes.
	BlockTokens int32
	Session     uint64 // hash of the client's session key; 0 is none

	Tried [MaxTried]*pool.Endpoint // endpoints that this request has failed on; nil ones don't count
	// SlotFree says that [Policy.Room] has found an endpoint with a slot for the adapter: one without is not to be preferred to
	// it, for whatever reason.
	SlotFree bool
}

// adapter is the hash of the request's adapter; 0 for a base model.
func (r *Request) adapter() uint64 {
	if r.Target.Adapter {
		return r.Target.Hash
	}
	return 0
}

// A Decision is the endpoint chosen for a request, and what the choice rested on. It is a value; nothing in it changes.
type Decision struct {
	Endpoint *pool.Endpoint
	Row      *pool.Row // of the snapshot that was passed in
	RunnerUp *pool.Endpoint
	// Cost and RunnerUpCost are in prefill tokens under `auto` (less is better), and the weighted total with weights (more is
	// better). Simple policies leave them 0.
	Cost, RunnerUpCost float32

	Claim        pool.Claim    // what was booked
	PromptTokens int32         // as given or estimated
	CachedTokens int32         // of them, believed to be in the endpoint's prefix cache
	OutputTokens int32         // expected, for all answers
	AheadTokens  int32         // pending prefill tokens found on the endpoint, foreign ones estimated
	FirstToken   time.Duration // predicted time to the first token; see [Policy.PredictFirstToken]

	Panic bool  // every endpoint that serves the model was down or ejected, so all of them were tried
	Busy  bool  // every one asked to be left alone, so that was not heeded
	Stale bool  // the endpoint's load was unknown or too old: ranked on bookings alone
	Cold  bool  // the adapter was not believed to be on the endpoint
	Rank  int32 // number of the data-parallel engine that it is for, from 1; 0 leaves that to the server
	Looks int8  // times the table was looked at; more than 1 when another request booked in between

	waits       bool   // the first token tells of an adapter's load or of waiting for its slot, not of prefill alone
	model       uint64 // hash of what was asked for, for learning
	promptBytes int32
}

// Errors of [Policy.Choose]. They are returned as they are or wrapped; ask with errors.Is.
var (
	// ErrNoEndpoints: no endpoint serves the model and may get requests, or every one has been tried.
	ErrNoEndpoints = errors.New("no_endpoints")
	// ErrTooLong: the request is longer than the context or the whole KV cache of every endpoint.
	ErrTooLong = errors.New("the request does not fit into any endpoint")
)

// Config describes a [Policy]. The zero Config is the policy `auto` with defaults.
type Config struct {
	Name    string             // a name of [Policies]; "" is auto, or weighted if Weights are given
	Weights map[string]float64 // by names of [Scorers]; accepts spellings such as kvCache for kv_cache

	// Rand returns a uniform number below n. It breaks ties; nil is math/rand/v2. It may be called by many goroutines.
	Rand func(n uint64) uint64
	// StaleAfter is how old a load may be to be believed (default 10 s).
	StaleAfter time.Duration
	// SlowStart is how long an endpoint that came back from an ejection is handicapped (default 10 s).
	SlowStart time.Duration

	// Learner holds what is learned per model; nil makes a new one. Sharing one keeps it across reloads.
	Learner *Learner
	// Index remembers which prefixes endpoints hold; nil does without. Policies may share one.
	Index *Index

	Cost CostWeights // of `auto`; zero fields mean their defaults
}

// A Policy decides. It is safe for concurrent use and immutable except for what it learns.
type Policy struct {
	name    string
	pick    func(p *Policy, req *Request, c *Candidates) int // position chosen; nil for auto
	scorers []weighted
	learn   *Learner
	index   *Index
	rand    func(uint64) uint64
	cost    CostWeights

	staleAfter, slowStart pool.Instant

	turn    atomic.Uint64 // round_robin
	scratch sync.Pool     // of *scratch
}

type weighted struct {
	Scorer
	name   string
	weight float64
}

const (
	defaultStaleAfter = 10 * time.Second
	defaultSlowStart  = 10 * time.Second
)

// New returns the policy that c describes. It fails on unknown names and on weights that are not positive.
func New(c Config) (*Policy, error) {
	p := &Policy{
		name:       c.Name,
		rand:       c.Rand,
		learn:      c.Learner,
		index:      c.Index,
		cost:       c.Cost.withDefaults(),
		staleAfter: pool.Instant(orDefault(c.StaleAfter, defaultStaleAfter)),
		slowStart:  pool.Instant(orDefault(c.SlowStart, defaultSlowStart)),
	}
	if p.rand == nil {
		p.rand = rand.Uint64N
	}
	if p.learn == nil {
		p.learn = NewLearner()
	}
	p.scratch.New = func() any { return new(scratch) }
	if len(c.Weights) > 0 {
		if c.Name != "" && c.Name != weightedName {
			return nil, fmt.Errorf("policy %q takes no weights", c.Name)
		}
		p.name = weightedName
		return p, p.setWeights(c.Weights)
	}
	if p.name == "" {
		p.name = autoName
	}
	for i := range policies {
		if policies[i].Name == p.name {
			p.pick = policies[i].pick
			p.turn.Store(p.rand(1 << 32)) // round robin starts anywhere
			return p, nil
		}
	}
	return nil, fmt.Errorf("unknown policy %q; want one of %s, or weights", c.Name, strings.Join(PolicyNames(), ", "))
}

func orDefault[T comparable](v, d T) T {
	var zero T
	if v == zero {
		return d
	}
	return v
}

// Name returns the policy's name; "weighted" for one that was given weights.
func (p *Policy) Name() string { return p.name }

// Learner returns what the policy learns into.
func (p *Policy) Learner() *Learner { return p.learn }

// NeedsPrefix reports whether decisions get better when Request.Prefix is set, so that hashing prompts is worth its time.
func (p *Policy) NeedsPrefix() bool {
	switch p.name {
	case autoName:
		return p.index != nil
	case consistentHashName:
		return true
	case weightedName:
		for _, s := range p.scorers {
			if s.name == "prefix" {
				return true
			}
		}
	}
	return false
}

// maxLooks bounds how often Choose looks again after it lost a race. Losing takes another booking on the same endpoint
// within a microsecond; after so many of them the choice stands as it is.
const maxLooks = 8

// Choose picks an endpoint for req and books the request on it into b, which must be free. Between the look at an endpoint
// and the booking nobody else books on it: a choice that lost that race looks again, so a burst spreads though every
// request of it reads the same snapshot. It does not allocate.
func (p *Policy) Choose(req *Request, s *pool.Snapshot, now pool.Instant, b *pool.Booking) (d Decision, err error) {
	if req.Target == nil {
		return d, ErrNoEndpoints
	}
	sc := p.scratch.Get().(*scratch)
	defer p.release(sc)
	for look := int8(1); ; look++ {
		version, err := p.run(req, s, now, sc, nil, &d)
		if err != nil {
			return d, err
		}
		d.Looks = look
		if look == maxLooks {
			d.Row.Book(b, d.Claim)
		} else if !d.Row.TryBook(b, version, d.Claim) {
			continue
		}
		p.chosen(&d, sc)
		return d, nil
	}
}

// chosen tells those who remember choices.
func (p *Policy) chosen(d *Decision, sc *scratch) {
	req := sc.candidates.req
	if p.index != nil && len(req.Prefix) > 0 {
		p.index.insert(req, d.Row, sc.candidates.scale)
		if d.Rank > 0 {
			p.index.insertRank(req, d.Row, d.Rank, sc.candidates.scale)
		}
	}
	if p.index != nil && req.Target.Adapter && len(req.Target.Rows) > lookAtAll {
		p.index.insertAdapter(req.Target, d.Row)
	}
	for i := range p.scorers {
		if o, ok := p.scorers[i].Scorer.(ChoiceObserver); ok {
			o.Chosen(req, d.Row)
		}
	}
}

// run makes one decision. It is what Choose and Explain have in common; rec is nil in Choose. The version is that of the
// chosen row, read before its counters were. The decision is filled in where it is wanted: copies of it would cost the
// stack of every stream, which goes on standing below what its choice needed.
func (p *Policy) run(req *Request, s *pool.Snapshot, now pool.Instant, sc *scratch, rec *recorder, d *Decision) (version uint64, err error) {
	sc.prepare(p, req, s, now)
	if p.pick == nil && p.name == autoName {
		return p.auto(sc, rec, d)
	}
	c := &sc.candidates
	if err := c.gather(rec); err != nil {
		return 0, err
	}
	pick := p.pick(p, req, c)
	p.decide(c, int(c.index[pick]), c.cached[pick], d)
	if len(p.scorers) > 0 {
		d.Cost = float32(c.totals[pick])
		if second := runnerUp(c, pick); second >= 0 {
			d.RunnerUp, d.RunnerUpCost = c.Row(second).Endpoint, float32(c.totals[second])
		}
	}
	return c.versions[pick], nil
}

// scratch is the memory of one decision.
type scratch struct {
	candidates Candidates
	cost       []float32 // of auto, by position in Target.Rows
	versions   []uint64  // likewise
	adapters   []adapterView
	unpriced   []bool    // by position: the adapter's price is a bound
	least      []float32 // that bound
	pricings   int       // rows that may still be looked at; 0 where all have been
	sharers    float32
	elsewhere  bool // requests for the adapter are in flight somewhere
	holders    [maxMatches]int32
	price      price
	matches    [maxMatches]match
	seen       slotSet
}

func (p *Policy) release(sc *scratch) {
	// Pooled scratch must not keep snapshots alive.
	c := &sc.candidates
	c.p, c.req, c.snapshot, c.target, c.rec = nil, nil, nil, nil, nil
	p.scratch.Put(sc)
}

func (sc *scratch) prepare(p *Policy, req *Request, s *pool.Snapshot, now pool.Instant) {
	c := &sc.candidates
	c.p, c.req, c.snapshot, c.target, c.now = p, req, s, req.Target, now
	m := p.learn.model(req.Target.Hash)
	c.prompt = p.learn.promptTokens(m, req)
	c.output = p.learn.outputTokens(m, req)
	c.need = c.prompt + c.output
	c.least = c.prompt
	if !req.ExactPrompt {
		// An estimate may be far off for some language or encoding; only what surely does not fit is filtered.
		c.least = c.prompt / 2
	}
	c.tries = 0
	for _, e := range req.Tried {
		if e != nil {
			c.tries++
		}
	}
	c.matched = sc.matches[:0]
	if p.index != nil && len(req.Prefix) > 0 {
		c.scale = blockScale{blockTokens: req.BlockTokens, most: c.prompt - 1}
		if req.BlockTokens == 0 {
			if c.scale.perByte = 1 / p.learn.bytesPerToken(m); req.PromptBytes > 0 {
				c.scale.perByte = float64(c.prompt) / float64(req.PromptBytes)
			}
		}
		c.matched = p.index.lookup(req, s, c.matched, &sc.seen)
		for i := range c.matched {
			m := &c.matched[i]
			m.tokens = p.index.believe(c.scale.tokens(m.blocks))
		}
	}
}

// decide fills in d for a row of the snapshot.
func (p *Policy) decide(c *Candidates, row int, cached int32, d *Decision) {
	r := &c.snapshot.Rows[row]
	b := r.Booked()
	fresh := r.Fresh(c.now, p.staleAfter)
	rank := int32(0)
	if ranks := r.Endpoint.Ranks(); ranks != nil && (p.name == autoName || p.name == weightedName) {
		blocks := 0
		for i := range c.matched {
			if c.matched[i].row == int32(row) {
				blocks = c.matched[i].blocks
			}
		}
		rank, cached = p.chooseRank(c, r, ranks, blocks)
	}
	ahead := int32(b.PendingTokens)
	if fresh {
		ahead += r.Foreign.Waiting * int32(p.learn.meanNewTokens())
	}
	*d = Decision{
		Endpoint:     r.Endpoint,
		Row:          r,
		PromptTokens: c.prompt,
		CachedTokens: cached,
		OutputTokens: c.output,
		AheadTokens:  ahead,
		Stale:        !fresh,
		Panic:        c.tier == tierEjected,
		Busy:         c.tier == tierBusy,
		Rank:         rank,
		Claim: pool.Claim{
			PendingTokens: int64(max(c.prompt-cached, 1)),
			KVTokens:      int64(float32(c.need) - p.cost.Shared*float32(cached)),
			Rank:          rank,
			Adapter:       c.req.adapter(),
			At:            c.now,
		},
		model:       c.target.Hash,
		promptBytes: c.req.PromptBytes,
	}
	d.FirstToken = p.learn.predict(r.Endpoint, ahead, int32(d.Claim.PendingTokens))
	if c.target.Adapter {
		v := viewAdapter(r, c.target, fresh)
		d.Cold = !v.known
		d.waits = !v.running
		if d.Cold {
			d.FirstToken += time.Duration(p.learn.adapterLoadSeconds(r.Endpoint) * float64(time.Second))
		}
	}
}

// PredictFirstToken is the time from now after which a request that shows no first token, because it is not streamed, has
// most likely been prefilled: what was ahead of it and its own new tokens over the endpoint's learned prefill rate. The
// caller calls Booking.FirstTokenOf then.
func (p *Policy) PredictFirstToken(d *Decision) time.Duration { return d.FirstToken }
