package meter

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// exponentials returns the kernel of Exp2 in software, with the results r for arguments a of
// exp2_acc and exp2_down replaced by expressions.
func exponentials(acc, down string) shaders.Variant {
	text, _ := shaders.Text(shaders.Exponentials)
	source := strings.NewReplacer("= exp2_acc(a);", "= change_acc(a, exp2_acc(a));", "= exp2_down(a);", "= change_down(a, exp2_down(a));").Replace(text)
	for name, x := range map[string]string{"change_acc": acc, "change_down": down} {
		source += "\nfn " + name + "(a: vec4<f32>, r: vec4<f32>) -> vec4<f32> {\n    return " + x + ";\n}\n"
	}
	return shaders.Custom{Title: "exponentials", WGSL: source}
}

const (
	bits   = "bitcast<vec4<u32>>"
	floats = "bitcast<vec4<f32>>"
	all    = "vec4<f32>"
)

// The software's exponentials keep the rules and the errors that common/numerics.wgsl
// states. Exponentials with one defect do not, in whichever function it is.
func TestExp2(t *testing.T) {
	d := open(t, gputypes.Limits{})
	ulp, err := exp2Error(t.Context(), d.Port, exponentials("r", "select(exp2_acc(a), r, a > "+all+"(63.0))"))
	if err != nil || ulp > 2 {
		t.Errorf("exp2_acc is off by %v ulp, %v", ulp, err)
	}
	ulp, err = exp2Error(t.Context(), d.Port, exponentials("r", "r"))
	if err != nil || ulp > 4 || ulp < 1 {
		t.Errorf("exp2_acc and exp2_down are off by %v ulp, %v", ulp, err)
	}
	few := open(t, gputypes.Limits{MaxStorageBufferBindingSize: 3 * exp2Bytes, MaxComputeWorkgroupsPerDimension: 2})
	if same, err := exp2Error(t.Context(), few.Port, exponentials("r", "r")); same != ulp || err != nil {
		t.Errorf("with low limits they are off by %v ulp, %v, without by %v", same, err, ulp)
	}
	for _, c := range []struct{ name, defect, message string }{
		{"3 ulp", "select(r, " + floats + "(" + bits + "(r) + vec4<u32>(5u)), (a > " + all + "(-70.3)) & (a < " + all + "(-70.2)))", ""},
		{"3 ulp above 0", "select(r, " + floats + "(" + bits + "(r) - vec4<u32>(5u)), (a > " + all + "(7.5)) & (a < " + all + "(7.6)))", ""},
		{"not 1 for 0", "select(r, " + all + "(0.99999994), a == " + all + "(0.0))", "2^0 is"},
		{"2^-127", "select(r, " + all + "(5.9e-39), a == " + all + "(-127.0))", "2^-127 is"},
		{"-0 for -Inf", "select(r, " + all + "(-0.0), " + bits + "(a) == vec4<u32>(0xff800000u))", "2^-Inf is"},
		{"drops NaN", "select(r, " + all + "(0.0), is_nan(a))", "2^NaN is"},
		{"0 for a NaN with a sign", "select(r, " + all + "(0.0), " + bits + "(a) == vec4<u32>(0xffc00000u))", "2^NaN is"},
		{"0 for -126", "select(r, " + all + "(0.0), a == " + all + "(-126.0))", ""},
	} {
		for name, k := range map[string]shaders.Variant{"exp2_acc": exponentials(c.defect, "r"), "exp2_down": exponentials("r", c.defect)} {
			ulp, err := exp2Error(t.Context(), d.Port, k)
			if (err == nil) != (c.message == "") || err != nil && !strings.Contains(err.Error(), c.message) || err == nil && ulp <= MaxExp2Error {
				t.Errorf("%s with %s is off by %v ulp, %v", name, c.name, ulp, err)
			}
		}
	}
	if _, err := exp2Error(t.Context(), d.Port, exponentials("r", "select(r, "+floats+"(vec4<u32>(0x7f800000u)), a > "+all+"(1e20))")); err == nil || !strings.Contains(err.Error(), "+Inf") {
		t.Errorf("exp2_down that overflows: %v", err)
	}
}

// A context that has ended and a kernel that does not compile are errors, and nothing stays on the device.
func TestExp2Fails(t *testing.T) {
	d := open(t, gputypes.Limits{})
	before := d.Port.Live()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "with an ended context", must.Err(Exp2(ended, d.Port)), context.Canceled)
	if _, err := exp2Error(t.Context(), d.Port, exponentials("r", "nothing")); err == nil {
		t.Error("a kernel that does not compile is accepted")
	}
	ulp, err := Exp2(t.Context(), d.Port)
	t.Logf("the device's exp2 is off by %v ulp, %v", ulp, err)
	if after := d.Port.Live(); after != before {
		t.Errorf("%+v is left, there was %+v", after, before)
	}
}

// The arguments include each binade and 500 fractions of each of the upper ones.
func TestExp2Arguments(t *testing.T) {
	args := exp2Arguments()
	n := map[float64]int{}
	for _, x := range args {
		if x <= 0 && x >= -126 {
			n[math.Floor(float64(x))]++
		}
	}
	for whole := -126.0; whole < 0; whole++ {
		if n[whole] < 500 {
			t.Errorf("%d arguments from %v on", n[whole], whole)
		}
	}
	if len(args)%exp2Group != 0 || len(args) > 1<<17 {
		t.Errorf("%d arguments", len(args))
	}
}
