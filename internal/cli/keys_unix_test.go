//go:build unix

package cli

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Who could read a file of keys still can after one is added, by its own name or by a link to it.
func TestAddedKeyKeepsOwnerAndMode(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "link.yaml")
	entry := "  - id: a\n    hash: \"sha256:48c76782dcb06028342d947b90d1cbb7ac1de148a6fa7beee380855c5b525320\"\n    tenant: a\n"
	other := "  - id: b\n    hash: \"sha256:58c76782dcb06028342d947b90d1cbb7ac1de148a6fa7beee380855c5b525320\"\n    tenant: b\n"
	if err := addKey(file, entry); err != nil {
		t.Fatal(err)
	}
	if fi, _ := os.Stat(file); fi.Mode().Perm() != 0o600 {
		t.Errorf("a new file has mode %v; want 0600", fi.Mode())
	}
	group := os.Getgid()
	if os.Getuid() == 0 {
		group = 12345
	}
	if err := os.Chown(file, -1, group); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("keys.yaml", link); err != nil {
		t.Fatal(err)
	}
	if err := addKey(link, other); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Lstat(file)
	if err != nil {
		t.Fatal(err)
	}
	if gid := fi.Sys().(*syscall.Stat_t).Gid; fi.Mode() != 0o640 || int(gid) != group {
		t.Errorf("mode %v, group %d; want 0640 and %d", fi.Mode(), gid, group)
	}
	if l, err := os.Readlink(link); err != nil || l != "keys.yaml" {
		t.Errorf("the link is %q, %v", l, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
