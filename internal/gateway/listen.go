package gateway

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"go.uber.org/zap"

	"kvgate/config"
)

// listenAdmin returns the admin listener: the one that was handed over, or admin.listen.
func (g *Gateway) listenAdmin(cfg *config.Config) (net.Listener, error) {
	if ln := g.o.AdminListener; ln != nil {
		g.tellInherited("admin.listen", cfg.Admin.Listen, ln)
		return ln, nil
	}
	return listen("admin.listen", cfg.Admin.Listen)
}

// tryToListen finds out whether listen can be listened on, so that this need not wait for endpoints. The port is left closed
// until the gateway is ready: who connects before is to be refused, not kept waiting. Sockets that were handed over are open
// already, and who connects to them does wait: that is what they are for.
func (g *Gateway) tryToListen(cfg *config.Config) error {
	if len(g.o.Listeners) > 0 {
		return nil
	}
	ln, err := listen("listen", cfg.Listen)
	if err != nil {
		return err
	}
	return ln.Close()
}

// listen returns the listeners for clients: those that were handed over, or listen.
func (g *Gateway) listen(cfg *config.Config) ([]net.Listener, error) {
	for _, ln := range g.o.Listeners {
		g.tellInherited("listen", cfg.Listen, ln)
	}
	if len(g.o.Listeners) > 0 {
		return g.o.Listeners, nil
	}
	ln, err := listen("listen", cfg.Listen)
	if err != nil {
		return nil, err
	}
	return []net.Listener{ln}, nil
}

// tellInherited logs that a socket that was handed over is used and, if that is not where key says, that key is not heeded.
func (g *Gateway) tellInherited(key, configured string, ln net.Listener) {
	_, want, _ := net.SplitHostPort(configured)
	_, got, _ := net.SplitHostPort(ln.Addr().String())
	if want == got {
		g.log.Info("listening on a socket of the service manager", zap.String("key", key), zap.Stringer("address", ln.Addr()))
		return
	}
	g.log.Warn("the service manager's socket is used, which is not where the configuration says: make the two agree",
		zap.String("key", key), zap.String("configured", configured), zap.Stringer("address", ln.Addr()))
}

// closeListeners closes what was handed over and may not have come into use. Closing twice is no harm.
func (g *Gateway) closeListeners() {
	for _, ln := range g.o.Listeners {
		_ = ln.Close()
	}
	if g.o.AdminListener != nil && g.AdminAddr() == "" { // the admin listener outlives the drain and ends by itself
		_ = g.o.AdminListener.Close()
	}
}

func listen(key, addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %s is in use by another process: %w", key, addr, syscall.EADDRINUSE)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	return ln, nil
}
