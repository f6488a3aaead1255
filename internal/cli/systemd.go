package cli

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"

	"kvgate/config"
	"kvgate/internal/gateway"
)

// adminSocket is the FileDescriptorName of a socket unit whose socket is for the admin listener. All others are for clients.
const adminSocket = "admin"

// inherited returns the listening sockets that the service manager has opened for this process (LISTEN_FDS, see
// sd_listen_fds(3)), if any.
func inherited() (clients []net.Listener, admin net.Listener, err error) {
	files := activation.Files(true)
	defer func() {
		for _, f := range files {
			_ = f.Close() // a listener has a descriptor of its own
		}
		if err != nil {
			closeAll(clients...)
			if admin != nil {
				_ = admin.Close()
			}
			clients, admin = nil, nil
		}
	}()
	for i, f := range files {
		ln, err := net.FileListener(f)
		if err == nil {
			if _, tcp := ln.(*net.TCPListener); !tcp {
				err = fmt.Errorf("it is a %s socket", ln.Addr().Network())
				_ = ln.Close()
			}
		}
		switch {
		case err != nil:
			return clients, admin, withTry(fmt.Errorf("socket %d (%s) of the service manager cannot be used: %w; want a listening TCP socket", i+1, f.Name(), err),
				"ListenStream=8080 in the socket unit")
		case f.Name() != adminSocket:
			clients = append(clients, ln)
		case admin != nil:
			_ = ln.Close()
			return clients, admin, withTry(fmt.Errorf("two sockets of the service manager are named %s", adminSocket), "one ListenStream in that socket unit")
		default:
			admin = ln
		}
	}
	return clients, admin, nil
}

func closeAll(lns ...net.Listener) {
	for _, ln := range lns {
		_ = ln.Close()
	}
}

// notify tells the service manager something (sd_notify(3)). Without one, nothing happens; where one does not listen, there
// is nobody else to tell.
func notify(lines ...string) { _, _ = daemon.SdNotify(false, strings.Join(lines, "\n")) }

// notifyReloading and notifyReady are the two ends of a reload, as Type=notify-reload wants them; the clock tells the
// service manager that this is the reload that it has asked for.
func notifyReloading() {
	notify(daemon.SdNotifyReloading, strings.TrimSpace(daemon.SdNotifyMonotonicUsec()))
}

func notifyReady(status string) {
	line, _, _ := strings.Cut(status, "\n")
	notify(daemon.SdNotifyReady, "STATUS="+line)
}

// notifyStopping says how long the drain may take, so that the service manager waits whatever its TimeoutStopSec.
func notifyStopping(d *config.Drain) {
	most := d.Delay + d.Timeout + unwinding
	notify(daemon.SdNotifyStopping, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", most.Microseconds()), "STATUS=draining")
}

// unwinding is what a stop takes besides drain.delay and drain.timeout, at most.
const unwinding = 15 * time.Second

// watchdog answers for g while it is alive, if the service manager wants to hear of it (WatchdogSec).
func watchdog(ctx context.Context, g *gateway.Gateway) {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every <= 0 {
		return
	}
	t := time.NewTicker(every / 3)
	defer t.Stop()
	for last := uint64(0); ; {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		if n := g.Beats(); n != last {
			last = n
			notify(daemon.SdNotifyWatchdog)
		}
	}
}
