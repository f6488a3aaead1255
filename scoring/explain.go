package scoring

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvgate/pool"
)

// An Explanation is a decision with everything that it rested on.
type Explanation struct {
	// Asked and Resolved are filled in by whoever resolved the name: what the request named, if that is not the model, and
	// the steps from there to the model. Pool is the model's.
	Asked    string   `json:"asked,omitempty"`
	Resolved []string `json:"resolved,omitempty"`
	Pool     string   `json:"pool,omitempty"`
	// So are these. FallsBack are the models that the request goes on to if this one can't take it. Waits says that it would
	// wait for room, with Waiting others.
	FallsBack []Fallback `json:"falls_back,omitempty"`
	// Caller is who the request is from, where that is known. Limits are those on what it may use. Refused says that it is
	// not sent on, and what it is answered; nothing below means anything then.
	Caller  *CallerExplanation `json:"caller,omitempty"`
	Limits  []LimitExplanation `json:"limits,omitempty"`
	Refused *Refusal           `json:"refused,omitempty"`
	// Pinned is the endpoint that alone can take the request, since the response that it continues is there.
	Pinned  string `json:"pinned,omitempty"`
	Waits   bool   `json:"waits,omitempty"`
	Waiting int    `json:"waiting,omitempty"`

	Policy          string  `json:"policy"`
	SnapshotVersion uint64  `json:"snapshot_version"`
	Model           string  `json:"model"`
	PromptTokens    int32   `json:"prompt_tokens"`
	OutputTokens    int32   `json:"output_tokens"`
	Chosen          string  `json:"chosen,omitempty"` // ID of the endpoint
	RunnerUp        string  `json:"runner_up,omitempty"`
	AheadBy         float64 `json:"ahead_by"` // of the runner-up: in tokens under auto, in score with weights
	Panic           bool    `json:"panic,omitempty"`
	Error           string  `json:"error,omitempty"`

	Endpoints []EndpointExplanation `json:"endpoints"`
	Omitted   int                   `json:"omitted,omitempty"` // endpoints that Trim left out
}

// A CallerExplanation is who a request is from. It holds no secret.
type CallerExplanation struct {
	Key    string `json:"key,omitempty"` // the name of the credential
	Tenant string `json:"tenant,omitempty"`
	Class  string `json:"class"`          // of priority
	Note   string `json:"note,omitempty"` // what was not looked at
}

// A LimitExplanation is one limit, how much of it is used, and whether the request fits.
type LimitExplanation struct {
	Limit             string `json:"limit"` // in words
	Of                int64  `json:"of"`
	Used              int64  `json:"used"`
	Asked             int64  `json:"asked"`
	Refused           bool   `json:"refused,omitempty"`
	RetryAfterSeconds int    `json:"retry_after_seconds,omitempty"`
}

// A Refusal is the answer to a request that is not sent on.
type Refusal struct {
	Status            int    `json:"status"`
	Code              string `json:"code"`
	Message           string `json:"message"`
	RetryAfterSeconds int    `json:"retry_after_seconds,omitempty"`
}

// A Fallback is a model that a request goes on to, and the endpoint that would be chosen for it; "" if there is none.
type Fallback struct {
	Model  string `json:"model"`
	Pool   string `json:"pool"`
	Chosen string `json:"chosen,omitempty"`
}

// An EndpointExplanation is what a decision thought of one endpoint.
type EndpointExplanation struct {
	ID       string  `json:"id"`
	Chosen   bool    `json:"chosen,omitempty"`
	Filtered string  `json:"filtered,omitempty"` // the filter that keeps it out; see Filters
	Busy     bool    `json:"busy,omitempty"`
	Fresh    bool    `json:"fresh"`
	Age      float64 `json:"scrape_age_seconds"` // negative if never scraped

	CachedTokens           int32   `json:"cached_tokens"`
	PrefillTokensPerSecond float64 `json:"prefill_tokens_per_second"`

	Terms       *Terms         `json:"terms_tokens,omitempty"`  // under auto
	TermSeconds *Terms         `json:"terms_seconds,omitempty"` // the same over the endpoint's prefill rate
	Cost        float32        `json:"cost_tokens,omitempty"`
	Scores      []ScoreExplain `json:"scores,omitempty"` // with weights
	Total       float64        `json:"total,omitempty"`
	Requests    int64          `json:"booked_requests"`
}

