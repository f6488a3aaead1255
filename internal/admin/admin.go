// Package admin is the second listener: metrics, health, reload, and what the gateway knows and why it chose. It is meant
// for loopback or a trusted network and has no authentication, but for actions, which need a token. It runs on net/http and must not import proxy or gateway:
// what it needs of them comes in as functions.
package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"kvgate/internal/admin/dashboard"
	"kvgate/internal/capture"
	"kvgate/internal/names"
	"kvgate/internal/version"
	"kvgate/pool"
	"kvgate/scoring"
	"kvgate/telemetry"
)

// Options are what the pages show and do. A nil function leaves its page out.
type Options struct {
	Table   *pool.Table         // required
	Now     func() pool.Instant // the table's clock; required
	Metrics http.Handler        // serves /metrics
	Recent  *telemetry.Recent   // the last requests

	// StaleAfter is the age at which a load is stale; nil: none is.
	StaleAfter func() time.Duration
	// Names returns what resolves names besides those that endpoints serve; nil: nothing does.
	Names func() *names.Resolver
	// Unseen reports whether an endpoint has not been looked at yet; nil: none is.
	Unseen func(*pool.Endpoint) bool
	// Missing lists what keeps the gateway from being ready; none is ready. It must not block.
	Missing func() []string
	// Reload loads the configuration again. It returns what it did, or an error whose text is for people.
	Reload func(context.Context) (ReloadResult, error)
	// Config returns the configuration in use, as YAML without secrets.
	Config func() []byte
	// Explain returns how a request would be handled.
	Explain func(*Inquiry) (scoring.Explanation, error)
	// Learned returns what has been learned of the models that a snapshot serves.
	Learned func(*pool.Snapshot) []pool.LearnedView
	// Adapters returns the managed adapters, as JSON-ready values.
	Adapters func() any
	// Sources returns how discovery is doing, as JSON-ready values.
	Sources func() any

	// Policy names the policy of a pool.
	Policy func(pool string) string
	// InFlight counts the requests that are being handled.
	InFlight func() int
	// Waiting returns where requests wait for admission or have been refused.
	Waiting func() []WaitingView
	// Explanation returns the explanation that was kept under a number; see telemetry.Record.Explained.
	Explanation func(number uint64) (scoring.Explanation, bool)

	// Token is the secret that actions ask for, as it is now; nil or "": there are no actions.
	Token func() string
	// Drain has an endpoint, by its ID, take no more requests, or take them again. It reports whether there is such an
	// endpoint and whether that changed anything.
	Drain func(endpoint string, on bool) (found, changed bool)
	// SetLogLevel changes the log level until the next reload; LogLevel says what it is.
	SetLogLevel func(level string) error
	// Capture begins to capture the bodies of requests, for run to write them; see package capture.
	Capture  func(o capture.Options, from string) (run func(context.Context, io.Writer) error, err error)
	LogLevel func() string

	MaxBodyBytes int64       // of a body to explain; default 32 MiB
	Log          *zap.Logger // nil logs nothing
}

// An Inquiry is a request that somebody wants to have explained.
type Inquiry struct {
	Path   string
	Fields []string // of its header, "Name: value"; they may hold a credential, which is not kept
	Key    string   // the name of a key that it is sent with, instead
	Body   []byte
}

// InquiryField is the header field in which POST /debug/explain takes one field of the request that it explains, as often as
// there are any.
const InquiryField = "X-Kvgate-Explain-Field"

var fieldName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$") // RFC 9110 5.6.2

// A ReloadResult is what a reload did.
type ReloadResult struct {
	Changed      bool     `json:"changed"`                 // false: the input is what is in use already
	File         string   `json:"file"`                    // that was read
	Hash         string   `json:"hash"`                    // of the configuration now in use, SHA-256
	NeedsRestart []string `json:"needs_restart,omitempty"` // keys whose values in the file take effect after a restart only
	Warnings     []string `json:"warnings,omitempty"`
}

// A Server is the admin listener.
type Server struct {
	o       Options
	http    *http.Server
	live    *live
	started time.Time
}

const (
	answerTimeout = 30 * time.Second
	maxProfile    = 5 * time.Minute // longest profile or trace
)

