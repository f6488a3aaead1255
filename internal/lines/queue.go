// Package lines takes lines from many goroutines and writes them somewhere else in the background: into a file that may be
// rotated, or wherever a [Destination] takes them. Lines wait in memory, bounded; whoever adds one never waits.
//
// It imports nothing of kvgate's.
package lines

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// batchBytes is about as much as is delivered at a time.
	batchBytes = 1 << 20
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// Options describe a [Queue].
type Options struct {
	What     string        // the lines are, in the plural: what errors begin with
	Interval time.Duration // for which a line waits for others to be delivered with; 0: it doesn't
	Spool    string        // file for what could not be delivered; "": it is lost then
	MaxBytes int           // that wait; default 64 MiB
	// OnTrouble is told when the destination fails, and of lines that are lost. It must not block. May be nil.
	OnTrouble func(error)
}

// A Destination takes whole lines; n is how many bytes it has taken for good. Deliver is called by one goroutine at a time.
type Destination interface {
	Deliver(ctx context.Context, lines []byte) (n int, err error)
	String() string
}

// A Queue holds lines for a destination. Add and Dropped are safe for concurrent use. Close ends it.
type Queue struct {
	to Destination
	o  Options

	mu   sync.Mutex
	buf  []byte
	lost int // lines, since it was last told

	dropped atomic.Uint64

	wake   chan struct{}
	ctx    context.Context // ends when delivering has to come to an end
	stop   context.CancelFunc
	ending chan struct{}
	done   chan struct{}
}

// New returns a Queue that delivers to a destination, beginning with what an earlier one left in the spool file.
func New(to Destination, o Options) *Queue {
	o.MaxBytes = cmp.Or(o.MaxBytes, 64<<20)
	if o.OnTrouble == nil {
		o.OnTrouble = func(error) {}
	}
	q := &Queue{to: to, o: o, wake: make(chan struct{}, 1), ending: make(chan struct{}), done: make(chan struct{})}
	q.ctx, q.stop = context.WithCancel(context.Background())
	if o.Spool != "" {
		left, err := takeSpool(o.Spool)
		if err != nil {
			o.OnTrouble(fmt.Errorf("%s spool: %w", o.What, err))
		}
		q.buf = left
	}
	if len(q.buf) > 0 {
		q.wake <- struct{}{}
	}
	go q.run()
	return q
}

// Dropped is how many lines were lost because too many waited.
func (q *Queue) Dropped() uint64 { return q.dropped.Load() }

// Waiting is how many bytes wait.
func (q *Queue) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.buf)
}

// Add takes a copy of line, which ends with a newline, or drops it if too much waits.
func (q *Queue) Add(line []byte) {
	q.mu.Lock()
	full := len(q.buf)+len(line) > q.o.MaxBytes
	if full {
		q.lost++
		q.dropped.Add(1)
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
func (q *Queue) run() {
	defer close(q.done)
	var pause time.Duration
	for {
		select {
		case <-q.wake:
		case <-q.ending:
		}
		ending := q.wait(q.o.Interval + pause)
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
func (q *Queue) wait(d time.Duration) bool {
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
func (q *Queue) drain(pause *time.Duration) error {
	for {
		q.mu.Lock()
		lines := q.buf
		lost := q.lost
		q.lost = 0
		q.mu.Unlock()
		if lost > 0 {
			q.o.OnTrouble(fmt.Errorf("%s: %d for %s are lost: more wait than fit into memory", q.o.What, lost, q.to))
		}
		if len(lines) == 0 {
			return nil
		}
		n, err := q.to.Deliver(q.ctx, batch(lines))
		q.mu.Lock()
		q.buf = q.buf[n:]
		if len(q.buf) == 0 {
			q.buf = nil
		}
		q.mu.Unlock()
		if err != nil {
			if *pause == 0 {
				q.o.OnTrouble(fmt.Errorf("%s: %s: %w", q.o.What, q.to, err))
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

// Close delivers what waits, until ctx ends, and keeps what was not taken in the spool file. It returns an error if lines were
// lost. Nothing may be added after.
func (q *Queue) Close(ctx context.Context) error {
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
	if q.o.Spool != "" {
		err := appendFile(q.o.Spool, q.buf)
		if err == nil {
			return nil
		}
		q.o.OnTrouble(fmt.Errorf("%s spool: %w", q.o.What, err))
	}
	return fmt.Errorf("%s: %d for %s are lost", q.o.What, bytes.Count(q.buf, []byte("\n")), q.to)
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
