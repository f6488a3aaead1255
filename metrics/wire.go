package metrics

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"syscall"
	"time"
)

// A wire asks servers over HTTP/1.1, one request at a time, on connections that it keeps. It is what net/http's transport
// does without that one's goroutines and their wake-ups, which cost as much as the rest of a scrape: the goroutine that asks
// does all of it. The head of an answer is net/http's to read. Not safe for concurrent use.
type wire struct {
	tls     *tls.Config // nil for the system's roots
	apiKey  string
	timeout time.Duration // from the connection to the last byte

	targets []*target // those asked for last
	kept    []*conn   // not in use; the one used last comes last
}

// A target is a URL that is asked for again and again.
type target struct {
	url, accept string
	secure      bool
	host        string // without port
	address     string // host:port
	request     []byte
}

// Bounds on what a wire holds. An endpoint's page and its lists are three targets on two addresses at most; a search for
// the page has more.
const (
	maxTargets = 4
	maxKept    = 2
	// keepIdle is how long a connection is kept that nobody uses. Servers end theirs sooner (uvicorn after 5 s), which is
	// seen before the next request; one that lost its way in silence is noticed by TCP's own probes.
	keepIdle = 30 * time.Second
)

func newWire(tlsConfig *tls.Config, apiKey string, timeout time.Duration) *wire {
	return &wire{tls: tlsConfig, apiKey: apiKey, timeout: timeout}
}

// target returns what u means. The request is made once, by net/http.
func (w *wire) target(u, accept string) (*target, error) {
	for _, t := range w.targets {
		if t.url == u && t.accept == accept {
			return t, nil
		}
	}
	req, err := http.NewRequest(http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	port, ok := map[string]string{"http": "80", "https": "443"}[req.URL.Scheme]
	if !ok {
		return nil, fmt.Errorf("scheme %q; want http or https", req.URL.Scheme)
	}
	if p := req.URL.Port(); p != "" {
		port = p
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "kvgate")
	if user := req.URL.User; user != nil {
		password, _ := user.Password()
		req.SetBasicAuth(user.Username(), password)
	}
	if w.apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+w.apiKey)
	}
	var b bytes.Buffer
	if err := req.Write(&b); err != nil {
		return nil, err
	}
	t := &target{
		url: u, accept: accept, secure: req.URL.Scheme == "https",
		host: req.URL.Hostname(), address: net.JoinHostPort(req.URL.Hostname(), port), request: b.Bytes(),
	}
	if len(w.targets) == maxTargets {
		w.targets = slices.Delete(w.targets, 0, 1)
	}
	w.targets = append(w.targets, t)
	return t, nil
}

