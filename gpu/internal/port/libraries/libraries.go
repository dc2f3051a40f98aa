// Package libraries chooses the WebGPU libraries of a build and lists their adapters. It alone knows all of
// them.
package libraries

import (
	"errors"
	"fmt"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Adapters lists the adapters. The caller releases them. It returns port.ErrNoAdapter when there
// are none.
func Adapters() ([]*port.Adapter, error) {
	list, err := linked()
	if err == nil && len(list) == 0 {
		err = errors.New("there is no Vulkan, Metal or DX12 driver")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), port.ErrNoAdapter)
	}
	all := make([]*port.Adapter, len(list))
	for i, a := range list {
		all[i] = port.NewAdapter(a)
	}
	return all, nil
}

// Share returns a Device over a device that the program has opened on an adapter, and its queue. See
// port.Share. It returns port.ErrLost for a device that was released.
func Share(a *Adapter, dev *Device, lower func(gputypes.Limits) gputypes.Limits) (port.Device, port.Info, error) {
	lib, most, info, err := share(a, dev)
	if err != nil {
		return nil, info, err
	}
	d, err := port.Share(lib, most, lower)
	return d, info, err
}
