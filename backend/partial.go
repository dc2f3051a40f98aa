package backend

import "fmt"

// Partial is what a call had finished when it ended early. A call with the same operands and
// options continues from it ([Call].Resume), on the same device or another one, and yields
// the result of an uninterrupted call, to the bit if devices and drivers are the same.
type Partial struct {
	// Call is the [Call.Signature], so that no other call continues from it.
	Call string
	// O and LSE, in host memory, have the shapes of the call's; LSE is the zero Tensor
	// when it was not requested. Only the rows in Done are valid.
	O, LSE Tensor
	// Done lists the finished rows.
	Done []Rows
	// Work is the state of the rows in progress, nil if there are none.
	Work *Work
}

// Signature describes c without the contents of its operands: a [Partial] of a call with
// another signature cannot be continued.
func (c *Call) Signature() string {
	page := 0
	if c.Pages != nil {
		page = c.K.Shape()[Seq]
	}
	return fmt.Sprintf("%+v of %v, keys and values %v, pages of %d, listed %t, lists %v, to %v, lse %t, mask %t, bias %t, relative %t, blocks %t of %d by %d, "+
		"scale %v, score mod %t, softcap %v, visible %+v, slopes %v, sinks %v, dropout %+v, low precision %t",
		c.Dims(), c.Q.DType(), c.K.DType(), page, c.Listed != nil, c.Lists.Shape(), c.O.DType(), !c.LSE.IsZero(), !c.Mask.IsZero(), !c.Bias.IsZero(), !c.Relative.IsZero(),
		!c.Blocks.IsZero(), c.BlockQ, c.BlockK, c.Scale, c.ScoreMod != nil, c.Softcap, c.Visible, c.Slopes, c.Sinks, c.Dropout, c.LowPrecision)
}

// Rows are query rows of some batches and heads: Lo <= index < Hi along [Batch], [Heads] and [Seq].
type Rows struct{ Lo, Hi [3]int }

// Work is the state of rows whose keys are processed in part.
type Work struct {
	Rows Rows
	// Keys is the first key that is not processed.
	Keys int
	// State is the intermediate result in the format of Kernel. A device with another kernel starts these rows again.
	State  []byte
	Kernel string
}

// Interrupted is the error of a call that ended early. A prepared call can be resumed; calls of
// caches and layers run again from the start. Find it with [errors.As].
type Interrupted struct {
	Partial *Partial
	Err     error // the reason: ErrDeviceLost or the context's error
}

// Error returns the reason and how much was finished.
func (e *Interrupted) Error() string {
	left := fmt.Sprintf("%d blocks of rows were finished", len(e.Partial.Done))
	if w := e.Partial.Work; w != nil {
		left += fmt.Sprintf(", and one up to key %d", w.Keys)
	}
	return fmt.Sprintf("%v (%s)", e.Err, left)
}

// Unwrap returns Err.
func (e *Interrupted) Unwrap() error { return e.Err }
