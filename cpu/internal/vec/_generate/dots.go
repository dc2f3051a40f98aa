package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// piece returns the bytes of a row of keys that dots reads at once.
func (a *isa) piece() int { return 2 * a.lanes }

// dots writes scores with keys as lanes. It transposes words of 32 bits and converts them
// afterwards, because shuffles bind: narrow keys need as few a byte as float32. Each score
// is summed in the same order as in scores.
func (a *isa) dots(e element) {
	a.oneOf("dots", tables.Which{Element: e.suffix})
	a.dotsBody(e, false)
}

// dotsFixed is dots for int8 and query rows of Fix, whose products are those of VNNI: four elements
// to a lane at once, in integers. VPDPBUSD multiplies unsigned numbers by signed ones. With 128
// added, keys are unsigned.
func (a *isa) dotsFixed(e element) {
	a.oneOf("dots", tables.Which{Element: "Fixed"})
	a.dotsBody(e, true)
}

// dotsBody writes dots or, with fixed set, dotsFixed.
func (a *isa) dotsBody(e element, fixed bool) {
	ldk, bytes := param("ldk"), argument("chunks")
	SHLQ(Imm(uint64(bits.TrailingZeros(uint(a.lanes*e.bytes)))), bytes) // of a row
	d := &dotsKernel{isa: a, element: e, ldk: ldk, ldk3: tripled(ldk), bytes: bytes,
		sp: AllocLocal(8), kp: AllocLocal(8), count: AllocLocal(8), fixed: fixed}
	if e.lead > 0 {
		d.scales = AllocLocal(d.most() * a.bytes())
		for i := 0; a.wide() && !fixed && i < 2; i++ {
			d.byteMask[i], d.biased[i] = a.constant(cByte0+constant(i)), a.constant(cBiased0+constant(i))
		}
	}
	if a == vbmi {
		d.tables = a.tablesF8()
	} else if e.suffix == elementF8.suffix {
		d.seen = AllocLocal(d.most() * a.bytes())
		if a.wide() {
			d.order = a.vec()
			VMOVUPS(cOrder.mem(), d.order)
		}
	}
	d.second, d.hop = pairRuns(a.lanes, ldk)
	d.following, d.nearer = AllocLocal(8), AllocLocal(8)
	counts := map[int][]int{4: {2, 1}, 1: {d.most(), 1}}
	if !a.inOrder() {
		counts[8] = []int{1}
	}
	d.eachRows(counts, d.tile)
}

// dotsKernel is what the parts of dots share.
type dotsKernel struct {
	*isa
	element
	ldk, ldk3            reg.GPVirtual
	bytes, sp, kp, count Mem
	scales               Mem
	byteMask, biased     [2]reg.VecVirtual
	scaledDown           bool           // scales is divided by 2^24
	fixed                bool           // see dotsFixed
	seen                 Mem            // see seenF8, of each group
	order                reg.VecVirtual // cOrder
	tables               *tablesF8      // in place of seen and order
	following, nearer    Mem            // the keys of the run's next tile, else the tile's own; those of them that moveNearer takes next
	second, hop          Mem            // the run of the keys from pairedRun on, and bytes from the end of the first to it
}

// most returns the number of groups of keys, one to a lane, that a tile has at most.
func (d *dotsKernel) most() int { return 32 / d.lanes }

// eachRows writes tiles of 8, 4 and 1 query rows, with the numbers of groups of keys that counts has for
// them. Several chains of FMAs hide their latency.
func (d *dotsKernel) eachRows(counts map[int][]int, tile func(label string, rows, groups int)) {
	lds, ldq, s, q, heads := argument("lds"), argument("ldq"), argument("s"), argument("q"), argument("heads")
	// atLeast repeats body until less than n are left.
	atLeast := func(label string, left Op, n int, body func()) {
		Label(label)
		CMPQ(left, Imm(uint64(n)))
		JL(LabelRef(label + "_done"))
		body()
		SUBQ(Imm(uint64(n)), left)
		JMP(LabelRef(label))
		Label(label + "_done")
	}
	for _, rows := range []int{8, 4, 1} {
		if counts[rows] == nil {
			continue
		}
		label := fmt.Sprintf("rows%d", rows)
		atLeast(label, heads, rows, func() {
			p := GP64()
			for _, x := range [][2]Mem{{s, d.sp}, {argument("k"), d.kp}, {argument("groups"), d.count}} {
				MOVQ(x[0], p)
				MOVQ(p, x[1])
			}
			for _, groups := range counts[rows] {
				part := fmt.Sprintf("%s_by%d", label, groups)
				atLeast(part, d.count, groups, func() { tile(part, rows, groups) })
			}
			for _, x := range [][2]Mem{{lds, s}, {ldq, q}} {
				p := GP64()
				MOVQ(x[0], p)
				SHLQ(Imm(uint64(bits.TrailingZeros(uint(rows)))), p)
				ADDQ(p, x[1])
			}
		})
	}
	end()
}

