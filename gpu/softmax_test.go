package gpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// TestSoftmaxGivesTheSameBits compares rows held in workgroup memory, rows that are read
// twice and rows in chunks: equal weights and sums, which agree with the formula.
func TestSoftmaxGivesTheSameBits(t *testing.T) {
	const rows, scale, softcap = 5, 0.7, 3
	const right = 40 // keys that a row does not see at its end, and one less each row
	ways := []way{
		{name: "too little workgroup memory", opt: Options{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: 4 << 10}}},
		{name: "chunks", opt: Options{MaxWork: 5 * softmaxOps * softmaxGrain}, cuts: true},
	}
	for _, keys := range []int{3, 700, 3000, 5000} {
		score := func(i int) float32 {
			if i == 2*keys {
				return float32(math.Inf(-1)) // seen, and of no weight
			}
			return 5 * wave(i)
		}
		bias := func(i int) float32 {
			if i%11 == 4 {
				return float32(math.Inf(-1))
			}
			return wave(2*i + 1)
		}
		sameOn(t, fmt.Sprint(keys, " keys"), ways, func(b *Backend, w way) [][]float32 {
			s, l := upload(t, b, host(t, backend.Shape{1, 1, rows, keys}, score)), alloc(t, b, backend.F32, backend.Shape{1, 1, rows, 1})
			p := &backend.Problem{Scale: scale, Visible: backend.Visibility{Offset: 0, Left: keys, Right: keys - right}}
			if keys > 700 {
				p.Softcap = softcap
			}
			p.Bias = must.Get(upload(t, b, host(t, backend.Shape{1, 1, 1, keys}, bias)).Broadcast(backend.Shape{1, 1, rows, keys}))(t)
			check(t, b.Softmax(t.Context(), s, l, p))
			ran := func(v shaders.Softmax) bool { return b.dev.Pipelines.Compiled(b.dev.Pipelines.Of(v)) }
			weights, lse := floats(t, b, s), floats(t, b, l)
			if w.name != "" {
				if !ran(softmaxAny) && (!w.cuts || keys > 5*softmaxGrain) {
					t.Errorf("%d keys, %s: the row was held", keys, w.name)
				}
				return [][]float32{weights, lse}
			}
			if v := b.chooseSoftmax(keys); !ran(v) || v.Held != (keys <= 3840) {
				t.Errorf("%d keys: %s is not what ran", keys, shaders.Key(v))
			}
			for r := range rows {
				terms, sum := make([]float64, keys), 0.0
				for j := range min(r+keys-right+1, keys) {
					x := scale * float64(score(r*keys+j))
					if keys > 700 {
						x = softcap * math.Tanh(x/softcap)
					}
					terms[j] = math.Exp(x + float64(bias(j)))
					sum += terms[j]
				}
				for j, x := range terms {
					exact := 0.0
					if sum > 0 {
						exact = x / sum
					}
					if got := float64(weights[r*keys+j]); !(math.Abs(got-exact) <= 3e-6*exact+1e-37) {
						t.Fatalf("%d keys: weight [%d, %d] is %v, should be %v", keys, r, j, got, exact)
					}
				}
				if got := float64(lse[r]); got != math.Log(sum) && !(math.Abs(got-math.Log(sum)) < 3e-6) {
					t.Errorf("%d keys: lse [%d] is %v, should be %v", keys, r, got, math.Log(sum))
				}
			}
			return [][]float32{weights, lse}
		})
	}
}
