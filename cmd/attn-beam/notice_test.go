package main

import (
	"flag"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/notice"
)

var update = flag.Bool("update-notice", false, "write NOTICE again") // Beam has a flag update

// TestNotice compares NOTICE with what attn-beam contains.
func TestNotice(t *testing.T) { notice.CompareModule(t, "attn-beam", "update-notice", *update) }
