package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// pictured returns the report of two backends over five lengths whose JSON bench/report keeps.
func pictured(t *testing.T) *report.Report {
	t.Helper()
	text, err := os.ReadFile("../../../../bench/report/testdata/pictured.golden.json")
	r := new(report.Report)
	must.Do(t, errors.Join(err, json.Unmarshal(text, r)))
	return r
}

func writePage(t *testing.T, r *report.Report, path string) {
	t.Helper()
	f := must.Get(os.Create(path))(t)
	must.Do(t, errors.Join(r.WritePage(f), f.Close()))
}

// TestPage opens the page in a browser: all of it is there in any look, nothing
// is asked of the network, nothing is wider than the window.
func TestPage(t *testing.T) {
	browser := pagetest.Start(t)
	file := filepath.Join(t.TempDir(), "report.html")
	r := pictured(t)
	r.Environment.Args = []string{"bench", "--seq=256..4k", "--title", "<b>&'"}
	writePage(t, r, file)
	for _, look := range []pagetest.Look{
		{Width: 360, Height: 740}, {Width: 360, Height: 740, Dark: true, NoScript: true},
		{Width: 800, Height: 800, NoScript: true}, {Width: 800, Height: 800, Dark: true},
		{Width: 1600, Height: 1000},
	} {
		p := browser.Open(file, look)
		p.Quiet()
		for _, has := range []struct {
			what, count string
			want        int
		}{
			{"pictures", `document.querySelectorAll("figure svg").length`, 3},
			{"figures in them", `document.querySelectorAll("figure:first-of-type [data-tip]").length`, 10},
			{"rows of cases", `document.querySelector("table").tBodies[0].rows.length`, 10},
			{"tables", `document.querySelectorAll("table").length`, 1},
		} {
			if n := pagetest.Eval[int](p, has.count); n != has.want {
				t.Errorf("%+v: %d %s, should be %d", look, n, has.what, has.want)
			}
		}
		text := pagetest.Eval[string](p, `document.body.innerText`)
		for _, want := range []string{"8 of 10 cases measured, 2 predicted.", "gpu:0 · Some GPU · wgpu v1 · driver 2",
			`attn bench --seq=256..4k --title <b>&'`, "predicted, 1.00 s of the budget is left", "npu · none: no usable device"} {
			if !strings.Contains(text, want) {
				t.Errorf("%+v: %q is not on the page", look, want)
			}
		}
		wantDark := look.Dark
		if dark := pagetest.Eval[bool](p, `getComputedStyle(document.body).backgroundColor === "rgb(18, 22, 27)"`); dark != wantDark {
			t.Errorf("%+v: the ground is dark: %v", look, dark)
		}
		checkContrast(t, p, look)
		// Without a script the browser shows the titles of figures.
		titles := pagetest.Eval[int](p, `document.querySelectorAll("[data-tip] title").length`)
		if look.NoScript != (titles > 0) {
			t.Errorf("%+v: %d titles", look, titles)
		}
	}
}

// checkContrast computes the contrast of text and of lines with their ground by
// the formula of WCAG 2: at least 4.5:1 and 3:1.
func checkContrast(t *testing.T, p *pagetest.Page, look pagetest.Look) {
	t.Helper()
	low := pagetest.Eval[[]string](p, `(() => {
		const light = c => {
			const [r, g, b] = c.match(/[\d.]+/g).map(Number).map(x => x / 255).map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
			return .2126 * r + .7152 * g + .0722 * b;
		};
		const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + .05) / (y + .05); };
		const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\)$/.test(c)) return c; } return "rgb(255,255,255)"; };
		const low = [];
		const look = (e, colour, least) => {
			const c = contrast(colour, ground(e));
			if (c < least) low.push(c.toFixed(2) + ": " + e.outerHTML.slice(0, 80));
		};
		for (const e of document.querySelectorAll("p, td, th, dt, dd, figcaption, h1, h2, pre, button")) look(e, getComputedStyle(e).color, 4.5);
		for (const e of document.querySelectorAll("svg text")) look(e, getComputedStyle(e).fill, 4.5);
		for (const e of document.querySelectorAll("svg g[style*='--c'] path")) {
			const s = getComputedStyle(e);
			look(e, s.stroke === "none" ? s.fill : s.stroke, 3);
		}
		return low;
	})()`)
	for _, l := range low {
		t.Errorf("%+v: too little contrast, %s", look, l)
	}
}