// dotsTile is the scores of rows query rows and of groups vectors of keys.
type dotsTile struct {
	d            *dotsKernel
	label        string
	rows, groups int
	acc          [][]reg.VecVirtual // of a group, for each row
	base         []reg.GPVirtual    // the keys of a group
	moves        bool               // lines of the following tile move nearer
	queries      []reg.GPVirtual    // one for each four rows
	ldq, ldq3    reg.GPVirtual
	at           reg.GPVirtual // bytes before the piece in a row
	ahead        *lookahead    // of the run, unless each group has its own
	pair         int           // groups whose chains alternate
}

// tile computes the scores of rows query rows and of groups vectors of keys.
func (d *dotsKernel) tile(label string, rows, groups int) {
	t := &dotsTile{d: d, label: label, rows: rows, groups: groups}
	d.scaledDown = rows == 1 && d.lead > 0 && !d.wide() && groups > 1
	t.openKeys()
	t.openQueries()
	if !(rows == 1 && groups > 1) {
		t.ahead = continued(argument("run"))
		t.ahead.inOrder = d.inOrder()
	}
	if d.lead > 0 { // the rows are longer than their elements
		t.prefetch(label, 0)
	}
	// Conversions of bytes bind, but a core looks ahead over few of them. Therefore the chains
	// of two groups alternate; f16 converts two groups at once. Other types are read from
	// memory more slowly like that.
	t.pair = 1
	if rows == 1 && (d.element.bytes == 1 || d.splitPairs != nil) {
		t.pair = min(groups, 2)
	}
	t.allPieces(label + "_piece")
	if t.ahead != nil {
		t.ahead.save()
	}
	if t.paired() {
		for g := 0; g < groups; g += 2 {
			t.acc[g][0], t.acc[g+1][0] = d.inGroups(t.acc[g][0], t.acc[g+1][0])
		}
	}
	if d.fixed {
		t.fixedScores()
	}
	for g := 0; g < groups && d.seen.Base != nil; g++ {
		t.scoresF8(g)
	}
	t.write()
}

// write stores the scores and moves sp to those of the next groups.
func (t *dotsTile) write() {
	d, sp, lds := t.d, GP64(), GP64()
	MOVQ(d.sp, sp)
	MOVQ(argument("lds"), lds)
	advance(t.groups*d.isa.bytes(), d.sp)
	for r := range t.rows {
		for g := range t.groups {
			VMOVUPS(t.acc[g][r], d.isa.at(sp, g))
		}
		if r < t.rows-1 {
			ADDQ(lds, sp)
		}
	}
}

// paired reports whether splitPairs converts the words of two groups.
func (t *dotsTile) paired() bool { return t.pair > 1 && t.d.splitPairs != nil }

