// Package machine reads the processor, the memory and the load of this machine from the
// operating system, most of it on Linux only.
package machine

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
)

// Resident returns the process's resident memory in bytes without garbage; 0 when unknown.
func Resident() int64 {
	debug.FreeOSMemory()
	return kibibytes("/proc/self/status", "VmRSS")
}

// PeakResident returns the highest resident memory since the last ResetPeak.
func PeakResident() int64 { return kibibytes("/proc/self/status", "VmHWM") }

// ResetPeak restarts PeakResident and reports whether the system supports it (proc(5)).
func ResetPeak() bool { return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) == nil }

// field returns the value of the first line "key: value" of text; "" when there is none.
func field(text []byte, key string) string {
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// kibibytes reads a line "name: 12 kB" of a file, in bytes; 0 when there is none.
func kibibytes(path, name string) int64 {
	text, _ := os.ReadFile(path)
	kib, _ := strconv.ParseInt(strings.TrimSuffix(field(text, name), " kB"), 10, 64)
	return kib << 10
}
