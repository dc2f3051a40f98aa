//go:build !linux || !amd64

package vec

func tilesPermitted() bool { return false }
