package proxy

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"strings"
)

// A rejection says why a request is refused before it is looked at any further:
// an outcome word of the closed list, the status that goes with it and a short
// reason. The reason is a constant, so it never repeats what the client sent.
// Rejections are immutable values shared by all connections.
type rejection struct {
	code   string // outcome word, also the error's code
	status int
	reason string
	// quiet means that nobody is left to read an answer.
	quiet bool
}

func (r *rejection) Error() string { return r.code + ": " + r.reason }

func badRequest(reason string) *rejection {
	return &rejection{code: "bad_request", status: 400, reason: reason}
}

// The reasons to refuse a head. The statuses are those of the outcome list, which
// is narrower than HTTP's: 414 is said as 431, 417, 501 and 505 as 400.
var (
	errRequestLine    = badRequest("malformed request line")
	errMethodToken    = badRequest("malformed method")
	errMethod         = &rejection{code: "method_not_allowed", status: 405, reason: "unknown method"}
	errTargetForm     = badRequest("the request target must be a path")
	errTargetBytes    = badRequest("invalid character in the request target")
	errTargetTooLong  = &rejection{code: "headers_too_large", status: 431, reason: "the request target is too long"}
	errVersion        = badRequest("unsupported HTTP version")
	errLineEnd        = badRequest("line does not end in CR LF, or holds a control character")
	errFold           = badRequest("folded header line")
	errFieldName      = badRequest("malformed header name")
	errTooManyFields  = &rejection{code: "headers_too_large", status: 431, reason: "too many header fields"}
	errHeadTooLarge   = &rejection{code: "headers_too_large", status: 431, reason: "the request head is too large"}
	errHostMissing    = badRequest("missing Host")
	errHostTwice      = badRequest("more than one Host")
	errHost           = badRequest("invalid Host")
	errHostMismatch   = badRequest("the request target and Host differ")
	errLength         = badRequest("invalid Content-Length")
	errLengthTwice    = badRequest("more than one Content-Length")
	errCoding         = badRequest("unsupported Transfer-Encoding")
	errCodingTwice    = badRequest("more than one Transfer-Encoding")
	errCodingVersion  = badRequest("Transfer-Encoding in HTTP/1.0")
	errCodingLength   = badRequest("both Transfer-Encoding and Content-Length")
	errExpect         = badRequest("unknown expectation")
	errUnderscore     = badRequest("header name that only differs in an underscore from one with a meaning")
	errRepeated       = badRequest("header field that must be alone is repeated")
	errAuthTwice      = &rejection{code: "unauthorized", status: 401, reason: msgUnauthorized}
	errNominated      = badRequest("Connection names a field that is not hop-by-hop")
	errBodyTooLarge   = &rejection{code: "too_large", status: 413, reason: "the request body is too large"}
	errHeadTimeout    = &rejection{code: "request_timeout", status: 408, reason: "the request head took too long"}
	errBodyTimeout    = &rejection{code: "request_timeout", status: 408, reason: "the request body took too long"}
	errHeadCut        = badRequest("the request head is incomplete")
	errBodyCut        = badRequest("the request body is incomplete")
	errChunk          = badRequest("malformed chunk")
	errChunkExtension = badRequest("chunk extensions are too long")
	errTrailer        = badRequest("malformed trailer")
	errTrailerTooLong = &rejection{code: "headers_too_large", status: 431, reason: "the trailer section is too large"}
	errLeadingLines   = badRequest("too many empty lines before the request")
	errClientGone     = &rejection{code: "client_gone", status: 499, reason: "the client has gone", quiet: true}
)

// headLimits bounds what checkHead lets pass. All fields must be set.
type headLimits struct {
	targetBytes int   // longest request target
	fields      int   // most header fields
	bodyBytes   int64 // largest declared Content-Length; above it tooLarge

	tooLarge *rejection // errBodyTooLarge, naming bodyBytes
}

