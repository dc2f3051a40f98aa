package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// valuesOfColumns writes the value tile of a diagonal: rows elements of the outputs of all
// lanes, groups times. The columns join one after another, and leave in the same order:
// steps has the number of values that each set of columns takes.
func (a *isa) valuesOfColumns(rows int) {
	a.kernel("valuesOfColumns")
	o, run, ld, groups, first := param("o"), param("run"), param("ldv"), param("groups"), argument("first")
	ld3 := tripled(ld)
	vp, p, steps := GP64(), GP64(), GP64()
	acc, b, t := a.accumulators(rows), a.vecs(a.cols), a.vecs(a.temps)
	ahead := continued(run)
	Label("group")
	MOVQ(Mem{Base: run, Disp: runRows}, vp)
	ADDQ(first, vp)
	MOVQ(argument("p"), p)
	MOVQ(argument("steps"), steps)
	for i := range acc {
		for j := range acc[i] {
			a.zero(acc[i][j])
		}
	}
	for step := range 2*a.cols - 1 {
		from, to := max(0, step+1-a.cols), min(a.cols, step+1)
		sum := make([][]reg.VecVirtual, rows)
		for i := range acc {
			sum[i] = acc[i][from:to]
		}
		label := fmt.Sprintf("step%d", step)
		countByFour(label, Mem{Base: steps, Disp: 8 * step}, func(n int, left reg.GPVirtual) {
			keepUp := ahead.keepUp(label, left, n, rows)
			for u := range n {
				for j := from; j < to; j++ {
					VMOVUPS(a.vector(p, u, j), b[j])
				}
				a.outer(sum, b[from:to], t, u, func(i int) Mem { return rowAt(vp, ld, ld3, u, 4*i) })
				keepUp()
			}
			ADDQ(U32(uint32(n*a.rowBytes())), p)
			if n == 4 {
				LEAQ(Mem{Base: vp, Index: ld, Scale: 4}, vp)
			} else {
				ADDQ(ld, vp)
			}
		})
	}
	alpha := param("alpha")
	for j := range b {
		VMOVUPS(a.at(alpha, j), b[j])
	}
	for i := range acc {
		for j := range b {
			VFMADD231PS(a.vector(o, i, j), b[j], acc[i][j])
			VMOVUPS(acc[i][j], a.vector(o, i, j))
		}
	}
	ADDQ(U32(uint32(rows*a.rowBytes())), o)
	ADDQ(Imm(uint64(4*rows)), first)
	DECQ(groups)
	JNZ(LabelRef("group"))
	ahead.save()
	end()
}
