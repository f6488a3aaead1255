package cli

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kvgate/bench/livebench"
	"kvgate/bench/policies"
	"kvgate/internal/modelsim"
	"kvgate/scoring"
)

func newBench(e *env) *cobra.Command {
	c := &cobra.Command{
		Use:     "bench COMMAND",
		Short:   "Load your own servers, compare routing policies, measure what the data path costs",
		Example: "  kvgate bench live --target http://127.0.0.1:8080\n  kvgate bench policies --workload conversation\n  kvgate bench proxy --quick",
		RunE:    helpOrUnknown,
	}
	c.AddCommand(newBenchLive(e), newBenchPolicies(e), newBenchProxy(e), newBenchSmall())
	return c
}

// benchFlags are what `bench policies` takes.
type benchFlags struct {
	workloads, policies, profiles []string
	trace                         string
	traceBlock, traceAdapters     int
	traceSlots                    int
	traceSpread                   time.Duration
	requests, seeds               int
	loads                         []float64
	out, format, study            string
	o                             policies.Options
	inRealTime                    bool
	live                          livebench.Options
}

func newBenchPolicies(e *env) *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "policies [flags]",
		Short: "Compare routing policies in front of simulated GPU servers, in virtual time",
		Long: `Replays workloads against simulated engines that behave like vLLM and prints, for kvgate's policy and for published
rivals, the rate at which 95 % of requests keep their SLO (time to first token below max(2 s, 3 times the prompt's own
prefill), time per output token below 100 ms) and what clients see at shares of the oracle's rate.
Virtual time: one seed gives one result. One policy on one workload takes some seconds to a minute of a core, since its capacity
is searched for; all policies on all workloads, as without flags, take the better part of an hour: name some with --workload and
--policy, or say --requests. Standard error tells what is being run.

--live starts simulated model servers and a real gateway as processes instead, sends them one workload under each policy in
real time, and shows the times to first token that clients saw beside those of virtual time for the same requests.

` + workloadHelp() + "\n\n" + policyHelp(),
		Example: `  kvgate bench policies --workload conversation,lora64 --seeds 3
  kvgate bench policies --trace conversation.csv --trace-block 512 --trace-spread 3s
  kvgate bench policies --study docs/routing --seeds 5      # every figure of the documentation
  kvgate bench policies --workload tool --scrape-every 5s --gateways 4 --out results
  kvgate bench policies --live --policy auto,round_robin --requests 500`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if f.inRealTime {
				return runPoliciesLive(e, c, &f)
			}
			return runBenchPolicies(e, c, &f)
		},
	}
	fl := c.Flags()
	fl.StringSliceVar(&f.workloads, "workload", nil, "workloads to generate, by name (default all)")
	fl.StringVar(&f.trace, "trace", "", "replay this CSV file (columns t_ms,in,out[,blocks]) instead of generated workloads")
	fl.IntVar(&f.traceBlock, "trace-block", 0, "tokens that one block id of the trace stands for; 0 ignores blocks")
	fl.DurationVar(&f.traceSpread, "trace-spread", 0, "spread arrivals of the trace evenly over this time, for stamps that come in batches")
	fl.IntVar(&f.traceAdapters, "trace-adapters", 0, "put the trace's requests behind this many LoRA adapters, Zipf(1)")
	fl.IntVar(&f.traceSlots, "trace-slots", 8, "adapter slots per server for --trace-adapters")
	fl.StringSliceVar(&f.policies, "policy", nil, "policies to compare, by name (default all)")
	fl.IntVar(&f.requests, "requests", 0, "requests per generated workload (default enough for some minutes at capacity on 8 servers)")
	fl.IntVar(&f.seeds, "seeds", 1, "seeds; tables show means and standard deviations over them")
	fl.Float64SliceVar(&f.loads, "load", []float64{0.6, 0.85, 0.95}, "shares of the reference's capacity at which latencies are measured")
	fl.IntVar(&f.o.Replicas, "replicas", 8, "simulated servers")
	fl.StringSliceVar(&f.profiles, "profile", []string{modelsim.DefaultProfile}, "GPU and model of the servers, in turn: "+strings.Join(modelsim.ProfileNames(), ", "))
	fl.IntVar(&f.o.Gateways, "gateways", 1, "gateways that share nothing; requests go to one at random")
	fl.DurationVar(&f.o.ScrapeEvery, "scrape-every", 50*time.Millisecond, "age that a scrape of the metrics reaches")
	fl.Float64Var(&f.o.ForeignShare, "foreign", 0, "share of requests that someone else sends, unseen, 0..1")
	fl.Float64Var(&f.o.EstimateError, "estimate-error", 0, "error of kvgate's token estimates: 0.3 is ±30 %")
	fl.BoolVar(&f.o.NotStreamed, "not-streamed", false, "hide first tokens from the policies")
	fl.IntVar(&f.o.MaxBatchTokens, "batch-tokens", 0, "tokens per engine step (default the profile's)")
	fl.StringVar(&f.out, "out", "", "write runs.csv and plots into this directory")
	fl.StringVar(&f.study, "study", "", "compare everything that docs/routing.md shows and write tables, runs and plots into this directory")
	fl.BoolVar(&f.inRealTime, "live", false, "run one workload in real time, on 4 simulated servers as processes, 240 requests per policy")
	fl.Float64Var(&f.live.Rate, "live-rate", 4.5, "with --live: requests per second of the servers' time")
	fl.Float64Var(&f.live.Speedup, "live-speedup", 2, "with --live: how much faster than their GPU the servers are")
	fl.StringVar(&f.format, "format", "svg", "format of plots: svg or png")
	complete(c, "workload", workloadNames()...)
	complete(c, "policy", benchPolicyNames()...)
	complete(c, "profile", modelsim.ProfileNames()...)
	complete(c, "format", "svg", "png")
	return c
}

