//go:build !linux

package hugepage

import "unsafe"

const Size = 2 << 20 // of a large page

// Advise does nothing: only Linux lets a program ask.
func Advise(unsafe.Pointer, int) {}
