package main

// fma computes c = c + x*y n times in each of 16 registers, and returns the operations.
func fma() {
	f := kernel("fma")
	n, operations, x, y, acc := f.param("n"), f.gp(), f.broadcastParam("x"), f.broadcastParam("y"), f.vectors(16)
	f.emit(integer, "MOVD $%d, %v", 2*lanes*len(acc), operations)
	f.emit(integer, "MUL %v, %v, %v", n, operations, operations)
	for _, c := range acc {
		f.copy(x, c)
	}
	f.loop("next", n, func() {
		for _, c := range acc {
			f.fma(y, x, c)
		}
	})
	f.emit(store, "MOVD %v, %s", operations, f.arg("operations"))
	f.ret()
}

// read loads n*256 bytes from each of p, p+apart, p+2*apart and p+3*apart on.
func read() {
	f := kernel("read")
	p := f.params("p", "apart", "n")
	at, to := []gp{p[0], f.gp(), f.gp(), f.gp()}, f.vectors(2)
	for i, from := range at[:3] {
		f.addTo(from, p[1], 0, at[i+1])
	}
	f.loop("next", p[2], func() {
		for _, from := range at {
			for off := 0; off < 256; off += 2 * bytes {
				f.ldRow(from, off, to)
			}
			f.addI(256, from)
		}
	})
	f.ret()
}
