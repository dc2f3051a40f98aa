package tile

import "github.com/seed90331342/attn/cpu/internal/pool"

// Saved is the sums of a call over whose keys several tasks go. The last of these folds them.
type Saved struct {
	states []float32 // StateFloats for each tile and sum; nil where one task takes all keys
	set    []bool    // the states that are set
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

// state returns the place of the sum at of t.
func (a *Attention) state(t *Tile, at int) (n int, st state) {
	l := a.Products.Layout
	n = t.index*l.Sums + at
	return n, l.stateIn(a.Saved.states[n*l.StateFloats : (n+1)*l.StateFloats])
}

// Save stores the current sum of t for the task that folds the sums of all keys.
func (a *Attention) Save(t *Tile) {
	if !t.sums.hasCur {
		return
	}
	n, st := a.state(t, t.sums.at)
	st.copy(&t.sums.cur)
	a.Saved.set[n] = true
	t.sums.hasCur = false
}

// Fold folds the saved sums of t into it, one after another.
func (a *Attention) Fold(s *Space, t *Tile) {
	t.sums.hasCur = false
	for at := range a.Products.Layout.Sums {
		if n, st := a.state(t, at); a.Saved.set[n] {
			a.enter(s, t, at)
			t.sums.cur.copy(&st)
		}
	}
}
