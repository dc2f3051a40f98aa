//go:build !linux

package hugepage

import "unsafe"

// Advise does nothing: only Linux lets a program ask.
func Advise(unsafe.Pointer, int) {}
