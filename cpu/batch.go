package cpu

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

var _ backend.Batcher = (*Backend)(nil)

// AttentionBatch implements backend.Batcher: the tasks of all calls are one job, which
// the threads take from, those of the longest calls first. Each call is cut for as
// many threads as its share of the work is worth, so that one long sequence among
// many short ones keeps all of them busy, and short ones are not cut at all.
// Errors as for Attention.
func (be *Backend) AttentionBatch(ctx context.Context, calls []*backend.Call) error {
	if err := be.gate.enter(ctx, "attention"); err != nil {
		return err
	}
	defer be.gate.leave()
	var b batch
	defer b.close()
	err := b.open(be, calls)
	if err == nil {
		err = be.workers.run(ctx, &b, b.tasks, be.threads())
	}
	if err != nil {
		return fmt.Errorf("cpu: attention: %w", err)
	}
	return nil
}

// batch is calls that are computed together.
type batch struct {
	pinned       []backend.Pinned
	fused        []*fused
	jobs         []job
	first        []int // task of each job
	spans        []int // rows of scratch of each job
	tasks        int
	floats, rows int
}

// open opens calls; close gives back what it took, also after an error.
func (b *batch) open(be *Backend, calls []*backend.Call) error {
	type load struct {
		c    *backend.Call
		work int64
	}
	loads := make([]load, len(calls))
	total := int64(0)
	b.pinned = make([]backend.Pinned, len(calls))
	for n, c := range calls {
		if err := pinCall(&b.pinned[n], c); err != nil {
			return err
		}
		loads[n] = load{c, backend.NewPlan(c).FLOPs}
		total += loads[n].work
	}
	// Tasks are taken from the last one on.
	slices.SortStableFunc(loads, func(x, y load) int { return cmp.Compare(x.work, y.work) })
	b.jobs, b.first = make([]job, 0, len(calls)), make([]int, 0, len(calls))
	for _, l := range loads {
		threads := shareOf(l.work, total, be.threads())
		if ok, _ := fusedTakes(be.kernels, l.c); ok {
			f, err := be.openFused(l.c, threads)
			if err != nil {
				return err
			}
			b.fused = append(b.fused, f)
			b.add(f, f.tasks)
			continue
		}
		a, err := openAttention(l.c, threads)
		if err != nil {
			return err
		}
		b.add(a, a.tasks)
	}
	return nil
}

// shareOf returns for how many of threads a call of so much work among others is cut:
// 0 where it is no more than one task of the whole.
func shareOf(work, total int64, threads int) int {
	if float64(work)*float64(tasksPerThread*threads) <= float64(total) {
		return 0
	}
	return min(threads, int(float64(work)/float64(total)*float64(threads))+1)
}

func (b *batch) add(j job, tasks int) {
	b.jobs, b.first = append(b.jobs, j), append(b.first, b.tasks)
	b.tasks += tasks
	floats, rows := j.size()
	b.floats, b.rows, b.spans = max(b.floats, floats), max(b.rows, rows), append(b.spans, rows)
}

func (b *batch) close() {
	for _, f := range b.fused {
		f.release()
	}
	for n := range b.pinned {
		b.pinned[n].Unpin()
	}
}

// size implements job.
func (b *batch) size() (floats, rows int) { return b.floats, b.rows }

// task implements job.
func (b *batch) task(ctx context.Context, w *scratch, t int) error {
	n, found := slices.BinarySearch(b.first, t)
	if !found {
		n--
	}
	w.spans, w.sums = w.spans[:b.spans[n]], w.sums[:b.spans[n]] // which its tasks may go by
	return b.jobs[n].task(ctx, w, t-b.first[n])
}
