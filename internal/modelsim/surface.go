package modelsim

import (
	"fmt"
	"net/http"
	"strings"
)

// A surface is what the servers of one dialect show, where they differ.
type surface struct {
	owner string // in the list of models
	root  string // there, what precedes the model's name

	page      func(*process) []byte                  // /metrics
	step      func(*process, StepInfo)               // after each step of the engine, and once before; the lock is held
	keyed     func(path string) bool                 // wants the API key
	manage    func(*exchange) error                  // answers what isn't inference
	resolve   func(*exchange, *string, *int32) error // see exchange.resolve
	tooLong   func(longest, n, limit int) *apiError  // limit 0: the prompt alone is too long
	errorBody func(x *exchange, e *apiError) string  // of all APIs but Messages
}

var vllmSurface = surface{
	owner: "vllm", root: "/models/",
	page: (*process).metricsPage, step: func(p *process, _ StepInfo) { p.page.adapterInfo(p) },
	keyed:  func(path string) bool { return strings.HasPrefix(path, "/v1") },
	manage: (*exchange).vllmManage, resolve: (*exchange).vllmResolve, tooLong: vllmTooLong,
	errorBody: func(_ *exchange, e *apiError) string { return `{"error":` + e.object() + "}" },
}

var surfaces = map[Dialect]*surface{DialectVLLM: &vllmSurface, DialectVLLM08: &vllmSurface, DialectSGLang: &sglangSurface}

// Dialects lists the dialects.
func Dialects() []string {
	return []string{string(DialectVLLM), string(DialectVLLM08), string(DialectSGLang)}
}

// queueFull refuses a request for which there is no place to wait.
var queueFull = &apiError{http.StatusServiceUnavailable, "Service Unavailable", "The request queue is full.", ""}

// refuse ends a request that the engine has not taken. SGLang's scheduler, which
// alone knows the queue, is asked when a stream has begun: it is told in there.
func (x *exchange) refuse(err error) error {
	messages := strings.HasPrefix(x.r.URL.Path, "/v1/messages")
	switch {
	case err != queueFull || messages && !x.stream:
		return err
	case !x.stream:
		x.json(queueFull.status, sglangError(x, queueFull))
		return errCut
	}
	x.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	x.w.WriteHeader(http.StatusOK)
	if messages {
		x.raw(`event: error` + "\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":` + quote(queueFull.message) + "}}\n\n")
		return errCut
	}
	x.raw(fmt.Sprintf(`data: {"error": {"object": "error", "message": %s, "type": %s, "param": null, "code": %d}}`+"\n\ndata: [DONE]\n\n",
		quote(queueFull.message), quote(queueFull.kind), queueFull.status))
	return errCut
}