func workloadNames() (out []string) {
	for _, g := range policies.Generators {
		out = append(out, g.Name)
	}
	return out
}

func benchPolicyNames() (out []string) {
	for _, p := range benchPolicies() {
		out = append(out, p.Name)
	}
	return out
}

func workloadHelp() string {
	var b strings.Builder
	b.WriteString("Workloads:")
	for _, g := range policies.Generators {
		fmt.Fprintf(&b, "\n  %-14s %s", g.Name, g.Doc)
	}
	return b.String()
}

func policyHelp() string {
	var b strings.Builder
	b.WriteString("Policies:")
	for _, p := range benchPolicies() {
		fmt.Fprintf(&b, "\n  %-16s %s", p.Name, p.Doc)
	}
	return b.String()
}

func benchPolicies() []policies.Policy {
	ps := slices.Clone(policies.Rivals)
	return append(ps, policies.Auto,
		policies.Product("weights", "kvgate with the weights queue 2, kv_cache 2, prefix 3, lora_affinity 1", func() scoring.Config {
			return scoring.Config{Weights: map[string]float64{"queue": 2, "kv_cache": 2, "prefix": 3, "lora_affinity": 1}}
		}))
}

func runBenchPolicies(e *env, c *cobra.Command, f *benchFlags) error {
	p := policies.Plan{Options: f.o, Seeds: f.seeds, Loads: f.loads}
	p.Options.Profiles = f.profiles
	for _, name := range f.profiles {
		if !slices.Contains(modelsim.ProfileNames(), name) {
			return notOneOf(c, "profile", name, modelsim.ProfileNames())
		}
	}
	if f.format != "svg" && f.format != "png" {
		return usage("", "--format: %q; want svg or png", f.format)
	}
	if f.study != "" {
		return runStudy(e, c, f)
	}
	all := benchPolicies()
	for _, name := range f.policies {
		i := slices.IndexFunc(all, func(q policies.Policy) bool { return q.Name == name })
		if i < 0 {
			return notOneOf(c, "policy", name, benchPolicyNames())
		}
		p.Policies = append(p.Policies, all[i])
	}
	if len(f.policies) == 0 {
		p.Policies = all
	}
	if f.trace != "" {
		if _, err := os.Stat(f.trace); err != nil {
			return usage("", "--trace: %w", err)
		}
		p.Workloads = append(p.Workloads, f.readTrace)
	} else {
		names := f.workloads
		if len(names) == 0 {
			names = workloadNames()
		}
		for _, name := range names {
			g, ok := policies.GeneratorByName(name)
			if !ok {
				return notOneOf(c, "workload", name, workloadNames())
			}
			p.Workloads = append(p.Workloads, func(seed uint64) (*policies.Workload, error) { return g.Make(f.requests, seed), nil })
		}
	}
	p.Progress = func(done, total int, what string) {
		fmt.Fprintf(e.stderr, "[%d/%d] %s\n", done, total, what)
	}
	lines, err := p.Do(c.Context())
	if err != nil {
		return err
	}
	reference := p.Policies[0].Name
	if slices.ContainsFunc(p.Policies, func(q policies.Policy) bool { return q.Name == "oracle" }) {
		reference = "oracle"
	}
	fmt.Fprintf(e.stdout, "Capacity: requests/s at 95 %% within the SLO, and as a share of %s's (mean ±standard deviation over %d seeds)\n\n", reference, f.seeds)
	if err := policies.WriteCapacity(e.stdout, lines, reference); err != nil {
		return err
	}
	if err := policies.WriteLatency(e.stdout, lines, f.loads); err != nil {
		return err
	}
	if f.out == "" {
		return nil
	}
	return f.write(e, lines, reference)
}

