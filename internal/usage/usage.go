// Package usage writes a record of what each request used, for billing: as lines of JSON into a file, or in batches to a web
// server. Records wait in memory, bounded, while a destination can't take them; a clean stop loses none.
//
// It imports nothing of kvgate's but telemetry.
package usage

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"kvgate/telemetry"
)

// A Line is one record as it is written. Requests that reached no endpoint have none.
type Line struct {
	Time      time.Time `json:"time"` // when the request ended
	RequestID string    `json:"request_id"`
	Tenant    string    `json:"tenant"`
	Key       string    `json:"key"` // its id
	Model     string    `json:"model"`
	Served    string    `json:"served_model"` // what the model is called at the endpoints
	Adapter   string    `json:"adapter"`
	Pool      string    `json:"pool"`
	API       string    `json:"api"`
	Stream    bool      `json:"stream"`
	Status    int       `json:"status"`
	Outcome   string    `json:"outcome"`
	// The tokens that the server told of; null where it told none. CachedTokens are a part of InputTokens.
	InputTokens     *int64  `json:"input_tokens"`
	OutputTokens    *int64  `json:"output_tokens"`
	CachedTokens    *int64  `json:"cached_tokens"`
	QueueSeconds    float64 `json:"queue_seconds"`
	TTFTSeconds     float64 `json:"ttft_seconds"` // 0: not streamed, or nothing came
	DurationSeconds float64 `json:"duration_seconds"`
}

// Options say where records go.
type Options struct {
	File string // "": none
	URL  string // of the web server; "": none
	// Token is sent with each batch as a bearer token, if it is not "".
	Token    string
	Interval time.Duration // for which a record waits for others to be sent with; default 5 s
	Spool    string        // file for what could not be sent; "": it is lost then
	Client   *http.Client  // default one with a timeout of 10 s that follows no redirect
	// OnTrouble is told when a destination fails, and of records that are lost. It must not block. May be nil.
	OnTrouble func(error)
	MaxBytes  int // that wait for each destination; default 64 MiB
}