// ask asks for u and gives the answer to use, whose error it returns. The answer's body is good until use returns. A
// redirect is an answer.
func (w *wire) ask(ctx context.Context, u, accept string, use func(*http.Response) error) error {
	t, err := w.target(u, accept)
	if err != nil {
		return &Error{Fault: FaultRefused, URL: u, What: err.Error(), Err: err}
	}
	deadline := time.Now().Add(w.timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for {
		k, reused := w.take(t), true
		if k == nil {
			if k, err = w.connect(ctx, t, deadline); err != nil {
				return orEnded(ctx, err)
			}
			reused = false
		}
		err := w.exchange(ctx, k, t, deadline, use)
		// A server may end a kept connection just when it is used. What it hasn't begun to answer is asked for anew; a
		// kept connection is taken once, so this ends.
		if err == nil || !reused || k.answered || ctx.Err() != nil || isTimeout(err) {
			return orEnded(ctx, err)
		}
	}
}

// orEnded is err, or why ctx ended: what follows from that is no finding.
func orEnded(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[net.Error](err)
	return ok && t.Timeout()
}

// take returns a kept connection to where t is, or nil.
func (w *wire) take(t *target) *conn {
	for i, k := range w.kept {
		if k.secure == t.secure && k.address == t.address {
			w.kept = slices.Delete(w.kept, i, i+1)
			if time.Since(k.last) < keepIdle {
				return k
			}
			k.Close()
			return nil
		}
	}
	return nil
}

func (w *wire) keep(k *conn) {
	if len(w.kept) == maxKept {
		w.kept[0].Close()
		w.kept = slices.Delete(w.kept, 0, 1)
	}
	k.last = time.Now()
	w.kept = append(w.kept, k)
}

// close ends the connections. The wire makes new ones when it is used again.
func (w *wire) close() {
	for _, k := range w.kept {
		k.Close()
	}
	w.kept = slices.Delete(w.kept, 0, len(w.kept))
}

// A dialError says why there is no connection to ask over.
type dialError struct{ error }

func (e dialError) Unwrap() error { return e.error }

func (w *wire) connect(ctx context.Context, t *target, deadline time.Time) (*conn, error) {
	d := net.Dialer{Deadline: deadline, KeepAlive: 15 * time.Second}
	c, err := d.DialContext(ctx, "tcp", t.address)
	if err != nil {
		return nil, dialError{err}
	}
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		c.Close()
		return nil, err
	}
	k := &conn{Conn: c, raw: raw, secure: t.secure, address: t.address}
	k.step = k.turn
	if !t.secure {
		return k, nil
	}
	config := &tls.Config{}
	if w.tls != nil {
		config = w.tls.Clone()
	}
	if config.ServerName == "" {
		config.ServerName = t.host
	}
	secure := tls.Client(c, config)
	k.Conn = secure
	if err = c.SetDeadline(deadline); err == nil {
		err = secure.HandshakeContext(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return k, nil
}

// A conn is a connection to a server. Reading from it sends the request that is due first.
type conn struct {
	net.Conn // TLS, if it is secure
	raw      syscall.RawConn
	secure   bool
	address  string
	last     time.Time // when it was used

	used     bool   // for an earlier request
	answered bool   // a byte of the answer has come
	request  []byte // to be sent
	left     int    // how much may be read

	// State of turn.
	step func(fd uintptr) bool
	in   []byte
	n    int
	err  error
}

var (
	errStale      = errors.New("the server ended the connection, or sent something unasked")
	errLongHeader = fmt.Errorf("the header is longer than %d bytes", maxHeaderBytes)
)

// readers hold what has been read ahead of a head or a chunk. Between requests a connection needs none.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, readAheadBytes) }}

const readAheadBytes = 16 << 10

// exchange sends t's request over k, has the answer used, and keeps k if that may carry another.
func (w *wire) exchange(ctx context.Context, k *conn, t *target, deadline time.Time, use func(*http.Response) error) error {
	reusable := false
	defer func() {
		if reusable {
			k.used = true
			w.keep(k)
		} else {
			k.Close()
		}
	}()
	if err := k.SetDeadline(deadline); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = k.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	k.request, k.answered = t.request, false
	r := readers.Get().(*bufio.Reader)
	r.Reset(k)
	defer func() {
		r.Reset(nil)
		readers.Put(r)
	}()
	resp, err := k.response(r)
	if err != nil {
		return err
	}
	body := &wholeBody{ReadCloser: resp.Body}
	resp.Body = body
	err = use(resp)
	reusable = body.ended && !resp.Close && r.Buffered() == 0 && stop()
	return err
}

// maxInformational is how many answers that only announce another one are passed over.
const maxInformational = 5

// response reads the head of the answer.
func (k *conn) response(r *bufio.Reader) (*http.Response, error) {
	k.left = maxHeaderBytes
	for range maxInformational {
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			k.left = math.MaxInt
			return resp, nil
		}
	}
	return nil, errors.New("no answer behind those that announce one")
}

// Read sends the request, if that has not been done, and reads what comes.
func (k *conn) Read(b []byte) (n int, err error) {
	if k.left <= 0 {
		return 0, errLongHeader
	}
	b = b[:min(len(b), k.left)]
	if k.request != nil {
		n, err = k.converse(b)
	} else {
		n, err = k.Conn.Read(b)
	}
	k.left -= n
	k.answered = k.answered || n > 0
	return n, err
}

// converse sends the request and reads the beginning of the answer.
func (k *conn) converse(b []byte) (int, error) {
	if !k.secure {
		k.in, k.n, k.err = b, 0, nil
		if err := k.raw.Read(k.step); err != nil {
			return 0, err
		}
		k.in = nil
		if k.request == nil || k.err != nil {
			return k.n, k.err
		}
	} else if k.used && !k.quiet() {
		return 0, errStale
	}
	_, err := k.Conn.Write(k.request)
	if k.request = nil; err != nil {
		return 0, err
	}
	return k.Conn.Read(b)
}

// A wholeBody notes whether it was read to its end, behind which the connection is free.
type wholeBody struct {
	io.ReadCloser
	ended bool
}

func (b *wholeBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.ended = b.ended || err == io.EOF
	return n, err
}

// hostPort is the address in a URL, with its port.
func hostPort(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	if u.Port() == "" {
		return u.Host + map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	}
	return u.Host
}
