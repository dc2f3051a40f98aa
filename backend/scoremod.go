package backend

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// ScoreMod is a function of the program's own that replaces scores, with the fields and the rules of kernels.ScoreMod.
type ScoreMod struct {
	Go, Derivative       func(scores []float32, at Position)
	WGSL, WGSLDerivative string
	Values               []float32
	First                [4]int
}

// Position is the place of a span of scores in a call.
type Position struct {
	Batch, Head int
	Row         int       // of the query row among the keys, i + Visible.OffsetOf(b); it may be negative
	Key         int       // the first key of the span
	Values      []float32 // of the ScoreMod
}

// Modify calls f, a function of the ScoreMod of p, for scores of row i and the keys from j on. When f panics, so does
// Modify, with an error for [Recover] that names f.
func (p *Problem) Modify(f func([]float32, Position), scores []float32, b, h, i, j int) {
	defer func() {
		if r := recover(); r != nil {
			panic(panicOf(f, r))
		}
	}()
	m := p.ScoreMod
	at := Position{m.First[Batch] + b, m.First[Heads] + h, m.First[Seq] + i + p.Visible.OffsetOf(b), m.First[Dim] + j, slices.Clip(m.Values)}
	f(slices.Clip(scores), at) // an append must not write behind them
}

// panicOf returns the error of a panic of f with r: the name of f, and the place of the panic.
func panicOf(f, r any) error {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	at, more := frames.Next()
	for ; more && at.Function != "runtime.gopanic"; at, more = frames.Next() {
	}
	for ; more && strings.HasPrefix(at.Function, "runtime."); at, more = frames.Next() {
	}
	name, in := runtime.FuncForPC(reflect.ValueOf(f).Pointer()).Name(), ""
	if at.Function != name {
		in = " in " + at.Function
	}
	return fmt.Errorf("score mod: %s panicked at %s:%d%s: %.200s: %w", name, filepath.Base(at.File), at.Line, in, fmt.Sprint(r), ErrCallback)
}

// Recover, deferred, turns a panic into an error: that of [Problem.Modify], or ErrInternal with the stack.
func Recover(err *error) {
	r := recover()
	if r == nil {
		return
	}
	failed, ok := r.(error)
	if !ok || !errors.Is(failed, ErrCallback) {
		failed = fmt.Errorf("%w: panic: %v\n%s", ErrInternal, r, debug.Stack())
	}
	*err = failed
}

// GoMod returns ErrUnsupported when p has a ScoreMod without the functions in Go.
func (p *Problem) GoMod(gradients bool) error {
	if m := p.ScoreMod; m != nil && (m.Go == nil || gradients && m.Derivative == nil) {
		return fmt.Errorf("score mod: Go or Derivative is nil, which the CPU and checks call: %w", ErrUnsupported)
	}
	return nil
}
