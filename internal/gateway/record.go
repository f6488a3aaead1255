package gateway

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/config"
	"kvgate/internal/record"
	"kvgate/internal/version"
	"kvgate/pool"
	"kvgate/telemetry"
)

// recordSink hands finished requests to the recorder that the configuration in use asks for, if it does.
type recordSink struct {
	on  atomic.Bool
	mu  sync.RWMutex // held for reading while a request is handed over, so that none comes after the end
	rec *record.Recorder
	cfg *config.Record
	// Of recorders before rec.
	recorded, dropped uint64
}

// Observe implements telemetry.Sink.
func (s *recordSink) Observe(r *telemetry.Record) {
	if !s.on.Load() {
		return
	}
	s.mu.RLock()
	if s.rec != nil {
		s.rec.Observe(r)
	}
	s.mu.RUnlock()
}

// counts are how many requests were recorded, and how many of them dropped.
func (s *recordSink) counts() (recorded, dropped uint64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	recorded, dropped = s.recorded, s.dropped
	if s.rec != nil {
		recorded += s.rec.Recorded()
		dropped += s.rec.Dropped()
	}
	return recorded, dropped
}

// recordClose is how long the file may take for what waits when recording ends.
const recordClose = 5 * time.Second

// useRecord has requests recorded as c says. The same file is opened anew.
func (g *Gateway) useRecord(c *config.Record) error {
	s := &g.record
	if s.cfg != nil && reflect.DeepEqual(s.cfg, c) {
		return s.rec.Reopen()
	}
	var next *record.Recorder
	if c != nil {
		var err error
		next, err = record.New(record.Options{
			File: c.File, MaxBytes: int64(c.MaxBytes), Keep: c.Keep, Sample: c.Sample, Window: c.Window, Tenants: c.Tenants,
			Fleet: g.fleet, Kvgate: version.Get().Version,
			OnTrouble: func(err error) { g.log.Warn("recording requests", zap.Error(err)) },
		})
		if err != nil {
			return err
		}
	}
	s.mu.Lock()
	old := s.rec
	s.rec, s.cfg = next, c
	s.on.Store(next != nil)
	if old != nil {
		s.recorded += old.Recorded()
		s.dropped += old.Dropped()
	}
	s.mu.Unlock()
	if old == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), recordClose)
	defer cancel()
	if err := old.Close(ctx); err != nil {
		g.log.Error("recording requests", zap.Error(err))
	}
	return nil
}

// fleet is what serves the pools now.
func (g *Gateway) fleet() []record.Fleet {
	s, d, c := g.table.Load(), g.decides.Load(), g.cfg.Load()
	var out []record.Fleet
	for i := range s.Pools {
		f := record.Fleet{Pool: s.Pools[i].Name}
		if p := d.policies[f.Pool]; p != nil {
			f.Policy = p.Name()
		}
		for j := range c.Pools {
			if w := c.Pools[j].Policy.Weights; c.Pools[j].Name == f.Pool && len(w) > 0 {
				f.Policy = weights(w)
			}
		}
		var tokens []int64
		var slots []int
		for j := range s.Rows {
			r := &s.Rows[j]
			if r.Endpoint.Pool != f.Pool || r.State&pool.Unroutable != 0 {
				continue
			}
			f.Endpoints++
			if r.KVCapacity > 0 {
				tokens = append(tokens, int64(r.KVCapacity))
			}
			if r.Load.Known.Has(pool.KnowsMaxAdapters) {
				slots = append(slots, int(r.Load.MaxAdapters))
			}
		}
		f.KVTokens, f.AdapterSlots = median(tokens), median(slots)
		if f.Endpoints > 0 {
			out = append(out, f)
		}
	}
	return out
}

// weights are those of a policy as kvgate replay takes them: queue=2+prefix=3.
func weights(w map[string]float64) string {
	var b []byte
	for i, name := range slices.Sorted(maps.Keys(w)) {
		if i > 0 {
			b = append(b, '+')
		}
		b = strconv.AppendFloat(append(append(b, name...), '='), w[name], 'g', -1, 64)
	}
	return string(b)
}

func median[T int | int64](v []T) T {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// startRecord begins to record requests, if that is wanted.
func (g *Gateway) startRecord() error {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	return g.useRecord(g.cfg.Load().Record)
}

// closeRecord writes what waits. No request runs any more.
func (g *Gateway) closeRecord() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	if err := g.useRecord(nil); err != nil {
		panic(fmt.Sprintf("BUG: %v", err))
	}
}
