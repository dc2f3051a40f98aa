package port

import (
	"fmt"
	"strings"

	"github.com/gogpu/gputypes"
)

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
	if missing := ImportUsage &^ usage; missing != 0 {
		return nil, fmt.Errorf("the buffer has no usage %s, create it with Storage, CopySrc and CopyDst: %w", usageNames(missing), ErrInvalid)
	}
	for x := range d.buffers {
		if x.raw == raw {
			return nil, fmt.Errorf("the buffer is in use already, make views of that tensor or release it first: %w", ErrInvalid)
		}
	}
	d.lib.reference(raw)
	return d.keep(&buffer{raw: raw, size: size, imported: true}), nil
}

// usageNames returns the names of the usages that Import needs.
func usageNames(u gputypes.BufferUsage) string {
	var names []string
	for _, x := range []struct {
		bit  gputypes.BufferUsage
		name string
	}{{gputypes.BufferUsageStorage, "Storage"}, {gputypes.BufferUsageCopySrc, "CopySrc"}, {gputypes.BufferUsageCopyDst, "CopyDst"}} {
		if u&x.bit != 0 {
			names = append(names, x.name)
		}
	}
	return strings.Join(names, ", ")
}
