package queue

import (
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
)

// ring is the uniform buffer of a device. Parameters follow one another and are overwritten
// when their submission has ended. Calls share it, and therefore find their bind groups again.
type ring struct {
	buf   port.Buffer
	size  uint64
	align int // of the parameters of a dispatch
	head  uint64
}

// ringBytes is the size of the ring.
const ringBytes = 1 << 20

// ringStep divides where the parameters of a submission begin. With one provider, bind groups
// depend on the remainder.
const ringStep = 256

func newRing(dev port.Device) (r ring, err error) {
	l := dev.Limits()
	r.size, r.align = min(ringBytes, l.MaxBufferSize&^15), max(int(l.MinUniformBufferOffsetAlignment), 16)
	r.buf, err = dev.CreateBuffer(r.size, resource.UniformUsage)
	return r, err
}

// most returns the largest size of the parameters of a submission.
func (r *ring) most() int { return int(min(r.size, batchBytes)) }

// find returns where bytes fit next to those of list.
func (r *ring) find(bytes uint64, list []*flight) (at uint64, ok bool) {
	if len(list) == 0 {
		return 0, true
	}
	end, first := r.size, list[0].lo
	if r.head <= first {
		end = first
	}
	step := uint64(max(r.align, ringStep))
	switch at = (r.head + step - 1) / step * step; {
	case at+bytes <= end:
		return at, true
	case r.head > first && bytes <= first:
		return 0, true
	}
	return 0, false
}
