// Package load sends OpenAI-style requests to people's own servers or gateways and measures what clients see: an open loop
// whose times count from when a request should have been sent, or a closed one; shared prefixes, adapters, conversations;
// and two targets side by side, each given the same work in turn.
//
// It must not be imported by the product's packages, and measures any server: nothing in it may rely on kvgate.
package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// run is one Run as it goes on.
type run struct {
	o      Options
	ctx    context.Context // done: end now, with what there is
	client *http.Client
	began  time.Time

	adapters, prefixes zipf

	begun                  atomic.Int64 // measured requests, up to Options.Requests and a few beyond
	inFlight, done, failed atomic.Int64
	warm                   atomic.Bool

	mu      sync.Mutex
	samples []sample
	gaps    []*hdrhistogram.Histogram // per target, between events; µs
}

// A segment is a time in which requests arrive, and until the last of them has ended.
type segment struct {
	number         int
	at             time.Duration // when it began
	warmUp, length time.Duration // length 0: until there are Options.Requests
	stream         uint64        // of arrivals: segments with the same one have the same
	first          int           // number of the first conversation
	target         int           // -1: all targets in turn
}

// Run sends what o says and returns what was seen. When ctx is done before the end it returns what there is by then; an error
// means that nothing was sent.
func Run(ctx context.Context, o Options) (*Result, error) {
	for i := range o.Targets {
		if o.Targets[i].Name == "" {
			o.Targets[i].Name = string(rune('A' + i))
		}
	}
	if err := o.check(); err != nil {
		return nil, OptionsError{err}
	}
	if o.Salt == "" {
		o.Salt = fmt.Sprintf("%08x", rand.Uint32())
	}
	// As SDKs do: HTTP/1.1, a connection per request at a time. Redirects would carry the key elsewhere.
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	transport := &http.Transport{MaxIdleConnsPerHost: 1 << 20, DisableCompression: true, Protocols: protocols, TLSHandshakeTimeout: 30 * time.Second}
	defer transport.CloseIdleConnections()
	r := &run{o: o, ctx: ctx, client: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if len(o.Adapters) > 0 {
		r.adapters = newZipf(len(o.Adapters), o.Zipf)
	} else if o.Model == "" {
		model, err := r.firstModel(ctx, &o.Targets[0])
		if err != nil {
			return nil, err
		}
		r.o.Model = model
	}
	if o.Prefixes > 0 {
		r.prefixes = newZipf(o.Prefixes, o.PrefixZipf)
	}
	for range o.Targets {
		r.gaps = append(r.gaps, newHistogram())
	}
	r.warm.Store(o.WarmUp > 0)
	r.began = time.Now()
	stop := r.report()
	r.segments()
	stop()
	return r.result(), nil
}

// segments runs all there are.
func (r *run) segments() {
	o := &r.o
	if o.Slice == 0 {
		length := o.WarmUp + o.Duration
		if o.Duration == 0 {
			length = 0
		}
		r.segment(&segment{warmUp: o.WarmUp, length: length, target: -1})
		return
	}
	// Pairs of slices with the same arrivals and conversations, the first of each drawn, so that neither target has the
	// better times by its place. What is still asked at the end of a slice is answered before the next one begins.
	number := 0
	slice := func(pair int, target int, length time.Duration, warmUp bool) {
		g := &segment{number: number, length: length, stream: uint64(pair), first: pair << 28, target: target}
		if warmUp {
			g.warmUp = length
		}
		r.segment(g)
		number++
	}
	pairs := int(o.Duration / (2 * o.Slice))
	for pair := range pairs + 1 {
		first := r.coin(pair)
		if pair > 0 {
			r.warm.Store(false)
		}
		for i := range 2 {
			if r.ctx.Err() != nil {
				return
			}
			switch {
			case pair > 0:
				slice(pair, first^i, o.Slice, false)
			case o.WarmUp > 0:
				slice(pair, first^i, o.WarmUp, true)
			}
		}
	}
}

// coin says which target is asked first in a pair.
func (r *run) coin(pair int) int {
	return int(rand.NewPCG(r.o.Seed, 0xc01<<48|uint64(pair)).Uint64() >> 63)
}

// place says which conversation the nth of a segment is, and with which target.
func (r *run) place(g *segment, n int) (number, target int) {
	switch {
	case g.target >= 0:
		return g.first + n, g.target
	case len(r.o.Targets) == 1:
		return n, 0
	}
	return n / 2, n&1 ^ r.coin(n/2)
}

func (r *run) segment(g *segment) {
	g.at = time.Since(r.began)
	var wg sync.WaitGroup
	defer wg.Wait()
	if r.o.Arrival == "closed" {
		var next atomic.Int64
		for range r.o.Clients {
			wg.Go(func() {
				for {
					intended := time.Since(r.began)
					measured, ok := r.begin(g, intended)
					if !ok {
						return
					}
					if !r.converse(g, int(next.Add(1)-1), intended, measured) {
						r.sleep(100 * time.Millisecond) // a server that refuses at once is not to be drowned
					}
				}
			})
		}
		return
	}
	slots := make(chan struct{}, r.o.MaxInFlight)
	next := r.arrivals(g.stream)
	for n := 0; ; n++ {
		intended := g.at + next()
		if r.enough(g, intended) || !r.sleep(intended-time.Since(r.began)) {
			return
		}
		select {
		case slots <- struct{}{}:
		case <-r.ctx.Done():
			return
		}
		// Here, not in the goroutine: what counts are the first of the schedule, in pairs.
		measured, ok := r.begin(g, intended)
		if !ok {
			return
		}
		wg.Go(func() {
			r.converse(g, n, intended, measured)
			<-slots
		})
	}
}

// sleep reports whether the run goes on.
func (r *run) sleep(d time.Duration) bool {
	if d <= 0 {
		return r.ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

// enough reports whether nothing more begins.
func (r *run) enough(g *segment, intended time.Duration) bool {
	return g.length > 0 && intended-g.at >= g.length || r.o.Requests > 0 && r.begun.Load() >= int64(r.o.Requests)
}

// begin reports whether a request may be sent, and counts.
func (r *run) begin(g *segment, intended time.Duration) (measured, ok bool) {
	if r.ctx.Err() != nil || r.enough(g, intended) {
		return false, false
	}
	measured = intended-g.at >= g.warmUp
	if measured && g.warmUp > 0 {
		r.warm.Store(false)
	}
	return measured, !measured || r.o.Requests == 0 || r.begun.Add(1) <= int64(r.o.Requests)
}

// converse holds the nth conversation of a segment, of which the first turn has begun, and reports whether all its requests
// were answered.
func (r *run) converse(g *segment, n int, intended time.Duration, measured bool) bool {
	number, target := r.place(g, n)
	c := r.conversation(number)
	d := r.dialogue(&c, target)
	for i := range c.turns {
		body, err := d.body(i)
		if err != nil {
			panic("BUG: " + err.Error())
		}
		s := sample{target: target, pair: number, turn: i, segment: g.number, measured: measured, intended: intended}
		r.inFlight.Add(1)
		text := r.ask(r.ctx, &s, body)
		r.inFlight.Add(-1)
		r.done.Add(1)
		r.add(&s)
		if s.failure != "" {
			return false
		}
		d.answered(text)
		if i+1 < len(c.turns) {
			intended = s.end + c.turns[i+1].think
			if !r.sleep(intended - time.Since(r.began)) {
				return true
			}
			var ok bool
			if measured, ok = r.begin(g, intended); !ok {
				return true
			}
		}
	}
	return true
}

func (r *run) add(s *sample) {
	if s.failure != "" && s.failure != interrupted {
		r.failed.Add(1)
	}
	if !s.measured {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.failure == "" {
		for _, d := range s.gaps {
			record(r.gaps[s.target], d)
			s.last += d
		}
		s.last += s.first
	}
	s.gaps = nil
	r.samples = append(r.samples, *s)
}

// report calls Progress until the function that is returned is called.
func (r *run) report() (stop func()) {
	if r.o.Progress == nil {
		return func() {}
	}
	o := &r.o
	say := func() {
		p := Progress{
			Elapsed: time.Since(r.began), Done: int(r.done.Load()), Failed: int(r.failed.Load()), InFlight: int(r.inFlight.Load()), WarmUp: r.warm.Load(),
		}
		warmUp := o.WarmUp
		if o.Slice > 0 {
			warmUp *= 2
		}
		if o.Duration > 0 {
			p.Share = min(1, p.Elapsed.Seconds()/(warmUp+o.Duration).Seconds())
		}
		if o.Requests > 0 {
			p.Share = min(1, max(p.Share, float64(r.begun.Load())/float64(o.Requests)))
		}
		o.Progress(p)
	}
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				say()
			case <-quit:
				return
			}
		}
	})
	return func() {
		close(quit)
		wg.Wait()
		say()
	}
}
