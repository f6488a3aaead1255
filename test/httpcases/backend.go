package httpcases

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

var nonceRE = regexp.MustCompile(`zq[0-9a-f]{14}`)

// rec is one inference request as the backend saw it.
type rec struct {
	*msg
	method, target, version string
	at                      time.Time
	closedAt                time.Time // when the proxy's connection was seen to go (wait_close)
}

// Backend speaks raw TCP. Control-plane GETs are answered like a healthy vLLM;
// everything else is recorded and answered by the current case's scripts.
type Backend struct {
	ln net.Listener
	wg sync.WaitGroup

	mu      sync.Mutex
	recs    []*rec
	scripts []Script
	ctl     map[string]int
	conns   map[net.Conn]struct{}
}

// Addr returns the address the backend listens on.
func (b *Backend) Addr() string { return b.ln.Addr().String() }

// Close stops the backend and closes its connections.
func (b *Backend) Close() {
	b.ln.Close()
	b.dropAll()
	b.wg.Wait()
}

// dropAll closes every connection, so that a poisoned pool can't spoil the next case.
func (b *Backend) dropAll() {
	b.mu.Lock()
	for c := range b.conns {
		c.Close()
	}
	b.mu.Unlock()
}

// NewBackend starts a backend on a loopback address of the system's choice, or on addr.
func NewBackend(addr string) (*Backend, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	b := &Backend{ln: ln, ctl: map[string]int{}, conns: map[net.Conn]struct{}{}}
	b.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			b.wg.Go(func() { b.serve(c) })
		}
	})
	return b, nil
}

func (b *Backend) reset(s []Script) {
	b.mu.Lock()
	b.recs, b.scripts = nil, append([]Script(nil), s...)
	b.mu.Unlock()
}

func (b *Backend) snapshot() []*rec {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]*rec(nil), b.recs...)
}

// readHead reads up to and including the empty line; LF-only lines are taken
// too, so that a proxy that forwards them is caught rather than hung.
func readHead(br *bufio.Reader) ([]byte, error) {
	var h []byte
	for {
		l, err := br.ReadBytes('\n')
		h = append(h, l...)
		if err != nil {
			return h, err
		}
		if len(h) > 4<<20 {
			return h, io.ErrShortBuffer
		}
		if t := bytes.TrimRight(l, "\r\n"); len(t) == 0 {
			if len(h) == len(l) { // leading empty line
				h = h[:0]
				continue
			}
			return h, nil
		}
	}
}

func (b *Backend) serve(c net.Conn) {
	b.mu.Lock()
	b.conns[c] = struct{}{}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.conns, c)
		b.mu.Unlock()
		c.Close()
	}()
	br := bufio.NewReaderSize(c, 64<<10)
	for {
		head, err := readHead(br)
		if err != nil {
			if len(bytes.TrimSpace(head)) > 0 {
				m := parseHead(head)
				m.bad = append(m.bad, "header section cut off")
				b.add(&rec{msg: m, method: m.start[0], target: m.start[1], version: m.start[2], at: time.Now()})
			}
			return
		}
		trimmed := bytes.TrimSuffix(bytes.TrimSuffix(head, []byte("\n")), []byte("\r"))
		trimmed = bytes.TrimSuffix(trimmed, []byte("\n"))
		var m *msg
		if bytes.HasSuffix(head, []byte("\r\n\r\n")) {
			m = parseHead(head[:len(head)-4])
		} else {
			m = parseHead(trimmed)
			m.bad = append(m.bad, "header section not ended by CRLF CRLF")
		}
		r := &rec{msg: m, method: m.start[0], target: m.start[1], version: m.start[2], at: time.Now()}
		if !isToken(r.method) || r.target == "" || strings.ContainsAny(r.target, " \t") {
			m.bad = append(m.bad, fmt.Sprintf("request line %q", clip(strings.Join(m.start[:], " "), 60)))
		}
		if m.count("host") != 1 {
			m.bad = append(m.bad, fmt.Sprintf("%d Host lines", m.count("host")))
		}
		kind, n := m.frame(true, "")
		if b.control(c, r) {
			if n > 0 {
				io.CopyN(io.Discard, br, n)
			}
			continue
		}
		b.add(r)
		s := b.pop()
		readBody := s == nil || s.ReadBody == nil || *s.ReadBody
		if exp, _ := m.get("expect"); strings.EqualFold(exp, "100-continue") && readBody && br.Buffered() == 0 {
			io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
		}
		if readBody {
			body, ok := readBodyRaw(br, m, kind, n)
			b.mu.Lock()
			m.body, m.complete, m.framing = body, ok, kind
			b.mu.Unlock()
			if !ok {
				return
			}
		}
		if !b.answer(c, br, r, s) {
			return
		}
		if cn, _ := m.get("connection"); strings.EqualFold(cn, "close") {
			return
		}
	}
}

func (b *Backend) add(r *rec) { b.mu.Lock(); b.recs = append(b.recs, r); b.mu.Unlock() }
func (b *Backend) pop() *Script {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.scripts) == 0 {
		return nil
	}
	s := b.scripts[0]
	b.scripts = b.scripts[1:]
	return &s
}

