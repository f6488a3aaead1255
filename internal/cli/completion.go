package cli

import (
	"github.com/spf13/cobra"
)

func newCompletion(e *env) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print a script that completes kvgate's commands in bash, zsh, fish or powershell",
		Example: `  source <(kvgate completion bash)
  kvgate completion zsh > "${fpath[1]}/_kvgate"
  kvgate completion fish > ~/.config/fish/completions/kvgate.fish`,
		ValidArgs: shells,
		Args:      exactlyOne("a shell: bash, zsh, fish or powershell"),
		RunE: func(c *cobra.Command, args []string) error {
			root := c.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(e.stdout, true)
			case "zsh":
				return root.GenZshCompletion(e.stdout)
			case "fish":
				return root.GenFishCompletion(e.stdout, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(e.stdout)
			}
			return usage("kvgate completion bash", "shell %q is unknown; want bash, zsh, fish or powershell", args[0])
		},
	}
}
