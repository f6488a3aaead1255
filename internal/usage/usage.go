// Package usage writes a record of what each request used, for billing: as lines of JSON into a file, or in batches to a web
// server. Records wait in memory, bounded, while a destination can't take them; a clean stop loses none.
//
// It imports nothing of kvgate's but lines and telemetry.
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
	"time"

	"kvgate/internal/lines"
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

// A Recorder writes records. It is a [telemetry.Sink], safe for concurrent use. Close ends it.
type Recorder struct {
	queues []*lines.Queue
	file   *lines.File // nil: none
}

// New returns a Recorder, which may write at once.
func New(o Options) (*Recorder, error) {
	if o.OnTrouble == nil {
		o.OnTrouble = func(error) {}
	}
	o.Interval = cmp.Or(o.Interval, 5*time.Second)
	if o.Client == nil {
		o.Client = &http.Client{Timeout: 10 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	r := &Recorder{}
	lo := lines.Options{What: "usage records", MaxBytes: o.MaxBytes, OnTrouble: o.OnTrouble}
	if o.File != "" {
		f, err := lines.OpenFile(lines.FileOptions{Name: o.File})
		if err != nil {
			return nil, fmt.Errorf("usage: %w", err)
		}
		r.file = f
		r.queues = append(r.queues, lines.New(f, lo))
	}
	if o.URL != "" {
		lo.Interval, lo.Spool = o.Interval, o.Spool
		r.queues = append(r.queues, lines.New(&webhook{o: &o}, lo))
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
		q.Add(b)
	}
}

// Reopen has the file opened anew, so that it may have been rotated away.
func (r *Recorder) Reopen() error {
	if r.file == nil {
		return nil
	}
	return r.file.Reopen()
}

// Close writes what waits, until ctx ends, and keeps what a web server did not take in its spool file. It returns an error if
// records were lost. Nothing may be observed after.
func (r *Recorder) Close(ctx context.Context) error {
	var errs []error
	for _, q := range r.queues {
		errs = append(errs, q.Close(ctx))
	}
	if r.file != nil {
		errs = append(errs, r.file.Close())
	}
	return errors.Join(errs...)
}

// A webhook is a web server that takes batches.
type webhook struct{ o *Options }

func (w *webhook) String() string { return "the webhook" }

// Deliver implements [lines.Destination].
func (w *webhook) Deliver(ctx context.Context, lines []byte) (int, error) {
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
