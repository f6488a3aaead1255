package modelsim

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"
)

// apiError is an error answer in vLLM's words.
type apiError struct {
	status  int
	kind    string
	message string
	param   string
}

func (e *apiError) Error() string { return e.message }

func badRequest(format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), ""}
}

func modelNotFound(name string) *apiError {
	return &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", name), "model"}
}

// object is the inner error object as vLLM ≥ 0.10.1 prints it.
func (e *apiError) object() string {
	param := "null"
	if e.param != "" {
		param = quote(e.param)
	}
	return fmt.Sprintf(`{"message":%s,"type":%s,"param":%s,"code":%d}`, quote(e.message), quote(e.kind), param, e.status)
}

// quote is s as JSON, without the escapes meant for HTML.
func quote(s string) string {
	plain := true
	for i := range len(s) {
		plain = plain && s[i] >= ' ' && s[i] < 0x7f && s[i] != '"' && s[i] != '\\'
	}
	if plain { // Fast path: nearly every word.
		return `"` + s + `"`
	}
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(s)
	return strings.TrimSuffix(b.String(), "\n")
}

var inferencePaths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
	"/tokenize", "/detokenize", "/v1/rerank", "/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/classify",
	"/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate",
}

func inferencePath(path string) bool {
	return slices.ContainsFunc(inferencePaths, func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") })
}

// maxBodyBytes bounds what a request may send.
const maxBodyBytes = 256 << 20

// exchange is one HTTP request and its response.
type exchange struct {
	s       *Server
	p       *process
	w       http.ResponseWriter
	r       *http.Request
	rc      *http.ResponseController
	id      string
	arrived time.Time
	fault   *Fault
	cleared <-chan struct{}
	body    []byte
	fields  map[string]json.RawMessage

	stream bool
	events int // data events written
	buf    []byte
}

// errCut ends a handler whose response a fault has ended.
var errCut = errors.New("response ended by a fault")

// errGone ends a handler whose client has left.
var errGone = errors.New("client gone")

// serve is the entry of every request.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.conns.enter()
	defer s.conns.leave()
	if strings.HasPrefix(r.URL.Path, "/sim/") {
		s.serveControl(w, r)
		return
	}
	x := &exchange{s: s, p: s.proc.Load(), w: w, r: r, rc: http.NewResponseController(w), arrived: time.Now()}
	w.Header().Set("Server", "uvicorn")
	if x.id = r.Header.Get("X-Request-Id"); x.id == "" {
		n := s.sequence.Add(1)
		x.id = fmt.Sprintf("%016x%016x", mix(s.opt.Seed^n), mix(n))
	}
	if s.opt.RequestIDHeaders {
		w.Header().Set("X-Request-Id", x.id)
	}
	inference := inferencePath(r.URL.Path)
	if inference {
		s.counts.requests.Add(1)
	}
	x.fault, x.cleared = s.faults.match(r.URL.Path)
	if x.beforeBody() {
		return
	}
	if s.opt.APIKey != "" && s.surface.keyed(r.URL.Path) && r.Header.Get("Authorization") != "Bearer "+s.opt.APIKey {
		x.json(http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		return
	}
	var err error
	if inference {
		err = x.infer()
	} else {
		err = x.manage()
	}
	var ae *apiError
	switch {
	case err == nil && inference:
		s.counts.completed.Add(1)
	case err == nil:
	case errors.Is(err, errGone):
		if inference {
			// infer has recorded it.
			return
		}
	case errors.As(err, &ae):
		s.counts.errored.Add(1)
		x.fail(ae)
	default:
		s.counts.errored.Add(1)
	}
}

// beforeBody applies faults that come before the body is read, and reports
// whether they have answered.
func (x *exchange) beforeBody() bool {
	f := x.fault
	switch {
	case f.is(FaultEarlyStatus):
		x.s.counts.errored.Add(1)
		x.status(f)
		return true
	case f.is(FaultMetricsHang):
		x.pause(0)
		return true
	}
	return false
}

// beforeHeaders applies faults between the request's last byte and the
// response's first.
func (x *exchange) beforeHeaders() error {
	f := x.fault
	switch {
	case f.is(FaultSlow):
		return x.pauseFor(f.delay())
	case f.is(FaultHang):
		return x.pause(f.delay())
	case f.is(FaultReset):
		cut(x.w, true, nil)
		return errCut
	case f.is(FaultClose):
		cut(x.w, false, nil)
		return errCut
	case f.is(FaultGarbage):
		cut(x.w, false, []byte("\x16\x03\x01 this is not HTTP\r\n\r\n"))
		return errCut
	case f.is(FaultStatus):
		x.status(f)
		return errCut
	}
	return nil
}

// status answers as a status fault says.
func (x *exchange) status(f *Fault) {
	status := f.Status
	if status == 0 {
		status = http.StatusServiceUnavailable
	}
	if f.RetryAfterSeconds > 0 {
		x.w.Header().Set("Retry-After", fmt.Sprint(f.RetryAfterSeconds))
	}
	body := f.Body
	if body == "" {
		body = `{"error":` + (&apiError{status, http.StatusText(status), "The model is currently unavailable.", ""}).object() + "}"
	}
	x.json(status, body)
}

// pause waits until the faults change, and no longer than d if d > 0.
func (x *exchange) pause(d time.Duration) error {
	var late <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-late:
	case <-x.cleared:
	case <-x.r.Context().Done():
		return errGone
	case <-x.s.closing:
		return errGone
	}
	return nil
}

