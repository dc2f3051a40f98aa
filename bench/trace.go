package bench

import (
	"context"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
)

// heard is what a backend tells of its calls beside their results, as far as it
// does (backend.Trace). Timed repetitions are not listened to.
type heard struct {
	mu sync.Mutex
	told
}

// told are sums over calls.
type told struct {
	kernel time.Duration // by the device's own clock
	pieces int           // that kernel is the sum of
	// compile is how long so many kernels took to compile.
	compile  time.Duration
	compiled int
	// move is how long so many bytes took between host and device.
	move  time.Duration
	moved int64
}

// listen returns a context whose calls are listened to.
func (h *heard) listen(ctx context.Context) context.Context {
	add := func(f func(t *told)) {
		h.mu.Lock()
		defer h.mu.Unlock()
		f(&h.told)
	}
	return backend.WithTrace(ctx, &backend.Trace{
		Kernel:  func(took time.Duration) { add(func(t *told) { t.kernel += took; t.pieces++ }) },
		Compile: func(_ string, took time.Duration) { add(func(t *told) { t.compile += took; t.compiled++ }) },
		Move:    func(bytes int64, took time.Duration) { add(func(t *told) { t.move += took; t.moved += bytes }) },
	})
}

// take returns what was heard since the last time.
func (h *heard) take() told {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.told
	h.told = told{}
	return t
}

// prepared adds what the warm-up told to what the timing of a case says beside
// its repetitions.
func (t *timing) prepared(heard told) {
	t.clock = t.clock || heard.pieces > 0
	t.compile += heard.compile
	t.compiled += heard.compiled
}

// kernel measures one call by the device's own clock. It is a call of its own, as
// reading that clock takes time. Where calls are long one does.
func (b *bencher) kernel(t *timing) error {
	if !t.clock || sum(t.listened) > stagesSeconds {
		return nil
	}
	var h heard
	seconds, err := b.timeIn(h.listen(b.work))
	if err != nil {
		return err
	}
	t.listened = append(t.listened, seconds)
	if all := h.take(); all.pieces > 0 {
		t.kernels = append(t.kernels, all.kernel.Seconds())
	}
	return nil
}
