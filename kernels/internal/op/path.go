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
)

// CheckPath returns an error that names the first option, of a *kernels.Options, that is set
// although one of the paths refuses it. Package kernels, which this package cannot import, sets
// it.
var CheckPath func(options any, on Path) error

// Way is a short way past a part of the general computation. A call goes it only if every option that is set has
// its mark in the table of options: one that nobody has marked takes the general way.
type Way uint

const (
	// Placeless leaves the positions of rows out, where they decide nothing: one call for batches whose offsets differ,
	// and a step of one row over a cache, which sees all keys.
	Placeless Way = 1 << iota
	// Small is the way of package cpu for groups of few rows and few keys, without tiles.
	Small
)

// Takes reports whether the options that are set, of a *kernels.Options, may all go a way.
var Takes func(options any, on Way) bool
