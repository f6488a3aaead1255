package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/valyala/fasthttp"

	"kvgate/test/httpcases"
)

var testLimits = headLimits{targetBytes: 1 << 10, fields: 20, bodyBytes: 1 << 20}

// slowHead is the same check as checkHead, written from the grammar with regular
// expressions over whole lines. It says whether head is good, and what it declares.
func slowHead(head string, lim headLimits) (hi headInfo, target string, ok bool) {
	hi.contentLength = -1
	lines := strings.Split(strings.TrimSuffix(head, "\r\n\r\n"), "\r\n")
	start := slowStart.FindStringSubmatch(lines[0])
	if start == nil {
		return hi, "", false
	}
	target = start[2]
	hi.http10 = start[3] == "0"
	if len(target) > lim.targetBytes || len(lines)-1 > lim.fields {
		return hi, "", false
	}
	fields := map[string][]string{}
	for _, l := range lines[1:] {
		m := slowField.FindStringSubmatch(l)
		if m == nil {
			return hi, "", false
		}
		name := strings.ToLower(m[1])
		fields[name] = append(fields[name], strings.Trim(m[2], " \t"))
	}
	special := []string{"host", "expect", "connection", "content-type", "authorization", "content-length", "transfer-encoding"}
	isSpecial := map[string]bool{}
	for _, s := range special {
		isSpecial[s] = true
		if len(fields[s]) > 1 && s != "connection" {
			return hi, "", false
		}
	}
	for name := range fields {
		if n := strings.ReplaceAll(name, "_", "-"); n != name && isSpecial[n] {
			return hi, "", false
		}
	}
	for _, v := range fields["connection"] {
		for opt := range strings.SplitSeq(v, ",") {
			opt = strings.ReplaceAll(strings.ToLower(strings.Trim(opt, " \t")), "_", "-")
			if isSpecial[opt] && opt != "connection" && opt != "expect" {
				return hi, "", false
			}
		}
	}
	host, hasHost := fields["host"]
	if !hasHost && !hi.http10 || hasHost && !slowHost(host[0]) {
		return hi, "", false
	}
	if v, ok := fields["content-length"]; ok {
		if !slowDigits.MatchString(v[0]) {
			return hi, "", false
		}
		n, err := strconv.ParseInt(v[0], 10, 64)
		if err != nil || n > lim.bodyBytes {
			return hi, "", false
		}
		hi.contentLength = n
	}
	if v, ok := fields["transfer-encoding"]; ok {
		if !strings.EqualFold(v[0], "chunked") || hi.http10 || hi.contentLength >= 0 {
			return hi, "", false
		}
		hi.chunked = true
	}
	if v, ok := fields["expect"]; ok {
		if !strings.EqualFold(v[0], "100-continue") {
			return hi, "", false
		}
		hi.expect = !hi.http10
	}
	if !strings.HasPrefix(target, "/") {
		m := slowAbsolute.FindStringSubmatch(target)
		if m == nil || !slowHost(m[1]) || hasHost && !strings.EqualFold(m[1], host[0]) {
			return hi, "", false
		}
		target = m[2]
	}
	return hi, target, true
}

// slowCut is head as the server is to see it.
func slowCut(head, target string) string {
	lines := strings.SplitAfter(head, "\r\n")
	start := strings.Split(lines[0], " ")
	var out strings.Builder
	out.WriteString(start[0] + " " + target + " " + start[2])
	for _, l := range lines[1:] {
		switch name, _, _ := strings.Cut(strings.ToLower(l), ":"); name {
		case "content-length", "transfer-encoding", "expect":
		default:
			out.WriteString(l)
		}
	}
	return out.String()
}

var (
	slowStart    = regexp.MustCompile(`\A(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) ([-\w.~:/?\[\]@!$&'()*+,;=%]+) HTTP/1\.([01])\z`)
	slowField    = regexp.MustCompile("\\A([-!#$%&'*+.^_`|~0-9A-Za-z]+):((?s-i:[\\t -~]|[\\x{80}-\\x{ff}])*)\\z")
	slowDigits   = regexp.MustCompile(`\A[0-9]{1,18}\z`)
	slowAbsolute = regexp.MustCompile(`\A(?i:https?)://([^/?]*)(/.*)\z`)
	slowName     = regexp.MustCompile(`\A([-\w.~]+)(?::([0-9]{1,5}))?\z`)
	slowV6       = regexp.MustCompile(`\A\[([0-9a-fA-F:.]+)\](?::([0-9]{1,5}))?\z`)
)

