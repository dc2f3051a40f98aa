// Package libraries chooses the WebGPU libraries of a build and lists their adapters. It alone knows all of them.
package libraries

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/loaded"
)

// Environment is the variable that names a library to open where a program does not.
const Environment = "ATTN_WEBGPU"

// None is the name of no library: only the linked one is used.
const None = "off"

// system are names by which a system's loader finds a library with matrices.
var system = map[string][]string{
	"linux": {"libwebgpu_dawn.so.0", "libwebgpu_dawn.so"}, "darwin": {"libwebgpu_dawn.dylib"}, "windows": {"webgpu_dawn.dll"},
}

// Adapters lists the adapters of the linked library and of one that is opened: the library that the argument names, or
// the environment, else one that the system's loader finds. The first are those of a library that is named, and of one
// that is found if it has hardware: they are preferred to equal ones. The caller releases them. It returns
// port.ErrNoAdapter when there are none, and when the named library cannot be used.
func Adapters(library string) ([]*port.Adapter, error) {
	list, err := linked()
	more, first, openErr := opened(cmp.Or(library, os.Getenv(Environment)))
	if openErr != nil {
		for _, a := range list {
			a.Release()
		}
		return nil, openErr
	}
	if first {
		list = append(more, list...)
	} else {
		list = append(list, more...)
	}
	if err == nil && len(list) == 0 {
		err = errors.New("there is no Vulkan, Metal or DX12 driver")
	}
	if err != nil && len(list) == 0 {
		return nil, fmt.Errorf("%s: %w", err.Error(), port.ErrNoAdapter)
	}
	all := make([]*port.Adapter, len(list))
	for i, a := range list {
		all[i] = port.NewAdapter(a)
	}
	return all, nil
}

// matrixDevices are those of Vulkan, which is asked once.
var matrixDevices = sync.OnceValue(loaded.MatrixDevices)

// Unreached marks the features of adapters whose matrix units Vulkan offers and no library at hand. It loads all drivers.
func Unreached(infos []port.Info) {
	if slices.ContainsFunc(infos, func(i port.Info) bool { return len(i.Features.Matrices) > 0 }) {
		return
	}
	for i := range infos {
		infos[i].Features.Unreached = slices.Contains(matrixDevices(), infos[i].Name)
	}
}

// opened lists the adapters of a library that is opened, "" for one that the system finds.
func opened(library string) (all []port.LibraryAdapter, first bool, err error) {
	switch {
	case library == None:
	case library != "":
		all, err = loaded.Adapters(library)
		first = true
	default:
		for _, name := range system[runtime.GOOS] {
			if all, err = loaded.Adapters(name); err == nil {
				break
			}
		}
		err = nil // nobody asked for it
		first = slices.ContainsFunc(all, func(a port.LibraryAdapter) bool { return a.Info().DeviceType != gputypes.DeviceTypeCPU })
	}
	return all, first, err
}
