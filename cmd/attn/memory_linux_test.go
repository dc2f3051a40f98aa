package main

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestInputsBeyondMemory runs the program on inputs that take more memory than there is, or
// have no end. It refuses each by name, in little memory.
func TestInputsBeyondMemory(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, size int64, content ...byte) string {
		return clitest.Sparse(t, dir, name, size, content...)
	}
	const endless = "/dev/zero"
	x := clitest.Save(t, dir, "x.npy", "<f4", make([]float64, 64), 8, 8)
	logits := file("logits.npy", 8<<40, clitest.RawNPY(clitest.Dict("<f4", false, 2<<40), nil)...)
	ids := file("ids.npy", 8<<40, clitest.RawNPY(clitest.Dict("<i8", false, 1<<40), nil)...)
	sparse := file("sparse", 20<<30)
	tensors := file("x.safetensors", 20<<30, binary.LittleEndian.AppendUint64(nil, 95_000_000)...)
	tokens := file("tokens.json", 0, []byte(`{"x": [`+strings.Repeat("[1],", 3999)+"[1]]}")...)
	wide := "[[1" + strings.Repeat(",1", 99_999) + "]]"
	weights := file("weights.json", 0, []byte(`{"x": [[1]], "w_query": [[1`+strings.Repeat(",1", 1<<20)+"]]}")...)
	queries := file("queries.json", 0, []byte(`{"x": [`+strings.Repeat("[1],", 999)+`[1]], "w_query": `+wide+`, "w_key": `+wide+"}")...)
	run := []string{"run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir + "/o.npy"}
	heat := []string{"heatmap", "--backend=cpu", "--q", x, "--k", x, "--png", dir + "/h.png"}
	with := func(args []string, more ...string) []string { return append(args[:len(args):len(args)], more...) }
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
		{"labels without an end", with(heat, "--labels", endless), "--labels /dev/zero: it has more than 67108864 bytes"},
		{"labels of 20 GiB", with(heat, "--labels", sparse), "--labels " + sparse + ": it has more than 67108864 bytes"},
		{"labels of queries of 20 GiB", with(heat, "--query-labels", sparse), "--query-labels " + sparse + ": it has more than 67108864 bytes"},
		{"a report without an end", []string{"compare", endless, endless}, "/dev/zero: it has more than 67108864 bytes"},
		{"a report of 20 GiB", []string{"compare", sparse, sparse}, sparse + ": it has more than 67108864 bytes"},
		{"a report to resume without an end", []string{"bench", "--resume", endless}, "--resume: /dev/zero: it has more than 67108864 bytes"},
		{"a walk-through without an end", []string{"explain", endless}, "/dev/zero: it has more than 67108864 bytes"},
		{"a walk-through of 20 GiB", []string{"explain", sparse}, sparse + ": it has more than 67108864 bytes"},
		{"a walk-through of 4,000 tokens", []string{"explain", tokens}, "x has 4000 tokens of 1 columns in 1 batches, queries have 1 columns and values 1: a step would have 1.6e+07 numbers, at most 1048576 are printed"},
		{"a walk-through with queries of 100,000 columns", []string{"explain", queries}, "a step would have 1e+08 numbers"},
		{"a walk-through with a million weights", []string{"explain", weights}, "w_query has more than 1048576 numbers"},
		{"a tuning file of 20 GiB", []string{"tune", "--show", "--file", sparse}, sparse + ": not a tuning file of attn"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := clitest.Limited(t, c.args...)
			clitest.WantFailure(t, code, stdout, stderr, c.want)
		})
	}
}
