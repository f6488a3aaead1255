package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kvgate/internal/demo"
	"kvgate/scoring"
)

func newDemo(e *env) *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "demo [--keep]",
		Short: "See the gateway work: four simulated GPU servers, round robin against kvgate's policy",
		Long: `Starts four simulated GPU servers (two base models, several adapters, one server nearly full) and the real gateway on
loopback, sends it the same chat requests under two policies, shows where some of them go and why, and ends within a minute
with a table. It needs no GPU, no network and no configuration.`,
		Example: `  kvgate demo
  kvgate demo --keep                # then stay up for curl`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case c.Flags().Changed("rate") && (o.PerSecond <= 0 || o.PerSecond > 1000):
				return usage("kvgate demo --rate 6", "--rate %g; want a number above 0, up to 1000", o.PerSecond)
			case c.Flags().Changed("length") && (o.Length <= 0 || o.Length > time.Hour):
				return usage("kvgate demo --length 15s", "--length %s; want a duration above 0, up to 1h", o.Length)
			}
			for _, p := range o.Policies {
				if !slices.Contains(scoring.PolicyNames(), p) {
					return notOneOf(c, "policy", p, scoring.PolicyNames())
				}
			}
			o.Out = e.stdout
			o.Color, o.Width = terminal(e.stdout, e.lookup)
			if filepath.Base(os.Args[0]) == "kvgate" {
				o.Self = os.Args[0] // ./kvgate, where it is not in the path
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			_, err := demo.Run(ctx, o)
			if errors.Is(err, context.Canceled) && ctx.Err() != nil {
				return nil // ctrl-c
			}
			return err
		},
	}
	fl := c.Flags()
	fl.BoolVar(&o.Keep, "keep", false, "stay up afterwards, and print commands to try")
	fl.BoolVar(&o.Verbose, "verbose", false, "show every request, not one in a few")
	fl.DurationVar(&o.Length, "length", 0, "length of the traffic under each policy (default 15s)")
	fl.Float64Var(&o.PerSecond, "rate", 0, "requests a second (default 6)")
	fl.Uint64Var(&o.Seed, "seed", 1, "other requests at other times")
	fl.StringSliceVar(&o.Policies, "policy", nil, "policies to compare, in order (default round_robin,auto)")
	fl.StringVar(&o.Listen, "listen", "127.0.0.1:8080", "with --keep: where the gateway listens, if that is free")
	fl.StringVar(&o.AdminAddr, "admin-listen", "127.0.0.1:9090", "with --keep: where its admin listener listens, if that is free")
	complete(c, "policy", scoring.PolicyNames()...)
	return c
}

// terminal reports whether w is a terminal that may be coloured (https://no-color.org), and how wide it is; 0 is unknown.
func terminal(w io.Writer, lookup func(string) (string, bool)) (color bool, width int) {
	if c, ok := w.(*checkedWriter); ok {
		w = c.w
	}
	f, ok := w.(*os.File)
	if !ok {
		return false, 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return false, 0
	}
	width = int(size.Col)
	if s, _ := lookup("COLUMNS"); s != "" {
		if n, err := strconv.Atoi(s); err == nil && n > 0 {
			width = n
		}
	}
	noColor, _ := lookup("NO_COLOR")
	term, _ := lookup("TERM")
	return noColor == "" && term != "dumb", width
}
