package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The offsets of the fields of a Run, and its size.
const (
	runRows  = 8 * iota
	runNext  // of the first of four streams, the line to prefetch next
	runLen   // in rows
	runLeft  // lines of the stream's row from next on
	runApart // bytes from the first stream to each of the others
	_
	_
	runLines // of a row
	runJump  // bytes from the end of a row's lines to the next row
	runSize
)

// lookahead prefetches the rows that follow those of a Run, a line of each of four streams
// at a time. Processors only fetch lines ahead of their own accord within a page of 4 KiB,
// so one stream does not keep memory busy while the kernel computes.
type lookahead struct {
	run        Mem // its address
	next, left reg.GPVirtual
}

// continued returns a lookahead that starts where the last kernel stopped with the Run whose
// address run holds.
func continued(run Mem) *lookahead {
	l := &lookahead{run, GP64(), GP64()}
	p := GP64()
	MOVQ(run, p)
	MOVQ(Mem{Base: p, Disp: runNext}, l.next)
	MOVQ(Mem{Base: p, Disp: runLeft}, l.left)
	return l
}

// prefetch prefetches n lines of each stream.
func (l *lookahead) prefetch(label string, n int) {
	run := GP64()
	MOVQ(l.run, run)
	for i := range n {
		same := fmt.Sprintf("%s_same%d", label, i)
		PREFETCHT1(Mem{Base: l.next})
		for s := range 3 {
			apart := GP64()
			MOVQ(Mem{Base: run, Disp: runApart + 8*s}, apart)
			PREFETCHT1(Mem{Base: l.next, Index: apart, Scale: 1})
		}
		ADDQ(Imm(64), l.next)
		DECQ(l.left)
		JNZ(LabelRef(same))
		ADDQ(Mem{Base: run, Disp: runJump}, l.next)
		MOVQ(Mem{Base: run, Disp: runLines}, l.left)
		Label(same)
	}
}

// save lets the next kernel continue.
func (l *lookahead) save() {
	p := GP64()
	MOVQ(l.run, p)
	MOVQ(l.next, Mem{Base: p, Disp: runNext})
	MOVQ(l.left, Mem{Base: p, Disp: runLeft})
}
