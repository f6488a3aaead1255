package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kvgate/bench/proxybench"
)

func newBenchProxy(e *env) *cobra.Command {
	var o proxybench.Options
	var out, format string
	c := &cobra.Command{
		Use:   "proxy [flags]",
		Short: "Measure what kvgate costs beside nginx, HAProxy and small Go proxies",
		Long: `Starts a model server that answers at once and clients for it, and has kvgate and other proxies stand between the two in
turn. It reports the proxy's own processor time per request or chunk, latency, throughput and memory: medians over
rounds, least and most in parentheses. nginx and HAProxy take part where they are installed. Numbers of different runs
or machines don't compare; the column "of nginx" does. Nothing else should run on the machine meanwhile.

` + proxybench.Help(),
		Example: `  kvgate bench proxy --out results
  kvgate bench proxy --quick
  kvgate bench proxy --scenario 1KB,SSE --candidate nginx,"kvgate 64" --rounds 10 --profile profiles`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if format != "svg" && format != "png" {
				return usage("", "--format: %q; want svg or png", format)
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Self, o.Progress = []string{self}, e.stderr
			r, err := proxybench.Run(c.Context(), o)
			if r == nil {
				return err
			}
			// What has been measured before an error is worth seeing.
			if werr := r.WriteText(e.stdout); err == nil {
				err = werr
			}
			if err != nil || out == "" {
				return err
			}
			return writeProxyBench(e, r, out, format)
		},
	}
	fl := c.Flags()
	fl.StringSliceVar(&o.Scenarios, "scenario", nil, "scenarios to run, by name (default all)")
	fl.StringSliceVar(&o.Candidates, "candidate", nil, "candidates to compare, by name (default those of the scenario)")
	fl.IntVar(&o.Rounds, "rounds", 5, "turns of each candidate in each scenario")
	fl.DurationVar(&o.Window, "window", time.Second, "how long a candidate is measured in a turn, where the scenario says nothing else")
	fl.BoolVar(&o.Quick, "quick", false, "a smoke test of less than a minute: one round, short windows")
	fl.StringVar(&o.ProfileDir, "profile", "", "write profiles of kvgate into this directory")
	fl.BoolVar(&o.Strace, "strace", false, "count system calls too, with strace, in a round of its own")
	fl.StringVar(&o.Against, "against", "", "another build of kvgate, for the candidates \"other 64\" and \"other 1000\"")
	fl.StringVar(&out, "out", "", "write samples.csv, table.md and a plot into this directory")
	fl.StringVar(&format, "format", "svg", "format of the plot: svg or png")
	return c
}

// newBenchSmall runs one of the small proxies, as a process of its own.
func newBenchSmall() *cobra.Command {
	return &cobra.Command{
		Use:     "proxy-small NAME LISTEN SERVER [CERT KEY]",
		Short:   "One of the small proxies that `bench proxy` compares with",
		Hidden:  true,
		Example: "  kvgate bench proxy-small reverseproxy 127.0.0.1:8081 127.0.0.1:8000",
		Args:    cobra.RangeArgs(3, 5),
		RunE: func(_ *cobra.Command, args []string) error {
			args = append(args, "", "")
			return proxybench.RunSmall(args[0], args[1], args[2], args[3], args[4])
		},
	}
}

func writeProxyBench(e *env, r *proxybench.Report, dir, format string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var files []string
	write := func(name string, f func(io.Writer) error) error {
		file, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		defer file.Close()
		if err := f(file); err != nil {
			return err
		}
		files = append(files, file.Name())
		return file.Close()
	}
	if err := write("samples.csv", r.WriteCSV); err != nil {
		return err
	}
	if err := write("table.md", r.WriteMarkdown); err != nil {
		return err
	}
	plot, err := r.Plot(dir, format)
	if err != nil {
		return err
	}
	if plot != "" {
		files = append(files, plot)
	}
	fmt.Fprintf(e.stderr, "wrote %s\n", strings.Join(files, ", "))
	return nil
}
