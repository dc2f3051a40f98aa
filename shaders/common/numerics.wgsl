// Elementary functions with stated errors, and the constants that scores need.

const LOWEST: f32 = -3.4028234e38; // a running maximum before the first key
const MINUS_INF: u32 = 0xff800000u; // the bits of -Inf
const LOG2E: f32 = 1.4426950408889634;
const LN2: f32 = 0.6931471805599453;

// negative_infinity returns -Inf from a name's value: WGSL rejects constant expressions that are infinite.
fn negative_infinity() -> f32 {
    let bits = MINUS_INF;
    return bitcast<f32>(bits);
}

// unseen reports whether a log-sum-exp is that of a fully masked row: -Inf, or +Inf in FlashAttention 2.
fn unseen(lse: f32) -> bool {
    return (bitcast<u32>(lse) | 0x80000000u) == MINUS_INF;
}

// is_nan compares bits, because a compiler may assume that no comparison meets a NaN.
fn is_nan(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

// exp2_own returns 2^x by the device's exp2, where package gpu has found that to be within 2 ulp, exactly 1 for
// 0, 0 below -126 and NaN for a NaN. Above x = 63 the result is finite, at most 2^64: the difference x - 63 may
// round by 1, and to x from 2^30 on. A min would drop a NaN.
fn exp2_own(x: vec4<f32>) -> vec4<f32> {
    return exp2(x - max(x - vec4<f32>(63.0), vec4<f32>(0.0)));
}

// exp2_acc returns 2^x to 2 ulp for x <= 127, and 0 below -126 (Cephes exp2f: 2^n times a polynomial of degree
// 6 on [-1/2, 1/2]; Moshier 1989). exp2_acc(0) is exactly 1.
//
// The exp2 of a driver may be off by 3 + 2|x| ulp, which is too much for weights. EXP2 = 1 computes exp2_acc
// and exp2_down by exp2_own instead.
fn exp2_acc(x: vec4<f32>) -> vec4<f32> {
    var r: vec4<f32>;
    @if(EXP2 == 1u) {
        r = exp2_own(x);
    } @else {
        let y = clamp(x, vec4<f32>(-126.0), vec4<f32>(127.0));
        let n = floor(y + vec4<f32>(0.5));
        let f = y - n;
        r = fma(vec4<f32>(1.535336188319500e-4), f, vec4<f32>(1.339887440266574e-3));
        @each($x: 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0)
        r = fma(r, f, vec4<f32>($x));
        r = r * bitcast<vec4<f32>>((vec4<i32>(n) + vec4<i32>(127)) << vec4<u32>(23u));
        r = select(r, vec4<f32>(0.0), x < vec4<f32>(-126.0));
        r = select(r, x, is_nan(x));
    }
    return r;
}

// exp2_down returns 2^x to 4 ulp for x = score - maximum: exp2_acc with one term less (1 + f·g(f), where g is
// the minimax polynomial that keeps 2^f within 1.6·2^-24). It returns 0 below -126 and exactly 1 for 0.
// Rounding may take x above 0 where scores reach 2^30: the result is 2^x up to x = 64 and stays finite, at most
// 2^65, above that. The cut at -126 compares bits, because a compiler may assume that no comparison meets a
// NaN. A NaN propagates through f.
fn exp2_down(x: vec4<f32>) -> vec4<f32> {
    var r: vec4<f32>;
    @if(EXP2 == 1u) {
        r = exp2_own(x);
    } @else {
        let n = floor(max(x, vec4<f32>(-126.0)) + vec4<f32>(0.5));
        let f = x - n;
        r = fma(vec4<f32>(1.3264727e-3), f, vec4<f32>(9.6715126e-3));
        @each($x: 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
        r = fma(r, f, vec4<f32>($x));
        r = r * bitcast<vec4<f32>>((vec4<i32>(min(n, vec4<f32>(64.0))) + vec4<i32>(127)) << vec4<u32>(23u));
        let below = bitcast<vec4<u32>>(x) - vec4<u32>(0xc2fc0001u); // 0 for the first number below -126
        r = select(r, vec4<f32>(0.0), below <= vec4<u32>(0x3c83ffffu)); // as far as -Inf
    }
    return r;
}

// tanh_acc returns tanh(x) to 3 ulp (Cephes tanhf): an odd polynomial below 0.625, and 1 - 2/(e^2x + 1) above.
// The tanh of a driver may overflow to NaN for large x.
fn tanh_acc(x: vec4<f32>) -> vec4<f32> {
    let a = min(abs(x), vec4<f32>(20.0));
    let z = a * a;
    var r = fma(vec4<f32>(-5.70498872745e-3), z, vec4<f32>(2.06390887954e-2));
    @each($x: -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    r = fma(r, z, vec4<f32>($x));
    r = fma(r * z, a, a);
    let e = exp2_acc(a * 2.885390082);
    r = select(r, vec4<f32>(1.0) - vec4<f32>(2.0) / (e + vec4<f32>(1.0)), a >= vec4<f32>(0.625));
    r = select(r, -r, x < vec4<f32>(0.0));
    return select(r, x, is_nan(x));
}

// sigmoid returns σ(x) and 1 - σ(x): σ(|x|) = 1/(1 + e) and σ(-|x|) = e/(1 + e), so that 1 - σ does not cancel.
fn sigmoid(x: f32) -> vec2<f32> {
    let e = exp2_acc(vec4<f32>(-abs(x) * LOG2E)).x;
    let most = 1.0 / (1.0 + e);
    let sigma = select(e * most, most, x >= 0.0);
    let rest = select(most, e * most, x >= 0.0);
    return vec2<f32>(sigma, rest);
}

// log_acc returns the natural logarithm of a normal x > 0 to 2 ulp (Cephes logf). The log of a driver may be
// off by 2^-21 near 1, where the sums of many rows lie.
fn log_acc(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    var e = f32(i32(bits >> 23u) - 126);
    var f = bitcast<f32>((bits & 0x7fffffu) | 0x3f000000u); // in [1/2, 1)
    if (f < 0.7071067811865) {
        e = e - 1.0;
        f = f + f;
    }
    f = f - 1.0;
    let z = f * f;
    var r = fma(7.0376836292e-2, f, -1.1514610310e-1);
    @each($x: 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1)
    r = fma(r, f, $x);
    r = r * f * z;
    r = fma(e, -2.12194440e-4, r);
    r = fma(z, -0.5, r);
    r = fma(e, 0.693359375, f + r);
    return select(r, x, (bits & 0x7fffffffu) >= 0x7f800000u);
}

// rounded returns weights rounded to nearest even to the type of values, F16 or BF16, and leaves the marker of a
// hidden key. Below 2^-14 f16 has steps of 2^-24, see encode16. WGSL's own conversions may round either way, and
// lose these steps.
fn rounded(w: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(w);
    var r = w;
    @if(KV == 2u) {
        r = bitcast<vec4<f32>>((bits + vec4<u32>(0x7fffu) + ((bits >> vec4<u32>(16u)) & vec4<u32>(1u))) & vec4<u32>(0xffff0000u));
    } @else {
        r = bitcast<vec4<f32>>((bits + vec4<u32>(0xfffu) + ((bits >> vec4<u32>(13u)) & vec4<u32>(1u))) & vec4<u32>(0xffffe000u));
        let steps = vec4<f32>(bitcast<vec4<u32>>(w + vec4<f32>(0.5)) - vec4<u32>(0x3f000000u));
        r = select(r, steps * 5.9604644775390625e-8, bits < vec4<u32>(0x38800000u));
    }
    return r;
}

// greatest returns the bits of the largest |x|, and more than those of infinity if there is a NaN.
fn greatest(x: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// finite reports whether x has neither a NaN nor an infinity.
fn finite(x: vec4<f32>) -> bool { return greatest(x) < 0x7f800000u; }

fn largest(s: vec4<f32>) -> f32 {
    return max(max(s.x, s.y), max(s.z, s.w));
}

// add returns sum + w·x.
fn add(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(w), x, sum);
}

// unsigned_zeros returns x with +0 for -0. The sign of a sum that is 0 depends on whether products of 0 were
// added to it, and kernels skip them in some tiles only.
fn unsigned_zeros(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(0.0), bitcast<vec4<u32>>(x) == vec4<u32>(0x80000000u));
}

// dot4 adds four depths to a dot product, in ascending order.
fn dot4(a: vec4<f32>, x: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, x.w, fma(a.z, x.z, fma(a.y, x.y, fma(a.x, x.x, sum))));
}
