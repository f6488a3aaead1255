package metrics

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
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

// A scripted server answers each request with raw bytes, and counts connections.
type scripted struct {
	net.Listener
	mu       sync.Mutex
	conns    int
	requests []string
	open     []net.Conn
	wg       sync.WaitGroup
}

// script starts a server. answer gets the number of the connection and of the request on it, both from 0.
func script(t *testing.T, answer func(c net.Conn, _, request int)) *scripted {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{Listener: l}
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			n := s.conns
			s.conns++
			s.open = append(s.open, c)
			s.mu.Unlock()
			s.wg.Go(func() {
				defer c.Close()
				r := bufio.NewReader(c)
				for i := 0; ; i++ {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					s.mu.Lock()
					s.requests = append(s.requests, req.URL.String()+" "+req.Host+" "+req.Header.Get("Authorization"))
					s.mu.Unlock()
					answer(c, n, i)
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.mu.Lock()
		for _, c := range s.open {
			c.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s
}

func (s *scripted) url() string { return "http://" + s.Addr().String() }

func (s *scripted) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

// body asks for u over w and returns what came.
func body(ctx context.Context, w *wire, u string) (string, error) {
	var text string
	err := w.ask(ctx, u, "text/plain", func(resp *http.Response) error {
		b, err := io.ReadAll(resp.Body)
		text = resp.Status + " " + string(b)
		return err
	})
	return text, err
}

// One connection carries all requests, however an answer is framed, as long as its end is known.
func TestWireKeepsItsConnection(t *testing.T) {
	const simple = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
	for name, f := range map[string]struct {
		answer string
		conns  int // that three requests take
		fails  bool
	}{
		"length":        {simple, 1, false},
		"chunked":       {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1;x=y\r\nb\r\n0\r\nTrailer: x\r\n\r\n", 1, false},
		"announced":     {"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + simple, 1, false},
		"no body":       {"HTTP/1.1 204 No Content\r\n\r\n", 1, false},
		"1.0":           {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", 3, false},
		"close":         {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab", 3, false},
		"too much":      {simple + "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", 3, false},
		"no answer":     {strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 100), 3, true},
		"garbage":       {"SSH-2.0-OpenSSH_9.2\r\n\r\n", 3, true},
		"two lengths":   {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc", 3, true},
		"absurd length": {"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc", 3, true},
		"long header":   {"HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 100) + "Content-Length: 2\r\n\r\nab", 3, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := script(t, func(c net.Conn, _, _ int) { io.WriteString(c, f.answer) })
			w := newWire(nil, "", time.Minute)
			defer w.close()
			for range 3 {
				text, err := body(t.Context(), w, s.url()+"/metrics")
				if (err != nil) != f.fails || strings.Contains(text, "evil") || !f.fails && !strings.HasPrefix(text, "20") {
					t.Fatalf("got %q, error %v", text, err)
				}
			}
			if n := s.connections(); n != f.conns {
				t.Errorf("%d connections; want %d", n, f.conns)
			}
		})
	}
}

// A connection that its server has ended, or is ending just then, or that said something unasked, costs no scrape.
func TestWireStaleConnection(t *testing.T) {
	const good = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
	for name, after := range map[string]func(c net.Conn){
		"ended":   func(c net.Conn) { c.Close() },
		"reset":   func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() },
		"unasked": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n") },
	} {
		t.Run(name, func(t *testing.T) {
			s := script(t, func(c net.Conn, _, _ int) { io.WriteString(c, good) })
			w := newWire(nil, "", time.Minute)
			defer w.close()
			if text, err := body(t.Context(), w, s.url()); text != "200 OK good" || err != nil {
				t.Fatalf("got %q, error %v", text, err)
			}
			s.mu.Lock()
			after(s.open[0])
			s.mu.Unlock()
			// What was sent arrives in its time.
			for w.kept[0].quiet() {
				time.Sleep(time.Millisecond)
			}
			if text, err := body(t.Context(), w, s.url()); text != "200 OK good" || err != nil {
				t.Fatalf("got %q, error %v", text, err)
			}
			if n := s.connections(); n != 2 {
				t.Errorf("%d connections; want 2", n)
			}
		})
	}
	// Here the check can't see it: the server ends a connection when it gets a second request on it.
	s := script(t, func(c net.Conn, _, request int) {
		if request == 0 {
			io.WriteString(c, good)
		} else {
			c.Close()
		}
	})
	w := newWire(nil, "", time.Minute)
	defer w.close()
	for range 5 {
		if text, err := body(t.Context(), w, s.url()); text != "200 OK good" || err != nil {
			t.Fatalf("got %q, error %v", text, err)
		}
	}
	// But what has begun to be answered isn't asked for again, nor is what a new connection doesn't answer.
	for _, begun := range []string{"", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "HTTP/1.1 2"} {
		s := script(t, func(c net.Conn, _, request int) {
			if request == 0 && begun != "" {
				io.WriteString(c, good)
				return
			}
			io.WriteString(c, begun)
			c.Close()
		})
		w := newWire(nil, "", time.Minute)
		defer w.close()
		if begun != "" {
			if text, err := body(t.Context(), w, s.url()); text != "200 OK good" || err != nil {
				t.Fatalf("got %q, error %v", text, err)
			}
		}
		if text, err := body(t.Context(), w, s.url()); err == nil {
			t.Errorf("after %q: %q, no error", begun, text)
		}
		if n := s.connections(); n != 1 {
			t.Errorf("after %q: %d connections; want 1", begun, n)
		}
	}
}

// A server that says nothing ends neither a scraper's patience nor its stop.
func TestWireTimeoutAndStop(t *testing.T) {
	asked := make(chan struct{}, 10)
	s := script(t, func(net.Conn, int, int) { asked <- struct{}{} })
	w := newWire(nil, "", 30*time.Millisecond)
	defer w.close()
	if _, err := body(t.Context(), w, s.url()); !isTimeout(err) {
		t.Errorf("error %v; want a timeout", err)
	}
	<-asked
	w.timeout = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := body(ctx, w, s.url()); err != context.Canceled {
		t.Errorf("error %v; want %v", err, context.Canceled)
	}
	// The caller's deadline holds too.
	ctx, cancel = context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := body(ctx, w, s.url()); !isTimeout(err) {
		t.Errorf("error %v; want a timeout", err)
	}
	if len(w.kept) != 0 {
		t.Error("a connection with an answer due was kept")
	}
}

// What a request says besides its path, and that connections are told apart and don't pile up.
func TestWireRequests(t *testing.T) {
	const good = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
	var servers []*scripted
	for range 3 {
		servers = append(servers, script(t, func(c net.Conn, _, _ int) { io.WriteString(c, good) }))
	}
	w := newWire(nil, "", time.Minute)
	defer w.close()
	address := servers[0].Addr().String()
	for range 2 {
		for _, u := range []string{"/metrics", "/a%2Fb?c=d#e", ""} {
			if text, err := body(t.Context(), w, "http://u:p@"+address+u); text != "200 OK good" || err != nil {
				t.Fatalf("got %q, error %v", text, err)
			}
		}
	}
	w.apiKey = "k"
	w.targets = nil
	if _, err := body(t.Context(), w, "http://u:p@"+address+"/key"); err != nil {
		t.Fatal(err)
	}
	want := []string{"/metrics " + address + " Basic dTpw", "/a%2Fb?c=d " + address + " Basic dTpw", "/ " + address + " Basic dTpw"}
	want = append(append(want, want...), "/key "+address+" Bearer k")
	if !slices.Equal(servers[0].requests, want) {
		t.Errorf("asked for %q; want %q", servers[0].requests, want)
	}
	for i := range 12 {
		if _, err := body(t.Context(), w, servers[i%3].url()+"/"+strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(w.kept) > maxKept || len(w.targets) > maxTargets {
		t.Errorf("%d connections and %d targets are kept", len(w.kept), len(w.targets))
	}
	w.kept[0].last = time.Now().Add(-keepIdle)
	if k := w.take(&target{address: w.kept[0].address}); k != nil {
		t.Error("a connection that was idle for long is used")
	}
	for _, u := range []string{"ftp://h/metrics", "http://%zz/", "://"} {
		if _, err := body(t.Context(), w, u); faultOf(err) != FaultRefused {
			t.Errorf("%s: error %v", u, err)
		}
	}
}

// Over TLS a connection is kept and checked as well.
func TestWireTLS(t *testing.T) {
	var mu sync.Mutex
	conns := make(map[string]bool)
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		conns[r.RemoteAddr] = true
		io.WriteString(w, r.Proto)
	}))
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	w := newWire(&tls.Config{RootCAs: roots}, "", time.Minute)
	defer w.close()
	get := func(want int) {
		t.Helper()
		if text, err := body(t.Context(), w, s.URL); text != "200 OK HTTP/1.1" || err != nil {
			t.Fatalf("got %q, error %v", text, err)
		}
		mu.Lock()
		defer mu.Unlock()
		if len(conns) != want {
			t.Errorf("%d connections; want %d", len(conns), want)
		}
	}
	get(1)
	get(1)
	s.CloseClientConnections()
	get(2)
}
