package cli

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/spf13/cobra"

	"kvgate/bench/livebench"
	"kvgate/bench/policies"
	"kvgate/scoring"
)

func newBenchLive(e *env) *cobra.Command {
	var o livebench.Options
	var names []string
	c := &cobra.Command{
		Use:   "live [flags]",
		Short: "Compare policies on live servers, and with what virtual time predicts",
		Long: `Starts simulated model servers and a real gateway as processes of their own, sends them one workload under each policy in
real time, and shows the times to first token that clients saw beside those that "bench policies" finds for the same requests.`,
		Example: `  kvgate bench live
  kvgate bench live --policy auto,round_robin --requests 500`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, name := range names {
				i := slices.IndexFunc(benchPolicies(), func(q policies.Policy) bool { return q.Name == name })
				if i < 0 || !slices.Contains(scoring.PolicyNames(), name) {
					return notOneOf(c, "policy", name, scoring.PolicyNames())
				}
				o.Policies = append(o.Policies, benchPolicies()[i])
			}
			if !slices.Contains(workloadNames(), o.Workload) {
				return notOneOf(c, "workload", o.Workload, workloadNames())
			}
			var err error
			if o.Binary, err = os.Executable(); err != nil {
				return err
			}
			o.Progress = func(what string) { fmt.Fprintln(e.stderr, what) }
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			rs, err := livebench.Run(ctx, o)
			if err != nil {
				return err
			}
			if err := livebench.Write(e.stdout, rs); err != nil {
				return err
			}
			if !livebench.Agree(rs, 0.1) {
				fmt.Fprintln(e.stdout, "\nThe order is another one than in virtual time.")
			}
			return nil
		},
	}
	fl := c.Flags()
	fl.StringSliceVar(&names, "policy", []string{"auto", "least_requests", "round_robin"}, "policies to compare, by name; the first is what the others are compared with")
	fl.StringVar(&o.Workload, "workload", "conversation", "workload to generate; see kvgate bench policies --help")
	fl.IntVar(&o.Servers, "servers", 4, "simulated model servers")
	fl.IntVar(&o.Requests, "requests", 240, "requests per policy")
	fl.Float64Var(&o.Rate, "rate", 4.5, "requests per second of the servers' time")
	fl.Float64Var(&o.Speedup, "speedup", 2, "how much faster than their GPU the servers are")
	fl.Uint64Var(&o.Seed, "seed", 1, "other requests at other times")
	complete(c, "policy", scoring.PolicyNames()...)
	complete(c, "workload", workloadNames()...)
	return c
}
