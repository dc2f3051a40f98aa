package modtext

import (
	"errors"
	"strings"
	"testing"

	"github.com/gogpu/naga"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// TestCheck: texts that pass compile, and others are refused by what is wrong with them, with the line.
func TestCheck(t *testing.T) {
	for _, c := range []struct{ text, refused string }{
		{"return score;", ""},
		{"return score + value(h) * f32(i32(j - i));", ""},
		{"// 20 documents\nlet n = i32(i % 20u);\nvar y = score * 1.5e-3f;\nif n == 3 && j != 0u || false {", "line 4"},
		{"let n = i32(i % 20u);\nvar y = score * 1.5e-3f;\nif (n == -3 && j != 0u) { return hidden(); } else if !(n > 1) { y += 1.0; } else { return -y; }\nreturn y;", ""},
		{"return select(precise_tanh(score), bitcast<f32>(max(b, 7u)), i < values() && value(i) >= clamp(score, 0.0, 1.0));", ""},
		{"\nreturn i;", "line 2: the type is u32, should be f32"},
		{"return score + 1;", "the type is i32, should be f32"},
		{"let x = score;", "needs a return"},
		{"let x: f32 = score; return x;", ""},
		{"let x: Scores = score; return x;", `the type of "x" must be f32`},
		{"if (i < j) { return score; }", "needs a return"},
		{"return score; return score;", `"return" follows a return`},
		{"for (;;) { }", `"for" begins no statement`},
		{"loop { }", `"loop" begins no statement`},
		{"return score_mod(score, b, h, i, j);", `"score_mod" is no value`},
		{"return f32(k[j]);", `"k" is no value`},
		{"let a = array<f32, 2>(score, score); return a[j];", `"array" is no value`},
		{"return score; } fn other() -> f32 { return 1.0;", `"}" follows a return`},
		{"return score /* } */;", `"*" is no value`},
		{"score = 1.0; return score;", `"score" begins no statement`},
		{"let x = 1.0; let x = 2.0; return x;", `"x" cannot name a variable`},
		{"let x = 1.0; // \u2028 return 2.0;\n return x;", `line 1`},
		{"@if(1u) return score;", `"@" begins no statement`},
		{"return 1.0 + $x;", `"$" is no value`},
		{"return " + strings.Repeat("(", 99) + "1.0" + strings.Repeat(")", 99) + ";", "inside of each other"},
		{"return 1.0" + strings.Repeat(" + 1.0", 999) + ";", "bytes"},
	} {
		err := Check("WGSL", c.text)
		if (err == nil) != (c.refused == "") || err != nil && (!errors.Is(err, backend.ErrOption) || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%q: got %v, should be %q", c.text, err, c.refused)
		}
		if err != nil {
			continue
		}
		for _, v := range []shaders.Variant{shaders.Softmax{Row: 256}, shaders.Gradient{TX: 16, TY: 8, QD: 4}} {
			src, err := shaders.Render(shaders.Modded{Variant: v, Score: c.text, Derivative: c.text, Values: shaders.InTable})
			if err == nil {
				_, err = naga.Compile(src)
			}
			if err != nil {
				t.Errorf("%q in %s: %v", c.text, v.Name(), err)
			}
		}
	}
}
