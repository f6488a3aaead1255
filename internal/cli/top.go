package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/spf13/cobra"

	"kvgate/internal/admin"
	"kvgate/internal/top"
)

func newTop(e *env) *cobra.Command {
	var a adminClient
	var o top.Options
	var once, asJSON bool
	var width int
	c := &cobra.Command{
		Use:   "top [flags]",
		Short: "Show a running gateway in the terminal: pools, endpoints, the last requests and why they went where",
		Long: `Show a running gateway in the terminal, as the dashboard does in a browser: pools, endpoints, the last requests, and of
each why it went where it went. ? lists the keys. Without a terminal, --once prints one picture.`,
		Example: `  kvgate top
  kvgate top --sort kv
  kvgate top --once --json | jq '.endpoints[] | select(.kv_cache_utilization > 0.9).id'`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if asJSON && !once {
				return usage("kvgate top --once --json", "--json goes with --once")
			}
			if o.Every < 100*time.Millisecond {
				return usage("kvgate top --every 1s", "--every %s; want at least 100ms", o.Every)
			}
			o.Live = func(ctx context.Context) (*admin.LiveView, error) {
				var v admin.LiveView
				return &v, a.get(ctx, "/debug/live?once=1", &v)
			}
			o.Request = func(ctx context.Context, number uint64) (*admin.DecisionView, error) {
				var d admin.DecisionView
				return &d, a.get(ctx, "/debug/decisions/"+strconv.FormatUint(number, 10), &d)
			}
			noColor, _ := e.lookup("NO_COLOR")
			o.Plain = noColor != ""
			v, err := top.New(o)
			if err != nil {
				return usage("kvgate top --sort kv", "--sort: %w", err)
			}
			if once {
				return topOnce(c.Context(), e, &o, v, asJSON, width)
			}
			return topScreen(c.Context(), v)
		},
	}
	fl := c.Flags()
	fl.DurationVar(&o.Every, "every", time.Second, "time between two looks")
	fl.StringVar(&o.Sort, "sort", "", "column to sort by at first")
	fl.StringVar(&o.Filter, "filter", "", "show only endpoints that have these words in their name, state or adapters")
	fl.BoolVar(&once, "once", false, "print one picture and end")
	fl.BoolVar(&asJSON, "json", false, "with --once: print JSON")
	fl.IntVar(&width, "width", 80, "with --once: columns of the picture")
	complete(c, "sort", top.Columns()...)
	adminFlags(c, &a)
	return c
}

func topOnce(ctx context.Context, e *env, o *top.Options, v *top.View, asJSON bool, width int) error {
	l, err := o.Live(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(e, l)
	}
	v.Take(l, nil)
	_, err = fmt.Fprint(e.stdout, v.Text(max(80, width)))
	return err
}

// topScreen runs v on the terminal, and leaves that as it was whatever happens.
func topScreen(ctx context.Context, v *top.View) error {
	s, err := tcell.NewScreen()
	if err == nil {
		err = s.Init()
	}
	if err != nil {
		return withTry(fmt.Errorf("no terminal to draw on: %w", err), "kvgate top --once")
	}
	defer s.Fini()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	return v.Run(ctx, s)
}
