package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"kvgate/internal/admin"
)

func newReload(e *env) *cobra.Command {
	var a adminClient
	c := &cobra.Command{
		Use:     "reload",
		Short:   "Have a running gateway load its configuration again",
		Example: "  kvgate check config.yaml && kvgate reload",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			status, data, err := a.call(c.Context(), http.MethodPost, "/-/reload", nil)
			if err != nil {
				return err
			}
			if status != http.StatusOK {
				if status == http.StatusUnauthorized {
					return withTry(errors.New(firstLine(data)), "kvgate reload --token-file FILE, or the token in the environment variable KVGATE_ADMIN_TOKEN")
				}
				var body struct{ Error string }
				if json.Unmarshal(data, &body) == nil && body.Error != "" {
					return fmt.Errorf("reload refused; the configuration in use stays:\n%s", body.Error)
				}
				return fmt.Errorf("reload: status %d: %s", status, firstLine(data))
			}
			var res admin.ReloadResult
			if err := json.Unmarshal(data, &res); err != nil {
				return fmt.Errorf("reload: %w", err)
			}
			for _, w := range res.Warnings {
				fmt.Fprintln(e.stderr, w)
			}
			if !res.Changed {
				fmt.Fprintf(e.stdout, "%s: nothing has changed (%.12s)\n", res.File, res.Hash)
			} else {
				fmt.Fprintf(e.stdout, "%s: reloaded (%.12s)\n", res.File, res.Hash)
			}
			if len(res.NeedsRestart) > 0 {
				fmt.Fprintf(e.stdout, "restart pending: %s\n", strings.Join(res.NeedsRestart, ", "))
			}
			return nil
		},
	}
	adminFlags(c, &a)
	tokenFlag(c, e, &a)
	return c
}

func newHealthcheck(e *env) *cobra.Command {
	var a adminClient
	c := &cobra.Command{
		Use:     "healthcheck",
		Short:   "Succeed if a running gateway is ready, for container health checks",
		Example: "  kvgate healthcheck --admin http://127.0.0.1:9090",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			status, data, err := a.call(c.Context(), http.MethodGet, "/-/ready", nil)
			if err != nil {
				return err
			}
			if status != http.StatusOK {
				return errors.New(firstLine(data))
			}
			fmt.Fprintln(e.stdout, firstLine(data))
			return nil
		},
	}
	adminFlags(c, &a)
	return c
}
