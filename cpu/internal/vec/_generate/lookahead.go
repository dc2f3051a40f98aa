package main

import (
	"fmt"
	"math/bits"

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
	runMore  // bytes to the Run to prefetch after this one, if it is part of a chain
	runAt    // of the first Run of a chain, bytes to the one to prefetch
	runSize
)

// lookahead prefetches the rows that follow those of a Run, a line of each of four streams
// at a time. Processors only fetch lines ahead of their own accord within a page of 4 KiB,
// so one stream does not keep memory busy while the kernel computes.
type lookahead struct {
	run        Op // its address, in a register or in memory
	next, left reg.GPVirtual
	apart      []reg.GPVirtual // from the first stream to the others, if registers hold that
	chained    bool            // it goes on with the Run that follows: run is a register
	inOrder    bool            // see isa.inOrder
}

// continued returns a lookahead that starts where the last kernel stopped with the Run whose
// address run holds.
func continued(run Op) *lookahead {
	l := &lookahead{run: run, next: GP64(), left: GP64()}
	l.load()
	return l
}

// held is continued for kernels that have three registers to spare.
func held(run Op) *lookahead {
	l := &lookahead{run: run, next: GP64(), left: GP64(), apart: []reg.GPVirtual{GP64(), GP64(), GP64()}}
	l.load()
	return l
}

// load reads the Run.
func (l *lookahead) load() {
	p := l.base()
	MOVQ(Mem{Base: p, Disp: runNext}, l.next)
	MOVQ(Mem{Base: p, Disp: runLeft}, l.left)
	for s, apart := range l.apart {
		MOVQ(Mem{Base: p, Disp: runApart + 8*s}, apart)
	}
}

// base returns a register with the address of the run.
func (l *lookahead) base() reg.Register {
	if r, ok := l.run.(reg.Register); ok {
		return r
	}
	p := GP64()
	MOVQ(l.run, p)
	return p
}

// prefetch prefetches n lines of each stream.
func (l *lookahead) prefetch(label string, n int) {
	for _, each := range l.lines(label, n) {
		each()
	}
}

// lines returns functions that prefetch a line each, together n lines of each stream.
func (l *lookahead) lines(label string, n int) (each []func()) {
	if l.inOrder { // the page of the next line of one stream, which is enough
		return []func(){func() {
			page := GP64()
			MOVQ(l.next, page)
			ANDQ(I32(-4096), page)
			PREFETCHT1(Mem{Base: page})
			ADDQ(U32(uint32(256*n)), l.next)
		}}
	}
	var p reg.Register
	for i := range n {
		each = append(each, func() {
			PREFETCHT1(Mem{Base: l.next})
			if l.apart == nil {
				p = l.base()
			}
		})
		for s := range 3 {
			each = append(each, func() {
				apart := GP64()
				if l.apart != nil {
					apart = l.apart[s]
				} else {
					MOVQ(Mem{Base: p, Disp: runApart + 8*s}, apart)
				}
				PREFETCHT1(Mem{Base: l.next, Index: apart, Scale: 1})
				if s == 2 {
					l.advance(fmt.Sprintf("%s_same%d", label, i))
				}
			})
		}
	}
	return each
}

// among returns a function that calls all of jobs in n calls, about as many in each. Prefetches
// in a row would delay what a kernel reads.
func among(n int, jobs []func()) func() {
	calls, done := 0, 0
	return func() {
		calls++
		for ; (done+1)*n <= calls*len(jobs); done++ {
			jobs[done]()
		}
	}
}

// advance moves all streams to their next lines.
func (l *lookahead) advance(same string) {
	ADDQ(Imm(64), l.next)
	DECQ(l.left)
	JNZ(LabelRef(same))
	run := l.base()
	if l.chained {
		CMPQ(Mem{Base: run, Disp: runMore}, Imm(0))
		JE(LabelRef(same + "_row"))
		ADDQ(Mem{Base: run, Disp: runMore}, run)
		l.load()
		JMP(LabelRef(same))
		Label(same + "_row")
	}
	ADDQ(Mem{Base: run, Disp: runJump}, l.next)
	MOVQ(Mem{Base: run, Disp: runLines}, l.left)
	Label(same)
}

// overlap prefetches n lines more of each stream, because streams are staggered except for
// those of a chain.
func (l *lookahead) overlap(n int) {
	CMPQ(Mem{Base: l.base(), Disp: runMore}, Imm(0))
	JNE(LabelRef("chained"))
	l.prefetch("overlap", n)
	Label("chained")
}

