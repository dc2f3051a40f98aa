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

// The kinds of devices that WebGPU distinguishes.
const (
	CPU        DeviceType = "cpu"
	Integrated DeviceType = "integrated-gpu"
	Discrete   DeviceType = "discrete-gpu"
	Virtual    DeviceType = "virtual-gpu"
	Other      DeviceType = "other"
)

// Info describes a device, with the fields of kernels.Info.
type Info struct {
	Name, Device     string
	Type             DeviceType
	Provider, Driver string
	Threads          int
	Limits           []Limit
	Features         []string
}

// Driver opens the Backends of one family, such as "cpu" or "gpu".
type Driver interface {
	// Devices lists the devices that can be opened now. If there are none it returns ErrNoDevice with the reason.
	Devices() ([]Info, error)
	// Open opens one device: "" is the best one, otherwise selector is the part after the colon of "family:selector", a
	// number or a part of the device's name. It returns ErrNoDevice when there is no such device.
	Open(selector string) (Backend, error)
}

var drivers sync.Map // a Driver for each family

// Register registers a family of backends under a name; backend packages call it in init. A later registration of a
// name replaces the earlier one, for programs that configure a driver.
func Register(family string, d Driver) { drivers.Store(family, d) }

func families() (all []string) {
	for family := range drivers.Range {
		all = append(all, family.(string))
	}
	slices.Sort(all)
	return all
}

// driver returns the driver of a family, nil if there is none.
func driver(family string) Driver {
	d, _ := drivers.Load(family)
	registered, _ := d.(Driver)
	return registered
}

// Open opens a backend by name: "auto", "cpu", "gpu", "gpu:1" (by number) or "gpu:NAME" (by a part of the device's
// name, ignoring case). "auto" and "" open the device of [Auto], or "cpu" if that fails.
//
// Errors: ErrNoBackend for a family that is not registered, ErrNoDevice when the family has no such device.
func Open(name string) (Backend, error) {
	if name != "auto" && name != "" {
		return openNamed(name)
	}
	pick, _ := Auto()
	be, err := openNamed(pick)
	if err == nil || pick == "cpu" {
		return be, err
	}
	cpu, cpuErr := openNamed("cpu")
	if cpuErr != nil {
		return nil, errors.Join(cpuErr, err)
	}
	return cpu, nil
}

func openNamed(name string) (Backend, error) {
	family, selector, _ := strings.Cut(name, ":")
	d := driver(family)
	if d == nil {
		if family == "cpu" || family == "gpu" {
			return nil, fmt.Errorf("backend %q is not in the program, add this import to it: import _ %q: %w", name, "github.com/seed90331342/attn/"+family, ErrNoBackend)
		}
		return nil, fmt.Errorf("backend %q is unknown, there are %s: %w", name, strings.Join(append([]string{"auto"}, families()...), ", "), ErrNoBackend)
	}
	return d.Open(selector)
}

// Auto returns the name that "auto" opens and the reason: the first hardware GPU, discrete
// before integrated before virtual before one of a kind that a browser hides, otherwise "cpu".
// It never chooses a software GPU driver, because the CPU backend uses the same cores and is faster.
func Auto() (name, why string) {
	best, rank, software := Info{}, 0, false
	var failed []string
	for _, l := range Devices() {
		if l.Err != nil {
			failed = append(failed, l.Err.Error())
		}
		for _, info := range l.Infos {
			if r := slices.Index(ranks, info.Type); r > rank {
				best, rank = info, r
			}
			software = software || info.Type == CPU && l.Family != "cpu"
		}
	}
	switch {
	case rank > 0:
		return best.Name, fmt.Sprintf("%s is a %s", best.Device, best.Type)
	case software:
		return "cpu", "the only GPU adapter is a software driver, which is slower on the same cores"
	case len(failed) > 0:
		return "cpu", strings.Join(failed, "; ")
	default:
		return "cpu", "no GPU backend is built in"
	}
}

// ranks are the kinds of devices, the preferred ones last. Browsers hide the kind: Other.
var ranks = []DeviceType{CPU, Other, Virtual, Integrated, Discrete}

// Listing lists the devices of one family.
type Listing struct {
	Family string
	Infos  []Info
	Err    error // the reason if there are none
}

// Devices lists the devices of all registered families, in alphabetical order.
func Devices() []Listing {
	var all []Listing
	for _, f := range families() {
		infos, err := driver(f).Devices()
		all = append(all, Listing{f, infos, err})
	}
	return all
}
