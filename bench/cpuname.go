//go:build !darwin

package bench

import "os"

// cpuName returns the processor's name; "" when the system does not tell.
func cpuName() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return os.Getenv("PROCESSOR_IDENTIFIER") // Windows
	}
	return field(text, "model name")
}
