package cli

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"kvgate/internal/version"
)

func newVersion(e *env) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "version [--json]",
		Short:   "Print which kvgate this is",
		Example: "  kvgate version --json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			in := version.Get()
			if asJSON {
				return printJSON(e, in)
			}
			fmt.Fprintf(e.stdout, "kvgate %s", in.Version)
			if in.Revision != "" {
				fmt.Fprintf(e.stdout, " (%.12s)", in.Revision)
			}
			fmt.Fprintf(e.stdout, " %s %s\n", in.GoVersion, in.Platform)
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func printJSON(e *env, v any) error {
	enc := json.NewEncoder(e.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
