package backend

import "math"

// ScoreMod is a function of the program's own that replaces scores, like score_mod of PyTorch's
// FlexAttention (Dong et al. 2024):
//
//	s = f(s, batch, head, row, key)
//
// It is stated for each language that runs it. A device whose language is missing returns
// ErrUnsupported, as it does for gradients without the derivative.
//
// Each result depends on its score, its [Position] and Values alone. The error of f is at most
// 8u·(|s| + |f|), that of ∂f/∂s at most 8u·(1 + |∂f/∂s|), with u = 2^-24; the bound of package
// oracle requires it. Finite results are at most 2^120 in magnitude. Where f is -Inf for a score of 0 it hides the key, and must be -Inf for any
// score, NaN included: assign -Inf, do not add it.
type ScoreMod struct {
	// Go replaces the scores of one row by f. scores[n] belongs to the key at.Key+n, which
	// the visibility rule shows to the row. Several goroutines call it at the same time.
	Go func(scores []float32, at Position)
	// Derivative replaces scores, which are those before Go, by ∂f/∂s. Gradients need it.
	Derivative func(scores []float32, at Position)
	// Values are numbers that f reads: slopes, tables. They must not change during a call, and
	// have no gradients.
	Values []float32
	// First is added to the batch, head, row and key of a position, as that of Dropout.
	First [4]int
}

// Position is the place of a score in a call.
type Position struct {
	Batch, Head int
	// Row is the position of the query row among the keys, i + Visible.Offset. It may be
	// negative.
	Row int
	// Key is the first key of a span.
	Key int
	// Values are those of the ScoreMod.
	Values []float32
}

// Position returns the place of row i and key j of head h of batch b for the ScoreMod of p.
func (p *Problem) Position(b, h, i, j int) Position {
	m := p.ScoreMod
	return Position{m.First[Batch] + b, m.First[Heads] + h, m.First[Seq] + i + p.Visible.Offset, m.First[Dim] + j, m.Values}
}

// ModHides reports whether the ScoreMod of p, if there is one, hides key j from row i.
func (p *Problem) ModHides(b, h, i, j int) bool {
	if p.ScoreMod == nil {
		return false
	}
	var s [1]float32
	p.ScoreMod.Go(s[:], p.Position(b, h, i, j))
	return s[0] < -math.MaxFloat32
}
