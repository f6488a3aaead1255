package scoring

import (
	"slices"
	"time"

	"kvgate/pool"
)

// Limits say when an endpoint has enough to do, so that a request that comes to it would only wait there.
type Limits struct {
	// Backlog is how much prefill work may be ahead of a request, as time by the endpoint's learned rate (default 100 ms).
	// It takes some to keep a server busy while the gateway hears of a first token and sends the next request: with 10 ms, a
	// first token of an endpoint at its limit comes as soon as at 90 % of it, and a tenth of the throughput is lost; with
	// 100 ms it takes twice as long, and nothing is lost (docs/admission.md).
	Backlog time.Duration
	// KVShare is the share of the KV cache, 0..1, that may be in use or reserved (default 0.9).
	KVShare float64
	// Requests is how many may be on an endpoint at a time, running or waiting; 0: no limit.
	Requests int
	// Seen has an endpoint that nobody has looked at yet not count: discovery may name it before its server is up.
	Seen bool
}

const (
	defaultBacklog = 100 * time.Millisecond
	defaultKVShare = 0.9
)

// A Room says whether there is an endpoint that can start a request soon.
type Room uint8

// The answers of [Policy.Room].
const (
	Free      Room = iota // there is one; or nobody can tell, as when all are ejected
	Saturated             // each that could take it has enough to do
	Nobody                // there is none that serves the model, or none that is ready
	NoSlot                // each has enough to do, or others' adapters hold all its slots; there is one of the latter
)

// Room reports whether some endpoint can start req soon. It looks at endpoints until it finds one, so that with little to do
// it costs a look at one row, takes no lock and does not allocate.
//
// The answer doesn't depend on the size of the request: otherwise small ones would for ever go before a large one that waits
// for room.
func (p *Policy) Room(req *Request, s *pool.Snapshot, now pool.Instant, l *Limits) Room {
	if req.Target == nil {
		return Nobody
	}
	usable, ready, noSlot := false, false, false
	for _, ri := range req.Target.Rows {
		r := &s.Rows[ri]
		if r.State&(pool.Unroutable|pool.Unreachable) != 0 {
			continue
		}
		if l.Seen && r.ScrapedAt == 0 && r.Served == nil && r.State&pool.Unmeasured == 0 {
			continue
		}
		ready = true
		if r.EjectedUntil() > now {
			continue
		}
		usable = true
		if r.BusyUntil() > now || !p.hasRoom(r, now, l) {
			continue
		}
		if !req.Target.Adapter || p.hasSlot(r, req.Target, now) {
			return Free
		}
		noSlot = true
	}
	switch {
	case noSlot:
		return NoSlot
	case usable:
		return Saturated
	case ready: // all of them ejected: to try them is better than to wait
		return Free
	}
	return Nobody
}

// hasRoom reports whether r is within the limits.
func (p *Policy) hasRoom(r *pool.Row, now pool.Instant, l *Limits) bool {
	b := r.Booked()
	fresh := r.Fresh(now, p.staleAfter)
	requests, pending := b.Requests, float64(b.PendingTokens)
	if fresh {
		requests += int64(r.Foreign.Requests)
		pending += float64(r.Foreign.Waiting) * p.learn.meanNewTokens()
	}
	if requests == 0 {
		return true // an idle endpoint has room, whatever else is said of it
	}
	if l.Requests > 0 && requests >= int64(l.Requests) {
		return false
	}
	backlog := orDefault(l.Backlog, defaultBacklog).Seconds() * p.learn.prefillRate(r.Endpoint)
	if pending > backlog {
		return false
	}
	_, learned := r.Learned()
	capacity := float64(r.KVCapacity)
	if capacity == 0 {
		capacity = float64(learned)
	}
	share := orDefault(l.KVShare, defaultKVShare)
	if capacity == 0 { // it tells how full it is at most
		return !fresh || !r.Load.Known.Has(pool.KnowsKVCacheUtilization) || r.Load.KVCacheUtilization < share
	}
	used, _, _ := kvUse(r, b.KVTokens, fresh)
	full := used / (share * capacity)
	return full < 1 && pending <= backlog*backlogLeft(full)
}

// backlogLeft is the part of the backlog that an endpoint is left which is that full, 0..1 of what it may be.
//
// Decoding many requests makes steps longer, and where KV space is what runs short a queue before prefill buys nothing: what
// waits there will find no more room than it would later. With answers of 211 tokens at 120 % load the whole backlog has first
// tokens come after 2.3 times what it takes at 90 %, and this after 1.4 times; output is 3 % less, and at 90 % load nothing changes
// (bench/policies, docs/adr/0006).
func backlogLeft(full float64) float64 {
	return min(1, max(leastBacklog, (backlogTo-full)/(backlogTo-backlogFrom)))
}

