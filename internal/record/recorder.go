package record

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"kvgate/internal/lines"
	"kvgate/telemetry"
)

// Options say what is recorded, and where.
type Options struct {
	File     string // required
	MaxBytes int64  // of the file; above it, it becomes File.1, that one File.2 …; 0: no limit
	Keep     int    // how many of those are kept
	// Sample is the share of the windows of time, each Window long, that are recorded; 0 is 1: all.
	Sample float64
	Window time.Duration // default 5 min
	// Tenants has tenants' names recorded.
	Tenants bool
	// Fleet says what serves the pools now. It is asked by the goroutine that writes. May be nil.
	Fleet  func() []Fleet
	Kvgate string // the version of the program
	// OnTrouble is told when the file fails, and of requests that were not recorded. It must not block. May be nil.
	OnTrouble  func(error)
	QueueBytes int              // that wait to be written; default 8 MiB
	Now        func() time.Time // default time.Now; called by many goroutines
}

const (
	defaultQueueBytes = 8 << 20
	defaultWindow     = 5 * time.Minute
	// fleetEvery is how often the fleet is looked at, while requests come.
	fleetEvery = 10 * time.Second
)

// A Recorder records finished requests. It is a [telemetry.Sink], safe for concurrent use. Close ends it.
type Recorder struct {
	o        Options
	veil     veil
	series   string
	file     *lines.File
	queue    *lines.Queue
	recorded atomic.Uint64
	buffers  sync.Pool

	// Of the goroutine that writes; mu is for the header, which is written by whoever opens the file.
	mu     sync.Mutex
	fleet  []Fleet // as it was written last
	looked time.Time
}

// New returns a Recorder, which goes on with the file if it exists.
func New(o Options) (*Recorder, error) {
	o.QueueBytes = cmp.Or(o.QueueBytes, defaultQueueBytes)
	o.Window = cmp.Or(o.Window, defaultWindow)
	o.Sample = cmp.Or(o.Sample, 1)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Fleet == nil {
		o.Fleet = func() []Fleet { return nil }
	}
	r := &Recorder{o: o, buffers: sync.Pool{New: func() any { return new(buffer) }}}
	var err error
	if r.veil, err = newVeil(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	r.series = r.veil.text(0xff, uint64(o.Now().UnixNano()), 8)
	r.file, err = lines.OpenFile(lines.FileOptions{Name: o.File, Mode: 0o600, MaxBytes: o.MaxBytes, Keep: o.Keep, Header: r.header})
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	r.queue = lines.New(r, lines.Options{What: "records of requests", MaxBytes: o.QueueBytes, OnTrouble: o.OnTrouble})
	return r, nil
}

// header is what a file begins with.
func (r *Recorder) header() []byte {
	h := Header{Version: Version, Series: r.series, Started: r.o.Now().UTC(), Kvgate: r.o.Kvgate}
	if r.o.Sample < 1 {
		h.Sample, h.WindowSeconds = r.o.Sample, r.o.Window.Seconds()
	}
	b := appendJSON(nil, &h)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fleet = r.o.Fleet()
	return r.appendFleet(b)
}

func (r *Recorder) appendFleet(b []byte) []byte {
	for i := range r.fleet {
		b = appendJSON(b, &fleetLine{&r.fleet[i]})
	}
	return b
}

type fleetLine struct {
	Fleet *Fleet `json:"fleet"`
}

func appendJSON(b []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return append(append(b, text...), '\n')
}

// Deliver implements [lines.Destination]. It says first what the fleet is, if that has changed.
func (r *Recorder) Deliver(ctx context.Context, b []byte) (int, error) {
	if fleet := r.changedFleet(); len(fleet) > 0 {
		if _, err := r.file.Deliver(ctx, fleet); err != nil {
			return 0, err
		}
	}
	return r.file.Deliver(ctx, b)
}

func (r *Recorder) String() string { return r.file.String() }

func (r *Recorder) changedFleet() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.o.Now()
	if now.Sub(r.looked) < fleetEvery {
		return nil
	}
	r.looked = now
	fleet := r.o.Fleet()
	if slices.Equal(fleet, r.fleet) {
		return nil
	}
	r.fleet = fleet
	return r.appendFleet(nil)
}

// A buffer is what a record is made in.
type buffer struct {
	line   Line
	blocks [maxBlocks * idBytes]byte
	id     [16]byte
	out    bytes.Buffer
}

// Observe implements [telemetry.Sink]. Requests that were not resolved to a pool are no load on anybody, and not recorded.
func (r *Recorder) Observe(rec *telemetry.Record) {
	if rec.Pool == "" {
		return
	}
	at := r.o.Now().Add(-time.Duration(rec.DurationSeconds * float64(time.Second)))
	if !sampled(at, r.o.Window, r.o.Sample) {
		return
	}
	buf := r.buffers.Get().(*buffer)
	defer r.buffers.Put(buf)
	l := &buf.line
	*l = Line{
		At: float64(at.UnixMicro()) / 1e6, Pool: rec.Pool, Model: cmp.Or(rec.Served, rec.Model), Adapter: rec.Adapter != "", API: rec.API,
		InputTokens: rec.PromptTokens, Estimated: true, MaxTokens: rec.MaxTokens, Stream: rec.Stream, PromptBytes: rec.PromptBytes,
		QueueSeconds: micro(rec.QueueSeconds), TTFTSeconds: micro(rec.TTFTSeconds), DurationSeconds: micro(rec.DurationSeconds),
		Status: rec.Status, Outcome: rec.Outcome,
	}
	if rec.UsageKnown {
		l.InputTokens, l.OutputTokens, l.Estimated, l.CachedTokens = rec.InputTokens, rec.OutputTokens, false, -1
		if rec.CachedKnown {
			l.CachedTokens = rec.CachedTokens
		}
	}
	if r.o.Tenants {
		l.Tenant = rec.Tenant
	}
	if rec.Session != 0 {
		l.Session = r.veil.text(ofSession, rec.Session, 8)
	}
	if rec.Endpoint != "" {
		l.Endpoint = r.veil.text(ofEndpoint, xxhash.Sum64String(rec.Endpoint), 4)
	}
	ids := rec.Prefix[:min(len(rec.Prefix), maxBlocks)]
	for i, h := range ids {
		r.veil.of(buf.id[:], ofBlock, h)
		copy(buf.blocks[i*idBytes:], buf.id[:idBytes])
	}
	l.Blocks = buf.blocks[:len(ids)*idBytes]
	buf.out.Reset()
	if err := json.NewEncoder(&buf.out).Encode(l); err != nil { // it copies what the record only lends, and ends the line
		panic("BUG: " + err.Error())
	}
	r.recorded.Add(1)
	r.queue.Add(buf.out.Bytes())
}

// micro cuts what is below a microsecond.
func micro(seconds float64) float64 { return float64(int64(seconds*1e6+0.5)) / 1e6 }

// Recorded is how many requests were taken in, those that were dropped included.
func (r *Recorder) Recorded() uint64 { return r.recorded.Load() }

// Dropped is how many of them were not written because too many waited.
func (r *Recorder) Dropped() uint64 { return r.queue.Dropped() }

// Reopen has the file opened anew, so that it may have been rotated away by someone else.
func (r *Recorder) Reopen() error { return r.file.Reopen() }

// Close writes what waits, until ctx ends. It returns an error if records were lost. Nothing may be observed after.
func (r *Recorder) Close(ctx context.Context) error {
	return errors.Join(r.queue.Close(ctx), r.file.Close())
}
