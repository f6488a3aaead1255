package admin

import (
	"fmt"
	"net/http"
	"sync"
	"time"
)

const (
	liveEvery     = time.Second // how often viewers are told what is new
	maxViewers    = 32          // at a time
	viewerBacklog = 8           // messages a viewer may be behind before it is sent everything anew
)

// live tells viewers what is going on, over server-sent events. While nobody looks, nothing runs and nothing is kept: what
// a first viewer wants to know of the time before is in the last requests.
type live struct {
	s    *Server
	tick func() (<-chan time.Time, func()) // tests have their own

	mu      sync.Mutex
	viewers map[*viewer]bool
	stop    chan struct{} // of the loop, closed when the last viewer goes; nil: nobody looks
	wake    chan struct{} // likewise: somebody came
	closed  bool
	running sync.WaitGroup
}

// A viewer is one open stream.
type viewer struct {
	out   chan []byte // closed when the stream is to end
	fresh bool        // it has yet to be sent everything; under live.mu
	gone  bool        // out is closed; likewise
}

func newLive(s *Server) *live {
	return &live{s: s, viewers: make(map[*viewer]bool), tick: func() (<-chan time.Time, func()) {
		t := time.NewTicker(liveEvery)
		return t.C, t.Stop
	}}
}

// join adds a viewer; nil: there are too many, or the listener is closing.
func (l *live) join() *viewer {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.viewers) >= maxViewers {
		return nil
	}
	v := &viewer{out: make(chan []byte, viewerBacklog), fresh: true}
	l.viewers[v] = true
	if l.stop == nil {
		l.stop, l.wake = make(chan struct{}), make(chan struct{}, 1)
		stop, wake := l.stop, l.wake
		l.running.Go(func() { l.loop(stop, wake) })
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return v
}

func (l *live) leave(v *viewer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(v)
}

// drop removes v. The caller holds mu.
func (l *live) drop(v *viewer) {
	if v.gone {
		return
	}
	v.gone = true
	close(v.out)
	if delete(l.viewers, v); len(l.viewers) == 0 {
		close(l.stop)
		l.stop = nil
	}
}

// close ends every stream and waits for the loop.
func (l *live) close() {
	l.mu.Lock()
	l.closed = true
	for v := range l.viewers {
		l.drop(v)
	}
	l.mu.Unlock()
	l.running.Wait()
}

// loop makes one message per tick for all viewers, until stop.
func (l *live) loop(stop, wake chan struct{}) {
	f := newFeed(l.s)
	ticks, end := l.tick()
	defer end()
	f.advance(time.Now())
	for {
		select {
		case <-stop:
			return
		case <-wake: // a newcomer need not wait for the tick
			l.send(f, stop, nil)
		case <-ticks:
			l.send(f, stop, f.advance(time.Now()))
		}
	}
}

// send hands delta to the viewers, and everything to those who are new or fell behind. A nil delta is not sent.
func (l *live) send(f *feed, stop chan struct{}, delta []byte) {
	var whole []byte
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != stop {
		return // everybody left, and whoever came since has a loop of their own
	}
	for v := range l.viewers {
		msg := delta
		if v.fresh {
			if whole == nil {
				whole = f.whole()
			}
			msg = whole
		}
		if msg == nil {
			continue
		}
		select {
		case v.out <- msg:
			v.fresh = false
		default:
			v.fresh = true // its connection is slow
		}
	}
}

// serve is GET /debug/live: a stream of messages, or with ?once=1 one whole message as JSON.
func (l *live) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("once") != "" {
		f := newFeed(l.s)
		f.advance(time.Now())
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(f.whole())
		return
	}
	v := l.join()
	if v == nil {
		writeJSON(w, http.StatusServiceUnavailable, errorBody{fmt.Sprintf("%d viewers are looking already, or the gateway is stopping", maxViewers)})
		return
	}
	defer l.leave(v)
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // it would end the stream as if the viewer had gone
	w.Header().Set("Content-Type", "text/event-stream")
	for {
		select {
		case <-r.Context().Done():
			return
		case msg, ok := <-v.out:
			if !ok {
				return
			}
			_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout))
			if _, err := fmt.Fprintf(w, "data: %s\n\n", msg); err != nil || rc.Flush() != nil {
				return
			}
		}
	}
}
