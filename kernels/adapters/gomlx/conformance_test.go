package gomlx

import (
	"testing"

	"github.com/gomlx/compute/support/backendtest"
	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

func TestConformance(t *testing.T) {
	dev, err := kernels.Open("cpu")
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(dev, "")
	if err != nil {
		t.Fatal(err)
	}
	backendtest.RunAll(t, b, nil)
}
