package proxy

import (
	"bytes"
	"fmt"
	"strconv"
	"sync"
	"unsafe"

	"kvgate/internal/names"
	"kvgate/openai"
	"kvgate/pool"
	"kvgate/scoring"
)

// Field returns the value of the client's first header field with this name, in any case; nil if there is none.
func (x *exchange) Field(name string) []byte {
	for rest := x.facts.raw; ; {
		_, n, value, next := nextField(rest)
		if len(n) == 0 {
			return nil
		}
		if rest = next; len(n) == len(name) && bytes.EqualFold(n, bytesOf(name)) {
			return value
		}
	}
}

// nameQuery is what resolving the request's name needs to know of it.
func (x *exchange) nameQuery() names.Request {
	q := NameQuery(x.model, x.path, &x.peek.Facts)
	q.Fields, q.Caller = x, x.caller
	return q
}

// NameQuery is what resolving a name needs to know of a request for it, besides its header and its caller. Explanations and
// requests both go through here, so that they cannot come apart.
func NameQuery(model, path []byte, f *openai.Facts) names.Request {
	q := names.Request{Name: model, Path: path, Session: sessionOf(f)}
	if len(f.User) > 0 {
		q.User = pool.HashName(f.User)
	}
	return q
}

// resolveName finds what the name in the body stands for. Like the next ones it is kept out
// of handle, whose stack a stream holds as long as it lives.
//
//go:noinline
func (x *exchange) resolveName() {
	x.name = x.peek.Model
	x.model = append(x.model[:0], x.peek.Model...)
	x.snapshot = x.h.table.Load()
	if len(x.model) == 0 {
		// An API that doesn't need a model: the default pool, or the only base model that there is.
		t := x.routes.Names.Default(x.snapshot)
		if t == nil {
			t = x.onlyBaseModel()
		}
		x.named = names.Route{Target: t, Rule: -1}
		if t != nil && !x.caller.May(t) {
			x.named.Target, x.named.Forbidden = nil, true
		}
	} else {
		q := x.nameQuery()
		x.named = x.routes.Names.Resolve(x.snapshot, &q)
	}
}

// useTarget has the request be for x.named.
//
//go:noinline
func (x *exchange) useTarget() *failure {
	t := x.named.Target
	switch {
	case x.named.Forbidden:
		return x.forbidden()
	case t == nil:
		return x.unknownModel()
	}
	if f := x.usePool(x.snapshot.Pools[t.Pool].Name); f != nil {
		return f
	}
	a := x.route.API
	x.addUsage = x.routes.NeedUsage && x.peek.Stream && !x.peek.IncludeUsage && (a == openai.ChatCompletions || a == openai.Completions)
	x.query = scoring.Request{}
	x.prefix = FillQuery(&x.query, &x.peek.Facts, x.body.bytes(), t, x.pool.Policy, x.prefix[:0])
	if x.routes.NeedPrefix && !x.pool.Policy.NeedsPrefix() {
		x.prefix = hashPrompt(x.prefix, &x.peek.Facts, x.body.bytes(), t) // the policy is not shown it
	}
	return x.pin()
}

// forbidden says that the caller may not use the model.
//
//go:noinline
func (x *exchange) forbidden() *failure {
	return &failure{outcome: Forbidden, param: "model", message: "this key may not use the model " + strconv.Quote(cut(string(x.model), 200)) + "; GET /v1/models lists what it may use"}
}

// fallBack has the request be for the next model that it may fall back on, if it has one left and f, why it failed, is
// about the pool that could not take it. Nothing of it has been executed, and nothing answered.
//
//go:noinline
func (x *exchange) fallBack(f *failure) bool {
	if !x.named.HasFallback() || x.committed || x.pinned != nil || x.lease.cancelled() != notCancelled {
		return false
	}
	switch f.outcome {
	case NoEndpoints, ModelNotFound, Saturated, QueueTimeout:
	default:
		if !f.unexecuted {
			return false
		}
	}
	x.endAttempt()
	q := x.nameQuery()
	x.snapshot = x.h.table.Load()
	if !x.routes.Names.FallBack(&x.named, x.snapshot, &q) {
		return false
	}
	x.attemptsBefore = x.attempt
	return true
}

// splice makes the body that endpoints get: with the model's name there where the client wrote another one, and asking for
// usage where the gateway needs it and the client did not ask.
func (x *exchange) splice() *failure {
	x.releaseSpliced()
	t := x.query.Target
	if t == nil {
		return nil
	}
	name := x.wireName(t)
	rename := len(x.peek.Model) > 0 && name != string(x.peek.Model)
	if rename && x.route.Kind == openai.KindMultipart && !formSafe(name) {
		return &failure{outcome: Internal, message: "the model can't be named in a form", err: fmt.Errorf("model %q holds a line end", name)}
	}
	x.name = bytesOf(t.Name)
	if !rename && !x.addUsage {
		return nil
	}
	size := int64(x.body.n + 6*len(name) + len(`,"stream_options":{"include_usage":true}`) + 2)
	// What is small next to the connection's own memory isn't counted.
	if size > firstBodyBytes {
		if !x.h.budget.acquire(size) {
			return &failure{outcome: Saturated, message: errBudget.reason, retryAfterSeconds: 1}
		}
		x.splicedHeld = size
	}
	x.splicedBuf = getBodyBuffer(bodyClass(size))
	dst, facts := x.splicedBuf.b[:0], &x.peek.Facts
	switch {
	case rename && x.addUsage:
		x.spliced = openai.SpliceModelIncludeUsage(dst, x.body.bytes(), facts, name)
	case rename:
		x.spliced = openai.SpliceModel(dst, x.body.bytes(), facts, name)
	default:
		x.spliced = openai.SpliceIncludeUsage(dst, x.body.bytes(), facts)
	}
	return nil
}

// wireName is what t is called in a request to its endpoints. SGLang takes an adapter's own name for the base model's, and
// answers without the adapter: there it is base:adapter.
func (x *exchange) wireName(t *pool.Target) string {
	if !t.Adapter || len(t.Rows) == 0 || int(t.Rows[0]) >= len(x.snapshot.Rows) {
		return t.Name
	}
	if l := x.snapshot.Rows[t.Rows[0]].Load; l == nil || l.Dialect != "sglang" {
		return t.Name
	}
	return t.Base + ":" + t.Name
}

func (x *exchange) releaseSpliced() {
	if x.splicedBuf != nil {
		putBodyBuffer(x.splicedBuf)
	}
	if x.splicedHeld > 0 {
		x.h.budget.release(x.splicedHeld)
	}
	x.spliced, x.splicedBuf, x.splicedHeld = nil, nil, 0
}

// rewrites reports whether the answer is not to be passed on as it comes.
func (x *exchange) rewrites() bool { return x.addUsage || x.named.Asked() && len(x.model) > 0 }

// startRewrite begins to change the answer on its way, if it is to be changed.
func (x *exchange) startRewrite() {
	if !x.scanning || !x.rewrites() {
		return
	}
	model := ""
	if x.named.Asked() {
		model = text(x.model)
	}
	x.rewriter = rewriterPool.Get().(*openai.Rewriter)
	x.rewriter.Reset(x.resp.events, model, x.addUsage)
}

var rewriterPool = sync.Pool{New: func() any { return new(openai.Rewriter) }}

// formSafe reports whether name can stand in a form field or a header field.
func formSafe(name string) bool {
	for i := range len(name) {
		if name[i] < ' ' || name[i] == 0x7f {
			return false
		}
	}
	return true
}

// bytesOf makes bytes of a string, to be read only.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }
