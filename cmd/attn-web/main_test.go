//go:build !js

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// built is the folder that site has made.
var built string

// site builds the page once for all tests, without the package of a peer.
var site = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "attn-web"); err != nil {
		return "", err
	}
	built = dir
	var messages strings.Builder
	if err = build(context.Background(), dir, "", &messages); err == nil && !strings.HasPrefix(messages.String(), "attn.wasm has ") {
		err = fmt.Errorf("the messages are %q", messages.String())
	}
	if err == nil {
		err = addPeer(filepath.Join(dir, "ort"), "", "")
	}
	return dir, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

// at serves the page below a path, as static hosts do, and returns its URL. Folders of others are
// those of the page that lie elsewhere.
func at(t *testing.T, path string, others ...string) string {
	t.Helper()
	dir := must.Get(site())(t)
	mux := http.NewServeMux()
	mux.Handle(path+"/", http.StripPrefix(path, handler(dir)))
	for _, other := range others {
		mux.Handle(path+"/"+filepath.Base(other)+"/", http.StripPrefix(path, handler(filepath.Dir(other))))
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + path + "/"
}

// start starts a browser for the program, which takes it a minute in all.
func start(t *testing.T, flags ...string) *pagetest.Browser {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-web runs the program in a browser, -short does not")
	}
	return pagetest.Start(t, flags...)
}

// webgpu are the flags with which Chromium offers WebGPU on its own software driver.
var webgpu = []string{"enable-unsafe-webgpu", "use-webgpu-adapter=swiftshader"}

// choose ticks exactly the given cases.
func choose(p *pagetest.Page, seqs, kinds, dtypes string, heads int) {
	pagetest.Eval[bool](p, fmt.Sprintf(`(() => {
		const want = {seqs: %q, kinds: %q, dims: "64", dtypes: %q};
		for (const box of form.querySelectorAll("fieldset input[type=checkbox]")) {
			if (box.checked !== want[box.name].split(",").includes(box.value)) box.click();
		}
		[form.seconds.value, form.rounds.value, form.heads.value] = [0, 3, %d];
		return true;
	})()`, seqs, kinds, dtypes, heads))
}

// downloaded returns the report that the page offers.
func downloaded(t *testing.T, p *pagetest.Page) *report.Report {
	t.Helper()
	dir := t.TempDir()
	p.Downloads(dir)
	p.Click("#download")
	name := filepath.Join(dir, "attn-web.json")
	for t.Context().Err() == nil {
		time.Sleep(50 * time.Millisecond)
		if f, err := os.Open(name); err == nil { // renamed when it is complete
			defer f.Close()
			return must.Get(report.Read(f))(t)
		}
	}
	t.Fatal("no file was downloaded")
	return nil
}

// TestMeasure: the page measures on a GPU, and its file is a report that programs read and compare.
func TestMeasure(t *testing.T) {
	browser := start(t, webgpu...)
	url := at(t, "/a/path")
	p := browser.Visit(url, url, pagetest.Look{Width: 1100, Height: 900})
	p.Await(`!document.querySelector("#start").disabled`)
	if name := pagetest.Eval[string](p, "form.device.value"); name != "gpu:0" {
		t.Fatalf("the first device is %q: %s", name, pagetest.Eval[string](p, `document.querySelector("#trouble").textContent`))
	}
	if !pagetest.Eval[bool](p, `[...document.querySelectorAll("#ort, .ort")].every(e => e.hidden)`) {
		t.Error("the page offers ONNX Runtime Web, which is not beside it")
	}
	facts := pagetest.Eval[string](p, `document.querySelector("#device").innerText`)
	if !strings.Contains(facts, "subgroups of 4 lanes") || pagetest.Eval[bool](p, "form.low.checked") {
		t.Errorf("the device is %q, and low precision is not for it", facts)
	}
	pagetest.Eval[bool](p, "form.low.checked = true")
	choose(p, "256", "causal,decode", "f32,f16", 8) // f32 has 1 MiB to read, which a rate needs
	p.Click("#start")
	p.Await("!running")
	r := downloaded(t, p)
	if err := r.Err(); err != nil || len(r.Cases) != 4 || len(r.Environment.Backends) != 1 {
		t.Fatalf("%d cases on %d devices: %v", len(r.Cases), len(r.Environment.Backends), err)
	}
	for _, c := range r.Cases {
		if c.Status != report.OK || len(c.Rounds) != 3 || !(*c.MaxError <= *c.ErrorBound) || c.GFLOPS == nil || c.CeilingGFLOPS == nil || (c.CeilingGBS == nil) != (c.DType == "f16") {
			t.Errorf("%+v", c)
		}
	}
	for _, change := range report.Compare(r, r, 4) {
		if change.Verdict != report.Same && change.Verdict != report.Unclear { // of noisy times
			t.Errorf("compared with itself: %+v", change)
		}
	}
	must.Do(t, r.WritePage(io.Discard))
	rows := pagetest.Eval[[]string](p, `[...document.querySelectorAll("#rows tr")].map(row => row.innerText)`)
	figures := regexp.MustCompile(`^gpu:0 · (causal|decode) · H=8 D=64 (f32|f16) low precision\t256\t.* (s|ms|µs)\t[0-9.]+\t[0-9.]+%\t[0-9.]+\t([0-9.]+%|–)\t\d\.\de-\d+\t\d\.\de-\d+\tok`)
	for _, row := range rows {
		if !figures.MatchString(row) {
			t.Errorf("row %q", row)
		}
	}
	line := pagetest.Eval[string](p, `document.querySelector("#line").value`)
	if len(rows) != 4 || !strings.Contains(line, " of peak (causal S=256 ") || !strings.Contains(line, " of read (decode S=256 ") {
		t.Errorf("%d rows, line %q", len(rows), line)
	}
	wrong := pagetest.Eval[string](p, `show({...rows[0], status: "wrong", note: "WRONG: o[0,0,0,0]", median_s: null, gflops: null, gbs: null}),
		document.querySelector("#rows tr:last-child").innerText`)
	if !strings.Contains(wrong, "\t256\t–\t–\t–\t–\t–\t") || !strings.HasSuffix(wrong, "\tWRONG: o[0,0,0,0]") {
		t.Errorf("a wrong case is %q", wrong)
	}
	pagetest.Eval[bool](p, `document.querySelector("#rows tr:last-child").remove(), true`)
	p.Quiet()
	pagetest.Eval[bool](p, "scrollTo(0, 0), true")
	if name := os.Getenv("ATTN_WEB_SCREENSHOT"); name != "" { // for the README
		must.Do(t, os.WriteFile(name, p.Screenshot(), 0o644))
	}
}

// TestTurns: the page measures ONNX Runtime Web in turns with attn, and gives a wrong answer no time.
func TestTurns(t *testing.T) {
	ort := filepath.Join(t.TempDir(), "ort")
	must.Do(t, addPeer(ort, "", filepath.Join("../..", scripts)))
	if _, err := os.Stat(filepath.Join(ort, "ortweb.mjs")); err != nil {
		t.Skip("onnxruntime-web is not installed: npm ci --ignore-scripts in bench/peers")
	}
	browser := start(t, webgpu...)
	url := at(t, "/a/path", ort)
	visit := func(kinds, dtypes string, look pagetest.Look) *pagetest.Page {
		p := browser.Visit(url, url, look)
		p.Await(`!document.querySelector("#start").disabled && !document.querySelector("#ort").hidden`)
		choose(p, "256", kinds, dtypes, 1)
		p.Click("[name=turns]")
		p.Click("#start")
		return p
	}
	rows := func(p *pagetest.Page) []string {
		p.Await("!running")
		p.Quiet()
		return pagetest.Eval[[]string](p, `[...document.querySelectorAll("#rows tr")].map(row => row.innerText)`)
	}
	right := rows(visit("causal,decode", "f32", pagetest.Look{Width: 1100, Height: 900}))
	figures := regexp.MustCompile(`\t256\t[0-9.]+ (s|ms|µs)\t.*\t[0-9.]+ (s|ms|µs)\t[0-9.]+×\t\d\.\de-[6-9]\tok, ORT [A-Z]`)
	if len(right) != 2 || !figures.MatchString(right[0]) || !figures.MatchString(right[1]) {
		t.Errorf("rows %q", right)
	}
	// An operator that hides keys which the case does not hide.
	script := filepath.Join(ort, "onnx.mjs")
	text := must.Get(os.ReadFile(script))(t)
	wrong := bytes.Replace(text, []byte("unidirectional: c.causal ? 1 : 0"), []byte("unidirectional: 1"), 1)
	if err := os.WriteFile(script, wrong, 0o644); err != nil || bytes.Equal(text, wrong) {
		t.Fatal("the script is the same", err)
	}
	p := visit("full", "f32,f16", pagetest.Look{Width: 360, Height: 740, Dark: true})
	p.Await(`document.querySelector("#step").textContent === "round 1, ONNX Runtime Web"`)
	p.Click("#stop")
	p.Await("!running")
	p.Click("#start") // again
	bad := rows(p)
	if len(bad) != 2 || !regexp.MustCompile(`\twrong\t–\t\d\.\de[-+]\d\tok, ORT `).MatchString(bad[0]) || !strings.HasSuffix(bad[1], "\t–\t–\t–\tok") {
		t.Errorf("rows with a wrong answer %q", bad)
	}
}

