package pool

import (
	"cmp"
	"fmt"
	"math"
	"net/url"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Options configure a [Table].
type Options struct {
	// PublishEvery bounds how often observations publish a new snapshot: an observation that comes sooner is held until
	// the next one after the interval, or Flush. Zero publishes each at once. Changes of endpoints and of what they
	// serve are always published at once.
	PublishEvery time.Duration
	// KeepRemoved is how long an endpoint that discovery dropped keeps its counters and beliefs in case it comes back
	// (default 5 minutes). Requests in flight keep it longer.
	KeepRemoved time.Duration
}

// A PoolSpec is what the table must know of a configured pool.
type PoolSpec struct {
	Name string
	// Models are the names that all of the pool's endpoints are known to serve, before they have said so themselves.
	// Empty: what the endpoints say.
	Models []string
	// Loadable are adapters, with their base model as Parent, that an endpoint of the pool can be had to serve: their names
	// are known while none does.
	Loadable []Model
}

// A Table holds the endpoints and publishes snapshots of them. Load never blocks and never allocates; everything else
// takes a mutex and may be called by any goroutine.
type Table struct {
	cur atomic.Pointer[Snapshot] // never nil; readers Load once per decision
	mu  sync.Mutex               // serialises writers; readers never take it

	opts      Options
	pools     []PoolSpec
	entries   map[identity]*entry // endpoints in the table
	removed   map[identity]*entry // endpoints that left it; they come back with their counters
	order     []*entry            // of the rows of the snapshot published last
	slots     []*Endpoint         // by Endpoint.Slot; nil is free
	epochs    []uint32            // by Endpoint.Slot: where its next owner's epochs begin
	slabs     [][]counters
	dirty     bool // an observation waits for Flush
	published Instant
	told      []func() // by OnPublish
}

// entry is the writers' record of an endpoint.
type entry struct {
	endpoint  *Endpoint
	row       Row      // as it will be published next; its pointers are immutable values
	names     []string // adapters that only the metrics page speaks of; sorted
	removedAt Instant
	lastErr   error
	failures  int             // scrapes failed in a row
	hidden    map[string]bool // models that it is taken not to serve, though its list may say so for a while
	servedErr error           // why its list of models could not be read; nil if it could
}

// NewTable returns an empty table for the given pools.
func NewTable(pools []PoolSpec, opts Options) *Table {
	t := &Table{
		opts:    opts,
		pools:   slices.Clone(pools),
		entries: make(map[identity]*entry),
		removed: make(map[identity]*entry),
	}
	if t.opts.KeepRemoved == 0 {
		t.opts.KeepRemoved = 5 * time.Minute
	}
	t.publish(1, true)
	return t
}

// Load returns the current snapshot. A decision calls it once and passes the snapshot down, so that it never sees two
// scrapes of one endpoint.
func (t *Table) Load() *Snapshot { return t.cur.Load() }

// OnPublish has fn called after every snapshot that is published from now on. It is called with the table locked: it must not
// block and must not call any method but Load.
func (t *Table) OnPublish(fn func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.told = append(t.told, fn)
}

// SetPools replaces the configured pools. Endpoints of pools that are gone leave the table.
func (t *Table) SetPools(pools []PoolSpec, now Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pools = slices.Clone(pools)
	for id := range t.entries {
		if !slices.ContainsFunc(t.pools, func(p PoolSpec) bool { return p.Name == id.pool }) {
			t.remove(id, now)
		}
	}
	t.publish(now, true)
}

// SetEndpoints makes specs the complete set of pool's endpoints. An endpoint that was there keeps its counters and what
// is known of it, also when it comes back within Options.KeepRemoved; one that is gone takes no new requests, and the
// returned lists say which are new to the table and which left. It fails, and changes nothing, on a spec that isn't valid.
func (t *Table) SetEndpoints(pool string, specs []Spec, now Instant) (added, removed []*Endpoint, err error) {
	addresses := make(map[identity]string, len(specs))
	for _, s := range specs {
		u, err := url.Parse(s.URL)
		switch {
		case s.Pool != pool:
			return nil, nil, fmt.Errorf("pool %s: endpoint %s: it says pool %q", pool, s.URL, s.Pool)
		case err != nil:
			return nil, nil, fmt.Errorf("pool %s: endpoint: %w", pool, err)
		case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.Port() == "" && u.Scheme == "":
			return nil, nil, fmt.Errorf("pool %s: endpoint %q is not an http or https URL with a host", pool, s.URL)
		}
		host := u.Host
		if u.Port() == "" {
			host += map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
		}
		addresses[identity{s.Pool, s.URL, s.SourceID}] = host
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.ContainsFunc(t.pools, func(p PoolSpec) bool { return p.Name == pool }) {
		return nil, nil, fmt.Errorf("pool %s is not configured", pool)
	}
	if len(t.slots)+len(specs) > maxEndpoints { // slots of endpoints that left come free later
		return nil, nil, fmt.Errorf("pool %s: %d endpoints; a gateway takes %d in all", pool, len(specs), maxEndpoints)
	}
	for id, e := range t.entries {
		if _, stays := addresses[id]; !stays && id.pool == pool {
			removed = append(removed, e.endpoint)
			t.remove(id, now)
		}
	}
	for _, s := range specs {
		id := identity{s.Pool, s.URL, s.SourceID}
		e, there := t.entries[id]
		if !there {
			var back bool
			if e, back = t.removed[id]; back {
				delete(t.removed, id)
				e.removedAt = 0
			} else {
				ep := t.newEndpoint(s, addresses[id], now)
				e = &entry{endpoint: ep, row: Row{Endpoint: ep, Load: unknownLoad, live: ep.live, Slot: ep.Slot}}
			}
			t.entries[id] = e
			added = append(added, e.endpoint)
		}
		e.describe(s)
	}
	t.sweep(now)
	t.publish(now, true)
	return added, removed, nil
}

// describe takes over what a source says of an endpoint besides its identity.
func (e *entry) describe(s Spec) {
	e.endpoint.spec.Store(&s)
	e.row.Weight = float32(s.Weight)
	if s.Weight <= 0 {
		e.row.Weight = 1
	}
	e.row.State &^= NotReady
	if s.NotReady {
		e.row.State |= NotReady
	}
}

func (t *Table) remove(id identity, now Instant) {
	e := t.entries[id]
	e.removedAt = now
	delete(t.entries, id)
	t.removed[id] = e
}

// sweep frees the slots of endpoints that left long ago and have nothing in flight.
func (t *Table) sweep(now Instant) {
	for id, e := range t.removed {
		if now.Sub(e.removedAt) > t.opts.KeepRemoved && e.endpoint.Booked().Requests == 0 {
			delete(t.removed, id)
			t.slots[e.endpoint.Slot] = nil
			t.epochs[e.endpoint.Slot] = e.endpoint.Epoch() + 1
		}
	}
}

// maxEndpoints bounds slots, which are 16 bits wide.
const maxEndpoints = math.MaxUint16

func (t *Table) newEndpoint(s Spec, address string, now Instant) *Endpoint {
	slot := slices.Index(t.slots, nil)
	if slot < 0 {
		slot = len(t.slots)
		t.slots = append(t.slots, nil)
		t.epochs = append(t.epochs, 0)
	}
	if slot/slabSize == len(t.slabs) {
		t.slabs = append(t.slabs, make([]counters, slabSize))
	}
	live := &t.slabs[slot/slabSize][slot%slabSize]
	live.reset()
	e := &Endpoint{
		ID:       s.Pool + "/" + cmp.Or(s.Name, address),
		Pool:     s.Pool,
		URL:      s.URL,
		SourceID: s.SourceID,
		Address:  address,
		Slot:     uint16(slot),
		Since:    now,
		live:     live,
	}
	e.IDHash = HashName(e.ID)
	e.epoch.Store(t.epochs[slot])
	e.adapters.Store(newAdapterMemory(0))
	t.slots[slot] = e
	return e
}

func (e *Endpoint) identity() identity { return identity{e.Pool, e.URL, e.SourceID} }

func (c *counters) reset() {
	c.requests.Store(0)
	c.tokens.Store(0)
	c.intakeTokens.Store(0)
	c.ejectedUntil.Store(0)
	c.busyUntil.Store(0)
	c.learned.Store(0)
	// version goes on: a stale reader must not book the slot's next owner.
}

// Observe takes in one scrape of e. It reports whether the endpoint's process was found to have restarted, in which case
// everything believed of its caches has been dropped.
func (t *Table) Observe(e *Endpoint, o Observation) (restarted bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	en := t.lookup(e)
	if en == nil {
		return false
	}
	if o.Load == nil {
		// Keep the last load: it ages, and a stale one is not trusted.
		en.failures++
		en.lastErr = o.Err
		return false
	}
	en.failures, en.lastErr = 0, o.Err
	restarted = en.row.ScrapedAt != 0 && newProcess(en.row.Load, o.Load)
	if restarted {
		e.forget()
		en.row.Served = nil
		clear(en.hidden)
	}
	if n := 2 * int(o.Load.MaxAdapters); n > len(e.Adapters().slots) {
		e.growAdapters(min(n, 256))
	}
	for _, a := range o.Load.Adapters {
		e.Adapters().saw(HashName(a), o.At)
	}
	e.observeRanks(o.Load)
	now := e.Booked()
	ours := Booked{
		Requests:      max(o.Before.Requests, now.Requests),
		PendingTokens: max(o.Before.PendingTokens, now.PendingTokens),
		KVTokens:      max(o.Before.KVTokens, now.KVTokens),
	}
	en.row.Load = o.Load
	en.row.ScrapedAt = o.At
	en.row.Foreign = foreign(o.Load, ours)
	en.row.KVCapacity = 0
	if o.Load.Known.Has(KnowsKVCapacity) {
		en.row.KVCapacity = int32(min(o.Load.KVCapacityTokens, math.MaxInt32))
	}
	en.row.State &^= Sleeping | Blind
	if o.Load.Known&(KnowsRunning|KnowsWaiting|KnowsKVCacheUtilization) == 0 {
		en.row.State |= Blind
	}
	if o.Load.Known.Has(KnowsSleeping) && o.Load.Sleeping {
		en.row.State |= Sleeping
	}
	names := en.metricsOnlyNames(restarted)
	namesChanged := restarted || !slices.Equal(en.names, names)
	en.names = names
	if !namesChanged && t.opts.PublishEvery > 0 && o.At.Sub(t.published) < t.opts.PublishEvery {
		t.dirty = true
		return restarted
	}
	t.publish(o.At, namesChanged)
	return restarted
}

// maxMetricsOnlyNames bounds the adapters known from a metrics page alone.
const maxMetricsOnlyNames = 1024

// metricsOnlyNames are the adapters that the page names and GET /v1/models does not. While the server has not answered
// that, a name stays known though the page drops it as soon as the adapter is idle.
func (e *entry) metricsOnlyNames(restarted bool) []string {
	var names []string
	if e.row.Served == nil && !restarted {
		names = slices.Clone(e.names)
	}
	for _, a := range e.row.Load.Adapters {
		if e.hidden[a] {
			continue
		}
		if e.row.Served != nil && slices.ContainsFunc(e.row.Served.Models, func(m Model) bool { return m.ID == a }) {
			continue
		}
		if i, ok := slices.BinarySearch(names, a); !ok && len(names) < maxMetricsOnlyNames {
			names = slices.Insert(names, i, a)
		}
	}
	return names
}

// newProcess reports whether the load now comes from another process than the load before.
func newProcess(before, now *Load) bool {
	// Start times are compared with a margin, since some servers derive them from the uptime of the page.
	const startTimeMarginSeconds = 2
	if before.StartTime > 0 && now.StartTime > 0 {
		return math.Abs(now.StartTime-before.StartTime) > startTimeMarginSeconds
	}
	backwards := func(was, is float64) bool { return was >= 0 && is >= 0 && is < was }
	return backwards(before.PromptTokens, now.PromptTokens) ||
		backwards(before.GenerationTokens, now.GenerationTokens) ||
		backwards(before.PrefixQueryTokens, now.PrefixQueryTokens)
}

// growAdapters makes room for n adapters. What is remembered is copied without its counts in flight, which their
// bookings release on the old memory.
func (e *Endpoint) growAdapters(n int) {
	old, m := e.Adapters(), newAdapterMemory(n)
	for i := range old.slots {
		m.slots[i].name.Store(old.slots[i].name.Load())
		m.slots[i].lastUsed.Store(old.slots[i].lastUsed.Load())
	}
	e.adapters.Store(m)
}

// SetServed takes in what e answered to GET /v1/models.
func (t *Table) SetServed(e *Endpoint, s *Served) {
	t.mu.Lock()
	defer t.mu.Unlock()
	en := t.lookup(e)
	if en == nil {
		return
	}
	en.seen(s.Models)
	if len(en.hidden) > 0 {
		s = &Served{Models: en.visible(s.Models), At: s.At}
	}
	same := en.row.Served != nil && slices.EqualFunc(en.row.Served.Models, s.Models, func(a, b Model) bool {
		return a.ID == b.ID && a.Parent == b.Parent && a.MaxModelLen == b.MaxModelLen
	})
	en.row.Served, en.servedErr = s, nil
	en.names = en.metricsOnlyNames(false)
	if same {
		t.dirty = true
		return
	}
	t.publish(s.At, true)
}

// SetState sets or clears conditions of e and reports whether that changed anything.
func (t *Table) SetState(e *Endpoint, s State, on bool, now Instant) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	en := t.lookup(e)
	if en == nil {
		return false
	}
	was := en.row.State
	if en.row.State &^= s; on {
		en.row.State |= s
	}
	if en.row.State == was {
		return false
	}
	t.publish(now, false)
	return true
}

// Flush publishes what Observe held back.
func (t *Table) Flush(now Instant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.dirty {
		t.publish(now, false)
	}
	t.sweep(now)
}

// SetServedError notes why e's list of models could not be read. [Table.SetServed] clears it, and so does nil.
func (t *Table) SetServedError(e *Endpoint, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if en := t.lookup(e); en != nil {
		en.servedErr = err
	}
}

// LastError returns how many scrapes of e have failed in a row and why the latest did, or else why its list of models
// could not be read.
func (t *Table) LastError(e *Endpoint) (failures int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if en := t.lookup(e); en != nil {
		if en.lastErr == nil {
			return 0, en.servedErr
		}
		return en.failures, en.lastErr
	}
	return 0, nil
}

func (t *Table) lookup(e *Endpoint) *entry {
	en := t.entries[e.identity()]
	if en == nil || en.endpoint != e {
		return nil
	}
	return en
}

// publish builds and stores the next snapshot. The index from names to rows is shared with the one before unless rows or
// names changed. The caller holds t.mu.
func (t *Table) publish(now Instant, reindex bool) {
	prev := t.cur.Load()
	s := &Snapshot{At: now, Version: 1}
	if prev != nil {
		s.Version = prev.Version + 1
	}
	if !reindex {
		s.Pools, s.Shared, s.byName, s.bySlot, s.idHashes = prev.Pools, prev.Shared, prev.byName, prev.bySlot, prev.idHashes
		s.Rows = make([]Row, len(prev.Rows))
		for i, en := range t.order {
			s.Rows[i] = en.row
		}
	} else {
		t.index(s)
	}
	t.dirty = false
	t.published = now
	t.cur.Store(s)
	for _, fn := range t.told {
		fn()
	}
}

func (t *Table) index(s *Snapshot) {
	s.Rows = make([]Row, 0, len(t.entries))
	t.order = t.order[:0]
	s.Pools = make([]PoolRange, len(t.pools))
	s.byName = make(map[string]*Target)
	byPool := make(map[string][]*entry, len(t.pools))
	for _, en := range t.entries {
		byPool[en.endpoint.Pool] = append(byPool[en.endpoint.Pool], en)
	}
	for i, p := range t.pools {
		entries := byPool[p.Name]
		slices.SortFunc(entries, func(a, b *entry) int {
			return cmp.Or(cmp.Compare(a.endpoint.ID, b.endpoint.ID), cmp.Compare(a.endpoint.Slot, b.endpoint.Slot))
		})
		first := int32(len(s.Rows))
		for _, en := range entries {
			s.Rows = append(s.Rows, en.row)
			t.order = append(t.order, en)
		}
		s.Pools[i] = PoolRange{p.Name, first, int32(len(s.Rows))}
	}
	s.bySlot = make([]int32, len(t.slots))
	for i := range s.bySlot {
		s.bySlot[i] = -1
	}
	s.idHashes = make([]uint64, len(s.Rows))
	for i := range s.Rows {
		s.bySlot[s.Rows[i].Slot] = int32(i)
		s.idHashes[i] = s.Rows[i].Endpoint.IDHash
	}
	// Base models of every pool before adapters of any, so that an adapter cannot take the name of another pool's model.
	for i, p := range t.pools {
		for _, name := range p.Models {
			t.addTarget(s, int32(i), Model{ID: name}, -1)
		}
	}
	for _, adapters := range []bool{false, true} {
		if adapters {
			for i, p := range t.pools {
				for _, m := range p.Loadable {
					t.addTarget(s, int32(i), m, -1)
				}
			}
		}
		for i := range s.Pools {
			for r := s.Pools[i].First; r < s.Pools[i].End; r++ {
				row := &s.Rows[r]
				if row.Served != nil {
					for _, m := range row.Served.Models {
						if (m.Parent != "") == adapters {
							t.addTarget(s, int32(i), m, r)
						}
					}
				}
				if !adapters {
					if row.Served == nil { // it has not spoken for itself yet
						for _, name := range t.pools[i].Models {
							t.addTarget(s, int32(i), Model{ID: name}, r)
						}
					}
					continue
				}
				for _, name := range t.order[r].names {
					t.addTarget(s, int32(i), Model{ID: name, Parent: baseOf(row, t.pools[i])}, r)
				}
			}
		}
	}
}

// baseOf names the base model of an adapter that a row shows without saying what it sits on.
func baseOf(row *Row, p PoolSpec) string {
	if len(p.Models) > 0 {
		return p.Models[0]
	}
	if row.Served != nil {
		for _, m := range row.Served.Models {
			if m.Parent == "" {
				return m.ID
			}
		}
	}
	return p.Name
}

// maxShared bounds the names that are told to be shared.
const maxShared = 100

func compareShared(a, b SharedName) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Other, b.Other))
}

