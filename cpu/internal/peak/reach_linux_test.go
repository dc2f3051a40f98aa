package peak

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestReadLoopsStayInsideTheirSpan reads a span between pages that cannot be read.
func TestReadLoopsStayInsideTheirSpan(t *testing.T) {
	const pages = 16
	page := unix.Getpagesize()
	all := must.Get(unix.Mmap(-1, 0, (pages+2)*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))(t)
	defer func() {
		must.Do(t, unix.Munmap(all))
	}()
	for _, guard := range [][]byte{all[:page], all[(pages+1)*page:]} {
		must.Do(t, unix.Mprotect(guard, unix.PROT_NONE))
	}
	span := all[page : (pages+1)*page]
	for _, k := range vec.Tiers() {
		for threads := 1; threads <= 5; threads++ {
			for _, part := range split([][]byte{span}, threads) {
				for _, r := range part {
					k.Read(r.from, r.apart, r.turns)
				}
			}
		}
	}
}
