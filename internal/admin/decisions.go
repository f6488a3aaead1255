package admin

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/scoring"
	"kvgate/telemetry"
)

// A DecisionView is one finished request, as /debug/decisions shows it. What is unknown is absent.
type DecisionView struct {
	Number    uint64    `json:"number"`
	At        time.Time `json:"at"` // when it ended
	RequestID string    `json:"request_id,omitempty"`
	Path      string    `json:"path,omitempty"`
	Model     string    `json:"model,omitempty"`
	Adapter   string    `json:"adapter,omitempty"`
	Pool      string    `json:"pool,omitempty"`
	Status    int       `json:"status"`
	Outcome   string    `json:"outcome"`
	Error     string    `json:"error,omitempty"`

	Endpoint         string        `json:"endpoint,omitempty"`
	Cost             *float64      `json:"cost,omitempty"` // prefill tokens under auto, the total with weights
	RunnerUp         string        `json:"runner_up,omitempty"`
	RunnerUpCost     *float64      `json:"runner_up_cost,omitempty"`
	PromptTokens     int64         `json:"prompt_tokens,omitempty"`          // estimated
	NewTokens        *int64        `json:"new_tokens,omitempty"`             // of them, not in the prefix cache
	PredictedSeconds *float64      `json:"predicted_ttft_seconds,omitempty"` // from sending the request
	AnsweredSeconds  *float64      `json:"answered_ttft_seconds,omitempty"`  // the same as it was
	AdapterResident  *bool         `json:"adapter_resident,omitempty"`
	SnapshotVersion  uint64        `json:"snapshot_version,omitempty"`
	ScrapeAgeSeconds *float64      `json:"scrape_age_seconds,omitempty"`
	Attempts         []AttemptView `json:"attempts,omitempty"`

	QueueSeconds    float64  `json:"queue_seconds"`
	DecisionSeconds float64  `json:"decision_seconds"`
	TTFTSeconds     *float64 `json:"ttft_seconds,omitempty"`
	DurationSeconds float64  `json:"duration_seconds"`
	InputTokens     *int64   `json:"input_tokens,omitempty"`
	OutputTokens    *int64   `json:"output_tokens,omitempty"`
	CachedTokens    *int64   `json:"cached_tokens,omitempty"`

	Stream           bool     `json:"stream"`
	ReadSeconds      float64  `json:"read_seconds"`                 // from the first byte: the request had been read
	SentSeconds      *float64 `json:"sent_seconds,omitempty"`       // … it had been written to the endpoint
	FirstByteSeconds *float64 `json:"first_byte_seconds,omitempty"` // … the answer had begun: its first token if it is streamed
	OverheadSeconds  *float64 `json:"overhead_seconds,omitempty"`   // the gateway's own part until it was sent
	Explained        bool     `json:"explained"`                    // its explanation was kept
	// Explanation is told of one request at a time.
	Explanation *scoring.Explanation `json:"explanation,omitempty"`
}

// An AttemptView is one try of a request.
type AttemptView struct {
	Endpoint string  `json:"endpoint"`
	Outcome  string  `json:"outcome"`
	Seconds  float64 `json:"seconds"`
}

// A DecisionsView is what /debug/decisions shows, the newest first.
type DecisionsView struct {
	Total     uint64         `json:"total"`     // requests since the start
	Truncated bool           `json:"truncated"` // there were more than are shown
	Decisions []DecisionView `json:"decisions"`
}

