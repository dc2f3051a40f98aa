//go:build unix

package output

import (
	"io/fs"
	"os"
	"syscall"
)

// keepOwner gives a file the owner of another, if this user may.
func keepOwner(path string, from fs.FileInfo) {
	if stat, ok := from.Sys().(*syscall.Stat_t); ok {
		_ = os.Chown(path, int(stat.Uid), int(stat.Gid))
	}
}