func slowHost(v string) bool {
	m := slowName.FindStringSubmatch(v)
	if m == nil {
		if m = slowV6.FindStringSubmatch(v); m == nil || net.ParseIP(m[1]) == nil || !strings.Contains(m[1], ":") {
			return false
		}
	}
	port, _ := strconv.Atoi(m[2])
	return port <= 65535
}

// latin1 makes every byte a character, for the regular expressions.
func latin1(b []byte) string {
	r := make([]rune, len(b))
	for i, c := range b {
		r[i] = rune(c)
	}
	return string(r)
}

// wholeHead cuts data after its first empty line, or gives it one.
func wholeHead(data []byte) []byte {
	data = bytes.TrimLeft(data, "\r\n")
	if i := bytes.Index(data, crlfcrlf); i >= 0 {
		return data[:i+4]
	}
	return append(bytes.TrimRight(data, "\r\n"), crlfcrlf...)
}

func seedHeads(f *testing.F) {
	cases, err := httpcases.Cases()
	if err != nil {
		f.Fatal(err)
	}
	for _, c := range cases {
		var b []byte
		for _, s := range c.Send {
			b = append(b, httpcases.StepBytes(s)...)
		}
		if len(b) < 8<<10 {
			f.Add(b)
		}
	}
	for _, h := range []string{
		"GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", "GET / HTTP/1.1\r\nHost: [::ffff:1.2.3.4]\r\n\r\n",
		"GET http://h/x?y HTTP/1.1\r\nhost:h\r\nConnection: x, keep-alive\r\n\r\n", "PUT HTTPS://H:1/ HTTP/1.1\r\nHost: h:1\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: h\r\nConnection: authorization\r\n\r\n", "POST / HTTP/1.1\r\nHost: h:\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: h\r\nX: \t a\tb \xff\r\nExpect: 100-CONTINUE\r\ncontent-length: 0012\r\n\r\n",
	} {
		f.Add([]byte(h))
	}
}

// The check agrees with the slow one on every head.
func FuzzCheckHead(f *testing.F) {
	seedHeads(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		head := wholeHead(data)
		if len(head) == len(crlfcrlf) {
			return
		}
		var hi headInfo
		n, rej := checkHead(head, &testLimits, &hi)
		if rej == nil && n != len(head) {
			t.Fatalf("%q: length %d, want %d", head, n, len(head))
		}
		want, target, ok := slowHead(latin1(head), testLimits)
		if ok != (rej == nil) {
			t.Fatalf("%q: check says %v, the slow check %v", head, rej, ok)
		}
		if !ok {
			return
		}
		cut := latin1(hi.cut(bytes.Clone(head)))
		hi.cutAt, hi.cuts = [4]span{}, 0
		if hi != want {
			t.Fatalf("%q: check learned %+v, the slow check %+v", head, hi, want)
		}
		if want := slowCut(latin1(head), target); cut != want {
			t.Fatalf("%q: cut to %q, want %q", head, cut, want)
		}
	})
}

// However the bytes come, and whether the handler reads the bodies or not, the edge
// makes the same of them, and fasthttp reads each head as the edge has.
func FuzzEdgeFraming(f *testing.F) {
	seedHeads(f)
	f.Add([]byte("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;a\r\nx\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		out, rej := throughEdge(t, false, string(data))
		pieces := make([]string, len(data))
		for i := range data {
			pieces[i] = string(data[i : i+1])
		}
		if got, r := throughEdge(t, false, pieces...); got != out || (r == nil) != (rej == nil) {
			t.Fatalf("%q gives %q, %v; byte by byte %q, %v", data, out, rej, got, r)
		}
		c := newClientConn(&scriptedConn{pieces: []string{string(data)}}, newEdge(edgeOptions{}, nil), func() {})
		br := bufio.NewReaderSize(c, readBufferBytes)
		for {
			_, err := br.Peek(1)
			if err != nil || c.fail != nil {
				return
			}
			head, _ := br.Peek(br.Buffered())
			head = bytes.Clone(head)
			var h fasthttp.RequestHeader
			h.DisableNormalizing()
			if err := h.Read(br); err != nil {
				t.Fatalf("fasthttp refuses the head %q: %v", head, err)
			}
			want, target, ok := slowHead(latin1(head), headLimits{targetBytes: 1 << 20, fields: 1 << 20, bodyBytes: 1 << 30})
			if !ok || want.chunked || want.contentLength >= 0 || want.expect {
				t.Fatalf("fasthttp is given the head %q", head)
			}
			if br.Buffered() != 0 || string(h.RequestURI()) != target || h.ContentLength() > 0 {
				t.Fatalf("fasthttp reads the head %q with target %q, length %d, %d bytes behind it", head, h.RequestURI(), h.ContentLength(), br.Buffered())
			}
		}
	})
}

