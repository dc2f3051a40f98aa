package vec

import "github.com/seed90331342/attn/backend"

// Draw is the state of dropout, and the same in the layout of the assembly.
type Draw struct {
	wide drawWide // first, see _generate/tables

	dropout backend.Dropout // its First is the position of the first weight
	columns int             // keys in one iteration of the assembly
	heads   int             // that adjacent weights belong to, or 0 for a tile of one head
}

// drawWide holds vectors of 64 bit lanes, of which only the lower halves matter.
type drawWide struct {
	rounds         [20][8]uint64 // two keys for each round
	counters, keys [3][8]uint64  // first words, and second words less base
	base, step     [8]uint64
	heads          [3][8]uint64 // third words
	batch          [8]uint64    // fourth words
	threshold      [16]uint32
	factor         [16]float32
	multipliers    [2][8]uint64
	fixed          [3][5][8]uint64 // written by the assembly
}

// Seed sets everything but the position of the weights.
func (d *Draw) Seed(dropout backend.Dropout) {
	d.dropout = dropout
	key := [2]uint32{uint32(dropout.Seed), uint32(dropout.Seed >> 32)}
	for r := range 10 {
		repeat(&d.wide.rounds[2*r], key[0])
		repeat(&d.wide.rounds[2*r+1], key[1])
		key[0] += 0x9e3779b9
		key[1] += 0xbb67ae85
	}
	repeat(&d.wide.multipliers[0], 0xd2511f53)
	repeat(&d.wide.multipliers[1], 0xcd9e8d57)
	for i := range d.wide.threshold {
		d.wide.threshold[i], d.wide.factor[i] = dropout.Threshold(), dropout.Factor()
	}
}

// repeat sets all lanes of to.
func repeat(to *[8]uint64, x uint32) {
	for i := range to {
		to[i] = uint64(x)
	}
}

// at sets the position of the first weight, but for its column.
func (d *Draw) at(batch, head, row uint32) {
	d.dropout.First = [4]int{int(batch), int(head), int(row)}
	repeat(&d.wide.batch, batch)
	repeat(&d.wide.step, uint32(d.columns))
}

// Tile prepares d for Drop on a tile of one head whose first row is row, a multiple of 4.
func (d *Draw) Tile(x *Kernels, batch, head, row uint32) {
	// A group has lanes/2 counters, each for 4 rows of a key. An iteration has as many groups as fill whole keys.
	n, each := x.Lanes/2, x.Width/4
	groups := 1
	for groups*n%each != 0 {
		groups++
	}
	d.columns = groups * n / each
	d.heads = 0
	for g := range groups {
		repeat(&d.wide.heads[g], head)
		for i := range n {
			// Lane 2i is the i-th counter, lane 2i+1 the i-th of the second half.
			at := g*n + i/2 + i%2*n/2
			d.wide.counters[g][i] = uint64(row/4 + uint32(at%each))
			d.wide.keys[g][i] = uint64(at / each)
		}
	}
	d.at(batch, head, row)
}

// Rows prepares d for Drop on a row with keys as lanes, with heads = 1, or on a vector of a tile
// with that row of Lanes heads from head on.
func (d *Draw) Rows(x *Kernels, batch, head, row uint32, heads int) {
	d.heads, d.columns = heads, x.DropLanes()/heads
	for g := range 2 {
		repeat(&d.wide.counters[g], row/4)
		for i := range x.DropLanes() / 2 {
			at := i/2*4 + 2*g + i%2 // of four adjacent weights two are in each group
			d.wide.keys[g][i] = uint64(at / heads)
			d.wide.heads[g][i] = uint64(head + uint32(at%heads))
		}
	}
	d.at(batch, head, row)
}

// Drop applies dropout to the weights of keys from column on, in the layout that d is prepared for:
//
//	P[key][lane] = P[key][lane]·(factor where word (row+lane) mod 4 of
//	    Philox(((row+lane)/4, column+key, head, batch)) is at least threshold, else 0)
//
//	p [keys, Width], and up to 3 more rows, which are overwritten    after Tile
//	p [keys], rounded up to a multiple of DropLanes                  after Rows of one head
//	p [keys, Lanes], rows Width apart, and up to 1 more, likewise    after Rows of Lanes heads
func (x *Kernels) Drop(p []float32, keys int, d *Draw, column uint32) {
	d.dropout.First[backend.Dim] = int(column)
	repeat(&d.wide.base, column)
	times := (keys + d.columns - 1) / d.columns
	if d.heads == 0 {
		_ = p[times*d.columns*x.Width-1]
		x.tile.drop(&p[0], times, &d.wide.rounds[0][0])
		return
	}
	apart := 1
	if d.heads > 1 {
		apart = x.Width
	}
	_ = p[(times*d.columns-1)*apart+d.heads-1]
	x.dropRow(&p[0], times, 4*d.columns*apart, &d.wide.rounds[0][0], d.dropout.First[backend.Seq]%4)
}

// DropLanes returns the number of weights of a row that Drop takes at once.
func (x *Kernels) DropLanes() int { return max(x.Lanes, x.rowLanes) }

// factorOf returns the factor of the weight of that head that lies row rows and column columns after the first.
func (d *Draw) factorOf(head, row, column int) float32 {
	if d.dropout.Keeps(0, head, row, column) {
		return d.dropout.Factor()
	}
	return 0
}
