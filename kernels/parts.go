package kernels

// Part is a rectangle of the scores of a call in which one visibility rule holds.
type Part struct {
	// Lo and Hi are the ranges [Lo, Hi) of batches, query rows and keys.
	Lo, Hi [3]int
	// Visible is the rule for the rows and keys of the part, counted from its first ones.
	// Its KLen, unless nil, has one length for each batch of the part.
	Visible Visibility
}

// Parts returns the parts of a call with lengths d. Every row of every batch belongs to one
// part, and the part has all keys that the row may see: programs that distribute a call
// over machines compute each part, or pieces of it, as a call of its own with a Window, an
// Offset and a KLen. A call without a Prefix, segments and different offsets is one part; a call
// without rows or keys has none. The lengths of packed sequences are not considered.
//
// It returns ErrShape and ErrOption as [Device.Prepare] does.
func (o *Options) Parts(d Dims) ([]Part, error) {
	if err := divides(d.Heads, d.KVHeads, "k", "q"); err != nil {
		return nil, err
	}
	p, err := o.problem(d)
	if err != nil || empty(d) {
		return nil, err
	}
	regions := p.regions
	if regions == nil {
		regions = []region{wholeRegion(p.dims)}
	}
	parts := make([]Part, len(regions))
	for i, x := range regions {
		parts[i].Visible = x.visible(p.Visible)
		for at, axis := range [3]int{Batch, Seq, Dim} {
			parts[i].Lo[at], parts[i].Hi[at] = x.lo[axis], x.hi[axis]
		}
	}
	return parts, nil
}
