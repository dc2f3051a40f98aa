//go:build !unix

package main

import "errors"

// mapFile is not done here: files are read into memory.
func mapFile(string, int) ([]byte, func(), error) {
	return nil, nil, errors.ErrUnsupported
}
