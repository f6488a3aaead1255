package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"kvgate/bench/load"
	"kvgate/internal/modelsim"
)

// loadFlags are what `bench live` takes beside load.Options.
type loadFlags struct {
	o                          load.Options
	targets, keyFiles, keyEnvs []string
	extra, html                string
	asJSON                     bool
}

func newBenchLive(e *env) *cobra.Command {
	f := loadFlags{o: load.New()}
	o := &f.o
	c := &cobra.Command{
		Use:   "live --target URL [flags]",
		Short: "Load your own servers or gateway and measure what clients see; compare two, fairly",
		Long: `Sends requests of the OpenAI API to servers, or to a gateway in front of them, and reports what clients see: time to first
token, time per output token, whole requests, throughput and failures. Ctrl-C ends a run early and reports what there is.

Requests arrive by themselves (--rate), whether or not earlier ones were answered, and their times count from when they should
have been sent; or --clients clients ask again as soon as they are answered. With two targets, each pair of requests is one to
either of the same lengths at the same rate, in an order that is drawn; --slice gives each target all the traffic in turn, for
targets that share servers. No prompt begins like one of the other target or of an earlier run, so that no cache is warm.

Distributions: a number, uniform:LEAST-MOST, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, exp:MEAN.`,
		Example: `  kvgate bench live --target http://127.0.0.1:8080 --rate 10 --duration 2m --html report.html
  kvgate bench live --target http://127.0.0.1:8080 --clients 32 --input lognormal:800,0.8 --output exp:200 --prefixes 20
  kvgate bench live --target http://127.0.0.1:8080 --adapter 'lora-{1..64}' --zipf 1.2 --turns 4 --think exp:5
  kvgate bench live --target direct=http://10.0.0.7:8000 --target gateway=http://127.0.0.1:8080 --duration 5m`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchLive(e, c, &f) },
	}
	fl := c.Flags()
	fl.StringArrayVar(&f.targets, "target", nil, "URL of a server or gateway, or NAME=URL; twice to compare two")
	fl.StringArrayVar(&f.keyFiles, "key-file", nil, "file with the API key, or NAME=FILE for one target")
	fl.StringArrayVar(&f.keyEnvs, "key-env", nil, "environment variable with the API key, or NAME=VARIABLE for one target")
	fl.StringVar(&o.API, "api", o.API, "chat or completions")
	fl.StringVar(&o.Model, "model", "", "model to ask for (default the first that the first target lists)")
	fl.StringSliceVar(&o.Adapters, "adapter", nil, "adapters to ask for instead, the most popular first; lora-{1..64} is 64 names")
	fl.Float64Var(&o.Zipf, "zipf", o.Zipf, "how popular the first adapters are: the exponent of Zipf's law; 0: all alike")
	fl.BoolVar(&o.Stream, "stream", o.Stream, "have answers streamed")
	fl.BoolVar(&o.NoUsage, "no-usage", false, "don't ask for stream_options.include_usage; an event then counts as a token")
	fl.StringVar(&f.extra, "extra", "", `JSON object with more fields for each body, such as {"ignore_eos":true}`)
	fl.StringVar(&o.Arrival, "arrival", "", "poisson, constant, burst or closed (default poisson, or closed with --clients)")
	fl.Float64Var(&o.Rate, "rate", o.Rate, "requests per second in the long run, over all targets")
	fl.IntVar(&o.Burst, "burst", 0, "requests that arrive together (default 10 with --arrival burst)")
	fl.IntVar(&o.Clients, "clients", 0, "clients of a closed loop")
	fl.DurationVar(&o.Duration, "duration", 0, "how long requests arrive that count (default 1m, without --requests)")
	fl.IntVar(&o.Requests, "requests", 0, "requests that count, over all targets")
	fl.DurationVar(&o.WarmUp, "warm-up", 0, "how long requests arrive before that, which don't count")
	fl.DurationVar(&o.Timeout, "timeout", o.Timeout, "when a request has failed")
	fl.IntVar(&o.MaxInFlight, "max-in-flight", o.MaxInFlight, "conversations at a time, with --rate; more wait, and that counts")
	fl.DurationVar(&o.Slice, "slice", 0, "give each of two targets all the traffic in turn, for so long")
	fl.Var(&o.Input, "input", "tokens of a prompt (about: words), without prefix and earlier turns")
	fl.Var(&o.Output, "output", "tokens of an answer, at most")
	fl.IntVar(&o.Prefixes, "prefixes", 0, "how many system prompts there are; each conversation has one of them")
	fl.Var(&o.PrefixTokens, "prefix-tokens", "tokens of a system prompt")
	fl.Float64Var(&o.PrefixZipf, "prefix-zipf", 0, "how popular the first system prompts are; 0: all alike")
	fl.Var(&o.Turns, "turns", "requests of a conversation, each with all before it")
	fl.Var(&o.Think, "think", "seconds between an answer and the next turn")
	fl.Uint64Var(&o.Seed, "seed", o.Seed, "other requests at other times")
	fl.StringVar(&o.Salt, "salt", "", "words that begin every prompt; that of an earlier run finds its caches warm (default drawn)")
	fl.StringVar(&f.html, "html", "", "write a report with plots into this file")
	fl.BoolVar(&f.asJSON, "json", false, "print JSON instead of tables")
	_ = c.MarkFlagFilename("key-file")
	_ = c.MarkFlagFilename("html", "html")
	complete(c, "api", load.APIs...)
	complete(c, "arrival", load.Arrivals...)
	return c
}

