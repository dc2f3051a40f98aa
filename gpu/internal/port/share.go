package port

import (
	"fmt"

	"github.com/gogpu/gputypes"
)

// Share returns a Device over a device that the program has opened on an adapter, and its
// queue. Close releases what was created through it, and leaves the device and the adapter to the
// program. lower returns the limits to keep, of those of the device. Share returns ErrInvalid for
// limits beyond those and ErrLost for a device that was released.
func Share(a *NativeAdapter, dev *NativeDevice, lower func(gputypes.Limits) gputypes.Limits) (Device, gputypes.AdapterInfo, error) {
	info := infoOf(a)
	lib, err := shareLibrary(dev, info.Backend)
	if err != nil {
		return nil, info, err
	}
	most := limitsOf(dev)
	l := lower(most)
	if err := within(l, most); err != nil {
		lib.close()
		return nil, info, err
	}
	return newDevice(lib, l), info, nil
}

func (d *device) Import(b *NativeBuffer) (Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	raw, size, usage, err := d.lib.importBuffer(b)
	if err != nil {
		return nil, err
	}
	if !usage.Contains(ImportUsage) {
		return nil, fmt.Errorf("the buffer lacks a usage, create it with Storage, CopySrc and CopyDst: %w", ErrInvalid)
	}
	for x := range d.buffers {
		if x.raw == raw {
			return nil, fmt.Errorf("the buffer is in use already, make views of that tensor or release it first: %w", ErrInvalid)
		}
	}
	d.lib.reference(raw)
	return d.keep(&buffer{raw: raw, size: size, imported: true}), nil
}