// headInfo is what the check has learned of one request head.
type headInfo struct {
	contentLength int64 // -1 when absent
	chunked       bool
	http10        bool
	expect        bool // Expect: 100-continue in HTTP/1.1
	// cutAt[:cuts] are the parts of the head that are for nobody else to see, in
	// order: scheme and authority of an absolute-form target, and the lines that frame
	// the body or ask for 100 Continue.
	cutAt [4]span
	cuts  int
}

// span is b[from:to].
type span struct{ from, to int }

func (hi *headInfo) cutOut(from, to int) {
	hi.cutAt[hi.cuts] = span{from, to}
	hi.cuts++
}

// Byte classes.
const (
	isToken  = 1 << iota // RFC 9110 5.6.2 tchar
	isTarget             // what a request target may hold: RFC 3986, no fragment
	isHost               // reg-name without sub-delims, which no real host has
	isValue              // field-content with SP and HTAB: RFC 9110 5.5
	isHexDig
)

var byteClass = func() (t [256]uint8) {
	set := func(class uint8, chars string) {
		for i := range len(chars) {
			t[chars[i]] |= class
		}
	}
	const alnum = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	set(isToken, alnum+"!#$%&'*+-.^_`|~")
	set(isTarget, alnum+"-._~:/?[]@!$&'()*+,;=%")
	set(isHost, alnum+"-._~")
	set(isHexDig, "0123456789abcdefABCDEF")
	for c := range 256 {
		if c == '\t' || c >= ' ' && c != 0x7f {
			t[c] |= isValue
		}
	}
	return t
}()

// checkHead is the strict check of one request head, from the first byte of the
// request line to the empty line, before anything else sees it. It accepts only
// what every HTTP/1.1 implementation must read in the same way; the rules are
// those of RFC 9112 with each MAY answered "no". b begins with the head; n is the
// head's length, 0 if b ends before the head does. What is learned goes to hi. It does
// not allocate and makes one pass.
func checkHead(b []byte, lim *headLimits, hi *headInfo) (n int, rej *rejection) {
	*hi = headInfo{contentLength: -1}
	i, target, rej := checkRequestLine(b, lim, hi)
	if i == 0 || rej != nil {
		return 0, rej
	}

	var host []byte
	var seen fieldSet
	fields := 0
	for {
		nameAt := i
		for i < len(b) && byteClass[b[i]]&isToken != 0 {
			i++
		}
		if i == len(b) {
			return 0, nil
		}
		if b[i] != ':' || i == nameAt {
			switch {
			case i > nameAt:
				return 0, errFieldName
			case b[i] == '\r':
				if i+1 == len(b) {
					return 0, nil
				}
				if b[i+1] != '\n' {
					return 0, errLineEnd
				}
				return i + 2, checkTogether(lim, hi, seen, host, target)
			case b[i] == ' ' || b[i] == '\t':
				return 0, errFold
			case b[i] == '\n':
				return 0, errLineEnd
			}
			return 0, errFieldName
		}
		name := b[nameAt:i]
		i++
		for i < len(b) && (b[i] == ' ' || b[i] == '\t') {
			i++
		}
		valueAt := i
		i = skipValue(b, i)
		if i+1 >= len(b) {
			if i < len(b) && b[i] != '\r' {
				return 0, errLineEnd
			}
			return 0, nil
		}
		if b[i] != '\r' || b[i+1] != '\n' {
			return 0, errLineEnd
		}
		end := i
		for end > valueAt && (b[end-1] == ' ' || b[end-1] == '\t') {
			end--
		}
		i += 2
		if fields++; fields > lim.fields {
			return 0, errTooManyFields
		}
		f, underscore := knownField(name)
		if f == 0 {
			continue
		}
		if underscore {
			return 0, errUnderscore
		}
		value := b[valueAt:end]
		if seen&f != 0 {
			switch f {
			case fieldHost:
				return 0, errHostTwice
			case fieldContentLength:
				return 0, errLengthTwice
			case fieldTransferEncoding:
				return 0, errCodingTwice
			case fieldConnection:
			case fieldAuthorization:
				return 0, errAuthTwice
			default:
				return 0, errRepeated
			}
		}
		seen |= f
		switch f {
		case fieldHost:
			host = value
		case fieldContentLength:
			if hi.contentLength = parseLength(value); hi.contentLength < 0 {
				return 0, errLength
			}
			hi.cutOut(nameAt, i)
		case fieldTransferEncoding:
			if !equalFold(value, "chunked") {
				return 0, errCoding
			}
			hi.chunked = true
			hi.cutOut(nameAt, i)
		case fieldConnection:
			if rej := checkConnection(value); rej != nil {
				return 0, rej
			}
		case fieldExpect:
			if !equalFold(value, "100-continue") {
				return 0, errExpect
			}
			hi.expect = !hi.http10
			hi.cutOut(nameAt, i)
		}
	}
}

