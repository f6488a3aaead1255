package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"kvgate/telemetry"
)

// ServerOptions bound what clients can take of a server. Zero fields mean their defaults.
type ServerOptions struct {
	HeaderBytes     int           // largest request head; default and most: 40 KiB
	BodyBytes       int64         // largest request body; default 32 MiB
	ExtensionBytes  int           // of the chunk extensions of a body; default 16 KiB
	HeaderTimeout   time.Duration // for a request's head, from its first byte; default 10 s
	BodyTimeout     time.Duration // for its body, more for a large one; default 30 s
	KeepAlive       time.Duration // between two requests on a connection; default 75 s
	WriteTimeout    time.Duration // for which a client may take none of its answer; default 30 s
	Connections     int           // open at a time; default: half of what the process may open
	IgnoreHalfClose bool          // serve on a client that has shut down its sending side
	// TLS, if set, is spoken with clients. To renew certificates, set its GetCertificate, or call SetCertificates.
	TLS *tls.Config
	// DrainDelay is how long Shutdown goes on accepting connections, for load balancers to notice; default none.
	DrainDelay time.Duration
	// DrainTimeout is how long running requests may take after that; default 30 s.
	DrainTimeout time.Duration
	// OnAcceptError and OnRefusedConn are told of connections lost to errors of accept and of those refused for want of
	// room. They must not block. May be nil.
	OnAcceptError func(error)
	OnRefusedConn func()
}

// A Server serves clients of a handler on listeners.
type Server struct {
	h       *Handler
	o       ServerOptions
	http    *fasthttp.Server
	edge    *edge
	certs   atomic.Pointer[[]tls.Certificate]
	mu      sync.Mutex
	lns     []*listener
	closing bool
	serving sync.WaitGroup
}

// NewServer returns a server for h. Shutdown ends it. A handler has one server.
func NewServer(h *Handler, o ServerOptions) (*Server, error) {
	w, err := newWatcher(o.IgnoreHalfClose)
	if err != nil {
		return nil, fmt.Errorf("watching clients: %w", err)
	}
	def(&o.DrainTimeout, 30*time.Second)
	s := &Server{h: h, o: o}
	h.watch = w
	s.edge = newEdge(edgeOptions{
		headBytes:       min(o.HeaderBytes, readBufferBytes-readBufferSlack),
		bodyBytes:       o.BodyBytes,
		extensionBytes:  o.ExtensionBytes,
		headTimeout:     o.HeaderTimeout,
		bodyTimeout:     o.BodyTimeout,
		idleTimeout:     o.KeepAlive,
		writeStall:      o.WriteTimeout,
		connections:     o.Connections,
		ignoreHalfClose: o.IgnoreHalfClose,
		onAcceptError:   o.OnAcceptError,
		onRefuse:        o.OnRefusedConn,
	}, w)
	s.http = newServer(serverOptions{
		handler:  h.Serve,
		log:      h.log,
		onReject: h.rejected,
		onPanic:  func(any) { h.panics.Add(1) },
	})
	// Header names go on as they came.
	s.http.DisableHeaderNamesNormalizing = true
	return s, nil
}

// SetCertificates has TLS connections that begin from now on get these certificates.
func (s *Server) SetCertificates(certs []tls.Certificate) { s.certs.Store(&certs) }

// Serve accepts connections on ln until Shutdown. It returns nil then.
func (s *Server) Serve(ln net.Listener) error {
	if s.o.TLS != nil {
		ln = tls.NewListener(ln, s.tlsConfig())
	}
	l := newListener(ln, s.edge)
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return errors.Join(net.ErrClosed, ln.Close())
	}
	s.lns = append(s.lns, l)
	s.serving.Add(1)
	s.mu.Unlock()
	defer s.serving.Done()
	err := s.http.Serve(l)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil
	}
	return err
}

