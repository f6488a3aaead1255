package openai

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Shape is one of the ways in which servers write errors.
type Shape uint8

// The shapes.
const (
	ShapeNone      Shape = iota // no error was recognised
	ShapeOpenAI                 // {"error":{"message","type","param","code"}}
	ShapeFlat                   // {"object":"error","message","type","param","code"}, or {"type":"error","code","message"}: SGLang, TensorRT-LLM, older vLLM, Responses events
	ShapeText                   // {"error":"text"}: vLLM's 401 and scaling, Ollama
	ShapeTyped                  // {"error":"text","error_type":"overloaded"}: TGI, LoRAX, TEI
	ShapeAnthropic              // {"type":"error","error":{"type","message"}}
	ShapeDetail                 // {"detail":"text"} or {"detail":[…]}: FastAPI
)

// A Class is what an error means to a router.
type Class uint8

// The classes.
const (
	ClassOther         Class = iota
	ClassModelNotFound       // the server doesn't have this model or adapter
	ClassOverloaded          // its queue is full, or a rate limit holds: it did no work
	ClassLoading             // it is starting, loading or scaling: it did no work
)

// ErrorInfo is what an error says. Fields that it doesn't have are empty.
type ErrorInfo struct {
	Shape   Shape
	Class   Class
	Message string // cut to 127 bytes if it comes from a stream
	Type    string
	Code    string // a number is written as such
	Param   string
	// Status is the HTTP status that the error itself names or stands for, 0 if
	// unknown. In a stream, which began with 200, it is the only one there is.
	Status int
	// Marker says where an error was found that isn't the data of an event: "field"
	// (a field called error), "event" (event: error without data) or "json" (the
	// body is JSON, no stream).
	Marker string
}

// Label returns the word that tells errors of streams apart: the marker, the
// code or the type.
func (e ErrorInfo) Label() string {
	switch {
	case e.Marker != "":
		return e.Marker
	case e.Code != "":
		return e.Code
	}
	return e.Type
}

// Retryable reports whether another server may do better: the status is 429, 503,
// 529 or another one from 500 on, but not 501, or the class says so. It is for
// errors before any output.
func (e ErrorInfo) Retryable() bool {
	return e.Class != ClassOther || e.Status == 429 || e.Status >= 500 && e.Status != 501
}

// statusByWord says which status a type or code stands for.
var statusByWord = map[string]int{
	// OpenAI
	"invalid_request_error": 400, "server_error": 500, "rate_limit_exceeded": 429, "insufficient_quota": 429, "model_not_found": 404,
	// Anthropic
	"authentication_error": 401, "permission_error": 403, "not_found_error": 404, "request_too_large": 413, "rate_limit_error": 429,
	"api_error": 500, "timeout_error": 504, "overloaded_error": 529,
	// vLLM, SGLang, TensorRT-LLM
	"BadRequestError": 400, "BadRequest": 400, "InvalidUserInput": 400, "UnprocessableEntityError": 422, "NotFoundError": 404, "NotFound": 404,
	"InternalServerError": 500, "NotImplementedError": 501, "ServiceUnavailableError": 503, "ServiceUnavailable": 503, "internal_error": 500,
	// TGI, LoRAX, TEI (the last one writes capitals)
	"overloaded": 429, "Overloaded": 429, "generation": 424, "validation": 422, "incomplete_generation": 500,
	// llama.cpp
	"not_supported_error": 501, "unavailable_error": 503, "exceed_context_size_error": 400,
}

// understand fills in Status and Class from the other fields.
func (e *ErrorInfo) understand() {
	if n, err := strconv.Atoi(e.Code); err == nil && n >= 100 && n <= 599 {
		e.Status = n
	}
	for _, word := range [...]string{e.Code, e.Type} {
		if e.Status == 0 {
			e.Status = statusByWord[word]
		}
	}
	e.Class = classOf(e)
	if e.Class == ClassOverloaded && e.Status == 422 {
		e.Status = 429 // TGI writes 422 into every chat stream's error
	}
}

// classOf reads class from the words that servers use; see the tests for which
// server writes what.
func classOf(e *ErrorInfo) Class {
	text := strings.ToLower(e.Message)
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(text, w) {
				return true
			}
		}
		return false
	}
	switch {
	case e.Code == "model_not_found",
		(e.Status == 404 || e.Status == 400 || e.Status == 0) && has("does not exist", "not found", "no such", "not loaded", "unknown", "no adapter") &&
			(has("model", "adapter", "lora") || e.Param == "model"):
		return ClassModelNotFound
	case has("loading model", "model is loading", "loading the model", "currently scaling", "is starting", "warming up"):
		return ClassLoading
	case has("overloaded", "queue is full", "server busy", "maximum pending requests", "maximum queue size", "too many requests"),
		e.Status == 429, e.Status == 529:
		return ClassOverloaded
	}
	return ClassOther
}

// errorInfo describes the error in f.
func (f *facts) errorInfo() ErrorInfo {
	e := ErrorInfo{
		Shape: ShapeOpenAI, Message: string(bytes.ToValidUTF8(f.message.get(), nil)), Type: string(f.errType.get()), Code: string(f.code.get()),
		Status: f.httpStatus,
	}
	switch {
	case f.flags&sawErrorObject != 0:
		e.Shape, e.Type = ShapeFlat, string(f.rootType.get())
	case f.typ == typeError && f.flags&sawError != 0:
		e.Shape = ShapeAnthropic
	case f.typ == typeError:
		e.Shape = ShapeFlat
	case f.flags&sawErrorText != 0 && e.Type != "":
		e.Shape = ShapeTyped
	case f.flags&sawErrorText != 0:
		e.Shape = ShapeText
	case f.flags&sawError == 0 && f.flags&sawDetail != 0:
		e.Shape = ShapeDetail
	}
	if e.Code == "" && f.httpStatus != 0 {
		e.Code = strconv.Itoa(f.httpStatus)
	}
	e.understand()
	return e
}

