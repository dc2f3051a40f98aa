//go:build nogpu

package main

type gpuCommands struct{}
