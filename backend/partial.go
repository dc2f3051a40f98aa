package backend

import "fmt"

// Partial is what a call had finished when it ended early. A call with the same
// operands and options goes on from it ([Call].Resume), on the same device or on
// another, and gives the result that the whole call would have given, to the bit
// where the devices and their drivers are the same.
type Partial struct {
	// Call says what the call computes, so that no other goes on from it.
	Call string
	// O and LSE, in host memory, are shaped as the call's; LSE is the zero
	// Tensor when it was not wanted. Only the rows of Done are there.
	O, LSE Tensor
	// Done lists the rows that are finished: all their keys are in.
	Done []Rows
	// Work is what was computed of the rows after those, nil when nothing was.
	Work *Work
}

// Rows are query rows of some batches and heads: Lo <= index < Hi along [Batch],
// [Heads] and [Seq].
type Rows struct{ Lo, Hi [3]int }

// Has reports whether all of s are among r.
func (r Rows) Has(s Rows) bool {
	for i := range r.Lo {
		if s.Lo[i] < r.Lo[i] || s.Hi[i] > r.Hi[i] {
			return false
		}
	}
	return true
}

// Work is how far the keys of some rows are in.
type Work struct {
	Rows Rows
	// Keys is the position of the first key that is not in.
	Keys int
	// State is what goes on from there, in the form of the kernel that made it:
	// a device with another kernel starts these rows again.
	State  []byte
	Kernel string
}

// Interrupted is the error of a call that left a Partial behind. Reach it with
// [errors.As].
type Interrupted struct {
	Partial *Partial
	Err     error // why: ErrDeviceLost, or the context's error
}

// Error says why, and how much was finished.
func (e *Interrupted) Error() string {
	left := fmt.Sprintf("%d blocks of rows were finished", len(e.Partial.Done))
	if w := e.Partial.Work; w != nil {
		left += fmt.Sprintf(", and one up to key %d", w.Keys)
	}
	return fmt.Sprintf("%v (%s)", e.Err, left)
}

// Unwrap returns Err.
func (e *Interrupted) Unwrap() error { return e.Err }
