package modelsim

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// FaultKind is a way in which a model server fails.
type FaultKind string

// Faults of a request. Each applies to inference paths, or to those that begin
// with Fault.Path.
const (
	FaultSlow        FaultKind = "slow"         // response headers wait Delay
	FaultHang        FaultKind = "hang"         // no headers: until cleared, or Delay
	FaultReset       FaultKind = "reset"        // RST instead of a response
	FaultClose       FaultKind = "close"        // FIN instead of a response
	FaultStatus      FaultKind = "status"       // answers Status, with Retry-After and Body if set
	FaultEarlyStatus FaultKind = "early_status" // the same, before the body is read
	FaultGarbage     FaultKind = "garbage"      // bytes that are no HTTP response

	FaultResetStream  FaultKind = "reset_stream"   // RST after Events events, or in the middle of a body
	FaultCloseStream  FaultKind = "close_stream"   // the same with FIN: a chunked body without an end
	FaultHangStream   FaultKind = "hang_stream"    // silence after Events events: until cleared, or Delay
	FaultErrorEvent   FaultKind = "error_event"    // vLLM's error event after Events events, then [DONE]
	FaultQueueFull    FaultKind = "queue_full"     // SGLang's 503 as an event inside a 200 stream
	FaultFinishError  FaultKind = "finish_error"   // the engine ends the request with "error" after Events events
	FaultFinishAbort  FaultKind = "finish_abort"   // finish_reason "abort" after Events events, then [DONE]
	FaultBadChunk     FaultKind = "bad_chunk"      // broken chunked framing after Events events
	FaultEndEarly     FaultKind = "end_early"      // a clean end after Events events: no finish_reason, no [DONE]
	FaultCutMidEvent  FaultKind = "cut_mid_event"  // FIN in the middle of the event after Events events
	FaultJSONInStream FaultKind = "json_in_stream" // a JSON body where a stream was asked for
)

// Faults of the metrics page.
const (
	FaultMetricsFrozen   FaultKind = "metrics_frozen"   // the page as it is at the first scrape from now on
	FaultMetricsHang     FaultKind = "metrics_hang"     // never answers
	FaultMetricsHuge     FaultKind = "metrics_huge"     // Bytes of valid lines, default 10 GiB
	FaultMetricsGarbage  FaultKind = "metrics_garbage"  // Body, default HTML
	FaultMetricsGzipBomb FaultKind = "metrics_gzip"     // Bytes once inflated, default 10 GiB
	FaultMetricsRedirect FaultKind = "metrics_redirect" // 302 to Body
)

// Faults of the process; they take effect at once and do not stay in the list.
const (
	FaultOOM       FaultKind = "oom"        // cut and refused for Delay, then started anew
	FaultRestart   FaultKind = "restart"    // at once
	FaultRefuse    FaultKind = "refuse"     // new connections, for Delay
	FaultAccept    FaultKind = "accept"     // ends refuse
	FaultSleep     FaultKind = "sleep"      // at level Status, 1 or 2
	FaultWake      FaultKind = "wake"       // ends sleep
	FaultKeepAlive FaultKind = "keep_alive" // idle connections close after Delay
	FaultDead      FaultKind = "dead"       // the engine is dead: 500 for requests, 503 from /health; restart ends it
)

// Fault is one thing that goes wrong.
type Fault struct {
	Kind FaultKind `json:"kind"`
	// Path is a prefix of the paths it applies to; "" is every inference path,
	// for the metrics kinds /metrics.
	Path string `json:"path,omitempty"`
	// Skip requests pass before it begins, Count are hit before it is spent; 0 is
	// no limit.
	Skip  int `json:"skip,omitempty"`
	Count int `json:"count,omitempty"`

	DelaySeconds      float64 `json:"delay_seconds,omitempty"`
	Events            int     `json:"events,omitempty"` // data events to let through
	Status            int     `json:"status,omitempty"` // default 503
	RetryAfterSeconds int     `json:"retry_after_seconds,omitempty"`
	Bytes             int64   `json:"bytes,omitempty"`
	Body              string  `json:"body,omitempty"`

	frozen *frozenPage
}

type frozenPage struct {
	once sync.Once
	page []byte
}

var requestFaults = []FaultKind{
	FaultSlow, FaultHang, FaultReset, FaultClose, FaultStatus, FaultEarlyStatus, FaultGarbage,
	FaultResetStream, FaultCloseStream, FaultHangStream, FaultErrorEvent, FaultQueueFull, FaultFinishError, FaultFinishAbort,
	FaultBadChunk, FaultEndEarly, FaultCutMidEvent, FaultJSONInStream,
	FaultMetricsFrozen, FaultMetricsHang, FaultMetricsHuge, FaultMetricsGarbage, FaultMetricsGzipBomb, FaultMetricsRedirect,
}

var processFaults = []FaultKind{
	FaultOOM, FaultRestart, FaultRefuse, FaultAccept, FaultSleep, FaultWake, FaultKeepAlive, FaultDead,
}

// FaultKinds are the kinds that requests and scrapes meet, and those that befall the process.
func FaultKinds() (met, befalling []FaultKind) {
	return slices.Clone(requestFaults), slices.Clone(processFaults)
}

func (f *Fault) delay() time.Duration { return time.Duration(f.DelaySeconds * float64(time.Second)) }

func (f *Fault) is(kinds ...FaultKind) bool { return f != nil && slices.Contains(kinds, f.Kind) }

// faultSet is the list of faults in force.
type faultSet struct {
	mu      sync.Mutex
	list    []*Fault
	cleared chan struct{} // closed when the list changes; hanging requests wait on it
}

