package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// realReport is a report of cases of the CPU and of a GPU on a busy machine, with some of its rounds.
func realReport(t testing.TB) []byte {
	return must.Get(os.ReadFile("testdata/real.json"))(t)
}

// use writes a report in all forms, and compares it with itself.
func use(r *Report) error {
	changes := Compare(r, r, 4)
	_, _ = Worst(changes, 1), r.Err()
	return errors.Join(r.WriteTable(io.Discard), r.WriteGoBench(io.Discard), r.WriteJSON(io.Discard), r.WriteMarkdown(io.Discard), r.WritePage(io.Discard),
		WriteChanges(io.Discard, r, r, changes, 4))
}

// edit is a change of one field of a report: set replaces its value.
type edit struct {
	path string
	old  any
	set  func(value any)
	drop func()
}

// edits lists the fields of a decoded JSON value; of an array, the first and the last element.
func edits(path string, value any) []edit {
	var all []edit
	switch v := value.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			inner := strings.TrimPrefix(path+"."+name, ".")
			all = append(all, edit{inner, v[name], func(x any) { v[name] = x }, func() { delete(v, name) }})
			all = append(all, edits(inner, v[name])...)
		}
	case []any:
		for i := range v {
			if i == 0 || i == len(v)-1 {
				inner := fmt.Sprintf("%s[%d]", path, i)
				all = append(all, edit{inner, v[i], func(x any) { v[i] = x }, func() { v[i] = nil }})
				all = append(all, edits(inner, v[i])...)
			}
		}
	}
	return all
}

// Every field of a report is edited in several ways. Reading it again returns ErrFile, or a
// report whose derived figures are right and that all forms can show.
func TestEditedReports(t *testing.T) {
	text := realReport(t)
	want := must.Get(Read(bytes.NewReader(text)))(t)
	must.Do(t, use(want))
	var root any
	must.Do(t, json.Unmarshal(text, &root))
	derived := regexp.MustCompile(`^cases\[\d+\]\.(repetitions|median_s|min_s|low_s|high_s|confidence|pairs|flops|gflops|ceiling_gflops|` +
		`bytes|gbs|ceiling_gbs|launch_s|bound|percent_of_bound|speedup_vs_stages|name|memory\.(operands|scratch|square))$`)
	n, tried, refused := 0, 0, 0
	for _, e := range edits("", root) {
		for _, x := range []any{"dropped", nil, 0, -1, 0.5, 7, 1e300, json.Number("9223372036854775807"), json.Number("1e-300"), "NaN", "another", "\x1b[31m", strings.Repeat("x", 70_000),
			true, []any{}, []any{nil}, map[string]any{}} {
			if n++; testing.Short() && n%4 > 0 { // 4 does not divide the number of values: each field has some
				continue
			}
			tried++
			if x == "dropped" {
				e.drop()
			} else {
				e.set(x)
			}
			edited, err := json.Marshal(root)
			e.set(e.old)
			must.Do(t, err)
			got, err := Read(bytes.NewReader(edited))
			if err != nil {
				refused++
				if !errors.Is(err, kernels.ErrFile) || len(err.Error()) > 500 {
					t.Errorf("%s = %.40v: %v", e.path, x, err)
				}
				continue
			}
			if reflect.DeepEqual(got, want) { // what follows from other figures is derived again
				continue
			}
			if err := use(got); err != nil {
				t.Errorf("%s = %.40v is read, but %v", e.path, x, err)
			}
			if derived.MatchString(e.path) {
				t.Errorf("%s = %.40v is believed (-want +got):\n%s", e.path, x, cmp.Diff(want, got))
			}
		}
	}
	t.Logf("%d of %d edits, %d refused", tried, n, refused)
	if n < 2016 {
		t.Errorf("only %d edits", n)
	}
}

// A refusal has the field, or the line, and the case.
func TestReadNamesTheField(t *testing.T) {
	for _, tc := range []struct{ old, new, want string }{
		{`"low_s": `, `"low_s": 0, "x": `, `unknown field "x"`},
		{`"heads": 4`, `"heads": 0`, "cases[0].batch, heads, kv_heads, seq_q, seq_k, dim (cpu S=32)"},
		{`"heads": 4`, `"heads": "four"`, "line 101"},
		{`"dtype": "f32"`, `"dtype": "f64"`, "cases[0].dtype"},
		{`"status": "ok"`, `"status": "wrong"`, "cases[0].status"},
		{`"backend": "cpu"`, `"backend": "npu"`, "environment.backends"},
		{`"cpus": 2`, `"cpus": -2`, "environment.cpus"},
	} {
		text := strings.Replace(string(realReport(t)), tc.old, tc.new, 1)
		must.Fail(t, tc.new, must.Err(Read(strings.NewReader(text))), kernels.ErrFile, tc.want)
	}
}

// A short text can stand for more objects than fit into memory.
func TestReadRefusesLargeReports(t *testing.T) {
	for _, text := range [][]byte{make([]byte, maxText+1), bytes.Repeat([]byte("{},"), maxObjects+1)} {
		must.Fail(t, fmt.Sprintf("%d bytes", len(text)), must.Err(Read(bytes.NewReader(text))), kernels.ErrFile, "larger than")
	}
}

func FuzzReport(f *testing.F) {
	// Short seeds with all fields: one case with a round of a call.
	var r Report
	must.Do(f, json.Unmarshal(realReport(f), &r))
	for i := range r.Cases {
		one := r
		one.Cases = r.Cases[i : i+1 : i+1]
		m := &one.Cases[0]
		if len(m.Rounds) > 0 {
			m.Rounds = m.Rounds[:1]
			m.Rounds[0].TimesS, m.Rounds[0].PaceS = m.Rounds[0].TimesS[:1], nil
		}
		m.Derive()
		text := must.Get(json.Marshal(one))(f)
		f.Add(text)
		f.Add(bytes.Replace(text, []byte(`"plan":{`), []byte(`"plan":{"limits":[],`), 1))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := Read(bytes.NewReader(text))
		if err != nil {
			if !errors.Is(err, kernels.ErrFile) {
				t.Fatal(err)
			}
			return
		}
		must.Do(t, use(r))
		// What was read and written is read again.
		var again bytes.Buffer
		must.Do(t, r.WriteJSON(&again))
		back := must.Get(Read(&again))(t)
		if diff := cmp.Diff(r.Cases, back.Cases, cmpopts.EquateEmpty()); diff != "" { // an empty list of limits is not written
			t.Fatalf("the cases of a report change when it is written and read again:\n%s", diff)
		}
	})
}
