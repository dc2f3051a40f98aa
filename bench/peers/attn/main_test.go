package main

import (
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// ask sends lines to a server and returns its answers.
func ask(t *testing.T, lines ...string) []answer {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer dev.Close()
	var out strings.Builder
	must.Do(t, serve(t.Context(), dev, strings.NewReader(strings.Join(lines, "\n")+"\n"), &out))
	var all []answer
	for line := range strings.Lines(out.String()) {
		var a answer
		must.Do(must.In(t, "%q", line), json.Unmarshal([]byte(line), &a))
		all = append(all, a)
	}
	if len(all) != len(lines) {
		t.Fatalf("%d answers to %d requests", len(all), len(lines))
	}
	return all
}

func TestServe(t *testing.T) {
	a := ask(t,
		`{"do":"load","case":{"heads":2,"seq":33,"dim":8,"causal":true}}`,
		`{"do":"run","calls":3}`,
		`{"do":"peak"}`,
		`{"do":"load","case":{"heads":1,"seq":1,"dim":4,"causal":false}}`)
	if len(a[0].Sample) != samples || a[0].Error != "" {
		t.Errorf("load: %+v", a[0])
	}
	if len(a[1].Seconds) != 3 || a[1].Seconds[0] <= 0 {
		t.Errorf("run: %+v", a[1])
	}
	if a[2].FLOPS < 1e8 {
		t.Errorf("peak: %+v", a[2])
	}
	// One key: the output is the value.
	for j, got := range a[3].Sample {
		if _, _, _, d := place(problem{Batch: 1, Heads: 1, Seq: 1, Dim: 4}, j); got != element(uint32(d), 2) {
			t.Errorf("sample %d is %v, want %v", j, got, element(uint32(d), 2))
		}
	}
}

// With one key, dq and dk are zeros and dv is the gradient of the output.
func TestServeGradients(t *testing.T) {
	a := ask(t, `{"do":"load","case":{"heads":1,"seq":1,"dim":4,"backward":true}}`, `{"do":"run","calls":2}`, `{"do":"load","case":{"heads":1,"seq":1,"dim":4}}`)
	for j, got := range a[0].Sample {
		_, _, _, d := place(problem{Batch: 1, Heads: 1, Seq: 1, Dim: 4}, j)
		want := [3]float32{2: element(uint32(d), 3)}[j%3]
		if got-want > 1e-6 || want-got > 1e-6 {
			t.Errorf("sample %d is %v, want %v", j, got, want)
		}
	}
	if len(a[0].Sample) != samples || len(a[1].Seconds) != 2 || len(a[2].Sample) != samples || a[2].Error != "" {
		t.Errorf("%+v", a)
	}
}

func TestServeSixteenBits(t *testing.T) {
	a := ask(t, `{"do":"load","case":{"heads":1,"seq":1,"dim":4,"dtype":"bf16"}}`, `{"do":"device"}`, `{"do":"load","case":{"heads":1,"seq":1,"dim":4,"dtype":"f64"}}`)
	for j, got := range a[0].Sample { // one key: the output is the value
		_, _, _, d := place(problem{Batch: 1, Heads: 1, Seq: 1, Dim: 4}, j)
		if want := kernels.BF16.Round(element(uint32(d), 2)); got != want {
			t.Errorf("sample %d is %v, want %v", j, got, want)
		}
	}
	if len(a[0].Sample) != samples || a[1].Device == nil || a[1].Device.Type != kernels.CPU || a[1].Device.Name != "cpu" {
		t.Errorf("%+v", a[:2])
	}
	if !strings.Contains(a[2].Error, "f64") {
		t.Errorf("an unknown type: %+v", a[2])
	}
}

func TestServeGoesOnAfterErrors(t *testing.T) {
	a := ask(t, `{"do":"sing"}`, `nonsense`, `{"do":"run","calls":1}`, `{"do":"load","case":{"heads":0,"seq":1,"dim":1}}`, `{"do":"peak"}`)
	for i, got := range a[:4] {
		if got.Error == "" {
			t.Errorf("request %d: no error", i)
		}
	}
	if a[4].Error != "" {
		t.Errorf("peak: %s", a[4].Error)
	}
}

// The same numbers stand in peers.test.mjs.
func TestInputsAreThoseOfEveryOtherProgram(t *testing.T) {
	for _, c := range []struct {
		i, stream uint32
		want      float32
	}{
		{0, 0, -1.3081400394439697}, {1, 0, 1.36948823928833}, {12345, 1, 0.15833115577697754}, {4194303, 2, -1.38590669631958},
	} {
		if got := element(c.i, c.stream); got != c.want {
			t.Errorf("element %d of stream %d is %v, want %v", c.i, c.stream, got, c.want)
		}
	}
}

// TestScripts runs the tests of the scripts where node is installed.
func TestScripts(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not installed, which only bench/peers needs")
	}
	if err := exec.CommandContext(t.Context(), node, "-e", "if (parseInt(process.versions.node) < 18) process.exit(1)").Run(); err != nil {
		t.Skip("node is older than 18, which bench/peers needs")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, node, "--test")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("node --test: %v\n%s", err, out)
	}
}
