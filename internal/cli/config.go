package cli

import (
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"kvgate/config"
	"kvgate/internal/gateway"
)

func newConfig(e *env) *cobra.Command {
	c := &cobra.Command{
		Use:   "config COMMAND",
		Short: "Show configurations",
		Example: `  kvgate config default > config.yaml
  kvgate config show -c config.yaml`,
		RunE: helpOrUnknown,
	}
	var a adminClient
	var file string
	show := &cobra.Command{
		Use:   "show [-c FILE]",
		Short: "Print a configuration with every default filled in and without secrets",
		Long: `Print a configuration with every default filled in and without secrets: that of FILE, or the one that a running gateway
uses.`,
		Example: `  kvgate config show -c config.yaml
  kvgate config show --admin http://127.0.0.1:9090`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if file != "" {
				cfg, err := config.Load(file, gateway.ConfigOptions())
				if err != nil {
					return withTry(err, "kvgate check %s", file)
				}
				_, err = e.stdout.Write(config.Redacted(cfg))
				return err
			}
			status, data, err := a.call(c.Context(), http.MethodGet, "/debug/config", nil)
			if err != nil {
				return err
			}
			if status != http.StatusOK {
				return fmt.Errorf("admin listener: status %d: %s", status, firstLine(data))
			}
			_, err = e.stdout.Write(data)
			return err
		},
	}
	show.Flags().StringVarP(&file, "config", "c", "", "configuration file, instead of a running gateway")
	_ = show.MarkFlagFilename("config", "yaml", "yml")
	adminFlags(show, &a)
	c.AddCommand(show, &cobra.Command{
		Use:   "schema",
		Short: "Print the file format as JSON Schema, for editors",
		Long: `Print the file format as JSON Schema. An editor with a YAML language server then completes keys, shows their documentation
and underlines mistakes; begin the file with: # yaml-language-server: $schema=kvgate.schema.json`,
		Example: "  kvgate config schema > kvgate.schema.json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := e.stdout.Write(config.Schema(gateway.ConfigOptions()))
			return err
		},
	}, &cobra.Command{
		Use:     "default",
		Short:   "Print a file with every key, its default and what it is for",
		Example: "  kvgate config default > config.yaml",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := e.stdout.Write(config.AnnotatedDefault())
			return err
		},
	})
	return c
}
