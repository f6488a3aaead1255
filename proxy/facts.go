package proxy

import (
	"bytes"
)

// A requestFacts is what the handler needs to know of a request's head, which checkHead has let through. Its slices are
// parts of the head.
type requestFacts struct {
	method          string
	target          []byte // as it was sent
	raw             []byte // the field lines, each with its end
	host            []byte
	contentType     []byte
	contentEncoding []byte
	http10          bool
	closing         bool // the client closes the connection after the answer
	nominates       bool // Connection names fields that go no further

	// marks[:marked] are the lines of raw that may not go on as they are, in order; every other one does. more says that
	// there are others: then raw has to be looked through.
	marks  [24]mark
	marked int
	more   bool
}

// A mark is one field line: raw[from:to].
type mark struct {
	from, to uint16 // a head is shorter than 64 KiB
	field    field
}

// read takes the facts from a head, in one pass over its fields.
func (q *requestFacts) read(head []byte) {
	q.host, q.contentType, q.contentEncoding = nil, nil, nil
	q.closing, q.nominates, q.marked, q.more = false, false, 0, false
	line := bytes.IndexByte(head, '\n')
	sp := bytes.IndexByte(head, ' ')
	q.method = methodName(head[:sp])
	q.target = head[sp+1 : line-len(" HTTP/1.1\r")]
	q.http10 = head[line-2] == '0'
	q.raw = head[line+1 : len(head)-len(crlf)]
	keepAlive := false
	for at := 0; at < len(q.raw); {
		l, name, value, _ := nextField(q.raw[at:])
		if len(name) == 0 {
			break
		}
		f := fieldNamed(name)
		switch f {
		case fOther:
			at += len(l)
			continue
		case fHost:
			q.host = value
		case fContentType:
			q.contentType = value
		case fContentEncoding:
			q.contentEncoding = value
		case fConnection:
			closing, alive, others := connectionValue(value)
			q.closing, keepAlive, q.nominates = q.closing || closing, keepAlive || alive, q.nominates || others
		}
		if q.marked < len(q.marks) {
			q.marks[q.marked] = mark{uint16(at), uint16(at + len(l)), f}
			q.marked++
		} else {
			q.more = true
		}
		at += len(l)
	}
	q.closing = q.closing || q.http10 && !keepAlive
}

// methods are those that checkHead knows.
var methods = [...]string{"POST", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"}

// methodName is the method as a string that lives longer than the head.
func methodName(m []byte) string {
	for _, s := range methods {
		if string(m) == s {
			return s
		}
	}
	return ""
}

// connectionValue reads the options of a Connection field (RFC 9110 7.6.1).
func connectionValue(v []byte) (closing, keepAlive, others bool) {
	for len(v) > 0 {
		opt, rest, _ := bytes.Cut(v, comma)
		v = rest
		switch opt = trimSpace(opt); {
		case len(opt) == 0:
		case equalFold(opt, "close"):
			closing = true
		case equalFold(opt, "keep-alive"):
			keepAlive = true
		default:
			others = true
		}
	}
	return closing, keepAlive, others
}

var comma = []byte(",")

// first returns the value of the first field of this kind, nil if there is none, and how many there are.
func (q *requestFacts) first(want field) (value []byte, n int) {
	for i := range q.marked {
		m := &q.marks[i]
		if m.field != want {
			continue
		}
		if n++; n == 1 {
			_, _, value, _ = nextField(q.raw[m.from:m.to])
		}
	}
	if q.more { // Slow path: far more fields than anybody sends
		n = 0
		for rest := q.raw; ; {
			_, name, v, next := nextField(rest)
			if len(name) == 0 {
				break
			}
			if rest = next; fieldNamed(name) == want {
				if n++; n == 1 {
					value = v
				}
			}
		}
	}
	return value, n
}