// addTarget notes that row serves m; a negative row only makes the name known. The first pool to serve a name keeps it.
func (t *Table) addTarget(s *Snapshot, pool int32, m Model, row int32) {
	tg := s.byName[m.ID]
	if tg == nil {
		tg = &Target{Name: m.ID, Hash: HashName(m.ID), Pool: pool, Adapter: m.Parent != "", Base: cmp.Or(m.Parent, m.ID)}
		s.byName[m.ID] = tg
	}
	if tg.Pool != pool {
		sh := SharedName{m.ID, t.pools[tg.Pool].Name, t.pools[pool].Name}
		if i, there := slices.BinarySearchFunc(s.Shared, sh, compareShared); !there && len(s.Shared) < maxShared {
			s.Shared = slices.Insert(s.Shared, i, sh)
		}
		return
	}
	tg.MaxModelLen = max(tg.MaxModelLen, m.MaxModelLen)
	if m.MaxModelLen > 0 && (tg.MinModelLen == 0 || m.MaxModelLen < tg.MinModelLen) {
		tg.MinModelLen = m.MaxModelLen
	}
	if row < 0 {
		return
	}
	if i := sort.Search(len(tg.Rows), func(i int) bool { return tg.Rows[i] >= row }); i == len(tg.Rows) || tg.Rows[i] != row {
		tg.Rows = slices.Insert(tg.Rows, i, row)
	}
}
