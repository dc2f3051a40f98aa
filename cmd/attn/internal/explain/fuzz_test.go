package explain

import (
	"bytes"
	"path/filepath"
	"testing"
	"unicode/utf8"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// FuzzWalkthrough reads arbitrary files. The steps of a small one are computed, compared with
// the expected values and printed.
func FuzzWalkthrough(f *testing.F) {
	examples, err := filepath.Glob("../../../../kernels/kernelstest/testdata/worked-examples/*.json")
	if err != nil || len(examples) < 3 {
		f.Fatal(examples, err)
	}
	for _, path := range examples {
		text := clitest.ReadFile(f, path)
		f.Add(text)
	}
	f.Add([]byte(`{"x": [[1, 2], [3, 4]], "scale": 0.5, "digits": 2, "labels": ["a", "b"], "title": "t", "w_query": [[1, 0], [0, 1]], "b_query": [1, 2]}`))
	f.Add([]byte(`{"x": [[1, 2], [3, 4]], "softcap": 2, "d_outputs": [[1, 0], [0, -1]]}`))
	dev := clitest.Open(f, "cpu")
	f.Fuzz(func(t *testing.T, text []byte) {
		wt := &walkthrough{path: "x.json"}
		if err := wt.parse(text); err != nil || wt.largest() > 1000 {
			return
		}
		st, err := computeSteps(t.Context(), dev, wt)
		if err != nil {
			return // a scale out of range, values beyond that of float32
		}
		defer st.close()
		must.Do(t, st.round(t.Context(), 1))
		var out bytes.Buffer
		grads, err := st.differentiate(t.Context(), wt)
		if err != nil {
			t.Error(err)
		}
		explanation{&out, wt, st, grads, "cpu"}.print()
		if !utf8.Valid(out.Bytes()) {
			t.Errorf("printed %q", &out)
		}
		_, _ = wt.check(st) // the values may differ
	})
}
