package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/llama"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// expected is what the model writes greedily in 200 tokens, as llama2.c states it (test_all.py, expected_stdout).
const expected = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. " +
	"She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. " +
	"She said, \"I want to play with your ball, but I can't find it.\"\nLily was sad and didn't know what to do. She said, \"I'm sorry, Lily. " +
	"I didn't know what to do.\"\nLily didn't want to help her mom, so she"

// write runs the command and returns its output.
func write(t *testing.T, args ...string) (out, messages string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	must.Do(must.In(t, "stories %q", args), run(t.Context(), args, &stdout, &stderr))
	return stdout.String(), stderr.String()
}

// eachTier runs f with every CPU tier.
func eachTier(t *testing.T, f func(t *testing.T)) {
	for _, tier := range cpu.Tiers() {
		t.Run(tier, func(t *testing.T) {
			t.Setenv("ATTN_CPU_TIER", tier)
			f(t)
		})
	}
}

// TestGreedy compares 200 tokens with llama2.c's, to the byte: on each CPU tier and on WebGPU, one story and several,
// decoded from the first token or after a prompt. With -short the GPU writes the last eight after a prompt.
func TestGreedy(t *testing.T) {
	greedy := func(t *testing.T, device string, batch, prompted int) {
		t.Helper()
		tokens := llama.LoadTokenizer(llama.TokenizerFile)
		prompt := tokens.Decode(tokens.Encode(expected)[:prompted+1])
		out, _ := write(t, "--temperature", "0", "--steps", "200", "--backend", device, "--batch", strconv.Itoa(batch), "--prompt", prompt)
		if out != expected+"\n"+strings.Repeat("\n"+expected+"\n", batch-1) {
			t.Errorf("with a prompt of %d tokens it writes %q", prompted, out)
		}
	}
	eachTier(t, func(t *testing.T) {
		for _, c := range [][2]int{{1, 0}, {1, 100}, {3, 0}, {4, 111}, {1, 199}} {
			greedy(t, "cpu", c[0], c[1])
		}
	})
	t.Run("gpu", func(t *testing.T) {
		clitest.NeedBackend(t, "gpu")
		if greedy(t, "gpu", 3, 192); !testing.Short() {
			greedy(t, "gpu", 1, 0)
		}
	})
}

// TestCaches feeds the expected text to caches of every kind, a token at a time, and compares the logits, which are up
// to 20 in magnitude. Those of float32 caches have the same bits as in one call over the whole text. The other caches
// store keys and values with 11, 8 and about 8 bits; their bounds are four times the largest difference measured in 200
// tokens: 0.024, 0.15 and 1.08. All but q8, whose logits are closer together than that, lead to the same tokens.
func TestCaches(t *testing.T) {
	eachTier(t, func(t *testing.T) {
		steps := 200
		if testing.Short() {
			steps = 80
		}
		testCaches(t, clitest.Open(t, "cpu"), steps)
	})
	t.Run("gpu", func(t *testing.T) {
		if testing.Short() {
			t.Skip("long")
		}
		testCaches(t, clitest.Open(t, "gpu"), 16)
	})
}

func testCaches(t *testing.T, dev *kernels.Device, steps int) {
	m := must.Get(llama.Load(t.Context(), dev, llama.CheckpointFile))(t)
	tokens := llama.LoadTokenizer(llama.TokenizerFile).Encode(expected)[:steps]
	forward := func(tokens []int, options func(layer int) nn.MultiHeadOptions) []float32 {
		logits, _, err := m.Forward(t.Context(), [][]int{tokens}, options)
		must.Do(t, err)
		return logits[0]
	}
	var want [][]float32
	for _, c := range []struct {
		dtype kernels.DType
		paged bool
		bound float64
	}{
		{kernels.F32, false, 0}, {kernels.F32, true, 0}, {kernels.F16, false, 0.096}, {kernels.F16, true, 0.096},
		{kernels.BF16, false, 0.6}, {kernels.BF16, true, 0.6}, {kernels.Q8, false, 4.32}, {kernels.Q8, true, 4.32},
	} {
		caches := cachesOf(t, dev, c.dtype, c.paged)
		worst, same := 0., 0
		for i := range tokens {
			logits := forward(tokens[i:i+1], func(layer int) nn.MultiHeadOptions { return nn.MultiHeadOptions{Cache: caches[layer]} })
			if len(want) == i { // the first cache
				want = append(want, logits)
				if i%8 == 7 && !slices.Equal(forward(tokens[:i+1], llama.Whole), logits) {
					t.Errorf("logits differ between %d tokens in one call and one a call", i+1)
				}
			}
			for j, x := range logits {
				worst = max(worst, math.Abs(float64(x-want[i][j])))
			}
			if slices.Index(logits, slices.Max(logits)) == slices.Index(want[i], slices.Max(want[i])) {
				same++
			}
		}
		t.Logf("%v, paged %t: logits differ by at most %.2g, %d of %d next tokens are the same", c.dtype, c.paged, worst, same, steps)
		if !(worst <= c.bound) || same < steps && c.dtype != kernels.Q8 {
			t.Errorf("%v, paged %t: logits differ by %v, the bound is %v; %d of %d next tokens are the same", c.dtype, c.paged, worst, c.bound, same, steps)
		}
	}
}

