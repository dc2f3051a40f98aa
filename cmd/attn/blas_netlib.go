//go:build netlib

package main

// Built with the tag netlib, attn plugs another BLAS into gonum's path of the CPU
// backend and `attn bench --compare` shows it beside gonum's own:
//
//	apt-get install libopenblas-dev
//	CGO_LDFLAGS=-lopenblas go build -tags netlib ./cmd/attn
//	./attn bench --backend cpu --compare
//
// OpenBLAS picks its kernels by the processor's model when it is loaded. One that
// is newer than the library passes for something older, or for a Prescott of
// 2004: the name in the table says for what, and OPENBLAS_CORETYPE=SkylakeX (or
// Zen, Haswell, ...) before the command corrects it. Its own threads would fight
// with the goroutines that call it, so that init leaves it one, as
// OPENBLAS_NUM_THREADS=1 does.

/*
extern char *openblas_get_corename(void);
extern char *openblas_get_config(void);
extern void openblas_set_num_threads(int);
*/
import "C"

import (
	"strings"

	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/netlib/blas/netlib"
)

func init() {
	C.openblas_set_num_threads(1)
	// "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ...": the name and the version.
	config := strings.Fields(C.GoString(C.openblas_get_config()))
	name := strings.Join(config[:min(2, len(config))], " ")
	plugged = &blasLibrary{
		name:  name + " for " + C.GoString(C.openblas_get_corename()),
		impl:  netlib.Implementation{},
		gonum: blas32.Implementation(),
	}
	blas32.Use(plugged.impl)
}
