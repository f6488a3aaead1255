package pool

import (
	"slices"
	"strings"
)

// A View is a snapshot as JSON: what /debug/snapshot and `kvgate check --probe --json` print. Its field names are a
// contract; it only gains fields. What is unknown is null or absent, never 0.
type View struct {
	Version   uint64         `json:"version"`
	Endpoints []EndpointView `json:"endpoints"`
	// Learned is what has been learned from each pool's traffic. A snapshot does not hold that: who shows one fills it in.
	Learned []LearnedView `json:"learned,omitempty"`
}

// An EndpointView describes one endpoint.
type EndpointView struct {
	ID      string   `json:"id"`
	URL     string   `json:"url"`
	Pool    string   `json:"pool"`
	Dialect string   `json:"dialect,omitempty"`
	Healthy bool     `json:"healthy"`
	State   []string `json:"state,omitempty"` // what holds of it, in the words of docs/terms.md; up when nothing else does
	Models  []string `json:"models"`          // that it says it serves, adapters included
	// ServableAdapters are those of Models that are LoRA adapters, with the base model of each.
	ServableAdapters []AdapterView `json:"servable_adapters,omitempty"`
	// PrefillTokensPerSecond has been learned from traffic; absent when unknown.
	PrefillTokensPerSecond *float64 `json:"prefill_tokens_per_second,omitempty"`
	// Learned is what else has been.
	Learned *LearnedEndpoint `json:"learned,omitempty"`
	// PlacedAdapters are the adapters that this gateway has sent there, the latest first.
	PlacedAdapters []PlacedAdapter `json:"placed_adapters,omitempty"`

	Load   LoadView   `json:"load"`
	Booked BookedView `json:"booked"`
	Error  string     `json:"error,omitempty"` // why the last scrape failed
}

// An AdapterView is an adapter that an endpoint serves.
type AdapterView struct {
	ID   string `json:"id"`
	Base string `json:"base"`
}

// A LoadView is a [Load].
type LoadView struct {
	Known                 bool         `json:"known"`
	KVCacheUtilization    *float64     `json:"kv_cache_utilization"`
	KVCacheUtilizationMax *float64     `json:"kv_cache_utilization_max"`
	KVCapacityTokens      *int64       `json:"kv_capacity_tokens"`
	Waiting               *int32       `json:"waiting"`
	Running               *int32       `json:"running"`
	Adapters              []string     `json:"adapters"`
	MaxAdapters           *int32       `json:"max_adapters"`
	AdapterSlotsUsed      *int32       `json:"adapter_slots_used,omitempty"`
	Engines               []EngineView `json:"engines"`
	Foreign               *ForeignView `json:"foreign,omitempty"`
	ScrapeAgeSeconds      *float64     `json:"scrape_age_seconds"`
	// Stale: it is older than scrape.stale_after. What it says is kept, for deciding on a saved view, and not to be told
	// of the endpoint as it is now; see [EndpointView.Now].
	Stale bool `json:"stale,omitempty"`
}

// An EngineView is an [EngineLoad].
type EngineView struct {
	ID                 string   `json:"id"`
	Waiting            *int32   `json:"waiting"`
	Running            *int32   `json:"running"`
	KVCacheUtilization *float64 `json:"kv_cache_utilization"`
	KVCapacityTokens   *int64   `json:"kv_capacity_tokens"`
}

// A ForeignView is a [Foreign].
type ForeignView struct {
	Requests int32 `json:"requests"`
	Waiting  int32 `json:"waiting"`
	KVTokens int32 `json:"kv_tokens"`
}

// A BookedView is a [Booked].
type BookedView struct {
	Requests      int64 `json:"requests"`
	PendingTokens int64 `json:"pending_tokens"`
	KVTokens      int64 `json:"kv_tokens"`
}

func known[T any](l Fields, f Fields, v T) *T {
	if l.Has(f) {
		return &v
	}
	return nil
}

// Now is what may be told of the endpoint's load as it is now: all of it, or nothing but its age where it is stale or the
// endpoint is down.
func (v *EndpointView) Now() LoadView {
	if !v.Load.Stale && !slices.Contains(v.State, stateDown) {
		return v.Load
	}
	return LoadView{ScrapeAgeSeconds: v.Load.ScrapeAgeSeconds, Stale: v.Load.Stale}
}

