package proxy

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// What parseResponse and bodyReader accept, net/http reads in the same way: status, framing and every byte of the body.
func FuzzResponse(f *testing.F) {
	for _, s := range []string{
		plainReply, streamReply,
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 204 No Content\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: 1\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
		"HTTP/1.1 200\r\nConnection: close, x-a\r\nX-A: 1\r\n\r\nrest",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000000\r\n",
		"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1:8000/x\r\nContent-Length: 0\r\n\r\n",
	} {
		f.Add([]byte(s), byte(3))
	}
	f.Fuzz(func(t *testing.T, in []byte, step byte) {
		end := bytes.Index(in, crlfcrlf)
		if end < 0 {
			return
		}
		end += 4
		status, http10, _, fields, err := parseStatusLine(in[:end])
		if err != nil {
			return
		}
		var r response
		head, err := parseResponse(nil, fields, status, http10, false, "http://10.0.0.1:8000", &r)
		if err != nil || status < 200 {
			return
		}
		for _, line := range strings.SplitAfter(string(head), "\r\n") {
			if line != "" && (!strings.HasSuffix(line, "\r\n") || strings.ContainsAny(line[:len(line)-2], "\r\n\x00") || !strings.Contains(line, ":")) {
				t.Fatalf("the client would get the line %q", line)
			}
		}
		body := newBodyReader(&r)
		var got []byte
		bad := false
		for rest := in[end:]; !body.done && len(rest) > 0; {
			piece := rest[:min(len(rest), int(step)+1)]
			data, used, err := body.next(piece)
			if err != nil {
				bad = true
				break
			}
			if used <= 0 || used > len(piece) {
				t.Fatalf("used %d of %d", used, len(piece))
			}
			got = append(got, data...)
			rest = rest[used:]
		}
		res, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(in)), nil)
		if err != nil {
			return // net/http refuses some that are harmless, such as odd names of fields
		}
		want, err := io.ReadAll(res.Body)
		whole := !bad && (body.done || body.framing == byClose)
		if res.StatusCode != status || whole && err == nil && !bytes.Equal(got, want) {
			t.Fatalf("status %d, body %q; net/http reads %d, %q", status, got, res.StatusCode, want)
		}
		if whole && err != nil && r.framing != byChunks {
			t.Fatalf("taken for whole: %q; net/http says %v", got, err)
		}
	})
}
