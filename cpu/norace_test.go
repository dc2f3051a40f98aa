//go:build !race

package cpu

// raceEnabled says that the race detector is on.
const raceEnabled = false
