package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"kvgate/internal/version"
)

func newMan(*env) *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write manual pages into a directory",
		Example: "  kvgate man /usr/local/share/man/man1",
		Hidden:  true,
		Args:    exactlyOne("a directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("man: %w", err)
			}
			h := &doc.GenManHeader{Section: "1", Source: "kvgate " + version.Get().Version, Manual: "kvgate"}
			root := c.Root()
			root.DisableAutoGenTag = true
			return doc.GenManTree(root, h, args[0])
		},
	}
}