// checkTogether checks what only the whole head shows.
func checkTogether(lim *headLimits, hi *headInfo, seen fieldSet, host, target []byte) *rejection {
	switch {
	case hi.chunked && seen&fieldContentLength != 0:
		return errCodingLength
	case hi.chunked && hi.http10:
		return errCodingVersion
	case seen&fieldHost == 0 && !hi.http10:
		return errHostMissing
	case seen&fieldHost != 0 && !validHost(host):
		return errHost
	case hi.contentLength > lim.bodyBytes:
		return cmp.Or(lim.tooLarge, errBodyTooLarge)
	}
	if target[0] != '/' {
		return checkAuthority(target, host)
	}
	return nil
}

// checkRequestLine checks the first line of the head b begins with. next is where the
// second line begins, 0 if b ends before.
func checkRequestLine(b []byte, lim *headLimits, hi *headInfo) (next int, target []byte, rej *rejection) {
	i := 0
	for i < len(b) && byteClass[b[i]]&isToken != 0 {
		i++
	}
	if i == len(b) {
		return 0, nil, nil
	}
	if i == 0 || b[i] != ' ' {
		return 0, nil, errMethodToken
	}
	if !knownMethod(b[:i]) {
		return 0, nil, errMethod
	}
	i++
	targetAt := i
	for i < len(b) && byteClass[b[i]]&isTarget != 0 {
		i++
	}
	target = b[targetAt:i]
	switch {
	case len(target) > lim.targetBytes:
		return 0, nil, errTargetTooLong
	case i == len(b):
		return 0, nil, nil
	case b[i] != ' ':
		return 0, nil, errTargetBytes
	case len(target) == 0:
		return 0, nil, errRequestLine
	}
	if target[0] != '/' {
		// Slow path: a server must accept the absolute form too (RFC 9112 3.2.2).
		n := absolutePrefix(target)
		if n == 0 {
			return 0, nil, errTargetForm
		}
		hi.cutOut(targetAt, targetAt+n)
	}
	i++
	const version = len("HTTP/1.1\r\n")
	if len(b)-i < version {
		// What can't become a version must not be waited for.
		rest := string(b[i:])
		if !strings.HasPrefix("HTTP/1.1\r\n", rest) && !strings.HasPrefix("HTTP/1.0\r\n", rest) {
			return 0, nil, errRequestLine
		}
		return 0, nil, nil
	}
	switch string(b[i : i+version]) {
	case "HTTP/1.1\r\n":
	case "HTTP/1.0\r\n":
		hi.http10 = true
	default:
		if string(b[i:i+5]) == "HTTP/" {
			return 0, nil, errVersion
		}
		return 0, nil, errRequestLine
	}
	return i + version, target, nil
}

// knownMethod lists the methods of RFC 9110 and 5789 that a gateway can mean
// something by; which route takes which is for the handler to say. CONNECT and
// TRACE are for proxies of another kind.
func knownMethod(m []byte) bool { return methodName(m) != "" }

// fieldSet is a set of the fields the check must know by name.
type fieldSet uint16

const (
	fieldHost fieldSet = 1 << iota
	fieldContentLength
	fieldTransferEncoding
	fieldConnection
	fieldExpect
	fieldContentType
	fieldAuthorization
)

