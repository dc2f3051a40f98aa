//go:build netlib

package bench

// The build tag netlib plugs another BLAS into the gonum path of the CPU backend.
// attn bench --compare measures it next to gonum's own:
//
//	apt-get install libopenblas-dev
//	CGO_LDFLAGS=-lopenblas go build -tags netlib ./cmd/attn
//	./attn bench --backend cpu --compare
//
// OpenBLAS picks its kernels by the model of the processor when it is loaded. It
// takes a model newer than itself for an older one, down to a Prescott of 2004.
// The table names its choice; OPENBLAS_CORETYPE=SkylakeX (or Zen, Haswell, ...)
// in the environment corrects it. Its own threads would compete with the
// goroutines that call it, so init sets their number to one.

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