// TestPageScript uses what the page's script adds: the tip, zoom, sorting.
func TestPageScript(t *testing.T) {
	browser := pagetest.Start(t)
	file := filepath.Join(t.TempDir(), "report.html")
	writePage(t, pictured(t), file)
	p := browser.Open(file, pagetest.Look{Width: 1000, Height: 900})
	p.Hover("[data-tip]", 0.5, 0.5)
	tip := pagetest.Eval[string](p, `document.querySelector(".tip").hidden ? "" : document.querySelector(".tip").textContent`)
	if want := "cpu\nS 256\ntime 65.5 µs\n± 25.0%\nGFLOP/s 2048\nGB/s 32.0\nceiling 2560 fma\nreached 80.0%\nmemory 2.0 MiB\nerror 1.0e-07\nbound 1.0e-04\nok"; tip != want {
		t.Errorf("the tip is %q, should be %q", tip, want)
	}
	// The spot lies on the mark that was drawn for the figure: its middle.
	if d := pagetest.Eval[float64](p, `(() => {
		const spot = document.querySelector("[data-tip]").getBoundingClientRect();
		const middle = r => [r.left + r.width / 2, r.top + r.height / 2];
		const [x, y] = middle(spot);
		return Math.min(...[...document.querySelectorAll("figure:first-of-type g[style*='--c1'] path.mark")]
			.map(e => middle(e.getBoundingClientRect())).map(([a, b]) => Math.hypot(a - x, b - y)));
	})()`); d > 1 {
		t.Errorf("the nearest mark is %.1f pixels from the spot", d)
	}
	p.Hover("h1", 0.01, 0.5)
	if !pagetest.Eval[bool](p, `document.querySelector(".tip").hidden`) {
		t.Error("the tip stays when the pointer has left")
	}

	box := func() []float64 {
		return pagetest.Eval[[]float64](p, `(() => { const b = document.querySelector("figure svg").viewBox.baseVal; return [b.x, b.y, b.width, b.height]; })()`)
	}
	whole := box()
	p.Click(`[aria-label="zoom in"]`)
	p.Click(`[aria-label="zoom in"]`)
	if z := box(); z[2] >= whole[2]/2 || z[0] <= 0 || z[0]+z[2] > whole[2] {
		t.Errorf("zoomed in twice the drawing shows %v of %v", z, whole)
	}
	p.Click(`[aria-label="whole drawing"]`)
	if diff := cmp.Diff(whole, box()); diff != "" {
		t.Errorf("the whole drawing (-want +got):\n%s", diff)
	}

	wheel := func(control bool) {
		pagetest.Eval[bool](p, fmt.Sprintf(`(() => {
			const s = document.querySelector("figure svg"), r = s.getBoundingClientRect();
			return s.dispatchEvent(new WheelEvent("wheel", {ctrlKey: %v, deltaY: -100, clientX: r.left, clientY: r.top, cancelable: true}));
		})()`, control))
	}
	wheel(false)
	if diff := cmp.Diff(whole, box()); diff != "" {
		t.Errorf("the wheel alone, which scrolls the page (-want +got):\n%s", diff)
	}
	wheel(true)
	if z := box(); z[2] >= whole[2] || z[0] != 0 || z[1] != 0 {
		t.Errorf("the wheel at the upper left corner shows %v of %v", z, whole)
	}
	p.Drag("figure svg", -20, -10)
	if z := box(); z[0] <= 0 || z[1] <= 0 {
		t.Errorf("dragged to the left and up the drawing shows %v of %v", z, whole)
	}

	column := func(head string) []string {
		return pagetest.Eval[[]string](p, `(() => {
			const table = document.querySelector("table");
			const at = [...table.tHead.rows[0].cells].findIndex(c => c.textContent === "`+head+`");
			return [...table.tBodies[0].rows].map(r => r.cells[at].textContent);
		})()`)
	}
	click := func(head string) {
		p.Click(`th[data-test="` + head + `"] button`)
	}
	pagetest.Eval[bool](p, `(() => { for (const h of document.querySelectorAll("table:first-of-type th")) h.dataset.test = h.textContent; return true; })()`)
	click("time")
	down := []string{"16.8 ms", "5.24 ms", "4.19 ms", "1.31 ms", "1.05 ms", "328 µs", "262 µs", "65.5 µs", "-", "-"}
	if diff := cmp.Diff(down, column("time")); diff != "" {
		t.Errorf("by time (-want +got):\n%s", diff)
	}
	click("time")
	if got := column("time"); got[0] != "65.5 µs" || got[len(got)-1] != "-" {
		t.Errorf("by time the other way: %q", got)
	}
	click("series")
	if got := column("series"); got[0] != "cpu" || got[9] != "gpu:0" {
		t.Errorf("by name: %q", got)
	}
	if got := pagetest.Eval[[]string](p, `[...document.querySelectorAll("th[aria-sort]")].map(h => h.dataset.test + " " + h.getAttribute("aria-sort"))`); !cmp.Equal(got, []string{"series ascending"}) {
		t.Errorf("sorted by %q", got)
	}
	p.Quiet()
}