func TestCheckHeadReasons(t *testing.T) {
	f := func(head string, want *rejection) {
		t.Helper()
		head = strings.ReplaceAll(head, "|", "\r\n") + "\r\n\r\n"
		var hi headInfo
		if _, got := checkHead([]byte(head), &testLimits, &hi); got != want {
			t.Errorf("%q: %v, want %v", head, got, want)
		}
	}
	ok := "GET / HTTP/1.1|Host: h"
	f(ok, nil)
	f("GET / HTTP/1.1", errHostMissing)
	f("GET / HTTP/1.0", nil)
	f("GET / HTTP/1.2|Host: h", errVersion)
	f("GET / HTTP/2.0|Host: h", errVersion)
	f("GET / http/1.1|Host: h", errRequestLine)
	f("GET /", errTargetBytes)
	f("GET  / HTTP/1.1|Host: h", errRequestLine)
	f("GET * HTTP/1.1|Host: h", errTargetForm)
	f("GET h:1 HTTP/1.1|Host: h", errTargetForm)
	f("GET ftp://h/ HTTP/1.1|Host: h", errTargetForm)
	f("GET http://h HTTP/1.1|Host: h", errTargetForm)
	f("GET http://h?/ HTTP/1.1|Host: h", errTargetForm)
	f("GET http://u@h/ HTTP/1.1|Host: h", errHost)
	f("GET http://g/ HTTP/1.1|Host: h", errHostMismatch)
	f("GET /#f HTTP/1.1|Host: h", errTargetBytes)
	f("GET /\\ HTTP/1.1|Host: h", errTargetBytes)
	f("GET /"+strings.Repeat("a", 1<<10)+" HTTP/1.1|Host: h", errTargetTooLong)
	f("G(T / HTTP/1.1|Host: h", errMethodToken)
	f("get / HTTP/1.1|Host: h", errMethod)
	f("CONNECT / HTTP/1.1|Host: h", errMethod)
	f("GET / HTTP/1.1\nHost: h", errVersion)
	f(ok+"\nX: y", errLineEnd)
	f(ok+"|X: a\rb", errLineEnd)
	f(ok+"|X: a\x00b", errLineEnd)
	f(ok+"|X: a| b", errFold)
	f(ok+"|X : a", errFieldName)
	f(ok+"|X Y: a", errFieldName)
	f(ok+"|: a", errFieldName)
	f(ok+"|X", errFieldName)
	f(ok+strings.Repeat("|X: y", 20), errTooManyFields)
	f(ok+"|host: h", errHostTwice)
	f("GET / HTTP/1.1|Host:", errHost)
	f("GET / HTTP/1.1|Host: u:p@h", errHost)
	f("GET / HTTP/1.1|Host: h:65536", errHost)
	f("GET / HTTP/1.1|Host: [::1%25eth0]", errHost)
	f(ok+"|Content-Length: 1048576", nil)
	f(ok+"|Content-Length: 1048577", errBodyTooLarge)
	f(ok+"|Content-Length: +1", errLength)
	f(ok+"|Content-Length: 1, 1", errLength)
	f(ok+"|Content-Length: 1|Content-Length: 1", errLengthTwice)
	f(ok+"|Content_Length: 1", errUnderscore)
	f(ok+"|Transfer-Encoding: chunked|Content-Length: 1", errCodingLength)
	f(ok+"|Transfer-Encoding: identity", errCoding)
	f(ok+"|Transfer-Encoding: gzip, chunked", errCoding)
	f(ok+"|Transfer-Encoding: chunked|Transfer-Encoding: chunked", errCodingTwice)
	f("GET / HTTP/1.0|Host: h|Transfer-Encoding: chunked", errCodingVersion)
	f(ok+"|Expect: x", errExpect)
	f(ok+"|Authorization: a|authorization: b", errAuthTwice)
	f(ok+"|Connection: close, Host", errNominated)
	f(ok+"|Connection: X,transfer_encoding", errNominated)
	f(ok+"|Connection: keep-alive|Connection: upgrade", nil)
}

