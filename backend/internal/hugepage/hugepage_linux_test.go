package hugepage

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestAdvise reads what the system says of the middle of memory that was advised.
func TestAdvise(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the emulator of other processors does not pass advice on")
	}
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage/enabled"); err != nil {
		t.Skipf("this system has no large pages: %v", err)
	}
	data := make([]byte, 4*Size)
	at := uintptr(unsafe.Pointer(&data[2*Size]))
	flags := func() (flags string) {
		f := must.Get(os.Open("/proc/self/smaps"))(t)
		defer f.Close()
		here := false
		for lines := bufio.NewScanner(f); lines.Scan(); {
			var lo, hi uintptr
			if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &lo, &hi); n == 2 {
				here = lo <= at && at < hi
			} else if text, ok := strings.CutPrefix(lines.Text(), "VmFlags:"); ok && here {
				return text + " "
			}
		}
		t.Fatal("the memory is in no mapping")
		return ""
	}
	before := flags()
	Advise(unsafe.Pointer(unsafe.SliceData(data)), len(data))
	if after := flags(); !strings.Contains(after, " hg ") {
		t.Errorf("flags %q before and %q after, want hg", before, after)
	}
	runtime.KeepAlive(data)
}

// TestWithin takes spans with and without whole pages.
func TestWithin(t *testing.T) {
	for _, c := range [][4]uintptr{ // p, bytes, first, n
		{0, 0, 0, 0},
		{7 * Size, Size, 0, Size},
		{7 * Size, Size - 1, 0, 0},
		{7*Size + 1, Size, 0, 0},
		{7*Size + 1, 2*Size - 1, Size - 1, Size},
		{7*Size - 1, 3*Size + 9, 1, 3 * Size},
	} {
		first, n := within(c[0], c[1])
		if n != c[3] || n > 0 && first != c[2] {
			t.Errorf("within(%#x, %#x) = %#x, %#x, want %#x, %#x", c[0], c[1], first, n, c[2], c[3])
		}
	}
}
