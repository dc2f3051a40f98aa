// The second half of decoding. A workgroup merges, for one row, the results that decode.wgsl left for the
// splits of its keys, in ascending order (Dao 2023, Flash-Decoding):
//
//     m' = max(m, m_s)    a = 2^(m-m')    b = 2^(m_s-m')
//     O = b·O_s + a·O     l_c = b·l_s,c + a·l_c
//
// and normalises: o = keep·O / Σ l_c, lse = m·log 2 + log Σ l_c. The sum over c is ascending too and a sink is
// added last; keep is the factor of dropout. The first split is copied. Splits in which the row sees no key, by
// position, were not written and are not read. A fully masked row yields zeros and an LSE of -Inf.
//
// m' is a prefix maximum, which is exact in any order. BLOCK splits at a time, a thread computes a and b of one
// split; then a thread has a vec4 of O or of l and goes through the splits, a product and an fma each. It loads
// AHEAD of them at once, without a condition, behind which a compiler might move the loads: contexts of a million
// keys have 4,096 splits.
//
// Workgroup memory: parts 64 + tops 1,024 + factors 1,024 = 2,112 bytes.

const WIDTH: u32 = QUADS + 5u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m
const BLOCK: u32 = 128u; // splits whose factors are computed at once, one a thread
const AHEAD: u32 = 16u; // splits loaded at once

@binding var<storage, read> state: array<vec4<f32>>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> lse: array<f32>;
@binding var<uniform> p: AttentionParams;

var<workgroup> parts: array<vec4<f32>, 4>; // of l
var<workgroup> tops: array<array<f32, BLOCK>, 2>; // prefix maxima of two rounds in turn
var<workgroup> factors: array<vec2<f32>, BLOCK>; // a and b

@main(128) {
    @inline row_of_id(row);

    // The splits in which the row sees a key.
    let i = i32(p.row0 + row) + offset_of(b);
    let cap = key_end(b, p.key0 + p.keys);
    let from_key = max(i + p.lo, i32(p.key0));
    let to_key = min(i + p.hi, cap);
    var s0 = 0u;
    var s1 = 0u;
    if (from_key < to_key) {
        s0 = (u32(from_key) - p.key0) / SPLIT;
        s1 = (u32(to_key) - 1u - p.key0) / SPLIT + 1u;
    }

    var m = LOWEST; // of the splits before the block
    var sum = vec4<f32>(0.0); // of O or l
    let quad = min(t, QUADS + 3u);
    let at = id * p.splits * WIDTH;
    for (var from_s = s0; from_s < s1; from_s += BLOCK) {
        let s = from_s + t;
        var m_s = LOWEST;
        if (s < s1) { m_s = state[at + s * WIDTH + WIDTH - 1u].x; }
        var top = m_s;
        var now = 0u;
        tops[now][t] = top;
        for (var back = 1u; back < BLOCK; back *= 2u) {
            workgroupBarrier();
            if (t >= back) { top = max(tops[now][t - back], top); }
            now = 1u - now;
            tops[now][t] = top;
        }
        workgroupBarrier();
        var before = m;
        if (t > 0u) { before = max(m, tops[now][t - 1u]); }
        top = max(m, top);
        let e = exp2_down(vec4<f32>(before - top, m_s - top, 0.0, 0.0));
        factors[t] = select(e.xy, vec2<f32>(0.0, 1.0), s == s0);
        m = max(m, tops[now][BLOCK - 1u]);
        workgroupBarrier();

        let end = min(from_s + BLOCK, s1);
        var x = from_s;
        for (; x + AHEAD <= end; x += AHEAD) {
            var loaded: array<vec4<f32>, AHEAD>;
            @unroll for (var n = 0u; n < AHEAD; n++) { loaded[n] = state[at + (x + n) * WIDTH + quad]; }
            @unroll for (var n = 0u; n < AHEAD; n++) {
                let f = factors[x + n - from_s];
                sum = fma(vec4<f32>(f.y), loaded[n], sum * f.x);
            }
        }
        for (; x < end; x++) {
            let f = factors[x - from_s];
            sum = fma(vec4<f32>(f.y), state[at + x * WIDTH + quad], sum * f.x);
        }
    }

    if (t >= QUADS && t < QUADS + 4u) { parts[t - QUADS] = sum; }
    workgroupBarrier();
    var l = 0.0;
    for (var c = 0u; c < TX; c++) { l = l + parts[c / 4u][c % 4u]; }
    @inline add_sink(l, m, h);
    let empty = bitcast<u32>(l) == 0u;
    let safe = select(l, 1.0, empty);
    let inverse = 1.0 / safe * scale;
    if (t == 0u && (p.flags & WANT_LSE) != 0u) {
        lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s] =
            select(fma(m, LN2, log_acc(safe)), negative_infinity(), empty);
    }
    if (t < QUADS) {
        let x = select(unsigned_zeros(sum) * inverse, vec4<f32>(0.0), empty);
        let at = p.o.base + b * p.o.b + h * p.o.h + row * p.o.s;
        @unroll for (var c = 0u; c < 4u; c++) {
            if (4u * t + c < p.vdim) { put(at + (4u * t + c) * p.o.d, x[c]); }
        }
    }
}