func TestSteersRouting(t *testing.T) {
	for name, want := range map[string]bool{
		"X-Gateway-Destination-Endpoint": true, "x-kvgate-endpoint": true, "X-PREFILLER-HOST-PORT": true,
		"X-data-parallel-rank": true, "x_override_temperature": true, "endpoint-load-metrics-format": true,
		"Endpoint_Load_Metrics": true, "X-Vllm-Priority": true, "X-Original-URL": true, "x-http-method-override": true,
		"X-Request-Id": false, "X-Gateway": false, "Content-Type": false, "x": false, "": false, "X-Session-Id": false,
		"Endpoint-Load": false, "Authorization": false,
	} {
		if got := steersRouting([]byte(name)); got != want {
			t.Errorf("steersRouting(%q) = %v", name, got)
		}
	}
}

var twelveFields = []byte("POST /v1/chat/completions HTTP/1.1\r\n" +
	"Host: gateway.example.com\r\n" +
	"User-Agent: OpenAI/Python 1.99.1\r\n" +
	"Accept: application/json\r\n" +
	"Accept-Encoding: gzip, deflate, zstd\r\n" +
	"Connection: keep-alive\r\n" +
	"Content-Type: application/json\r\n" +
	"Authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n" +
	"X-Stainless-Lang: python\r\n" +
	"X-Stainless-Runtime-Version: 3.12.4\r\n" +
	"X-Stainless-Async: false\r\n" +
	"X-Request-Id: 6f1d8a52-2f0c-4d9c-8b57-8d3b0f1f8a11\r\n" +
	"Content-Length: 1024\r\n\r\n")

func BenchmarkCheckHead(b *testing.B) {
	lim := newEdge(edgeOptions{}, nil).limits
	b.ReportAllocs()
	b.SetBytes(int64(len(twelveFields)))
	for b.Loop() {
		var hi headInfo
		if n, rej := checkHead(twelveFields, &lim, &hi); n == 0 || rej != nil {
			b.Fatal(rej)
		}
	}
}

// BenchmarkEdgeRead is a request of 1 KiB on its way through a clientConn, the system
// call left out.
func BenchmarkEdgeRead(b *testing.B) {
	raw := append(bytes.Clone(twelveFields), make([]byte, 1024)...)
	sc := &repeatingConn{b: raw}
	c := newClientConn(sc, newEdge(edgeOptions{}, nil), func() {})
	bg := newBudget(1 << 20)
	p := make([]byte, readBufferBytes)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Read(p); err != nil {
			b.Fatal(err)
		}
		var body requestBody
		if rej := c.readBody(bg, &body); rej != nil || body.n != 1024 {
			b.Fatal(rej)
		}
		body.release()
	}
}

type repeatingConn struct {
	scriptedConn
	b []byte
}

func (c *repeatingConn) Read(p []byte) (int, error) { return copy(p, c.b), nil }

func TestRejectionsAreOutcomes(t *testing.T) {
	for _, r := range []*rejection{errRequestLine, errMethod, errTargetTooLong, errBodyTooLarge, errHeadTimeout, errBodyTimeout, errBudget, errClientGone} {
		if want := map[string]int{"bad_request": 400, "unauthorized": 401, "method_not_allowed": 405, "request_timeout": 408, "too_large": 413, "saturated": 429, "headers_too_large": 431, "client_gone": 499}[r.code]; r.status != want {
			t.Errorf("%v: status %d, want %d", r, r.status, want)
		}
		if strings.ContainsAny(r.reason, "\"\\") {
			t.Errorf("%v: the reason needs escaping in JSON", r)
		}
		_ = fmt.Sprint(r)
	}
}
