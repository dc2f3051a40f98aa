package nn_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// attentionOf returns the attention of layer i of a model, from its config.json and its weights.
func attentionOf(ctx context.Context, dev *kernels.Device, config []byte, i int, file io.ReaderAt, size int64) (*nn.MultiHeadAttention, kernels.Options, error) {
	model, err := nn.ParseConfig(config)
	if err != nil {
		return nil, kernels.Options{}, err
	}
	layer := model.Layers[i]
	weights, err := layer.MultiHead.LoadSafetensors(file, size, layer.Prefix)
	if err != nil {
		return nil, kernels.Options{}, err
	}
	attention, err := nn.NewMultiHeadAttention(ctx, dev, layer.MultiHead, weights)
	return attention, layer.Options, err
}

// The second layer of a small model of Gemma 4 has keys that are also its values, and norms of both.
func ExampleParseConfig() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	config, err := os.ReadFile("testdata/families/gemma4.json")
	if err != nil {
		log.Fatal(err)
	}
	content, err := os.ReadFile("testdata/families/gemma4.safetensors")
	if err != nil {
		log.Fatal(err)
	}
	attention, options, err := attentionOf(ctx, dev, config, 1, bytes.NewReader(content), int64(len(content)))
	if err != nil {
		log.Fatal(err)
	}
	defer attention.Release()
	x := make([]float32, 3*40) // three tokens of hidden_size 40
	x[0], x[40], x[80] = 1, 2, 3
	y, _, err := attention.ApplyFloat32(ctx, x, 1, nn.MultiHeadOptions{Options: options})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f", y[:4])
	// Output: [-1.469 -0.374 2.575 -4.321]
}

// TestModelsPage: docs/models.md has the function attentionOf, and a row for each family that ParseConfig names.
func TestModelsPage(t *testing.T) {
	source := must.Get(os.ReadFile("models_test.go"))(t)
	page := string(must.Get(os.ReadFile("../../docs/models.md"))(t))
	_, text, _ := strings.Cut(string(source), "\n// attentionOf ")
	text, _, ok := strings.Cut(text, "\n// The second layer")
	if want := "```go\n// attentionOf " + text + "```\n"; !ok || !strings.Contains(page, want) {
		t.Errorf("docs/models.md lacks\n%s", want)
	}
	_, err := nn.ParseConfig([]byte(`{"model_type": "none"}`))
	if err == nil {
		t.Fatal("ParseConfig reads a family of no name")
	}
	for i, family := range strings.Split(err.Error(), `"`) {
		if i > 2 && i%2 == 1 && !strings.Contains(page, "`"+family+"`") {
			t.Errorf("docs/models.md lacks the family %s", family)
		}
	}
}
