package loaded

import "errors"

// The functions of foreign_cgo.go. A browser opens no libraries.

func openLibrary(string) (uintptr, error) { return 0, errors.New("a browser opens none") }

func symbolOf(uintptr, string) uintptr { return 0 }

func callWords(uintptr, int, [6]uintptr) uintptr { return 0 }

func callWithInfo(uintptr, callbackInfo, int, [6]uintptr) {}

func newCallbacks() (none callbackFunctions) { return none }
