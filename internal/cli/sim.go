package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kvgate/internal/modelsim"
)

func newSim(e *env) *cobra.Command {
	var o modelsim.Options
	var n int
	var fill float64
	var dialect string
	var faults []string
	c := &cobra.Command{
		Use:   "sim [flags]",
		Short: "Run simulated model servers that behave like vLLM or SGLang on a GPU",
		Long: `Run simulated model servers: vLLM's API, metrics, batching, KV cache, prefix cache and adapters at the speed of a real
GPU, without one. With --dialect sglang they speak as SGLang does: its names of metrics, adapters as base:adapter, loaded through
/load_lora_adapter, errors inside of streams.

` + faultHelp() + `

Profiles: ` + strings.Join(modelsim.ProfileNames(), ", "),
		Example: `  kvgate sim
  kvgate sim -n 4 --profile 8b-h100 --adapter sql --adapter chat --speedup 10
  kvgate sim -n 2 --dialect sglang --max-loras 8 --max-queued 100
  kvgate sim --fault '{"kind":"slow","delay_seconds":2}'
  curl -s http://127.0.0.1:8000/sim/faults -d '{"kind":"close_stream","events":5,"count":1}'`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o.Dialect = modelsim.Dialect(dialect)
			var list []modelsim.Fault
			for _, text := range faults {
				f := modelsim.Fault{Kind: modelsim.FaultKind(text)}
				if strings.HasPrefix(text, "{") {
					if err := json.Unmarshal([]byte(text), &f); err != nil {
						return usage(`--fault '{"kind":"status","status":503}'`, "--fault %s: %w", text, modelsim.JSONError(err))
					}
				}
				list = append(list, f)
			}
			if !slices.Contains(modelsim.ProfileNames(), o.Profile) {
				return notOneOf(c, "profile", o.Profile, modelsim.ProfileNames())
			}
			if !slices.Contains(modelsim.Dialects(), dialect) {
				return notOneOf(c, "dialect", dialect, modelsim.Dialects())
			}
			if o.MaxQueued < 0 || o.MaxQueued > 0 && o.Dialect != modelsim.DialectSGLang {
				return usage("kvgate sim --dialect sglang --max-queued 100", "--max-queued %d; want a limit above 0, with --dialect sglang", o.MaxQueued)
			}
			if o.Speedup <= 0 {
				return usage("kvgate sim --speedup 10", "--speedup %g; want a number above 0", o.Speedup)
			}
			if n < 1 || n > 1000 {
				return usage("kvgate sim -n 4", "-n %d; want 1 to 1000", n)
			}
			return sim(c.Context(), e, o, n, fill, list)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.Listen, "listen", "127.0.0.1:8000", "host:port of the first server; further ones take the ports after it (port 0: any)")
	fl.IntVarP(&n, "servers", "n", 1, "number of servers")
	fl.StringVar(&o.Profile, "profile", modelsim.DefaultProfile, "GPU and model that set the pace")
	fl.StringSliceVar(&o.Models, "model", nil, "name of the base model, repeatable for several names of it (default meta-llama/Llama-3.1-8B-Instruct)")
	fl.StringSliceVar(&o.Adapters, "adapter", nil, "LoRA adapter that is servable, repeatable")
	fl.IntVar(&o.MaxLoras, "max-loras", 0, "adapters that fit into one batch (default 4 with adapters)")
	fl.IntVar(&o.MaxCPULoras, "max-cpu-loras", 0, "adapters that stay in host memory (default --max-loras; sglang: no limit)")
	fl.IntVar(&o.MaxQueued, "max-queued", 0, "requests that wait before others are refused, with --dialect sglang (default no limit)")
	fl.StringVar(&o.AdapterRoot, "adapter-root", "", "directory that adapters can be loaded from at run time (default anywhere)")
	fl.Float64Var(&o.Speedup, "speedup", 1, "divides every time")
	fl.IntVar(&o.KVTokens, "kv-tokens", 0, "size of the KV cache in tokens (default the profile's)")
	fl.IntVar(&o.MeanOutputTokens, "mean-output", 256, "mean length of answers without a limit, in tokens")
	fl.BoolVar(&o.EndsEarly, "ends-early", false, "take max_tokens as a bound, as people's answers do, rather than as the length")
	fl.Float64Var(&fill, "fill", 0, "share of the KV cache that others keep in use, 0 to 1")
	fl.StringArrayVar(&faults, "fault", nil, "a fault to begin with: a kind, or a JSON object; repeatable")
	fl.StringVar(&dialect, "dialect", string(modelsim.DialectVLLM), "vllm, vllm-0.8 (older names of metrics) or sglang")
	fl.StringVar(&o.APIKey, "api-key", "", "key that requests below /v1 must carry (default none)")
	fl.Uint64Var(&o.Seed, "seed", 0, "changes drawn lengths and words")
	fl.BoolVar(&o.AllowRemote, "allow-remote", false, "listen on addresses that are not loopback")
	complete(c, "profile", modelsim.ProfileNames()...)
	complete(c, "dialect", modelsim.Dialects()...)
	return c
}

// faultHelp says how to make a server fail.
func faultHelp() string {
	words := func(kinds []modelsim.FaultKind) string {
		var b strings.Builder
		column := 0
		for _, k := range kinds {
			if column += len(k) + 1; column > 96 {
				b.WriteString("\n ")
				column = len(k) + 3
			}
			b.WriteString(" " + string(k))
		}
		return b.String()
	}
	met, befalling := modelsim.FaultKinds()
	return `POST /sim/faults on a server makes it fail while it runs. The body is one fault or a list, in place of those in force; GET shows
them, DELETE ends them. A fault is {"kind": KIND} and what the kind takes: path (a prefix; default the inference paths), skip and
count (requests before it begins, and to hit), events (of a stream, to let through), status, delay_seconds, retry_after_seconds,
bytes, body. Kinds that requests or scrapes meet:
 ` + words(met) + `
Kinds that befall the process at once (refuse and oom for delay_seconds):
 ` + words(befalling) + `
The servers of one command are one process: to kill one of two with a signal, start two commands.`
}

// sim runs n servers until a signal ends them.
func sim(ctx context.Context, e *env, o modelsim.Options, n int, fill float64, faults []modelsim.Fault) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	host, portText, err := net.SplitHostPort(o.Listen)
	port, perr := strconv.Atoi(portText)
	if err != nil || perr != nil {
		return usage("--listen 127.0.0.1:8000", "--listen %q is not host:port", o.Listen)
	}
	var servers []*modelsim.Server
	defer func() {
		wait, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		for _, s := range servers {
			_ = s.Close(wait)
		}
	}()
	for i := range n {
		so := o
		so.Seed += uint64(i)
		if port != 0 {
			so.Listen = net.JoinHostPort(host, strconv.Itoa(port+i))
		}
		s, err := modelsim.New(so)
		switch {
		case errors.Is(err, modelsim.ErrNotLoopback):
			return usage("kvgate sim --allow-remote --listen "+so.Listen, "%w", err)
		case err != nil:
			return fmt.Errorf("server %d: %w", i+1, err)
		}
		servers = append(servers, s)
		if err := s.Fill(fill); err != nil {
			return err
		}
		if err := s.SetFaults(faults...); err != nil {
			return usage("kvgate sim --help", "--fault: %w", err)
		}
		fmt.Fprintln(e.stdout, s.URL())
	}
	fmt.Fprintf(e.stderr, "%s, profile %s, speedup %g; stop with ctrl-c\n", count(n, "server"), o.Profile, o.Speedup)
	<-ctx.Done()
	return nil
}
