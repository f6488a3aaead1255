package metrics

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvgate/pool"
)

// A Result is what one look at an endpoint showed.
type Result struct {
	Dialect string // "" if none was found
	PageURL string // "" if there is no page
	// Raw is what the page said, and Load what it adds up to; nil if no page was understood. Of a page that was cut
	// (FaultReset, FaultTimeout) they hold what came before, which a scraper doesn't believe: an engine may be missing.
	Raw  *Raw
	Load *pool.Load
	// Models is the list of models, or nil; ModelsErr says why there is none.
	Models    []pool.Model
	ModelsErr error

	Understood []string // the numbers that the page tells, in the words of the configuration and of JSON output
	Missing    []string // those it doesn't
	Notes      []string // sentences about what is odd
	PageBytes  int64
	Took       time.Duration // for the page
}

// ScrapeOnce looks at e once, as a scraper would: it finds the dialect, reads the page and asks for the list of models.
// The error, an [*Error], says why there is no load and what to do about it; the result holds whatever was learned
// nevertheless. Options.Now may be left out.
func ScrapeOnce(ctx context.Context, e *pool.Endpoint, o Options) (Result, error) {
	var r Result
	if o.Now == nil {
		o.Now = func() pool.Instant { return 1 }
	}
	if err := o.fill(); err != nil {
		return r, err
	}
	if err := o.check(e); err != nil {
		return r, err
	}
	c := newClient(o.Pools[e.Pool], &o)
	defer c.close()
	s := newScraper(nil, e, &o, c, nil, new(atomic.Int64))

	start := time.Now()
	src, err := s.locator.locate(ctx)
	r.Took = time.Since(start)
	r.explain(src, err, o.Wall())
	if f := faultOf(err); f != FaultRefused && f != FaultUnreachable {
		r.Models, r.ModelsErr = s.locator.models(ctx, modelsURL(e, src))
	} else {
		r.ModelsErr = err
	}
	if untouched(err) {
		err = nil
	}
	return r, err
}

func (r *Result) explain(src *source, err error, wall time.Time) {
	if e, ok := err.(*Error); ok && len(e.json) > 0 && e.json[0] == '[' {
		r.Dialect = trtllm.Name
		r.Notes = append(r.Notes, "GET /metrics is trtllm-serve's JSON, which each read drains; it isn't read again")
	}
	if src == nil {
		return
	}
	r.Dialect, r.PageURL = src.dialect.Name, src.url
	switch {
	case untouched(err):
		r.Notes = append(r.Notes, err.Error())
		return
	case src.page == nil:
		r.Notes = append(r.Notes, "dialect none: the server has no page, and is known by our own requests alone")
		return
	case src.page.lines == 0:
		return
	}
	r.PageBytes = src.page.bytes
	r.Raw = src.read(wall)
	r.Load = r.Raw.Load()
	for _, f := range fieldNames {
		if r.Load.Known.Has(f.field) {
			r.Understood = append(r.Understood, f.name)
		} else if f.field != pool.KnowsAdapterSlots || !r.Load.Known.Has(pool.KnowsAdapters) { // names say more than their count
			r.Missing = append(r.Missing, f.name)
		}
	}
	if n := src.page.skipped; n > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d series were dropped: not understood, NaN, infinite or negative", n))
	}
	if n := r.Raw.Anomalies; n > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d ratios are above 1", n))
	}
	if n := len(r.Load.Engines); n > 1 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d engines behind one URL", n))
	}
	if r.Load.Sleeping {
		r.Notes = append(r.Notes, "the server sleeps: its weights are offloaded")
	}
	if slices.Contains(r.Missing, "kv_capacity_tokens") && slices.Contains(r.Understood, "kv_cache_utilization") {
		r.Notes = append(r.Notes, "it doesn't tell its KV capacity, which is learned from traffic")
	}
}

// fieldNames are the names of a load's fields in JSON.
var fieldNames = []struct {
	field pool.Fields
	name  string
}{
	{pool.KnowsRunning, "running"},
	{pool.KnowsWaiting, "waiting"},
	{pool.KnowsKVCacheUtilization, "kv_cache_utilization"},
	{pool.KnowsKVCapacity, "kv_capacity_tokens"},
	{pool.KnowsAdapters, "adapters"},
	{pool.KnowsMaxAdapters, "max_adapters"},
	{pool.KnowsAdapterSlots, "adapter_slots_used"},
	{pool.KnowsSleeping, "sleeping"},
}
