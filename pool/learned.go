package pool

import (
	"cmp"
	"slices"
	"time"
)

// A LearnedView is what has been learned from a pool's traffic, as JSON. 0 and absent are unknown.
type LearnedView struct {
	Pool                   string         `json:"pool"`
	WorkTokens             float64        `json:"work_tokens,omitempty"`     // mean prefill work of a request
	RequestSeconds         float64        `json:"request_seconds,omitempty"` // mean time from a first token to the end
	PrefillTokensPerSecond float64        `json:"prefill_tokens_per_second,omitempty"`
	BytesPerToken          float64        `json:"bytes_per_token,omitempty"` // of models that are not listed
	OutputTokens           float64        `json:"output_tokens,omitempty"`   // likewise
	Models                 []LearnedModel `json:"models,omitempty"`
}

// A LearnedModel is what has been learned of one model or adapter.
type LearnedModel struct {
	ID            string  `json:"id"`
	BytesPerToken float64 `json:"bytes_per_token,omitempty"`
	OutputTokens  float64 `json:"output_tokens,omitempty"`
}

// Sort puts v into the order in which it is shown.
func (v *LearnedView) Sort() {
	slices.SortFunc(v.Models, func(a, b LearnedModel) int { return cmp.Compare(a.ID, b.ID) })
}

// A LearnedEndpoint is what has been learned of an endpoint besides its prefill rate. 0 and absent are unknown.
type LearnedEndpoint struct {
	Slowness           float64 `json:"slowness,omitempty"`             // how many times slower it prefills than the fastest of its pool
	KVCapacityTokens   float64 `json:"kv_capacity_tokens,omitempty"`   // where the server does not say
	AdapterLoadSeconds float64 `json:"adapter_load_seconds,omitempty"` // to load an adapter that it does not have
}

// A PlacedAdapter is an adapter that this gateway has sent to an endpoint.
type PlacedAdapter struct {
	ID          string  `json:"id"`
	InFlight    int     `json:"in_flight,omitempty"`    // requests
	Started     int     `json:"started,omitempty"`      // of them, those that have got their first token
	IdleSeconds float64 `json:"idle_seconds,omitempty"` // since the latest was booked
}

// LearnedView is what has been learned of r's endpoint; nil if nothing has.
func (r *Row) LearnedView() *LearnedEndpoint {
	slowness, capacity := r.Learned()
	l := LearnedEndpoint{float64(slowness), float64(capacity), r.Endpoint.AdapterLoadSeconds.Load()}
	if l == (LearnedEndpoint{}) {
		return nil
	}
	return &l
}

// PlacedAdapters lists the adapters that r's endpoint serves and this gateway has sent there, as of now; the latest first.
func (r *Row) PlacedAdapters(now Instant) (placed []PlacedAdapter) {
	if r.Served == nil {
		return nil
	}
	names := make(map[uint64]string)
	for _, m := range r.Served.Models {
		if m.Parent != "" {
			names[HashName(m.ID)] = m.ID
		}
	}
	memory := r.Endpoint.Adapters()
	memory.Each(func(hash uint64, _ int, _ Instant) bool {
		if name := names[hash]; name != "" {
			if u, ok := memory.Use(hash); ok {
				placed = append(placed, PlacedAdapter{name, u.InFlight, u.Started, max(0, now.Sub(u.LastUsed).Seconds())})
			}
		}
		return true
	})
	slices.SortFunc(placed, func(a, b PlacedAdapter) int {
		return cmp.Or(cmp.Compare(a.IdleSeconds, b.IdleSeconds), cmp.Compare(a.ID, b.ID))
	})
	return placed
}

// Relearn makes e know what was learned of it before: its rate in tokens per second, and l, which may be nil.
func (e *Endpoint) Relearn(prefillTokensPerSecond float64, l *LearnedEndpoint) {
	sane := func(v float64) float64 {
		if v > 0 && v < 1e12 {
			return v
		}
		return 0
	}
	e.PrefillTokensPerSecond.Store(sane(prefillTokensPerSecond))
	if l != nil {
		e.LearnedKVCapacity.Store(sane(l.KVCapacityTokens))
		e.AdapterLoadSeconds.Store(sane(l.AdapterLoadSeconds))
		e.SetLearned(float32(sane(l.Slowness)), float32(sane(l.KVCapacityTokens)))
	}
}

// Remember notes that the adapters were used on e as long before now as they say. Requests in flight are counted only
// for a view that is decided on, since nothing ends them.
func (e *Endpoint) Remember(placed []PlacedAdapter, now Instant, inFlight bool) {
	m := e.Adapters()
	for i := len(placed) - 1; i >= 0; i-- { // the latest last, so that they push out the others
		p := &placed[i]
		s := m.place(HashName(p.ID), now.Add(-time.Duration(min(max(p.IdleSeconds, 0), 1e6)*float64(time.Second))))
		if s == nil {
			continue
		}
		if !inFlight || p.InFlight <= 0 {
			m.release(s)
			continue
		}
		s.inFlight.Store(int64(p.InFlight))
		s.started.Store(int64(min(max(p.Started, 0), p.InFlight)))
	}
}