// pauseFor waits for d whatever happens to the faults.
func (x *exchange) pauseFor(d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-x.r.Context().Done():
	case <-x.s.closing:
	}
	return errGone
}

// json writes a whole JSON response.
func (x *exchange) json(status int, body string) error {
	x.w.Header().Set("Content-Type", "application/json")
	x.w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	x.w.WriteHeader(status)
	_, err := io.WriteString(x.w, body)
	return err
}

// fail answers with an error in the shape of the API that was called.
func (x *exchange) fail(e *apiError) {
	if strings.HasPrefix(x.r.URL.Path, "/v1/messages") {
		x.json(e.status, `{"type":"error","error":{"type":`+quote(e.kind)+`,"message":`+quote(e.message)+`}}`)
		return
	}
	x.json(e.status, x.s.surface.errorBody(x, e))
}

// readBody reads the request's JSON object. Keys are exact and the last of two
// equal ones counts, as in Python.
func (x *exchange) readBody() error {
	var err error
	x.body, err = io.ReadAll(http.MaxBytesReader(x.w, x.r.Body, maxBodyBytes))
	if err != nil {
		return errGone
	}
	if x.s.opt.OnRequest != nil {
		x.s.opt.OnRequest(x.r, x.body)
	}
	return nil
}

func (x *exchange) parseBody() *apiError {
	if err := json.Unmarshal(x.body, &x.fields); err != nil {
		return badRequest("[{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error', 'ctx': {'error': %q}}]", JSONError(err).Error())
	}
	return nil
}

// field decodes a field of the body; absent and null leave v alone.
func (x *exchange) field(name string, v any) *apiError {
	raw, ok := x.fields[name]
	if !ok || string(raw) == "null" {
		return nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return &apiError{
			http.StatusBadRequest, "BadRequestError",
			fmt.Sprintf("1 validation error: ('body', '%s'): Input should be %s", name, jsonNoun(reflect.TypeOf(v))), name,
		}
	}
	return nil
}

