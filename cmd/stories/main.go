// Stories writes stories with a small language model. It shows how a program uses attn: it
// loads weights, computes a prompt at once (prefill) into a paged cache of keys and values,
// forks that cache for several stories, and continues them token by token (decode).
//
//	go run ./cmd/stories --prompt "The little dog"
//	go run ./cmd/stories --batch 4 --steps 100 --stats --backend cpu
//	go run ./cmd/stories --heatmap pages
//
// The model, stories260K of llama2.c, has 260,000 parameters and was trained on TinyStories
// (Eldan & Li 2023). It is part of the program.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"

	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/llama"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func main() { flags.Main("stories", run) }

func run(ctx context.Context, args []string, out, messages io.Writer) error {
	w := writer{out: out, Tokenizer: llama.LoadTokenizer(llama.TokenizerFile)}
	f := flag.NewFlagSet("stories", flag.ContinueOnError)
	device := f.String("backend", "auto", "`device` that computes: auto, cpu, gpu, gpu:1")
	prompt := f.String("prompt", "", "`text` that the stories begin with")
	f.IntVar(&w.steps, "steps", 256, "largest `number` of tokens, with those of the prompt")
	f.Float64Var(&w.temperature, "temperature", 0.7, "0 takes the most probable token, larger `values` are more random")
	f.Uint64Var(&w.seed, "seed", 1, "`number` that determines the random choices")
	f.IntVar(&w.batch, "batch", 1, "`number` of stories from the same prompt")
	heatmap := f.String("heatmap", "", "`folder` for pages of the attention weights, one a layer")
	stats := f.Bool("stats", false, "print speed and memory")
	if help, err := flags.Parse(f, args, messages); help || err != nil {
		return err
	}
	tokens := w.Encode(*prompt)
	switch {
	case f.NArg() > 0:
		return flags.Usagef("unexpected argument %q: quote the prompt, as in --prompt \"The little dog\"", f.Arg(0))
	case len(tokens) > llama.Positions:
		return flags.Usagef("--prompt has %d tokens, the model takes %d: shorten it", len(tokens), llama.Positions)
	case w.steps < len(tokens) || w.steps > llama.Positions:
		return flags.Usagef("--steps is %d, it must be %d, for the prompt and one more token, to %d", w.steps, len(tokens), llama.Positions)
	case w.batch < 1 || w.batch > 1024:
		return flags.Usagef("--batch is %d, it must be 1 to 1024", w.batch)
	case !(w.temperature >= 0 && w.temperature <= 100):
		return flags.Usagef("--temperature is %v, it must be 0 to 100", w.temperature)
	}
	dev, err := kernels.Open(*device)
	if err != nil {
		return fmt.Errorf("--backend: %w", err)
	}
	defer dev.Close()
	if w.Model, err = llama.Load(ctx, dev, llama.CheckpointFile); err != nil {
		return err
	}
	err = w.write(ctx, tokens)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(messages) // after a part of a story
	case err == nil && *stats:
		w.report(messages)
	}
	if err == nil && *heatmap != "" {
		if err = w.draw(ctx, *heatmap); err != nil {
			err = fmt.Errorf("--heatmap: %w", err)
		}
	}
	return err
}