// cachesOf returns a cache for each layer.
func cachesOf(t *testing.T, dev *kernels.Device, dtype kernels.DType, paged bool) (list []nn.KVCache) {
	for range llama.Layers {
		if paged {
			c := must.Get(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: llama.KVHeads, Dim: llama.HeadDim, DType: dtype, PageSize: pageSize, Pages: 256 / pageSize}))(t)
			t.Cleanup(c.Release)
			s := must.Get(c.NewSequence())(t)
			list = append(list, c.Batch(s))
			continue
		}
		c := must.Get(kvcache.New(t.Context(), dev, kvcache.Config{KVHeads: llama.KVHeads, Dim: llama.HeadDim, DType: dtype, Capacity: 256}))(t)
		t.Cleanup(c.Release)
		list = append(list, c)
	}
	return list
}

// TestSampling compares stories with a temperature: a seed determines them, the first one
// does not depend on the others, and seeds and stories differ.
func TestSampling(t *testing.T) {
	story := func(args ...string) string {
		out, _ := write(t, append(args, "--backend", "cpu", "--steps", "60", "--prompt", "The little dog")...)
		return out
	}
	one, several := story("--seed", "7"), story("--seed", "7", "--batch", "3")
	if again := story("--seed", "7"); again != one {
		t.Errorf("with the same seed it writes %q and %q", one, again)
	}
	if other := story("--seed", "8"); other == one {
		t.Errorf("with another seed it writes the same: %q", other)
	}
	stories := strings.Split(several, "\n\n")
	if len(stories) != 3 || stories[0]+"\n" != one || stories[1] == stories[0] || stories[2] == stories[1] {
		t.Errorf("three stories are %q, one is %q", stories, one)
	}
	for _, s := range stories {
		if !strings.HasPrefix(s, "The little dog") {
			t.Errorf("a story does not begin with the prompt: %q", s)
		}
	}
}

// TestTokenizer encodes and decodes texts. Control characters are not printed.
func TestTokenizer(t *testing.T) {
	tokens := llama.LoadTokenizer(llama.TokenizerFile)
	for _, text := range []string{"", "Once upon a time", "naïve 東京 😀", "two\nlines\tand tabs", expected} {
		if got := tokens.Decode(tokens.Encode(text)); got != text {
			t.Errorf("%q becomes %q", text, got)
		}
	}
	for text, want := range map[string]string{"\x1b[2J": "\uFFFD[2J", "a\x7f": "a\uFFFD", "\xff": "\uFFFD"} {
		if got := tokens.Decode(tokens.Encode(text)); got != want {
			t.Errorf("%q becomes %q, should be %q", text, got, want)
		}
	}
	if n := len(tokens.Encode(expected)); n != 201 {
		t.Errorf("the expected text has %d tokens", n)
	}
}

// TestErrors runs the command with arguments that it refuses.
func TestErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must.Do(t, os.WriteFile(file, nil, 0o644))
	long := strings.Repeat("東", 200)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--step", "3"}, "flag provided but not defined: -step; stories --help lists the flags"},
		{[]string{"--steps", "many"}, `invalid value "many" for flag -steps`},
		{[]string{"--steps", "0"}, "--steps is 0, it must be 1, for the prompt and one more token, to 512"},
		{[]string{"--steps", "513"}, "--steps is 513, it must be 1, "},
		{[]string{"--steps", "4", "--prompt", "The little dog"}, "--steps is 4, it must be 5, "},
		{[]string{"--prompt", long}, "--prompt has 602 tokens, the model takes 512: shorten it"},
		{[]string{"--batch", "0"}, "--batch is 0, it must be 1 to 1024"},
		{[]string{"--batch", "1025"}, "--batch is 1025"},
		{[]string{"--temperature", "-1"}, "--temperature is -1, it must be 0 to 100"},
		{[]string{"--temperature", "NaN"}, "--temperature is NaN"},
		{[]string{"--backend", "tpu"}, `--backend: backend "tpu" is unknown, there are auto, cpu, gpu`},
		{[]string{"The", "little"}, `unexpected argument "The": quote the prompt`},
		{[]string{"--backend", "cpu", "--steps", "2", "--heatmap", file}, "--heatmap: "},
	} {
		var out, messages bytes.Buffer
		err := run(t.Context(), c.args, &out, &messages)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("stories %q: error %v, should be one line with %q", c.args, err, c.want)
		}
		want := flags.ExitUsage
		if slices.Contains(c.args, file) {
			want = flags.ExitFailed
		}
		if code := flags.ExitCode(t.Context(), err); code != want {
			t.Errorf("stories %q: exit code %d, want %d", c.args, code, want)
		}
		if messages.Len() > 0 {
			t.Errorf("stories %q prints %q", c.args, &messages)
		}
	}
	if _, messages := write(t, "--help"); !strings.Contains(messages, "-temperature") {
		t.Errorf("help is %q", messages)
	}
}

