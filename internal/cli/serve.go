package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/gateway"
)

func newServe(e *env) *cobra.Command {
	var file string
	var startTimeout, watch time.Duration
	c := &cobra.Command{
		Use:     "serve -c FILE",
		Aliases: []string{"run"},
		Short:   "Run the gateway in the foreground",
		Long: `Run the gateway in the foreground, as FILE says.

SIGHUP, a change of the file, or POST /-/reload on the admin listener reload it: all of it or, if anything in it is wrong,
nothing. SIGTERM and SIGINT (Ctrl-C) drain: /-/ready fails at once, after drain.delay, also with nothing running, no new
requests are accepted, and what still runs after drain.timeout is cut off. A second signal cuts it off at once, with exit code 4.

Under systemd it says when it is ready, reloading and stopping (Type=notify-reload), and serves on the sockets of a socket
unit, if there is one: a restart then refuses no connection. A socket named admin is the admin listener's.`,
		Example: `  kvgate serve -c config.yaml
  kvgate check config.yaml && kvgate reload`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if file == "" {
				return usage("kvgate serve -c config.yaml; kvgate config default prints one to begin with", "serve needs a configuration file")
			}
			return serve(c.Context(), e, file, gateway.Options{StartTimeout: startTimeout, WatchEvery: watch})
		},
	}
	fl := c.Flags()
	fl.StringVarP(&file, "config", "c", "", "configuration file")
	fl.DurationVar(&startTimeout, "start-timeout", 10*time.Second, "wait this long for a first look at the endpoints before listening all the same")
	fl.DurationVar(&watch, "watch", 2*time.Second, "look for changes of the file this often; negative: never")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	envFlags(c, "config")
	return c
}

// gcPercent is how much garbage may gather, in percent of what is in use, unless GOGC says otherwise. What is in use
// includes the prefix index, 64 MiB that the collector need not look at; with Go's 100 as much garbage would lie beside it.
// A collection of the memory of 5,000 streams takes some milliseconds, and garbage comes by a few megabytes a second.
const gcPercent = 40

// serve runs a gateway until a signal ends it.
func serve(ctx context.Context, e *env, file string, o gateway.Options) error {
	if os.Getenv("GOGC") == "" {
		defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	}
	// Before the first load: a SIGHUP that comes while it starts must not end the process.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGTERM, os.Interrupt)
	signal.Ignore(syscall.SIGPIPE) // a log reader that went away is no reason to die
	defer signal.Stop(signals)

	load := func() (*config.Config, error) { return config.Load(file, gateway.ConfigOptions()) }
	cfg, err := load()
	if err != nil {
		return withTry(err, "kvgate check %s", file)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	cut, cutNow := context.WithCancel(context.Background())
	defer cutNow()
	o.Load, o.LogOutput, o.Cut = load, e.stderr, cut
	if o.Listeners, o.AdminListener, err = inherited(); err != nil {
		return err
	}
	g, err := gateway.New(cfg, o)
	if err != nil {
		closeAll(o.Listeners...)
		return withTry(err, "kvgate check %s", file)
	}
	var handling sync.WaitGroup
	done := make(chan struct{})
	beating, stopBeating := context.WithCancel(context.Background())
	handling.Go(func() { watchdog(beating, g) })
	handling.Go(func() {
		ready := g.Ready()
		for {
			select {
			case <-ready:
				ready = nil
				notifyReady("serving on " + g.Addr())
			case s := <-signals:
				switch {
				case s == syscall.SIGHUP && ready != nil: // it is not ready, and must not say so
					_, _ = g.Reload("SIGHUP")
				case s == syscall.SIGHUP:
					notifyReloading()
					if _, err := g.Reload("SIGHUP"); err != nil { // it has logged what is wrong
						notifyReady("reload refused, what was in use stays: " + err.Error())
					} else {
						notifyReady("serving on " + g.Addr())
					}
				case ctx.Err() == nil:
					notifyStopping(&cfg.Drain)
					stop()
				default:
					cutNow()
				}
			case <-done:
				return
			}
		}
	})
	res, err := g.Run(ctx)
	close(done)
	stopBeating()
	handling.Wait()
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return withTry(err, "ss -ltnp, which shows who listens there; or another address in %s", file)
	case err != nil:
		return err
	case res.Forced:
		were := "were"
		if res.Cut == 1 {
			were = "was"
		}
		return exitError{exitForced, fmt.Errorf("stopped at once; %s %s cut off", count(res.Cut, "request"), were)}
	}
	return nil
}
