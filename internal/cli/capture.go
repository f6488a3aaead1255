package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/capture"
)

func newCapture(e *env) *cobra.Command {
	var a adminClient
	var o capture.Options
	var size, out string
	c := &cobra.Command{
		Use:   "capture [flags]",
		Short: "Look at what clients send: the bodies of requests, for a bounded time and size",
		Long: `Prints each request that a running gateway reads, body and all, as a line of JSON, until --for or --max-bytes is used up, or
ctrl-c. The values of header fields that may hold a credential are left out, and so is what looks like one in bodies.

It needs the admin token, and a configuration that allows it: debug: {capture: {}}. The gateway logs when it begins and ends,
and shows it as kvgate_capture_running.`,
		Example: `  kvgate capture --for 30s --out requests.jsonl
  kvgate capture --model llama-3.1-8b --max-bytes 64KiB | jq .body`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b, err := config.ParseBytes(size)
			if err != nil {
				return usage("kvgate capture --max-bytes 1MiB", "--max-bytes: %w", err)
			}
			o.MaxBytes = int64(b)
			return runCapture(e, c, &a, &o, out)
		},
	}
	fl := c.Flags()
	fl.DurationVar(&o.For, "for", 30*time.Second, "how long")
	fl.StringVar(&size, "max-bytes", "1MiB", "how much of bodies, all together")
	fl.StringVar(&o.Model, "model", "", "only requests for this model, as clients write it")
	fl.StringVar(&out, "out", "", "write into this file, which only you can read (default standard output)")
	_ = c.MarkFlagFilename("out", "jsonl")
	adminFlags(c, &a)
	tokenFlag(c, e, &a)
	_ = c.Flags().MarkHidden("timeout") // --for says how long
	return c
}

func runCapture(e *env, c *cobra.Command, a *adminClient, o *capture.Options, out string) error {
	ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	q := url.Values{"for": {o.For.String()}, "max_bytes": {config.Bytes(o.MaxBytes).String()}}
	if o.Model != "" {
		q.Set("model", o.Model)
	}
	to := e.stdout
	if out != "" {
		// Never into a file that others can read already; none is left behind if there is nothing to put into it.
		file, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		to = file
		defer func() {
			if fi, err := file.Stat(); err == nil && fi.Size() == 0 {
				_ = os.Remove(out)
			}
			_ = file.Close()
		}()
	}
	resp, err := a.open(ctx, http.MethodPost, "/-/capture?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		data, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		err := errors.New(firstLine(data))
		if resp.StatusCode == http.StatusUnauthorized {
			return withTry(err, "kvgate capture --token-file FILE, or the token in the environment variable KVGATE_ADMIN_TOKEN")
		}
		return err
	}
	fmt.Fprintf(e.stderr, "for %s, up to %s of bodies; stop with ctrl-c\n", o.For, config.Bytes(o.MaxBytes))
	var end capture.End
	requests := 0
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			if _, werr := to.Write(line); werr != nil {
				return werr
			}
			if requests++; json.Unmarshal(line, &end) == nil && end.End != "" {
				requests--
			}
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			fmt.Fprintf(e.stderr, "%s; stopped\n", count(requests, "request"))
			return nil
		case end.End != "":
			fmt.Fprintf(e.stderr, "%s, %d bytes of bodies, %d dropped; ended by: %s\n", count(requests, "request"), end.BodyBytes, end.Dropped, end.End)
			return nil
		default:
			return fmt.Errorf("the capture broke off after %s: %w", count(requests, "request"), err)
		}
	}
}
