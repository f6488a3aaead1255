// Package capture shows what clients send, bodies and all, to somebody who has the admin token, for a bounded time and size:
// requests are copied as they come in and written as lines of JSON, without credentials. One capture runs at a time.
//
// It must not import any other package of ours: the data path hands it bytes, the admin listener a writer.
package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// Options are what a capture is asked for.
type Options struct {
	For      time.Duration
	MaxBytes int64  // of bodies, all together
	Model    string // as clients write it; "": all requests
}

// Limits are the most that may be asked for.
type Limits struct {
	For      time.Duration
	MaxBytes int64
}

// Reasons for an end.
const (
	EndedByTime = "time"
	EndedBySize = "size"
	EndedByAsk  = "the one who asked has gone"
	EndedByStop = "the gateway stops"
)

// An End is the last line of a capture: how it ended, and what of.
type End struct {
	End       string `json:"end"` // a reason
	Requests  int    `json:"requests"`
	BodyBytes int64  `json:"body_bytes"` // written
	Dropped   uint64 `json:"dropped"`    // requests that came faster than they could be written
}

// A Request is one line of a capture.
type Request struct {
	Time      time.Time `json:"ts"` // when its body had been read
	RequestID string    `json:"request_id"`
	Method    string    `json:"method"`
	Path      string    `json:"path"`
	Model     string    `json:"model,omitempty"` // as the client wrote it
	Headers   []string  `json:"headers"`         // "Name: value"
	BodyBytes int       `json:"body_bytes"`      // as it was sent
	Truncated bool      `json:"truncated,omitempty"`
	Body      string    `json:"body,omitempty"`
	Binary    []byte    `json:"body_base64,omitempty"` // in place of Body, where that is not text
}

// Why a capture can't begin.
var (
	ErrOff  = errors.New("bodies of requests are not to be captured here; the configuration allows it with debug: {capture: {}}, and a restart")
	ErrBusy = errors.New("a capture is running already; wait for its end")
)

// queued is how many requests may wait to be written.
const queued = 256

// A Session is one capture. Take may be called by any goroutine, at any time.
type Session struct {
	o       Options
	left    atomic.Int64 // bytes of bodies
	dropped atomic.Uint64
	queue   chan *taken
	full    chan struct{} // closed when left is used up
	once    sync.Once
}

// A taken is a copy of a request.
type taken struct {
	at               time.Time
	id, method, path string
	model            string
	head, body       []byte
	bodyBytes        int
	truncated        bool
}

// New checks o against the limits and returns a session; its errors are for people.
func New(o Options, l Limits) (*Session, error) {
	switch {
	case o.For <= 0 || o.For > l.For:
		return nil, fmt.Errorf("for %s; want more than 0s and at most %s (debug.capture.max_for)", o.For, l.For)
	case o.MaxBytes <= 0 || o.MaxBytes > l.MaxBytes:
		return nil, fmt.Errorf("%d bytes; want more than 0 and at most %d (debug.capture.max_bytes)", o.MaxBytes, l.MaxBytes)
	}
	s := &Session{o: o, queue: make(chan *taken, queued), full: make(chan struct{})}
	s.left.Store(o.MaxBytes)
	return s, nil
}

// Take copies a request if it is one of those that are asked for. It doesn't block, and keeps nothing of its arguments. head
// are the lines of the header.
func (s *Session) Take(id, method, path, model, head, body []byte) {
	if s.o.Model != "" && string(model) != s.o.Model {
		return
	}
	room := s.left.Add(-int64(len(body))) + int64(len(body))
	if room <= 0 {
		s.once.Do(func() { close(s.full) })
		return
	}
	t := &taken{
		at: time.Now(), id: string(id), method: string(method), path: string(path), model: string(model),
		head: append([]byte(nil), head...), bodyBytes: len(body), truncated: int64(len(body)) > room,
	}
	t.body = append([]byte(nil), body[:min(int64(len(body)), room)]...)
	select {
	case s.queue <- t:
	default:
		s.dropped.Add(1)
	}
	if int64(len(body)) >= room {
		s.once.Do(func() { close(s.full) })
	}
}

// Write writes requests to w until the session's time or size is used up, ctx ends, or w takes no more, and then the End,
// which it returns. stopping ends when the gateway does; detach is called once nothing more is to be taken.
func (s *Session) Write(ctx context.Context, stopping <-chan struct{}, detach func(), w io.Writer) (End, error) {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	timer := time.NewTimer(s.o.For)
	defer timer.Stop()
	var end End
	put := func(t *taken) error {
		end.Requests++
		end.BodyBytes += int64(len(t.body))
		return e.Encode(t.request())
	}
	for end.End == "" {
		select {
		case t := <-s.queue:
			if err := put(t); err != nil {
				detach()
				end.End, end.Dropped = EndedByAsk, s.dropped.Load()
				return end, err
			}
		case <-timer.C:
			end.End = EndedByTime
		case <-s.full:
			end.End = EndedBySize
		case <-ctx.Done():
			end.End = EndedByAsk
		case <-stopping:
			end.End = EndedByStop
		}
	}
	detach()
	var err error
	for err == nil {
		select {
		case t := <-s.queue:
			err = put(t)
			continue
		default:
		}
		break
	}
	end.Dropped = s.dropped.Load()
	return end, errors.Join(err, e.Encode(end))
}

func (t *taken) request() *Request {
	fields, secrets := redactHead(t.head)
	body := redactBody(t.body, secrets, t.truncated)
	r := &Request{
		Time: t.at.UTC(), RequestID: t.id, Method: t.method, Path: t.path, Model: t.model,
		Headers: fields, BodyBytes: t.bodyBytes, Truncated: t.truncated,
	}
	if text := trimPartRune(body, t.truncated); utf8.Valid(text) {
		r.Body = string(text)
	} else {
		r.Binary = body
	}
	return r
}

// trimPartRune takes the part of a letter off the end of a text that was cut.
func trimPartRune(b []byte, cut bool) []byte {
	if !cut {
		return b
	}
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}
