package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kvgate/discovery"
	"kvgate/internal/admin"
	"kvgate/pool"
)

func newEndpoints(e *env) *cobra.Command {
	var a adminClient
	var asJSON bool
	c := &cobra.Command{
		Use:   "endpoints [--json]",
		Short: "List the endpoints of a running gateway, what is known of them, and where they were found",
		Example: `  kvgate endpoints
  kvgate endpoints --json | jq '.endpoints[] | select(.state != ["up"])'`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var v struct {
				pool.View
				Sources []discovery.Status `json:"sources"`
			}
			if err := a.get(c.Context(), "/debug/snapshot", &v.View); err != nil {
				return err
			}
			if err := a.get(c.Context(), "/debug/sources", &v.Sources); err != nil {
				return err
			}
			if asJSON {
				return printJSON(e, v)
			}
			endpointTable(e.stdout, v.Endpoints)
			for i := range v.Endpoints {
				ep := &v.Endpoints[i]
				if ep.Error != "" {
					fmt.Fprintf(e.stdout, "%s: %s\n", ep.ID, ep.Error)
				}
				for _, st := range ep.State {
					if why := stateReasons[st]; why != "" {
						fmt.Fprintf(e.stdout, "%s: %s: %s\n", ep.ID, st, why)
					}
				}
			}
			fmt.Fprintln(e.stdout)
			return sourceTable(e.stdout, v.Sources, time.Now())
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	adminFlags(c, &a)
	return c
}

// sourceTable prints how discovery is doing, for people.
func sourceTable(w io.Writer, sources []discovery.Status, now time.Time) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "POOL\tSOURCE\tENDPOINTS\tFOUND\tPROBLEM")
	for i := range sources {
		s := &sources[i]
		found := "never"
		if !s.LastSuccess.IsZero() {
			found = max(0, now.Sub(s.LastSuccess)).Round(time.Second).String() + " ago"
		}
		problem := cmp.Or(s.LastError, "-")
		if s.Failures > 1 {
			problem = fmt.Sprintf("%s (%d times in a row)", problem, s.Failures)
		}
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\t%s\n", s.Pool, s.Source, s.Targets, found, problem)
	}
	return tw.Flush()
}

// stateReasons say who is behind a state that no error tells of.
var stateReasons = map[string]string{
	"draining":  "by kvgate drain or the dashboard; kvgate readmit and its name undo it",
	"not_ready": "discovery says so",
	"asleep":    "the server says so",
}

func newModels(e *env) *cobra.Command {
	var a adminClient
	var asJSON bool
	c := &cobra.Command{
		Use:   "models [--json]",
		Short: "List the names that clients of a running gateway may ask for",
		Long: `List the names that clients of a running gateway may ask for: models and adapters that endpoints serve, and the
names of aliases and rules, with what their requests may go to. GET /v1/models of the client listener lists the same to
those who may use them.`,
		Example: `  kvgate models
  kvgate models --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var v admin.ModelsView
			if err := a.get(c.Context(), "/debug/models", &v); err != nil {
				return err
			}
			if asJSON {
				return printJSON(e, v)
			}
			tw := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "NAME\tPOOL\tADAPTER OF\tSTANDS FOR\tCONTEXT TOKENS\tENDPOINTS")
			for i := range v.Models {
				m := &v.Models[i]
				stands := "-"
				if m.By != "" {
					stands = fmt.Sprintf("%s (%s)", fewOf(m.StandsFor, 4), m.By)
				}
				fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", m.ID, cmp.Or(m.Pool, "several"), cmp.Or(m.Base, "-"), stands,
					unknown(m.MaxModelLen, "%d"), fewOf(m.Endpoints, 4))
			}
			return tw.Flush()
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	adminFlags(c, &a)
	return c
}

// fewOf is at most n of the words and how many there are.
func fewOf(words []string, n int) string {
	if len(words) == 0 {
		return "none"
	}
	if len(words) <= n {
		return strings.Join(words, " ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:n], " "), len(words)-n)
}
