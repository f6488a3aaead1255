package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kvgate/bench/replay"
	"kvgate/internal/modelsim"
)

// replayFlags are what `kvgate replay` takes.
type replayFlags struct {
	o            replay.Options
	read         replay.ReadOptions
	from         string
	profile      string
	kvTokens     int
	prefillRate  float64
	tokenTime    time.Duration
	calibrate    bool
	findCapacity bool
	want         float64
	json, csv    bool
}

func newReplay(e *env) *cobra.Command {
	var f replayFlags
	c := &cobra.Command{
		Use:   "replay FILE... [flags]",
		Short: "Play recorded traffic in a simulation: with other policies, more or fewer servers, more traffic",
		Long: `Plays what kvgate serve recorded (record.file in the configuration) against simulated servers that behave like vLLM, in
virtual time, with kvgate's own table and policies, and says what clients would have seen: with other policies, more or fewer
endpoints, other servers, more traffic. First it simulates what was recorded as it was, and says how far that is from what was
measured, so that you know how much to believe of the rest.

FILE is a record, one or several files that belong together; usage records (usage.file), which don't tell which prompts begin
alike; or a trace: CSV with the columns t_ms,in,out[,blocks], or Mooncake's JSON lines.

Profiles: ` + strings.Join(modelsim.ProfileNames(), ", ") + `. They are GPUs with a model; --calibrate, or --prefill-rate and
--token-time, make others of them.

Policies: ` + strings.Join(replay.PolicyNames(), ", ") + `, or weights such as queue=2+prefix=3.`,
		Example: `  kvgate replay record.jsonl                                          # how good is the simulation?
  kvgate replay record.jsonl --calibrate --replicas 6,8,10            # two servers less, two more
  kvgate replay record.jsonl --policy auto,least_requests
  kvgate replay record.jsonl --speed 1.5 --find-capacity --want 0.99  # half as much traffic again
  kvgate replay record.jsonl record.jsonl.1 --busiest 1h --profile 70b-h100-tp4`,
		Args: atLeastOne("a record"),
		RunE: func(c *cobra.Command, files []string) error { return runReplay(e, c, files, &f) },
	}
	fl := c.Flags()
	fl.StringSliceVar(&f.o.Policies, "policy", nil, "policies to compare (default the recorded one)")
	fl.IntSliceVar(&f.o.Replicas, "replicas", nil, "numbers of endpoints to compare (default as many as were recorded)")
	fl.StringVar(&f.profile, "profile", modelsim.DefaultProfile, "GPU and model of the endpoints")
	fl.IntVar(&f.kvTokens, "kv-tokens", 0, "KV cache of an endpoint, in tokens (default as recorded, or the profile's)")
	fl.Float64Var(&f.prefillRate, "prefill-rate", 0, "tokens of prompts that an endpoint computes in a second (default the profile's)")
	fl.DurationVar(&f.tokenTime, "token-time", 0, "time per output token of a request that is alone on an endpoint (default the profile's)")
	fl.BoolVar(&f.calibrate, "calibrate", false, "fit the speed of the endpoints to what was measured")
	fl.Float64Var(&f.o.Speed, "speed", 1, "speed of the traffic: 1.2 is 20 % more requests per second than recorded")
	fl.IntVar(&f.o.AdapterSlots, "adapter-slots", 0, "adapters that fit into a batch of an endpoint (default as recorded, or 4)")
	fl.IntVar(&f.o.HostAdapters, "host-adapters", 0, "adapters that stay in an endpoint's memory (default 32)")
	fl.DurationVar(&f.o.SLOTTFT, "slo-ttft", 0, "time in which the first token has to come (default max(2s, 3 times the prompt's own prefill))")
	fl.DurationVar(&f.o.SLOTPOT, "slo-tpot", 0, "time per output token after it (default 100ms)")
	fl.BoolVar(&f.findCapacity, "find-capacity", false, "find the smallest fleet that holds the SLO, for each policy")
	fl.Float64Var(&f.want, "want", 0.95, "share of the requests that --find-capacity wants within the SLO, 0..1")
	fl.StringVar(&f.read.Pool, "pool", "", "pool whose requests are replayed (default the only one)")
	fl.StringVar(&f.from, "from", "", "leave out what came before this time, such as 2026-01-05T09:00:00Z")
	fl.DurationVar(&f.read.For, "for", 0, "leave out what came later than this after the first request")
	fl.DurationVar(&f.read.Busiest, "busiest", 0, "take the time of this length in which most tokens came, such as 1h")
	fl.IntVar(&f.read.Requests, "max-requests", replay.DefaultRequests, "requests that are replayed at most; 200,000 take about a gigabyte")
	fl.IntVar(&f.o.Recorded, "recorded-replicas", 0, "how many endpoints there were, where the file doesn't say")
	fl.IntVar(&f.read.TraceBlock, "trace-block", 0, "tokens that one block id of a trace stands for (default 512)")
	fl.DurationVar(&f.read.TraceSpread, "trace-spread", 0, "spread arrivals of a trace evenly over this time, for stamps that come in batches (Mooncake: 3s)")
	fl.DurationVar(&f.o.ScrapeEvery, "scrape-every", time.Second, "how often endpoints' metrics are read")
	fl.Uint64Var(&f.o.Seed, "seed", 0, "changes how ties are broken")
	fl.BoolVar(&f.json, "json", false, "print one JSON object")
	fl.BoolVar(&f.csv, "csv", false, "print a line of CSV per policy and number of endpoints")
	complete(c, "policy", replay.PolicyNames()...)
	complete(c, "profile", modelsim.ProfileNames()...)
	return c
}

