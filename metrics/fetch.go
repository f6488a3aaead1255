package metrics

import (
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// A Fault is the kind of reason why a scrape failed: a closed list, fit for a metric label.
type Fault string

// The faults.
const (
	FaultNone         Fault = ""
	FaultRefused      Fault = "refused"      // nothing listens there, or the name doesn't resolve
	FaultUnreachable  Fault = "unreachable"  // no route to it, or no connection in time
	FaultTimeout      Fault = "timeout"      // no whole page in time
	FaultTLS          Fault = "tls"          // no agreement on TLS, or one side doesn't speak it
	FaultReset        Fault = "reset"        // the connection ended before the page
	FaultUnauthorized Fault = "unauthorized" // 401 or 403
	FaultNotFound     Fault = "not_found"    // 404, 405, 410 or 501: no such page
	FaultStatus       Fault = "status"       // another status than 200
	FaultRedirect     Fault = "redirect"
	FaultTooLarge     Fault = "too_large"
	FaultEncoding     Fault = "encoding"     // compressed in a way that wasn't asked for and isn't understood
	FaultHTML         Fault = "html"         // a page for people
	FaultJSON         Fault = "json"         // not the Prometheus format
	FaultEmpty        Fault = "empty"        // a page without a single series
	FaultUnrecognized Fault = "unrecognized" // a page without any family of the dialect
)

// reachable reports whether the server answered, so that only its page is at fault.
func (f Fault) reachable() bool {
	switch f {
	case FaultNone, FaultRefused, FaultUnreachable, FaultTimeout, FaultTLS, FaultReset, FaultStatus:
		return false
	}
	return true
}

// Unconnected reports whether there was no connection over which the server could have been asked.
func (f Fault) Unconnected() bool {
	return f == FaultRefused || f == FaultUnreachable || f == FaultTLS
}

// An Error is a scrape that failed.
type Error struct {
	Fault Fault
	URL   string
	What  string // what was seen and what was wanted
	Fix   string // what to do about it; "" if there is nothing to say
	Err   error  // underlying error, if any

	json []byte // the page, if it is JSON
	body string // the beginning of the answer to a failed request
	list bool   // the list of models was refused, not a page
}

func (e *Error) Error() string {
	s := "scrape " + e.URL + ": " + e.What
	if u, err := url.Parse(e.URL); err == nil && e.list {
		code, _, _ := strings.Cut(strings.TrimPrefix(e.What, "status "), ";")
		s = u.Path + " answered " + code
	}
	if e.Fix != "" {
		s += "; " + e.Fix
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// faultOf returns the fault of err, which may be nil.
func faultOf(err error) Fault {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Fault
	}
	return FaultNone
}

// Bounds on what is taken from a server besides its page.
const (
	maxHeaderBytes    = 64 << 10
	maxErrorBodyBytes = 8 << 10 // read from answers that aren't pages, so that the connection can be used again
)

// An asker asks for url and gives the answer to use, whose error it returns. It is a [wire], or a test's.
type asker interface {
	ask(ctx context.Context, url, accept string, use func(*http.Response) error) error
	close()
}

// A client asks the servers at one endpoint for things.
type client struct {
	asker
	timeout time.Duration // the asker's
	limit   int64         // bytes of a page, decompressed
	gunzip  *gzip.Reader
}

func newClient(p PoolOptions, o *Options) *client {
	return &client{asker: newWire(p.TLS, p.APIKey, o.Timeout), timeout: o.Timeout, limit: o.MaxPageBytes}
}

// get asks for url and gives a body of status 200 to read, within the time limit. What read returns becomes an [Error].
func (c *client) get(ctx context.Context, url, accept string, read func(h http.Header, body io.Reader, framed bool) error) error {
	err := c.ask(ctx, url, accept, func(resp *http.Response) error {
		if resp.StatusCode != http.StatusOK {
			return statusError(url, resp)
		}
		body, err := c.decoded(resp)
		if err != nil {
			return err
		}
		return read(resp.Header, body, resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0)
	})
	if err == nil {
		return nil
	}
	if e, ok := err.(*Error); ok {
		return e
	}
	return c.describe(url, err)
}

// decoded returns the body of resp without the compression that nobody asked for.
func (c *client) decoded(resp *http.Response) (io.Reader, error) {
	var body io.Reader = resp.Body
	encoding := strings.ToLower(resp.Header.Get("Content-Encoding"))
	if encoding == "" || encoding == "identity" {
		// Some have it compressed without a word.
		var magic [2]byte
		n, err := io.ReadFull(body, magic[:])
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF && n == 1:
			return strings.NewReader(string(magic[:n])), nil
		case err != nil:
			return nil, err
		}
		body = &prefixed{string(magic[:]), body}
		if magic != [2]byte{0x1f, 0x8b} {
			return body, nil
		}
		encoding = "gzip"
	}
	if encoding != "gzip" && encoding != "x-gzip" {
		return nil, encodingError(encoding)
	}
	// Compressed bytes are under the limit too: nothing stops a stream from expanding to nothing.
	body = &limited{body, c.limit}
	var err error
	if c.gunzip == nil {
		c.gunzip, err = gzip.NewReader(body)
	} else {
		err = c.gunzip.Reset(body)
	}
	if err != nil {
		c.gunzip = nil
		return nil, err
	}
	return c.gunzip, nil
}

type encodingError string

func (e encodingError) Error() string { return "content encoding " + string(e) }

// prefixed reads head and then from r, with head in one Read.
type prefixed struct {
	head string
	r    io.Reader
}

func (p *prefixed) Read(b []byte) (int, error) {
	if n := copy(b, p.head); n > 0 {
		p.head = p.head[n:]
		if n < len(b) {
			m, err := p.r.Read(b[n:])
			return n + m, err
		}
		return n, nil
	}
	return p.r.Read(b)
}

type limited struct {
	r    io.Reader
	left int64
}

func (l *limited) Read(b []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooLarge
	}
	n, err := l.r.Read(b[:min(int64(len(b)), l.left)])
	l.left -= int64(n)
	return n, err
}

