package op

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Path is a way of computing a call that does not take all options. It refuses the others by
// name. A call may be on several paths.
type Path uint

const (
	PackedPath Path = 1 << iota // attention of packed sequences
	WeightPath                  // attention that returns weights
	StagePath                   // a stage alone
	SlicePath                   // attention of slices in host memory
	IndexPath                   // index scores
	ListPath                    // lists of keys in device memory
	LayerPath                   // attention of a layer, which computes q, k and v
	CachePath                   // attention to a cache of keys and values
	WindowPath                  // attention to a cache with a window
	SharedPath                  // attention to a prefix that several sequences of a cache share
)

// Paths has the reason why each Path refuses options, and the error.
var Paths = map[Path]struct {
	Reason string
	Err    error
}{
	PackedPath: {"packed sequences differ in length: call Attention for each sequence", backend.ErrUnsupported},
	WeightPath: {"the stages QK and Softmax, which compute weights, cannot use it", backend.ErrUnsupported},
	StagePath:  {"a stage alone cannot use it", backend.ErrUnsupported},
	SlicePath:  {"a call with slices returns the output alone and cannot use it: call Attention", backend.ErrUnsupported},
	IndexPath:  {"index scores have no such option: Causal, Window, Align, Offset and KLen hide keys", backend.ErrUnsupported},
	ListPath:   {"lists of keys in device memory (KeyIndices.Tensor) cannot use it: give KeyIndices.Indices", backend.ErrUnsupported},
	LayerPath:  {"a layer computes its own queries, keys and values", backend.ErrUnsupported},
	CachePath:  {"the cache sets it itself", backend.ErrOption},
	WindowPath: {"the cache has a window, so that keys change their places with each append", backend.ErrOption},
	SharedPath: {"with it a shared prefix would not be the same for all rows", backend.ErrOption},
}

// onScores are the paths that refuse tensors and ids with elements for each row or key.
const onScores = PackedPath | WindowPath | SharedPath | IndexPath | ListPath

// Refused has every option of kernels.Options, with the paths that refuse it.
var Refused = map[string]Path{
	"Scale":        IndexPath,
	"ScoreMod":     WindowPath | SharedPath | IndexPath | ListPath,
	"Softcap":      IndexPath,
	"Causal":       0,
	"Window":       WindowPath | SharedPath,
	"Align":        CachePath,
	"Offset":       WindowPath | SharedPath,
	"KLen":         CachePath,
	"Prefix":       WindowPath | SharedPath | IndexPath | ListPath,
	"Spans":        PackedPath | SharedPath | IndexPath | ListPath,
	"QSegments":    onScores,
	"KSegments":    onScores,
	"Mask":         onScores,
	"Bias":         onScores,
	"ALiBi":        SharedPath | IndexPath,
	"RelativeBias": onScores,
	"BlockMask":    onScores,
	"KeyIndices":   PackedPath | WeightPath | StagePath | LayerPath | WindowPath | SharedPath | IndexPath,
	"Sinks":        IndexPath,
	"Dropout":      WindowPath | SharedPath | IndexPath | ListPath,
	"LowPrecision": StagePath | IndexPath,
	"Pages":        WeightPath | StagePath | SlicePath | LayerPath | CachePath | IndexPath,
	"CuQ":          StagePath | LayerPath | CachePath | IndexPath,
	"CuK":          StagePath | LayerPath | CachePath | IndexPath,
	"LSE":          StagePath | SlicePath | IndexPath,
	"Weights":      PackedPath | StagePath | SlicePath | WindowPath | SharedPath | IndexPath,
}

// CheckPath returns an error that names the first of the options that one of the paths refuses, and
// the first of these paths. All refuse an option that the table lacks.
func CheckPath(options []string, on Path) error {
	for _, option := range options {
		by, known := Refused[option]
		if !known {
			by = on
		}
		if by &= on; by != 0 {
			first := Paths[by&-by]
			return fmt.Errorf("%s is set, but %s: %w", option, first.Reason, first.Err)
		}
	}
	return nil
}
