package metrics

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// A source is where an endpoint's page is and how it is read.
type source struct {
	dialect *Dialect
	url     string // "" for dialect none
	page    *page
	header  http.Header // of the page read last
}

// A locator finds an endpoint's page and its dialect. It remembers what must not be asked for again.
type locator struct {
	*client
	base       string   // scheme://host:port
	metricsURL string   // set by the operator, or ""
	dialect    *Dialect // nil: to be detected
	// taken reports whether host:port is another endpoint, whose page would be mistaken for this one's.
	taken func(hostPort string) bool

	drains bool // base+/metrics is trtllm-serve's JSON: reading it takes from others
	tried  []error
}

// locate asks until a page is understood, and reads it.
func (l *locator) locate(ctx context.Context) (*source, error) {
	l.tried = l.tried[:0]
	if l.dialect != nil {
		return l.fixed(ctx)
	}
	return l.detect(ctx)
}

func (l *locator) fixed(ctx context.Context) (*source, error) {
	d := l.dialect
	if len(d.want.names) == 0 {
		return &source{dialect: d}, nil
	}
	for _, u := range l.candidates(d) {
		src := &source{dialect: d, url: u, page: newPage(d.want, d)}
		err := l.read(ctx, src)
		if err == nil || untouched(err) {
			return src, err
		}
		if stop := l.note(err); stop && strings.HasPrefix(u, l.base+"/") {
			if src.page.lines > 0 { // it is the page, though it was cut
				return src, err
			}
			return nil, err
		}
	}
	return nil, l.tried[0]
}

// candidates are the URLs where a page of d may be.
func (l *locator) candidates(d *Dialect) (urls []string) {
	if l.metricsURL != "" {
		return []string{l.metricsURL}
	}
	ports := d.Ports
	if len(ports) == 0 {
		ports = []int{0}
	}
	for _, port := range ports {
		base := l.base
		if port != 0 {
			if base = l.otherPort(port); base == "" {
				continue
			}
		}
		for _, path := range d.Paths {
			urls = append(urls, base+path)
		}
	}
	return urls
}

// otherPort is the base URL with another port, or "" where that is another endpoint's.
func (l *locator) otherPort(port int) string {
	u, err := url.Parse(l.base)
	if err != nil {
		return ""
	}
	hostPort := net.JoinHostPort(u.Hostname(), strconv.Itoa(port))
	if l.taken != nil && l.taken(hostPort) {
		return ""
	}
	return u.Scheme + "://" + hostPort
}

// note remembers that err was met, and reports whether the server is not there to be asked for more.
func (l *locator) note(err error) (stop bool) {
	l.tried = append(l.tried, err)
	return !faultOf(err).reachable()
}

// detect finds the dialect. The order keeps what it asks for from having effects: a llama.cpp that sleeps is woken by
// /metrics, so it is asked for /props first; a list in JSON tells trtllm-serve, whose /metrics is then left alone.
func (l *locator) detect(ctx context.Context) (*source, error) {
	p, err := l.props(ctx, l.base)
	switch {
	case p != nil:
		src := &source{dialect: llamacpp, url: l.candidates(llamacpp)[0], page: newPage(llamacpp.want, llamacpp)}
		return src, l.read(ctx, src)
	case l.metricsURL != "":
		return l.try(ctx, l.metricsURL, nil)
	case err != nil && l.note(err) && (faultOf(err) != FaultStatus || loading(err)):
		if e, ok := errors.AsType[*Error](err); ok && e.Fault.Unconnected() { // which page was asked for first is no matter
			e.URL = l.base + "/metrics"
		}
		return nil, err
	}
	if !l.drains {
		src, err := l.try(ctx, l.base+"/metrics", nil)
		if err == nil || !faultOf(err).reachable() {
			return src, err
		}
		if e := err.(*Error); e.Fault == FaultJSON && len(e.json) > 0 && e.json[0] == '[' {
			l.drains = true
		}
	}
	if l.drains {
		src, err := l.try(ctx, l.base+trtllm.Paths[0], trtllm)
		if e, ok := err.(*Error); ok && e.Fault.reachable() {
			e.Fix = "set return_perf_metrics: true and enable_iter_perf_stats: true for trtllm-serve, whose /metrics is JSON that each read drains"
		}
		return src, err
	}
	if src, err := l.try(ctx, l.base+"/v1/metrics", nil); err == nil {
		return src, nil
	}
	for _, d := range []*Dialect{maxServe, triton} {
		if base := l.otherPort(d.Ports[0]); base != "" && base != l.base {
			if src, err := l.try(ctx, base+d.Paths[0], d); err == nil {
				return src, nil
			}
		}
	}
	if l.ollama(ctx) {
		return &source{dialect: none}, nil
	}
	return nil, l.unknown()
}

