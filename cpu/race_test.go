//go:build race

package cpu

// raceEnabled reports whether the race detector is on, whose shadow memory and sync.Pool are not those of a program.
const raceEnabled = true
