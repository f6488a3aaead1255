package cli

import (
	"cmp"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kvgate/internal/adapters"
)

func newAdapters(e *env) *cobra.Command {
	var a adminClient
	var asJSON bool
	c := &cobra.Command{
		Use:   "adapters [--json]",
		Short: "List the managed adapters of a running gateway, and where they are loaded",
		Example: `  kvgate adapters
  kvgate adapters --json | jq '.adapters[] | select(.on == [])'`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var v struct {
				Adapters []adapters.Status `json:"adapters"`
			}
			if err := a.get(c.Context(), "/debug/adapters", &v); err != nil {
				return err
			}
			if asJSON {
				return printJSON(e, v)
			}
			tw := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "ADAPTER\tPOOL\tKEPT\tREQUESTS/S\tRUNNING\tLOADED ON\tSTATE")
			for i := range v.Adapters {
				s := &v.Adapters[i]
				kept := "-"
				if s.Pin || s.Min > 0 {
					kept = fmt.Sprint(max(s.Min, 1))
				}
				state := ""
				switch {
				case len(s.Loading) > 0:
					state = "loading on " + fewOf(s.Loading, 2)
				case s.Error != "":
					state = s.Error
				case s.DryRun:
					state = "dry run"
				}
				fmt.Fprintf(tw, "%s\t%s\t%s\t%.2f\t%.1f\t%s\t%s\n", s.Name, s.Pool, kept, s.RequestsPerSecond, s.Running, fewOf(s.On, 3), cmp.Or(state, "-"))
			}
			return tw.Flush()
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	adminFlags(c, &a)
	return c
}
