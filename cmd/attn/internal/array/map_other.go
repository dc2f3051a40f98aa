//go:build !unix

package array

import "errors"

// mapFile is not available: files are read into memory.
func mapFile(string, int) ([]byte, func(), error) {
	return nil, nil, errors.ErrUnsupported
}
