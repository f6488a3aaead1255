package soak

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is how long a client waits for the next byte: far longer than every timeout of the gateway.
const patience = 40 * time.Second

// counts are how the clients' requests ended.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[what]++
}

func (c *counts) of(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}

func (c *counts) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for k := range c.n {
		names = append(names, k)
	}
	slices.Sort(names)
	var out []string
	for _, k := range names {
		out = append(out, fmt.Sprintf("%s %d", k, c.n[k]))
	}
	return strings.Join(out, ", ")
}

// An api is one way of asking for words.
type api struct {
	path string
	body func(nonce string, words int, stream bool) string
	last string // what only a whole stream ends with
}

// What is planted where no answer repeats it, and must be in nothing that the gateway writes.
const (
	plantedBody     = "planted-body-7d1f"
	plantedClient   = "planted-client-key-7d1f"
	plantedEndpoint = "planted-endpoint-key-7d1f"
)

var apis = []api{
	{"/v1/chat/completions", func(nonce string, words int, stream bool) string {
		return fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%q},{"role":"user","content":%q}],"max_tokens":%d,"stream":%t}`, plantedBody, nonce, words, stream)
	}, "data: [DONE]\n\n"},
	{"/v1/completions", func(nonce string, words int, stream bool) string {
		return fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":%d,"stream":%t}`, nonce+strings.Repeat(" and", 40)+" "+plantedBody, words, stream)
	}, "data: [DONE]\n\n"},
	{"/v1/messages", func(nonce string, words int, stream bool) string {
		return fmt.Sprintf(`{"model":"m","system":%q,"messages":[{"role":"user","content":%q}],"max_tokens":%d,"stream":%t}`, plantedBody, nonce, words, stream)
	}, `{"type":"message_stop"}` + "\n\n"},
	{"/v1/responses", func(nonce string, words int, stream bool) string {
		return fmt.Sprintf(`{"model":"m","instructions":%q,"input":%q,"max_output_tokens":%d,"stream":%t}`, plantedBody, nonce, words, stream)
	}, ""},
}

// A client asks, reads, checks, and sometimes leaves.
type client struct {
	t      testing.TB
	addr   string
	id     int
	r      *rand.Rand
	counts *counts
	think  time.Duration // between two requests, at most
	key    string
	hidden []string // what no answer may hold

	conn net.Conn
	br   *bufio.Reader
	n    int
}

func (c *client) run(until time.Time) {
	for time.Now().Before(until) {
		c.ask(true)
		time.Sleep(time.Duration(c.r.Int64N(int64(c.think) + 1)))
	}
	c.hangUp()
}

func (c *client) hangUp() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// ask makes one request and checks its answer. It reports whether the answer was whole.
func (c *client) ask(mayLeave bool) bool {
	a := apis[c.r.IntN(len(apis))]
	words, stream := 1+c.r.IntN(40), c.r.IntN(3) > 0
	leaves := c.r.IntN(20) == 0 && mayLeave
	key := c.key
	if c.r.IntN(100) == 0 && mayLeave {
		key = plantedClient
	}
	patient := time.Duration(c.r.IntN(600)) * time.Millisecond
	c.n++
	nonce := fmt.Sprintf("nonce-%d-%dx", c.id, c.n) // none is the beginning of another
	body := a.body(nonce, words, stream)
	if c.conn == nil {
		conn, err := net.DialTimeout("tcp", c.addr, patience)
		if err != nil {
			c.t.Errorf("connecting: %v", err)
			return false
		}
		c.conn, c.br = conn, bufio.NewReader(conn)
	}
	_ = c.conn.SetDeadline(time.Now().Add(patience))
	_, err := fmt.Fprintf(c.conn, "POST %s HTTP/1.1\r\nHost: gate\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		a.path, key, len(body), body)
	c.counts.add("sent")
	if leaves {
		_ = c.conn.SetReadDeadline(time.Now().Add(patient))
		_, _ = io.Copy(io.Discard, c.br)
		c.hangUp()
		c.counts.add("left")
		return false
	}
	if err != nil {
		c.t.Errorf("%s: sending: %v", nonce, err)
		c.hangUp()
		return false
	}
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		c.t.Errorf("%s: no answer: %v", nonce, err)
		c.hangUp()
		return false
	}
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.Close {
		c.hangUp()
	}
	end := c.judge(a, nonce, words, stream, resp, string(got), err)
	if (key == c.key) == (resp.StatusCode == 401) {
		c.t.Errorf("%s: status %d with key %q", nonce, resp.StatusCode, key)
	}
	c.counts.add(end)
	return end == whole
}

