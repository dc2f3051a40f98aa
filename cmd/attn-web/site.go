//go:build !js

package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/llama"
)

//go:embed assets
var assets embed.FS

// worker is this package, which GOOS=js builds as the program of the worker.
const worker = "github.com/seed90331342/attn/cmd/attn-web"

// build writes the page to a folder: the assets, the model, the program for wasm, and wasm_exec.js of the same Go, with
// the package onnxruntime-web in the folder ort. It prints the size of the program to messages.
func build(ctx context.Context, dir, ort string, messages io.Writer) error {
	embedded, err := fs.Sub(assets, "assets")
	if err != nil {
		return err
	}
	if err := copyFiles(dir, embedded, "*"); err != nil {
		return err
	}
	module, err := goCommand(ctx, "list", "-f", "{{.Module.Dir}}", worker)
	if err != nil {
		return err
	}
	if err := addPeer(filepath.Join(dir, "ort"), ort, filepath.Join(strings.TrimSpace(module), scripts)); err != nil {
		return err
	}
	for name, text := range map[string][]byte{"checkpoint.bin": llama.CheckpointFile, "tokenizer.bin": llama.TokenizerFile} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	root, err := goCommand(ctx, "env", "GOROOT")
	if err != nil {
		return err
	}
	runner, err := os.ReadFile(filepath.Join(strings.TrimSpace(root), "lib", "wasm", "wasm_exec.js"))
	if err != nil {
		return fmt.Errorf("the Go installation has no wasm_exec.js: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "wasm_exec.js"), runner, 0o644); err != nil {
		return err
	}
	program := filepath.Join(dir, "attn.wasm")
	stop := cli.NewStatus(messages).Watch(func() string { return "building attn.wasm, which takes a minute or more the first time" })
	_, err = goCommand(ctx, "build", "-trimpath", "-ldflags=-s -w", "-o", program, worker)
	stop()
	if err != nil {
		return err
	}
	if err := os.Chmod(program, 0o644); err != nil {
		return err
	}
	size, compressed, err := sizes(program)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(messages, "attn.wasm has %.1f MB, %.1f MB compressed by gzip\n", float64(size)/1e6, float64(compressed)/1e6)
	return err
}

// copyFiles copies the files that match patterns to a folder, without their folders. An earlier version is replaced.
func copyFiles(dir string, from fs.FS, patterns ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, pattern := range patterns {
		names, err := fs.Glob(from, pattern)
		if err != nil {
			return err
		}
		if len(names) == 0 && !strings.Contains(pattern, "*") {
			return &fs.PathError{Op: "copy", Path: pattern, Err: fs.ErrNotExist}
		}
		for _, name := range names {
			text, err := fs.ReadFile(from, name)
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, path.Base(name)), text, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// scripts is the folder, in this module, of the scripts that measure peers, and of their packages.
const scripts = "bench/peers"

// addPeer writes the package onnxruntime-web and the scripts that measure it to a folder. By its
// package.json, which is always there, the page knows the version, and without one leaves it out.
func addPeer(dir, ort, scripts string) error {
	from := os.DirFS(cmp.Or(ort, filepath.Join(scripts, "node_modules", "onnxruntime-web")))
	switch _, err := fs.Stat(from, "package.json"); {
	case err == nil:
	case ort != "":
		return fmt.Errorf("--ort: %w", err)
	default:
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "package.json"), []byte("{}"), 0o644)
	}
	// The browser's build on WebGPU, and what the package states about its licence.
	err := copyFiles(dir, from, "dist/ort.webgpu.bundle.min.mjs", "dist/ort-wasm-simd-threaded.asyncify.wasm",
		"package.json", "README.md", "LICENSE*", "ThirdParty*")
	if err != nil {
		return fmt.Errorf("onnxruntime-web: %w", err)
	}
	return copyFiles(dir, os.DirFS(scripts), "inputs.mjs", "onnx.mjs", "ortweb.mjs", "turns.mjs")
}

// goCommand runs the go command for wasm and returns its output.
func goCommand(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "GOOS=js", "GOARCH=wasm", "CGO_ENABLED=0")
	var problem bytes.Buffer
	cmd.Stderr = &problem
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", args[0], err, strings.TrimSpace(problem.String()))
	}
	return string(out), nil
}

// sizes returns the size of a file, and its size after gzip -9.
func sizes(name string) (plain, compressed int, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, err
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return 0, 0, err
	}
	if _, err := w.Write(text); err != nil {
		return 0, 0, err
	}
	return len(text), packed.Len(), w.Close()
}

// types are the MIME types of the page's files. A browser compiles wasm of this type only while it
// loads, and systems may have other types for these names.
var types = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".wasm": "application/wasm", ".json": "application/json",
	".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8",
}

// handler serves the files of a folder.
func handler(dir string) http.Handler {
	files := http.FileServerFS(os.DirFS(dir))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		name := r.URL.Path
		if strings.HasSuffix(name, "/") {
			name += "index.html"
		}
		if t := types[path.Ext(name)]; t != "" {
			h.Set("Content-Type", t)
		}
		h.Set("Content-Security-Policy", "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src data:; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-cache") // the next version has the same address
		// Browsers give the precise clock only to pages that are isolated from others.
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Embedder-Policy", "require-corp")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		files.ServeHTTP(w, r)
	})
}