// A ScoreExplain is one scorer's part.
type ScoreExplain struct {
	Scorer string  `json:"scorer"`
	Score  float64 `json:"score"` // 0..1
	Weight float64 `json:"weight"`
}

// recorder collects an Explanation while run decides.
type recorder struct {
	p    *Policy
	e    Explanation
	rows map[int32]int // row to index of e.Endpoints
	own  float32
}

// Explain decides like [Policy.Choose], by the same code, and tells why. It books nothing and remembers nothing.
func (p *Policy) Explain(req *Request, s *pool.Snapshot, now pool.Instant) Explanation {
	sc := p.scratch.Get().(*scratch)
	defer p.release(sc)
	rec := &recorder{p: p, rows: make(map[int32]int), own: 1 + p.cost.OwnWork}
	sc.candidates.rec = rec
	var d Decision
	_, err := p.run(req, s, now, sc, rec, &d)
	e := &rec.e
	e.Policy, e.SnapshotVersion, e.Model = p.name, s.Version, req.Target.Name
	e.PromptTokens, e.OutputTokens = sc.candidates.prompt, sc.candidates.output
	rec.others(&sc.candidates)
	if err != nil {
		e.Error = err.Error()
		return *e
	}
	e.Panic = d.Panic
	e.Chosen = d.Endpoint.ID
	if d.RunnerUp != nil {
		e.RunnerUp = d.RunnerUp.ID
		if e.AheadBy = float64(d.RunnerUpCost - d.Cost); p.name == weightedName {
			e.AheadBy = -e.AheadBy
		}
	}
	for i := range e.Endpoints {
		ep := &e.Endpoints[i]
		ep.Chosen = ep.ID == e.Chosen
		if t := ep.Terms; t != nil {
			s := float32(ep.PrefillTokensPerSecond)
			ep.TermSeconds = &Terms{t.Pending / s, t.New / s, t.KV / s, t.Overflow / s, t.Adapter / s, t.Stale / s, t.SlowStart / s, t.Slowness}
		}
	}
	return *e
}

func (rec *recorder) judged(c *Candidates, row int32, t tier, f Filter) {
	r := &c.snapshot.Rows[row]
	age := -1.0
	if r.ScrapedAt != 0 {
		age = max(0, c.now.Sub(r.ScrapedAt).Seconds())
	}
	rec.rows[row] = len(rec.e.Endpoints)
	rec.e.Endpoints = append(rec.e.Endpoints, EndpointExplanation{
		ID:                     r.Endpoint.ID,
		Filtered:               f.String(),
		Busy:                   t == tierBusy,
		Fresh:                  r.Fresh(c.now, c.p.staleAfter),
		Age:                    age,
		PrefillTokensPerSecond: c.p.learn.prefillRate(r.Endpoint),
		Requests:               r.Booked().Requests,
	})
}

// others lists the endpoints of the pool that are not known to serve the model.
func (rec *recorder) others(c *Candidates) {
	p := c.snapshot.Pools[c.target.Pool]
	for ri := p.First; ri < p.End; ri++ {
		if _, there := rec.rows[ri]; there {
			continue
		}
		if _, f := c.judge(&c.snapshot.Rows[ri]); f&(FilterDown|FilterDraining|FilterAsleep|FilterNotReady) != 0 {
			rec.judged(c, ri, tierOut, f)
		} else {
			rec.judged(c, ri, tierOut, FilterServes)
		}
	}
}

func (rec *recorder) at(row int32) *EndpointExplanation { return &rec.e.Endpoints[rec.rows[row]] }

// termsOf is where the terms of row go; nil in Choose.
func (rec *recorder) termsOf(row int32) *Terms {
	if rec == nil {
		return nil
	}
	t := new(Terms)
	rec.at(row).Terms = t
	return t
}

// cached notes what m saves: tokens of prefill, and overflow.
func (rec *recorder) cached(m match, overflow float32) {
	e := rec.at(m.row)
	e.CachedTokens = m.tokens
	e.Terms.New -= rec.own * float32(m.tokens)
	e.Terms.Overflow -= overflow
}