// save lets the next kernel continue.
func (l *lookahead) save() {
	p := l.base()
	MOVQ(l.next, Mem{Base: p, Disp: runNext})
	MOVQ(l.left, Mem{Base: p, Disp: runLeft})
}

// keepUp returns a function to call after each of n elements of each of rows rows. In four calls
// it prefetches, on average, as many lines as these elements fill, for 6 rows a third more. left
// is the counter of countByFour.
func (l *lookahead) keepUp(label string, left reg.GPVirtual, n, rows int) func() {
	switch {
	case n < 4 || rows == 1:
		return func() {}
	case rows == 16:
		return among(n, l.lines(label, 1))
	}
	return among(n, []func(){func() {
		later := label + "_later"
		if rows == 12 {
			TESTQ(U32(3), left)
			JZ(LabelRef(later))
		} else {
			TESTQ(U32(uint32(16/rows-1)), left)
			JNZ(LabelRef(later))
		}
		l.prefetch(label, 1)
		Label(later)
	}})
}

// chainOfRuns returns a lookahead that goes from run to run, and starts where the last kernel
// stopped with the function's runs.
func chainOfRuns() *lookahead {
	run := param("runs")
	ADDQ(Mem{Base: run, Disp: runAt}, run)
	l := held(run)
	l.chained = true
	return l
}

// saveChain is save for a chain.
func (l *lookahead) saveChain() {
	l.save()
	first, run := param("runs"), l.base()
	SUBQ(first, run)
	MOVQ(run, Mem{Base: first, Disp: runAt})
}

// eachRun runs body for each of the function's n runs: with the first row in rows, first bytes
// further, with the run's length, and with its lookahead, or else that of all runs.
func eachRun(rows reg.GPVirtual, first Op, all *lookahead, body func(length Mem, ahead *lookahead)) {
	run, left, n := GP64(), AllocLocal(8), GP64()
	MOVQ(argument("n"), n)
	MOVQ(n, left)
	MOVQ(argument("runs"), run)
	loop("run", left, 1, func() {
		MOVQ(Mem{Base: run, Disp: runRows}, rows)
		ADDQ(first, rows)
		length := Mem{Base: run, Disp: runLen}
		if all != nil {
			body(length, all)
		} else {
			ahead := continued(run)
			body(length, ahead)
			ahead.save()
		}
		ADDQ(U32(runSize), run)
	})
}

// pairedRun is the length of runs that some kernels take in pairs, as in Kernels.paired.
const pairedRun = 16

// pairRuns returns the run of the keys from pairedRun on, and the bytes from the end of the
// first run to it. The function's keys, groups of n, are those of one run or, if they are more
// than it has, of a pair.
func pairRuns(n int, ldk reg.Register) (second, hop Mem) {
	second, hop = AllocLocal(8), AllocLocal(8)
	run, apart, keys := param("run"), GP64(), GP64()
	XORQ(apart, apart)
	MOVQ(argument("groups"), keys)
	SHLQ(Imm(uint64(bits.TrailingZeros(uint(n)))), keys)
	CMPQ(keys, Mem{Base: run, Disp: runLen})
	JLE(LabelRef("one_run"))
	ADDQ(U32(runSize), run)
	MOVQ(Mem{Base: run, Disp: runRows}, apart)
	SUBQ(argument("k"), apart)
	MOVQ(ldk, keys)
	SHLQ(Imm(uint64(bits.TrailingZeros(pairedRun))), keys)
	SUBQ(keys, apart)
	Label("one_run")
	MOVQ(run, second)
	MOVQ(apart, hop)
	return second, hop
}

// prefetchRows writes the prefetch of listed rows. The second-level cache takes in twice as many lines at a time as the
// first one, and the lines of some 32 rows are on their way while others are copied.
func prefetchRows() {
	TEXT("prefetchRows", NOSPLIT, "func(rows *byte, keys *int32, n, apart, bytes int)")
	Doc("prefetchRows prefetches n listed rows of so many bytes, which are apart bytes apart, into the second-level cache.")
	rows, keys, n, apart, bytes := param("rows"), param("keys"), param("n"), param("apart"), param("bytes")
	at, left := GP64(), GP64()
	Label("row")
	MOVLQSX(Mem{Base: keys}, at)
	IMULQ(apart, at)
	ADDQ(rows, at)
	MOVQ(bytes, left)
	Label("line")
	PREFETCHT1(Mem{Base: at})
	ADDQ(Imm(64), at)
	SUBQ(Imm(64), left)
	JG(LabelRef("line"))
	ADDQ(Imm(4), keys)
	DECQ(n)
	JNZ(LabelRef("row"))
	RET()
}