// fieldsInto decodes pairs of name and pointer.
func (x *exchange) fieldsInto(pairs ...any) *apiError {
	for i := 0; i < len(pairs); i += 2 {
		if err := x.field(pairs[i].(string), pairs[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// infer answers an inference request.
func (x *exchange) infer() error {
	if err := x.readBody(); err != nil {
		x.gone(nil)
		return err
	}
	if err := x.beforeHeaders(); err != nil {
		if err == errGone {
			x.gone(nil)
		}
		return err
	}
	if x.p.isDead() {
		return &apiError{http.StatusInternalServerError, "InternalServerError", "EngineCore encountered an issue. See stack trace (above) for the root cause.", ""}
	}
	path := x.r.URL.Path
	if after, ok := strings.CutPrefix(path, "/v1/responses/"); ok {
		return x.storedResponse(after)
	}
	if x.r.Method != http.MethodPost {
		x.w.Header().Set("Allow", "POST")
		return x.json(http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`)
	}
	if strings.HasPrefix(path, "/v1/audio/") {
		return x.transcribe()
	}
	if err := x.parseBody(); err != nil {
		return err
	}
	switch path {
	case "/v1/chat/completions":
		return x.generate(chatAPI)
	case "/v1/completions":
		return x.generate(completionsAPI)
	case "/v1/messages":
		return x.generate(messagesAPI)
	case "/v1/responses":
		return x.generate(responsesAPI)
	case "/v1/messages/count_tokens":
		job, err := x.job(messagesAPI)
		if err != nil {
			return err
		}
		return x.json(http.StatusOK, fmt.Sprintf(`{"input_tokens":%d}`, job.prompts[0].tokens()))
	case "/tokenize":
		return x.tokenize()
	case "/detokenize":
		return x.detokenize()
	case "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank":
		return x.pool()
	}
	return x.json(http.StatusNotFound, `{"detail":"Not Found"}`)
}

// gone records that the client left; seqs are those the engine worked on.
func (x *exchange) gone(c *call) {
	n := 0
	if c != nil {
		for i := range c.seqs {
			n += int(c.seqs[i].produced.Load())
		}
	}
	x.s.recordAbort(Abort{
		RequestID: x.id, Path: x.r.URL.Path, Stream: x.stream, ArrivedAt: x.arrived, At: time.Now(), Generated: n,
	})
}

// job is a parsed generation request.
type job struct {
	api      *api
	model    string // as in the request, or the default name
	adapter  int32
	salt     string
	prompts  []prompt // one for each choice
	choices  int      // of each prompt
	limit    int      // tokens the caller allows; 0 if it sets none
	ignore   bool     // ignore_eos
	usage    bool     // a usage chunk was asked for
	continua bool     // usage in every chunk
	call     *call
	previous string
	store    bool
}

// job reads the fields that generation APIs share.
func (x *exchange) job(a *api) (*job, error) {
	j := &job{api: a, store: true}
	var streamOptions struct {
		IncludeUsage bool `json:"include_usage"`
		Continuous   bool `json:"continuous_usage_stats"`
	}
	var maxTokens, maxCompletion, maxOutput *int
	n := 1
	if err := x.fieldsInto("model", &j.model, "stream", &x.stream, "stream_options", &streamOptions, "max_tokens", &maxTokens,
		"max_completion_tokens", &maxCompletion, "max_output_tokens", &maxOutput, "n", &n, "cache_salt", &j.salt,
		"ignore_eos", &j.ignore, "previous_response_id", &j.previous, "store", &j.store); err != nil {
		return nil, err
	}
	j.usage, j.continua = streamOptions.IncludeUsage, streamOptions.Continuous
	if err := x.resolve(&j.model, &j.adapter); err != nil {
		return nil, err
	}
	for _, m := range []*int{maxTokens, maxCompletion, maxOutput} {
		if m == nil {
			continue
		}
		if *m < 1 {
			return nil, &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf("max_tokens must be at least 1, got %d.", *m), "max_tokens"}
		}
		j.limit = *m
	}
	if n < 1 || n > 128 {
		return nil, &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf("n must be at least 1, got %d.", n), "n"}
	}
	prompts, err := a.prompts(x, j)
	if err != nil {
		return nil, err
	}
	j.choices = n
	for _, p := range prompts {
		for range n {
			j.prompts = append(j.prompts, p)
		}
	}
	return j, nil
}

// resolve turns a model name into an adapter's number, 0 for the base model. An
// empty name becomes the default one.
func (x *exchange) resolve(model *string, number *int32) error {
	return x.s.surface.resolve(x, model, number)
}

func (x *exchange) vllmResolve(model *string, number *int32) error {
	if *model == "" {
		*model = x.s.opt.Models[0]
	}
	if slices.Contains(x.s.opt.Models, *model) {
		return nil
	}
	x.p.mu.Lock()
	a, ok := x.p.adapter(*model)
	x.p.mu.Unlock()
	if !ok {
		return modelNotFound(*model)
	}
	*number = a.number
	return nil
}

// plan fills in the call: lengths, block ids, answers.
func (x *exchange) plan(j *job) *apiError {
	c := &call{notify: make(chan struct{}, 1), seqs: make([]sequence, len(j.prompts))}
	longest := x.s.maxModelTokens
	for i := range c.seqs {
		p := &j.prompts[i]
		n := p.tokens()
		if n >= longest {
			return x.s.surface.tooLong(longest, n, 0)
		}
		if j.limit > 0 && n+j.limit > longest {
			return x.s.surface.tooLong(longest, n, j.limit)
		}
		blocks := p.blocks(x.p.eng.kv.blockTokens, adapterName(j), j.salt)
		seed := x.s.opt.Seed + uint64(i)
		for k := 0; k < len(p.text); k += 8 { // the whole prompt, its ends included
			var chunk [8]byte
			copy(chunk[:], p.text[k:])
			seed = mix(seed ^ binary.LittleEndian.Uint64(chunk[:]))
		}
		q := &c.seqs[i]
		q.call, q.answer = c, answer{p.echo, seed}
		out := j.limit
		if drawn := q.answer.drawnLength(x.s.opt.MeanOutputTokens); out == 0 || x.s.opt.EndsEarly && !j.ignore && drawn < out {
			out = min(drawn, longest-n)
		} else {
			q.capped = true
		}
		q.req = Request{ID: x.s.sequence.Add(1), PromptTokens: n, OutputTokens: out, Blocks: blocks, Adapter: j.adapter, Tag: q}
	}
	j.call = c
	return nil
}

// vllmTooLong is the error of a prompt of n tokens, or one that fits without the limit of the answer.
func vllmTooLong(longest, n, limit int) *apiError {
	if limit == 0 {
		return badRequest("This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", longest, n)
	}
	return badRequest("This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the messages, %d in the completion). Please reduce the length of the messages or completion.", longest, n+limit, n, limit)
}

func adapterName(j *job) string {
	if j.adapter == 0 {
		return ""
	}
	return j.model
}

// generate answers a request of a generation API, streamed or not.
func (x *exchange) generate(a *api) error {
	j, err := x.job(a)
	if err != nil {
		return err
	}
	if err := x.plan(j); err != nil {
		return err
	}
	if x.fault.is(FaultQueueFull) {
		return x.refuse(queueFull)
	}
	if err := x.submit(j.call); err != nil {
		return x.refuse(err)
	}
	defer x.p.forget(j.call)
	if x.stream && !x.fault.is(FaultJSONInStream) {
		err = x.streamed(j)
	} else {
		err = x.whole(j)
	}
	if err != nil {
		x.p.abort(j.call)
	}
	if errors.Is(err, errGone) {
		x.gone(j.call)
	}
	return err
}

func (x *exchange) submit(c *call) error {
	if err := x.p.submit(c); err != nil {
		if errors.Is(err, ErrTooLong) {
			return badRequest("This model's maximum context length is %d tokens. However, your request does not fit into the KV cache. Please reduce the length of the input messages.", x.p.eng.KVTokens())
		}
		if err == queueFull {
			return err
		}
		return &apiError{http.StatusInternalServerError, "InternalServerError", err.Error(), ""}
	}
	x.s.counts.executed.Add(1)
	return nil
}

// wait blocks until the call makes progress.
func (x *exchange) wait(c *call) error {
	select {
	case <-c.notify:
		return nil
	case <-x.r.Context().Done():
	case <-x.p.stop:
	}
	return errGone
}

// whole waits for all sequences and answers with one JSON body.
func (x *exchange) whole(j *job) error {
	for !j.call.done() {
		if err := x.wait(j.call); err != nil {
			return err
		}
	}
	if x.fault.is(FaultFinishError, FaultErrorEvent) || x.p.isDead() {
		return &apiError{http.StatusInternalServerError, "InternalServerError", "Internal server error", ""}
	}
	body := j.api.whole(x, j)
	f := x.fault
	if f.is(FaultResetStream, FaultCloseStream, FaultCutMidEvent, FaultHangStream) {
		// A body has no events; half of it stands for "in the middle".
		x.w.Header().Set("Content-Type", "application/json")
		x.w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		io.WriteString(x.w, body[:len(body)/2])
		x.rc.Flush()
		if !f.is(FaultHangStream) {
			cut(x.w, f.is(FaultResetStream), nil)
			return errCut
		}
		if err := x.pause(f.delay()); err != nil {
			return err
		}
		_, err := io.WriteString(x.w, body[len(body)/2:])
		return err
	}
	return x.json(http.StatusOK, body)
}

func (c *call) done() bool {
	for i := range c.seqs {
		if c.seqs[i].ended.Load() == 0 {
			return false
		}
	}
	return true
}

// usageTokens adds up the tokens of a call that has ended.
func (j *job) usageTokens() (in, out, cached int) {
	for i := range j.call.seqs {
		q := &j.call.seqs[i]
		out += int(q.produced.Load())
		if !j.repeated(i) {
			cached += q.req.CachedTokens
		}
	}
	return j.promptTokens(), out, cached
}

// promptTokens counts each prompt once, however many choices it has.
func (j *job) promptTokens() int {
	n := 0
	for i := range j.call.seqs {
		if !j.repeated(i) {
			n += j.call.seqs[i].req.PromptTokens
		}
	}
	return n
}

// repeated reports whether choice i has the prompt of the choice before it.
func (j *job) repeated(i int) bool { return i%j.choices > 0 }

// reason is vLLM's finish_reason of an ended sequence.
func (x *exchange) reason(q *sequence) string {
	switch {
	case State(q.ended.Load()) == StateAborted || x.fault.is(FaultFinishAbort):
		return "abort"
	case q.capped:
		return "length"
	}
	return "stop"
}

// streamed relays tokens as they come.
func (x *exchange) streamed(j *job) error {
	x.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	x.w.WriteHeader(http.StatusOK)
	if err := x.rc.Flush(); err != nil {
		return errGone
	}
	w := j.api.wire(x, j)
	if err := w.begin(); err != nil {
		return err
	}
	for {
		open := 0
		for i := range j.call.seqs {
			q := &j.call.seqs[i]
			if q.closed {
				continue
			}
			ended := q.ended.Load() != 0 // before produced, so that no token is missed
			for n := int(q.produced.Load()); q.sent < n; {
				if x.fault.is(FaultFinishAbort) && x.events >= x.fault.Events {
					ended = true
					break
				}
				q.sent++
				if err := w.token(i, q.answer.word(q.sent-1)); err != nil {
					return err
				}
			}
			if !ended {
				open++
				continue
			}
			if x.p.isDead() {
				return x.errorEvent("EngineCore encountered an issue. See stack trace (above) for the root cause.")
			}
			q.closed = true
			if err := w.finish(i, x.reason(q)); err != nil {
				return err
			}
		}
		if open == 0 {
			break
		}
		if err := x.flush(); err != nil {
			return err
		}
		if err := x.wait(j.call); err != nil {
			return err
		}
	}
	if x.fault.is(FaultFinishAbort) {
		x.p.abort(j.call)
	}
	if err := w.end(); err != nil {
		return err
	}
	return x.flush()
}

// event writes one event, unless a fault wants something else by now.
func (x *exchange) event(b []byte) error {
	f := x.fault
	if x.events >= eventsOf(f) {
		switch f.Kind {
		case FaultResetStream, FaultCloseStream, FaultBadChunk, FaultCutMidEvent:
			if err := x.flush(); err != nil {
				return err
			}
			var last []byte
			switch f.Kind {
			case FaultBadChunk:
				last = []byte("zz\r\nnot a chunk\r\n")
			case FaultCutMidEvent:
				half := b[:len(b)/2]
				last = fmt.Appendf(nil, "%x\r\n%s\r\n", len(half), half)
			}
			cut(x.w, f.Kind == FaultResetStream, last)
			return errCut
		case FaultHangStream:
			if err := x.flush(); err != nil {
				return err
			}
			if err := x.pause(f.delay()); err != nil {
				return err
			}
			x.fault = nil
		case FaultErrorEvent:
			return x.errorEvent("EngineCore encountered an issue. See stack trace (above) for the root cause.")
		case FaultFinishError:
			return x.errorEvent("Internal server error")
		case FaultEndEarly:
			if err := x.flush(); err != nil {
				return err
			}
			return errCut
		}
	}
	x.events++
	x.buf = append(x.buf, b...)
	if len(x.buf) >= 32<<10 {
		return x.flush()
	}
	return nil
}

// eventsOf is after how many events a fault of streams strikes.
func eventsOf(f *Fault) int {
	if f.is(FaultResetStream, FaultCloseStream, FaultBadChunk, FaultCutMidEvent, FaultHangStream, FaultErrorEvent, FaultFinishError, FaultEndEarly) {
		return f.Events
	}
	return math.MaxInt
}

// errorEvent ends a stream as vLLM does when the engine fails.
func (x *exchange) errorEvent(message string) error {
	x.p.mu.Lock()
	x.p.page.errors++
	x.p.mu.Unlock()
	if strings.HasPrefix(x.r.URL.Path, "/v1/messages") {
		x.raw(`event: error` + "\n" + `data: {"type":"error","error":{"type":"internal_error","message":` + quote(message) + "}}\n\n")
		return errCut
	}
	if x.r.URL.Path == "/v1/responses" {
		x.raw(fmt.Sprintf("event: error\ndata: {\"type\":\"error\",\"sequence_number\":%d,\"code\":\"server_error\",\"message\":%s,\"param\":null}\n\n", x.events, quote(message)))
		return errCut
	}
	x.raw(`data: {"error": {"message": ` + quote(message) + `, "type": "InternalServerError", "param": null, "code": 500}}` + "\n\ndata: [DONE]\n\n")
	return errCut
}

func (x *exchange) raw(s string) {
	x.buf = append(x.buf, s...)
	x.flush()
}

func (x *exchange) flush() error {
	if len(x.buf) == 0 {
		return nil
	}
	_, err := x.w.Write(x.buf)
	x.buf = x.buf[:0]
	if err == nil {
		err = x.rc.Flush()
	}
	if err != nil {
		return errGone
	}
	return nil
}

func (p *process) isDead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

// prefillOnly runs prompts that generate nothing and waits for them.
func (x *exchange) prefillOnly(adapter int32, adapterName, salt string, prompts []prompt) error {
	c := &call{notify: make(chan struct{}, 1), seqs: make([]sequence, len(prompts))}
	for i := range c.seqs {
		q := &c.seqs[i]
		q.call = c
		n := prompts[i].tokens()
		if n > x.s.maxModelTokens {
			return badRequest("This model's maximum context length is %d tokens. However, you requested %d tokens in the input for embedding generation. Please reduce the length of the input.", x.s.maxModelTokens, n)
		}
		q.req = Request{
			ID: x.s.sequence.Add(1), PromptTokens: n,
			Blocks: prompts[i].blocks(x.p.eng.kv.blockTokens, adapterName, salt), Adapter: adapter, Tag: q,
		}
	}
	if err := x.submit(c); err != nil {
		return err
	}
	defer x.p.forget(c)
	for !c.done() {
		if err := x.wait(c); err != nil {
			x.p.abort(c)
			x.gone(c)
			return err
		}
	}
	if x.p.isDead() {
		return &apiError{http.StatusInternalServerError, "InternalServerError", "EngineCore encountered an issue.", ""}
	}
	return nil
}

// pool answers embeddings, scores and their kin.
func (x *exchange) pool() error {
	var model, salt, format string
	var number int32
	var documents []json.RawMessage
	if err := x.fieldsInto("model", &model, "cache_salt", &salt, "encoding_format", &format); err != nil {
		return err
	}
	if err := x.resolve(&model, &number); err != nil {
		return err
	}
	var prompts []prompt
	add := func(raw json.RawMessage) bool {
		list, ok := rawPrompts(raw)
		prompts = append(prompts, list...)
		return ok
	}
	path := x.r.URL.Path
	switch {
	case strings.HasSuffix(path, "/rerank"):
		if err := x.field("documents", &documents); err != nil {
			return err
		}
		for _, d := range documents {
			prompts = append(prompts, prompt{text: append(append(append([]byte{}, x.fields["query"]...), '\n'), d...)})
		}
	case strings.HasSuffix(path, "/score"):
		pairs, ok := rawPrompts(x.fields["text_2"])
		if !ok {
			return &apiError{http.StatusBadRequest, "BadRequestError", "text_2: Field required", "text_2"}
		}
		for _, p := range pairs {
			prompts = append(prompts, prompt{text: append(append(append([]byte{}, x.fields["text_1"]...), '\n'), p.text...)})
		}
	case x.fields["messages"] != nil:
		var messages []chatMessage
		if err := x.field("messages", &messages); err != nil {
			return err
		}
		prompts = append(prompts, renderChat(messages, nil))
	default:
		if !add(x.fields["input"]) {
			return &apiError{http.StatusBadRequest, "BadRequestError", "input: Field required", "input"}
		}
	}
	if len(prompts) == 0 {
		return badRequest("no input")
	}
	name := ""
	if number > 0 {
		name = model
	}
	if err := x.prefillOnly(number, name, salt, prompts); err != nil {
		return err
	}
	tokens := 0
	var items []string
	for i := range prompts {
		tokens += prompts[i].tokens()
		v := make([]float32, 8)
		raw := make([]byte, 0, 32)
		for k := range v {
			v[k] = float32(mix(uint64(i)<<8+uint64(k))>>40) / (1 << 24)
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v[k]))
		}
		switch {
		case strings.HasSuffix(path, "/rerank"):
			items = append(items, fmt.Sprintf(`{"index":%d,"document":{"text":%s,"multi_modal":null},"relevance_score":%g}`, i, jsonString(documents[i]), v[0]))
		case strings.HasSuffix(path, "/score"):
			items = append(items, fmt.Sprintf(`{"index":%d,"object":"score","score":%g}`, i, v[0]))
		case path == "/classify":
			items = append(items, fmt.Sprintf(`{"index":%d,"label":"LABEL_0","probs":[%g,%g],"num_classes":2}`, i, v[0], 1-v[0]))
		case format == "base64":
			items = append(items, fmt.Sprintf(`{"index":%d,"object":"embedding","embedding":"%s"}`, i, base64.StdEncoding.EncodeToString(raw)))
		default:
			values, _ := json.Marshal(v)
			items = append(items, fmt.Sprintf(`{"index":%d,"object":"embedding","embedding":%s}`, i, values))
		}
	}
	id := "embd-"
	if strings.HasSuffix(path, "/rerank") {
		return x.json(http.StatusOK, fmt.Sprintf(`{"id":"rerank-%s","model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[%s]}`,
			x.id, quote(model), tokens, tokens, strings.Join(items, ",")))
	}
	if strings.HasSuffix(path, "/score") {
		id = "score-"
	}
	return x.json(http.StatusOK, fmt.Sprintf(`{"id":"%s%s","object":"list","created":%d,"model":%s,"data":[%s],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}`,
		id, x.id, x.arrived.Unix(), quote(model), strings.Join(items, ","), tokens, tokens))
}

// jsonString is raw if it is a JSON string, else raw quoted as one.
func jsonString(raw json.RawMessage) string {
	if len(raw) > 0 && raw[0] == '"' {
		return string(raw)
	}
	return quote(string(raw))
}

func (x *exchange) tokenize() error {
	var model, text string
	var number int32
	var messages []chatMessage
	if err := x.fieldsInto("model", &model, "prompt", &text, "messages", &messages); err != nil {
		return err
	}
	if err := x.resolve(&model, &number); err != nil {
		return err
	}
	p := textPrompt(text)
	if len(messages) > 0 {
		p = renderChat(messages, x.fields["tools"])
	}
	ids, _ := json.Marshal(byteTokens(p.text))
	return x.json(http.StatusOK, fmt.Sprintf(`{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":null}`, p.tokens(), x.s.maxModelTokens, ids))
}

func (x *exchange) detokenize() error {
	var model string
	var number int32
	var ids []int64
	if err := x.fieldsInto("model", &model, "tokens", &ids); err != nil {
		return err
	}
	if err := x.resolve(&model, &number); err != nil {
		return err
	}
	return x.json(http.StatusOK, `{"prompt":`+quote(strings.TrimRight(string(tokenBytes(ids)), "\x00"))+"}")
}

// transcribe answers audio: a second of it is a token, the model is a form field.
func (x *exchange) transcribe() error {
	_, boundary, ok := strings.Cut(x.r.Header.Get("Content-Type"), "boundary=")
	if !ok {
		return badRequest("Content-Type: want multipart/form-data with a boundary")
	}
	form, err := multipart.NewReader(strings.NewReader(string(x.body)), strings.Trim(boundary, `"`)).ReadForm(maxBodyBytes)
	if err != nil {
		return badRequest("form: %v", err)
	}
	defer form.RemoveAll()
	var model string
	var number int32
	if v := form.Value["model"]; len(v) > 0 {
		model = v[len(v)-1]
	}
	if err := x.resolve(&model, &number); err != nil {
		return err
	}
	files := form.File["file"]
	if len(files) == 0 {
		return &apiError{http.StatusBadRequest, "BadRequestError", "file: Field required", "file"}
	}
	if err := x.prefillOnly(number, model, "", []prompt{{text: make([]byte, 4+files[0].Size/8000)}}); err != nil {
		return err
	}
	a := answer{[]string{files[0].Filename}, uint64(files[0].Size)}
	return x.json(http.StatusOK, fmt.Sprintf(`{"text":%s,"usage":{"type":"duration","seconds":%d}}`, quote(a.text(12)), 1+files[0].Size/32000))
}

// metricsFault serves a broken metrics page, and reports whether it did.
func (x *exchange) metricsFault() bool {
	f := x.fault
	switch {
	case f.is(FaultMetricsFrozen):
		f.frozen.once.Do(func() { f.frozen.page = x.s.surface.page(x.p) })
		x.w.Header().Set("Content-Type", metricsContentType)
		x.w.Write(f.frozen.page)
	case f.is(FaultMetricsHuge):
		x.w.Header().Set("Content-Type", metricsContentType)
		x.w.Write(x.s.surface.page(x.p))
		line := []byte(strings.Repeat("vllm:padding_total{engine=\"0\",model_name=\"m\"} 1.0\n", 1000))
		x.pour(f.bytes(), line)
	case f.is(FaultMetricsGarbage):
		body := f.Body
		if body == "" {
			body = "<!doctype html><html><body>It works! vllm:num_requests_running</body></html>\n"
		}
		x.w.Header().Set("Content-Type", "text/html")
		io.WriteString(x.w, body)
	case f.is(FaultMetricsGzipBomb):
		x.w.Header().Set("Content-Type", metricsContentType)
		x.w.Header().Set("Content-Encoding", "gzip")
		var member strings.Builder
		z := gzip.NewWriter(&member)
		const inflated = 16 << 20
		z.Write(make([]byte, inflated))
		z.Close()
		x.pour(f.bytes()/inflated*int64(member.Len()), []byte(member.String()))
	case f.is(FaultMetricsRedirect):
		to := f.Body
		if to == "" {
			to = "/metrics?again"
		}
		http.Redirect(x.w, x.r, to, http.StatusFound)
	case f.is(FaultStatus):
		x.status(f)
	case f.is(FaultReset, FaultClose):
		cut(x.w, f.is(FaultReset), nil)
	case f.is(FaultSlow):
		return x.pauseFor(f.delay()) != nil
	case f.is(FaultHang):
		return x.pause(f.delay()) != nil
	default:
		return false
	}
	return true
}

func (f *Fault) bytes() int64 {
	if f.Bytes > 0 {
		return f.Bytes
	}
	return 10 << 30
}

// pour writes chunk again and again until n bytes are out or the client is gone.
func (x *exchange) pour(n int64, chunk []byte) {
	for n > 0 && x.r.Context().Err() == nil {
		if _, err := x.w.Write(chunk); err != nil {
			return
		}
		n -= int64(len(chunk))
	}
}