// tlsConfig is the configured one, with HTTP/1.1 alone and the certificates of SetCertificates.
func (s *Server) tlsConfig() *tls.Config {
	c := s.o.TLS.Clone()
	c.NextProtos = []string{"http/1.1"}
	if c.MinVersion == 0 {
		c.MinVersion = tls.VersionTLS12
	}
	fallback := c.GetConfigForClient
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if certs := s.certs.Load(); certs != nil {
			renewed := c.Clone()
			renewed.GetConfigForClient = nil
			renewed.GetCertificate = nil
			renewed.Certificates = *certs
			return renewed, nil
		}
		if fallback != nil {
			return fallback(hello)
		}
		return nil, nil
	}
	return c
}

// lastRequests is how long requests are taken on connections that had been accepted before the listener closed: who was
// just let in may not have said what he wants.
const lastRequests = time.Second

// unwindTimeout is how long the requests that a shutdown cuts off may take to tell their clients.
const unwindTimeout = 5 * time.Second

// Drained says how a shutdown went.
type Drained struct {
	Finished int // requests that were running and came to their end
	Cut      int // requests that were ended, streams with an error event
}

// Shutdown stops the server: for DrainDelay it only has answers close their connections; then it accepts no more
// connections and, a second later, no more requests on those it has, lets running ones end until DrainTimeout has passed,
// and cuts off the rest. When ctx ends,
// what is left of these times is skipped. It returns when every connection
// has been closed, or 5 s after the end.
func (s *Server) Shutdown(ctx context.Context) Drained {
	h := s.h
	h.draining.Store(true)
	sleep(ctx, s.o.DrainDelay)
	s.mu.Lock()
	s.closing = true
	lns := s.lns
	s.mu.Unlock()
	running := h.Active()
	h.log.Debug("no new connections are taken", zap.Int("running", running), zap.Duration("timeout_seconds", s.o.DrainTimeout))
	// fasthttp closes its listeners and the connections that have not sent anything, and waits for its others.
	h.following.end()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.http.Shutdown()
		for _, l := range lns {
			_ = l.Close()
		}
		s.serving.Wait()
		h.following.wg.Wait()
	}()
	t := time.NewTimer(s.o.DrainTimeout)
	defer t.Stop()
	last := time.NewTimer(lastRequests)
	defer last.Stop()
	wake := time.NewTicker(250 * time.Millisecond) // for connections that have been taken over since
	defer wake.Stop()
	for waiting := true; waiting; {
		select {
		case <-wake.C:
			h.following.end()
			continue
		case <-last.C:
			h.refusing.Store(true)
			running = max(running, h.Active())
			continue
		case <-done:
		case <-t.C:
		case <-ctx.Done():
		}
		waiting = false
	}
	h.refusing.Store(true)
	if n := h.Active(); n > 0 {
		h.log.Warn("cutting requests off", zap.Int("running", n))
	}
	h.cancelAll(cancelledByDrain)
	again := time.NewTicker(50 * time.Millisecond) // for requests that were just beginning
	defer again.Stop()
	for end := time.Now().Add(unwindTimeout); time.Now().Before(end); {
		select {
		case <-done:
			h.watch.close()
			return h.drained(running, 0)
		case <-again.C:
			h.cancelAll(cancelledByDrain)
		}
	}
	// What is left are connections that have never sent a request, or clients that don't take the end of their answer.
	return h.drained(running, h.Active())
}

// drained counts the ends of a shutdown that began while requests were running, of which some are left.
func (h *Handler) drained(running, left int) Drained {
	cut := int(h.cut.Load()) + left
	return Drained{Finished: max(0, running-cut), Cut: cut}
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// rejected accounts for a request that was refused before it was one.
func (h *Handler) rejected(ctx *fasthttp.RequestCtx, rej *rejection) {
	h.observeRejection(&telemetry.Record{
		Method: text(ctx.Request.Header.Method()), Path: text(ctx.Request.Header.RequestURI()), ClientAddr: ctx.RemoteAddr().String(),
	}, rej)
}

// observeRejection completes the record of such a request and hands it over.
func (h *Handler) observeRejection(r *telemetry.Record, rej *rejection) {
	if h.opts.Sink == nil {
		return
	}
	r.Status, r.Outcome, r.Error = rej.status, outcomeOf(rej.code).String(), rej.reason
	h.opts.Sink.Observe(r)
}
