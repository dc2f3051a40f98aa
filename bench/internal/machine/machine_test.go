package machine

import "testing"

func TestOthers(t *testing.T) {
	start := Load{cpus: 4, all: 1000, busy: 500, own: 100}
	for _, tc := range []struct {
		why       string
		all       float64 // ticks that pass
		busy, own float64
		threads   int
		want      float64
	}{
		{"too short", 10, 0, 0, 1, -1},
		{"idle machine", 1000, 0, 0, 4, 0},
		{"only this process", 1000, 1000, 1000, 4, 0},
		{"others use everything", 1000, 1000, 0, 4, 1},
		{"others use half, one thread has a processor of its own", 1000, 500, 0, 1, 0},
		{"others use half, of four threads", 1000, 500, 0, 4, 0.5},
		{"others use three of four, of two threads", 1000, 750, 0, 2, 0.5},
		{"more threads than processors", 1000, 500, 0, 9, 0.5},
		{"no threads on the host", 1000, 1000, 0, 0, 1},
	} {
		now := Load{cpus: 4, all: start.all + tc.all, busy: start.busy + tc.busy, own: start.own + tc.own}
		if got := start.Others(now, tc.threads); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.why, got, tc.want)
		}
	}
	if got := (Load{}).Others(Load{}, 1); got != -1 {
		t.Errorf("unknown load: %v", got)
	}
	if l := ReadLoad(); l.cpus > 0 && (l.all <= 0 || l.busy <= 0 || l.busy > l.all) {
		t.Errorf("this machine: %+v", l)
	}
}

func TestFieldOfProcFiles(t *testing.T) {
	text := []byte("processor\t: 0\nmodel name\t: A: B @ 2 GHz\nmodel name\t: other\nMemAvailable:   12 kB\n")
	for key, want := range map[string]string{"model name": "A: B @ 2 GHz", "MemAvailable": "12 kB", "absent": "", "model": ""} {
		if got := field(text, key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
}
