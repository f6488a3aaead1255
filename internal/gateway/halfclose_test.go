package gateway

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"kvgate/internal/modelsim"
)

// A client that shuts down its sending side is gone, or waits for its answer, as the configuration says.
func TestHalfClose(t *testing.T) {
	for _, c := range []struct{ line, outcome string }{
		{"", "client_gone"},
		{"limits: {half_close: gone}\n", "client_gone"},
		{"limits: {half_close: waiting}\n", "ok"},
	} {
		t.Run(c.line, func(t *testing.T) {
			s := sim(t, modelsim.Options{})
			var seen collect
			g := start(t, c.line+onePool(s.URL()), Options{Sink: &seen})
			conn, err := net.Dial("tcp", g.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			body := chat(baseModel, false, 200) // long enough to be aborted
			fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if c.outcome == "ok" && (err != nil || resp.StatusCode != 200) {
				t.Errorf("%v %v; want 200", resp, err)
			}
			eventually(t, "a record", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return len(seen.recs) == 1 })
			if got := seen.recs[0].Outcome; got != c.outcome {
				t.Errorf("outcome %s; want %s", got, c.outcome)
			}
		})
	}
}