const (
	// batchBytes is about as much as is sent at a time.
	batchBytes = 1 << 20
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// A Recorder writes records. It is a [telemetry.Sink], safe for concurrent use. Close ends it.
type Recorder struct {
	queues []*queue
	file   *file
}

// New returns a Recorder, which may write at once.
func New(o Options) (*Recorder, error) {
	if o.OnTrouble == nil {
		o.OnTrouble = func(error) {}
	}
	o.Interval = cmp.Or(o.Interval, 5*time.Second)
	o.MaxBytes = cmp.Or(o.MaxBytes, 64<<20)
	if o.Client == nil {
		o.Client = &http.Client{Timeout: 10 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	r := &Recorder{}
	if o.File != "" {
		f := &file{name: o.File}
		if err := f.open(); err != nil {
			return nil, fmt.Errorf("usage: %w", err)
		}
		r.file = f
		r.queues = append(r.queues, newQueue(f, 0, &o))
	}
	if o.URL != "" {
		w := &webhook{o: &o}
		q := newQueue(w, o.Interval, &o)
		if q.spool = o.Spool; o.Spool != "" {
			left, err := takeSpool(o.Spool)
			if err != nil {
				o.OnTrouble(fmt.Errorf("usage spool: %w", err))
			}
			q.buf = left
		}
		r.queues = append(r.queues, q)
	}
	for _, q := range r.queues {
		q.start()
	}
	return r, nil
}

// Observe implements [telemetry.Sink].
func (r *Recorder) Observe(rec *telemetry.Record) {
	if !rec.Decided {
		return
	}
	l := Line{
		Time: time.Now().UTC(), RequestID: rec.RequestID, Tenant: rec.Tenant, Key: rec.Key, Model: rec.Model, Served: cmp.Or(rec.Served, rec.Model),
		Adapter: rec.Adapter, Pool: rec.Pool, API: rec.API, Stream: rec.Stream, Status: rec.Status, Outcome: rec.Outcome,
		QueueSeconds: rec.QueueSeconds, TTFTSeconds: rec.TTFTSeconds, DurationSeconds: rec.DurationSeconds,
	}
	if rec.UsageKnown {
		l.InputTokens, l.OutputTokens = &rec.InputTokens, &rec.OutputTokens
		if rec.CachedKnown {
			l.CachedTokens = &rec.CachedTokens
		}
	}
	b, err := json.Marshal(&l) // it copies what the record only lends
	if err != nil {
		panic("BUG: " + err.Error())
	}
	b = append(b, '\n')
	for _, q := range r.queues {
		q.add(b)
	}
}

// Reopen has the file opened anew, so that it may have been rotated away.
func (r *Recorder) Reopen() error {
	if r.file == nil {
		return nil
	}
	return r.file.open()
}

// Close writes what waits, until ctx ends, and keeps what a web server did not take in its spool file. It returns an error if
// records were lost. Nothing may be observed after.
func (r *Recorder) Close(ctx context.Context) error {
	var errs []error
	for _, q := range r.queues {
		errs = append(errs, q.close(ctx))
	}
	if r.file != nil {
		errs = append(errs, r.file.close())
	}
	return errors.Join(errs...)
}

// A destination takes whole lines; n is how many bytes it has taken for good.
type destination interface {
	deliver(ctx context.Context, lines []byte) (n int, err error)
	String() string
}

// A queue holds lines for a destination.
type queue struct {
	to       destination
	interval time.Duration
	o        *Options
	spool    string

	mu   sync.Mutex
	buf  []byte
	lost int // lines, since it was last told

	wake   chan struct{}
	ctx    context.Context // ends when delivering has to come to an end
	stop   context.CancelFunc
	ending chan struct{}
	done   chan struct{}
}

func newQueue(to destination, interval time.Duration, o *Options) *queue {
	q := &queue{to: to, interval: interval, o: o, wake: make(chan struct{}, 1), ending: make(chan struct{}), done: make(chan struct{})}
	q.ctx, q.stop = context.WithCancel(context.Background())
	return q
}

func (q *queue) start() {
	if len(q.buf) > 0 {
		q.wake <- struct{}{}
	}
	go q.run()
}

func (q *queue) add(line []byte) {
	q.mu.Lock()
	full := len(q.buf)+len(line) > q.o.MaxBytes
	if full {
		q.lost++
	} else {
		q.buf = append(q.buf, line...)
	}
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// run delivers until close.
func (q *queue) run() {
	defer close(q.done)
	var pause time.Duration
	for {
		select {
		case <-q.wake:
		case <-q.ending:
		}
		ending := q.wait(q.interval + pause)
		failed := q.drain(&pause)
		if ending {
			if failed == nil || q.ctx.Err() != nil {
				return
			}
			// The destination fails and the end has come: again, until there is no time left.
			select {
			case <-q.ctx.Done():
				return
			case <-time.After(min(pause, time.Second)):
			}
		}
		if failed != nil {
			select {
			case q.wake <- struct{}{}:
			default:
			}
		}
	}
}

// wait waits for d, or until the end, which it reports.
func (q *queue) wait(d time.Duration) bool {
	select {
	case <-q.ending:
		return true
	default:
	}
	if d <= 0 {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-q.ending:
		return true
	}
}

// drain delivers what is there. On failure what was not delivered stays.
func (q *queue) drain(pause *time.Duration) error {
	for {
		q.mu.Lock()
		lines := q.buf
		lost := q.lost
		q.lost = 0
		q.mu.Unlock()
		if lost > 0 {
			q.o.OnTrouble(fmt.Errorf("usage: %d records for %s are lost: more wait than fit into memory", lost, q.to))
		}
		if len(lines) == 0 {
			return nil
		}
		n, err := q.to.deliver(q.ctx, batch(lines))
		q.mu.Lock()
		q.buf = q.buf[n:]
		if len(q.buf) == 0 {
			q.buf = nil
		}
		q.mu.Unlock()
		if err != nil {
			if *pause == 0 {
				q.o.OnTrouble(fmt.Errorf("usage: %s: %w", q.to, err))
			}
			*pause = min(max(2**pause, minBackoff), maxBackoff)
			return err
		}
		*pause = 0
	}
}

// batch returns whole lines from the front of lines, about as much as is sent at a time.
func batch(lines []byte) []byte {
	if len(lines) <= batchBytes {
		return lines
	}
	if i := bytes.LastIndexByte(lines[:batchBytes], '\n'); i >= 0 {
		return lines[:i+1]
	}
	return lines
}

func (q *queue) close(ctx context.Context) error {
	close(q.ending)
	select {
	case <-q.done:
	case <-ctx.Done():
	}
	q.stop()
	<-q.done
	q.mu.Lock()
	defer q.mu.Unlock()
	left := len(q.buf)
	if left == 0 {
		return nil
	}
	if q.spool != "" {
		err := appendFile(q.spool, q.buf)
		if err == nil {
			return nil
		}
		q.o.OnTrouble(fmt.Errorf("usage spool: %w", err))
	}
	return fmt.Errorf("usage: %d records for %s are lost", bytes.Count(q.buf, []byte("\n")), q.to)
}

// A file is appended to.
type file struct {
	name string
	mu   sync.Mutex
	f    *os.File
}

func (f *file) String() string { return f.name }

func (f *file) open() error {
	n, err := os.OpenFile(f.name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	f.mu.Lock()
	old := f.f
	f.f = n
	f.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	return nil
}

func (f *file) deliver(_ context.Context, lines []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.f.Write(lines)
}

func (f *file) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.f.Sync(), f.f.Close())
}

// A webhook is a web server that takes batches.
type webhook struct{ o *Options }

func (w *webhook) String() string { return "the webhook" }

func (w *webhook) deliver(ctx context.Context, lines []byte) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.o.URL, bytes.NewReader(lines))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/x-ndjson")
	if w.o.Token != "" {
		req.Header.Set("Authorization", "Bearer "+w.o.Token)
	}
	resp, err := w.o.Client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode/100 != 2 {
		return 0, fmt.Errorf("status %d; want 2xx", resp.StatusCode)
	}
	return len(lines), nil
}

// takeSpool returns what is in the spool file and removes it.
func takeSpool(name string) ([]byte, error) {
	b, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return b, os.Remove(name)
}

func appendFile(name string, b []byte) error {
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}
