package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
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
nothing. SIGTERM and SIGINT drain: /-/ready fails at once, after drain.delay no new requests are accepted, and what still
runs after drain.timeout is cut off. A second signal cuts it off at once, with exit code 4.`,
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

// serve runs a gateway until a signal ends it.
func serve(ctx context.Context, e *env, file string, o gateway.Options) error {
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
	g, err := gateway.New(cfg, o)
	if err != nil {
		return withTry(err, "kvgate check %s", file)
	}
	var handling sync.WaitGroup
	done := make(chan struct{})
	handling.Go(func() {
		for {
			select {
			case s := <-signals:
				switch {
				case s == syscall.SIGHUP:
					_, _ = g.Reload("SIGHUP") // it logs what is wrong
				case ctx.Err() == nil:
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
