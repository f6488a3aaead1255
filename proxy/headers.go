package proxy

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strconv"

	"kvgate/pool"
)

// A field is a header field that the gateway knows by name.
type field uint8

const (
	fOther field = iota
	fHopByHop
	fHost
	fConnection
	fContentLength
	fTransferEncoding
	fExpect
	fAuthorization
	fAPIKey // x-api-key, api-key
	fContentType
	fContentEncoding
	fAcceptEncoding
	fRetryAfter
	fRequestID
	fTraceparent
	fTracestate
	fForwarded // Forwarded, X-Forwarded-*, X-Real-IP
	fForwardedFor
	fLocation
	fOurs // X-Kvgate-*
	fSteering
)

// fieldNames are the names of the fields that are known by a whole name, in lower case.
var fieldNames = map[field][]string{
	fHopByHop:         {"te", "trailer", "upgrade", "keep-alive", "http2-settings", "proxy-connection", "proxy-authenticate", "proxy-authorization"},
	fHost:             {"host"},
	fConnection:       {"connection"},
	fContentLength:    {"content-length"},
	fTransferEncoding: {"transfer-encoding"},
	fExpect:           {"expect"},
	fAuthorization:    {"authorization"},
	fAPIKey:           {"api-key", "x-api-key"},
	fContentType:      {"content-type"},
	fContentEncoding:  {"content-encoding"},
	fAcceptEncoding:   {"accept-encoding"},
	fRetryAfter:       {"retry-after"},
	fRequestID:        {"x-request-id"},
	fTraceparent:      {"traceparent"},
	fTracestate:       {"tracestate"},
	fForwarded:        {"forwarded", "x-real-ip"},
	fForwardedFor:     {"x-forwarded-for"},
	fLocation:         {"location"},
}

type namedField struct {
	name  string
	field field
}

// fieldsByLength are fieldNames by their length, which with the first letter rules out most of them.
var fieldsByLength = func() (t [20][]namedField) {
	for f, names := range fieldNames {
		for _, n := range names {
			t[len(n)] = append(t[len(n)], namedField{n, f})
		}
	}
	return t
}()

// fieldNamed classifies a header field. It does not allocate.
func fieldNamed(name []byte) field {
	if len(name) < len(fieldsByLength) {
		first := lower(name[0])
		for i := range fieldsByLength[len(name)] {
			if n := &fieldsByLength[len(name)][i]; n.name[0] == first && equalFold(name, n.name) {
				return n.field
			}
		}
	}
	if len(name) > 9 && lower(name[0]) == 'x' {
		switch lower(name[2]) {
		case 'f':
			if len(name) > 12 && foldsTo(name[:12], "x-forwarded-") {
				return fForwarded
			}
		case 'k':
			if foldsTo(name[:9], "x-kvgate-") {
				return fOurs
			}
		}
	}
	if steersRouting(name) {
		return fSteering
	}
	return fOther
}

// nextField takes the first field line off block, whose lines end in CR LF and are well formed as checkHead or
// parseResponse have seen. It returns an empty name at the block's end.
func nextField(block []byte) (line, name, value, rest []byte) {
	end := bytes.IndexByte(block, '\n')
	if end < 2 {
		return nil, nil, nil, nil
	}
	line = block[:end+1]
	colon := bytes.IndexByte(line, ':')
	if colon < 0 {
		return nil, nil, nil, nil
	}
	return line, line[:colon], trimSpace(line[colon+1 : end-1]), block[end+1:]
}

// nominates reports whether one of the comma-separated options of a Connection value is name.
func nominates(connection, name []byte) bool {
	for len(connection) > 0 {
		opt, rest, _ := bytes.Cut(connection, []byte(","))
		connection = rest
		if opt = trimSpace(opt); len(opt) == len(name) && bytes.EqualFold(opt, name) {
			return true
		}
	}
	return false
}

var (
	optClose     = []byte("close")
	optKeepAlive = []byte("keep-alive")
)

// A forwardedMode says what becomes of X-Forwarded-For, -Proto and -Host.
type forwardedMode uint8

const (
	forwardedAppend  forwardedMode = iota // a client's values are kept and ours added
	forwardedReplace                      // a client's values are dropped
	forwardedOff                          // they are dropped and none is sent
)

// A requestHead is what the head of a forwarded request is made from.
type requestHead struct {
	method, target []byte
	raw            []byte // the client's field lines, ending in an empty line or not
	marks          []mark // of raw: the lines to decide on, in order
	lookThrough    bool   // any line may be one to decide on
	host           string // the endpoint's
	apiKey         string // replaces the client's Authorization; "" keeps it
	dropAuth       bool   // the client's Authorization and API keys go no further
	requestID      []byte
	trace          *traced // nil: what the client says of traces goes on as it is
	rank           int32   // number of the data-parallel engine, from 1; 0 names none
	forwarded      forwardedMode
	clientIP       []byte
	clientHost     []byte
	https          bool
	debugHeader    string // not sent on; "" if there is none
	length         int    // of the body
	hasBody        bool
	plain          bool         // the answer has to be readable: no compression is asked for
	told           *pool.Target // for X-Gateway-Model-Name and X-Gateway-Base-Model-Name; nil: not sent
}

