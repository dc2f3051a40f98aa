package backend

// Plan is what a backend will do for a call. It is computed by the code that
// then runs it.
type Plan struct {
	// Backend is the Info.Name of the device.
	Backend string `json:"backend"`
	// Path names the code that runs: "fused gonum blocks", "fused WGSL".
	Path string `json:"path"`
	// Why says in words why this path and these chunks.
	Why string `json:"why"`
	// Pairs counts the visible (query, key) pairs over all batches and query
	// heads, by the visibility rule; what a Mask or Bias hides still counts.
	Pairs int64 `json:"pairs"`
	// FLOPs is 2·(D+Dv) operations for each visible pair.
	FLOPs int64 `json:"flops"`
	// Bytes is what must move at least once: every operand and output, each
	// element once.
	Bytes int64 `json:"bytes"`
	// Scratch is the memory in bytes that the call takes beside its operands,
	// on the device.
	Scratch int64 `json:"scratch"`
	// Streamed is how many bytes the call moves between host and device memory,
	// both ways: 0 when all operands are in the backend's own.
	Streamed int64 `json:"streamed,omitempty"`
	// Chunks is how many pieces the work is cut into (blocks that goroutines
	// take, or dispatches).
	Chunks int `json:"chunks"`
	// Cut says in words how: "2 heads x 32 query blocks of 64, key blocks of 256".
	Cut string `json:"cut"`
	// Limits are the device limits that shaped the cut.
	Limits []Limit `json:"limits,omitempty"`
}

// Limit is a named limit of a device or of a plan.
type Limit struct {
	Name  string `json:"name"`
	Value int64  `json:"value"`
}

// NewPlan returns a Plan with everything filled in that follows from the call
// alone: Pairs, FLOPs and Bytes. Backends add the rest.
func NewPlan(c *Call) Plan {
	d := c.Dims()
	pairs := c.Visible.Pairs(d.Batch, d.SeqQ, d.SeqK) * int64(d.Heads)
	p := Plan{Pairs: pairs, FLOPs: pairs * 2 * int64(d.Dim+d.ValueDim)}
	if c.Pages != nil {
		p.Bytes = c.Pages.bytes(c)
	}
	outputs, inputs := c.Operands()
	for _, operands := range [2][]Operand{outputs[:], inputs[:]} {
		for _, o := range operands {
			paged := c.Pages != nil && (o.Name == "k" || o.Name == "v") // counted above
			if !paged && !o.Tensor.IsZero() {
				p.Bytes += o.Tensor.Bytes()
			}
		}
	}
	return p
}
