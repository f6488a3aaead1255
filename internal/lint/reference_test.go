package lint

import (
	"testing"

	"kvgate/config"
	"kvgate/internal/gateway"
)

func TestConfigurationIsDocumented(t *testing.T) {
	generated(t, "docs/configuration.md", `# Configuration reference

<!-- Made by make generate from the package config. -->

Every key of the file, part by part. `+"`kvgate config default` prints the same as a file to begin with, `kvgate check FILE` finds every mistake in\none, and `kvgate config schema`"+` makes an editor complete keys and underline mistakes. Only `+"`pools`"+` is required.

- A duration carries a unit (500ms, 5s, 2m, 1h30m), a size too (B, KiB, MiB, GiB, or kB, MB, GB); ranges are inclusive.
- `+"`[]` is one item of a list, `NAME`"+` a name that you give. A key that stands for one value only may be that value itself.
- Names of files are relative to the configuration file. `+"`${NAME}`"+` is taken from the environment in secrets, and nowhere else.
- *Reload*: whether a change takes effect at reload (SIGHUP, a change of the file, `+"`kvgate reload`"+`) or needs a restart; a reload says so.
- An empty default means that there is none, or none that is always the same.
`+string(config.Reference(gateway.ConfigOptions())))
}
