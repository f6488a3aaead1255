//go:build unix

package cli

import (
	"io/fs"
	"os"
	"syscall"
)

// ownAs gives file the owner and group of another one, of which only root can be in need.
func ownAs(file string, like fs.FileInfo) error {
	want, ok := like.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	fi, err := os.Stat(file)
	if err != nil {
		return err
	}
	if has, ok := fi.Sys().(*syscall.Stat_t); ok && has.Uid == want.Uid && has.Gid == want.Gid {
		return nil
	}
	return os.Chown(file, int(want.Uid), int(want.Gid))
}
