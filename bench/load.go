package bench

import (
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
)

// load is how much the machine's processors have worked, as Linux counts; the zero
// value where it is not told.
type load struct {
	cpus      int
	all       float64 // what could have been worked, in ticks, on all processors
	busy, own float64 // what was, by anyone or a virtual machine's host, and by this program
}

// loadNow reads off the counters.
func loadNow() load {
	var l load
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return l
	}
	for line := range strings.Lines(string(stat)) {
		words := strings.Fields(line)
		if len(words) < 9 || !strings.HasPrefix(words[0], "cpu") {
			continue
		}
		if words[0] != "cpu" {
			l.cpus++
			continue
		}
		for i, w := range words[1:9] { // user nice system idle iowait irq softirq steal
			ticks, _ := strconv.ParseFloat(w, 64)
			l.all += ticks
			if i != 3 && i != 4 {
				l.busy += ticks
			}
		}
	}
	self, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return load{}
	}
	// After the name, which may hold anything in its brackets, utime and stime are
	// the 12th and 13th word.
	words := bytes.Fields(self[bytes.LastIndexByte(self, ')')+1:])
	if len(words) < 13 {
		return load{}
	}
	for _, w := range words[11:13] {
		ticks, _ := strconv.ParseFloat(string(w), 64)
		l.own += ticks
	}
	return l
}

// enoughTicks are needed to tell anything: hundredths of a second on all processors
// together.
const enoughTicks = 20

// others returns the part of so many threads, 0 to 1, that this program could not
// have had since l, as others had more than the processors that it leaves free;
// negative when unknown. A backend that has no threads on the host waits with one.
func (l load) others(threads int) float64 {
	now := loadNow()
	all := now.all - l.all
	if l.cpus == 0 || now.cpus != l.cpus || all < enoughTicks {
		return -1
	}
	threads = min(max(threads, 1), l.cpus)
	taken := max(now.busy-l.busy-(now.own-l.own), 0) / all * float64(l.cpus)
	return min(max(taken-float64(l.cpus-threads), 0)/float64(threads), 1)
}

// resident returns the memory that the program has in the machine, in bytes, without
// what is garbage; 0 when the system does not tell.
func resident() int64 {
	debug.FreeOSMemory()
	return status("VmRSS")
}

// peakResident returns the most memory that the program had since resetPeak.
func peakResident() int64 { return status("VmHWM") }

// resetPeak starts peakResident anew and reports whether the system let it.
func resetPeak() bool { return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) == nil }

// status reads a size off Linux's account of this program; 0 when there is none.
func status(name string) int64 { return kibibytes("/proc/self/status", name) }
