package run

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestRunBeyondMemory reads sparse files that are larger than the memory of any
// machine. Their f8 elements need a conversion in memory.
func TestRunBeyondMemory(t *testing.T) {
	dir := t.TempDir()
	head := clitest.RawNPY(clitest.Dict("<f8", false, 1<<33, 64), nil)
	x := clitest.WriteFile(t, dir, "x.npy", head)
	if err := os.Truncate(x, int64(len(head))+1<<42); err != nil {
		t.Skipf("this file system has no files of 4 TiB: %v", err)
	}
	mustFail(t, "the inputs need 6 TiB of memory: … out of memory", "run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
}

// TestRunOutputMemory: outputs that do not fit in memory are refused before the call is computed.
func TestRunOutputMemory(t *testing.T) {
	dir := t.TempDir()
	head := clitest.RawNPY(clitest.Dict("<f4", false, 1<<23, 1), nil)
	x := clitest.WriteFile(t, dir, "x.npy", head)
	must.Do(t, os.Truncate(x, int64(len(head))+4<<23))
	computed := errors.New("the call was computed")
	hooks{before: func(context.Context, *backend.Call) error { return computed }}.register()
	for _, c := range []struct{ args, want string }{
		{"--scores " + dir + "/S.npy", "--scores: an output of [1 1 8388608 8388608]: 281474976710656 bytes requested"},
		{"--topk 2147483647 --topk-keys " + dir + "/I.npy", "--topk: an output of [1 1 8388608 2147483647]: 144115188008747008 bytes requested"},
		{"--topk 4611686018427387904 --topk-keys " + dir + "/I.npy", "--topk: an output of [1 1 8388608 4611686018427387904]: 2^63 or more bytes requested"},
		{"--dropout 0.5 --keep-mask " + dir + "/M.npy", "--keep-mask: an output of [1 1 8388608 8388608]: 70368744177664 bytes requested"},
	} {
		args := append([]string{"run", "--backend=hooked", "--q", x, "--k", x, "--v", x, "--out", dir + "/o.npy"}, strings.Fields(c.args)...)
		mustFail(t, c.want+" … "+"out of memory", args...)
	}
}

// TestRunEmpty runs without queries, keys, heads and batches: outputs are empty, or zeros.
func TestRunEmpty(t *testing.T) {
	for _, c := range []struct {
		name string
		q, k []int
		o    string // shape
		rows int
	}{
		{"no queries", []int{0, 4}, []int{3, 4}, "(0, 4)", 0},
		{"no keys", []int{3, 4}, []int{0, 4}, "(3, 4)", 3},
		{"neither", []int{0, 4}, []int{0, 4}, "(0, 4)", 0},
		{"no heads", []int{2, 0, 3, 4}, []int{2, 0, 3, 4}, "(2, 0, 3, 4)", 0},
		{"no batches", []int{0, 3, 4}, []int{0, 3, 4}, "(0, 3, 4)", 0},
	} {
		dir := t.TempDir()
		q := clitest.Save(t, dir, "q.npy", "<f4", clitest.Normal(1, clitest.Elements(c.q)), c.q...)
		k := clitest.Save(t, dir, "k.npy", "<f4", clitest.Normal(2, clitest.Elements(c.k)), c.k...)
		out := mustRun(t, "run", "--backend=cpu", "--check", "--q", q, "--k", k, "--v", k, "--out", dir+"/o.npy", "--lse", dir+"/l.npy", "--weights", dir+"/w.npy",
			"--scores", dir+"/s.npy", "--topk=2", "--topk-keys", dir+"/t.npy", "--rope=10000")
		if !strings.HasPrefix(out, "check: ") || (c.rows == 0) != strings.Contains(out, "no rows") {
			t.Errorf("%s: %s", c.name, out)
		}
		o := clitest.ReadFile(t, dir+"/o.npy")
		if !bytes.Contains(o, []byte("'shape': "+c.o)) || !bytes.HasSuffix(o, append([]byte("\n"), make([]byte, 16*c.rows)...)) {
			t.Errorf("%s: %q, should be zeros of shape %s", c.name, o, c.o)
		}
	}
}

// TestRunMapped reads the same numbers from a file that is mapped and from files that
// cannot be: of another byte order, alignment or type.
func TestRunMapped(t *testing.T) {
	dir := t.TempDir()
	data := clitest.Normal(3, 40*8)
	for i := range data {
		data[i] = float64(kernels.F16.Round(float32(data[i])))
	}
	head := func(descr string, start int) []byte {
		text := clitest.Dict(descr, false, 40, 8)
		return clitest.RawNPY(text+strings.Repeat(" ", (start-11-len(text))), clitest.Encode(descr, data))
	}
	var want []byte
	for _, f := range []struct {
		name, descr string
		start       int
		mapped      bool
	}{{"aligned", "<f4", 128, true}, {"odd", "<f4", 127, false}, {"big endian", ">f4", 128, false}, {"f8", "<f8", 128, false}, {"f2", "<f2", 128, false}} {
		x := clitest.WriteFile(t, dir, "x.npy", head(f.descr, f.start))
		n := must.Get(array.Open("x", x, false))(t)
		if (n.Memory(kernels.F32) == 0) != f.mapped || int(n.Start) != f.start {
			t.Errorf("%s: begins at %d, mappable %t", f.name, n.Start, (n.Memory(kernels.F32) == 0))
		}
		if code, _, stderr := attn(t, "run", "--backend=cpu", "--dtype=f32", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy"); code != 0 {
			t.Fatalf("%s: %s", f.name, stderr)
		}
		got := clitest.ReadFile(t, dir+"/o.npy")
		if want == nil {
			want = got
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: another output", f.name)
		}
	}
}

// TestRunStreamed runs on a device without room for any operand.
func TestRunStreamed(t *testing.T) {
	clitest.NeedBackend(t, "gpu")
	dir := t.TempDir()
	x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(5, 3000*64), 3000, 64) // 750 KiB
	args := func(out string) []string {
		return []string{"run", "--backend=gpu", "--q", x, "--k", x, "--v", x, "--causal", "--out", dir + "/" + out}
	}
	mustRun(t, args("resident.npy")...)
	t.Setenv("ATTN_GPU_MEMORY", "1MiB")
	plan := mustRun(t, append(args("o.npy"), "--plan")...)
	if !strings.Contains(plan, "streamed") || !strings.Contains(plan, "between host and device") {
		t.Errorf("the plan does not say that it streams:\n%s", plan)
	}
	mustRun(t, append(args("streamed.npy"), "--check")...)
	if !bytes.Equal(clitest.ReadFile(t, dir+"/resident.npy"), clitest.ReadFile(t, dir+"/streamed.npy")) {
		t.Error("the streamed output differs")
	}
	t.Setenv("ATTN_GPU_MEMORY", "lots")
	mustFail(t, `ATTN_GPU_MEMORY is "lots"`, args("o.npy")...)
}