// openKeys sets the keys of each group, with their scales, and moves kp to the next tile.
func (t *dotsTile) openKeys() {
	d, a := t.d, t.d.isa
	t.acc, t.base = make([][]reg.VecVirtual, t.groups), make([]reg.GPVirtual, t.groups)
	p, zero := GP64(), a.vec()
	MOVQ(d.kp, p)
	a.zero(zero)
	for g := range t.base {
		t.base[g] = GP64()
		MOVQ(p, t.base[g])
		for lane := 0; lane < a.lanes; lane += 4 {
			for r := 0; r < 4 && d.lead > 0; r++ {
				scale := GP32()
				MOVL(rowAt(p, d.ldk, d.ldk3, r, 0), scale)
				MOVL(scale, d.scales.Offset(g*a.bytes()+4*(lane+r)))
			}
			LEAQ(Mem{Base: p, Index: d.ldk, Scale: 4}, p)
		}
		switch {
		case t.rows > 1: // of one run
		case t.groups == 1 && a.lanes < pairedRun:
			TESTQ(U32(1), d.count) // each second group
			JZ(LabelRef(t.label + "_first"))
			ADDQ(d.hop, p)
			Label(t.label + "_first")
		case (g+1)*a.lanes == pairedRun:
			ADDQ(d.hop, p)
		}
		if d.scaledDown {
			d.scaleDown(d.scales.Offset(g*a.bytes()), t.label+"_done")
		}
		t.acc[g] = a.vecs(t.rows)
		if d.fixed {
			t.acc[g] = a.vecs(2 * t.rows) // of the upper and the lower byte of the query's elements
		}
		for r := range t.acc[g] {
			VMOVAPS(zero, t.acc[g][r])
		}
		if d.seen.Base != nil {
			VMOVUPS(zero, d.seen.Offset(g*a.bytes()))
		}
	}
	MOVQ(p, d.kp)
	t.moves = d.element.bytes > 1 || a.wide() // else conversions bind, and more instructions take longer
	if t.moves && !d.inOrder() {
		CMPQ(d.count, Imm(uint64(t.groups)))
		CMOVQEQ(t.base[0], p)
		MOVQ(p, d.following)
	}
}

// openQueries sets the query rows.
func (t *dotsTile) openQueries() {
	t.queries = []reg.GPVirtual{GP64()}
	MOVQ(argument("q"), t.queries[0])
	if t.rows > 1 {
		t.ldq = param("ldq")
		t.ldq3 = tripled(t.ldq)
	}
	if t.rows > 4 {
		t.queries = append(t.queries, GP64())
		LEAQ(Mem{Base: t.queries[0], Index: t.ldq, Scale: 4}, t.queries[1])
	}
	t.at = GP64()
	XORQ(t.at, t.at)
}

// prefetch prefetches a line for group g.
func (t *dotsTile) prefetch(label string, g int) {
	if t.ahead != nil {
		t.ahead.prefetch(label, 1)
		return
	}
	run := argument("run")
	if g*t.d.lanes >= pairedRun {
		run = t.d.second
	}
	ahead := continued(run)
	ahead.inOrder = t.d.inOrder()
	ahead.prefetch(label, 1)
	ahead.save()
}

// allPieces adds the products of all pieces of the rows.
func (t *dotsTile) allPieces(loop string) {
	d := t.d
	halves := d.element.bytes == 1 && d.wide() // a row may end with half a piece
	if halves {
		CMPQ(d.bytes, Imm(16))
		JE(LabelRef(loop + "_last"))
	}
	Label(loop)
	t.piece(loop, d.piece()/4)
	if !halves {
		CMPQ(t.at, d.bytes)
		JNE(LabelRef(loop))
		return
	}
	left := GP64()
	MOVQ(d.bytes, left)
	SUBQ(t.at, left)
	CMPQ(left, Imm(16))
	JG(LabelRef(loop))
	JL(LabelRef(loop + "_done"))
	Label(loop + "_last")
	t.piece(loop, 4)
	Label(loop + "_done")
}