// New returns a server that answers once Serve is called.
func New(o Options) *Server {
	if o.Table == nil || o.Now == nil {
		panic("BUG: admin.Options needs Table and Now")
	}
	if o.MaxBodyBytes == 0 {
		o.MaxBodyBytes = 32 << 20
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	s := &Server{o: o, started: time.Now()}
	s.live = newLive(s)
	s.http = &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       answerTimeout,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    32 << 10,
		// What clients do wrong is theirs; what goes wrong here is logged where it happens.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	return s
}

// Serve answers requests on ln until Shutdown. On a loopback address it refuses requests for other host names: a web page
// that had its own name resolve to 127.0.0.1 (DNS rebinding) could read everything here otherwise.
func (s *Server) Serve(ln net.Listener) error {
	if a, ok := ln.Addr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
		next := s.http.Handler
		s.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !localName(r.Host) {
				http.Error(w, fmt.Sprintf("host %q is not this listener; ask for localhost or an address", clip(r.Host)), http.StatusForbidden)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
	if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin listener: %w", err)
	}
	return nil
}

// Shutdown stops accepting and waits for running requests, or for ctx; then it cuts what is left.
func (s *Server) Shutdown(ctx context.Context) {
	s.live.close() // or it would be waited for
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
}

// localName reports whether host, as in a Host header, is an address or a name of this machine. An address is fine: a
// browser does not send it for a page of somebody's domain.
func localName(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	_, err := netip.ParseAddr(host)
	return err == nil || host == "localhost" || strings.HasSuffix(host, ".localhost")
}

func clip(s string) string { return s[:min(len(s), 100)] }

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	get := func(path string, on bool, h http.HandlerFunc) {
		if on {
			mux.HandleFunc("GET "+path, h)
		}
	}
	get("/-/healthy", true, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "healthy") })
	get("/-/ready", s.o.Missing != nil, s.ready)
	if s.o.Metrics != nil {
		mux.Handle("GET /metrics", s.o.Metrics)
	}
	get("/debug/snapshot", true, s.snapshot)
	get("/debug/models", true, s.models)
	get("/debug/decisions", s.o.Recent != nil, s.decisions)
	get("/debug/config", s.o.Config != nil, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(s.o.Config())
	})
	get("/debug/sources", s.o.Sources != nil, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, 200, s.o.Sources()) })
	get("/debug/adapters", s.o.Adapters != nil, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, 200, s.o.Adapters()) })
	get("/debug/waiting", s.o.Waiting != nil, func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, 200, map[string]any{"waiting": s.o.Waiting()})
	})
	get("/debug/version", true, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, 200, version.Get()) })
	get("/debug/decisions/{number}", s.o.Recent != nil, s.decision)
	get("/debug/live", true, s.live.serve)
	mux.Handle("GET /dashboard/", http.StripPrefix("/dashboard", dashboard.Handler()))
	post := func(path string, on, open bool, h http.HandlerFunc) {
		if on {
			mux.HandleFunc("POST "+path, s.action(open, h))
		}
	}
	post("/-/reload", s.o.Reload != nil, true, s.reload)
	post("/-/drain", s.o.Drain != nil, false, s.drain(true))
	post("/-/readmit", s.o.Drain != nil, false, s.drain(false))
	post("/-/log-level", s.o.SetLogLevel != nil, false, s.setLogLevel)
	post("/-/capture", s.o.Capture != nil, false, s.capture)
	post("/-/authorized", true, false, s.authorized)
	if s.o.Explain != nil {
		mux.HandleFunc("POST /debug/explain", s.explain)
	}
	get("/debug/pprof/", true, pprof.Index)
	get("/debug/pprof/cmdline", true, func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "not shown", http.StatusNotFound) // flags are nobody's business here
	})
	get("/debug/pprof/profile", true, pprof.Profile)
	get("/debug/pprof/symbol", true, pprof.Symbol)
	get("/debug/pprof/trace", true, pprof.Trace)
	get("/{$}", true, index)

	// Web pages of other origins may not post here.
	guarded := http.NewCrossOriginProtection().Handler(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit := int64(4 << 10)
		if r.URL.Path == "/debug/explain" {
			limit = s.o.MaxBodyBytes
		}
		r.Body = http.MaxBytesReader(w, r.Body, limit)
		wait := answerTimeout
		if strings.HasPrefix(r.URL.Path, "/debug/pprof/") {
			seconds, _ := strconv.ParseFloat(r.URL.Query().Get("seconds"), 64)
			if seconds > maxProfile.Seconds() {
				http.Error(w, fmt.Sprintf("seconds=%g; at most %g", seconds, maxProfile.Seconds()), http.StatusBadRequest)
				return
			}
			wait += maxProfile
		}
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait))
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		guarded.ServeHTTP(w, r)
	})
}