func readBodyRaw(br *bufio.Reader, m *msg, kind string, n int64) ([]byte, bool) {
	switch kind {
	case "cl":
		var buf bytes.Buffer
		_, err := io.CopyN(&buf, br, n)
		return buf.Bytes(), err == nil
	case "chunked":
		var out []byte
		for {
			l, err := br.ReadString('\n')
			if err != nil {
				return out, false
			}
			if !strings.HasSuffix(l, "\r\n") {
				m.bad = append(m.bad, "bare LF after chunk-size")
			}
			sz, _, _ := strings.Cut(strings.TrimRight(l, "\r\n"), ";")
			n, err := strconv.ParseUint(sz, 16, 40)
			if err != nil {
				m.bad = append(m.bad, fmt.Sprintf("forwarded chunk-size %q", clip(sz, 30)))
				return out, false
			}
			if n == 0 {
				for {
					l, err := br.ReadString('\n')
					if err != nil {
						return out, false
					}
					t := strings.TrimRight(l, "\r\n")
					if t == "" {
						return out, true
					}
					k, v, _ := strings.Cut(t, ":")
					m.trailers = append(m.trailers, field{strings.ToLower(k), strings.TrimSpace(v)})
				}
			}
			p := make([]byte, n+2)
			k, err := io.ReadFull(br, p)
			if k > int(n) {
				k = int(n)
			}
			out = append(out, p[:k]...)
			if err != nil {
				return out, false
			}
			if string(p[n:]) != "\r\n" {
				m.bad = append(m.bad, "no CRLF after a forwarded chunk")
				return out, false
			}
		}
	}
	return nil, true
}

// answer plays a script (or the default answer); false: the connection is done.
func (b *Backend) answer(c net.Conn, br *bufio.Reader, r *rec, s *Script) bool {
	echo := nonceRE.FindString(string(r.body))
	if echo == "" {
		echo = "none____________"
	}
	if s == nil {
		return b.defaultAnswer(c, r, echo)
	}
	watching := false
	gone := make(chan struct{})
	for _, st := range s.Steps {
		if st.WaitCloseMs > 0 && !watching {
			watching = true
			go func() {
				var p [1]byte
				br.Read(p[:])
				b.mu.Lock()
				if r.closedAt.IsZero() {
					r.closedAt = time.Now()
				}
				b.mu.Unlock()
				close(gone)
			}()
		}
	}
	for _, st := range s.Steps {
		switch {
		case st.SleepMs > 0:
			time.Sleep(time.Duration(st.SleepMs) * time.Millisecond)
		case st.WaitCloseMs > 0:
			select {
			case <-gone:
			case <-time.After(time.Duration(st.WaitCloseMs) * time.Millisecond):
			}
			return false
		case st.Close:
			return false
		case st.Rst:
			if t, ok := c.(*net.TCPConn); ok {
				t.SetLinger(0)
			}
			return false
		default:
			p := stepBytes(st, func(s string) string { return strings.ReplaceAll(s, "{{ECHO}}", echo) })
			if err := drip(c, p, st.DripBytes, st.DripMs); err != nil {
				return false
			}
		}
	}
	return !watching
}

func drip(c net.Conn, p []byte, n, ms int) error {
	if n <= 0 {
		_, err := c.Write(p)
		return err
	}
	for len(p) > 0 {
		k := min(n, len(p))
		if _, err := c.Write(p[:k]); err != nil {
			return err
		}
		p = p[k:]
		time.Sleep(time.Duration(ms) * time.Millisecond)
	}
	return nil
}

func (b *Backend) defaultAnswer(c net.Conn, r *rec, echo string) bool {
	if bytes.Contains(r.body, []byte(`"stream":true`)) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
		for _, e := range []string{echo, "[DONE]"} {
			d := `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"` + e + `"}}]}` + "\n\n"
			if e == "[DONE]" {
				d = "data: [DONE]\n\n"
			}
			if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(d), d); err != nil {
				return false
			}
		}
		_, err := io.WriteString(c, "0\r\n\r\n")
		return err == nil
	}
	d := `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"` + echo + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`
	h := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(d))
	if r.method == "HEAD" {
		d = ""
	}
	_, err := io.WriteString(c, h+d)
	return err == nil && r.version == "HTTP/1.1"
}

// control answers health, metrics and model-list requests.
func (b *Backend) control(c net.Conn, r *rec) bool {
	if r.method != "GET" && r.method != "HEAD" {
		return false
	}
	path, _, _ := strings.Cut(r.target, "?")
	var ct, d string
	switch path {
	case "/health", "/healthz", "/ready", "/readyz", "/live", "/ping":
		ct = "text/plain"
	case "/version":
		ct, d = "application/json", `{"version":"0.11.0"}`
	case "/load":
		ct, d = "application/json", `{"server_load":0}`
	case "/v1/models":
		ct, d = "application/json", `{"object":"list","data":[{"id":"m","object":"model","created":1700000000,"owned_by":"vllm","root":"m","parent":null,"max_model_len":32768}]}`
	case "/metrics":
		ct, d = "text/plain; version=0.0.4; charset=utf-8", metricsText
	case "/props", "/slots", "/v1/loads", "/server_info", "/get_server_info", "/get_model_info", "/is_sleeping", "/prometheus/metrics", "/api/tags":
		// what a gateway may ask to learn which server this is: an idle vLLM has none of them
		b.mu.Lock()
		b.ctl[path]++
		b.mu.Unlock()
		io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		return true
	default:
		return false
	}
	b.mu.Lock()
	b.ctl[path]++
	b.mu.Unlock()
	h := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n", ct, len(d))
	if r.method == "HEAD" {
		d = ""
	}
	io.WriteString(c, h+d)
	return true
}

const metricsText = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 0.0
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",num_gpu_blocks="1000"} 1.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1.0
`
