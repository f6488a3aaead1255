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

// runPoliciesLive is `bench policies --live`: one workload, in real time, through processes.
func runPoliciesLive(e *env, c *cobra.Command, f *benchFlags) error {
	fl := c.Flags()
	for _, name := range []string{
		"trace", "study", "out", "load", "seeds", "profile", "gateways", "scrape-every", "foreign", "estimate-error", "not-streamed", "batch-tokens",
	} {
		if fl.Changed(name) {
			return usage("kvgate bench policies --"+name+" …", "--%s works in virtual time alone, without --live", name)
		}
	}
	o := f.live
	switch {
	case len(f.workloads) > 1:
		return usage("kvgate bench policies --live --workload "+f.workloads[0], "--live runs one workload; got %d", len(f.workloads))
	case len(f.workloads) == 1 && !slices.Contains(workloadNames(), f.workloads[0]):
		return notOneOf(c, "workload", f.workloads[0], workloadNames())
	case len(f.workloads) == 1:
		o.Workload = f.workloads[0]
	}
	if !(o.Rate > 0) || !(o.Speedup > 0) {
		return usage("kvgate bench policies --live --live-rate 4.5 --live-speedup 2", "--live-rate %g, --live-speedup %g; want numbers above 0", o.Rate, o.Speedup)
	}
	if o.Requests = f.requests; o.Requests < 0 || fl.Changed("requests") && o.Requests == 0 {
		return usage("kvgate bench policies --live --requests 240", "--requests %d; want at least 1", o.Requests)
	}
	if fl.Changed("replicas") {
		if o.Servers = f.o.Replicas; o.Servers < 1 {
			return usage("kvgate bench policies --live --replicas 4", "--replicas %d; want at least 1", o.Servers)
		}
	}
	names := f.policies
	if len(names) == 0 {
		names = []string{"auto", "least_requests", "round_robin"}
	}
	for _, name := range names {
		i := slices.IndexFunc(benchPolicies(), func(q policies.Policy) bool { return q.Name == name })
		if i < 0 || !slices.Contains(scoring.PolicyNames(), name) {
			return notOneOf(c, "policy", name, scoring.PolicyNames())
		}
		o.Policies = append(o.Policies, benchPolicies()[i])
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o.Binary = []string{self}
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
}
