package peak

// fmaNEON computes c = c + x*y n times in each of 16 NEON registers of 4.
//
//go:noescape
func fmaNEON(n int, x, y float32)

// readNEON loads n*256 bytes at each of p, p+apart, p+2*apart and p+3*apart, with NEON.
//
//go:noescape
func readNEON(p *byte, apart int, n int)

// kernels returns the loops that this machine runs, the widest first.
func kernels() []kernel {
	return []kernel{{"neon", 16 * 4 * 2, fmaNEON, readNEON}, generic}
}