func runBenchLive(e *env, c *cobra.Command, f *loadFlags) error {
	if err := f.finish(e, c); err != nil {
		return err
	}
	var page *os.File
	if f.html != "" { // before the run: it may be a long one
		var err error
		if page, err = os.Create(f.html); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
		defer page.Close()
	}
	ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() { <-ctx.Done(); stop() }() // the second ctrl-c kills
	var done func()
	f.o.Progress, done = progressBar(e)
	r, err := load.Run(ctx, f.o)
	done()
	if err != nil {
		return usageIfOptions(err)
	}
	write := r.WriteText
	if f.asJSON {
		write = r.WriteJSON
	}
	if err := write(e.stdout); err != nil {
		return err
	}
	if page != nil {
		if err := errors.Join(r.WriteHTML(page), page.Close()); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
		fmt.Fprintf(e.stderr, "wrote %s\n", f.html)
	}
	for _, t := range r.Targets {
		if t.Answered > 0 || t.Requests == t.Interrupted {
			return nil
		}
	}
	return errors.New("no request was answered")
}

// finish makes options of flags that depend on each other.
func (f *loadFlags) finish(e *env, c *cobra.Command) error {
	o, fl := &f.o, c.Flags()
	if len(f.targets) == 0 {
		return usage("kvgate bench live --target http://127.0.0.1:8080", "--target says what to ask")
	}
	for _, text := range f.targets {
		t, err := load.ParseTarget(text)
		if err != nil {
			return usage("kvgate bench live --target http://127.0.0.1:8080", "--target: %w", err)
		}
		o.Targets = append(o.Targets, t)
	}
	if err := f.keys(e); err != nil {
		return err
	}
	var err error
	if o.Adapters, err = load.ExpandNames(o.Adapters); err != nil {
		return usage("", "--adapter: %w", err)
	}
	if o.Model != "" && len(o.Adapters) > 0 {
		return usage("", "--model and --adapter: want one of the two; --adapter takes models too")
	}
	if f.extra != "" {
		if err := json.Unmarshal([]byte(f.extra), &o.Extra); err != nil {
			return usage(`--extra '{"ignore_eos":true}'`, "--extra: %w", modelsim.JSONError(err))
		}
	}
	switch {
	case o.Arrival == "" && fl.Changed("clients"):
		o.Arrival = "closed"
	case o.Arrival == "" && fl.Changed("burst"):
		o.Arrival = "burst"
	case o.Arrival == "":
		o.Arrival = "poisson"
	}
	if o.Arrival == "burst" && !fl.Changed("burst") {
		o.Burst = 10
	}
	for _, only := range []struct{ flag, arrival string }{{"clients", "closed"}, {"burst", "burst"}} {
		if fl.Changed(only.flag) && o.Arrival != only.arrival {
			return usage("", "--%s goes with --arrival %s", only.flag, only.arrival)
		}
	}
	if o.Arrival == "closed" && fl.Changed("rate") {
		return usage("", "--rate and --clients: want one of the two")
	}
	if !fl.Changed("duration") && !fl.Changed("requests") {
		o.Duration = time.Minute
	}
	return nil
}

// keys reads the API keys. They get into the targets and nowhere else.
func (f *loadFlags) keys(e *env) error {
	set := func(flag, text string, read func(string) (string, error)) error {
		name, source, ok := strings.Cut(text, "=")
		if !ok {
			name, source = "", text
		}
		key, err := read(source)
		if err != nil {
			return fmt.Errorf("--%s: %w", flag, err)
		}
		if key = strings.TrimSpace(key); key == "" {
			return fmt.Errorf("--%s: %s is empty", flag, source)
		}
		if strings.ContainsFunc(key, func(c rune) bool { return c < ' ' || c > '~' }) {
			return fmt.Errorf("--%s: what %s holds is no key: it has more than one line, or characters that a header can't carry", flag, source)
		}
		found := false
		for i := range f.o.Targets {
			if t := &f.o.Targets[i]; name == "" || t.Name == name {
				t.Key, found = key, true
			}
		}
		if !found {
			return usage("", "--%s: no target is called %q", flag, name)
		}
		return nil
	}
	for _, text := range f.keyFiles {
		if err := set("key-file", text, func(name string) (string, error) {
			file, err := os.Open(name)
			if err != nil {
				return "", err
			}
			defer file.Close()
			b, err := io.ReadAll(io.LimitReader(file, 64<<10))
			return string(bytes.TrimSpace(b)), err
		}); err != nil {
			return err
		}
	}
	for _, text := range f.keyEnvs {
		if err := set("key-env", text, func(name string) (string, error) {
			v, ok := e.lookup(name)
			if !ok {
				return "", fmt.Errorf("%s is not set", name)
			}
			return v, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// usageIfOptions is err as one of the command line, if that is what it is.
func usageIfOptions(err error) error {
	if o, ok := errors.AsType[load.OptionsError](err); ok {
		return usage("kvgate bench live --help", "%w", o)
	}
	return err
}

// progressBar draws on a terminal; show is nil where there is none.
func progressBar(e *env) (show func(load.Progress), done func()) {
	if _, width := terminal(e.stderr, e.lookup); width == 0 {
		return nil, func() {}
	}
	bar := progressbar.NewOptions(1000, progressbar.OptionSetWriter(e.stderr), progressbar.OptionSetWidth(30),
		progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
	show = func(p load.Progress) {
		what := ""
		if p.WarmUp {
			what = "warm-up, "
		}
		bar.Describe(fmt.Sprintf("%s%d done, %d failed, %d under way", what, p.Done, p.Failed, p.InFlight))
		_ = bar.Set(min(999, int(1000*p.Share))) // the last step clears it
	}
	return show, func() { _ = bar.Finish() }
}
