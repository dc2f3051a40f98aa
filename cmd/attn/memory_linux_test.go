package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"
)

// limited returns a process that runs the command line with that much address space, in KiB.
func limited(kib string, args ...string) *exec.Cmd {
	cmd := program(args...)
	cmd.Args = append([]string{"sh", "-c", "ulimit -v " + kib + ` && exec "$0" "$@"`, cmd.Path}, args...)
	cmd.Path = "/bin/sh"
	return cmd
}

// TestInputsBeyondMemory runs the program on inputs that take more memory than there is, or
// have no end. It refuses each by name, in little memory.
func TestInputsBeyondMemory(t *testing.T) {
	const most = 256 << 20 // bytes; the program alone takes about 30 MiB
	dir := t.TempDir()
	file := func(name string, size int64, content ...byte) string {
		path := clitest.WriteFile(t, dir, name, content)
		if size > 0 {
			if err := os.Truncate(path, int64(len(content))+size); err != nil {
				t.Skipf("this file system has no sparse files: %v", err)
			}
		}
		return path
	}
	folder := func(name string, link string, model ...byte) string {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if link == "" {
			clitest.WriteFile(t, path, "model.onnx", model)
		} else if err := os.Symlink(link, path+"/model.onnx"); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const endless = "/dev/zero"
	x := clitest.Save(t, dir, "x.npy", "<f4", make([]float64, 64), 8, 8)
	logits := file("logits.npy", 8<<40, clitest.RawNPY(clitest.Dict("<f4", false, 2<<40), nil)...)
	ids := file("ids.npy", 8<<40, clitest.RawNPY(clitest.Dict("<i8", false, 1<<40), nil)...)
	sparse := file("sparse", 20<<30)
	tensors := file("x.safetensors", 20<<30, binary.LittleEndian.AppendUint64(nil, 95_000_000)...)
	tokens := file("tokens.json", 0, []byte(`{"x": [`+strings.Repeat("[1],", 3999)+"[1]]}")...)
	columns := file("columns.json", 0, []byte(`{"x": [[1`+strings.Repeat(",1", 39999)+"]]}")...)
	wide := "[[1" + strings.Repeat(",1", 99_999) + "]]"
	weights := file("weights.json", 0, []byte(`{"x": [[1]], "w_query": [[1`+strings.Repeat(",1", 1<<20)+"]]}")...)
	queries := file("queries.json", 0, []byte(`{"x": [`+strings.Repeat("[1],", 999)+`[1]], "w_query": `+wide+`, "w_key": `+wide+"}")...)
	field := func(number protowire.Number, content []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), content)
	}
	nodes := folder("nodes", "", field(7, bytes.Repeat(field(1, nil), 20<<20))...) // GraphProto.node

	empty := file("empty.jsonc", 0, []byte("[{}"+strings.Repeat(",{}", 8_000_000)+"]")...)

	run := []string{"run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir + "/o.npy"}
	heat := []string{"heatmap", "--backend=cpu", "--q", x, "--k", x, "--png", dir + "/h.png"}
	with := func(args []string, more ...string) []string { return append(args[:len(args):len(args)], more...) }
	// Linux counts the peak of the process that starts another as that of the other. This sets
	// that of the tests back to what they use now (proc_pid_clear_refs(5)).
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"sinks of 8 TiB", with(run, "--sinks", logits), "--sinks: " + logits + ": 8796093022208 bytes requested"},
		{"slopes of 8 TiB", with(run, "--alibi", logits), "--alibi: " + logits + ": 8796093022208 bytes requested"},
		{"documents of 8 TiB", with(run, "--segments", ids), "--segments: " + ids + ": 8796093022208 bytes requested"},
		{"sequences of 8 TiB", with(run, "--cu-q", ids), "--cu-q: " + ids + ": 8796093022208 bytes requested"},
		{"tensors with a header of 95 MB", with(run, "--bias", tensors+"#b"), "--bias " + tensors + "#b: malformed .safetensors header: it does not start with {"},
		{"2^31-1 largest weights", with(run, "--topk=2147483647", "--topk-keys", dir+"/I.npy"), "--topk: an output of [1 1 8 2147483647]: 137438953408 bytes requested"},
		{"a problem without an end", with(run[:2], "--problem", endless, "--out", dir+"/o.npy"), "--problem /dev/zero: it has more than 67108864 bytes"},
		{"a problem of 20 GiB", with(run[:2], "--problem", sparse, "--out", dir+"/o.npy"), "--problem " + sparse + ": it has more than 67108864 bytes"},
		{"labels without an end", with(heat, "--labels", endless), "--labels /dev/zero: it has more than 67108864 bytes"},
		{"labels of 20 GiB", with(heat, "--labels", sparse), "--labels " + sparse + ": it has more than 67108864 bytes"},
		{"labels of queries of 20 GiB", with(heat, "--query-labels", sparse), "--query-labels " + sparse + ": it has more than 67108864 bytes"},
		{"a report without an end", []string{"compare", endless, endless}, "/dev/zero: it has more than 67108864 bytes"},
		{"a report of 20 GiB", []string{"compare", sparse, sparse}, sparse + ": it has more than 67108864 bytes"},
		{"a report to resume without an end", []string{"bench", "--resume", endless}, "--resume: /dev/zero: it has more than 67108864 bytes"},
		{"a walk-through without an end", []string{"explain", endless}, "/dev/zero: it has more than 67108864 bytes"},
		{"a walk-through of 20 GiB", []string{"explain", sparse}, sparse + ": it has more than 67108864 bytes"},
		{"a walk-through of 4,000 tokens", []string{"explain", tokens}, "x has 4000 tokens of 1 columns in 1 batches, queries have 1 columns and values 1: a step would have 1.6e+07 numbers, at most 1048576 are printed"},
		{"a walk-through of 40,000 columns", []string{"explain", columns}, "a step would have 1.6e+09 numbers"},
		{"a walk-through with queries of 100,000 columns", []string{"explain", queries}, "a step would have 1e+08 numbers"},
		{"a walk-through with a million weights", []string{"explain", weights}, "w_query has more than 1048576 numbers"},
		{"a model without an end", []string{"onnx", "--backend=cpu", folder("endless", endless)}, "model.onnx: it has more than 67108864 bytes"},
		{"a model of 20 GiB", []string{"onnx", "--backend=cpu", folder("sparse-model", sparse)}, "model.onnx: it has more than 2147483647 bytes"},
		{"a model of 20 million empty nodes", []string{"onnx", "--backend=cpu", nodes}, "model.onnx: model: it has more than 10000 parts"},
		{"operator tests without an end", []string{"onnx", "--jsonc", "--backend=cpu", endless}, endless + ": it has more than 67108864 bytes"},
		{"operator tests of 20 GiB", []string{"onnx", "--jsonc", "--backend=cpu", sparse}, sparse + ": it has more than 67108864 bytes"},
		{"8 million empty operator tests", []string{"onnx", "--jsonc", "--backend=cpu", empty}, empty + ": it has more than 10000 elements"},
		{"a tuning file of 20 GiB", []string{"tune", "--show", "--file", sparse}, sparse + " has more than 4194304 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := limited("4194304", c.args...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if cmd.ProcessState == nil {
				t.Fatal(err)
			}
			if c.args[0] == "onnx" { // a line a case
				if cmd.ProcessState.ExitCode() != 1 || !strings.HasPrefix(stdout.String(), "FAIL") || !strings.Contains(stdout.String(), c.want) || stderr.Len() > 0 {
					t.Errorf("%v, %s, %s, should say %q", err, &stdout, &stderr, c.want)
				}
			} else {
				clitest.WantFailure(t, cmd.ProcessState.ExitCode(), stdout.String(), stderr.String(), c.want)
			}
			if peak := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss * 1024; peak > most {
				t.Errorf("it took %d bytes of memory", peak)
			} else {
				t.Logf("%d MiB", peak>>20)
			}
		})
	}
}