func (rec *recorder) adapter(row int32, tokens float32) { rec.at(row).Terms.Adapter = tokens }

func (rec *recorder) costs(c *Candidates, cost []float32) {
	for i, ri := range c.target.Rows {
		if v := cost[i]; v < math.MaxFloat32 {
			e := rec.at(ri)
			switch e.Cost = v; { // without its tier, which is said in words
			case e.Busy:
				e.Cost -= tierCost[tierBusy]
			case e.Filtered != "":
				e.Cost -= tierCost[tierEjected]
			}
		}
	}
}

func (rec *recorder) scores(c *Candidates, s *weighted, out []float64) {
	for i, v := range out {
		e := rec.at(c.index[i])
		e.CachedTokens = c.cached[i]
		e.Scores = append(e.Scores, ScoreExplain{s.name, v, s.weight})
	}
}

func (rec *recorder) totals(c *Candidates, total []float64) {
	for i, v := range total {
		rec.at(c.index[i]).Total = v
	}
}

// Choose has e say that id was chosen, for a decision that was explained just before it was made.
func (e *Explanation) Choose(id string) {
	if e.Chosen == id {
		return
	}
	e.Endpoints = slices.Clone(e.Endpoints)
	e.Chosen, e.RunnerUp, e.AheadBy = id, "", 0
	for i := range e.Endpoints {
		e.Endpoints[i].Chosen = e.Endpoints[i].ID == id
	}
}

// Trim sorts the endpoints, chosen one first and best cost next, and leaves out those beyond n.
func (e *Explanation) Trim(n int) {
	sortExplained(e.Endpoints)
	if more := len(e.Endpoints) - n; more > 0 {
		e.Endpoints, e.Omitted = slices.Clone(e.Endpoints[:n]), more
	}
}

func sortExplained(rows []EndpointExplanation) {
	slices.SortStableFunc(rows, func(a, b EndpointExplanation) int {
		switch {
		case a.Chosen != b.Chosen:
			return boolOrder(a.Chosen)
		case (a.Filtered == "") != (b.Filtered == ""):
			return boolOrder(a.Filtered == "")
		case a.Busy != b.Busy:
			return boolOrder(!a.Busy)
		case a.Cost != b.Cost:
			return boolOrder(a.Cost < b.Cost)
		case a.Total != b.Total:
			return boolOrder(a.Total > b.Total)
		}
		return strings.Compare(a.ID, b.ID)
	})
}