// knownField returns the field called name, 0 if the check has no interest in it.
// underscore reports that an underscore stands in it for a hyphen: CGI-like servers
// read such a name as the real one, others don't, so it can't be let through.
func knownField(name []byte) (f fieldSet, underscore bool) {
	var want string
	switch len(name) {
	case 4:
		f, want = fieldHost, "host"
	case 6:
		f, want = fieldExpect, "expect"
	case 10:
		f, want = fieldConnection, "connection"
	case 12:
		f, want = fieldContentType, "content-type"
	case 13:
		f, want = fieldAuthorization, "authorization"
	case 14:
		f, want = fieldContentLength, "content-length"
	case 17:
		f, want = fieldTransferEncoding, "transfer-encoding"
	default:
		return 0, false
	}
	// Fast path: most names of such a length begin or end with another letter.
	if name[0]|0x20 != want[0] || name[len(name)-1]|0x20 != want[len(want)-1] {
		return 0, false
	}
	for i, c := range name {
		// In a token, setting this bit makes lower case of upper case and changes no
		// other character into a letter or a hyphen.
		switch c | 0x20 {
		case want[i]:
		case '_' | 0x20:
			if want[i] != '-' {
				return 0, false
			}
			underscore = true
		default:
			return 0, false
		}
	}
	return f, underscore
}

// lower maps A to Z to a to z and leaves every other byte alone.
func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

// equalFold reports whether b is s, which is in lower case, in any case.
func equalFold(b []byte, s string) bool {
	if len(b) != len(s) {
		return false
	}
	for i, c := range b {
		if lower(c) != s[i] {
			return false
		}
	}
	return true
}

// skipValue returns the index at or after i of the first byte that no field value
// may hold, len(b) if there is none. It takes eight bytes at a time; the
// expressions for "a byte below 0x20" and "a byte equal to 0x7f" are those of
// Anderson's Bit Twiddling Hacks (hasless, hasvalue), exact for the lowest match.
func skipValue(b []byte, i int) int {
	const (
		ones = 0x0101010101010101
		high = 0x8080808080808080
	)
	for i+8 <= len(b) {
		x := binary.LittleEndian.Uint64(b[i:])
		d := x ^ ones*0x7f
		m := ((x-ones*0x20)&^x | (d-ones)&^d) & high
		if m == 0 {
			i += 8
			continue
		}
		i += bits.TrailingZeros64(m) >> 3
		if b[i] != '\t' {
			return i
		}
		i++
	}
	for i < len(b) && byteClass[b[i]]&isValue != 0 {
		i++
	}
	return i
}

// parseLength reads 1*DIGIT. It returns -1 for anything else and for numbers with
// more than 18 digits, which fit an int64 and no request.
func parseLength(v []byte) int64 {
	if len(v) == 0 || len(v) > 18 {
		return -1
	}
	n := int64(0)
	for _, c := range v {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int64(c-'0')
	}
	return n
}

// checkConnection refuses a Connection value that would have a field removed which
// frames, addresses or authorises the request: whoever decides on it before and
// whoever receives the request after the removal would not see the same one.
func checkConnection(v []byte) *rejection {
	for len(v) > 0 {
		i := 0
		for i < len(v) && v[i] != ',' {
			i++
		}
		opt := trimSpace(v[:i])
		if i < len(v) {
			i++
		}
		v = v[i:]
		switch f, underscore := knownField(opt); {
		case underscore:
			return errNominated
		case f == 0, f == fieldConnection, f == fieldExpect:
		default:
			return errNominated
		}
	}
	return nil
}

// trimSpace removes SP and HTAB from both ends of b.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// validHost reports whether v is uri-host [ ":" port ] (RFC 9110 7.2) with a host
// that is a name, an IPv4 address or a bracketed IPv6 address without zone. User
// information, percent-encoding and sub-delims have no place in a Host.
func validHost(v []byte) bool {
	i := 0
	if len(v) > 0 && v[0] == '[' {
		for i < len(v) && v[i] != ']' {
			i++
		}
		if i == len(v) {
			return false
		}
		// Slow path: an IPv6 literal. A zone is not for the wire (RFC 6874).
		a, err := netip.ParseAddr(string(v[1:i]))
		if err != nil || !a.Is6() || a.Zone() != "" {
			return false
		}
		i++
	} else {
		for i < len(v) && byteClass[v[i]]&isHost != 0 {
			i++
		}
		if i == 0 {
			return false
		}
	}
	if i == len(v) {
		return true
	}
	port := v[i+1:]
	return v[i] == ':' && len(port) > 0 && len(port) <= 5 && parseLength(port) >= 0 && parseLength(port) <= 65535
}

