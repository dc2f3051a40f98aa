// Root-mean-square norms (Zhang and Sennrich 2019) and gates of rows, and their gradients, given that of o as g:
//
//     norm    o = x·r·f    r = 1/sqrt(mean x² + ε)    f = w, 1 + w or 1
//             gradients    o = r·(f·g - x·r·mean(f·g·x·r))    terms = g·x·r
//     gate    o = x·f(w)    f is σ(w) = 1/(1 + exp(-w)), w·σ(w), log(1 + exp(w)) or w
//             gradients    o = g·f(w)    terms = g·x·f'(w)
//
// A row has 16 or 64 threads, each of which computes every 16th or 64th element. In place o holds x, or g for gradients.
//
// Workgroup memory: part 512 bytes.

@ranged struct NormGateParams {
    heads, rows: u32,
    all: u32, // rows of the box, in all heads and batches
    dim: u32,
    lanes: u32, // threads of a row
    gated: u32, // 0: norms, else gates: 1 sigmoid, 2 SiLU, 3 softplus, 4 identity
    backward: u32, // 1: gradients
    weighted: u32, // 1: the norm has factors
    termed: u32, // 1: terms is written
    g_type: u32, // type of g: 0 f32, 1 f16, 2 bf16
    x_type, w_type: u32,
    out_type: u32, // type of o
    one: f32, // added to w: 0 or 1
    epsilon: f32,
    by: f32, // 1/dim
    g, x, w, o, terms: Strides,
}

@binding var<storage, read> g, x, w: array<u32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> terms: array<f32>;
@binding var<uniform> p: NormGateParams;

var<workgroup> part: array<vec2<f32>, 64>;

fn input_x(i: u32) -> f32 {
    if (INPLACE == 1u && p.backward == 0u) { return load_out(i); }
    return load_x(i);
}

fn input_g(i: u32) -> f32 {
    if (INPLACE == 1u) { return load_out(i); }
    return load_g(i);
}

fn factor(i: u32) -> f32 {
    if (p.weighted == 0u) { return 1.0; }
    return load_w(i) + p.one;
}

// gathered returns the sum of x and the maximum of y, of all threads of a row.
fn gathered(x: f32, y: f32, t: u32) -> vec2<f32> {
    part[t] = vec2<f32>(x, y);
    workgroupBarrier();
    var all = vec2<f32>(0.0);
    for (var i = 0u; i < p.lanes; i++) {
        let other = part[t - t % p.lanes + i];
        all = vec2<f32>(all.x + other.x, max(all.y, other.y));
    }
    workgroupBarrier();
    return all;
}

// activation returns f(w) and f'(w), without products of 0 and infinity. With e = exp(-|w|) and s = e/(2+e), which is at most
// 1/3, softplus is max(w, 0) + log(1+e), and log(1+e) = 2·artanh(s) = 2·(s + s³/3 + s⁵/5 + ..). The first term left out is
// below 2^-26 of it.
fn activation(w: f32) -> vec2<f32> {
    let sigma = sigmoid(w);
    var f = vec2<f32>(w, 1.0);
    if (p.gated == 1u) {
        f = vec2<f32>(sigma.x, sigma.x * sigma.y);
    } else if (p.gated == 2u) {
        let value = max(w, LOWEST) * sigma.x;
        f = vec2<f32>(value, fma(min(value, -LOWEST), sigma.y, sigma.x));
    } else if (p.gated == 3u) {
        let e = exp2_acc(vec4<f32>(-abs(w) * LOG2E)).x;
        let s = e / (2.0 + e);
        let z = s * s;
        var r = fma(0.07692308, z, 0.09090909);
        @each($x: 0.11111111, 0.14285714, 0.2, 0.33333334)
        r = fma(r, z, $x);
        f = vec2<f32>(max(w, 0.0) + 2.0 * s * fma(r, z, 1.0), sigma.x);
    }
    return f;
}

@main(64) {
    let n = id * (64u / p.lanes) + t / p.lanes;
    let row = min(n, p.all - 1u); // threads after the last row compute it too, and write nothing: all reach the barriers
    @each($x: g, x, w) let $x_at = begin_$x(row);
    var scale = 1.0; // x·scale·r has no factor and no product that overflows or vanishes
    var r = 1.0;
    var mean = 0.0;
    if (p.gated == 0u) {
        // Rows with elements from 2^48 on are scaled until the largest is 2 to 4. There ε counts for nothing.
        var top = 0.0;
        for (var d = t % p.lanes; d < p.dim; d += p.lanes) { top = max(top, abs(input_x(x_at + d * p.x.d))); }
        let exponent = min(bitcast<u32>(gathered(0.0, top, t).y) >> 23u, 254u);
        if (exponent >= 175u) { scale = bitcast<f32>((255u - exponent) << 23u); }
        var sum = 0.0;
        for (var d = t % p.lanes; d < p.dim; d += p.lanes) {
            let y = input_x(x_at + d * p.x.d) * scale;
            sum = fma(y, y, sum);
        }
        r = inverseSqrt(fma(gathered(sum, 0.0, t).x, p.by, p.epsilon * scale * scale));
    }
    if (p.gated == 0u && p.backward == 1u) {
        var dot = 0.0;
        for (var d = t % p.lanes; d < p.dim; d += p.lanes) {
            let y = input_x(x_at + d * p.x.d) * scale * r;
            dot = fma(input_g(g_at + d * p.g.d) * factor(w_at + d * p.w.d), y, dot);
        }
        mean = gathered(dot, 0.0, t).x * p.by;
    }
    for (var d = t % p.lanes; d < p.dim; d += p.lanes) {
        let o_at = begin_o(row) + d * p.o.d;
        let y = input_x(x_at + d * p.x.d) * scale * r;
        var up = 0.0;
        if (p.backward == 1u) { up = input_g(g_at + d * p.g.d); }
        var term = up * y;
        var value = 0.0;
        if (p.gated == 0u) {
            let f = factor(w_at + d * p.w.d);
            let either = select(y * f, (up * f - y * mean) * scale * r, p.backward == 1u);
            value = either;
        } else {
            let f = activation(load_w(w_at + d * p.w.d));
            let either = select(y, up, p.backward == 1u);
            value = either * f.x;
            term = y * (up * f.y);
        }
        if (n < p.all) { put(o_at, value); }
        if (n < p.all && p.termed == 1u) { terms[begin_terms(row) + d * p.terms.d] = term; }
    }
}
