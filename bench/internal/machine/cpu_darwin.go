package machine

import "syscall"

// CPU returns the processor's name; "" when the system does not report it.
func CPU() string {
	name, err := syscall.Sysctl("machdep.cpu.brand_string")
	if err != nil {
		return ""
	}
	return name
}