// appendRequestHead appends the head that the endpoint gets: the client's fields with their order and bytes, without
// those that concern only the client's connection, steer servers, or are ours to set.
func appendRequestHead(dst []byte, h *requestHead) []byte {
	dst = append(dst, h.method...)
	dst = append(dst, ' ')
	dst = append(dst, h.target...)
	dst = append(dst, " HTTP/1.1\r\nHost: "...)
	dst = append(dst, h.host...)
	dst = append(dst, "\r\n"...)

	var forwardedFor []byte // the last X-Forwarded-For line's value; earlier ones are kept as they are
	at := 0                 // raw[:at] has been copied or dropped
	if !h.lookThrough {
		for i := range h.marks {
			m := &h.marks[i]
			if !h.keeps(m.field, h.raw[m.from:m.to]) {
				dst = append(dst, h.raw[at:m.from]...)
				dst, forwardedFor = h.forwardedFor(dst, forwardedFor, m.field, h.raw[m.from:m.to])
				at = int(m.to)
			}
		}
		dst = append(dst, h.raw[at:]...)
	} else { // Slow path
		connection := connectionOptions(h.raw)
		for from := 0; ; {
			line, name, _, _ := nextField(h.raw[from:])
			if len(name) == 0 {
				dst = append(dst, h.raw[at:from]...)
				break
			}
			f := fieldNamed(name)
			to := from + len(line)
			if !h.keeps(f, line) || connection != nil && nominates(connection, name) ||
				h.debugHeader != "" && len(name) == len(h.debugHeader) && bytes.EqualFold(name, bytesOf(h.debugHeader)) {
				dst = append(dst, h.raw[at:from]...)
				dst, forwardedFor = h.forwardedFor(dst, forwardedFor, f, line)
				at = to
			}
			from = to
		}
	}

	if h.hasBody || h.length > 0 {
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, int64(h.length), 10)
		dst = append(dst, "\r\n"...)
	}
	if h.apiKey != "" {
		dst = append(dst, "Authorization: Bearer "...)
		dst = append(dst, h.apiKey...)
		dst = append(dst, "\r\n"...)
	}
	if t := h.told; t != nil {
		if formSafe(t.Name) {
			dst = append(append(append(dst, "X-Gateway-Model-Name: "...), t.Name...), "\r\n"...)
		}
		if formSafe(t.Base) {
			dst = append(append(append(dst, "X-Gateway-Base-Model-Name: "...), t.Base...), "\r\n"...)
		}
	}
	dst = append(dst, "X-Request-Id: "...)
	dst = append(dst, h.requestID...)
	if h.trace != nil {
		dst = h.trace.AppendTraceparent(append(dst, "\r\nTraceparent: "...), h.trace.attempt)
	}
	if h.rank > 0 {
		dst = append(dst, "\r\nX-data-parallel-rank: "...)
		dst = strconv.AppendInt(dst, int64(h.rank-1), 10)
	}
	if h.forwarded != forwardedOff {
		dst = append(dst, "\r\nX-Forwarded-For: "...)
		if len(forwardedFor) > 0 {
			dst = append(dst, forwardedFor...)
			dst = append(dst, ", "...)
		}
		dst = append(dst, h.clientIP...)
		if h.https {
			dst = append(dst, "\r\nX-Forwarded-Proto: https"...)
		} else {
			dst = append(dst, "\r\nX-Forwarded-Proto: http"...)
		}
		if len(h.clientHost) > 0 {
			dst = append(dst, "\r\nX-Forwarded-Host: "...)
			dst = append(dst, h.clientHost...)
		}
	}
	return append(dst, "\r\n\r\n"...)
}

// keeps reports whether a line of the field goes on as it is.
func (h *requestHead) keeps(f field, line []byte) bool {
	switch f {
	case fOther, fContentType, fContentEncoding, fRetryAfter, fLocation:
		return true
	case fAcceptEncoding:
		return !h.plain
	case fTraceparent:
		return h.trace == nil
	case fTracestate:
		return h.trace == nil || h.trace.continued
	case fAuthorization:
		return !h.dropAuth && h.apiKey == ""
	case fAPIKey:
		return !h.dropAuth
	case fForwarded:
		// What a client says of proto and host is replaced by what we see of it even when appending: both are
		// single values, and ours is the one that is true.
		return h.forwarded == forwardedAppend && !ourForwarded(line[:bytes.IndexByte(line, ':')])
	}
	return false
}

