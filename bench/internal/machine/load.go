package machine

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// Load is a reading of Linux's counters of CPU time, in ticks on all processors together;
// the zero value where the system has none.
type Load struct {
	cpus      int
	all       float64 // time that has passed
	busy, own float64 // time used by anyone (a hypervisor's steal included), and by this process
}

// ReadLoad reads the counters.
func ReadLoad() Load {
	var l Load
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
		return Load{}
	}
	// After the name, which is in parentheses and may contain anything, utime and stime are the 12th and 13th words.
	words := bytes.Fields(self[bytes.LastIndexByte(self, ')')+1:])
	if len(words) < 13 {
		return Load{}
	}
	for _, w := range words[11:13] {
		ticks, _ := strconv.ParseFloat(string(w), 64)
		l.own += ticks
	}
	return l
}

// enoughTicks is the shortest interval, 0.2 s of one processor, that Others reports on.
const enoughTicks = 20

// Others returns the fraction of the CPU time of threads threads, 0 to 1, that other processes used between two
// readings, beyond the processors that the threads leave idle. It is negative when unknown. A backend without threads
// on the host counts as one thread, the one that waits.
func (l Load) Others(now Load, threads int) float64 {
	all := now.all - l.all
	if l.cpus == 0 || now.cpus != l.cpus || all < enoughTicks {
		return -1
	}
	threads = min(max(threads, 1), l.cpus)
	used := max(now.busy-l.busy-(now.own-l.own), 0) / all * float64(l.cpus)
	return min(max(used-float64(l.cpus-threads), 0)/float64(threads), 1)
}
