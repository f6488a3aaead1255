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
			if asJSON {
				return printJSON(e, version.Get())
			}
			_, err := fmt.Fprintln(e.stdout, versionLine())
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// versionLine is the build in one line.
func versionLine() string {
	in, revision := version.Get(), ""
	if in.Revision != "" {
		revision = fmt.Sprintf(" (%.12s)", in.Revision)
	}
	return fmt.Sprintf("kvgate %s%s %s %s", in.Version, revision, in.GoVersion, in.Platform)
}

func printJSON(e *env, v any) error {
	enc := json.NewEncoder(e.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