// runStudy repeats every figure of docs/routing.md, with the trace as one workload more if there is one.
func runStudy(e *env, c *cobra.Command, f *benchFlags) error {
	maker := func(name string) policies.Maker {
		g, ok := policies.GeneratorByName(name)
		if !ok {
			panic("BUG: no workload " + name)
		}
		return policies.Maker{Name: name, Make: func(seed uint64) (*policies.Workload, error) { return g.Make(f.requests, seed), nil }}
	}
	s := policies.Study{Seeds: f.seeds, Engines: []string{"8b-a100", "70b-h100-tp4"}}
	names := f.policies
	if len(names) == 0 {
		names = []string{"least_requests", "llm-d", "llm-d+lora", "dynamo", "auto", "oracle"}
	}
	for _, name := range names {
		i := slices.IndexFunc(benchPolicies(), func(q policies.Policy) bool { return q.Name == name })
		if i < 0 {
			return notOneOf(c, "policy", name, benchPolicyNames())
		}
		s.Policies = append(s.Policies, benchPolicies()[i])
	}
	for _, name := range workloadNames() {
		s.Workloads = append(s.Workloads, maker(name))
	}
	if f.trace != "" {
		if _, err := os.Stat(f.trace); err != nil {
			return usage("", "--trace: %w", err)
		}
		s.Workloads = append(s.Workloads, policies.Maker{Name: f.traceName(), Make: f.readTrace})
	}
	s.OnEngines = []policies.Maker{maker("conversation"), maker("tool")}
	for _, name := range []string{"conversation", "tool", "rag", "lora128"} {
		s.Varied = append(s.Varied, maker(name))
	}
	began := time.Now()
	s.Progress = func(what string) { fmt.Fprintf(e.stderr, "%6.0f s  %s\n", time.Since(began).Seconds(), what) }
	found, err := s.Do(c.Context())
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.study, 0o755); err != nil {
		return err
	}
	files, err := found.Write(f.study, f.format)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stderr, "wrote %s\n", strings.Join(files, ", "))
	found.WriteTables(e.stdout)
	return nil
}

func (f *benchFlags) traceName() string {
	return strings.TrimSuffix(filepath.Base(f.trace), filepath.Ext(f.trace))
}

func (f *benchFlags) readTrace(seed uint64) (*policies.Workload, error) {
	file, err := os.Open(f.trace)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	name := f.traceName()
	rnd := rand.New(rand.NewPCG(seed, 0x7472616365))
	w, err := policies.ReadTrace(file, name, f.traceBlock, f.traceSpread, rnd)
	if err != nil || f.traceAdapters == 0 {
		return w, err
	}
	return policies.WithAdapters(w, f.traceAdapters, f.traceSlots, 32, rnd), nil
}

func (f *benchFlags) write(e *env, lines []policies.Line, reference string) error {
	if err := os.MkdirAll(f.out, 0o755); err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(f.out, "runs.csv"))
	if err != nil {
		return err
	}
	defer file.Close()
	if err := policies.WriteCSV(file, lines, f.loads); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	plot := filepath.Join(f.out, "capacity."+f.format)
	if err := policies.PlotCapacity(plot, lines, reference); err != nil {
		return err
	}
	plots, err := policies.PlotTTFT(f.out, f.format, lines, f.loads)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stderr, "wrote %s\n", strings.Join(append([]string{file.Name(), plot}, plots...), ", "))
	return nil
}
