package bench

import "syscall"

// cpuName returns the processor's name; "" when the system does not tell.
func cpuName() string {
	name, err := syscall.Sysctl("machdep.cpu.brand_string")
	if err != nil {
		return ""
	}
	return name
}
