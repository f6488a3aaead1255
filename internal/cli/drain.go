package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/pool"
)

func newDrain(e *env) *cobra.Command {
	return drainCommand(e, "/-/drain", &cobra.Command{
		Use:   "drain ENDPOINT",
		Short: "Send nothing new to an endpoint of a running gateway; what runs there finishes",
		Long: `Send nothing new to an endpoint of a running gateway; what runs there finishes. It lasts until kvgate readmit, or until
the gateway restarts. Each gateway has to be told. kvgate endpoints shows when nothing is left there.`,
		Example: "  kvgate drain llama/10.0.0.11:8000 && kvgate endpoints",
	}, "draining", "was draining already")
}

func newReadmit(e *env) *cobra.Command {
	return drainCommand(e, "/-/readmit", &cobra.Command{
		Use:     "readmit ENDPOINT",
		Short:   "Undo a drain: send requests to the endpoint again",
		Example: "  kvgate readmit llama/10.0.0.11:8000",
	}, "readmitted", "was not draining")
}

// drainCommand makes c post to path, and say done, or already if that changed nothing.
func drainCommand(e *env, path string, c *cobra.Command, done, already string) *cobra.Command {
	var a adminClient
	c.Args = exactlyOne("an endpoint, as kvgate endpoints names it")
	c.RunE = func(c *cobra.Command, args []string) error {
		status, data, err := a.call(c.Context(), http.MethodPost, path+"?endpoint="+url.QueryEscape(args[0]), nil)
		switch {
		case err != nil:
			return err
		case status == http.StatusUnauthorized, status == http.StatusForbidden:
			return withTry(errors.New(firstLine(data)), "%s --token-file FILE, or the token in the environment variable KVGATE_ADMIN_TOKEN", c.CommandPath())
		case status == http.StatusNotFound && strings.Contains(firstLine(data), "there is no endpoint"):
			return withTry(errors.New(firstLine(data)), "%s", nearest(c.Context(), &a, c.CommandPath(), args[0]))
		case status != http.StatusOK:
			return errors.New(firstLine(data))
		}
		var res struct {
			Endpoint string
			Changed  bool
		}
		if err := json.Unmarshal(data, &res); err != nil {
			return fmt.Errorf("admin listener: %s: %w", path, err)
		}
		if !res.Changed {
			done = already
		}
		fmt.Fprintf(e.stdout, "%s: %s\n", res.Endpoint, done)
		return nil
	}
	adminFlags(c, &a)
	tokenFlag(c, e, &a)
	return c
}

// nearest is the command with the endpoint that was meant: one whose id is spelled alike, or ends in what was given.
func nearest(ctx context.Context, a *adminClient, command, given string) string {
	var v pool.View
	if a.get(ctx, "/debug/snapshot", &v) == nil {
		var ids []string
		for i := range v.Endpoints {
			id := v.Endpoints[i].ID
			if strings.HasSuffix(id, "/"+given) {
				return command + " " + id
			}
			ids = append(ids, id)
		}
		if id := config.Suggest(given, ids); id != "" {
			return command + " " + id
		}
	}
	return "kvgate endpoints"
}
