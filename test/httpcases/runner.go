// Package httpcases plays raw HTTP/1.1 cases through a reverse proxy and checks what
// the client and a scripted backend see. It knows nothing of the proxy under test and
// imports nothing of ours.
//
// For every case it is checked that
//
//  1. each request that reaches the backend is strictly well formed;
//  2. no more requests reach the backend than the case sent;
//  3. no request for /evil, the smuggled one, reaches the backend;
//  4. each response to the client is strictly well formed, without stray bytes, and
//     none is a 101;
//  5. afterwards sound requests on new connections get answers with their own nonce;
//
// and then that one of the alternatives the case accepts holds in full. The cases are
// in testdata/cases.jsonl, one JSON object a line; Case describes the fields.
package httpcases

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A Runner plays cases against one proxy that has one backend. It plays one case at a time.
type Runner struct {
	Proxy   string   // address of the proxy under test
	Backend *Backend // what the proxy must forward to

	HeaderTimeout, BodyTimeout, IdleTimeout time.Duration // bounds for the slow cases, a little above the proxy's own
	Timeout                                 time.Duration // default time a case may take
	Recover                                 time.Duration // how long the proxy may answer 5xx after a case before it counts as broken
	Inject                                  string        // header line (without CRLF) added after Content-Type
}

func nonce() string {
	var b [7]byte
	rand.Read(b[:])
	return "zq" + hex.EncodeToString(b[:])
}

// client is the raw connection to the proxy.
type client struct {
	c        net.Conn
	mu       sync.Mutex
	buf      []byte
	closed   string // FIN, RST
	firstAt  time.Time
	closedAt time.Time
	selfEnd  time.Time // when we closed it ourselves
	bodyAt   time.Time
	done     chan struct{}
}

func (cl *client) readLoop() {
	defer close(cl.done)
	p := make([]byte, 32<<10)
	for {
		n, err := cl.c.Read(p)
		cl.mu.Lock()
		if n > 0 {
			if cl.firstAt.IsZero() {
				cl.firstAt = time.Now()
			}
			cl.buf = append(cl.buf, p[:n]...)
			if cl.bodyAt.IsZero() {
				if i := bytes.LastIndex(cl.buf, []byte("\r\n\r\n")); i >= 0 && i+4 < len(cl.buf) || bytes.Count(cl.buf, []byte("\r\n\r\n")) > 1 {
					cl.bodyAt = time.Now()
				}
			}
		}
		if err != nil {
			cl.closedAt = time.Now()
			switch {
			case !cl.selfEnd.IsZero():
				cl.closed = "SELF"
			case err == io.EOF:
				cl.closed = "FIN"
			default:
				cl.closed = "RST"
			}
			cl.mu.Unlock()
			return
		}
		cl.mu.Unlock()
	}
}

func (cl *client) snap() ([]byte, string) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return append([]byte(nil), cl.buf...), cl.closed
}

// A Result is how one case went.
type Result struct {
	ID       string   `json:"id"`
	Category string   `json:"category"`
	Level    string   `json:"level"`
	Pass     bool     `json:"pass"`
	Alt      string   `json:"alt,omitempty"`
	Reasons  []string `json:"reasons,omitempty"`
	Behind   []string `json:"behind,omitempty"` // those of Reasons that say that something reached the backend that never may, or spoilt another exchange
	Got      string   `json:"got"`
	Retries  int      `json:"canary_retries"`
	Ms       int64    `json:"ms"`
}