// absolutePrefix returns the length of scheme and authority of an http or https
// URI that has a path, or 0.
func absolutePrefix(target []byte) int {
	for _, scheme := range [...]string{"http://", "https://"} {
		if n := len(scheme); len(target) > n && equalFold(target[:n], scheme) {
			for i := n; i < len(target); i++ {
				switch target[i] {
				case '/':
					return i
				case '?':
					return 0
				}
			}
		}
	}
	return 0
}

// checkAuthority demands that an absolute-form target names the host that Host
// names. RFC 9112 3.2.2 would ignore Host; two names for one request are better refused.
func checkAuthority(target, host []byte) *rejection {
	i := len("http://")
	if target[4] != ':' {
		i++
	}
	authority := target[i:absolutePrefix(target)]
	if !validHost(authority) {
		return errHost
	}
	if host == nil {
		return nil // HTTP/1.0
	}
	if len(authority) != len(host) {
		return errHostMismatch
	}
	for i := range host {
		if lower(host[i]) != lower(authority[i]) {
			return errHostMismatch
		}
	}
	return nil
}

// steeringPrefixes and steeringNames are the fields by which model servers, pickers
// and routers let a request choose its own engine, priority, prefill server or
// parameters, or make a server report its load. They are for the gateway to set, so
// what a client sends of them goes no further. Sources: vLLM (X-data-parallel-rank,
// X-Vllm-Priority, endpoint-load-metrics-format), SGLang (x-override-*,
// x-smg-routing-key), Dynamo (x-dynamo-*), the Gateway API inference extension
// (x-gateway-*), llm-d (x-prefiller-*, x-slo-*), and URL rewriting in common
// frameworks (X-Original-URL, X-Rewrite-URL).
var (
	steeringPrefixes = [...]string{
		"x-gateway-", "x-kvgate-", "x-prefiller-", "x-override-", "x-dynamo-", "x-smg-", "x-llm-d-", "x-slo-", "x-data-parallel-",
	}
	steeringNames = [...]string{
		"endpoint-load-metrics", "endpoint-load-metrics-format", "x-vllm-priority", "x-original-url", "x-rewrite-url", "x-http-method-override", "x-method-override", "x-http-method",
	}
)

// steersRouting reports whether a client's header field must be stripped at the
// edge because it steers routing on servers. Underscores count as hyphens, since
// some servers read them so. It does not allocate.
func steersRouting(name []byte) bool {
	if len(name) < 5 {
		return false
	}
	first := lower(name[0])
	if first != 'x' && first != 'e' || first == 'x' && (name[1] != '-' && name[1] != '_' || !steeringLetter[lower(name[2])]) {
		return false
	}
	for _, p := range steeringPrefixes {
		if len(name) >= len(p) && lower(name[2]) == p[2] && foldsTo(name[:len(p)], p) {
			return true
		}
	}
	for _, s := range steeringNames {
		if len(name) == len(s) && foldsTo(name, s) {
			return true
		}
	}
	return false
}

// steeringLetter are the letters that names behind "x-" begin with: most fields that clients send have another one.
var steeringLetter = func() (t [256]bool) {
	for _, s := range steeringPrefixes {
		t[s[2]] = true
	}
	for _, s := range steeringNames {
		if s[0] == 'x' {
			t[s[2]] = true
		}
	}
	return t
}()

// foldsTo reports whether b, in any case and with underscores for hyphens, is s.
// The lengths are equal.
func foldsTo(b []byte, s string) bool {
	for i, c := range b {
		if lower(c) != s[i] && (c != '_' || s[i] != '-') {
			return false
		}
	}
	return true
}
