package tile

import "github.com/seed90331342/attn/cpu/internal/pool"

// Saved is the sums of a call over whose keys several tasks go. The last of these folds them.
type Saved struct {
	states []float32 // StateFloats for each tile and sum; nil where one task takes all keys
	set    []bool    // the states that have seen keys
	memory []float32 // for states
}

// SavedFloats returns the floats of the sums that Saved holds.
func (l *Layout) SavedFloats() int {
	return l.Dims.Batch * l.Dims.KVHeads * l.Tiles * l.Sums * l.StateFloats
}

// Open allocates the sums of a call with layout l, or returns ErrMemory.
func (v *Saved) Open(l *Layout) (err error) {
	n := l.SavedFloats()
	if v.memory, err = pool.Resized(v.memory, n); err != nil {
		return err
	}
	if v.set, err = pool.Resized(v.set, n/l.StateFloats); err != nil {
		return err
	}
	v.states = v.memory
	clear(v.set)
	return nil
}

// Emptied returns a Saved without sums, with the memory of v.
func (v *Saved) Emptied() Saved { return Saved{set: v.set, memory: v.memory} }

// saved returns the state of the sum at of t.
func (a *Attention) saved(t *Tile, at int) (st state, set *bool) {
	l := a.Products.Layout
	n := t.index*l.Sums + at
	return l.stateIn(a.Saved.states[n*l.StateFloats:]), &a.Saved.set[n]
}

// Fold folds the saved sums of t into it, one after another.
func (a *Attention) Fold(s *Space, t *Tile) {
	t.sums.hasCur = false
	for at := range a.Products.Layout.Sums {
		if st, set := a.saved(t, at); *set {
			a.leave(s, t, at)
			t.sums.cur, t.sums.at, t.sums.hasCur = st, at, true
		}
	}
}
