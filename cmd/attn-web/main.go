//go:build !js

// Attn-web serves a page on which a browser's GPU checks and measures itself: attention through
// WebGPU, with the error against float64 and percentages of ceilings measured on the same page.
//
//	go run ./cmd/attn-web
//	go run ./cmd/attn-web --out DIR
//
// If onnxruntime-web is installed in bench/peers, the page can measure it in turns with attn.
//
// The page loads nothing from elsewhere. The folder of --out works on any static host, also below a path. Built for
// GOOS=js this package is the program of the page's worker. The command builds it with the go command.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/seed90331342/attn/cmd/internal/flags"
)

func main() { flags.Main("attn-web", run) }

// run builds the page and serves it until ctx ends, or writes it to the folder of --out.
func run(ctx context.Context, args []string, out, messages io.Writer) error {
	f := flag.NewFlagSet("attn-web", flag.ContinueOnError)
	listen := f.String("listen", "127.0.0.1:8080", "`address` of the server; other machines need https for WebGPU")
	folder := f.String("out", "", "`folder` to write the page to, for a static host; nothing is served")
	ort := f.String("ort", "", "`folder` of the npm package onnxruntime-web, with which the page compares (default: where npm installs it in bench/peers)")
	if help, err := flags.Parse(f, args, messages); help || err != nil {
		return err
	}
	if f.NArg() > 0 {
		return flags.Usagef("unexpected argument %q", f.Arg(0))
	}
	_, port, err := net.SplitHostPort(*listen)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return flags.Usagef("--listen: %w", err)
	}
	if *folder != "" {
		return build(ctx, *folder, *ort, messages)
	}
	// An address in use is an error before the build.
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	defer listener.Close()
	dir, err := os.MkdirTemp("", "attn-web")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := build(ctx, dir, *ort, messages); err != nil {
		return err
	}
	fmt.Fprintf(out, "http://%s/\n", listener.Addr())
	return serve(ctx, listener, dir)
}

// serve serves a folder until ctx ends.
func serve(ctx context.Context, listener net.Listener, dir string) error {
	server := &http.Server{Handler: handler(dir), ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
