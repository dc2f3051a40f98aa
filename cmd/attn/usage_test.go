package main

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestExitCodes: wrong usage of any command exits with 2, and files, devices and results that are
// at fault with 1. Each prints one line and writes no file.
func TestExitCodes(t *testing.T) {
	t.Chdir(t.TempDir())
	clitest.Save(t, ".", "x.npy", "<f4", clitest.Normal(1, 24), 6, 4)
	clitest.Save(t, ".", "y.npy", "<f4", clitest.Normal(2, 30), 6, 5)
	clitest.WriteFile(t, ".", "x.json", []byte(`{"x": [[1, 0], [0, 1]]}`))
	clitest.WriteFile(t, ".", "bad.json", []byte(`{`))
	clitest.WriteFile(t, ".", "two.txt", []byte("a\nb\n"))
	clitest.Save(t, ".", "nan.npy", "<f4", []float64{math.NaN()}, 1)
	clitest.WriteFile(t, ".", "ids.npy", clitest.RawNPY(clitest.Dict("<i4", false, 2), []byte{0, 0, 0, 0, 9, 0, 0, 0}))
	const run, draw = "run --backend cpu --q x.npy --k x.npy --v x.npy --out o.npy ", "heatmap --backend cpu --q x.npy --k x.npy --png h.png "
	packed := strings.ReplaceAll(run, "x.npy", "p.npy")
	clitest.Save(t, ".", "p.npy", "<f4", clitest.Normal(3, 8), 2, 1, 4)
	const tune, emit = "tune --file t.json ", "tune --emit . --seq 64 --dim 32 "
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", 2, "expected one of"},
		{"sun", 2, "sun"},
		{"devices --foo", 2, "unknown flag --foo"},
		{"run", 2, "missing flags: --k=K.npy, --q=Q.npy, --v=V.npy"},
		{"run --k x.npy", 2, "missing flags: --q=Q.npy, --v=V.npy"},
		{"run --q x.npy --k x.npy --v x.npy", 2, "missing flags: --out"},
		{run + "--softcap -1", 2, "softcap is -1, it must be positive"},
		{run + "--klen -1", 2, "klen[0] is -1"},
		{run + "--scale NaN", 2, "scale is NaN"},
		{run + "--dtype f64", 2, `--dtype must be one of "f32","f16","bf16" but got "f64"`},
		{run + "--layout sbhd", 2, `--layout must be one of "bhsd","bshd"`},
		{run + "--window 3", 2, "must be L,R"},
		{run + "--lse o.npy", 2, "--lse o.npy: --out names the same file"},
		{run + "--sinks 1,2,3", 2, "sinks has 3 elements, it must have 1"},
		{run + "--sinks NaN", 2, "sinks[0] is NaN"},
		{run + "--sinks nan.npy", 1, "sinks[0] is NaN"},
		{run + "--sinks none.npy", 1, "none.npy: no such file"},
		{run + "--alibi 1,2,3", 2, "alibi has 3 elements"},
		{run + "--alibi x.npy", 1, "alibi has 24 elements"},
		{run + "--klen 99", 2, "klen[0] is 99"},
		{run + "--klen 1,2,3", 2, "klen has 3 elements"},
		{run + "--offset 1,2,3", 2, "offset has 3 elements"},
		{run + "--prefix 1,2", 2, "prefix has 2 elements"},
		{run + "--segments 1,2", 2, "qsegments[0] has 2 elements"},
		{run + "--segments ids.npy", 1, "qsegments[0] has 2 elements"},
		{run + "--segments x.npy", 1, "must be integers"},
		{strings.Replace(run, "--k x.npy", "--k y.npy", 1) + "--klen 1,2", 1, "head size 5"},
		{run + "--block-mask y.npy", 2, "--block-size is 0, with a --block-mask"},
		{run + "--rope 1 --rope-dim 6", 2, "dim is 6"},
		{packed + "--cu-q 0,9,2", 2, "cuQ[2] is 2, after 9"},
		{packed + "--cu-q ids.npy", 1, "cuQ[1] is 9, there are 2 rows"},
		{packed + "--cu-q 0,1,2 --cu-k 0,2", 2, "cuQ has 3 entries and cuK 2"},
		{packed + "--cu-q 0,1,2 --weights w.npy", 2, "Weights is set, but packed sequences"},
		{run + "--seed 1", 2, "--seed is given without a --dropout"},
		{run + "--topk 3", 2, "--topk has no output"},
		{run + "--dq d.npy", 2, "--dq is given without --do"},
		{strings.Replace(run, "cpu", "foo", 1), 2, `backend "foo" is unknown`},
		{"heatmap", 2, "missing flags: --k=K.npy, --q=Q.npy"},
		{"heatmap --q x.npy --k x.npy", 2, "missing flags: --png, --svg or --html"},
		{draw + "--head 9", 2, "--head is 9, it must be 0 to 0"},
		{draw + "--head 0,-1", 2, "--head is -1, it must be 0 to 0"},
		{draw + "--batch 1", 2, "--batch is 1"},
		{draw + "--batch=-1", 2, "--batch is -1"},
		{draw + "--size 0", 2, "--size is 0"},
		{draw + "--size 4000", 2, "--size is 4000"},
		{draw + "--pool sum", 2, "--pool"},
		{draw + "--softcap -1", 2, "softcap is -1"},
		{draw + "--klen 1,2", 2, "klen has 2 elements"},
		{draw + "--queries 4:9", 2, "--queries: 4:9 is not within 0:6"},
		{draw + "--keys 3:3", 2, "--keys: 3:3 is not within 0:6, or is empty"},
		{draw + "--keys 3", 2, "must be LO:HI"},
		{draw + "--keys a:", 2, `"a" is not a whole number`},
		{strings.Replace(draw, "h.png", "h.jpg", 1), 2, "--png h.jpg: the file would be PNG, not JPG: end its name in .png"},
		{strings.Replace(draw, "--png h.png", "--html h.svg", 1), 2, "--html h.svg: the file would be HTML, not SVG: end its name in .html"},
		{"explain", 2, "<file>"},
		{"explain x.json --round 16", 2, "--round is 16, it must be 0 to 15 decimals"},
		{"explain x.json --backend tpu", 2, `backend "tpu" is unknown`},
		{"explain x.json --png h.gif", 2, "--png h.gif: the file would be PNG, not GIF"},
		{"bench --seq abc", 2, `"abc" is not a number`},
		{"bench --preset foo", 2, `--preset is "foo"`},
		{"bench --variant foo", 2, `--variant is "foo"`},
		{"bench --dim 0", 2, "--dim is 0"},
		{"bench --backend foo", 2, `backend "foo"`},
		{"bench --threads -1", 2, "--threads is -1"},
		{"bench --backend cpu --seq 16 --heads 1 --rounds 1 --json a --html a", 2, "--html a: --json names the same file"},
		{"ATTN_CPU_TIER=bogus " + run, 2, `ATTN_CPU_TIER is "bogus"`},
		{"ATTN_CPU_TIER=bogus bench --seq 16", 2, `ATTN_CPU_TIER is "bogus"`},
		{"ATTN_CPU_TIER=bogus explain x.json", 2, `ATTN_CPU_TIER is "bogus"`},
		{"compare", 2, "<old> <new>"},
		{"compare a b --fail-over x", 2, "not a percentage"},
		{tune + "--show --clear", 2, "exclude each other"},
		{tune + "--backend cpu", 2, "only gpu"},
		{tune + "--dim 0", 2, "--dim is 0, it must be at least 1"},
		{tune + "--dim 64,x", 2, `"x"`},
		{tune + "--dtype f99", 2, `--dtype is "f99"`},
		{tune + "--seq x", 2, `"x" is not a number`},
		{tune + "--seq 4k..1k", 2, "reverse order"},
		{tune + "--heads 0", 2, "--heads is 0"},
		{tune + "--budget -1s", 2, "--budget is -1s"},
		{tune + "--causal", 2, "--emit DIR, which is missing"},
		{emit + "--show", 2, "--emit excludes --show"},
		{emit + "--q8 --staged", 2, "--q8 excludes --staged and --gradients"},
		{emit + "--gradients --staged", 2, "--staged and --gradients exclude each other"},
		{emit + "--kv-heads 3 --heads 4", 2, "--kv-heads is 3"},
		{emit + "--seq-q -1", 2, "--seq-q is -1"},
		{emit + "--q8 --dim 30", 2, "multiple of 4"},
		{emit + "--q4 --dim 48", 2, "multiple of 32 with --q4"},
		{emit + "--q4 --q8", 2, "--q8, --q4 and --f8 exclude each other"},
		{emit + "--q4 --f8", 2, "--q8, --q4 and --f8 exclude each other"},
		{emit + "--f8 --dim 30", 2, "multiple of 4 with --f8"},
		{emit + "--q8 --dim 300", 1, "256"},
		{emit + "--dim 0", 2, "at least 1"},
		{strings.Replace(emit, "--emit .", "--emit x.npy", 1), 1, "--emit"},

		{strings.Replace(run, "x.npy", "none.npy", 1), 1, "none.npy: no such file"},
		{strings.Replace(run, "--k x.npy", "--k y.npy", 1), 1, "head size 5"},
		{strings.Replace(run, "o.npy", "none/o.npy", 1), 1, "none does not exist"},
		{strings.Replace(run, "cpu", "gpu:99", 1), 1, "gpu"},
		{"explain bad.json", 1, "bad.json"},
		{"explain none.json", 1, "none.json: no such file"},
		{"explain x.json --png /none/h.png", 1, "/none does not exist"},
		{"compare a b", 1, "a: no such file"},
		{"compare bad.json bad.json", 1, "bad.json: this is not a report"},
		{"bench --seq 16 --resume bad.json", 1, "bad.json: this is not a report"},
		{draw + "--k y.npy", 1, "head"},
		{draw + "--k none.npy", 1, "none.npy: no such file"},
		{draw + "--png /none/h.png", 1, "/none does not exist"},
		{draw + "--labels two.txt", 1, "2 labels for 6 tokens"},
		{draw + "--query-labels /none", 1, "--query-labels /none: no such file"},
	} {
		args, tier := strings.Fields(c.args), ""
		if len(args) > 0 && strings.HasPrefix(args[0], "ATTN_CPU_TIER=") {
			tier, args = strings.TrimPrefix(args[0], "ATTN_CPU_TIER="), args[1:]
		}
		t.Setenv("ATTN_CPU_TIER", tier)
		code, stdout, stderr := attn(t, args...)
		if code != c.code {
			t.Errorf("attn %s: exit code %d, want %d", c.args, code, c.code)
		}
		clitest.WantFailure(t, code, stdout, stderr, c.want)
	}
	if got := clitest.Files(t, "."); !slices.Equal(got, []string{"bad.json", "ids.npy", "nan.npy", "p.npy", "two.txt", "x.json", "x.npy", "y.npy"}) {
		t.Errorf("the folder holds %v", got)
	}
}

