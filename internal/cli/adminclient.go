package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kvgate/internal/admin"
	"kvgate/internal/modelsim"
)

// maxAnswerBytes bounds what is read from an admin listener: a table of 65,000 endpoints takes half of it.
const maxAnswerBytes = 256 << 20

// An adminClient asks the admin listener of a running gateway.
type adminClient struct {
	base    string
	timeout time.Duration
	token   func() (string, error) // for actions; nil: none is sent
	fields  []string               // of a request to explain, "Name: value"
	secret  bool                   // there is a credential among them
}

// adminFlags adds the flags that say where the admin listener is.
func adminFlags(c *cobra.Command, a *adminClient) {
	c.Flags().StringVar(&a.base, "admin", "http://127.0.0.1:9090", "URL of the gateway's admin listener")
	c.Flags().DurationVar(&a.timeout, "timeout", 10*time.Second, "how long to wait for its answer")
	envFlags(c, "admin")
}

// tokenFlag adds the flag that says where the admin token is.
func tokenFlag(c *cobra.Command, e *env, a *adminClient) {
	var file string
	c.Flags().StringVar(&file, "token-file", "", "file with the admin token, where one is configured (or the token itself in the environment: KVGATE_ADMIN_TOKEN)")
	_ = c.MarkFlagFilename("token-file")
	a.token = func() (string, error) {
		if file == "" {
			t, _ := e.lookup("KVGATE_ADMIN_TOKEN")
			return strings.TrimSpace(t), nil
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("--token-file: %w", err)
		}
		return strings.TrimSpace(string(data)), nil
	}
}

// call asks path and returns the status and the body.
func (a *adminClient) call(ctx context.Context, method, path string, body []byte) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	resp, err := a.open(ctx, method, path, body)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return 0, nil, fmt.Errorf("admin listener: %s: %w", path, err)
	}
	return resp.StatusCode, data, nil
}

// open asks path and returns the answer, whose body is to be read, and closed.
func (a *adminClient) open(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	base := strings.TrimRight(a.base, "/")
	if !strings.Contains(base, "://") {
		base = "http://" + base
	}
	u, err := url.Parse(base)
	if err != nil || u.Host == "" {
		return nil, usage("--admin http://127.0.0.1:9090", "--admin %q is not a URL", a.base)
	}
	if a.secret && u.Scheme != "https" && !loopback(u.Hostname()) {
		return nil, usage("kvgate explain --key-id ID -m MODEL", "--key-file would send the key over plain HTTP to %s; name it with --key-id, or use an https or loopback address for --admin", u.Host)
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if a.token != nil {
		token, err := a.token()
		if err != nil {
			return nil, err
		}
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
	}
	for _, f := range a.fields {
		req.Header.Add(admin.InquiryField, f)
	}
	t := &http.Transport{DisableKeepAlives: true}
	// No redirect is followed: what is sent is for this listener alone.
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := (&http.Client{Transport: t, CheckRedirect: stay}).Do(req)
	if err != nil {
		return nil, withTry(fmt.Errorf("no answer from the admin listener: %w", err),
			"kvgate serve -c FILE, or --admin URL if it listens elsewhere (admin.listen)")
	}
	return resp, nil
}

// loopback reports whether host is this machine.
func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// get reads a page as JSON into v.
func (a *adminClient) get(ctx context.Context, path string, v any) error {
	status, data, err := a.call(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("admin listener: %s: status %d: %s", path, status, firstLine(data))
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("admin listener: %s: %w; is %s a kvgate?", path, modelsim.JSONError(err), a.base)
	}
	return nil
}

// firstLine is the message of an error page, whether JSON or text.
func firstLine(data []byte) string {
	var e struct{ Error string }
	if json.Unmarshal(data, &e) == nil && e.Error != "" {
		return e.Error
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	return line[:min(len(line), 300)]
}
