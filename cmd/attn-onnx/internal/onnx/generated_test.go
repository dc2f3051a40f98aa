package onnx

import (
	"flag"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var update = flag.Bool("update", false, "write the generated cases of testdata/onnx-generated")

// generator is the command that writes the cases. It is in each model as the producer.
const generator = "go test ./cmd/attn-onnx/internal/onnx -run Generated -update"

// mersenne is the generator of random numbers of numpy.random.seed and rand (Matsumoto and
// Nishimura 1998, MT19937), from which the ONNX project draws its inputs.
type mersenne struct {
	state [624]uint32
	next  int
	spare *float64 // of randn
}

func newMersenne(seed uint32) *mersenne {
	r := &mersenne{next: 624}
	for i := range r.state {
		r.state[i] = seed
		seed = 1812433253*(seed^seed>>30) + uint32(i) + 1
	}
	return r
}

func (r *mersenne) uint32() uint32 {
	if r.next == len(r.state) {
		for i := range r.state {
			y := r.state[i]&0x80000000 | r.state[(i+1)%624]&0x7fffffff
			r.state[i] = r.state[(i+397)%624] ^ y>>1 ^ y&1*0x9908b0df
		}
		r.next = 0
	}
	y := r.state[r.next]
	r.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

// float64 returns a number from 0 to 1 with 53 random bits.
func (r *mersenne) float64() float64 {
	a, b := r.uint32()>>5, r.uint32()>>6
	return (float64(a)*(1<<26) + float64(b)) / (1 << 53)
}

// uniform draws numbers from 0 to 1.
func (r *mersenne) uniform(shape ...int) []float64 {
	data := make([]float64, clitest.Elements(shape))
	for i := range data {
		data[i] = r.float64()
	}
	return data
}

// rand draws a tensor of f32.
func (r *mersenne) rand(shape ...int) *onnxfile.Tensor {
	return filled(onnxfile.Float, r.uniform(shape...), shape...)
}

// int64s returns a tensor of one axis.
func int64s(data ...int) *onnxfile.Tensor {
	t := &onnxfile.Tensor{Type: onnxfile.Int64, Shape: []int{len(data)}}
	for _, n := range data {
		t.Data = append(t.Data, byte(n), 0, 0, 0, 0, 0, 0, 0)
	}
	return t
}

// repeated returns a tensor of one number.
func repeated(d onnxfile.DataType, x float64, shape ...int) *onnxfile.Tensor {
	return filled(d, slices.Repeat([]float64{x}, clitest.Elements(shape)), shape...)
}

// windowCases are the cases of Attention with windows that the ONNX project has as code, under their names there.
func windowCases() map[string]*onnxProblem {
	cases := map[string]*onnxProblem{}
	add := func(name string, left, right, seed int, change func(p *onnxProblem, rng *mersenne)) {
		rng := newMersenne(uint32(seed))
		p := &onnxProblem{batch: 2, heads: 3, kvHeads: 3, seqQ: 4, seqK: 6, dim: 8, valueDim: 8, left: left, right: right}
		p.opset, p.floats, p.in = 25, map[string]float32{}, make([]*onnxfile.Tensor, numInputs)
		p.ints = map[string]int64{}
		p.causal = right < 0 && left >= 0
		if p.causal {
			p.ints["is_causal"] = 1
		}
		change(p, rng)
		if p.in[inQ] == nil {
			p.in[inQ] = rng.rand(p.batch, p.heads, p.seqQ, p.dim)
			p.in[inK] = rng.rand(p.batch, p.kvHeads, p.seqK, p.dim)
			p.in[inV] = rng.rand(p.batch, p.kvHeads, p.seqK, p.valueDim)
		}
		p.ints["left_window_size"] = int64(left)
		if right != -1 || left == -1 {
			p.ints["right_window_size"] = int64(right)
		}
		p.scale = 1 / math.Sqrt(float64(p.dim))
		cases[name] = p
	}
	none := func(*onnxProblem, *mersenne) {}
	// external has an external cache of 8 keys, of which 6 and 7 are valid, and a mask.
	external := func(shape ...int) func(p *onnxProblem, rng *mersenne) {
		return func(p *onnxProblem, rng *mersenne) {
			p.seqK = 8
			p.in[inQ], p.in[inK], p.in[inV] = rng.rand(2, 3, 4, 8), rng.rand(2, 3, 8, 8), rng.rand(2, 3, 8, 8)
			p.in[inMask], p.in[inNonpad] = rng.rand(shape...), int64s(6, 7)
		}
	}
	add("test_attention_local_window", 2, -1, 0, none)
	add("test_attention_local_window_default", -1, -1, 0, none)
	add("test_attention_bidirectional_window", 1, 2, 0, func(p *onnxProblem, _ *mersenne) {
		p.batch, p.heads, p.kvHeads, p.seqQ, p.seqK, p.dim, p.valueDim = 1, 1, 1, 5, 5, 1, 1
		p.in[inQ], p.in[inK] = repeated(onnxfile.Float, 0, 1, 1, 5, 1), repeated(onnxfile.Float, 0, 1, 1, 5, 1)
		p.in[inV] = filled(onnxfile.Float, []float64{0, 1, 2, 3, 4}, 1, 1, 5, 1)
	})
	add("test_attention_local_window_rank1_boolean_mask", 2, -1, 0, func(p *onnxProblem, _ *mersenne) {
		p.in[inMask] = filled(onnxfile.Bool, []float64{1, 1, 1, 1, 0, 0}, 6)
	})
	add("test_attention_local_window_with_past", 2, -1, 0, func(p *onnxProblem, rng *mersenne) {
		p.seqK, p.past = 2, 8
		p.in[inQ], p.in[inK], p.in[inV] = rng.rand(2, 3, 4, 8), rng.rand(2, 3, 2, 8), rng.rand(2, 3, 2, 8)
		p.in[inPastKey], p.in[inPastValue] = rng.rand(2, 3, 8, 8), rng.rand(2, 3, 8, 8)
	})
	add("test_attention_local_window_ext_cache_rank3_head_mask", 2, -1, 0, external(3, 4, 8))
	add("test_attention_local_window_ext_cache_rank4_batch_mask", 2, -1, 0, external(2, 1, 4, 8))
	add("test_attention_local_window_ext_cache_rank2_mask", 2, -1, 0, external(1, 8))
	add("test_attention_local_window_ext_cache_float16_mask", 2, -1, 0, func(p *onnxProblem, _ *mersenne) {
		p.seqK = 8
		p.in[inQ], p.in[inK] = repeated(onnxfile.Float16, 0, 2, 3, 4, 8), repeated(onnxfile.Float16, 0, 2, 3, 8, 8)
		p.in[inV], p.in[inMask] = repeated(onnxfile.Float16, 1, 2, 3, 8, 8), repeated(onnxfile.Float16, 0, 1, 8)
		p.in[inNonpad] = int64s(6, 7)
	})
	add("test_attention_3d_local_window", 2, -1, 0, func(p *onnxProblem, rng *mersenne) {
		p.heads, p.kvHeads, p.valueDim, p.flat = 4, 1, 6, true
		p.ints["q_num_heads"], p.ints["kv_num_heads"] = 4, 1
		p.in[inQ], p.in[inK], p.in[inV] = rng.rand(2, 4, 32), rng.rand(2, 6, 8), rng.rand(2, 6, 6)
	})
	add("test_attention_local_window_gqa_rank4_mask", 2, -1, 25, func(p *onnxProblem, _ *mersenne) {
		p.heads, p.kvHeads, p.valueDim = 4, 2, 6
		p.softcap, p.floats["softcap"] = 2, 2
		p.ints["softmax_precision"], p.ints["qk_matmul_output_mode"] = int64(onnxfile.Double), scoresSoftmax
		mask := repeated(onnxfile.Bool, 1, 2, 4, 4, 6)
		for i := range mask.Data {
			if i/6%4 == 0 {
				mask.Data[i] = 0 // the first query of each head sees nothing
			}
		}
		p.in[inMask] = mask
	})
	for _, p := range cases {
		mode := p.ints["qk_matmul_output_mode"]
		p.solve(int(mode), [numOutputs]bool{true, p.past > 0, p.past > 0, mode == scoresSoftmax})
	}
	return cases
}

// rotaryCases are the cases of RotaryEmbedding of the ONNX project, under their names there.
func rotaryCases() map[string]*onnxFiles {
	cases := map[string]*onnxFiles{}
	add := func(name string, flat, ids, interleaved bool, dim int) {
		rng := newMersenne(0)
		c := &onnxFiles{operator: "RotaryEmbedding", opset: 23, ints: map[string]int64{}}
		shape, cache, pairs := []int{2, 4, 3, 8}, []int{2, 3}, 4
		if flat {
			shape, c.ints["num_heads"] = []int{2, 3, 32}, 4
		}
		if interleaved {
			c.ints["interleaved"] = 1
		}
		if dim > 0 {
			c.ints["rotary_embedding_dim"] = int64(dim)
			pairs = dim / 2
		}
		x := rng.rand(shape...)
		var positions *onnxfile.Tensor
		if ids {
			var list []int
			for range 6 {
				list = append(list, int(50*rng.float64()))
			}
			positions, cache = int64s(list...), []int{50}
			positions.Shape = []int{2, 3}
		}
		sin := rng.rand(append(cache, pairs)...)
		cos := rng.rand(append(cache, pairs)...)
		y := make([]float64, x.Elements())
		for n := range y {
			y[n] = x.At(n)
		}
		for row := range 2 * 4 * 3 {
			b, s := row/12, row%3 // [batch, heads, sequence]
			if flat {
				s = row / 4 % 3 // [batch, sequence, heads]
			}
			at := b*3 + s
			if ids {
				at = int(positions.Int(at))
			}
			for i := range pairs {
				first, second := row*8+i, row*8+i+pairs
				if interleaved {
					first, second = row*8+2*i, row*8+2*i+1
				}
				c, s := cos.At(at*pairs+i), sin.At(at*pairs+i)
				y[first], y[second] = c*x.At(first)-s*x.At(second), s*x.At(first)+c*x.At(second)
			}
		}
		c.in = []*onnxfile.Tensor{x, cos, sin}
		if ids {
			c.in = append(c.in, positions)
		}
		c.want = []*onnxfile.Tensor{filled(onnxfile.Float, y, shape...)}
		cases[name] = c
	}
	add("test_rotary_embedding", false, true, false, 0)
	add("test_rotary_embedding_3d_input", true, true, false, 0)
	add("test_rotary_embedding_interleaved", false, true, true, 0)
	add("test_rotary_embedding_with_rotary_dim", false, true, false, 4)
	add("test_rotary_embedding_with_interleaved_rotary_dim", false, true, true, 4)
	add("test_rotary_embedding_no_position_ids", false, false, false, 0)
	add("test_rotary_embedding_no_position_ids_interleaved", false, false, true, 0)
	add("test_rotary_embedding_no_position_ids_rotary_dim", false, false, false, 4)
	return cases
}

// scatterCases are the cases of TensorScatter of the ONNX project, under their names there.
func scatterCases() map[string]*onnxFiles {
	cases := map[string]*onnxFiles{}
	// Row r of a cache or an update has 5 columns, its number in rows.
	add := func(name, mode string, shape []int, last [5]float64, indices []int, update ...float64) {
		rows := [][5]float64{{1, 2, 3, 4, 5}, {5, 6, 7, 8, 9}, {8, 7, 6, 5, 4}, last}
		batch := shape[0]
		added := len(update) / batch
		c := &onnxFiles{operator: "TensorScatter", opset: 24, texts: map[string]string{}}
		if mode != "" {
			c.texts["mode"] = mode
		}
		var past, present, new []float64
		for b := range batch {
			out := slices.Clone(rows)
			for s := range added {
				x := update[b*added+s]
				row := [5]float64{x, x, x, x, x}
				out[(indices[b]+s)%4] = row
				new = append(new, row[:]...)
			}
			for r := range rows {
				past, present = append(past, rows[r][:]...), append(present, out[r][:]...)
			}
		}
		to := slices.Clone(shape)
		to[len(to)-2] = added
		c.in = []*onnxfile.Tensor{filled(onnxfile.Float, past, shape...), filled(onnxfile.Float, new, to...), int64s(indices...)}
		c.want = []*onnxfile.Tensor{filled(onnxfile.Float, present, shape...)}
		cases[name] = c
	}
	add("test_tensorscatter", "linear", []int{2, 1, 4, 5}, [5]float64{4, 3, 2, 1, 0}, []int{1, 2}, 5, 1)
	add("test_tensorscatter_circular", "circular", []int{2, 1, 4, 5}, [5]float64{4, 3, 2, 1, 0}, []int{1, 3}, 5, 6, 1, 2)
	add("test_tensorscatter_3d", "", []int{3, 4, 5}, [5]float64{5, 4, 3, 2, 1}, []int{1, 2, 0}, 4, 5, 6, 7, 2, 3)
	return cases
}

// TestMersenne compares the generator with the first number of numpy.random.seed(0), and
// with the 10,000th of the standard's mt19937, whose seed is 5489.
func TestMersenne(t *testing.T) {
	if x := newMersenne(0).float64(); x != 0.5488135039273248 {
		t.Errorf("the first number is %v", x)
	}
	r := newMersenne(5489)
	for range 9999 {
		r.uint32()
	}
	if x := r.uint32(); x != 4123659995 {
		t.Errorf("the 10,000th is %d", x)
	}
}

// TestONNXGenerated compares the generated cases with the files in testdata, and runs them.
func TestONNXGenerated(t *testing.T) {
	const checked = "../../testdata/onnx-generated"
	made := t.TempDir()
	cases := rotaryCases()
	for _, more := range []map[string]*onnxFiles{scatterCases(), linearCases(), convCases()} {
		maps.Copy(cases, more)
	}
	for name, p := range windowCases() {
		cases[name] = &p.onnxFiles
	}
	var dirs []string
	for name, c := range cases {
		c.producer = generator
		c.write(t, filepath.Join(made, name))
		dirs = append(dirs, filepath.Join(checked, name))
	}
	slices.Sort(dirs)
	if len(dirs) != 49 {
		t.Fatalf("%d cases", len(dirs))
	}
	if *update {
		for _, dir := range dirs {
			must.Do(t, os.RemoveAll(dir))
		}
		must.Do(t, os.CopyFS(checked, os.DirFS(made)))
	}
	want, have := contents(t, made), contents(t, checked)
	for name, text := range want {
		if have[name] != text {
			t.Errorf("%s is stale, run %s", name, generator)
		}
	}
	for name := range have {
		if _, ok := want[name]; !ok {
			t.Errorf("%s is not generated", name)
		}
	}
	everywhere(t, func(t *testing.T, backend string) {
		if backend == "gpu" && testing.Short() {
			some := regexp.MustCompile(`(3d_local_window|silu_with_past_state|prefill_with_past|interleaved_rotary_dim|scatter)$`)
			dirs = slices.DeleteFunc(slices.Clone(dirs), func(dir string) bool { return !some.MatchString(dir) })
		}
		wantPassed(t, backend, dirs)
	})
}

// contents returns the files of the cases in a folder, by path.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	must.Do(t, fs.WalkDir(os.DirFS(dir), ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || path == "README.md" {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, path))
		files[filepath.ToSlash(path)] = string(text)
		return err
	}))
	return files
}