// TestOverwriteInputs: an output that is an input, by its name or by a link, is refused unless
// --overwrite-inputs is given.
func TestOverwriteInputs(t *testing.T) {
	ids := []byte{0, 0, 0, 0, 1, 0, 0, 0}
	for _, c := range []struct{ args, output, input string }{
		{"run --q q.npy --k k.npy --v v.npy --out q.npy", "--out q.npy", "--q q.npy"},
		{"run --q q.npy --k k.npy --v v.npy --out soft.npy", "--out soft.npy", "--k k.npy"},
		{"run --q q.npy --k k.npy --v v.npy --out hard.npy", "--out hard.npy", "--v v.npy"},
		{"run --q q.npy --k k.npy --v v.npy --out o.npy --lse ./q.npy", "--lse ./q.npy", "--q q.npy"},
		{"run --q q.npy --k k.npy --v v.npy --mask m.npy --out m.npy", "--out m.npy", "--mask m.npy"},
		{"run --q q.npy --k k.npy --v v.npy --segments ids.npy --out ids.npy", "--out ids.npy", "--segments ids.npy"},
		{"run --q q.npy --k k.npy --v v.npy --sinks=s.npy --out s.npy", "--out s.npy", "--sinks s.npy"},
		{"run --q q.npy --k k.npy --v v.npy --do do.npy --dq do.npy", "--dq do.npy", "--do do.npy"},
		{"heatmap --q q.npy --k k.npy --svg q.npy", "--svg q.npy", "--q q.npy"},
		{"heatmap --q q.npy --k k.npy --labels l.txt --html l.txt", "--html l.txt", "--labels l.txt"},
		{"explain x.json --png x.json", "--png x.json", "FILE x.json"},
	} {
		dir := t.TempDir()
		t.Chdir(dir)
		for i, name := range []string{"q.npy", "k.npy", "v.npy", "do.npy"} {
			clitest.Save(t, dir, name, "<f4", clitest.Normal(uint64(i), 8), 2, 4)
		}
		clitest.Save(t, dir, "m.npy", "|b1", []float64{1, 0, 1, 1}, 2, 2)
		clitest.Save(t, dir, "s.npy", "<f4", []float64{1}, 1)
		clitest.WriteFile(t, dir, "ids.npy", clitest.RawNPY(clitest.Dict("<i4", false, 2), ids))
		clitest.WriteFile(t, dir, "x.json", []byte(`{"x": [[1, 0], [0, 1]]}`))
		clitest.WriteFile(t, dir, "l.txt", []byte("a\nb\n"))
		must.Do(t, os.Symlink(filepath.Join(dir, "k.npy"), "soft.npy"))
		must.Do(t, os.Link("v.npy", "hard.npy"))
		read := func() map[string]string {
			all := map[string]string{}
			for _, name := range clitest.Files(t, dir) {
				text := clitest.ReadFile(t, name)
				all[name] = string(text)
			}
			return all
		}
		before, args := read(), append(strings.Fields(c.args), "--backend=cpu")
		mustFail(t, c.output+" would replace the input "+c.input+": name another file, or give --overwrite-inputs", args...)
		after := read()
		for name := range before {
			if after[name] != before[name] {
				t.Errorf("attn %s: %s has changed", c.args, name)
			}
		}
		if len(after) != len(before) {
			t.Errorf("attn %s: the folder holds %v", c.args, clitest.Files(t, dir))
		}
		mustRun(t, append(args, "--overwrite-inputs")...)
		file := strings.Fields(c.output)[1]
		if text, err := os.ReadFile(file); err != nil || string(text) == before[filepath.Base(file)] {
			t.Errorf("attn %s --overwrite-inputs: %s has not changed, %v", c.args, file, err)
		}
	}
}
