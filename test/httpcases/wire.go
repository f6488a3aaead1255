package httpcases

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

type field struct{ name, value string } // name in lower case

// msg is one parsed HTTP/1 message; the parser is strict on purpose.
type msg struct {
	start    [3]string
	fields   []field
	body     []byte
	complete bool
	framing  string // none, cl, chunked, close
	bad      []string
	status   int
	trailers []field
}

func (m *msg) get(n string) (string, bool) {
	for _, f := range m.fields {
		if f.name == n {
			return f.value, true
		}
	}
	return "", false
}

func (m *msg) count(n string) (k int) {
	for _, f := range m.fields {
		if f.name == n {
			k++
		}
	}
	return
}

func isToken(s string) bool {
	if s == "" {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0 {
			continue
		}
		return false
	}
	return true
}

func digits(s string) bool {
	if s == "" {
		return false
	}
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

// parseHead parses a header section (without the final empty line's CRLF).
func parseHead(head []byte) *msg {
	m := &msg{}
	lines := bytes.Split(head, []byte("\n"))
	for i, l := range lines {
		if i < len(lines)-1 {
			if !bytes.HasSuffix(l, []byte("\r")) {
				m.bad = append(m.bad, fmt.Sprintf("bare LF in line %d", i))
			} else {
				l = l[:len(l)-1]
			}
		}
		if bytes.IndexByte(l, '\r') >= 0 {
			m.bad = append(m.bad, fmt.Sprintf("bare CR in line %d", i))
		}
		if bytes.IndexByte(l, 0) >= 0 {
			m.bad = append(m.bad, fmt.Sprintf("NUL in line %d", i))
		}
		if i == 0 {
			p := strings.SplitN(string(l), " ", 3)
			copy(m.start[:], p)
			continue
		}
		if len(l) == 0 {
			continue
		}
		if l[0] == ' ' || l[0] == '\t' {
			m.bad = append(m.bad, "obs-fold")
			continue
		}
		n, v, ok := strings.Cut(string(l), ":")
		if !ok {
			m.bad = append(m.bad, fmt.Sprintf("field line without a colon: %q", clip(string(l), 40)))
			continue
		}
		if !isToken(n) {
			m.bad = append(m.bad, fmt.Sprintf("field name is no token: %q", clip(n, 40)))
		}
		m.fields = append(m.fields, field{strings.ToLower(n), strings.Trim(v, " \t")})
	}
	return m
}

// frame decides the body's framing and appends violations to m.bad.
func (m *msg) frame(isReq bool, method string) (kind string, n int64) {
	te, hasTE := m.get("transfer-encoding")
	ncl := m.count("content-length")
	if hasTE && ncl > 0 {
		m.bad = append(m.bad, "both Transfer-Encoding and Content-Length")
	}
	if m.count("transfer-encoding") > 1 {
		m.bad = append(m.bad, "several Transfer-Encoding lines")
	}
	if ncl > 1 {
		m.bad = append(m.bad, "several Content-Length lines")
	}
	if !isReq {
		noBody := method == "HEAD" || m.status/100 == 1 || m.status == 204 || m.status == 304
		if m.status/100 == 1 || m.status == 204 {
			if hasTE {
				m.bad = append(m.bad, "Transfer-Encoding in a 1xx or 204")
			}
			if ncl > 0 {
				m.bad = append(m.bad, "Content-Length in a 1xx or 204")
			}
		}
		if noBody {
			return "none", 0
		}
	}
	if hasTE {
		if !strings.EqualFold(te, "chunked") {
			m.bad = append(m.bad, fmt.Sprintf("Transfer-Encoding %q", te))
			if isReq {
				return "none", 0
			}
			return "close", 0
		}
		return "chunked", 0
	}
	if ncl > 0 {
		v, _ := m.get("content-length")
		if !digits(v) {
			m.bad = append(m.bad, fmt.Sprintf("Content-Length %q", v))
			return "none", 0
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			m.bad = append(m.bad, "Content-Length overflow")
			return "none", 0
		}
		return "cl", n
	}
	if isReq {
		return "none", 0
	}
	return "close", 0
}

// parseResponses strictly parses everything a client connection received.
// closed: "", "FIN" or "RST". methods[i] belongs to the i-th final response.
func parseResponses(raw []byte, closed string, methods []string) (finals, interim []*msg, junk []byte) {
	for len(raw) > 0 {
		i := bytes.Index(raw, []byte("\r\n\r\n"))
		if i < 0 {
			return finals, interim, raw
		}
		m := parseHead(raw[:i])
		if !strings.HasPrefix(m.start[0], "HTTP/1.") || len(m.start[1]) != 3 || !digits(m.start[1]) {
			return finals, interim, raw
		}
		m.status, _ = strconv.Atoi(m.start[1])
		rest := raw[i+4:]
		if m.status/100 == 1 && m.status != 101 {
			m.frame(false, "")
			m.complete = true
			interim = append(interim, m)
			raw = rest
			continue
		}
		method := "POST"
		if k := len(finals); k < len(methods) {
			method = methods[k]
		}
		kind, n := m.frame(false, method)
		m.framing = kind
		finals = append(finals, m)
		switch kind {
		case "none":
			m.complete = true
			raw = rest
		case "cl":
			if int64(len(rest)) < n {
				m.body = rest
				return finals, interim, nil
			}
			m.body, m.complete, raw = rest[:n], true, rest[n:]
		case "close":
			m.body, m.complete = rest, closed == "FIN"
			return finals, interim, nil
		case "chunked":
			used, ok := m.dechunk(rest)
			m.complete = ok
			if !ok {
				return finals, interim, nil
			}
			raw = rest[used:]
		}
	}
	return finals, interim, nil
}

// dechunk decodes b; ok reports that the last chunk and the trailers are there.
func (m *msg) dechunk(b []byte) (used int, ok bool) {
	p := 0
	for {
		i := bytes.Index(b[p:], []byte("\r\n"))
		if i < 0 {
			return p, false
		}
		sz, _, _ := strings.Cut(string(b[p:p+i]), ";")
		n, err := strconv.ParseUint(sz, 16, 62)
		if err != nil || sz == "" || strings.ContainsAny(sz, "+-_xX ") {
			m.bad = append(m.bad, fmt.Sprintf("chunk-size %q", clip(sz, 30)))
			return p, false
		}
		p += i + 2
		if n == 0 {
			for {
				i := bytes.Index(b[p:], []byte("\r\n"))
				if i < 0 {
					return p, false
				}
				l := string(b[p : p+i])
				p += i + 2
				if l == "" {
					return p, true
				}
				k, v, _ := strings.Cut(l, ":")
				m.trailers = append(m.trailers, field{strings.ToLower(k), strings.TrimSpace(v)})
			}
		}
		if uint64(len(b)-p) < n {
			m.body = append(m.body, b[p:]...)
			return p, false
		}
		m.body = append(m.body, b[p:p+int(n)]...)
		p += int(n)
		if len(b)-p < 2 {
			return p, false
		}
		if b[p] != '\r' || b[p+1] != '\n' {
			m.bad = append(m.bad, "no CRLF after chunk-data")
			return p, false
		}
		p += 2
	}
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}