// check reports the first flag that can't be.
func (f *replayFlags) check(c *cobra.Command) error {
	if !slices.Contains(modelsim.ProfileNames(), f.profile) {
		return notOneOf(c, "profile", f.profile, modelsim.ProfileNames())
	}
	for _, name := range f.o.Policies {
		if _, err := replay.Policy(name); err != nil {
			if !strings.Contains(name, "=") {
				return notOneOf(c, "policy", name, replay.PolicyNames())
			}
			return usage("kvgate replay --policy queue=2+prefix=3 FILE", "--policy: %w", err)
		}
	}
	for _, n := range f.o.Replicas {
		if n < 1 || n > 1024 {
			return usage("kvgate replay --replicas 6,8,10 FILE", "--replicas %d; want 1 to 1024", n)
		}
	}
	positive := func(name string, v float64) error {
		if v < 0 || c.Flags().Changed(name) && v == 0 {
			return usage("kvgate replay --help", "--%s %s; want more than 0", name, c.Flags().Lookup(name).Value)
		}
		return nil
	}
	for _, err := range []error{
		positive("speed", f.o.Speed), positive("kv-tokens", float64(f.kvTokens)), positive("prefill-rate", f.prefillRate), positive("token-time", float64(f.tokenTime)),
		positive("slo-ttft", float64(f.o.SLOTTFT)), positive("slo-tpot", float64(f.o.SLOTPOT)), positive("adapter-slots", float64(f.o.AdapterSlots)),
		positive("host-adapters", float64(f.o.HostAdapters)), positive("for", float64(f.read.For)), positive("busiest", float64(f.read.Busiest)),
		positive("max-requests", float64(f.read.Requests)), positive("recorded-replicas", float64(f.o.Recorded)), positive("scrape-every", float64(f.o.ScrapeEvery)),
	} {
		if err != nil {
			return err
		}
	}
	switch {
	case f.o.Recorded > 1024:
		return usage("", "--recorded-replicas %d; want 1 to 1024", f.o.Recorded)
	case f.o.ScrapeEvery < 10*time.Millisecond:
		return usage("", "--scrape-every %v; want 10ms or more", f.o.ScrapeEvery)
	case !(f.want > 0 && f.want <= 1):
		return usage("kvgate replay --find-capacity --want 0.99 FILE", "--want %g; want a share of the requests, above 0 and at most 1", f.want)
	case f.calibrate && (f.prefillRate > 0 || f.tokenTime > 0):
		return usage("", "--calibrate finds what --prefill-rate and --token-time say; want one or the other")
	case f.json && f.csv:
		return usage("", "--json and --csv; want one of them")
	}
	return nil
}

// server is the profile that the flags describe; kv is the KV cache as recorded, 0 if that is not known.
func (f *replayFlags) server(kv int64) (modelsim.Profile, error) {
	p, err := modelsim.ProfileByName(f.profile)
	if err != nil {
		return p, err
	}
	if f.prefillRate > 0 || f.tokenTime > 0 {
		if p, err = p.WithSpeed(f.prefillRate, f.tokenTime); err != nil {
			return p, usage("", "--prefill-rate, --token-time: %w", err)
		}
	}
	switch {
	case f.kvTokens > 0:
		p.KVTokens = f.kvTokens
	case kv > 0:
		p.KVTokens = int(min(kv, 1<<30))
	}
	if p.KVTokens < 1024 {
		return p, usage("", "a KV cache of %d tokens; want 1024 or more: --kv-tokens", p.KVTokens)
	}
	return p, nil
}

func runReplay(e *env, c *cobra.Command, files []string, f *replayFlags) error {
	if err := f.check(c); err != nil {
		return err
	}
	if f.from != "" {
		var err error
		if f.read.From, err = time.Parse(time.RFC3339, f.from); err != nil {
			return usage("kvgate replay --from 2026-01-05T09:00:00Z FILE", "--from %q; want a date and time as in RFC 3339", f.from)
		}
	}
	ctx := c.Context()
	f.read.Seed = f.o.Seed + 1
	rec, err := replay.Read(files, f.read)
	if err != nil {
		return err
	}
	for _, w := range rec.Warnings {
		fmt.Fprintf(e.stderr, "warning: %s\n", w)
	}
	if f.o.Server, err = f.server(rec.Fleet.KVTokens); err != nil {
		return err
	}
	f.o.Progress = func(what string) { fmt.Fprintf(e.stderr, "simulating %s\n", what) }
	p, err := replay.New(rec, f.o)
	if err != nil {
		return err
	}
	rep := &replay.Report{Replay: p, Profile: f.profile, Want: f.want}
	if f.calibrate {
		cal, err := p.Calibrate()
		if err != nil {
			return err
		}
		rep.Calibration = &cal
	}
	if rep.Comparison, err = p.Compare(); err != nil {
		return err
	}
	if f.findCapacity {
		for _, name := range p.Policies() {
			found, err := p.FindCapacity(ctx, name, f.want)
			if err != nil {
				return err
			}
			rep.Capacities = append(rep.Capacities, found)
		}
	}
	if !f.findCapacity || c.Flags().Changed("replicas") {
		if rep.Runs, err = p.Runs(ctx); err != nil {
			return err
		}
	}
	switch {
	case f.json:
		return rep.WriteJSON(e.stdout)
	case f.csv:
		return rep.WriteCSV(e.stdout)
	}
	return rep.WriteText(e.stdout)
}