func waitUntil(d time.Duration, f func() bool) bool {
	end := time.Now().Add(d)
	for {
		if f() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func methodsOf(c *Case) []string { return c.Methods }

// Run plays one case.
func (r *Runner) Run(c *Case) (res Result) {
	b := r.Backend
	res = Result{ID: c.ID, Category: c.Category, Level: c.Level}
	start := time.Now()
	defer func() { res.Ms = time.Since(start).Milliseconds() }()
	tok := nonce()
	sub := func(s string) string {
		s = strings.ReplaceAll(s, "{{NONCE}}", tok)
		if r.Inject != "" {
			const ct = "Content-Type: application/json\r\n"
			s = strings.ReplaceAll(s, ct, ct+r.Inject+"\r\n")
		}
		return s
	}
	b.reset(c.Backend)
	conn, err := net.DialTimeout("tcp", r.Proxy, 2*time.Second)
	if err != nil {
		res.Reasons = []string{"dial proxy: " + err.Error()}
		return
	}
	defer conn.Close()
	cl := &client{c: conn, done: make(chan struct{})}
	go cl.readLoop()

	tmo := r.Timeout
	if c.TimeoutMs > 0 {
		tmo = time.Duration(c.TimeoutMs) * time.Millisecond
	}
	settle := 150 * time.Millisecond
	if c.SettleMs > 0 {
		settle = time.Duration(c.SettleMs) * time.Millisecond
	}
	needClose, wantResp := false, 1
	var slowMax time.Duration
	for _, a := range c.Expect {
		if a.Conn == "close" || a.OrClose || (a.Complete != nil && !*a.Complete) {
			needClose = true
		}
		if a.Responses != nil && *a.Responses > wantResp {
			wantResp = *a.Responses
		}
		if d := r.closedWithin(a); d > slowMax {
			slowMax = d
		}
	}
	if slowMax > 0 {
		tmo = slowMax + time.Second
	}

	// --- client steps
	ended := false
	for _, st := range c.Send {
		switch {
		case st.SleepMs > 0:
			time.Sleep(time.Duration(st.SleepMs) * time.Millisecond)
		case st.HalfClose:
			conn.(*net.TCPConn).CloseWrite()
		case st.Close, st.Rst:
			cl.mu.Lock()
			cl.selfEnd = time.Now()
			cl.mu.Unlock()
			if st.Rst {
				conn.(*net.TCPConn).SetLinger(0)
			}
			conn.Close()
			ended = true
		case st.AwaitResponses > 0:
			waitUntil(tmo, func() bool {
				raw, closed := cl.snap()
				f, _, _ := parseResponses(raw, closed, methodsOf(c))
				return closed != "" || len(f) >= st.AwaitResponses && f[st.AwaitResponses-1].complete
			})
		case st.Await1xxMs > 0:
			waitUntil(time.Duration(st.Await1xxMs)*time.Millisecond, func() bool { raw, closed := cl.snap(); return closed != "" || bytes.Contains(raw, []byte("\r\n\r\n")) })
		case st.AwaitForwardedMs > 0:
			waitUntil(time.Duration(st.AwaitForwardedMs)*time.Millisecond, func() bool { return len(b.snapshot()) > 0 })
		case st.AwaitBytes > 0:
			waitUntil(time.Duration(st.AwaitMs)*time.Millisecond, func() bool { cl.mu.Lock(); defer cl.mu.Unlock(); return !cl.bodyAt.IsZero() || cl.closed != "" })
		default:
			conn.SetWriteDeadline(time.Now().Add(tmo + 20*time.Second))
			if err := drip(conn, stepBytes(st, sub), st.DripBytes, st.DripMs); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				res.Reasons = append(res.Reasons, "client write: "+err.Error())
			}
		}
		if ended {
			break
		}
	}
	sent := time.Now()

	// --- wait for the end
	if ended {
		for _, a := range c.Expect {
			if a.UpstreamClosedWithinMs > 0 {
				waitUntil(time.Duration(a.UpstreamClosedWithinMs+200)*time.Millisecond, func() bool {
					recs := b.snapshot()
					b.mu.Lock()
					defer b.mu.Unlock()
					return len(recs) > 0 && !recs[0].closedAt.IsZero()
				})
			}
		}
		time.Sleep(settle)
	} else {
		var quietSince time.Time
		lastLen := -1
		end := sent.Add(tmo)
		for time.Now().Before(end) {
			raw, closed := cl.snap()
			if closed != "" {
				break
			}
			if len(raw) != lastLen {
				lastLen, quietSince = len(raw), time.Now()
			}
			f, _, junk := parseResponses(raw, closed, methodsOf(c))
			okN := 0
			for _, m := range f {
				if m.complete {
					okN++
				}
			}
			if slowMax == 0 && (okN >= wantResp || len(junk) > 0 && okN >= 1) && time.Since(quietSince) > settle {
				if !needClose || time.Since(quietSince) > 900*time.Millisecond {
					break
				}
				// some acceptable outcome may be there already
				fi, in, _ := parseResponses(raw, closed, methodsOf(c))
				rs := b.snapshot()
				b.mu.Lock()
				done := false
				for i := range c.Expect {
					a := &c.Expect[i]
					if a.Conn != "close" && !a.NoResp && r.evalAlt(a, fi, in, raw, closed, rs, cl, sent, start, sub) == "" {
						done = true
						break
					}
				}
				b.mu.Unlock()
				if done {
					break
				}
			}
			time.Sleep(3 * time.Millisecond)
		}
	}
	raw, closed := cl.snap()
	elapsed := time.Since(sent)
	time.Sleep(20 * time.Millisecond)
	recs := b.snapshot()
	finals, interim, junk := parseResponses(raw, closed, methodsOf(c))
	b.mu.Lock()
	defer func() {
		// --- the canary: the proxy must still serve, and serve the right answer
		b.reset(nil)
		need := 2
		if c.SettleMs > 0 { // a pool may hold several connections; meet the spoilt one
			need = 8
		}
		n, bad := r.canary(need)
		res.Retries = n
		if bad != "" {
			res.Pass = false
			res.Reasons = append(res.Reasons, "after the case: "+bad)
			res.Behind = append(res.Behind, "after the case: "+bad)
			b.dropAll() // a poisoned pool must not spoil the next case
			time.Sleep(50 * time.Millisecond)
			r.canary(2)
		}
	}()
	defer b.mu.Unlock()

	res.Got = describe(finals, interim, junk, closed, recs, elapsed)
	// --- invariants that hold for every case
	var inv []string
	for i, rc := range recs {
		for _, v := range rc.bad {
			if v == "header section cut off" && (c.Category == "client-gone" || c.Category == "slow") {
				continue
			}
			inv = append(inv, fmt.Sprintf("forwarded request %d is malformed: %s", i+1, v))
		}
		if strings.Contains(rc.target, "/evil") {
			inv = append(inv, "a smuggled request reached the backend: "+rc.method+" "+clip(rc.target, 40))
		}
		if rc.version != "HTTP/1.1" {
			inv = append(inv, fmt.Sprintf("forwarded with version %q", clip(rc.version, 20)))
		}
	}
	if len(recs) > c.MaxForwarded {
		inv = append(inv, fmt.Sprintf("%d requests reached the backend, at most %d were sent", len(recs), c.MaxForwarded))
	}
	res.Behind = append(res.Behind, inv...)
	for i, m := range append(append([]*msg(nil), interim...), finals...) {
		for _, v := range m.bad {
			inv = append(inv, fmt.Sprintf("response %d to the client is malformed: %s", i+1, v))
		}
		if m.status == 101 {
			inv = append(inv, "101 sent to the client")
		}
	}
	if len(junk) > 0 && closed != "SELF" {
		inv = append(inv, fmt.Sprintf("bytes on the client connection that are no response: %q", clip(string(junk), 60)))
	}
	if c.WithinMs > 0 && elapsed > time.Duration(c.WithinMs)*time.Millisecond {
		inv = append(inv, fmt.Sprintf("took %d ms, limit %d", elapsed.Milliseconds(), c.WithinMs))
	}
	if len(inv) > 0 {
		res.Reasons = append(res.Reasons, inv...)
		return
	}
	var why []string
	for i, a := range c.Expect {
		if bad := r.evalAlt(&a, finals, interim, raw, closed, recs, cl, sent, start, sub); bad == "" {
			res.Pass = true
			res.Alt = a.Name
			if res.Alt == "" {
				res.Alt = fmt.Sprint(i)
			}
			return
		} else {
			n := a.Name
			if n == "" {
				n = fmt.Sprint(i)
			}
			why = append(why, n+": "+bad)
		}
	}
	res.Reasons = append(res.Reasons, why...)
	return
}

func (r *Runner) closedWithin(a Alt) time.Duration {
	if len(a.ClosedWithin) == 0 {
		return 0
	}
	var n int
	if json.Unmarshal(a.ClosedWithin, &n) == nil {
		return time.Duration(n) * time.Millisecond
	}
	switch strings.Trim(string(a.ClosedWithin), `"`) {
	case "HEADER_TIMEOUT":
		return r.HeaderTimeout
	case "BODY_TIMEOUT":
		return r.BodyTimeout
	}
	return r.IdleTimeout
}

func has(l []int, n int) bool {
	return slices.Contains(l, n)
}

func (rn *Runner) evalAlt(a *Alt, finals, interim []*msg, raw []byte, closed string, recs []*rec, cl *client, sent, start time.Time, sub func(string) string) string {
	shut := closed == "FIN" || closed == "RST"
	if len(finals) == 0 {
		switch {
		case a.NoResp, a.NoRespOr != nil:
		case a.OrClose && shut:
		case a.Status == nil && a.Responses == nil && a.Complete == nil && a.RespBodyEquals == nil:
		default:
			return "no response"
		}
		if a.NoResp && a.OrClose && !shut {
			return "neither response nor close"
		}
	} else {
		f := finals[0]
		if a.NoResp {
			return fmt.Sprintf("got %d, want no response", f.status)
		}
		if a.Status != nil && !has(a.Status, f.status) {
			return fmt.Sprintf("status %d", f.status)
		}
		if a.NoRespOr != nil && !has(a.NoRespOr, f.status) {
			return fmt.Sprintf("status %d", f.status)
		}
		if a.Complete != nil {
			if f.complete != *a.Complete {
				return fmt.Sprintf("response complete=%v", f.complete)
			}
			if !*a.Complete && !shut {
				return "incomplete, but the connection is left hanging"
			}
		}
		if a.RespBodyEquals != nil && string(f.body) != string(latin1(sub(*a.RespBodyEquals))) {
			return fmt.Sprintf("response body %q", clip(string(f.body), 60))
		}
		for _, s := range a.RespBodyContains {
			if !bytes.Contains(f.body, latin1(s)) {
				return fmt.Sprintf("response body lacks %q", s)
			}
		}
		for _, s := range a.RespBodyNotContains {
			if bytes.Contains(f.body, latin1(s)) {
				return fmt.Sprintf("response body has %q", s)
			}
		}
		for _, h := range a.RespHeadersAbsent {
			if v, ok := f.get(h); ok {
				return fmt.Sprintf("response has %s: %s", h, v)
			}
		}
		for h, v := range a.RespHeaders {
			if g, _ := f.get(h); g != v {
				return fmt.Sprintf("response %s is %q", h, g)
			}
		}
		for h, n := range a.RespHeaderCount {
			if f.count(h) != n {
				return fmt.Sprintf("%d %s lines", f.count(h), h)
			}
		}
		if a.RespVersion != "" && f.start[0] != a.RespVersion {
			return "response version " + f.start[0]
		}
		if a.FirstBodyWithinMs > 0 {
			cl.mu.Lock()
			d := cl.bodyAt.Sub(sent)
			cl.mu.Unlock()
			if d > time.Duration(a.FirstBodyWithinMs)*time.Millisecond {
				return fmt.Sprintf("first body byte after %d ms", d.Milliseconds())
			}
		}
	}
	for _, s := range a.RespRawNotContains {
		if bytes.Contains(raw, latin1(s)) {
			return fmt.Sprintf("client received %q", s)
		}
	}
	if a.No1xx && len(interim) > 0 {
		return "got a 1xx"
	}
	if a.Responses != nil && len(finals) != *a.Responses {
		return fmt.Sprintf("%d responses", len(finals))
	}
	if a.RespMax != nil && len(finals) > *a.RespMax {
		return fmt.Sprintf("%d responses", len(finals))
	}
	if a.Responses != nil {
		for _, f := range finals {
			if a.Status != nil && !has(a.Status, f.status) {
				return fmt.Sprintf("a later status is %d", f.status)
			}
			if !f.complete {
				return "a later response is incomplete"
			}
		}
	}
	if a.Conn == "close" && !shut {
		return "connection left open"
	}
	if a.Conn == "open" && shut {
		return "connection closed"
	}
	if d := rn.closedWithin(*a); d > 0 {
		cl.mu.Lock()
		at := cl.closedAt
		cl.mu.Unlock()
		if !shut || at.Sub(start) > d {
			return fmt.Sprintf("not closed within %v", d)
		}
	}
	// --- backend side
	complete := 0
	for _, r := range recs {
		if r.complete {
			complete++
		}
	}
	if a.Forwarded != nil && len(recs) != *a.Forwarded {
		return fmt.Sprintf("%d forwarded", len(recs))
	}
	if a.ForwardedMax != nil && len(recs) > *a.ForwardedMax {
		return fmt.Sprintf("%d forwarded", len(recs))
	}
	if a.ForwardedComplete != nil && complete != *a.ForwardedComplete {
		return fmt.Sprintf("%d forwarded whole", complete)
	}
	if len(recs) > 0 {
		for _, r := range recs {
			if a.Body != nil && string(r.body) != string(latin1(sub(*a.Body))) {
				return fmt.Sprintf("forwarded body differs: %q", clip(string(r.body), 80))
			}
			if a.BodySteps != nil {
				var w []byte
				for _, s := range a.BodySteps {
					w = append(w, stepBytes(s, sub)...)
				}
				if !bytes.Equal(w, r.body) {
					return "forwarded body differs"
				}
			}
			if a.BodyLen != nil && len(r.body) != *a.BodyLen {
				return fmt.Sprintf("forwarded body has %d bytes", len(r.body))
			}
			if a.BodySuffix != "" && !bytes.HasSuffix(r.body, latin1(sub(a.BodySuffix))) {
				return "forwarded body has another end"
			}
		}
		r := recs[0]
		if a.ReqMethod != "" && r.method != a.ReqMethod {
			return "forwarded method " + r.method
		}
		if a.ReqTarget != "" && r.target != a.ReqTarget {
			return "forwarded target " + clip(r.target, 60)
		}
		if a.ReqTargetIn != nil {
			ok := false
			for _, t := range a.ReqTargetIn {
				ok = ok || string(latin1(t)) == r.target
			}
			if !ok {
				return "forwarded target " + clip(r.target, 60)
			}
		}
		if a.ReqOriginForm && !strings.HasPrefix(r.target, "/") {
			return "forwarded target " + clip(r.target, 60)
		}
		if a.ReqVersion != "" && r.version != a.ReqVersion {
			return "forwarded version " + r.version
		}
		for _, h := range a.ReqHeadersAbsent {
			if v, ok := r.get(h); ok {
				return fmt.Sprintf("forwarded %s: %s", h, clip(v, 40))
			}
		}
		for h, v := range a.ReqAbsentValue {
			for _, f := range r.fields {
				if f.name == h && f.value == v {
					return fmt.Sprintf("forwarded %s: %s", h, v)
				}
			}
		}
		for h, v := range a.ReqHeaders {
			if g, _ := r.get(h); g != v {
				return fmt.Sprintf("forwarded %s is %q", h, g)
			}
		}
		if a.ReqHostNot != "" {
			if g, _ := r.get("host"); g == string(latin1(a.ReqHostNot)) {
				return fmt.Sprintf("the invalid Host %q was forwarded", g)
			}
		}
		if a.UpstreamClosedWithinMs > 0 {
			cl.mu.Lock()
			end := cl.selfEnd
			cl.mu.Unlock()
			if r.closedAt.IsZero() {
				return "the upstream connection stayed open"
			}
			if d := r.closedAt.Sub(end); d > time.Duration(a.UpstreamClosedWithinMs)*time.Millisecond {
				return fmt.Sprintf("the upstream connection was closed only after %d ms", d.Milliseconds())
			}
		}
	}
	return ""
}

// canary sends sound requests on fresh connections until need of them in a row are
// answered rightly. A wrong answer is final; 5xx/429 may pass within -recover
// (a proxy may have ejected its only backend).
func (r *Runner) canary(need int) (retries int, bad string) {
	end := time.Now().Add(r.Recover)
	good := 0
	for good < need {
		tok := nonce()
		body := `{"model":"m","messages":[{"role":"user","content":"` + tok + `"}],"max_tokens":1}`
		inj := ""
		if r.Inject != "" {
			inj = r.Inject + "\r\n"
		}
		c, err := net.DialTimeout("tcp", r.Proxy, time.Second)
		if err != nil {
			if time.Now().After(end) {
				return retries, "the proxy is gone: " + err.Error()
			}
			retries++
			time.Sleep(100 * time.Millisecond)
			continue
		}
		fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: proxy.test\r\nContent-Type: application/json\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s", inj, len(body), body)
		c.SetReadDeadline(time.Now().Add(3 * time.Second))
		raw, _ := io.ReadAll(c)
		c.Close()
		f, _, _ := parseResponses(raw, "FIN", nil)
		switch {
		case len(f) == 1 && f[0].status == 200 && f[0].complete && bytes.Contains(f[0].body, []byte(tok)):
			good++
			continue
		case len(f) >= 1 && f[0].status < 500 && f[0].status != 429:
			return retries, fmt.Sprintf("a sound request got a wrong answer (%d %q): cross-request leak", f[0].status, clip(string(f[0].body), 50))
		case bytes.Contains(raw, []byte("EVIL")):
			return retries, "a sound request got the stray bytes of another exchange"
		}
		good = 0
		if time.Now().After(end) {
			return retries, fmt.Sprintf("the proxy does not recover: %q", clip(string(raw), 80))
		}
		retries++
		time.Sleep(time.Duration(min(retries*50, 500)) * time.Millisecond)
	}
	return retries, ""
}

func describe(finals, interim []*msg, junk []byte, closed string, recs []*rec, d time.Duration) string {
	var sb strings.Builder
	for _, m := range interim {
		fmt.Fprintf(&sb, "%d ", m.status)
	}
	for _, m := range finals {
		fmt.Fprintf(&sb, "%d(%s,%dB,complete=%v) ", m.status, m.framing, len(m.body), m.complete)
	}
	if len(finals) == 0 {
		sb.WriteString("no response ")
	}
	if len(junk) > 0 {
		fmt.Fprintf(&sb, "junk=%q ", clip(string(junk), 30))
	}
	if closed == "" {
		closed = "open"
	}
	fmt.Fprintf(&sb, "conn=%s %dms; backend saw %d", closed, d.Milliseconds(), len(recs))
	for _, r := range recs {
		fmt.Fprintf(&sb, " [%s %s %s %s body=%dB whole=%v]", r.method, clip(r.target, 40), r.version, r.framing, len(r.body), r.complete)
	}
	return sb.String()
}
