package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/gateway"
	"kvgate/internal/modelsim"
	"kvgate/pool"
	"kvgate/scoring"
)

func newExplain(e *env) *cobra.Command {
	var a adminClient
	var model, adapter, file, path, snapshot, policy string
	var promptTokens int
	var asJSON bool
	c := &cobra.Command{
		Use:   "explain [-m MODEL [--adapter A] | --body FILE] [--snapshot FILE]",
		Short: "Show where a request would go now, and why",
		Long: `Show where a request would go now, and why: what each endpoint would cost and what that is made of. The request is a body
on standard input or in a file, or with -m a chat message to a model or adapter. Nothing is sent to an endpoint, nothing is booked.

With --snapshot it decides on a saved /debug/snapshot instead of asking a running gateway. Such a file holds what was known
and learned of every endpoint and model, but not which prefixes were cached where.`,
		Example: `  kvgate explain -m llama-3-8b
  kvgate explain -m llama-3-8b --adapter sql --prompt-tokens 2000
  echo '{"model": "sql", "messages": [{"role": "user", "content": "Hello"}]}' | kvgate explain
  curl -s http://127.0.0.1:9090/debug/snapshot > snapshot.json
  kvgate explain -m llama-3-8b --snapshot snapshot.json --policy least_requests`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if adapter != "" { // clients ask for an adapter by its own name
				model = adapter
			}
			if promptTokens < 1 || promptTokens > 1<<24 {
				return usage("kvgate explain -m MODEL --prompt-tokens 1000", "--prompt-tokens %d; want 1 to %d", promptTokens, 1<<24)
			}
			if c.Flags().Changed("prompt-tokens") && model == "" {
				return usage("kvgate explain -m MODEL --prompt-tokens 1000", "--prompt-tokens needs -m: a body has a prompt of its own")
			}
			body, err := explainBody(e, model, promptTokens, file)
			if err != nil {
				return err
			}
			var x scoring.Explanation
			if snapshot != "" {
				x, err = explainSnapshot(snapshot, policy, path, body)
			} else if policy != "" {
				return usage("kvgate explain --snapshot FILE --policy "+policy, "--policy needs --snapshot: a running gateway has its own")
			} else {
				x, err = explainRunning(c.Context(), &a, path, body)
			}
			if err != nil {
				if model != "" && c.Flags().Changed("prompt-tokens") {
					err = fmt.Errorf("a request of %d bytes, made for --prompt-tokens %d: %w", len(body), promptTokens, err)
				}
				return err
			}
			if asJSON {
				return printJSON(e, x)
			}
			fmt.Fprint(e.stdout, x.String())
			return nil
		},
	}
	fl := c.Flags()
	fl.StringVarP(&model, "model", "m", "", "model or adapter to ask, instead of a body")
	fl.StringVar(&adapter, "adapter", "", "LoRA adapter of the model to ask, instead of a body")
	fl.IntVar(&promptTokens, "prompt-tokens", 1, "with -m: length of its prompt, about; none of it is cached anywhere")
	fl.StringVar(&file, "body", "-", "file with the request's body; - is standard input")
	fl.StringVar(&path, "path", "/v1/chat/completions", "path that the request is for")
	fl.StringVar(&snapshot, "snapshot", "", "decide on this saved /debug/snapshot")
	fl.StringVar(&policy, "policy", "", "with --snapshot: the policy to decide by (default auto)")
	fl.BoolVar(&asJSON, "json", false, "print JSON")
	adminFlags(c, &a)
	complete(c, "policy", scoring.PolicyNames()...)
	return c
}

func explainBody(e *env, model string, promptTokens int, file string) ([]byte, error) {
	switch {
	case model != "" && file != "-":
		return nil, usage("kvgate explain --body "+file, "-m and --body exclude each other")
	case model != "":
		content := strings.Repeat("~~~ ", promptTokens) // four bytes a token, as English has; nobody sends this
		return json.Marshal(map[string]any{"model": model, "messages": []map[string]string{{"role": "user", "content": content}}})
	case file != "-":
		return readFile(file)
	}
	if f, ok := e.stdin.(*os.File); ok {
		if fi, err := f.Stat(); err == nil && fi.Mode()&os.ModeCharDevice != 0 {
			return nil, usage("kvgate explain -m MODEL", "explain needs a request: -m MODEL, --body FILE or a body on standard input")
		}
	}
	return readAll(e.stdin, "standard input")
}

// maxInputBytes bounds what is read of a file or of standard input. A snapshot of 65,000 endpoints takes half of it.
const maxInputBytes = 256 << 20

func readFile(name string) ([]byte, error) {
	data, err := config.ReadFile(name, maxInputBytes+1)
	if err != nil {
		return nil, err
	}
	return bounded(data, name)
}

func readAll(r io.Reader, name string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxInputBytes+1))
	if err != nil {
		return nil, err
	}
	return bounded(data, name)
}

func bounded(data []byte, name string) ([]byte, error) {
	if len(data) > maxInputBytes {
		return nil, fmt.Errorf("%s: larger than %d MiB", name, maxInputBytes>>20)
	}
	return data, nil
}

func explainRunning(ctx context.Context, a *adminClient, path string, body []byte) (x scoring.Explanation, err error) {
	status, data, err := a.call(ctx, http.MethodPost, "/debug/explain?path="+url.QueryEscape(path), body)
	if err != nil {
		return x, err
	}
	if status != http.StatusOK {
		return x, errors.New(firstLine(data))
	}
	if err := json.Unmarshal(data, &x); err != nil {
		return x, fmt.Errorf("explain: %w", modelsim.JSONError(err))
	}
	return x, nil
}

func explainSnapshot(file, policy, path string, body []byte) (x scoring.Explanation, err error) {
	data, err := readFile(file)
	if err != nil {
		return x, err
	}
	var v pool.View
	if err := json.Unmarshal(data, &v); err != nil {
		return x, fmt.Errorf("%s: %w; want what /debug/snapshot printed", file, modelsim.JSONError(err))
	}
	t, now, err := v.Table()
	if err != nil {
		return x, fmt.Errorf("%s: %w", file, err)
	}
	learners := make(map[string]*scoring.Learner)
	for i := range v.Learned {
		l := scoring.NewLearner()
		l.Restore(&v.Learned[i])
		learners[v.Learned[i].Pool] = l
	}
	// Made before it is asked for, so that a wrong name is an error of usage.
	if _, err := scoring.New(scoring.Config{Name: policy}); err != nil {
		return x, usage("kvgate policies", "%w", err)
	}
	return gateway.Explain(t.Load(), now, path, body, func(pool string) *scoring.Policy {
		p, _ := scoring.New(scoring.Config{Name: policy, Learner: learners[pool]})
		return p
	})
}