const (
	backlogFrom  = 0.6
	backlogTo    = 0.8
	leastBacklog = 0.35
)

// hasSlot reports whether a request for an adapter could be in r's batch: its adapter is in it already, or fewer others have
// requests there than a batch can hold. A server passes over a request that finds no slot, while others may have one. Where
// the number of slots is not told, nobody waits for one.
func (p *Policy) hasSlot(r *pool.Row, t *pool.Target, now pool.Instant) bool {
	l, m := r.Load, r.Endpoint.Adapters()
	if !l.Known.Has(pool.KnowsMaxAdapters) || l.MaxAdapters <= 0 {
		return true
	}
	// Of what the page names, only what others sent is news: ours may have ended since, and then its slot is free.
	foreign := r.Foreign.Requests > 0 && r.Fresh(now, p.staleAfter)
	slots := int(l.MaxAdapters)
	if !foreign && m.Active() < slots { // Fast path.
		return true
	}
	use, _ := m.Use(t.Hash)
	if use.Started > 0 {
		return true
	}
	running, waiting, _ := m.Others(t.Hash)
	taken := running + waiting
	switch {
	case !foreign:
	case l.Known.Has(pool.KnowsAdapters):
		if _, listed := slices.BinarySearch(l.Adapters, t.Name); listed {
			return true
		}
		taken = max(taken, len(l.Adapters))
	case l.Known.Has(pool.KnowsAdapterSlots):
		taken = max(taken, int(l.AdapterSlotsUsed))
	}
	return taken < slots
}

// A Demand is how many endpoints the work of a pool takes, by what the ones that there are can do.
type Demand struct {
	Ready     int     // endpoints that may get requests
	Endpoints float64 // that it takes; with a fraction, so that it can be averaged
}

// horizonSeconds is the time in which waiting work should have been prefilled by the endpoints that are asked for.
const horizonSeconds = 10

// Demand is what the work booked on rows, a pool's, and what waits for it in the gateway, takes: the largest of the endpoints
// whose prefill it keeps busy, of those whose KV cache it fills, and, where requests are limited, of those that may take them.
//
//	prefill  = Σ min(1, pending/backlog) + tokens / (rate · 10 s)
//	kv       = (Σ used + tokens) / (share · capacity)
//	requests = (Σ running + waiting) / limit
//
// waiting is the number of requests that wait, and tokens theirs, prompt and output. Rate and capacity are means over rows
// that tell; without any, priors.
func (p *Policy) Demand(rows []pool.Row, now pool.Instant, l *Limits, waiting int, tokens int64) (d Demand) {
	backlog := orDefault(l.Backlog, defaultBacklog).Seconds()
	var rate, capacity, busy, used float64
	requests := int64(waiting)
	rates, capacities := 0, 0
	for i := range rows {
		r := &rows[i]
		if r.Healthy(now) {
			d.Ready++
		}
		b, fresh := r.Booked(), r.Fresh(now, p.staleAfter)
		pending := float64(b.PendingTokens)
		requests += b.Requests
		if fresh {
			pending += float64(r.Foreign.Waiting) * p.learn.meanNewTokens()
			requests += int64(r.Foreign.Requests)
		}
		e := p.learn.prefillRate(r.Endpoint)
		busy += min(1, pending/max(1, backlog*e))
		u, c, _ := kvUse(r, b.KVTokens, fresh)
		used += u
		if r.Endpoint.PrefillTokensPerSecond.Load() > 0 {
			rate += e
			rates++
		}
		if c > 0 && r.KVCapacity > 0 {
			capacity += c
			capacities++
		}
	}
	if rates > 0 {
		rate /= float64(rates)
	} else {
		rate = first(p.learn.rate.Load(), priorPrefillRate)
	}
	if capacities > 0 {
		capacity /= float64(capacities)
	} else {
		capacity = priorKVCapacity
	}
	d.Endpoints = max(busy+float64(tokens)/(rate*horizonSeconds), (used+float64(tokens))/(orDefault(l.KVShare, defaultKVShare)*capacity))
	if l.Requests > 0 {
		d.Endpoints = max(d.Endpoints, float64(requests)/float64(l.Requests))
	}
	return d
}

// Tokens estimates what req takes: its prompt, and prompt and output together.
func (p *Policy) Tokens(req *Request) (prompt, all int32) {
	if req.Target == nil {
		return req.PromptTokens, req.PromptTokens
	}
	m := p.learn.model(req.Target.Hash)
	prompt = p.learn.promptTokens(m, req)
	return prompt, prompt + p.learn.outputTokens(m, req)
}
