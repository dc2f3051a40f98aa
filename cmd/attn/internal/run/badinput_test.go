package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestRunBadFiles gives each of the three inputs a bad file: the error names the file and the
// reason, and no output appears. Package npy tests other damage to headers.
func TestRunBadFiles(t *testing.T) {
	good := clitest.Encode("<f4", clitest.Normal(1, 24))
	f4 := clitest.Dict("<f4", false, 2, 3, 4)
	tests := []struct {
		name    string
		content []byte
		want    string
	}{
		{"text", []byte("1 2 3\n4 5 6\n"), "not a .npy file"},
		{"ends in the version", []byte("\x93NUMPY\x01"), "truncated: it ends after 7 bytes"},
		{"ends in the data", clitest.RawNPY(f4, good[:50]), "truncated: shape [2 3 4] of f4 needs 96 bytes of data, the file has 50"},
		{"a version to come", append([]byte("\x93NUMPY\x04\x00"), make([]byte, 64)...), ".npy version 4.0"},
		{"a header length that lies", append([]byte("\x93NUMPY\x02\x00\xff\xff\xff\xff"), make([]byte, 64)...), "at most 65536 are read"},
		{"integers", clitest.RawNPY(clitest.Dict("<i4", false, 2, 3, 4), good), `elements are "<i4", they must be f2, f4 or f8`},
		{"complex", clitest.RawNPY(clitest.Dict("<c8", false, 2, 3, 2), good), `elements are "<c8"`},
		{"strings", clitest.RawNPY(clitest.Dict("<U4", false, 6), good), `elements are "<U4"`},
		{"bools", clitest.RawNPY(clitest.Dict("|b1", false, 2, 3, 16), good), "elements are bool"},
		{"5-D", clitest.RawNPY(clitest.Dict("<f4", false, 1, 1, 2, 3, 4), good), "has 5 axes"},
		{"1-D", clitest.RawNPY(clitest.Dict("<f4", false, 24), good), "has 1 axes"},
		{"0-D", clitest.RawNPY(clitest.Dict("<f4", false), good[:4]), "has 0 axes"},
		{"a negative length", clitest.RawNPY(clitest.Dict("<f4", false, 2, -3, 4), good), "every length must be at least 0"},
		{"a shape beyond memory", clitest.RawNPY(clitest.Dict("<f4", false, 1<<20, 1<<20, 64), good), "truncated: shape [1048576 1048576 64]"},
		{"a shape beyond 64 bits", clitest.RawNPY(clitest.Dict("<f4", false, 1<<40, 1<<40, 1<<40), good), "larger than any file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, bad := range []string{"q", "k", "v"} {
				dir := t.TempDir()
				args := []string{"run", "--backend=cpu", "--out", dir + "/o.npy"}
				for _, name := range []string{"q", "k", "v"} {
					content := clitest.RawNPY(f4, good)
					if name == bad {
						content = tt.content
					}
					args = append(args, "--"+name, clitest.WriteFile(t, dir, name+".npy", content))
				}
				mustFail(t, "--"+bad+" "+dir+"/"+bad+".npy"+" … "+tt.want, args...)
				if got := clitest.Files(t, dir); len(got) != 3 {
					t.Errorf("the folder holds %v", got)
				}
			}
		})
	}
}

