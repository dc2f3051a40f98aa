package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/seed90331342/attn/cmd/internal/llama"
	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/cmd/internal/picture"
)

// maxDrawn bounds the tokens of a heat map.
const maxDrawn = 96

// draw writes a page for each layer with the attention weights of its heads, computed
// again over the beginning of the first story.
func (w *writer) draw(ctx context.Context, folder string) error {
	tokens := w.stories[0].tokens[:min(len(w.stories[0].tokens), maxDrawn)]
	_, weights, err := w.Forward(ctx, [][]int{tokens}, llama.Whole)
	if err == nil {
		err = os.MkdirAll(folder, 0o755)
	}
	axis := picture.Axis{Labels: append([]string{"(start)"}, w.Texts(tokens)...), End: len(tokens), Step: 1}
	for i := 0; i < llama.Layers && err == nil; i++ {
		h := picture.HeatMap{Title: fmt.Sprintf("Layer %d", i+1), Query: axis, Key: axis,
			Weights: matrix.Matrix{Batch: llama.Heads, Rows: len(tokens), Cols: len(tokens), Data: weights[i]}}
		for head := range llama.Heads {
			h.Names = append(h.Names, fmt.Sprintf("head %d", head+1))
		}
		err = output.Write(ctx, filepath.Join(folder, fmt.Sprintf("layer-%d.html", i+1)), func(to io.Writer) error {
			return h.WritePage(to, [][2]string{{"model", "stories260K"}, {"device", w.Dev.Info().Device}})
		})
	}
	return err
}