// TestInterrupt cancels the context while a story grows.
func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out strings.Builder
	err := run(ctx, []string{"--backend", "cpu", "--temperature", "0"}, writeFunc(func(p []byte) (int, error) {
		if out.Len() >= 10 {
			cancel()
		}
		return out.Write(p)
	}), io.Discard)
	must.Fail(t, "cancelled", err, context.Canceled)
	if text := out.String(); !strings.HasPrefix(expected, text) || len(text) < 10 || len(text) > 20 {
		t.Errorf("it writes %q", text)
	}
}

// writeFunc is an io.Writer.
type writeFunc func(p []byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

// TestHeatmap compares the title and the labels of each layer's page, and the weights of
// the model: each row sums to 1 and sees no later token.
func TestHeatmap(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "pages")
	write(t, "--backend", "cpu", "--temperature", "0", "--steps", "12", "--heatmap", dir)
	for i := range llama.Layers {
		page := clitest.ReadFile(t, filepath.Join(dir, fmt.Sprintf("layer-%d.html", i+1)))
		clitest.Contains(t, string(page), fmt.Sprintf("Layer %d", i+1), "head 8", "(start)", "Once", "little")
	}
	dev := clitest.Open(t, "cpu")
	m := must.Get(llama.Load(t.Context(), dev, llama.CheckpointFile))(t)
	const n = 12
	_, weights, err := m.Forward(t.Context(), [][]int{llama.LoadTokenizer(llama.TokenizerFile).Encode(expected)[:n]}, llama.Whole)
	must.Do(t, err)
	for layer, w := range weights {
		for row := range llama.Heads * n {
			sum := 0.
			for j, x := range w[row*n:][:n] {
				if sum += float64(x); j > row%n && x != 0 {
					t.Errorf("layer %d: row %d sees token %d", layer+1, row%n, j)
				}
			}
			if !(math.Abs(sum-1) <= 1e-6) {
				t.Errorf("layer %d: the weights of row %d sum to %v", layer+1, row%n, sum)
			}
		}
	}
}

// TestStats compares the figures that do not depend on time: 4 stories of 64 tokens share
// the pages that the prompt fills.
func TestStats(t *testing.T) {
	tokens := llama.LoadTokenizer(llama.TokenizerFile)
	prompt := tokens.Decode(tokens.Encode(expected)[:40])
	_, messages := write(t, "--backend", "cpu", "--temperature", "0", "--steps", "64", "--batch", "4", "--stats", "--prompt", prompt)
	// 40 positions of the prompt fill 2 pages and begin a third; each story has 64.
	pages := llama.Layers * (2 + 4*2)
	cache := fmt.Sprintf("%d bytes in %d pages\n", pages*pageSize*2*llama.KVHeads*llama.HeadDim*4, pages)
	clitest.Contains(t, messages, "device    ", "prefill     40 tokens, ", "decode      96 tokens, ", cache)
}

// TestRecording compares the queries, keys and values of the first 128 tokens with those
// that every backend is tested with.
func TestRecording(t *testing.T) {
	dev, recorder := kernelstest.Record(t, cpu.New(cpu.Options{}))
	m := must.Get(llama.Load(t.Context(), dev, llama.CheckpointFile))(t)
	pieces := llama.LoadTokenizer(llama.TokenizerFile)
	tokens := pieces.Encode(expected)[:128]
	_, _, err := m.Forward(t.Context(), [][]int{tokens}, llama.Whole)
	must.Do(t, err)
	var names []string
	for i := range llama.Layers {
		names = append(names, fmt.Sprintf("layer-%d", i+1))
	}
	recorder.Check("stories260K.safetensors", names)
	labels := must.Get(json.Marshal(append([]string{"(start)"}, pieces.Texts(tokens)...)))(t)
	if stored := recorder.File("stories260K.labels.json", labels); !bytes.Equal(stored, labels) {
		t.Errorf("the stored labels are %s, should be %s", stored, labels)
	}
}