// piece adds the products of n words of each row.
func (t *dotsTile) piece(loop string, n int) {
	d := t.d
	var nearer []func()
	if t.moves {
		nearer = d.moveNearer(fmt.Sprintf("%s_nearer%d", loop, n), t.base[0], t.at, t.groups*d.lanes*d.piece()/64)
	}
	move := among(n*t.groups/t.pair, nearer)
	for first := 0; first < t.groups; first += t.pair {
		var words [][]reg.VecVirtual
		var next []func()
		for g := first; g < first+t.pair; g++ {
			next = append(next, t.prefetches(fmt.Sprintf("%s%d_%d", loop, g, n), g)...)
			w := d.words(n, t.base[g], t.at)
			if d.seen.Base != nil {
				d.seeF8(w, g)
			}
			words = append(words, w)
		}
		fetch, perWord := among(n, next), 4/d.element.bytes
		for i := range n {
			move()
			fetch()
			var each []func(int) reg.VecVirtual
			if d.fixed {
				for j, w := range words {
					t.multiplyFixed(t.acc[first+j], w[i], i)
				}
				continue
			}
			if t.paired() {
				each = d.splitPairs(d, words[0][i], words[1][i])
			} else {
				for j, w := range words {
					each = append(each, d.split(d, w[i], d.scales.Offset((first+j)*d.isa.bytes())))
				}
			}
			for n := range perWord {
				d.multiply(t.acc[first:first+t.pair], each, n, func(r int) Mem { return t.query(r, 4*(i*perWord+n)) })
			}
		}
	}
	ADDQ(U32(uint32(4*n)), t.at)
	bytes := 4 // of an element of a query row
	if d.fixed {
		bytes = 2
	}
	for _, q := range t.queries {
		ADDQ(U32(uint32(4*n/d.element.bytes*bytes)), q)
	}
}

// query addresses byte disp of row r, from the elements of the piece on.
func (t *dotsTile) query(r, disp int) Mem { return rowAt(t.queries[r/4], t.ldq, t.ldq3, r%4, disp) }

// multiplyFixed adds the products of the i-th words of a piece to the sums of a group.
func (t *dotsTile) multiplyFixed(acc []reg.VecVirtual, w reg.VecVirtual, i int) {
	VPXORD_BCST(cOffset.mem(), w, w)
	for r := range t.rows {
		for half := range 2 {
			VPDPBUSD_BCST(t.query(r, 8*i+4*half), w, acc[2*r+half])
		}
	}
}

// fixedScores turns the sums of integers into scores.
func (t *dotsTile) fixedScores() {
	for g, acc := range t.acc {
		scale := t.d.finiteScales(t.d.scales.Offset(g * t.d.isa.bytes()))
		for r := range t.rows {
			x := acc[2*r]
			VPSLLD(Imm(8), x, x)
			VPADDD(acc[2*r+1], x, x)
			VPSUBD_BCST(t.query(r, 4), x, x) // 128 times the sum of the row
			VCVTDQ2PS(x, x)
			VMULPS(scale, x, x)
			VMULPS_BCST(t.query(r, 0), x, x)
			t.acc[g][r] = x
		}
	}
}

// finiteScales reads scales, with NaN for those that are infinite, as the sum of their products would be.
func (a *isa) finiteScales(m Mem) reg.VecVirtual {
	scale, nan := a.vec(), a.vec()
	VMOVUPS(m, scale)
	VSUBPS(scale, scale, nan)
	VADDPS(nan, scale, scale)
	return scale
}

// prefetches returns functions that prefetch as many lines as a piece of group g has, in steps
// of four.
func (t *dotsTile) prefetches(label string, g int) (next []func()) {
	switch lines := t.d.piece() * t.d.lanes / 64; {
	case lines >= 4:
		for i := range lines / 4 {
			next = append(next, func() { t.prefetch(fmt.Sprint(label, "_", i), g) })
		}
	case t.groups > 1 && g%2 == 0:
		next = append(next, func() { t.prefetch(label, g) })
	case t.groups == 1:
		next = append(next, func() {
			TESTQ(U32(uint32(t.d.piece())), t.at)
			JNZ(LabelRef(label + "_odd"))
			t.prefetch(label, g)
			Label(label + "_odd")
		})
	}
	return next
}

// multiply adds the products of the n-th vectors of keys and of an element of each query row
// to the sums of each group.
func (d *dotsKernel) multiply(acc [][]reg.VecVirtual, keys []func(n int) reg.VecVirtual, n int, query func(r int) Mem) {
	var y reg.VecVirtual
	if len(keys) > 1 {
		y = d.vec()
		VBROADCASTSS(query(0), y)
	}
	for g := range keys {
		x := keys[g](n)
		for r := range acc[g] {
			switch {
			case len(keys) > 1:
				VFMADD231PS(y, x, acc[g][r])
			case d.wide():
				VFMADD231PS_BCST(query(r), x, acc[g][r])
			default:
				z := d.vec()
				VBROADCASTSS(query(r), z)
				VFMADD231PS(z, x, acc[g][r])
			}
		}
	}
}

