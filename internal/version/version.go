// Package version says which kvgate this is. It imports nothing of ours.
package version

import (
	"cmp"
	"runtime"
	"runtime/debug"
)

// set by the linker: -ldflags "-X kvgate/internal/version.version=v1.2.3"
var version string

// Info is what was built.
type Info struct {
	Version   string `json:"version"`
	Revision  string `json:"revision,omitempty"` // of the source, with "-dirty" when it had uncommitted changes
	Time      string `json:"time,omitempty"`     // of that revision, RFC 3339
	GoVersion string `json:"go_version"`
	Platform  string `json:"platform"`
}

// Get returns what was built, from the linker's setting and the toolchain's record.
func Get() Info {
	in := Info{Version: version, GoVersion: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if bi, ok := debug.ReadBuildInfo(); ok {
		dirty := ""
		for _, s := range bi.Settings {
			switch s.Key {
			case "vcs.revision":
				in.Revision = s.Value
			case "vcs.time":
				in.Time = s.Value
			case "vcs.modified":
				if s.Value == "true" {
					dirty = "-dirty"
				}
			}
		}
		if in.Revision != "" {
			in.Revision += dirty
		}
		if bi.Main.Version != "(devel)" {
			in.Version = cmp.Or(in.Version, bi.Main.Version)
		}
	}
	in.Version = cmp.Or(in.Version, "devel")
	return in
}