// TestRunBadCalls checks the errors of wrong calls on good files.
func TestRunBadCalls(t *testing.T) {
	dir := t.TempDir()
	array := func(name, descr string, shape ...int) string {
		return clitest.Save(t, dir, name, descr, clitest.Normal(1, clitest.Elements(shape)), shape...)
	}
	q := array("q.npy", "<f4", 2, 4, 6, 8)
	k := array("k.npy", "<f4", 2, 2, 5, 8)
	folder := filepath.Join(dir, "folder")
	must.Do(t, os.Mkdir(folder, 0o755))
	before := clitest.Files(t, dir)
	qk := []string{"--q", q, "--k", k, "--v", k}
	with := func(args ...string) []string { return append(slices.Clone(qk), args...) }
	tests := []struct {
		name string
		args []string
		want string
	}{
		{"no output", []string{"--q", q, "--k", k, "--v", k, "--out="}, "missing flags: --out"},
		{"a folder as a file", []string{"--q", folder, "--k", k, "--v", k}, "not a regular file"},
		{"other head sizes", []string{"--q", q, "--k", array("k7.npy", "<f4", 2, 2, 5, 7), "--v", k}, "has head size 7, q [2 4 6 8] has 8"},
		{"other batches", []string{"--q", q, "--k", array("k3.npy", "<f4", 3, 2, 5, 8), "--v", k}, "batches differ"},
		{"other lengths of k and v", []string{"--q", q, "--k", k, "--v", array("v4.npy", "<f4", 2, 2, 4, 8)}, "must have the same heads and keys"},
		{"heads that do not divide", []string{"--q", q, "--k", array("kh3.npy", "<f4", 2, 3, 5, 8), "--v", array("kh3.npy", "<f4", 2, 3, 5, 8)}, "the kv heads must divide the query heads"},
		{"heads that do not divide in the other layout", with("--layout=bshd"), "the kv heads must divide the query heads"},
		{"other ranks", []string{"--q", q, "--k", array("k3d.npy", "<f4", 2, 5, 8), "--v", k}, "they must have as many axes"},
		{"mixed types", []string{"--q", q, "--k", array("k2.npy", "<f2", 2, 2, 5, 8), "--v", k}, "choose a type with --dtype"},
		{"infinite scale", with("--scale", "-Inf"), "scale is -Inf"},
		{"a scale that is a word", with("--scale", "big"), `--scale: expected a number but got "big"`},
		{"no scale", with("--scale"), "attn: --scale: a value is missing\n"},
		{"a flag as a scale", with("--scale", "--causal"), "attn: --scale: a value is missing\n"},
		{"NaN softcap", with("--softcap", "nan"), "softcap is NaN"},
		{"negative window", with("--window", "-1,2"), "the side -1 is negative"},
		{"negative right side of a window", with("--window=2,-3"), "the side -3 is negative"},
		{"a window of three sides", with("--window", "3,4,5"), "must be L,R"},
		{"a window of words", with("--window", "all,3"), "neither a whole number of keys nor inf"},
		{"another alignment", with("--causal-align", "middle"), "--causal-align must be one of"},
		{"key lengths beyond the keys", with("--klen", "5,6"), "klen[1] is 6, there are 5 keys"},
		{"too few key lengths", with("--klen", "5"), "klen has 1 elements, it must have 2, the number of batches"},
		{"key lengths that are words", with("--klen", "5,five"), `--klen: expected a whole number of 64 bits but got "five"`},
		{"a mask that does not broadcast", with("--mask", array("m.npy", "|b1", 6, 6)), "does not broadcast"},
		{"a mask of integers", with("--mask", array("mi.npy", "|i1", 6, 5)), `elements are "|i1"`},
		{"a mask of 5 axes", with("--mask", array("m5.npy", "|b1", 1, 1, 1, 6, 5)), "has 5 axes"},
		{"a folder that does not exist", with("--out", dir+"/none/o.npy"), dir + "/none does not exist"},
		{"a file as a folder", with("--out", q+"/o.npy"), "not a directory"},
		{"a folder as the output", with("--out", folder), "it exists and is not a regular file"},
		{"a second output in a folder that does not exist", with("--lse", dir+"/none/l.npy"), "--lse " + dir + "/none/l.npy"},
		{"two outputs in one file", with("--lse", dir+"/o.npy"), "names the same file"},
	}
	before = append(before, "k7.npy", "k3.npy", "v4.npy", "kh3.npy", "k3d.npy", "k2.npy", "m.npy", "mi.npy", "m5.npy")
	slices.Sort(before)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			args := append([]string{"run"}, tt.args...)
			for flag, value := range map[string]string{"--out": dir + "/o.npy", "--backend": "cpu"} {
				if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, flag) }) {
					args = append(args, flag+"="+value)
				}
			}
			mustFail(t, tt.want, args...)
			if got := clitest.Files(t, dir); !slices.Equal(got, before) {
				t.Errorf("the folder holds %v, should hold %v", got, before)
			}
		})
	}
}

