package loaded

import (
	"bytes"
	"runtime"
	"slices"
	"sync"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// vulkans are names of the system's Vulkan loader.
var vulkans = map[string]string{"linux": "libvulkan.so.1", "windows": "vulkan-1.dll"}

// Layouts and numbers of vulkan.h.
type (
	vkInstanceInfo struct {
		kind uintptr // 1, and padding
		_    [7]uintptr
	}
	vkDeviceProperties struct {
		_    [5]uint32
		name [256]byte
		_    [600]byte // less follows
	}
	vkExtension struct {
		name [256]byte
		_    uint32 // its version
	}
)

const vkInstanceCreateInfo = 1

// MatrixDevices returns the names of the system's Vulkan devices with matrix units, which a library may reach or not: nil
// without Vulkan. It asks once, and keeps the drivers, which fail when they have been loaded some dozens of times.
func MatrixDevices(f port.Foreign) []string {
	matrixDevices.Do(func() { matrixNames = findMatrixDevices(f) })
	return matrixNames
}

var (
	matrixDevices sync.Once
	matrixNames   []string
)

func findMatrixDevices(f port.Foreign) (names []string) {
	library, err := f.Open(vulkans[runtime.GOOS])
	if err != nil {
		return nil
	}
	call := func(name string, words ...uintptr) bool {
		at := f.Symbol(library, name)
		if at == 0 {
			return false
		}
		var w [6]uintptr
		return int32(f.Call(at, copy(w[:], words), w)) >= 0 // 0 is success, and 5 an incomplete list
	}
	// What C reads and writes is on the heap.
	info, instance, count := &vkInstanceInfo{kind: vkInstanceCreateInfo}, new(uintptr), new(uintptr)
	if !call("vkCreateInstance", address(info), 0, address(instance)) {
		return nil
	}
	if !call("vkEnumeratePhysicalDevices", *instance, address(count), 0) || *count == 0 {
		return nil
	}
	devices := make([]uintptr, *count)
	if !call("vkEnumeratePhysicalDevices", *instance, address(count), address(&devices[0])) {
		return nil
	}
	for _, d := range devices {
		*count = 0
		if !call("vkEnumerateDeviceExtensionProperties", d, 0, address(count), 0) || *count == 0 {
			continue
		}
		list := make([]vkExtension, *count)
		if !call("vkEnumerateDeviceExtensionProperties", d, 0, address(count), address(&list[0])) {
			continue
		}
		if slices.ContainsFunc(list, func(e vkExtension) bool { return text(&e.name) == "VK_KHR_cooperative_matrix" }) {
			p := new(vkDeviceProperties)
			call("vkGetPhysicalDeviceProperties", d, address(p))
			names = append(names, text(&p.name))
		}
	}
	runtime.KeepAlive(devices)
	return names
}

// text returns the string that ends with a 0.
func text(b *[256]byte) string {
	s, _, _ := bytes.Cut(b[:], []byte{0})
	return string(s)
}
