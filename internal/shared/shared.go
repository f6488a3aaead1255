// Package shared finds the third-party samples and traces that tests and benchmarks read in place and that are never part
// of the repository.
package shared

import (
	"os"
	"path/filepath"
	"testing"
)

// Find returns the directory named by the environment variable KVGATE_SHARED, or else ../shared beside the repository's
// root, and whether it exists.
func Find() (dir string, ok bool) {
	dir = os.Getenv("KVGATE_SHARED")
	if dir == "" {
		wd, err := os.Getwd()
		if err != nil {
			return "", false
		}
		for {
			if _, err := os.Stat(filepath.Join(wd, "go.mod")); err == nil {
				break
			}
			parent := filepath.Dir(wd)
			if parent == wd {
				return "", false
			}
			wd = parent
		}
		dir = filepath.Join(wd, "..", "shared")
	}
	fi, err := os.Stat(dir)
	return dir, err == nil && fi.IsDir()
}

// Dir returns the directory of Find. Without one it skips t, or fails it when the environment says CI=true, where a skip
// would hide that nothing was checked.
func Dir(t testing.TB) string {
	t.Helper()
	dir, ok := Find()
	if !ok {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no shared data: set KVGATE_SHARED")
		}
		t.Skip("no shared data (set KVGATE_SHARED to its directory): skipped")
	}
	return dir
}