// ViewDecision returns r as JSON-ready values.
func ViewDecision(r *telemetry.RecentRecord) DecisionView {
	v := DecisionView{
		Number: r.Number, At: r.At.UTC(), RequestID: r.RequestID, Path: r.Path, Model: r.Model, Adapter: r.Adapter, Pool: r.Pool,
		Status: r.Status, Outcome: r.Outcome, Error: r.Error, Endpoint: r.Endpoint,
		QueueSeconds: r.QueueSeconds, DecisionSeconds: r.DecisionSeconds, DurationSeconds: r.DurationSeconds,
	}
	v.Stream, v.ReadSeconds, v.Explained = r.Stream, r.ReadSeconds, r.Explained != 0
	for _, p := range [...]struct {
		to   **float64
		from *float64
	}{
		{&v.SentSeconds, &r.SentSeconds}, {&v.FirstByteSeconds, &r.FirstByteSeconds}, {&v.OverheadSeconds, &r.OverheadSeconds},
	} {
		if *p.from > 0 {
			*p.to = p.from
		}
	}
	for _, a := range r.Attempts {
		v.Attempts = append(v.Attempts, AttemptView(a))
	}
	if r.TTFTSeconds > 0 {
		v.TTFTSeconds = &r.TTFTSeconds
	}
	if r.UsageKnown {
		v.InputTokens, v.OutputTokens = &r.InputTokens, &r.OutputTokens
		if r.CachedKnown {
			v.CachedTokens = &r.CachedTokens
		}
	}
	if !r.Decided {
		return v
	}
	v.Cost, v.PromptTokens, v.NewTokens, v.SnapshotVersion = &r.Cost, r.PromptTokens, &r.NewTokens, r.SnapshotVersion
	if r.RunnerUp != "" {
		v.RunnerUp, v.RunnerUpCost = r.RunnerUp, &r.RunnerUpCost
	}
	if r.PredictedSeconds > 0 {
		v.PredictedSeconds = &r.PredictedSeconds
	}
	if r.AnsweredSeconds > 0 {
		v.AnsweredSeconds = &r.AnsweredSeconds
	}
	if r.Adapter != "" {
		v.AdapterResident = &r.AdapterResident
	}
	if r.ScrapeAgeSeconds >= 0 {
		v.ScrapeAgeSeconds = &r.ScrapeAgeSeconds
	}
	return v
}

func (s *Server) decisions(w http.ResponseWriter, r *http.Request) {
	n := 100
	if q := r.URL.Query().Get("n"); q != "" {
		var err error
		if n, err = strconv.Atoi(q); err != nil || n < 1 {
			writeJSON(w, http.StatusBadRequest, errorBody{"n: " + strconv.Quote(clip(q)) + " is not a number above 0"})
			return
		}
	}
	var keep func(*telemetry.Record) bool
	if id := r.URL.Query().Get("endpoint"); id != "" {
		keep = func(r *telemetry.Record) bool {
			return r.Endpoint == id || slices.ContainsFunc(r.Attempts, func(a telemetry.Attempt) bool { return a.Endpoint == id })
		}
	}
	last := s.o.Recent.Last(n, keep)
	v := DecisionsView{Total: s.o.Recent.Total(), Decisions: make([]DecisionView, len(last))}
	v.Truncated = uint64(len(last)) < v.Total
	for i := range last {
		v.Decisions[i] = ViewDecision(&last[i])
	}
	writeJSON(w, 200, v)
}

// decision is GET /debug/decisions/{number}.
func (s *Server) decision(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseUint(r.PathValue("number"), 10, 64)
	rr, ok := s.o.Recent.Get(n)
	if err != nil || !ok {
		writeJSON(w, http.StatusNotFound, errorBody{"request " + strconv.Quote(clip(r.PathValue("number"))) + " is not remembered; /debug/decisions lists those that are"})
		return
	}
	v := ViewDecision(&rr)
	if s.o.Explanation != nil && rr.Explained != 0 {
		if e, ok := s.o.Explanation(rr.Explained); ok {
			if len(rr.Attempts) > 0 {
				e.Choose(rr.Attempts[0].Endpoint) // ties are broken anew, and somebody may have booked in between
			}
			v.Explanation = &e
		}
	}
	writeJSON(w, 200, v)
}

func sortModels(m []ModelView) {
	slices.SortFunc(m, func(a, b ModelView) int {
		base := func(v ModelView) string { return cmp.Or(v.Base, v.ID) }
		return cmp.Or(strings.Compare(a.Pool, b.Pool), strings.Compare(base(a), base(b)), boolOrder(!a.Adapter, !b.Adapter), strings.Compare(a.ID, b.ID))
	})
}

// boolOrder puts true first.
func boolOrder(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}
