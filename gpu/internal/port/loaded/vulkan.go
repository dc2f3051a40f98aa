package loaded

import (
	"bytes"
	"runtime"
	"slices"
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
// without Vulkan. It keeps the drivers loaded, which fail when they have been loaded some dozens of times.
func MatrixDevices() (names []string) {
	library, err := openLibrary(vulkans[runtime.GOOS])
	if err != nil {
		return nil
	}
	vulkan := func(name string, words ...uintptr) bool {
		at := symbolOf(library, name)
		return at != 0 && int32(call(at, words...)) >= 0 // 0 is success, and 5 an incomplete list
	}
	// What C reads and writes is on the heap.
	info, instance, count := &vkInstanceInfo{kind: vkInstanceCreateInfo}, new(uintptr), new(uintptr)
	if !vulkan("vkCreateInstance", address(info), 0, address(instance)) {
		return nil
	}
	if !vulkan("vkEnumeratePhysicalDevices", *instance, address(count), 0) || *count == 0 {
		return nil
	}
	devices := make([]uintptr, *count)
	if !vulkan("vkEnumeratePhysicalDevices", *instance, address(count), address(&devices[0])) {
		return nil
	}
	for _, d := range devices {
		*count = 0
		if !vulkan("vkEnumerateDeviceExtensionProperties", d, 0, address(count), 0) || *count == 0 {
			continue
		}
		list := make([]vkExtension, *count)
		if !vulkan("vkEnumerateDeviceExtensionProperties", d, 0, address(count), address(&list[0])) {
			continue
		}
		if slices.ContainsFunc(list, func(e vkExtension) bool { return text(&e.name) == "VK_KHR_cooperative_matrix" }) {
			p := new(vkDeviceProperties)
			vulkan("vkGetPhysicalDeviceProperties", d, address(p))
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
