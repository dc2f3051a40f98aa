package flags

import (
	"slices"
	"strings"
	"testing"
)

// TestJoinNegative: negative numbers, alone or in a list, belong to the flag before them.
func TestJoinNegative(t *testing.T) {
	for args, want := range map[string]string{
		"run --scale -0.5":              "run --scale=-0.5",
		"run --sinks -1,0.3 --causal":   "run --sinks=-1,0.3 --causal",
		"run --sinks 0.3,-1":            "run --sinks=0.3,-1",
		"run --sinks 0.3,-Inf":          "run --sinks=0.3,-Inf",
		"run --sinks 1,-.5 --scale -.5": "run --sinks=1,-.5 --scale=-.5",
		"run --sinks=0.3 -1":            "run --sinks=0.3 -1",
		"run --q a,-b.npy -h":           "run --q a,-b.npy -h",
		"run --causal --scale 1":        "run --causal --scale 1",
		"-1 -- -2":                      "-1 -- -2",
	} {
		if got := JoinNegative(strings.Fields(args)); !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%q becomes %q, want %q", args, got, want)
		}
	}
}
