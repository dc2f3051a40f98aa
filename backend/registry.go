package backend

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// DeviceType is the kind of a device.
type DeviceType string

// The kinds of devices, as WebGPU tells them apart.
const (
	CPU        DeviceType = "cpu"
	Integrated DeviceType = "integrated-gpu"
	Discrete   DeviceType = "discrete-gpu"
	Virtual    DeviceType = "virtual-gpu"
	Other      DeviceType = "other"
)

// Info describes a device.
type Info struct {
	// Name opens the device: "cpu", "gpu:0".
	Name string `json:"name"`
	// Device is the hardware's own name.
	Device string `json:"device"`
	// Type is the kind of device; a software GPU driver has type CPU.
	Type DeviceType `json:"type"`
	// Provider is the library that reaches it, with its version.
	Provider string `json:"provider"`
	// Driver is the driver's name and version, where there is one.
	Driver string `json:"driver,omitempty"`
	// Threads is how many threads compute, for a CPU.
	Threads int `json:"threads,omitempty"`
	// Limits are those that decide how work is cut.
	Limits []Limit `json:"limits,omitempty"`
}

// Driver makes the Backends of one family, such as "cpu" or "gpu".
type Driver interface {
	// Devices lists what can be opened now; an error says why nothing can
	// (ErrNoDevice).
	Devices() ([]Info, error)
	// Open opens one device: "" for the best, else what followed the colon in
	// "family:selector", a number or a part of the device's name. ErrNoDevice
	// when there is none such.
	Open(selector string) (Backend, error)
}

var registry = struct {
	sync.Mutex
	drivers map[string]Driver
}{drivers: map[string]Driver{}}

// Register makes a family of backends known under a name; a backend package
// calls it from init. A later registration of the same name replaces the first,
// so that a program can put a configured driver in its place.
func Register(family string, d Driver) {
	registry.Lock()
	defer registry.Unlock()
	registry.drivers[family] = d
}

func families() []string {
	registry.Lock()
	defer registry.Unlock()
	names := make([]string, 0, len(registry.drivers))
	for n := range registry.drivers {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func driver(family string) Driver {
	registry.Lock()
	defer registry.Unlock()
	return registry.drivers[family]
}

// Open opens a backend by name: "auto", "cpu", "gpu", "gpu:1" (by number),
// "gpu:NAME" (by a part of the device's name, letter case ignored). "auto" takes
// what [Auto] says and falls back to "cpu" when that does not open.
//
// Errors: ErrNoBackend for a family that is not registered, ErrNoDevice when the
// family has no such device.
func Open(name string) (Backend, error) {
	if name == "auto" || name == "" {
		pick, _ := Auto()
		be, err := openNamed(pick)
		if err != nil && pick != "cpu" {
			cpu, cpuErr := openNamed("cpu")
			return cpu, joinUnlessNil(cpuErr, err)
		}
		return be, err
	}
	return openNamed(name)
}

func joinUnlessNil(err, earlier error) error {
	if err == nil {
		return nil
	}
	return errors.Join(earlier, err)
}

func openNamed(name string) (Backend, error) {
	family, selector, _ := strings.Cut(name, ":")
	d := driver(family)
	if d == nil {
		return nil, fmt.Errorf("backend %q is unknown, there are auto, %s: %w", name, strings.Join(families(), ", "), ErrNoBackend)
	}
	return d.Open(selector)
}

// Auto returns the name that "auto" opens, and why: the first GPU that is
// hardware, discrete before integrated before virtual, else "cpu". A software
// GPU driver is never taken, as the CPU backend is the faster way to use the
// same cores.
func Auto() (name, why string) {
	best, rank := Info{}, 0
	software := 0
	var failed []string
	for _, l := range Devices() {
		if l.Err != nil {
			failed = append(failed, l.Err.Error())
		}
		for _, info := range l.Infos {
			r := map[DeviceType]int{Discrete: 3, Integrated: 2, Virtual: 1}[info.Type]
			if r > rank {
				best, rank = info, r
			}
			if info.Type == CPU && l.Family != "cpu" {
				software++
			}
		}
	}
	switch {
	case rank > 0:
		return best.Name, fmt.Sprintf("%s is a %s", best.Device, best.Type)
	case software > 0:
		return "cpu", "the GPU adapter found is a software driver, which would run slower on the same cores"
	case len(failed) > 0:
		return "cpu", strings.Join(failed, "; ")
	default:
		return "cpu", "no GPU backend is built in"
	}
}

// Listing is what one family answered to [Devices].
type Listing struct {
	Family string
	Infos  []Info
	Err    error // why there are none
}

// Devices asks every registered family for its devices, families in
// alphabetical order.
func Devices() []Listing {
	var all []Listing
	for _, f := range families() {
		infos, err := driver(f).Devices()
		all = append(all, Listing{f, infos, err})
	}
	return all
}
