package cli

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kvgate/discovery"
	"kvgate/metrics"
	"kvgate/scoring"
)

// named is one entry of a registry.
type named struct {
	Name    string `json:"name"`
	Doc     string `json:"doc"`
	Formula string `json:"formula,omitempty"`
}

// newRegistry is a command that lists what can be named in a configuration.
func newRegistry(e *env, use, short string, list func() []named) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     use + " [--json]",
		Short:   short,
		Example: "  kvgate " + use,
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			all := list()
			if asJSON {
				return printJSON(e, all)
			}
			tw := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
			for _, n := range all {
				fmt.Fprintf(tw, "%s\t%s\n", n.Name, n.Doc)
				if n.Formula != "" {
					fmt.Fprintf(tw, "\t  %s\n", n.Formula)
				}
			}
			return tw.Flush()
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func registries(e *env) []*cobra.Command {
	infos := func(in []scoring.Info) (out []named) {
		for _, i := range in {
			out = append(out, named{i.Name, i.Doc, i.Formula})
		}
		return out
	}
	return []*cobra.Command{
		newRegistry(e, "policies", "List the policies and their formulas", func() []named { return infos(scoring.Policies()) }),
		newRegistry(e, "scorers", "List the scorers that a weighted policy is made of", func() []named { return infos(scoring.Scorers()) }),
		newRegistry(e, "dialects", "List the kinds of model servers that can be read", func() (out []named) {
			for _, d := range metrics.Dialects() {
				out = append(out, named{Name: d.Name, Doc: d.Doc})
			}
			return out
		}),
		newRegistry(e, "sources", "List the ways in which endpoints are discovered", func() (out []named) {
			for _, k := range discovery.Kinds() {
				out = append(out, named{Name: k.Name, Doc: k.Doc})
			}
			return out
		}),
	}
}
