package shards

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem/local" // the default

	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
)

// expand returns the files of a list of URIs and globs.
func expand(ctx context.Context, name, uris string) (files []string, err error) {
	for _, uri := range strings.Split(uris, ",") {
		if !strings.ContainsAny(uri, "*?[") {
			if uri == "" {
				return nil, fmt.Errorf("%s: %q has an empty URI, give the URI of a .npy file: %w", name, uris, kernels.ErrOption)
			}
			files = append(files, uri)
			continue
		}
		system, err := filesystem.New(ctx, uri)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		matches, err := system.List(ctx, uri)
		if err = errors.Join(err, system.Close()); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", name, uri, err)
		}
		if len(matches) == 0 {
			return nil, fmt.Errorf("%s: no file matches %s: %w", name, uri, fs.ErrNotExist)
		}
		slices.SortFunc(matches, byNumber)
		files = append(files, matches...)
	}
	return files, nil
}

// byNumber compares names, where a run of digits counts as a number.
func byNumber(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		i, j := digits(x), digits(y)
		if i == 0 || j == 0 {
			if x[0] != y[0] {
				return cmp.Compare(x[0], y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		m, n := strings.TrimLeft(x[:i], "0"), strings.TrimLeft(y[:j], "0")
		if c := cmp.Or(cmp.Compare(len(m), len(n)), cmp.Compare(m, n)); c != 0 {
			return c
		}
		x, y = x[i:], y[j:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(a, b))
}

// digits returns the number of digits that s begins with.
func digits(s string) int {
	return len(s) - len(strings.TrimLeftFunc(s, func(r rune) bool { return r < 128 && unicode.IsDigit(r) }))
}

// header reads the header of a file and checks its size and elements.
func header(ctx context.Context, uri string) (h npy.Header, err error) {
	r, size, err := open(ctx, uri)
	if err != nil {
		return h, err
	}
	if h, _, err = npy.Open(r, size); err != nil {
		err = fmt.Errorf("%w: %w", err, kernels.ErrShape)
	} else if h.Fortran && len(h.Shape) > 1 {
		err = fmt.Errorf("stored in Fortran order, whose rows do not lie together: save it in C order (numpy.ascontiguousarray): %w", kernels.ErrShape)
	} else if h.Kind != 'f' || h.Size > 4 {
		err = fmt.Errorf("elements are %s, they must be f2 or f4: convert them (numpy's astype): %w", h.TypeName(), kernels.ErrDType)
	}
	return h, errors.Join(err, r.Close())
}

// file is an open file and its file system.
type file struct {
	io.ReadCloser
	system filesystem.Interface
}

func (f file) Close() error { return errors.Join(f.ReadCloser.Close(), f.system.Close()) }

// open opens a file for reading and returns its size.
func open(ctx context.Context, uri string) (f file, size int64, err error) {
	system, err := filesystem.New(ctx, uri)
	if err != nil {
		return f, 0, err
	}
	r, err := system.OpenRead(ctx, uri)
	if err != nil {
		return f, 0, errors.Join(reason(uri, err), system.Close())
	}
	f = file{r, system}
	if s, ok := r.(io.Seeker); ok {
		if size, err = s.Seek(0, io.SeekEnd); err == nil {
			_, err = s.Seek(0, io.SeekStart)
		}
	} else {
		size, err = system.Size(ctx, uri)
	}
	if err != nil {
		return f, 0, errors.Join(reason(uri, err), f.Close())
	}
	return f, size, nil
}

// reason returns err without the name of the file, and with advice for a missing one.
func reason(uri string, err error) error {
	if err = output.Reason(err); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the file is missing, write it or correct the URI: %w", err)
	}
	return err
}

// skip moves f forward by n bytes.
func (f file) skip(n int64) error {
	if s, ok := f.ReadCloser.(io.Seeker); ok {
		_, err := s.Seek(n, io.SeekCurrent)
		return err
	}
	_, err := io.CopyN(io.Discard, f, n)
	return err
}

// together calls f for 0 to n-1, 32 at a time: remote file systems take long to answer, and
// answer many requests at once.
func together(n int, f func(i int)) {
	var wait sync.WaitGroup
	for first := range min(n, 32) {
		wait.Go(func() {
			for i := first; i < n; i += 32 {
				f(i)
			}
		})
	}
	wait.Wait()
}
