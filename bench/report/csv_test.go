package report

import (
	"bytes"
	"encoding/csv"
	"testing"
)

func TestCSV(t *testing.T) {
	r := sample()
	r.Cases[0].Note = "a \"note\", of\ntwo lines"
	var out bytes.Buffer
	if err := r.WriteCSV(&out); err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(&out).ReadAll() // all rows of one length
	if err != nil || len(rows) != 1+len(r.Cases) {
		t.Fatalf("%v, %d rows", err, len(rows))
	}
	at := map[string]int{}
	for i, name := range rows[0] {
		if _, twice := at[name]; twice {
			t.Errorf("there are two columns %s", name)
		}
		at[name] = i
	}
	for _, tc := range []struct {
		row        int
		name, want string
	}{
		{1, "median_s", "0.00123"}, {1, "low_s", "0.00122"}, {1, "note", r.Cases[0].Note}, {1, "window_left", ""}, {1, "memory_host_peak", "2097152"},
		{1, "cpu", "Some CPU"}, {1, "commit", "0123456789abcdef"}, {1, "device", "Some CPU"}, {1, "driver", ""}, {1, "causal", "true"},
		{3, "window_left", "4095"}, {4, "status", "predicted"}, {4, "median_s", ""}, {4, "predicted_s", "42"},
		{5, "driver", "driver 2"}, {5, "limits", "binding=134217728"}, {5, "kernel_s", "1.5e-05"}, {6, "status", "wrong"}, {6, "gflops", ""},
	} {
		if i, ok := at[tc.name]; !ok || rows[tc.row][i] != tc.want {
			t.Errorf("row %d: %s is %q, want %q", tc.row, tc.name, rows[tc.row][i], tc.want)
		}
	}
}
