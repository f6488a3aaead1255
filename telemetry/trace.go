package telemetry

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"slices"
)

// A TraceContext is what a request carries of a distributed trace (W3C Trace Context). The zero value is none.
type TraceContext struct {
	TraceID  [16]byte
	ParentID [8]byte // the caller's span; zero: the trace begins here
	SpanID   [8]byte // the request's own span
	Sampled  bool
}

// NewTrace continues the trace that a traceparent header tells of, or begins one, which is sampled with that ratio, 0..1.
// The caller's decision on sampling holds. continued is false if the header was missing or wrong: then what came with it,
// tracestate, means nothing either. It does not allocate.
func NewTrace(traceparent []byte, ratio float64) (c TraceContext, continued bool) {
	binary.BigEndian.PutUint64(c.SpanID[:], RandomID())
	if c.parse(traceparent) {
		return c, true
	}
	binary.BigEndian.PutUint64(c.TraceID[:8], RandomID())
	binary.BigEndian.PutUint64(c.TraceID[8:], RandomID())
	c.ParentID = [8]byte{}
	c.Sampled = ratio > 0 && rand.Float64() < ratio
	return c, false
}

// parse reads a traceparent of version 00, or the beginning that later versions share with it.
func (c *TraceContext) parse(b []byte) bool {
	const length = 55 // 00-32-16-02
	if len(b) < length || b[2] != '-' || b[35] != '-' || b[52] != '-' || len(b) > length && (string(b[:2]) == "00" || b[length] != '-') {
		return false
	}
	for _, x := range b[:length] {
		if x >= 'A' && x <= 'F' {
			return false // lower case only
		}
	}
	var version, flags [1]byte
	if _, err := hex.Decode(version[:], b[:2]); err != nil || version[0] == 0xff {
		return false
	}
	_, err1 := hex.Decode(c.TraceID[:], b[3:35])
	_, err2 := hex.Decode(c.ParentID[:], b[36:52])
	_, err3 := hex.Decode(flags[:], b[53:55])
	if err1 != nil || err2 != nil || err3 != nil || c.TraceID == [16]byte{} || c.ParentID == [8]byte{} {
		return false
	}
	c.Sampled = flags[0]&1 != 0
	return true
}

// AttemptID is the span of attempt i, from 0, which the endpoint is told as its parent.
func (c *TraceContext) AttemptID(i int) (id [8]byte) {
	n := binary.BigEndian.Uint64(c.SpanID[:]) + uint64(i+1)*0x9e3779b97f4a7c15 // odd: attempts differ, and from the request
	if n == 0 {
		n = 1
	}
	binary.BigEndian.PutUint64(id[:], n)
	return id
}

// AppendTraceparent appends the value of a traceparent header that names attempt i as the parent.
func (c *TraceContext) AppendTraceparent(dst []byte, i int) []byte {
	id := c.AttemptID(i)
	dst = append(dst, "00-"...)
	dst = hex.AppendEncode(dst, c.TraceID[:])
	dst = append(dst, '-')
	dst = hex.AppendEncode(dst, id[:])
	if c.Sampled {
		return append(dst, "-01"...)
	}
	return append(dst, "-00"...)
}

// RandomID is a random number that is not 0.
func RandomID() uint64 {
	for {
		if n := rand.Uint64(); n != 0 {
			return n
		}
	}
}

// Clone returns a copy of r that shares no memory with it.
func (r *Record) Clone() Record {
	c := *r
	c.Attempts = slices.Clone(r.Attempts)
	each(&c, func(v string) string { return string(append([]byte(nil), v...)) })
	return c
}
