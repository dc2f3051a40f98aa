package op

// Path is a way of computing a call that does not take all options. It refuses the others by
// name. A call may be on several paths.
type Path uint

const (
	CachePath  Path = 1 << iota // attention to a cache of keys and values
	WindowPath                  // attention to a cache with a window
	SharedPath                  // attention to a prefix that several sequences of a cache share
	LayerPath                   // attention of a layer, which computes q, k and v
	PackedPath                  // attention of packed sequences
	WeightPath                  // attention that returns weights
	StagePath                   // a stage alone
	SlicePath                   // attention of slices in host memory
	IndexPath                   // index scores
	ListPath                    // lists of keys in device memory
)

// CheckPath returns an error that names the first option, of a *kernels.Options, that is set
// although one of the paths refuses it. Package kernels, which this package cannot import, sets
// it.
var CheckPath func(options any, on Path) error
