// Merge of two partial results over disjoint keys, in place of the first, one row
// a workgroup (Milakov & Gimelshein 2018):
//
//     m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
//     o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
//
// A side whose lse is -Inf leaves the other as it is, bit for bit.
//
// Workgroup memory: none.

const LOG2E: f32 = 1.4426950408889634;
const MINUS_INF: u32 = 0xff800000u;

struct Strides {
    base: u32,
    b: u32,
    h: u32,
    s: u32,
    d: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

struct Params {
    first: u32, // workgroups that earlier dispatches of this box took
    total: u32, // workgroups of the box: batches · heads · rows
    heads: u32,
    rows: u32,
    vdim: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
    o: Strides,
    lse: Strides,
    po: Strides,
    plse: Strides,
}

@group(0) @binding(0) var<storage, read> po: array<f32>;
@group(0) @binding(1) var<storage, read> plse: array<f32>;
@group(0) @binding(2) var<storage, read_write> o: array<f32>;
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;

// is_nan looks at the bits: a compiler may assume that comparisons meet no NaN.
fn is_nan(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

// exp2_acc is 2^x to 2 ulp for x <= 127, 0 below -126 (Cephes exp2f: 2^n times a
// degree 6 polynomial on [-1/2, 1/2]; Moshier 1989). exp2_acc(0) is exactly 1.
// Drivers may give exp2 with 3 + 2|x| ulp, too little for weights.
fn exp2_acc(x: vec4<f32>) -> vec4<f32> {
    let y = clamp(x, vec4<f32>(-126.0), vec4<f32>(127.0));
    let n = floor(y + vec4<f32>(0.5));
    let f = y - n;
    var r = fma(vec4<f32>(1.535336188319500e-4), f, vec4<f32>(1.339887440266574e-3));
    r = fma(r, f, vec4<f32>(9.618437357674640e-3));
    r = fma(r, f, vec4<f32>(5.550332471162809e-2));
    r = fma(r, f, vec4<f32>(2.402264791363012e-1));
    r = fma(r, f, vec4<f32>(6.931472028550421e-1));
    r = fma(r, f, vec4<f32>(1.0));
    r = r * bitcast<vec4<f32>>((vec4<i32>(n) + vec4<i32>(127)) << vec4<u32>(23u));
    r = select(r, vec4<f32>(0.0), x < vec4<f32>(-126.0));
    return select(r, x, is_nan(x));
}

// log_acc is the natural logarithm of a normal x > 0 to 2 ulp (Cephes logf).
// Drivers may be off by 2^-21 near 1, where many rows' sums lie.
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
    r = fma(r, f, 1.1676998740e-1);
    r = fma(r, f, -1.2420140846e-1);
    r = fma(r, f, 1.4249322787e-1);
    r = fma(r, f, -1.6668057665e-1);
    r = fma(r, f, 2.0000714765e-1);
    r = fma(r, f, -2.4999993993e-1);
    r = fma(r, f, 3.3333331174e-1);
    r = r * f * z;
    r = fma(e, -2.12194440e-4, r);
    r = fma(z, -0.5, r);
    r = fma(e, 0.693359375, f + r);
    return select(r, x, (bits & 0x7fffffffu) >= 0x7f800000u);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32,
) {
    let id = p.first + group.y * groups.x + group.x;
    if (id >= p.total) {
        return;
    }
    let row = id % p.rows;
    let h = (id / p.rows) % p.heads;
    let b = id / p.rows / p.heads;
    let lse_at = p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s;
    let x = lse[lse_at];
    let y = plse[p.plse.base + b * p.plse.b + h * p.plse.h + row * p.plse.s];
    storageBarrier(); // every thread has x before one of them overwrites it
    if (bitcast<u32>(y) == MINUS_INF) {
        return;
    }
    let alone = bitcast<u32>(x) == MINUS_INF;
    let m = max(x, y);
    let e = exp2_acc(vec4<f32>((x - m) * LOG2E, (y - m) * LOG2E, 0.0, 0.0));
    let sum = e.x + e.y;
    let o_at = p.o.base + b * p.o.b + h * p.o.h + row * p.o.s;
    let po_at = p.po.base + b * p.po.b + h * p.po.h + row * p.po.s;
    for (var c = t; c < p.vdim; c += 64u) {
        let theirs = po[po_at + c * p.po.d];
        let at = o_at + c * p.o.d;
        o[at] = select((e.x * o[at] + e.y * theirs) / sum, theirs, alone);
    }
    if (t == 0u) {
        lse[lse_at] = select(m + log_acc(sum), y, alone);
    }
}
