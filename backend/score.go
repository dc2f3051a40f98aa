package backend

import "context"

// ScorePoint names a point between QKᵀ and softmax at which scores can be looked at,
// in the order of [Problem].
type ScorePoint int

const (
	// Scaled scores are Scale·q·k.
	Scaled ScorePoint = iota
	// Capped scores have the softcap too.
	Capped
	// Biased scores have all that is added, and -Inf where a key is hidden: those
	// that softmax takes. Sinks and Dropout come after it.
	Biased
)

// Scorer is implemented by backends that give scores out.
type Scorer interface {
	// Scores turns dot products, as QK gives them, into scores at a point, in place:
	//
	//	s [B, H, Sq, Sk] F32
	//
	// Before Biased nothing is hidden; at Biased hidden keys get -Inf, whatever s
	// held there. NaN in what is visible stays.
	Scores(ctx context.Context, s Tensor, p *Problem, at ScorePoint) error
}

// Until returns the part of p that makes scores at a point: the rest is off.
func (p Problem) Until(at ScorePoint) Problem {
	if at < Biased {
		p = Problem{Scale: p.Scale, Softcap: p.Softcap, Visible: Everything()}
	}
	if at < Capped {
		p.Softcap = 0
	}
	return p
}
