//go:build !darwin

package machine

import "os"

// CPU returns the processor's name; "" when the system does not report it.
func CPU() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return os.Getenv("PROCESSOR_IDENTIFIER") // Windows
	}
	return field(text, "model name")
}
