package backend

import "context"

// ScorePoint is a point between QKᵀ and softmax, in the order of [Problem].
type ScorePoint int

const (
	// Scaled scores are Scale·q·k.
	Scaled ScorePoint = iota
	// Capped scores are scaled and softcapped.
	Capped
	// Biased scores have all biases added, and -Inf for hidden keys: the input of the
	// softmax. Sinks and Dropout come later.
	Biased
)

// Scorer is implemented by backends that return scores.
type Scorer interface {
	// Scores turns the dot products of QK into the scores at a point, in place:
	//
	//	s [B, H, Sq, Sk] F32
	//
	// Before Biased no key is hidden. At Biased hidden keys have -Inf, whatever s held
	// there; a visible NaN remains.
	Scores(ctx context.Context, s Tensor, p *Problem, at ScorePoint) error
}

// Until returns p with only the options that apply up to a point.
func (p Problem) Until(at ScorePoint) Problem {
	if at < Biased {
		p = Problem{Scale: p.Scale, Softcap: p.Softcap, Visible: Everything()}
	}
	if at < Capped {
		p.Softcap = 0
	}
	return p
}
