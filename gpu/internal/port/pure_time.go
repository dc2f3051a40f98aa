//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"reflect"
	"unsafe"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
	"github.com/gogpu/wgpu/hal"
)

// The drivers of wgpu 0.34 write timestamps at the ends of compute passes. Its own compute
// passes have no field for them, and its render passes write none on Vulkan. The port
// therefore records them with the driver's objects, which are unexported fields of the
// library's.

// rawClock has two timestamps for each slot.
type rawClock struct{ queries hal.QuerySet }

// rawStamps is the mappable buffer for which the timestamps of a slot are resolved.
type rawStamps struct{ resolved hal.Buffer }

// driverOf returns the driver's object in a field of one of the library's objects. ok is
// false where there is none of this type.
func driverOf[T any](object any, field string) (driver T, ok bool) {
	f := reflect.ValueOf(object).Elem().FieldByName(field)
	if !f.IsValid() {
		return driver, false
	}
	driver, ok = reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().Interface().(T)
	return driver, ok
}

// startClock creates the queries and buffers.
func (l *library) startClock() error {
	growStack()
	c, device := &l.clock, l.dev.HalDevice()
	queue, ok := driverOf[hal.Queue](l.queue, "hal")
	if !ok || device == nil || queue.GetTimestampPeriod() <= 0 {
		return nil
	}
	queries, err := device.CreateQuerySet(&hal.QuerySetDescriptor{Type: hal.QueryTypeTimestamp, Count: 2 * timedSlots})
	if err != nil {
		return nil // the driver has none
	}
	c.queries = queries
	for i := range c.slots {
		b, err := device.CreateBuffer(&hal.BufferDescriptor{Size: stampBytes, Usage: gputypes.BufferUsageMapRead | gputypes.BufferUsageCopyDst})
		if err != nil {
			return translate(err, ErrMemory)
		}
		c.slots[i].resolved = b
	}
	c.unit = float64(queue.GetTimestampPeriod())
	return nil
}

// stamp returns commands that write a timestamp when all earlier commands have ended: of a
// slot the first, or the second, with which both are resolved.
func (l *library) stamp(s *timedSlot, second bool) (*wgpu.CommandBuffer, error) {
	e, err := l.dev.CreateCommandEncoder(nil)
	if err != nil {
		return nil, translate(err, ErrInvalid)
	}
	driver, ok := driverOf[hal.CommandEncoder](e, "halEncoder")
	if !ok {
		e.DiscardEncoding()
		l.clock.there = false
		return nil, nil
	}
	query := s.first
	if second {
		query++
	}
	driver.BeginComputePass(&hal.ComputePassDescriptor{
		TimestampWrites: &hal.ComputePassTimestampWrites{QuerySet: l.clock.queries, EndOfPassWriteIndex: &query},
	}).End()
	if second {
		driver.ResolveQuerySet(l.clock.queries, s.first, 2, s.resolved, 0)
	}
	buf, err := e.Finish()
	return buf, translate(err, ErrInvalid)
}

// timed puts the timestamps of a slot around the recorded commands.
func (l *library) timed(s *timedSlot) error {
	first, err := l.stamp(s, false)
	if err != nil || first == nil {
		return err
	}
	l.done = append([]*wgpu.CommandBuffer{first}, l.done...)
	second, err := l.stamp(s, true)
	if err == nil {
		l.done = append(l.done, second)
	}
	return err
}

func (l *library) readStamps(s *timedSlot, dst []byte) error {
	growStack()
	device := l.dev.HalDevice()
	m, err := device.MapBuffer(s.resolved, 0, stampBytes)
	if err != nil {
		return translate(err, ErrInvalid)
	}
	copy(dst, unsafe.Slice((*byte)(m.Ptr), stampBytes))
	return translate(device.UnmapBuffer(s.resolved), ErrInvalid)
}

// releaseClock releases the queries and buffers of startClock.
func (l *library) releaseClock() {
	c := &l.clock
	device := l.dev.HalDevice()
	if device == nil {
		return // the program has released its device, with all that was made on it
	}
	for i := range c.slots {
		if b := c.slots[i].resolved; b != nil {
			device.DestroyBuffer(b)
		}
		c.slots[i] = timedSlot{}
	}
	if c.queries != nil {
		device.DestroyQuerySet(c.queries)
	}
	c.queries = nil
}