// maxErrorBytes bounds what ParseError looks at.
const maxErrorBytes = 64 << 10

// ParseError reads the body of a response with an error status. Its Shape is
// ShapeNone if the body is none of the known shapes. It is for the path where
// something failed, and allocates.
func ParseError(body []byte) (e ErrorInfo) {
	body = bytes.TrimPrefix(bytes.TrimSpace(body), bom)
	if len(body) > maxErrorBytes || len(body) == 0 || body[0] != '{' {
		return e
	}
	var top map[string]json.RawMessage
	if json.Unmarshal(body, &top) != nil {
		return e
	}
	var inner map[string]json.RawMessage
	switch {
	case json.Unmarshal(top["error"], &inner) == nil && inner != nil:
		e.Shape = ShapeOpenAI
		if text(top["type"]) == "error" {
			e.Shape = ShapeAnthropic
		}
		e.take(inner)
	case text(top["error"]) != "":
		e.Shape, e.Message = ShapeText, text(top["error"])
		if t := text(top["error_type"]); t != "" {
			e.Shape, e.Type = ShapeTyped, t
		}
	case text(top["object"]) == "error", text(top["type"]) == "error" && top["message"] != nil:
		e.Shape = ShapeFlat
		e.take(top)
	case top["detail"] != nil && string(top["detail"]) != "null":
		e.Shape, e.Message = ShapeDetail, text(top["detail"])
		var list []struct {
			Msg string `json:"msg"`
		}
		if e.Message == "" && json.Unmarshal(top["detail"], &list) == nil && len(list) > 0 {
			e.Message = list[0].Msg
		}
	default:
		return e
	}
	e.understand()
	return e
}

// take reads the members that all shapes with an object share.
func (e *ErrorInfo) take(m map[string]json.RawMessage) {
	e.Message, e.Type, e.Param, e.Code = text(m["message"]), text(m["type"]), text(m["param"]), text(m["code"])
	if e.Code == "" {
		e.Code = text(m["http_status_code"])
	}
}

// text returns a JSON string's text or a number as it stands, and "" for anything
// else.
func text(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var n json.Number
	if json.Unmarshal(raw, &n) == nil {
		return n.String()
	}
	return ""
}

// An APIError is an error as we tell it to a client.
type APIError struct {
	Status    int    // of the response
	Type      string // OpenAI's word, such as "invalid_request_error"; see Anthropic's own in AppendError
	Code      string // the outcome; null if empty
	Message   string
	Param     string // null if empty
	RequestID string // Anthropic's style only; left out if empty
}

// AppendError appends the body of an error response in the given style. In
// Anthropic's, the type is the one its API has for the status, since clients
// decide by it; the code is not part of that shape.
func AppendError(dst []byte, style Style, e *APIError) []byte {
	if style == StyleAnthropic {
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = appendQuoted(dst, anthropicType(e.Status))
		dst = append(dst, `,"message":`...)
		dst = appendQuoted(dst, e.Message)
		dst = append(dst, '}')
		if e.RequestID != "" {
			dst = append(dst, `,"request_id":`...)
			dst = appendQuoted(dst, e.RequestID)
		}
		return append(dst, '}')
	}
	dst = append(dst, `{"error":`...)
	dst = appendErrorObject(dst, e)
	return append(dst, '}')
}

func appendErrorObject(dst []byte, e *APIError) []byte {
	dst = append(dst, `{"message":`...)
	dst = appendQuoted(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = appendQuoted(dst, e.Type)
	dst = append(dst, `,"param":`...)
	dst = appendQuotedOrNull(dst, e.Param)
	dst = append(dst, `,"code":`...)
	dst = appendQuotedOrNull(dst, e.Code)
	return append(dst, '}')
}

// anthropicType returns the type that Anthropic's API has for a status
// (platform.claude.com/docs/en/api/errors).
func anthropicType(status int) string {
	switch status {
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503, 529:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// AppendStreamError appends the event that tells a client that a stream was cut
// off, in the form that api's clients expect: an error object as data for chat
// and completions, event: error for the Responses and Messages APIs. Nothing may
// follow it, [DONE] in particular. midLine says that what has been sent so far
// doesn't end with an empty line: then the event begins by ending the cut-off one.
func AppendStreamError(dst []byte, api API, midLine bool, e *APIError) []byte {
	if midLine {
		dst = append(dst, "\n\n"...)
	}
	switch api {
	case Responses:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...)
		dst = appendQuotedOrNull(dst, e.Code)
		dst = append(dst, `,"message":`...)
		dst = appendQuoted(dst, e.Message)
		dst = append(dst, `,"param":`...)
		dst = appendQuotedOrNull(dst, e.Param)
		dst = append(dst, '}')
	case Messages, CountTokens:
		dst = append(dst, "event: error\ndata: "...)
		dst = AppendError(dst, StyleAnthropic, e)
	default:
		dst = append(dst, "data: "...)
		dst = AppendError(dst, StyleOpenAI, e)
	}
	return append(dst, "\n\n"...)
}

func appendQuotedOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return appendQuoted(dst, s)
}

const hexDigits = "0123456789abcdef"

// appendQuoted appends s as a JSON string. Invalid UTF-8 becomes U+FFFD.
func appendQuoted(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c < 0x20 || c == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		case c < utf8.RuneSelf:
			dst = append(dst, c)
		default:
			r, size := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += size
			continue
		}
		i++
	}
	return append(dst, '"')
}
