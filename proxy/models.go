package proxy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvgate/internal/names"
	"kvgate/openai"
	"kvgate/pool"
)

// answerModels answers GET /v1/models and /v1/models/{id} from the table: the servers' own cards, unchanged, each model
// once, and a card of our own for a name that no server has spoken of yet.
func (x *exchange) answerModels() *failure {
	x.snapshot = x.h.table.Load()
	var body []byte
	if x.route.Kind == openai.KindModel {
		id, ok := openai.AppendUnescaped(nil, x.route.ID)
		if !ok {
			return &failure{outcome: BadRequest, message: "the model's name is not properly percent-encoded"}
		}
		switch t := x.snapshot.Target(id); {
		case t != nil && x.caller.May(t):
			body = appendCard(nil, x.snapshot, t)
		case t == nil && x.listed(string(id)):
			body = appendOwnCard(nil, string(id), nil)
		default: // what may not be used is not there
			x.model = append(x.model[:0], id...)
			return x.unknownModel()
		}
	} else {
		body = append(body, `{"object":"list","data":[`...)
		n := len(body)
		sep := func() {
			if len(body) > n {
				body = append(body, ',')
			}
		}
		for _, t := range modelTargets(x.snapshot) {
			if x.caller.May(t) {
				sep()
				body = appendCard(body, x.snapshot, t)
			}
		}
		for _, name := range x.routes.Names.Listed() {
			if x.snapshot.TargetString(name) == nil && x.listed(name) {
				sep()
				body = appendOwnCard(body, name, nil)
			}
		}
		body = append(body, "]}"...)
	}
	x.resp = response{status: 200}
	w := x.writer()
	w.b = appendStatusLine(w.b, 200, nil)
	w.b = append(w.b, "Content-Type: application/json\r\n"...)
	x.sendWhole(w, body, OK)
	return nil
}

// listed reports whether name is one of a rule or an alias that leads the caller somewhere.
func (x *exchange) listed(name string) bool {
	if !slices.Contains(x.routes.Names.Listed(), name) {
		return false
	}
	q := names.Request{Name: []byte(name), Path: x.path, Fields: x, Caller: x.caller}
	r := x.routes.Names.Resolve(x.snapshot, &q)
	return r.Target != nil || r.HasFallback() && x.routes.Names.FallBack(&r, x.snapshot, &q)
}

// modelTargets returns every name, base models before adapters.
func modelTargets(s *pool.Snapshot) []*pool.Target {
	var all []*pool.Target
	for t := range s.Targets() {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b *pool.Target) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(flag(a.Adapter), flag(b.Adapter)), cmp.Compare(a.Name, b.Name))
	})
	return all
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// appendCard appends the model's card, as the first endpoint that serves it has written it.
func appendCard(b []byte, s *pool.Snapshot, t *pool.Target) []byte {
	for _, i := range t.Rows {
		served := s.Rows[i].Served
		if served == nil {
			continue
		}
		for j := range served.Models {
			if m := &served.Models[j]; m.ID == t.Name && len(m.Card) > 0 {
				return append(b, m.Card...)
			}
		}
	}
	return appendOwnCard(b, t.Name, t)
}

// appendOwnCard appends a card for a name that no server has written one for. t is what it is called after; nil if that may
// differ from request to request.
func appendOwnCard(b []byte, name string, t *pool.Target) []byte {
	b = append(b, `{"id":`...)
	b = appendJSONString(b, name)
	b = append(b, `,"object":"model","created":0,"owned_by":"kvgate"`...)
	if t == nil {
		return append(b, '}')
	}
	if t.Adapter {
		b = append(b, `,"parent":`...)
		b = appendJSONString(b, t.Base)
	}
	if t.MaxModelLen > 0 {
		b = append(b, `,"max_model_len":`...)
		b = strconv.AppendInt(b, t.MaxModelLen, 10)
	}
	return append(b, '}')
}

// appendJSONString appends s quoted.
func appendJSONString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < 0x20 || c == 0x7f:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

const (
	maxCloseMatches = 3
	// maxCompared bounds the names that an unknown one is compared with, and their length.
	maxCompared      = 2000
	maxComparedBytes = 128
)