func statusError(url string, resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBodyBytes))
	e := &Error{Fault: FaultStatus, URL: url, What: fmt.Sprintf("status %d; want 200", resp.StatusCode), body: string(body)}
	switch code := resp.StatusCode; {
	case code >= 300 && code < 400:
		e.Fault = FaultRedirect
		to := resp.Header.Get("Location")
		e.What = fmt.Sprintf("status %d, a redirect to %q, which is not followed", code, to)
		e.Fix = "set metrics_url to where the page is"
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.Fault = FaultUnauthorized
		e.Fix = "set api_key or api_key_file of the pool"
	case code == http.StatusNotFound || code == http.StatusMethodNotAllowed || code == http.StatusGone || code == http.StatusNotImplemented:
		e.Fault = FaultNotFound
	}
	return e
}

// describe turns what went wrong on the way into an Error.
func (c *client) describe(url string, err error) error {
	var dial dialError
	unconnected := errors.As(err, &dial)
	if unconnected {
		err = dial.error
	}
	e := &Error{URL: url, Err: err}
	var js errJSON
	var dns *net.DNSError
	var encoding encodingError
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, errTooLarge):
		e.Fault, e.What = FaultTooLarge, fmt.Sprintf("more than %d bytes", c.limit)
		e.Fix = "raise scrape.max_bytes if that is the page's true size"
	case errors.As(err, &js):
		e.Fault, e.What, e.json = FaultJSON, "JSON; want the Prometheus text format", js.body
	case errors.Is(err, errHTML):
		e.Fault, e.What = FaultHTML, "HTML; want the Prometheus text format"
		e.Fix = "set metrics_url to the server's metrics page"
	case errors.As(err, &encoding):
		e.Fault, e.What = FaultEncoding, fmt.Sprintf("%v; want none", encoding)
		e.Fix = "turn compression off between kvgate and the server"
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		e.Fault, e.What = FaultEncoding, "broken gzip, which wasn't asked for"
	case unconnected && (errors.Is(err, context.DeadlineExceeded) || isTimeout(err)):
		e.Fault, e.What = FaultUnreachable, fmt.Sprintf("no connection within %v", c.timeout)
	case errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		e.Fault, e.What = FaultTimeout, fmt.Sprintf("no whole answer within %v", c.timeout)
	case errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/":
		e.Fault, e.What, e.Fix = FaultTLS, "the server doesn't speak TLS", "write http:// instead of https://"
	case errors.As(err, &record), errors.As(err, &verify), errors.As(err, &authority):
		e.Fault, e.What = FaultTLS, err.Error()
		e.Fix = "check the endpoint's scheme and the pool's tls settings"
	case errors.As(err, &dns):
		e.Fault, e.What = FaultRefused, err.Error()
	case errors.Is(err, syscall.ECONNREFUSED):
		e.Fault, e.What = FaultRefused, "connection refused: nothing listens there"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		e.Fault, e.What = FaultUnreachable, err.Error()
	default:
		e.Fault, e.What = FaultReset, "the connection ended before the answer: "+err.Error()
	}
	return e
}

// acceptPage asks for the text format. OpenMetrics isn't named, since servers that have both would send it.
const acceptPage = "text/plain;version=0.0.4;q=1,*/*;q=0.1"

// page reads the page at url into p.
func (c *client) page(ctx context.Context, url string, p *page) (h http.Header, err error) {
	err = c.get(ctx, url, acceptPage, func(header http.Header, body io.Reader, framed bool) error {
		h = header
		return p.read(body, c.limit, framed)
	})
	if err == nil && p.lines == 0 {
		err = &Error{Fault: FaultEmpty, URL: url, What: "an empty page"}
	}
	return h, err
}