func index(w http.ResponseWriter, r *http.Request) {
	if strings.Contains(r.Header.Get("Accept"), "text/html") { // a browser
		http.Redirect(w, r, "/dashboard/", http.StatusSeeOther)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	fmt.Fprint(w, `kvgate, admin listener

GET  /dashboard/          all of this in a browser, live
GET  /metrics             for Prometheus
GET  /-/healthy           the process lives
GET  /-/ready             it can take requests; otherwise what is missing
POST /-/reload            load the configuration again, all or nothing
POST /-/drain?endpoint=   give an endpoint no more requests; /-/readmit undoes that   } these need
POST /-/capture?for=      show the bodies of requests (&max_bytes=&model=)            }
POST /-/log-level?level=  change the log level until the next reload                  } admin.token
GET  /debug/snapshot      every endpoint and what is known of it
GET  /debug/models        every name that clients may ask for
GET  /debug/decisions?n=  the last requests, where they went and why (&endpoint=ID: those of one endpoint)
GET  /debug/decisions/N   one of them, with its explanation if that was kept
GET  /debug/live          what the dashboard shows, as server-sent events (?once=1: one message as JSON)
POST /debug/explain?path= how a request with this body would be handled (&format=text for people; &key= the name of its key;
                          X-Kvgate-Explain-Field: NAME: VALUE for each field of its header)
GET  /debug/config        the configuration in use, without secrets
GET  /debug/sources       how discovery is doing
GET  /debug/waiting       requests that wait for admission, by pool, class and tenant
GET  /debug/adapters      the managed adapters, and where they are
GET  /debug/version       what was built
GET  /debug/pprof/        Go's profiles
`)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // the client has gone, or it hasn't
}

// An errorBody is how every error here is told.
type errorBody struct {
	Error string `json:"error"`
}

func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	if missing := s.o.Missing(); len(missing) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintf(w, "not ready: %s\n", strings.Join(missing, "; "))
		return
	}
	fmt.Fprintln(w, "ready")
}

func (s *Server) reload(w http.ResponseWriter, r *http.Request) {
	res, err := s.o.Reload(r.Context())
	if err != nil {
		writeJSON(w, http.StatusUnprocessableEntity, errorBody{err.Error()})
		return
	}
	writeJSON(w, 200, res)
}

func (s *Server) snapshot(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, 200, s.view())
}

// view is the table, with why the last scrape of each endpoint failed.
func (s *Server) view() pool.View {
	snap, now := s.o.Table.Load(), s.o.Now()
	v := pool.View{Version: snap.Version, Endpoints: make([]pool.EndpointView, len(snap.Rows))}
	if s.o.Learned != nil {
		v.Learned = s.o.Learned(snap)
	}
	for i := range snap.Rows {
		v.Endpoints[i] = s.viewRow(&snap.Rows[i], now)
	}
	return v
}

func (s *Server) viewRow(r *pool.Row, now pool.Instant) pool.EndpointView {
	e := r.View(now)
	e.Load.Stale = s.o.StaleAfter != nil && r.Stale(now, pool.Instant(s.o.StaleAfter()))
	if failures, err := s.o.Table.LastError(r.Endpoint); err != nil {
		e.Error = err.Error()
		if failures > 1 {
			e.Error = fmt.Sprintf("%v (%d times in a row)", err, failures)
		}
	}
	if s.o.Unseen != nil && s.o.Unseen(r.Endpoint) {
		e.Healthy, e.State = false, []string{"unknown"}
	}
	return e
}

