// Package pagetest looks at pages and pictures in tests. Pages are opened in a headless
// Chromium; without Chromium their tests are skipped.
package pagetest

import (
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// timeout ends a test whose page waits for something that never comes. Next to other programs on two
// cores the start of the browser takes a minute, and all of a test takes several.
const timeout = 20 * time.Minute

// Browser is a running Chromium.
type Browser struct {
	t   testing.TB
	ctx context.Context
}

// Start starts Chromium until the end of the test. It skips the test without Chromium, or, except with CI=true, if
// Chromium does not start. flags are additional flags of Chromium: "name" or "name=value".
func Start(t testing.TB, flags ...string) *Browser {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.NoSandbox, // root has none, as in containers
		chromedp.WSURLReadTimeout(timeout))
	for _, f := range flags {
		name, value, valued := strings.Cut(f, "=")
		if valued {
			options = append(options, chromedp.Flag(name, value))
		} else {
			options = append(options, chromedp.Flag(name, true))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx, chromedp.WithErrorf(func(string, ...any) {}))
	t.Cleanup(cancel)
	switch err := chromedp.Do(ctx); {
	case errors.Is(err, exec.ErrNotFound):
		t.Skip("Chromium is not installed, pages are not tested in a browser (on Debian: apt-get install chromium)")
	case err != nil && os.Getenv("CI") == "true":
		t.Fatalf("Chromium does not start: %v", err)
	case err != nil: // a distribution may have a placeholder command for a missing package
		t.Skipf("Chromium does not start, pages are not tested in a browser: %s", strings.Join(strings.Fields(err.Error()), " "))
	}
	return &Browser{t, ctx}
}

// Look is the window and theme of a page. Its zero value is 800 x 800, light, with scripts.
type Look struct {
	Width, Height int64
	Dark          bool
	NoScript      bool
}

// Page is opened in a tab.
type Page struct {
	t   testing.TB
	ctx context.Context

	mu       sync.Mutex
	problems []string
}

// Open opens a file in a tab of its own until the end of the test.
func (b *Browser) Open(file string, look Look) *Page {
	b.t.Helper()
	path, err := filepath.Abs(file)
	if err != nil {
		b.t.Fatal(err)
	}
	url := "file://" + filepath.ToSlash(path)
	return b.Visit(url, url, look)
}

// Visit opens the page of a URL in a tab of its own until the end of the test. The page may request
// only what begins with own.
func (b *Browser) Visit(url, own string, look Look) *Page {
	b.t.Helper()
	if look.Width == 0 {
		look.Width, look.Height = 800, 800
	}
	ctx, cancel := chromedp.NewContext(b.ctx)
	b.t.Cleanup(cancel)
	p := &Page{t: b.t, ctx: ctx}
	if err := chromedp.Listen(ctx, func(event any) { p.listen(event, own) }); err != nil {
		b.t.Fatalf("in the browser: %v", err)
	}
	scheme := map[bool]string{false: "light", true: "dark"}[look.Dark]
	call(p, log.Enable, cdp.Empty{})
	call(p, network.Enable, network.EnableParams{})
	call(p, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
		Width: look.Width, Height: look.Height, DeviceScaleFactor: 1, Mobile: look.Width < 500})
	call(p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	call(p, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: look.NoScript})
	run(p, chromedp.Navigate(url))
	return p
}

// listen records what a page must not do.
func (p *Page) listen(event any, own string) {
	problem := ""
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
			problem = "console: " + string(e.Type)
			for _, arg := range e.Args {
				problem += fmt.Sprintf(" %s%s", arg.Value, arg.Description)
			}
		}
	case *runtime.EventExceptionThrown:
		problem = "exception: " + e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			problem += " " + e.ExceptionDetails.Exception.Description
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			problem = "log: " + e.Entry.Text
		}
	case *network.EventRequestWillBeSent:
		if !strings.HasPrefix(e.Request.URL, own) && !strings.HasPrefix(e.Request.URL, "data:") {
			problem = "request: " + e.Request.URL
		}
	}
	if problem != "" {
		p.mu.Lock()
		p.problems = append(p.problems, problem)
		p.mu.Unlock()
	}
}