// TestSee: the model writes, a word shows its weights, and stop works.
func TestSee(t *testing.T) {
	browser := start(t, webgpu...)
	url := at(t, "")
	p := browser.Visit(url, url, pagetest.Look{Width: 360, Height: 740})
	p.Await(`!document.querySelector("#write").disabled`)
	pagetest.Eval[bool](p, `see.temperature.value = 0, true`)
	p.Click("#write")
	p.Await("words.length >= 12")
	p.Click("#halt")
	p.Await("!running")
	story := pagetest.Eval[string](p, `document.querySelector("#story").textContent`)
	if want := "Once upon a time, there was a little girl named Lily."; !strings.HasPrefix(story, want[:30]) || !strings.HasPrefix(want, story) && !strings.HasPrefix(story, want) {
		t.Errorf("the story is %q", story)
	}
	p.Click("#story button:nth-child(5)")
	p.Await(`!document.querySelector("#attention").hidden`)
	rows := pagetest.Eval[[]float64](p, `[...document.querySelectorAll("#heads tr")].map(row =>
		[...row.querySelectorAll("td")].reduce((sum, cell) => sum + Number(cell.style.getPropertyValue("--weight")), 0))`)
	columns := pagetest.Eval[int](p, `document.querySelectorAll("#keys th").length`)
	if len(rows) != 8 || columns != 7 { // the special token, five words and the head
		t.Fatalf("%d rows, %d columns", len(rows), columns)
	}
	for _, sum := range rows {
		if !(math.Abs(sum-1) <= 1e-5) {
			t.Errorf("the weights of a row sum to %v", sum)
		}
	}
	if rate := pagetest.Eval[string](p, `document.querySelector("#rate").textContent`); !strings.Contains(rate, " a second on gpu:0") {
		t.Errorf("the page says %q", rate)
	}
	p.Quiet()
}

// TestStop stops a run, whose report then has the cases that were measured, and starts another run.
func TestStop(t *testing.T) {
	browser := start(t, webgpu...)
	url := at(t, "")
	p := browser.Visit(url, url, pagetest.Look{Width: 360, Height: 740, Dark: true})
	p.Await(`!document.querySelector("#start").disabled`)
	choose(p, "256,32768", "causal", "f32", 1) // the longer one takes minutes
	p.Click("#start")
	p.Await("rows.length === 1")
	p.Click("#stop")
	p.Await("!running")
	r := downloaded(t, p)
	if r.Cases[0].Status != report.OK || len(r.Cases) > 1 && r.Cases[1].Status == report.OK {
		t.Errorf("%+v", r.Cases)
	}
	p.Await(`!document.querySelector("#start").disabled`)
	choose(p, "256", "decode", "f32", 1)
	p.Click("#start")
	p.Await("!running")
	if r := downloaded(t, p); len(r.Cases) != 1 || r.Cases[0].Status != report.OK || r.Cases[0].SeqQ != 1 {
		t.Errorf("%+v", r.Cases)
	}
	p.Quiet()
}