// View returns the snapshot as JSON-ready values at now.
func (s *Snapshot) View(now Instant) View {
	v := View{Version: s.Version, Endpoints: make([]EndpointView, len(s.Rows))}
	for i := range s.Rows {
		v.Endpoints[i] = s.Rows[i].View(now)
	}
	return v
}

// View returns the row as JSON-ready values at now.
func (r *Row) View(now Instant) EndpointView {
	l, b := r.Load, r.Booked()
	v := EndpointView{
		ID:      r.Endpoint.ID,
		URL:     r.Endpoint.URL,
		Pool:    r.Endpoint.Pool,
		Dialect: l.Dialect,
		Healthy: r.Healthy(now),
		State:   r.States(now),
		Models:  []string{},
		Load: LoadView{
			Known:                 l.Known != 0,
			KVCacheUtilization:    known(l.Known, KnowsKVCacheUtilization, l.KVCacheUtilization),
			KVCacheUtilizationMax: known(l.Known, KnowsKVCacheUtilization, l.KVCacheUtilizationMax),
			KVCapacityTokens:      known(l.Known, KnowsKVCapacity, l.KVCapacityTokens),
			Waiting:               known(l.Known, KnowsWaiting, l.Waiting),
			Running:               known(l.Known, KnowsRunning, l.Running),
			MaxAdapters:           known(l.Known, KnowsMaxAdapters, l.MaxAdapters),
			AdapterSlotsUsed:      known(l.Known, KnowsAdapterSlots, l.AdapterSlotsUsed),
			Engines:               []EngineView{},
		},
		Booked:         BookedView(b),
		Learned:        r.LearnedView(),
		PlacedAdapters: r.PlacedAdapters(now),
	}
	if v.Dialect == "" {
		v.Dialect = r.Endpoint.Spec().Dialect
	}
	if l.Known.Has(KnowsAdapters) {
		v.Load.Adapters = append([]string{}, l.Adapters...)
	}
	if r.Served != nil {
		for _, m := range r.Served.Models {
			v.Models = append(v.Models, m.ID)
			if m.Parent != "" {
				v.ServableAdapters = append(v.ServableAdapters, AdapterView{m.ID, m.Parent})
			}
		}
	}
	for _, e := range l.Engines {
		v.Load.Engines = append(v.Load.Engines, EngineView{
			ID:                 e.ID,
			Waiting:            known(e.Known, KnowsWaiting, e.Waiting),
			Running:            known(e.Known, KnowsRunning, e.Running),
			KVCacheUtilization: known(e.Known, KnowsKVCacheUtilization, e.KVCacheUtilization),
			KVCapacityTokens:   known(e.Known, KnowsKVCapacity, e.KVCapacityTokens),
		})
	}
	if r.ScrapedAt != 0 {
		v.Load.ScrapeAgeSeconds = new(max(0, now.Sub(r.ScrapedAt).Seconds()))
		f := ForeignView(r.Foreign)
		v.Load.Foreign = &f
	}
	if rate := r.Endpoint.PrefillTokensPerSecond.Load(); rate > 0 {
		v.PrefillTokensPerSecond = &rate
	}
	slices.Sort(v.Models)
	return v
}

// Healthy reports whether r may get requests at now as far as health goes.
func (r *Row) Healthy(now Instant) bool {
	return r.State&(Unroutable|Unreachable) == 0 && r.EjectedUntil() <= now
}

const stateDown = "down"

// StateWords are [Row.States] as one text, for logs.
func (r *Row) StateWords(now Instant) string { return strings.Join(r.States(now), ",") }

// States are the conditions of r at now, in the words of docs/terms.md; up when there is none.
func (r *Row) States(now Instant) []string {
	var s []string
	for _, st := range []struct {
		on   bool
		name string
	}{
		{r.State&Unreachable != 0, stateDown},
		{r.State&Draining != 0, "draining"},
		{r.State&Sleeping != 0, "asleep"},
		{r.State&NotReady != 0, "not_ready"},
		{r.EjectedUntil() > now, "ejected"},
		{r.BusyUntil() > now, "busy"},
		{r.State&(Unmeasured|Unreachable) == Unmeasured, "unmeasured"},
	} {
		if st.on {
			s = append(s, st.name)
		}
	}
	if s == nil {
		s = []string{"up"}
	}
	return s
}