// TestRunBadOptions checks the errors of wrong options on good files.
func TestRunBadOptions(t *testing.T) {
	c := newRunCase(t, "bhsd")
	array := func(name, descr string, shape ...int) string {
		return clitest.Save(t, c.dir, name, descr, clitest.Normal(1, clitest.Elements(shape)), shape...)
	}
	block := array("block.npy", "|b1", 2, 3)
	for _, tt := range []struct {
		name  string
		flags []string
		want  string
	}{
		{"too few slopes", []string{"--alibi=1,2"}, "alibi has 2 elements, it must have 4"},
		{"a slope that is no number", []string{"--alibi=1,x"}, `--alibi: "x" is not a number`},
		{"an infinite slope", []string{"--alibi=1,1,1,inf"}, "alibi[3] is +Inf"},
		{"too many sinks", []string{"--sinks=1,2,3,4,5"}, "sinks has 5 elements, it must have 4, the number of heads"},
		{"automatic sinks", []string{"--sinks=auto"}, `--sinks: "auto" is not a number`},
		{"a sink of NaN", []string{"--sinks=1,2,3,nan"}, "sinks[3] is NaN"},
		{"a short table of distances", []string{"--relative-bias", array("r.npy", "<f4", 4, 10)}, "relative bias: shape [1 4 1 10] does not broadcast to [2 4 1 11]"},
		{"a table with rows", []string{"--relative-bias", array("r4.npy", "<f4", 1, 4, 1, 11)}, "has 4 axes, it must be [Sq+Sk-1]"},
		{"blocks without a size", []string{"--block-mask", block}, "--block-size is 0"},
		{"a size without blocks", []string{"--block-size=4"}, "without a --block-mask"},
		{"blocks of another size", []string{"--block-mask", block, "--block-size=4"}, "block mask: shape [1 1 2 3] does not broadcast to [2 4 2 2]"},
		{"blocks of numbers", []string{"--block-mask", array("b4.npy", "<f4", 2, 3), "--block-size=3"}, "must be bool"},
		{"two masks of numbers", []string{"--mask", array("m.npy", "<f4", 5, 7), "--bias", array("m.npy", "<f4", 5, 7)}, "add them up in one file"},
		{"all dropped", []string{"--dropout=1"}, "dropout is 1, it must be at least 0 and less than 1"},
		{"ids for half of the rows", []string{"--segments=1,2"}, "segments"},
		{"ids that come back", []string{"--segments=1,1,1,1,1", "--kv-segments=1,1,2,2,1,1,1"}, "1"},
		{"ids that are words", []string{"--segments=a,b"}, `"a" is not a whole number of 32 bits`},
		{"ids as numbers with a point", []string{"--segments", c.files[3]}, "they must be integers"},
		{"too many prefixes", []string{"--causal", "--prefix=1,2,3"}, "prefix has 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mustFail(t, tt.want, slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy"}, c.files, tt.flags)...)
		})
	}
}

// TestRunFailuresLeaveNothing fails during the call: the output of an earlier run stays as it was.
func TestRunFailuresLeaveNothing(t *testing.T) {
	tests := []struct {
		name   string
		driver func(cancel func()) hooks
		code   int
		want   string
	}{
		{"a device that is lost", func(func()) hooks {
			return hooks{before: func(context.Context, *backend.Call) error { return fmt.Errorf("x: %w", kernels.ErrDeviceLost) }}
		}, flags.ExitFailed, "device lost"},
		{"a wrong result under --check", func(func()) hooks {
			return hooks{after: func(c *backend.Call) {
				o, err := c.O.Float32s()
				if err == nil {
					o[7] += 1e-3
				}
			}}
		}, flags.ExitFailed, "check failed, nothing was written: o[0,0,0,7] is"},
		{"Ctrl-C before the call", func(cancel func()) hooks {
			return hooks{before: func(context.Context, *backend.Call) error { cancel(); return nil }}
		}, flags.ExitInterrupted, "interrupted"},
		{"Ctrl-C after the call", func(cancel func()) hooks {
			return hooks{after: func(*backend.Call) { cancel() }}
		}, flags.ExitInterrupted, "interrupted"},
		{"an error with lines in it", func(func()) hooks {
			return hooks{before: func(context.Context, *backend.Call) error { return errors.Join(errors.New("one"), errors.New("two")) }}
		}, flags.ExitFailed, "one; two"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 64), 8, 8)
			old := clitest.WriteFile(t, dir, "o.npy", []byte("old"))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tt.driver(cancel).register()
			var out, stderr strings.Builder
			code := program.Run(ctx, []string{"run", "--backend=hooked", "--check",
				"--q", x, "--k", x, "--v", x, "--out", old, "--lse", dir + "/l.npy"}, &out, &stderr)
			clitest.WantFailure(t, code, out.String(), stderr.String(), tt.want)
			if code != tt.code {
				t.Errorf("exit code %d, should be %d", code, tt.code)
			}
			if got := clitest.Files(t, dir); !slices.Equal(got, []string{"o.npy", "x.npy"}) {
				t.Errorf("the folder holds %v", got)
			}
			if b, err := os.ReadFile(old); err != nil || string(b) != "old" {
				t.Errorf("the earlier output holds %q, %v", b, err)
			}
		})
	}
}