// forwardedFor takes in a line that doesn't go on as it is: X-Forwarded-For goes on with the last one's value, and earlier
// ones as they are.
func (h *requestHead) forwardedFor(dst, last []byte, f field, line []byte) (newDst, newLast []byte) {
	if f != fForwardedFor || h.forwarded != forwardedAppend {
		return dst, last
	}
	if last != nil {
		dst = append(dst, "X-Forwarded-For: "...)
		dst = append(dst, last...)
		dst = append(dst, "\r\n"...)
	}
	_, _, value, _ := nextField(line)
	return dst, value
}

// ourForwarded reports whether name is one of the X-Forwarded fields that we set.
func ourForwarded(name []byte) bool {
	return len(name) == 17 && foldsTo(name, "x-forwarded-proto") || len(name) == 16 && foldsTo(name, "x-forwarded-host")
}

// connectionOptions returns the value of the Connection field, nil if there is none or if it nominates nothing. Several
// Connection fields, which nobody sends, are joined.
func connectionOptions(raw []byte) []byte {
	var all []byte
	for {
		_, name, value, rest := nextField(raw)
		if len(name) == 0 {
			return all
		}
		raw = rest
		if len(name) == 10 && fieldNamed(name) == fConnection &&
			!bytes.EqualFold(value, optClose) && !bytes.EqualFold(value, optKeepAlive) {
			if all == nil {
				all = value
			} else { // Slow path
				all = append(append(append([]byte(nil), all...), ','), value...)
			}
		}
	}
}

// maxRequestIDBytes bounds a client's X-Request-Id; a longer one is replaced.
const maxRequestIDBytes = 128

// validRequestID reports whether a client's X-Request-Id can be used: it goes into logs and headers, and some servers
// make it a part of other names.
func validRequestID(id []byte) bool {
	if len(id) == 0 || len(id) > maxRequestIDBytes {
		return false
	}
	for _, c := range id {
		switch {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		case c == '-', c == '_', c == '.', c == ':', c == '/', c == '+', c == '=', c == '~', c == '@':
		default:
			return false
		}
	}
	return true
}

// appendRequestID appends a new request id: 128 random bits in hexadecimal. It has to be unique, not secret.
func appendRequestID(dst []byte) []byte {
	for range 2 {
		r := rand.Uint64()
		for range 16 {
			dst = append(dst, "0123456789abcdef"[r&15])
			r >>= 4
		}
	}
	return dst
}

// A framing says how the end of a response's body is known (RFC 9112 6.3).
type framing uint8

const (
	noBody framing = iota
	byLength
	byChunks
	byClose
)

// A response is what the gateway must know of the head of an endpoint's answer.
type response struct {
	status     int
	framing    framing
	length     int64 // of the body, if framing is byLength; of one that HEAD left out
	keepAlive  bool  // the connection may carry another request after the body
	events     bool  // Content-Type is text/event-stream
	json       bool  // Content-Type is JSON
	encoded    bool  // the body is compressed
	retryAfter int   // seconds; 0: none, or not a number
}

var (
	errStatusLine    = errors.New("malformed status line")
	errHTTPVersion   = errors.New("HTTP version is not 1.0 or 1.1")
	errResponseField = errors.New("malformed header field")
	errResponseSize  = errors.New("header block is too large")
	errFraming       = errors.New("Content-Length and Transfer-Encoding contradict each other or HTTP")
	errSwitched      = errors.New("status 101 though no upgrade was asked for")
	errInterim       = errors.New("too many interim answers")
)

// maxResponseFields bounds the fields of a response, and so the work on one.
const maxResponseFields = 256

// parseStatusLine reads the status line at the front of head, a whole head.
func parseStatusLine(head []byte) (status int, http10 bool, reason, fields []byte, err error) {
	end := bytes.IndexByte(head, '\n')
	if end < len("HTTP/1.1 200\r") || head[end-1] != '\r' || string(head[:5]) != "HTTP/" {
		return 0, false, nil, nil, errStatusLine
	}
	line := head[:end-1]
	switch string(line[5:9]) {
	case "1.1 ":
	case "1.0 ":
		http10 = true
	default:
		return 0, false, nil, nil, errHTTPVersion
	}
	for _, c := range line[9:12] {
		if c < '0' || c > '9' {
			return 0, false, nil, nil, errStatusLine
		}
		status = status*10 + int(c-'0')
	}
	if status < 100 || status > 599 || len(line) > 12 && line[12] != ' ' {
		return 0, false, nil, nil, errStatusLine
	}
	if len(line) > 13 {
		reason = line[13:]
		for _, c := range reason {
			if byteClass[c]&isValue == 0 {
				return 0, false, nil, nil, errStatusLine
			}
		}
	}
	return status, http10, reason, head[end+1:], nil
}

