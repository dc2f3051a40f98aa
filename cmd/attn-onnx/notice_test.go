package main

import (
	"flag"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/notice"
)

var update = flag.Bool("update", false, "write NOTICE again")

// TestNotice compares NOTICE with what attn-onnx contains.
func TestNotice(t *testing.T) { notice.CompareModule(t, "attn-onnx", "update", *update) }