// words returns the next n words of each row of a group, the rows as lanes.
func (d *dotsKernel) words(n int, base, at reg.GPVirtual) []reg.VecVirtual {
	a, p := d.isa, GP64()
	LEAQ(Mem{Base: base, Index: at, Scale: 1}, p)
	if n == 8 {
		low, high := d.wordsOf8(p), d.wordsOf8(p)
		w := a.vecs(8)
		for c := range 4 {
			VSHUFF32X4(U8(0x88), high[c], low[c], w[c])
			VSHUFF32X4(U8(0xdd), high[c], low[c], w[4+c])
		}
		return w
	}
	// Four rows each, four rows apart, in the 128 bits of a vector.
	r := a.vecs(4)
	for j := range a.lanes / 4 {
		for i := range r {
			m := rowAt(p, d.ldk, d.ldk3, i, d.lead)
			switch {
			case j == 0 && a.wide():
				VBROADCASTF32X4(m, r[i])
			case j == 0:
				VBROADCASTF128(m, r[i])
			case a.wide():
				VINSERTF32X4(Imm(uint64(j)), m, r[i], r[i])
			default:
				VINSERTF128(Imm(1), m, r[i], r[i])
			}
		}
		if j < a.lanes/4-1 {
			LEAQ(Mem{Base: p, Index: d.ldk, Scale: 4}, p)
		}
	}
	return a.quads(r)
}

// moveNearer returns functions that move a line each of n keys of the following tile from the
// second-level cache to the first one: later they would wait for buffers that lines from memory
// fill. It takes all keys of that tile in turns while d reads a line of each of its own.
func (d *dotsKernel) moveNearer(label string, first, at reg.GPVirtual, n int) (each []func()) {
	p := GP64()
	if d.inOrder() { // as many adjacent lines
		MOVQ(at, p)
		SHLQ(Imm(uint64(bits.TrailingZeros(uint(64*n/d.piece())))), p)
		ADDQ(first, p)
		for i := range n {
			each = append(each, func() { PREFETCHT0(Mem{Base: p, Disp: keysAhead + 64*i}) })
		}
		return each
	}
	MOVQ(d.nearer, p)
	TESTQ(U32(63), at)
	JNZ(LabelRef(label))
	MOVQ(d.following, p)
	ADDQ(at, p)
	Label(label)
	for i := range n {
		each = append(each, func() {
			PREFETCHT0(rowAt(p, d.ldk, d.ldk3, i%4, d.lead))
			if i%4 == 3 || i == n-1 { // n is 2 or a multiple of 4
				LEAQ(Mem{Base: p, Index: d.ldk, Scale: uint8(i%4 + 1)}, p)
			}
			if i == n-1 {
				MOVQ(p, d.nearer)
			}
		})
	}
	return each
}

// wordsOf8 returns words c and 4+c, for c from 0 to 3, of 8 rows, four rows to 128 bits. It
// moves p to the next 8 rows.
func (d *dotsKernel) wordsOf8(p reg.GPVirtual) []reg.VecVirtual {
	r := d.vecs(4)
	for i := range r {
		VBROADCASTF64X4(rowAt(p, d.ldk, d.ldk3, i, d.lead), r[i])
	}
	LEAQ(Mem{Base: p, Index: d.ldk, Scale: 4}, p)
	for i := range r {
		VINSERTF64X4(Imm(1), rowAt(p, d.ldk, d.ldk3, i, d.lead), r[i], r[i])
	}
	LEAQ(Mem{Base: p, Index: d.ldk, Scale: 4}, p)
	return d.quads(r)
}

// quads transposes squares of 4x4 in each 128 bits of r.
func (a *isa) quads(r []reg.VecVirtual) []reg.VecVirtual {
	pairs, out := a.vecs(4), a.vecs(4)
	for i := 0; i < 4; i += 2 {
		VUNPCKLPS(r[i+1], r[i], pairs[i])
		VUNPCKHPS(r[i+1], r[i], pairs[i+1])
	}
	for c := range 2 {
		VUNPCKLPD(pairs[2+c], pairs[c], out[2*c])
		VUNPCKHPD(pairs[2+c], pairs[c], out[2*c+1])
	}
	return out
}
