package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestInterruptPipe interrupts programs that read a pipe without content.
func TestInterruptPipe(t *testing.T) {
	dir := t.TempDir()
	pipe := clitest.Pipe(t, dir, "model.onnx")
	for _, args := range [][]string{{"--backend=cpu", dir}, {"--jsonc", "--backend=cpu", pipe}} {
		clitest.InterruptedPipe(t, pipe, os.O_WRONLY, args...)
	}
}

// TestInputsBeyondMemory runs the program on inputs that take more memory than there is, or
// have no end. It refuses each by name, in little memory.
func TestInputsBeyondMemory(t *testing.T) {
	const endless = "/dev/zero"
	dir := t.TempDir()
	folder := func(name, link string) string {
		path := filepath.Join(dir, name)
		must.Do(t, os.Mkdir(path, 0o755))
		must.Do(t, os.Symlink(link, path+"/model.onnx"))
		return path
	}
	field := func(number protowire.Number, content []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), content)
	}
	nodes := clitest.WriteFile(t, dir, "nodes", field(7, bytes.Repeat(field(1, nil), 20<<20))) // GraphProto.node
	sparse := clitest.Sparse(t, dir, "sparse", 20<<30)
	empty := clitest.WriteFile(t, dir, "empty.jsonc", []byte("[{}"+strings.Repeat(",{}", 8_000_000)+"]"))
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"a model without an end", []string{folder("endless-model", endless)}, "model.onnx: it has more than 67108864 bytes"},
		{"a model of 20 GiB", []string{folder("sparse-model", sparse)}, "model.onnx: it has more than 2147483647 bytes"},
		{"a model of 20 million empty nodes", []string{folder("nodes-model", nodes)}, "model.onnx: model: it has more than 10000 parts"},
		{"operator tests without an end", []string{"--jsonc", endless}, endless + ": it has more than 67108864 bytes"},
		{"operator tests of 20 GiB", []string{"--jsonc", sparse}, sparse + ": it has more than 67108864 bytes"},
		{"8 million empty operator tests", []string{"--jsonc", empty}, empty + ": it has more than 10000 elements"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := clitest.Limited(t, append(c.args, "--backend=cpu")...)
			if code != 1 || !strings.HasPrefix(stdout, "FAIL") || !strings.Contains(stdout, c.want) || stderr != "" {
				t.Errorf("exit code %d, %s, %s, should say %q", code, stdout, stderr, c.want)
			}
		})
	}
}