// TestNoGPU: without WebGPU, and without an adapter, there is a sentence and the CPU's figures.
func TestNoGPU(t *testing.T) {
	browser := start(t) // without its software driver
	sentence := func(p *pagetest.Page) {
		t.Helper()
		p.Await("rows.length > 0")
		if s := pagetest.Eval[string](p, `document.querySelector("#trouble").innerText`); !strings.HasPrefix(s, "The browser offers no GPU to this page: ") {
			t.Errorf("the page says %q", s)
		}
	}
	url := at(t, "")
	missing := browser.Visit(url, url, pagetest.Look{})
	sentence(missing) // not quiet: Chromium itself warns of a missing adapter
	pagetest.Eval[bool](missing, "worker.terminate(), true")

	// A host without headers that does not know wasm.
	dir := must.Get(site())(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		if name == "" {
			name = "index.html"
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		if name == "worker.js" {
			text = append([]byte("delete WorkerNavigator.prototype.gpu;\n"), text...)
		}
		if w.Header().Set("Content-Type", types[filepath.Ext(name)]); name == "attn.wasm" {
			w.Header().Set("Content-Type", "application/octet-stream")
		}
		w.Write(text)
	}))
	t.Cleanup(server.Close)
	p := browser.Visit(server.URL, server.URL, pagetest.Look{})
	sentence(p)
	p.Await("!running")
	r := downloaded(t, p)
	if err := r.Err(); err != nil || len(r.Cases) != 6 || len(r.Environment.Missing) != 1 {
		t.Errorf("%d cases, missing %q: %v", len(r.Cases), r.Environment.Missing, err)
	}
	for _, c := range r.Cases {
		if c.Backend != "cpu" || c.GFLOPS == nil || len(c.Rounds) != 6 {
			t.Errorf("%+v", c)
		}
	}
	p.Quiet()
}

// TestBroken: a folder without the program has a sentence.
func TestBroken(t *testing.T) {
	browser := pagetest.Start(t)
	dir := t.TempDir()
	must.Do(t, os.CopyFS(dir, assets))
	server := httptest.NewServer(handler(filepath.Join(dir, "assets")))
	t.Cleanup(server.Close)
	p := browser.Visit(server.URL, server.URL, pagetest.Look{})
	p.Await(`!document.querySelector("#trouble").hidden`)
	if s := pagetest.Eval[string](p, `document.querySelector("#trouble").innerText`); !strings.Contains(s, "wasm_exec.js") {
		t.Errorf("the page says %q", s)
	}
}

// TestHandler: the types of files, and what is not there.
func TestHandler(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"index.html", "page.js", "ortweb.mjs", "attn.wasm", "style.css"} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}
	mux := http.NewServeMux()
	mux.Handle("/", handler(dir))
	mux.Handle("/sub/path/", http.StripPrefix("/sub/path", handler(dir)))
	for url, want := range map[string]string{
		"/": "200 text/html; charset=utf-8", "/page.js": "200 text/javascript; charset=utf-8", "/style.css": "200 text/css; charset=utf-8",
		"/ortweb.mjs": "200 text/javascript; charset=utf-8", "/attn.wasm": "200 application/wasm", "/sub/path/attn.wasm": "200 application/wasm", "/sub/path/": "200 text/html; charset=utf-8",
		"/absent.html": "404 text/plain; charset=utf-8", "/sub/path/..%2f..%2fmain.go": "404 text/plain; charset=utf-8",
	} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, url, nil))
		if got := fmt.Sprint(w.Code, " ", w.Header().Get("Content-Type")); got != want || w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("%s: %s, want %s", url, got, want)
		}
	}
}

// external matches addresses that a page would load.
var external = regexp.MustCompile(`(src|href)="(/|https?:|//)|url\(|import\s`)

// TestAssets: the page refers to its own files by relative addresses only; links are not loaded.
func TestAssets(t *testing.T) {
	files := must.Get(assets.ReadDir("assets"))(t)
	for _, f := range files {
		text := must.Get(assets.ReadFile("assets/" + f.Name()))(t)
		for _, found := range external.FindAllString(strings.ReplaceAll(string(text), `<a href="https://github.com/`, ""), -1) {
			t.Errorf("%s has %q", f.Name(), found)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	for _, c := range []struct {
		want string
		code int
		args []string
	}{
		{"unexpected argument \"x\"", 2, []string{"x"}},
		{"--help lists the flags", 2, []string{"--absent"}},
		{"--listen: ", 2, []string{"--listen", "nowhere:none"}},
		{"--listen: ", 2, []string{"--listen", "127.0.0.1"}},
		{"--ort: ", 1, []string{"--ort", "absent", "--out", t.TempDir()}},
	} {
		err := run(t.Context(), c.args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), c.want) || flags.ExitCode(t.Context(), err) != c.code {
			t.Errorf("%v: %v, exit code %d, want %d", c.args, err, flags.ExitCode(t.Context(), err), c.code)
		}
	}
}