// String returns the explanation as a table, chosen endpoint first and best cost next.
func (e Explanation) String() string {
	var b bytes.Buffer
	for _, r := range e.Resolved {
		fmt.Fprintf(&b, "%s\n", r)
	}
	if c := e.Caller; c != nil {
		b.WriteString("from ")
		if c.Key != "" {
			fmt.Fprintf(&b, "key %s, ", c.Key)
		}
		if c.Tenant != "" {
			fmt.Fprintf(&b, "tenant %s, ", c.Tenant)
		}
		fmt.Fprintf(&b, "priority %s", c.Class)
		if c.Note != "" {
			fmt.Fprintf(&b, " (%s)", c.Note)
		}
		b.WriteByte('\n')
	}
	for _, l := range e.Limits {
		word := "fits"
		if l.Refused {
			word = "does not fit"
		}
		fmt.Fprintf(&b, "limit %s: %s\n", l.Limit, word)
	}
	if r := e.Refused; r != nil {
		fmt.Fprintf(&b, "refused: %d %s: %s\n", r.Status, r.Code, r.Message)
		if r.RetryAfterSeconds > 0 {
			fmt.Fprintf(&b, "Retry-After: %d\n", r.RetryAfterSeconds)
		}
		if len(e.Endpoints) == 0 {
			return b.String()
		}
	}
	if e.Pinned != "" {
		fmt.Fprintf(&b, "it goes to %s, where the response is that it continues\n", e.Pinned)
	}
	fmt.Fprintf(&b, "policy %s, snapshot %d, model %s, prompt %d tokens, output %d expected\n", e.Policy, e.SnapshotVersion, e.Model, e.PromptTokens, e.OutputTokens)
	if e.Error != "" {
		fmt.Fprintf(&b, "no decision: %s\n", e.Error)
	}
	for _, f := range e.FallsBack {
		fmt.Fprintf(&b, "if it can't take it: %s, at %s\n", f.Model, cmp.Or(f.Chosen, "nobody"))
	}
	if e.Waits {
		fmt.Fprintf(&b, "it waits until one of these has room, with %d others; its place is chosen then\n", e.Waiting)
	}
	if e.Panic {
		b.WriteString("every endpoint is down or ejected: all are tried\n")
	}
	rows := slices.Clone(e.Endpoints)
	sortExplained(rows)
	if len(rows) > 0 && rows[0].Terms != nil {
		b.WriteString("age: of the last scrape. cached: prompt tokens. pending to slow start: in prefill tokens, slowness a factor on the first four;\n" +
			"new: uncached prompt tokens, weighted for what they delay. cost: their sum, seconds: at this endpoint's pace; less is better\n")
	}
	var table bytes.Buffer
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	for i, r := range rows {
		if i == 0 {
			fmt.Fprint(w, "endpoint\tage\tbooked\tcached")
			switch {
			case r.Terms != nil:
				fmt.Fprint(w, "\tpending\tnew\tkv\toverflow\tadapter\tstale\tslow start\tslowness\tcost (tokens)\tseconds")
			case len(r.Scores) > 0:
				for _, s := range r.Scores {
					fmt.Fprintf(w, "\t%s ×%g", s.Scorer, s.Weight)
				}
				fmt.Fprint(w, "\ttotal")
			}
			fmt.Fprintln(w, "\t")
		}
		age := "unknown"
		if r.Age >= 0 {
			age = time.Duration(r.Age * float64(time.Second)).Round(time.Millisecond).String()
			if !r.Fresh {
				age += " (stale)"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d", r.ID, age, r.Requests, r.CachedTokens)
		if t := r.Terms; t != nil {
			fmt.Fprintf(w, "\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%.0f\t%.3f", t.Pending, t.New, t.KV, t.Overflow, t.Adapter, t.Stale, t.SlowStart, t.Slowness,
				t.Sum(), float64(t.Sum())/r.PrefillTokensPerSecond)
		}
		for _, s := range r.Scores {
			fmt.Fprintf(w, "\t%.2f", s.Score)
		}
		if len(r.Scores) > 0 {
			fmt.Fprintf(w, "\t%.2f", r.Total)
		}
		switch {
		case r.Chosen && r.Filtered != "": // panic mode
			fmt.Fprintf(w, "\t<- chosen though %s", r.Filtered)
		case r.Chosen:
			fmt.Fprint(w, "\t<- chosen")
		case r.Filtered != "":
			fmt.Fprintf(w, "\t%s", filteredBy(r.Filtered))
		case r.Busy:
			fmt.Fprint(w, "\tbusy")
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	for line := range strings.Lines(table.String()) { // cells are padded, also the last
		b.WriteString(strings.TrimRight(line, " \n"))
		b.WriteByte('\n')
	}
	if e.RunnerUp != "" && e.AheadBy < 0 && e.Policy != weightedName {
		fmt.Fprintf(&b, "runner-up: %s, %.0f tokens less: a near tie, which goes to the home of what nobody holds yet\n", e.RunnerUp, -e.AheadBy)
	} else if e.RunnerUp != "" {
		unit, by := "tokens", strconv.FormatFloat(e.AheadBy, 'f', 0, 64)
		if e.Policy == weightedName {
			unit, by = "of score", strconv.FormatFloat(e.AheadBy, 'f', 3, 64)
		}
		if e.AheadBy > float64(tierCost[tierBusy])/2 {
			unit, by = "state", "its"
		}
		fmt.Fprintf(&b, "runner-up: %s, behind by %s %s\n", e.RunnerUp, by, unit)
	}
	return b.String()
}

// filteredBy says in words why an endpoint is left out.
func filteredBy(filter string) string {
	switch filter {
	case FilterServes.String():
		return "does not serve this model"
	case FilterFit.String():
		return "filtered: the request does not fit"
	}
	return "filtered: " + strings.ReplaceAll(filter, "_", " ")
}

func boolOrder(first bool) int {
	if first {
		return -1
	}
	return 1
}