// run runs an action in the tab of the page.
func run[T any](p *Page, action chromedp.Action[T]) T {
	p.t.Helper()
	result, err := chromedp.Run(p.ctx, action)
	if err != nil {
		p.t.Fatalf("in the browser: %v", err)
	}
	return result
}

// call sends a command of the protocol.
func call[P, R any](p *Page, command cdp.Command[P, R], params P) {
	p.t.Helper()
	if _, err := chromedp.Call(p.ctx, command, params); err != nil {
		p.t.Fatalf("in the browser: %v", err)
	}
}

// Eval evaluates a JavaScript expression, also in a page without scripts.
func Eval[T any](p *Page, expression string) T {
	p.t.Helper()
	return run(p, chromedp.Evaluate[T](expression))
}

// Await waits until a JavaScript expression is true.
func (p *Page) Await(expression string) {
	p.t.Helper()
	for !Eval[bool](p, expression) {
		time.Sleep(50 * time.Millisecond) // run fails when the time of the test is over
	}
}

// Downloads makes the browser save the files that it downloads in a folder.
func (p *Page) Downloads(dir string) {
	p.t.Helper()
	call(p, browser.SetDownloadBehavior, browser.SetDownloadBehaviorParams{
		Behavior: browser.SetDownloadBehaviorBehaviorAllow, DownloadPath: dir})
}

// Screenshot returns what the window shows, as a PNG file.
func (p *Page) Screenshot() []byte {
	p.t.Helper()
	return run(p, chromedp.CaptureScreenshot())
}

// place scrolls the first match of the selector into view and returns the position of
// (x, y) in it, in fractions of its size from the upper left corner.
func (p *Page) place(selector string, x, y float64) (left, top float64) {
	p.t.Helper()
	at := Eval[[]float64](p, fmt.Sprintf(`(() => {
		const e = document.querySelector(%q);
		e.scrollIntoView({block: "center", inline: "center"});
		const r = e.getBoundingClientRect();
		return [r.left + %v * r.width, r.top + %v * r.height];
	})()`, selector, x, y))
	return at[0], at[1]
}

// Hover moves the pointer to (x, y) in the first match of the selector, in fractions of its size.
func (p *Page) Hover(selector string, x, y float64) {
	p.t.Helper()
	left, top := p.place(selector, x, y)
	run(p, chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, left, top))
}

// Drag drags the middle of the first match of the selector by dx, dy pixels.
func (p *Page) Drag(selector string, dx, dy float64) {
	p.t.Helper()
	x, y := p.place(selector, 0.5, 0.5)
	run(p, chromedp.DragAndDropXY(x, y, x+dx, y+dy))
}

// Click clicks on the first match of the selector.
func (p *Page) Click(selector string) {
	p.t.Helper()
	run(p, chromedp.Click(chromedp.CSS(selector)))
}

// Quiet fails the test if the page wrote an error or a warning to the console, threw an
// exception, requested anything but itself, or is wider than the window.
func (p *Page) Quiet() {
	p.t.Helper()
	if wide := Eval[[]int](p, "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"); wide[0] > wide[1] {
		p.t.Errorf("the page is %d wide in a window of %d", wide[0], wide[1])
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, problem := range p.problems {
		p.t.Error(problem)
	}
}

// ReadPNG reads a picture. No part of it may be cut off: its border must be white.
func ReadPNG(t *testing.T, path string) image.Image {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	size := img.Bounds().Size()
	for y := range size.Y {
		step := size.X - 1
		if y == 0 || y == size.Y-1 {
			step = 1
		}
		for x := 0; x < size.X; x += step {
			if r, g, b, _ := img.At(x, y).RGBA(); r != 0xffff || g != 0xffff || b != 0xffff {
				t.Fatalf("%s: something reaches the border at %d,%d", path, x, y)
			}
		}
	}
	return img
}
