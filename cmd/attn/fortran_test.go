package main

import (
	"bytes"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestFortranOrder: arrays in Fortran order give the bits of the same arrays in C order, of each
// rank and type, mapped or read.
func TestFortranOrder(t *testing.T) {
	dir := t.TempDir()
	for _, shape := range [][]int{{3, 4}, {2, 3, 4}, {2, 5, 3, 4}} {
		for _, descr := range []string{"<f4", ">f4", "<f2", "<f8"} {
			for _, more := range []string{"", "--layout=bshd", "--dtype=bf16"} {
				args := []string{"run", "--backend=cpu", "--causal"}
				if more != "" {
					args = append(args, more)
				}
				orders := [2][]string{}
				scores := append(slices.Clone(shape[:len(shape)-1]), shape[len(shape)-2])
				if more == "--layout=bshd" && len(shape) == 4 {
					scores = []int{shape[0], shape[2], shape[1], shape[1]}
				}
				for i, name := range []string{"q", "k", "v", "mask", "bias"} {
					shape, descr := shape, descr
					if i > 2 {
						shape, descr = scores, []string{"|b1", "<f4"}[i-3]
					}
					data := clitest.Normal(uint64(i), clitest.Elements(shape))
					if name == "mask" {
						for i := range data {
							data[i] = float64(i % 3 % 2)
						}
					}
					inC := clitest.Save(t, dir, name+".npy", descr, data, shape...)
					turned := clitest.WriteFile(t, dir, name+"-f.npy", clitest.RawNPY(clitest.Dict(descr, true, shape...), clitest.Encode(descr, fortran(data, shape))))
					orders[0], orders[1] = append(orders[0], "--"+name, inC), append(orders[1], "--"+name, turned)
				}
				var files [2][]byte
				for i, order := range orders {
					out := filepath.Join(dir, "o.npy")
					if code, _, stderr := attn(t, append(append(slices.Clone(args), "--out", out), order...)...); code != 0 {
						t.Fatalf("%v of %s, %s: %s", shape, descr, more, stderr)
					}
					text := clitest.ReadFile(t, out)
					files[i] = text
				}
				if !bytes.Equal(files[0], files[1]) {
					t.Errorf("%v of %s, %s: the outputs of C order and Fortran order differ", shape, descr, more)
				}
			}
		}
	}
}

// fortran returns data of C order in Fortran order, by the definition of both.
func fortran(data []float64, shape []int) []float64 {
	turned := make([]float64, len(data))
	for at := range data {
		rest, place, stride := at, 0, 1
		index := make([]int, len(shape))
		for i := len(shape) - 1; i >= 0; i-- {
			index[i], rest = rest%shape[i], rest/shape[i]
		}
		for i, l := range shape {
			place += index[i] * stride
			stride *= l
		}
		turned[place] = data[at]
	}
	return turned
}