// parseResponse reads the fields of a response's head into r, strictly: an answer on whose end two readers could differ
// is no answer. It appends to dst the fields that the client gets, in their order and bytes; framing and connection
// fields are left to the caller. headRequest: the request was a HEAD. origin is the endpoint's URL, which is cut off a Location
// that begins with it. It does not allocate.
func parseResponse(dst, fields []byte, status int, http10, headRequest bool, origin string, r *response) ([]byte, error) {
	*r = response{status: status, keepAlive: !http10}
	var lengths, codings, n int
	var connection, location []byte
	redirected := false // to the endpoint itself
	was := len(dst)
	run, at := fields, 0
	for rest := fields; len(rest) > 2; {
		end := bytes.IndexByte(rest, '\n')
		if end < 2 || rest[end-1] != '\r' {
			return dst, errResponseField
		}
		line := rest[:end+1]
		rest = rest[end+1:]
		i := 0
		for byteClass[line[i]]&isToken != 0 {
			i++
		}
		if i == 0 || line[i] != ':' {
			return dst, errResponseField
		}
		if n++; n > maxResponseFields {
			return dst, errResponseSize
		}
		name := line[:i]
		if skipValue(line, i+1) != end-1 {
			return dst, errResponseField
		}
		value := trimSpace(line[i+1 : end-1])
		keep := true
		switch fieldNamed(name) {
		case fContentLength:
			keep = false
			if lengths++; lengths > 1 {
				return dst, errFraming
			}
			if r.length = parseLength(value); r.length < 0 {
				return dst, errFraming
			}
		case fTransferEncoding:
			keep = false
			if codings++; codings > 1 || !equalFold(value, "chunked") || http10 {
				return dst, errFraming
			}
		case fConnection:
			keep = false
			if connection != nil { // Slow path: several fields are one list (RFC 9110 5.3)
				value = append(append(append([]byte(nil), connection...), ','), value...)
			}
			connection = value
		case fContentType:
			r.events = hasMediaType(value, "text/event-stream")
			r.json = hasMediaType(value, "application/json")
		case fContentEncoding:
			r.encoded = !equalFold(value, "identity")
		case fRetryAfter:
			if s := parseLength(value); s > 0 && s < 1<<31 {
				r.retryAfter = int(s)
			}
		case fLocation:
			if rest, here := bytes.CutPrefix(value, []byte(origin)); here && (len(rest) == 0 || rest[0] == '/' || rest[0] == '?' || rest[0] == '#') {
				keep, redirected, location = false, true, rest
			}
		case fHopByHop, fRequestID, fOurs, fSteering:
			keep = false
		}
		if keep {
			at += len(line)
			continue
		}
		dst = append(dst, run[:at]...)
		run, at = rest, 0
	}
	dst = append(dst, run[:at]...)
	if redirected { // Slow path: in absolute form, as FastAPI sends for a slash too many
		dst = append(dst, "Location: "...)
		switch {
		case len(location) == 0 || location[0] != '/':
			dst = append(dst, '/')
		case len(location) > 1 && location[1] == '/':
			dst = append(dst, "/."...) // or the path would be read as a host (RFC 3986 4.2)
		}
		dst = append(append(dst, location...), "\r\n"...)
	}

	switch {
	case connection == nil, equalFold(connection, "keep-alive"):
		r.keepAlive = r.keepAlive || connection != nil
	case equalFold(connection, "close"):
		r.keepAlive = false
	default: // Slow path
		if nominates(connection, optClose) {
			r.keepAlive = false
		} else if http10 {
			r.keepAlive = nominates(connection, optKeepAlive)
		}
		dst = dropNominated(dst, was, connection)
	}

	switch {
	case lengths > 0 && codings > 0:
		return dst, errFraming
	case headRequest, status == 204, status == 304:
		r.framing = noBody
		if !headRequest {
			r.length = 0
		}
	case codings > 0:
		r.framing = byChunks
	case lengths > 0:
		if r.framing = byLength; r.length == 0 {
			r.framing = noBody
		}
	default:
		r.framing, r.keepAlive = byClose, false
	}
	return dst, nil
}

// dropNominated removes from dst[from:] the fields that a Connection value names.
func dropNominated(dst []byte, from int, connection []byte) []byte {
	out := dst[:from]
	for rest := dst[from:]; ; {
		line, name, _, next := nextField(rest)
		if len(name) == 0 {
			return out
		}
		rest = next
		if !nominates(connection, name) {
			out = append(out, line...) // never overtakes rest
		}
	}
}

// hasMediaType reports whether a Content-Type value is of the type, whatever its parameters.
func hasMediaType(value []byte, want string) bool {
	if len(value) < len(want) || !equalFold(value[:len(want)], want) {
		return false
	}
	return len(value) == len(want) || value[len(want)] == ';' || value[len(want)] == ' '
}
