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
	for _, keys := range []int{3, 700, 3000, 5000} {
		bias := func(i int) float32 {
			if i%11 == 4 {
				return float32(math.Inf(-1))
			}
			return wave(2*i + 1)
		}
		run := func(opt Options) (w, lse []float32, b *Backend) {
			b = open(t, opt)
			s := upload(t, b, host(t, backend.Shape{1, 1, rows, keys}, func(i int) float32 {
				if i == 2*keys {
					return float32(math.Inf(-1)) // seen, and of no weight
				}
				return 5 * wave(i)
			}))
			l := alloc(t, b, backend.F32, backend.Shape{1, 1, rows, 1})
			p := &backend.Problem{Scale: scale, Visible: backend.Visibility{Offset: 0, Left: keys, Right: keys - right}}
			if keys > 700 {
				p.Softcap = softcap
			}
			p.Bias = must.Get(upload(t, b, host(t, backend.Shape{1, 1, 1, keys}, bias)).Broadcast(backend.Shape{1, 1, rows, keys}))(t)
			check(t, b.Softmax(t.Context(), s, l, p))
			return floats(t, b, s), floats(t, b, l), b
		}
		want, wantLSE, b := run(Options{})
		for r := range rows {
			score := make([]float64, keys)
			sum := 0.0
			for j := range score {
				x := scale * float64(5*wave(r*keys+j))
				if r == 2 && j == 0 {
					x = math.Inf(-1)
				}
				if keys > 700 {
					x = softcap * math.Tanh(x/softcap)
				}
				score[j] = x + float64(bias(j))
				if j <= r+keys-right {
					sum += math.Exp(score[j])
				} else {
					score[j] = math.Inf(-1)
				}
			}
			for j, x := range score {
				exact := 0.0
				if sum > 0 {
					exact = math.Exp(x) / sum
				}
				if got := float64(want[r*keys+j]); !(math.Abs(got-exact) <= 3e-6*exact+1e-37) {
					t.Fatalf("%d keys: weight [%d, %d] is %v, should be %v", keys, r, j, got, exact)
				}
			}
			if got := float64(wantLSE[r]); got != math.Log(sum) && !(math.Abs(got-math.Log(sum)) < 3e-6) {
				t.Errorf("%d keys: lse [%d] is %v, should be %v", keys, r, got, math.Log(sum))
			}
		}
		if v := b.chooseSoftmax(keys); !b.dev.Pipelines.Compiled(b.dev.Pipelines.Of(v)) || v.Held != (keys <= 3840) {
			t.Errorf("%d keys: %s is not what ran", keys, shaders.Key(v))
		}
		for _, o := range []struct {
			what string
			opt  Options
		}{
			{"too little workgroup memory", Options{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: 4 << 10}}},
			{"chunks", Options{MaxWork: 5 * softmaxOps * softmaxGrain}},
		} {
			t.Run(fmt.Sprintf("%d keys %s", keys, o.what), func(t *testing.T) {
				got, lse, b := run(o.opt)
				if !b.dev.Pipelines.Compiled(b.dev.Pipelines.Of(softmaxAny)) && (o.opt.MaxWork == 0 || keys > 5*softmaxGrain) {
					t.Error("the row was held")
				}
				sameRow(t, "weights", got, want)
				sameRow(t, "lse", lse, wantLSE)
			})
		}
	}
}
