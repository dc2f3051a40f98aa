package vec

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestInterleavedScores shows that the scores of 8 query rows have the same bits with pairs of keys in
// vectors of 16, which Zen 4 does without, and with vectors of 8.
func TestInterleavedScores(t *testing.T) {
	if len(assembly) == 0 || assembly[0].Tier != "avx512" {
		t.Skip("no AVX-512 on this machine")
	}
	rng, plain := rand.New(rand.NewPCG(1, 2)), *narrowAVX512Half(kernelsAVX2)
	plain.tile.scores = []registerTile[scoresFunc]{{16, 0, scores16AVX512Half}, {1, 0, scores1AVX512Half}}
	interleaved := plain
	interleaved.tile.scores = append([]registerTile[scoresFunc]{{2 * pairedRun, 0, scores32AVX512Half}}, plain.tile.scores...)
	for _, d := range []int{1, 16, 40, 64, 80, 128} {
		for _, long := range []int{pairedRun, 128} {
			const keys, width = 112, 8
			k, q := random(rng, keys*(d+4)), random(rng, d*width)
			want, got := make([]float32, keys*width), make([]float32, keys*width)
			most, largest := filled(width, NegInf), filled(width, NegInf)
			runs := inRuns(rng, pairedRun, long, k, d+4, keys, d)
			plain.Scores(want, runs, d+4, q, d, Stairs{}, most)
			interleaved.Scores(got, runs, d+4, q, d, Stairs{}, largest)
			if !slices.Equal(got, want) || !slices.Equal(largest, most) {
				t.Errorf("d=%d, runs of at most %d keys: other bits", d, long)
			}
		}
	}
}
