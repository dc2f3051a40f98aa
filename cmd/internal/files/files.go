// Package files opens the input files of a command. Errors do not contain the path.
package files

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"reflect"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
)

// MaxText bounds reports, walkthroughs and labels, and all that comes from a
// pipe or a device, which may have no end.
const MaxText = 64 << 20

// Read returns the content of a file, a pipe or a device of at most the given number of bytes. It returns when ctx
// ends, also while a pipe has no writer: that wait then ends with the process.
func Read(ctx context.Context, path string, most int64) ([]byte, error) {
	var text []byte
	var err error
	done := make(chan struct{})
	go func() {
		text, err = read(path, most)
		close(done)
	}()
	select {
	case <-done:
		return text, output.Reason(err)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func read(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := info.Size()
	if size == 0 || !info.Mode().IsRegular() { // unknown
		size, most = MaxText, min(most, MaxText)
	}
	tooLong := fmt.Errorf("it has more than %d bytes, the most that is read", most)
	if size > most {
		return nil, tooLong
	}
	text, err := kernels.Make[byte](int(size) + 1) // memory that is not written to is not used
	if err != nil {
		return nil, err
	}
	n, err := io.ReadFull(f, text)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return text[:n], nil
	case err == nil:
		return nil, tooLong
	}
	return nil, err
}

// DecodeJSON decodes text, one value, with line numbers in its errors.
func DecodeJSON(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	err := d.Decode(into)
	if err == nil && len(bytes.TrimSpace(text[d.InputOffset():])) > 0 {
		err = errors.New("something follows the object")
	}
	line := func(offset int64) int { return 1 + bytes.Count(text[:min(int(offset), len(text))], []byte("\n")) }
	syntax, kind := new(json.SyntaxError), new(json.UnmarshalTypeError)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("line %d: not JSON: the file is cut short", line(int64(len(text))))
	case errors.As(err, &syntax):
		return fmt.Errorf("line %d: not JSON: %w", line(syntax.Offset), err)
	case errors.As(err, &kind) && kind.Field == "":
		return fmt.Errorf("line %d: not a JSON object but %s", line(kind.Offset), article(kind.Value))
	case errors.As(err, &kind):
		return fmt.Errorf("line %d: %s is %s, it must be %s", line(kind.Offset), kind.Field, article(kind.Value), kindName(kind.Type.Kind()))
	}
	return fmt.Errorf("line %d: %s", line(d.InputOffset()), strings.TrimPrefix(err.Error(), "json: "))
}

func article(kind string) string {
	if strings.HasPrefix(kind, "array") || strings.HasPrefix(kind, "object") {
		return "an " + kind
	}
	return "a " + kind
}

// kindName names the JSON of a Go type.
func kindName(k reflect.Kind) string {
	switch k {
	case reflect.String:
		return "a string"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "an array"
	}
	return "a whole number"
}

// Open opens a regular file and returns its size.
func Open(path string) (*os.File, int64, error) {
	info, err := os.Stat(path) // opening a pipe would wait for a writer
	switch {
	case err != nil:
		return nil, 0, output.Reason(err)
	case info.Mode()&fs.ModeNamedPipe != 0:
		return nil, 0, errors.New("not a regular file but a pipe, whose size is unknown: write it into a file first")
	case !info.Mode().IsRegular():
		return nil, 0, errors.New("not a regular file")
	}
	f, err := os.Open(path)
	return f, info.Size(), output.Reason(err)
}
