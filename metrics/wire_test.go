package metrics

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"
)

// netHTTP is an asker over net/http: what a wire is measured against, and how tests answer for servers that aren't there.
type netHTTP struct {
	transport http.RoundTripper
	timeout   time.Duration
}

func (h *netHTTP) ask(ctx context.Context, u, accept string, use func(*http.Response) error) error {
	ctx, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "kvgate")
	c := http.Client{Transport: h.transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := c.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err
		}
		return err
	}
	defer resp.Body.Close()
	return use(resp)
}

func (h *netHTTP) close() {
	if t, ok := h.transport.(*http.Transport); ok {
		t.CloseIdleConnections()
	}
}