// try reads the page at url and finds its dialect; if want is set it must be that one.
func (l *locator) try(ctx context.Context, url string, want *Dialect) (*source, error) {
	p := newPage(everyFamily(), nil)
	h, err := l.page(ctx, url, p)
	if err != nil {
		l.note(err)
		return nil, err
	}
	d := detect(p)
	if d == nil || want != nil && d != want {
		err := unrecognized(url, p)
		l.note(err)
		return nil, err
	}
	p.adopt(d)
	return &source{dialect: d, url: url, page: p, header: h}, nil
}

// read reads the page of src once more.
func (l *locator) read(ctx context.Context, src *source) error {
	if src.dialect.Props {
		p, err := l.props(ctx, l.base)
		switch {
		case err != nil && !faultOf(err).reachable():
			return err
		case p != nil && p.Sleeping:
			return errAsleep
		case p != nil && p.Role == "router":
			return errRouter
		}
	}
	h, err := l.page(ctx, src.url, src.page)
	if err == nil && !src.dialect.speaks(src.page) {
		err = unrecognized(src.url, src.page)
		err.(*Error).Fix = "set dialect: auto, or the one that the server speaks"
	}
	if e, ok := err.(*Error); ok && e.Fault == FaultNotFound && src.dialect == llamacpp {
		e.Fix = "start llama.cpp's server with --metrics"
	}
	src.header = h
	return err
}

func unrecognized(url string, p *page) error {
	return &Error{
		Fault: FaultUnrecognized, URL: url,
		What: "a page of " + strconv.Itoa(p.lines) + " series, none of which a dialect knows",
		Fix:  "set metrics_url to the model server's page, or describe it with dialect: custom",
	}
}

// unknown is the error for a server whose page hasn't been found: the first answer with advice.
func (l *locator) unknown() error {
	e := cmp.Or(l.firstFault(FaultUnauthorized), l.firstFault(FaultRedirect), l.firstFault(FaultUnrecognized),
		l.firstFault(FaultTooLarge), l.firstFault(FaultEncoding), l.firstFault(FaultHTML), l.firstFault(FaultEmpty))
	if e != nil {
		return e
	}
	for _, err := range l.tried {
		if e, ok := err.(*Error); ok && strings.HasSuffix(e.URL, "/metrics") {
			c := *e
			c.Fix = "start the server with its metrics on (SGLang: --enable-metrics; llama.cpp, LMDeploy: --metrics), or set metrics_url; or dialect: none if it has none"
			return &c
		}
	}
	return l.tried[0]
}

func (l *locator) firstFault(f Fault) *Error {
	for _, err := range l.tried {
		if e, ok := err.(*Error); ok && e.Fault == f && !strings.HasSuffix(e.URL, "/props") {
			return e
		}
	}
	return nil
}

// ollama reports whether the server is Ollama, which has no metrics.
func (l *locator) ollama(ctx context.Context) bool {
	var is bool
	_ = l.get(ctx, l.base+"/", "text/plain", func(_ http.Header, body io.Reader, _ bool) error {
		b, err := io.ReadAll(io.LimitReader(body, 64))
		is = err == nil && string(b) == "Ollama is running"
		return nil
	})
	return is
}

// props is what llama.cpp's server says of itself. Asking for it neither wakes the server nor loads a model.
type props struct {
	Role       string          `json:"role"` // "router" for one that starts others
	Sleeping   bool            `json:"is_sleeping"`
	TotalSlots *int            `json:"total_slots"`
	Defaults   json.RawMessage `json:"default_generation_settings"`
}

// props asks for /props; nil without an error says that it isn't llama.cpp's.
func (l *locator) props(ctx context.Context, base string) (*props, error) {
	var p props
	is := false
	err := l.get(ctx, base+"/props", "application/json", func(_ http.Header, body io.Reader, _ bool) error {
		b, err := io.ReadAll(&limited{body, l.limit})
		if err != nil {
			return err
		}
		is = json.Unmarshal(b, &p) == nil && (p.TotalSlots != nil || p.Defaults != nil || p.Role == "router")
		return nil
	})
	if err != nil || !is {
		return nil, err
	}
	return &p, nil
}

// loading reports whether a failed request met llama.cpp's server while it loads its model.
func loading(err error) bool {
	e, ok := err.(*Error)
	return ok && strings.Contains(e.body, "unavailable_error")
}