func (s *faultSet) set(list []*Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
	if s.cleared != nil {
		close(s.cleared)
	}
	s.cleared = make(chan struct{})
}

func (s *faultSet) clear() { s.set(nil) }

func (s *faultSet) snapshot() []Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Fault, 0, len(s.list))
	for _, f := range s.list {
		out = append(out, *f)
	}
	return out
}

// match returns the first fault for a path and counts it as used, with the
// channel that closes when the faults change.
func (s *faultSet) match(path string) (*Fault, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cleared == nil {
		s.cleared = make(chan struct{})
	}
	for i, f := range s.list {
		if !f.applies(path) {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		hit := *f
		if f.Count > 0 {
			if f.Count--; f.Count == 0 {
				s.list = slices.Delete(s.list, i, i+1)
			}
		}
		return &hit, s.cleared
	}
	return nil, s.cleared
}

func (f *Fault) applies(path string) bool {
	switch {
	case f.Path != "":
		return strings.HasPrefix(path, f.Path)
	case strings.HasPrefix(string(f.Kind), "metrics_"):
		return path == "/metrics"
	}
	return inferencePath(path)
}

// SetFaults replaces the faults in force and acts on those of the process. With
// no argument the server is well again, but for what a process fault did.
func (s *Server) SetFaults(faults ...Fault) error {
	acts, err := s.putFaults(faults)
	if err != nil {
		return err
	}
	return s.act(acts)
}

// putFaults replaces the faults in force and returns those of the process.
func (s *Server) putFaults(faults []Fault) (acts []Fault, err error) {
	list := make([]*Fault, 0, len(faults))
	for _, f := range faults {
		switch {
		case slices.Contains(requestFaults, f.Kind):
			if f.Kind == FaultMetricsFrozen {
				f.frozen = new(frozenPage)
			}
			list = append(list, &f)
		case slices.Contains(processFaults, f.Kind):
			acts = append(acts, f)
		default:
			return nil, fmt.Errorf("fault %q is unknown; want one of %v or %v", f.Kind, requestFaults, processFaults)
		}
	}
	s.faults.set(list)
	return acts, nil
}

func (s *Server) act(faults []Fault) error {
	for _, f := range faults {
		var err error
		switch f.Kind {
		case FaultOOM:
			s.OOM(f.delay())
		case FaultRestart:
			err = s.Restart()
		case FaultRefuse:
			s.Refuse(f.delay())
		case FaultAccept:
			err = s.Accept()
		case FaultSleep:
			s.Sleep(f.Status)
		case FaultWake:
			s.Wake()
		case FaultKeepAlive:
			s.SetKeepAlive(f.delay())
		case FaultDead:
			s.kill()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.Kind, err)
		}
	}
	return nil
}

// kill is the death of the engine process alone: its requests fail, /health
// turns 503, the API server lives on.
func (s *Server) kill() {
	p := s.proc.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	for c := range p.calls {
		p.abortLocked(c)
	}
	p.eng.SetPaused(true, p.now())
	p.nudge()
}

// Faults lists the faults in force.
func (s *Server) Faults() []Fault { return s.faults.snapshot() }

// serveControl answers /sim/…: POST /sim/faults takes a fault or a list, GET
// shows them, DELETE clears; POST /sim/fill takes {"fraction":0.9}; GET
// /sim/stats. Only loopback peers are answered.
func (s *Server) serveControl(w http.ResponseWriter, r *http.Request) {
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !peer.Addr().Unmap().IsLoopback() {
		http.NotFound(w, r)
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		return
	}
	fail := func(err error) {
		w.WriteHeader(http.StatusBadRequest)
		json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
	}
	w.Header().Set("Content-Type", "application/json")
	switch r.Method + " " + r.URL.Path {
	case "POST /sim/faults":
		var list []Fault
		if err := json.Unmarshal(body, &list); err != nil {
			var one Fault
			if err := json.Unmarshal(body, &one); err != nil {
				fail(fmt.Errorf("body: %w; want a fault or a list of faults", JSONError(err)))
				return
			}
			list = []Fault{one}
		}
		acts, err := s.putFaults(list)
		if err != nil {
			fail(err)
			return
		}
		// Answer first: the process may be about to die.
		json.NewEncoder(w).Encode(s.Faults())
		http.NewResponseController(w).Flush()
		s.act(acts)
	case "GET /sim/faults":
		json.NewEncoder(w).Encode(s.Faults())
	case "DELETE /sim/faults":
		s.SetFaults()
		json.NewEncoder(w).Encode(s.Faults())
	case "POST /sim/fill":
		var in struct {
			Fraction float64 `json:"fraction"`
		}
		if err := json.Unmarshal(body, &in); err != nil {
			fail(JSONError(err))
			return
		}
		if err := s.Fill(in.Fraction); err != nil {
			fail(err)
			return
		}
		json.NewEncoder(w).Encode(s.Stats())
	case "GET /sim/stats":
		json.NewEncoder(w).Encode(s.Stats())
	default:
		http.NotFound(w, r)
	}
}

// cut ends a response's connection: with RST, or with FIN after what was
// written. It leaves the handler nothing to do but return.
func cut(w http.ResponseWriter, reset bool, last []byte) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if len(last) > 0 {
		rw.Write(last)
		rw.Flush()
	}
	if tcp, ok := conn.(*net.TCPConn); ok && reset {
		tcp.SetLinger(0)
	}
	conn.Close()
}

// discardLog takes what net/http has to say about cut connections.
var discardLog = log.New(io.Discard, "", 0)