// whole is an answer that is all there.
const whole = "whole"

// judge says how an answer ended, and complains of what must not be.
func (c *client) judge(a api, nonce string, words int, stream bool, resp *http.Response, body string, cut error) string {
	wrong := func(format string, args ...any) string {
		c.t.Errorf("%s %s, %d words, stream %v: status %d, end %v: %s: %q", nonce, a.path, words, stream, resp.StatusCode, cut, fmt.Sprintf(format, args...), tail(body))
		return "wrong"
	}
	for _, h := range c.hidden {
		if strings.Contains(body+fmt.Sprint(resp.Header), h) {
			return wrong("it tells %q", h)
		}
	}
	if strings.Count(body, "nonce-") != strings.Count(body, nonce) {
		return wrong("it holds another request's answer")
	}
	events := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	text, failed, problem := read(body, events)
	got := len(strings.Fields(text))
	switch {
	case cut != nil && resp.StatusCode != 200:
		return "an error answer cut off"
	case cut != nil && events && a.last != "" && strings.HasSuffix(body, a.last):
		return wrong("a stream that was cut off looks complete")
	case cut != nil && events && failed:
		return "cut off with an error event"
	case cut != nil && events:
		return wrong("a stream was cut off without an error event")
	case cut != nil:
		return "cut off, no stream"
	case resp.StatusCode != 200:
		if !failed {
			return wrong("a refusal that says no error")
		}
		return fmt.Sprintf("status %d", resp.StatusCode)
	case problem != "":
		return wrong("%s", problem)
	case failed:
		return "the server's own error in a 200"
	case events && !strings.HasSuffix(body, a.last), a.path == "/v1/responses" && events && !strings.Contains(body, `"response.completed"`) && !strings.Contains(body, `"response.incomplete"`):
		return wrong("it ends properly and is not complete")
	case got != words || !strings.HasPrefix(text, nonce):
		return wrong("%d words; want %d, the first being the nonce", got, words)
	case stream && !events: // a fault of the server's, which is passed on as it is
		return "whole, though not the stream that was asked for"
	}
	return whole
}

func tail(s string) string { return s[max(0, len(s)-600):] }

// read takes the text out of an answer of any API, and whether it says that something failed.
func read(body string, events bool) (text string, failed bool, problem string) {
	var b strings.Builder
	docs := []string{body}
	if events {
		docs = nil
		for line := range strings.Lines(body) {
			if d, ok := strings.CutPrefix(line, "data: "); ok && strings.TrimSpace(d) != "[DONE]" {
				docs = append(docs, d)
			}
		}
	}
	for _, d := range docs {
		var v map[string]any
		if err := json.Unmarshal([]byte(d), &v); err != nil {
			problem = "not JSON: " + err.Error()
			continue
		}
		typ, _ := v["type"].(string)
		if v["error"] != nil || typ == "error" || typ == "response.failed" || v["detail"] != nil || v["object"] == "error" {
			failed = true
			continue
		}
		if r, ok := v["response"].(map[string]any); ok && r["error"] != nil {
			failed = true
		}
		switch typ { // the whole text again
		case "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed", "response.incomplete",
			"response.created", "response.in_progress", "response.content_part.added", "response.output_item.added":
			continue
		}
		if d, ok := v["delta"].(string); ok {
			b.WriteString(d)
			continue
		}
		collect(&b, v)
	}
	return b.String(), failed, problem
}

// collect appends the texts below v, wherever an API has them.
func collect(b *strings.Builder, v any) {
	switch v := v.(type) {
	case map[string]any:
		for _, k := range []string{"text", "content"} {
			if s, ok := v[k].(string); ok {
				b.WriteString(s)
			}
		}
		for _, k := range []string{"choices", "delta", "message", "content", "output"} {
			collect(b, v[k])
		}
	case []any:
		for _, e := range v {
			collect(b, e)
		}
	}
}
