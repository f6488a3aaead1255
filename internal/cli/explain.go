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
	"kvgate/internal/auth"
	"kvgate/internal/gateway"
	"kvgate/internal/modelsim"
	"kvgate/pool"
	"kvgate/scoring"
)

func newExplain(e *env) *cobra.Command {
	var a adminClient
	var model, adapter, file, path, snapshot, policy, keyFile, keyID string
	var headers []string
	var promptTokens int
	var asJSON bool
	c := &cobra.Command{
		Use:   "explain [-m MODEL [--adapter A] | --body FILE] [-H 'NAME: VALUE'] [--key-id ID | --key-file FILE] [--snapshot FILE]",
		Short: "Show where a request would go now, and why",
		Long: `Show where a request would go now, and why: what its name stands for and how that was found, what its key may use and has
left, what each endpoint would cost and what that is made of. The request is a body on standard input or in a file, or with -m a
chat message to a model or adapter. Nothing is sent to an endpoint, nothing is booked, nothing is charged.

Rules may go by a header (-H) and by who asks: --key-id names a key of the gateway's, as kvgate keys list shows them; --key-file
holds a key or token itself. It is sent to the admin listener, on this machine or over https, and neither printed nor logged.

With --snapshot it decides on a saved /debug/snapshot instead of asking a running gateway. Such a file holds what was known
and learned of every endpoint and model, but not which prefixes were cached where.`,
		Example: `  kvgate explain -m llama-3-8b
  kvgate explain -m llama-3-8b --adapter sql --prompt-tokens 2000
  kvgate explain -m llama-3-8b --key-id team-a-48c767 -H 'X-Canary: 1'
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
			if err := explainFields(e, &a, headers, keyFile, keyID, model != "" || file != "-"); err != nil {
				return err
			}
			if snapshot != "" && (len(a.fields) > 0 || keyID != "") {
				return usage("kvgate explain -m MODEL -H 'NAME: VALUE'", "--snapshot knows no rules and no keys: leave out -H, --key-id and --key-file, or ask a running gateway")
			}
			ids := c.Flags().Changed("prompt-tokens") && (path == "/v1/completions" || !c.Flags().Changed("path"))
			if ids {
				path = "/v1/completions"
			}
			body, err := explainBody(e, model, promptTokens, ids, file)
			if err != nil {
				return err
			}
			var x scoring.Explanation
			if snapshot != "" {
				x, err = explainSnapshot(snapshot, policy, path, body)
			} else if policy != "" {
				return usage("kvgate explain --snapshot FILE --policy "+policy, "--policy needs --snapshot: a running gateway has its own")
			} else {
				x, err = explainRunning(c.Context(), &a, path, keyID, body)
			}
			if err != nil {
				if model != "" && c.Flags().Changed("prompt-tokens") {
					err = fmt.Errorf("a request of %d bytes, made for --prompt-tokens %d: %w", len(body), promptTokens, err)
				}
				return err
			}
			if asJSON {
				err = printJSON(e, x)
			} else {
				_, err = fmt.Fprint(e.stdout, x.String())
			}
			if x.Refused != nil && err == nil {
				err = fmt.Errorf("the request would be refused: %d %s", x.Refused.Status, x.Refused.Code)
			}
			return err
		},
	}
	fl := c.Flags()
	fl.StringVarP(&model, "model", "m", "", "model or adapter to ask, instead of a body")
	fl.StringVar(&adapter, "adapter", "", "LoRA adapter of the model to ask, instead of a body")
	fl.IntVar(&promptTokens, "prompt-tokens", 1, "with -m: length of its prompt, exactly (as token ids, to /v1/completions; about that with another --path); none of it is cached anywhere")
	fl.StringVar(&file, "body", "-", "file with the request's body; - is standard input")
	fl.StringVar(&path, "path", "/v1/chat/completions", "path that the request is for")
	fl.StringArrayVarP(&headers, "header", "H", nil, "header field that the request has, 'NAME: VALUE'; may be repeated")
	fl.StringVar(&keyID, "key-id", "", "name of the key that the request is sent with")
	fl.StringVar(&keyFile, "key-file", "", "file with the key or token that the request is sent with; - is standard input, with -m or --body")
	_ = c.MarkFlagFilename("key-file")
	fl.StringVar(&snapshot, "snapshot", "", "decide on this saved /debug/snapshot")
	fl.StringVar(&policy, "policy", "", "with --snapshot: the policy to decide by (default auto)")
	fl.BoolVar(&asJSON, "json", false, "print JSON")
	adminFlags(c, &a)
	complete(c, "policy", scoring.PolicyNames()...)
	return c
}

// maxKeyID is longer than any key's name has need to be, and shorter than any key.
const maxKeyID = 128

// explainFields has a send the request's header fields. keyMayBeInput says that standard input is free.
func explainFields(e *env, a *adminClient, headers []string, keyFile, keyID string, keyMayBeInput bool) error {
	for _, h := range headers {
		name, value, ok := strings.Cut(h, ":")
		name = strings.TrimSpace(name)
		switch {
		case !ok || name == "" || strings.ContainsAny(h, "\r\n\x00"):
			return usage("kvgate explain -m MODEL -H 'X-Canary: 1'", "--header is no header field; want 'NAME: VALUE'")
		case strings.EqualFold(name, "authorization") || strings.EqualFold(name, "x-api-key") || strings.EqualFold(name, "api-key"):
			return usage("kvgate explain -m MODEL --key-file FILE", "--header %s: others see what is on a command line; write the key to a file, for --key-file, or name it with --key-id", name)
		}
		a.fields = append(a.fields, name+": "+strings.TrimSpace(value))
	}
	switch {
	case keyFile != "" && keyID != "":
		return usage("kvgate explain -m MODEL --key-id ID", "--key-file and --key-id exclude each other")
	case strings.HasPrefix(keyID, auth.KeyPrefix) || len(keyID) > maxKeyID:
		return usage("kvgate keys list keys.yaml", "--key-id takes the name of a key, not the key itself")
	case keyFile == "":
		return nil
	case keyFile == "-" && !keyMayBeInput:
		return usage("kvgate explain -m MODEL --key-file -", "--key-file - needs -m or --body: standard input can't be both")
	}
	read := func() ([]byte, error) { return readFile(keyFile) }
	if keyFile == "-" {
		read = func() ([]byte, error) { return readAll(e.stdin, "standard input") }
	}
	data, err := read()
	if err != nil {
		return fmt.Errorf("--key-file: %w", err)
	}
	key := strings.TrimSpace(string(data))
	if key == "" || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return fmt.Errorf("--key-file %s: it does not hold one key or token and nothing else", keyFile)
	}
	a.fields, a.secret = append(a.fields, "Authorization: Bearer "+key), true
	return nil
}

// explainBody is the body to explain. Token ids are counted; what text amounts to is estimated.
func explainBody(e *env, model string, promptTokens int, ids bool, file string) ([]byte, error) {
	switch {
	case model != "" && file != "-":
		return nil, usage("kvgate explain --body "+file, "-m and --body exclude each other")
	case model != "" && ids:
		return json.Marshal(map[string]any{"model": model, "prompt": make([]int, promptTokens)})
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

func explainRunning(ctx context.Context, a *adminClient, path, keyID string, body []byte) (x scoring.Explanation, err error) {
	status, data, err := a.call(ctx, http.MethodPost, "/debug/explain?"+url.Values{"path": {path}, "key": {keyID}}.Encode(), body)
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
	return gateway.Explain(t, now, path, body, func(pool string) *scoring.Policy {
		p, _ := scoring.New(scoring.Config{Name: policy, Learner: learners[pool]})
		return p
	})
}
