package op

// Path is a way of computing a call that does not take all options. It refuses the others by
// name. A call may be on several paths.
type Path uint

const (
	// CachePath is attention to a cache of keys and values.
	CachePath Path = 1 << iota
	// WindowPath is attention to a cache with a window.
	WindowPath
	// SharedPath is attention to a prefix that several sequences of a cache share.
	SharedPath
	// LayerPath is attention of a layer, which computes q, k and v.
	LayerPath
	// PackedPath is attention of packed sequences.
	PackedPath
	// WeightPath is attention that returns weights.
	WeightPath
	// StagePath is a stage alone.
	StagePath
	// SlicePath is attention of slices in host memory.
	SlicePath
)

// CheckPath returns an error that names the first option, of a *kernels.Options, that is set
// although one of the paths refuses it. Package kernels, which this package cannot import, sets
// it.
var CheckPath func(options any, on Path) error