// unknownModel says that no endpoint is known to serve what x.model stands for, and what was perhaps meant.
func (x *exchange) unknownModel() *failure {
	name := string(x.model)
	if name == "" {
		return &failure{outcome: BadRequest, param: "model", message: "model is missing; GET /v1/models lists what is served"}
	}
	if untold(x.snapshot, x.h.opts.Now()) { // after a start, or where a pool has other endpoints all at once
		return &failure{outcome: NoEndpoints, message: "not every model server has said yet what it serves; try again", retryAfterSeconds: 1}
	}
	if x.named.Wanted != "" {
		return &failure{
			outcome: NoEndpoints, param: "model", retryAfterSeconds: 1, message: "no model server serves the model " + strconv.Quote(cut(name, 200)) + " now; try again later",
			err: fmt.Errorf("nobody serves %q, which %q stands for", x.named.Wanted, cut(name, 200)),
		}
	}
	var msg strings.Builder
	msg.WriteString("the model " + strconv.Quote(cut(name, 200)) + " does not exist; ")
	matches := x.closeMatches(name)
	if len(matches) == 0 {
		msg.WriteString("GET /v1/models lists what is served")
	} else {
		msg.WriteString("did you mean ")
		for i, m := range matches {
			if i > 0 {
				msg.WriteString(" or ")
			}
			msg.WriteString(strconv.Quote(m))
		}
		msg.WriteString("?")
	}
	return &failure{outcome: ModelNotFound, param: "model", message: msg.String()}
}

// tellsWithin is how long an endpoint that is new is given to say what it serves. After that a name that nobody knows is
// taken for a mistake: an endpoint that never tells must not have every wrong name answered with "try again".
const tellsWithin = time.Minute

// untold reports whether there is a pool of which no base model is known, since neither does the configuration name one nor
// has any of its endpoints, which are new, said yet what it serves. Any name may then be one of its own.
func untold(s *pool.Snapshot, now pool.Instant) bool {
	known := make([]bool, len(s.Pools))
	for t := range s.Targets() {
		known[t.Pool] = known[t.Pool] || !t.Adapter
	}
	for i, p := range s.Pools {
		if known[i] {
			continue
		}
		since := pool.Instant(0) // without endpoints, the start of the gateway
		for _, row := range s.Rows[p.First:p.End] {
			since = max(since, row.Endpoint.Since)
		}
		if now.Sub(since) < tellsWithin {
			return true
		}
	}
	return false
}

func cut(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}

// closeMatches returns the names that the caller may see and that are spelled most like name.
func (x *exchange) closeMatches(name string) []string {
	if len(name) > maxComparedBytes {
		return nil
	}
	type match struct {
		name     string
		distance int
	}
	var found []match
	n := 0
	compare := func(with string) bool {
		if n++; len(with) <= maxComparedBytes {
			if d := distance(name, with); d <= max(2, len(name)/3) {
				found = append(found, match{with, d})
			}
		}
		return n < maxCompared
	}
	for t := range x.snapshot.Targets() {
		if x.caller.May(t) && !compare(t.Name) {
			break
		}
	}
	for _, listed := range x.routes.Names.Listed() {
		if x.snapshot.TargetString(listed) == nil && x.listed(listed) && !compare(listed) {
			break
		}
	}
	slices.SortFunc(found, func(a, b match) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(a.name, b.name))
	})
	names := make([]string, 0, maxCloseMatches)
	for _, m := range found[:min(len(found), maxCloseMatches)] {
		names = append(names, m.name)
	}
	return names
}

// distance is how far apart two names are. That one is without its organisation ("Llama-3" for "meta-llama/Llama-3") counts
// as one slip.
func distance(a, b string) int {
	d := editDistance(a, b)
	_, shortA, inA := strings.Cut(a, "/")
	_, shortB, inB := strings.Cut(b, "/")
	switch {
	case inA && !inB:
		d = min(d, 1+editDistance(shortA, b))
	case inB && !inA:
		d = min(d, 1+editDistance(a, shortB))
	}
	return d
}

// editDistance is the number of bytes to insert, delete or replace to make b of a, letters in any case (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if lower(a[i]) != lower(b[j]) {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// onlyBaseModel returns the one base model there is, nil if there are several.
func (x *exchange) onlyBaseModel() *pool.Target {
	var only *pool.Target
	for t := range x.snapshot.Targets() {
		if t.Adapter {
			continue
		}
		if only != nil {
			return nil
		}
		only = t
	}
	return only
}
