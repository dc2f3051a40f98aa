//go:build !js && !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"reflect"
	"unsafe"

	"github.com/gogpu/wgpu"
	"github.com/gogpu/wgpu/core"
	"github.com/gogpu/wgpu/hal"
)

// The drivers of wgpu 0.34 write timestamps at the ends of compute passes. Its own compute
// passes have no field for them, and its render passes write none on Vulkan. The port
// therefore records them with the driver's objects, which are unexported fields of the
// library's.

type rawQueries = hal.QuerySet

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

// createQueries returns nil where the driver has none.
func (l *library) createQueries(count int) (rawQueries, error) {
	growStack()
	if device := l.dev.HalDevice(); device != nil {
		if q, err := device.CreateQuerySet(&hal.QuerySetDescriptor{Type: hal.QueryTypeTimestamp, Count: uint32(count)}); err == nil {
			return q, nil
		}
	}
	return nil, nil
}

func (l *library) releaseQueries(q rawQueries) {
	if device := l.dev.HalDevice(); q != nil && device != nil {
		device.DestroyQuerySet(q)
	}
}

// tickTime returns the nanoseconds of a tick, 0 without timestamps.
func (l *library) tickTime() (float64, error) {
	if queue, ok := driverOf[hal.Queue](l.queue, "hal"); ok && l.clock.queries != nil {
		return float64(queue.GetTimestampPeriod()), nil
	}
	return 0, nil
}

// mappable returns the driver's buffer for the timestamps of a slot. The library's own maps wait for
// all submissions.
func (s *timedSlot) mappable() hal.Buffer {
	b, _ := driverOf[*core.Buffer](s.staging, "core")
	guard := b.Device().SnatchLock().Read()
	defer guard.Release()
	return b.Raw(guard)
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
		driver.ResolveQuerySet(l.clock.queries, s.first, 2, s.mappable(), 0)
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
	device, b := l.dev.HalDevice(), s.mappable()
	m, err := device.MapBuffer(b, 0, stampBytes)
	if err != nil {
		return translate(err, ErrInvalid)
	}
	copy(dst, unsafe.Slice((*byte)(m.Ptr), stampBytes))
	return translate(device.UnmapBuffer(b), ErrInvalid)
}
