package main

// Every backend that attn has registers itself.
import (
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)
