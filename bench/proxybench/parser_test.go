package proxybench

import (
	"strings"
	"testing"
)

// However the bytes are cut, a parser finds the same messages.
func TestParser(t *testing.T) {
	f := func(name string, request bool, in string, payload int64, events, messages int) {
		t.Helper()
		for cut := 1; cut <= len(in); cut++ {
			p := parser{request: request}
			total, seen, done := int64(0), 0, 0
			for rest := []byte(in); len(rest) > 0; {
				piece := rest[:min(cut, len(rest))]
				rest = rest[len(piece):]
				for len(piece) > 0 {
					n, whole, err := p.feed(piece)
					if err != nil {
						t.Fatalf("%s, %d bytes at a time: %v", name, cut, err)
					}
					piece = piece[n:]
					if whole {
						total, seen, done = total+p.payload, seen+p.events, done+1
					}
				}
			}
			if total != payload || seen != events || done != messages {
				t.Fatalf("%s, %d bytes at a time: %d bytes, %d events, %d messages; want %d, %d, %d", name, cut, total, seen, done, payload, events, messages)
			}
		}
	}
	f("request", true, "POST / HTTP/1.1\r\nX-Bench: 0000000a\r\nContent-Length: 3\r\n\r\nabcGET /x HTTP/1.1\r\nHost: h\r\n\r\n", 3, 0, 2)
	a := newAnswers(1)
	plain := string(a.plain) + strings.Replace(string(a.plain), "content-length", "Content-Length", 1)
	f("answers", false, plain, 2*a.payload(0, false), 0, 2)
	f("stream", false, string(a.first)+string(a.chunk)+string(a.chunk)+string(a.last), a.payload(4, true), 6, 1)
	f("empty", false, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 0, 0, 1)

	p := parser{}
	if _, _, err := p.feed([]byte("HTTP/1.1 200 OK\r\n\r\n")); err != errFraming {
		t.Errorf("a response of unknown length: %v; want %v", err, errFraming)
	}
}

func TestRequestSize(t *testing.T) {
	for _, size := range []int{1 << 10, 16 << 10, 256 << 10} {
		r := newRequest("h", size, true, false)
		p := parser{request: true}
		n, done, err := p.feed(r.stamp(0xab, 7))
		if err != nil || !done || n != len(r.bytes) || p.payload != int64(size) || p.tag != 0xab {
			t.Errorf("%d: %d bytes of %d, body %d, tag %x, %v", size, n, len(r.bytes), p.payload, p.tag, err)
		}
	}
}
