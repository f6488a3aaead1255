package proxybench

import (
	"bytes"
	"errors"
	"strconv"
)

// A parser reads the HTTP/1.1 messages of one direction of a connection: heads, and bodies only to find their ends.
// It trusts its peer: it is for benchmarks.
type parser struct {
	state   parseState
	partial []byte // of a head that came in pieces
	left    int64
	size    int64 // of the chunk whose size is being read

	// Of the message being read.
	first    []byte // its first line
	tag      int    // of its X-Bench field; -1: none
	close    bool   // Connection: close
	chunked  bool
	payload  int64
	events   int // empty lines in the payload: ends of server-sent events
	lastByte byte
	request  bool // set once: requests have no body unless they say so
}

type parseState uint8

const (
	parseHead parseState = iota
	parseBody
	parseChunkSize
	parseChunkSizeLF
	parseChunkData
	parseChunkEnd
	parseTrailer
)

var (
	errParse   = errors.New("not an HTTP/1.1 message")
	errFraming = errors.New("a response with neither length nor chunks")
	headEnd    = []byte("\r\n\r\n")
	eventEnd   = []byte("\n\n")
)

const maxHeadBytes = 64 << 10

// feed takes bytes up to the end of the message and reports how many, and whether the message is complete.
func (p *parser) feed(b []byte) (used int, done bool, err error) {
	for used < len(b) {
		in := b[used:]
		switch p.state {
		case parseHead:
			n, err := p.feedHead(in)
			used += n
			if err != nil {
				return used, false, err
			}
			if p.state == parseHead { // incomplete, or complete without a body
				if len(p.partial) == 0 {
					return used, true, nil
				}
				return used, false, nil
			}
		case parseBody, parseChunkData:
			n := int(min(p.left, int64(len(in))))
			p.count(in[:n])
			used += n
			if p.left -= int64(n); p.left > 0 {
				return used, false, nil
			}
			if p.state == parseBody {
				p.state = parseHead
				return used, true, nil
			}
			p.state = parseChunkEnd
		case parseChunkSize:
			used++
			switch c := in[0]; {
			case c == '\r':
				p.state = parseChunkSizeLF
			case c >= '0' && c <= '9':
				p.size = p.size<<4 | int64(c-'0')
			case c|0x20 >= 'a' && c|0x20 <= 'f':
				p.size = p.size<<4 | int64(c|0x20-'a'+10)
			default:
				return used, false, errParse
			}
		case parseChunkSizeLF:
			used++
			p.left, p.size = p.size, 0
			p.state = parseChunkData
			if p.left == 0 {
				p.state = parseTrailer
			}
		case parseChunkEnd:
			used++
			if in[0] == '\n' {
				p.state = parseChunkSize
			}
		case parseTrailer: // no trailers: the empty line
			used++
			if in[0] == '\n' {
				p.state = parseHead
				return used, true, nil
			}
		}
	}
	return used, false, nil
}

func (p *parser) count(b []byte) {
	p.payload += int64(len(b))
	if p.request || len(b) == 0 {
		return
	}
	if p.lastByte == '\n' && b[0] == '\n' {
		p.events++
	}
	p.lastByte = b[len(b)-1]
	p.events += bytes.Count(b, eventEnd)
}

// feedHead takes a head, or the piece of it that is there.
func (p *parser) feedHead(in []byte) (used int, err error) {
	head := in
	if len(p.partial) > 0 {
		p.partial = append(p.partial, in...)
		head = p.partial
	}
	end := bytes.Index(head, headEnd)
	if end < 0 {
		if len(head) > maxHeadBytes {
			return 0, errParse
		}
		if len(p.partial) == 0 {
			p.partial = append(p.partial, in...)
		}
		return len(in), nil
	}
	used = end + len(headEnd) - (len(head) - len(in))
	p.partial = p.partial[:0]
	return used, p.parse(head[:end])
}

func (p *parser) parse(head []byte) error {
	p.tag, p.close, p.chunked = -1, false, false
	p.payload, p.events, p.lastByte = 0, 0, 0
	length := int64(-1)
	line, rest, _ := bytes.Cut(head, crlf)
	p.first = append(p.first[:0], line...)
	for len(rest) > 0 {
		line, rest, _ = bytes.Cut(rest, crlf)
		colon := bytes.IndexByte(line, ':')
		if colon < 0 {
			return errParse
		}
		name, value := line[:colon], bytes.TrimSpace(line[colon+1:])
		switch colon {
		case len("content-length"):
			if bytes.EqualFold(name, []byte("content-length")) {
				n, err := strconv.ParseInt(string(value), 10, 63)
				if err != nil {
					return errParse
				}
				length = n
			}
		case len("transfer-encoding"):
			if bytes.EqualFold(name, []byte("transfer-encoding")) {
				p.chunked = true
			}
		case len("connection"):
			if bytes.EqualFold(name, []byte("connection")) {
				p.close = bytes.EqualFold(value, []byte("close"))
			}
		case len("x-bench"):
			if bytes.EqualFold(name, []byte("x-bench")) {
				n, err := strconv.ParseUint(string(value), 16, 31)
				if err != nil {
					return errParse
				}
				p.tag = int(n)
			}
		}
	}
	switch {
	case p.chunked:
		p.state, p.size = parseChunkSize, 0
	case length > 0:
		p.state, p.left = parseBody, length
	case length < 0 && !p.request:
		return errFraming
	}
	return nil
}

var crlf = []byte("\r\n")
