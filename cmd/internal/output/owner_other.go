//go:build !unix

package output

import "io/fs"

func keepOwner(string, fs.FileInfo) {}