// A ModelView is one name that clients may ask for.
type ModelView struct {
	ID          string   `json:"id"`
	Pool        string   `json:"pool"` // "" where requests for an alias or a rule's name may go to several
	Adapter     bool     `json:"adapter"`
	Base        string   `json:"base,omitempty"` // of an adapter
	MaxModelLen *int64   `json:"max_model_len"`  // tokens; null is unknown
	Endpoints   []string `json:"endpoints"`      // IDs of those that serve it
	// By is alias or rule where one of these decides what the name stands for, and StandsFor are the served names that
	// its requests may go to, fallbacks last.
	By        string   `json:"by,omitempty"`
	StandsFor []string `json:"stands_for,omitempty"`
}

// A ModelsView is what /debug/models shows.
type ModelsView struct {
	Version uint64      `json:"version"`
	Models  []ModelView `json:"models"`
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	var r *names.Resolver
	if s.o.Names != nil {
		r = s.o.Names()
	}
	writeJSON(w, 200, Models(s.o.Table.Load(), r))
}

// Models lists every name that clients may ask for: those that are served, by pool, base models first, and then those of
// aliases and rules that lead to one. A nil resolver has none.
func Models(s *pool.Snapshot, r *names.Resolver) ModelsView {
	v := ModelsView{Version: s.Version, Models: []ModelView{}}
	for t := range s.Targets() {
		m := ModelView{ID: t.Name, Pool: s.Pools[t.Pool].Name, Adapter: t.Adapter, Endpoints: []string{}}
		if t.Adapter {
			m.Base = t.Base
		}
		m.add(s, t)
		v.Models = append(v.Models, m)
	}
	sortModels(v.Models)
	for _, name := range r.Listed() {
		to, by := r.Leads(s, name)
		if len(to) == 0 || len(to) == 1 && to[0].Name == name {
			continue
		}
		m := ModelView{ID: name, Pool: s.Pools[to[0].Pool].Name, By: by.String(), Endpoints: []string{}}
		for _, t := range to {
			if t.Pool != to[0].Pool {
				m.Pool = ""
			}
			m.StandsFor = append(m.StandsFor, t.Name)
			m.add(s, t)
		}
		// A name that is served as well is the rule's or the alias's.
		if i := slices.IndexFunc(v.Models, func(o ModelView) bool { return o.ID == name }); i >= 0 {
			v.Models = slices.Delete(v.Models, i, i+1)
		}
		v.Models = append(v.Models, m)
	}
	return v
}

// add takes in that requests for m may go to t.
func (m *ModelView) add(s *pool.Snapshot, t *pool.Target) {
	if t.MaxModelLen > 0 && (m.MaxModelLen == nil || *m.MaxModelLen < t.MaxModelLen) {
		m.MaxModelLen = &t.MaxModelLen
	}
	for _, r := range t.Rows {
		if id := s.Rows[r].Endpoint.ID; !slices.Contains(m.Endpoints, id) {
			m.Endpoints = append(m.Endpoints, id)
		}
	}
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		status, what := http.StatusBadRequest, "reading the body: "+err.Error()
		if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
			status, what = http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than limits.body_bytes, %d bytes", e.Limit)
		}
		writeJSON(w, status, errorBody{what})
		return
	}
	in := &Inquiry{Path: cmp.Or(r.URL.Query().Get("path"), "/v1/chat/completions"), Key: r.URL.Query().Get("key"), Fields: r.Header.Values(InquiryField), Body: body}
	for _, f := range in.Fields {
		if name, _, ok := strings.Cut(f, ":"); !ok || !fieldName.MatchString(name) {
			writeJSON(w, http.StatusBadRequest, errorBody{InquiryField + `: is no header field; want "Name: value"`}) // nothing of it is told: it may be a key
			return
		}
	}
	e, err := s.o.Explain(in)
	if err != nil {
		writeJSON(w, http.StatusBadRequest, errorBody{err.Error()})
		return
	}
	if r.URL.Query().Get("format") == "text" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprint(w, e.String())
		return
	}
	writeJSON(w, 200, e)
}
