// The softmax stage, in place, one row of scores a workgroup:
//
//     s_j = scale · s_j        s_j = cap · tanh(s_j / cap)        s_j = s_j + bias_j
//     w_j = exp(s_j - max s) / Σ exp(s - max s)     over the keys that the row sees
//
// in three phases over the row, thread t taking every 64th key:
//
//     1  write the score, UNSEEN where hidden        maximum of a thread's scores
//     2  write exp(s - m), HIDDEN where hidden       sum of a thread's weights
//     3  write w, 0 where hidden                     and the row's log-sum-exp
//
// A row that is longer than a binding comes in pieces along the keys, all of them
// once for each phase, with the threads' maxima and sums kept in state; pieces
// start at multiples of 64, so that the result does not depend on the cut.
//
// Workgroup memory: 256 bytes.

const LOWEST: f32 = -3.4028234e38;
const LOG2E: f32 = 1.4426950408889634;
const HIDDEN: f32 = -1.0; // a weight is never negative
const HIDDEN_BITS: u32 = 0xbf800000u;
const MINUS_INF: u32 = 0xff800000u;
// The bits of a hidden score: a NaN that no arithmetic makes. -Inf would not do, as
// it can be a visible score, and so can every other number.
const UNSEEN: u32 = 0xffc5a3d1u;

// Bits of Params.flags; the first three are the phases to run.
const SCORES: u32 = 1u;
const WEIGHTS: u32 = 2u;
const DIVIDE: u32 = 4u;
const KEEP: u32 = 8u; // the row comes in pieces: go on from state, leave state
const WANT_LSE: u32 = 16u;
const HAS_KLEN: u32 = 32u;
const HAS_MASK: u32 = 64u;
const HAS_SOFTCAP: u32 = 128u;

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
    row0: u32, // number of the first row
    keys: u32, // in the piece
    key0: u32, // number of the first, a multiple of 64
    scale: f32,
    softcap: f32,
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen)
    hi: i32,
    flags: u32, // see below
    bias_type: u32, // 0: no bias, else 1 + its type: 0 f32, 1 f16, 2 bf16
    pad0: u32,
    pad1: u32,
    pad2: u32,
    s: Strides,
    lse: Strides,
    mask: Strides,
    bias: Strides,
    klen: array<vec4<i32>, 16>, // of up to 64 batches
}

@group(0) @binding(0) var<storage, read> mask: array<u32>;
@group(0) @binding(1) var<storage, read> bias: array<u32>;
@group(0) @binding(2) var<storage, read_write> s: array<u32>;
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;

var<workgroup> part: array<f32, 64>;

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

// tanh_acc is tanh(x) to 3 ulp (Cephes tanhf): an odd polynomial below 0.625, and
// 1 - 2/(e^2x + 1) above. A driver's tanh may overflow to NaN for large x.
fn tanh_acc(x: vec4<f32>) -> vec4<f32> {
    let a = min(abs(x), vec4<f32>(20.0));
    let z = a * a;
    var r = fma(vec4<f32>(-5.70498872745e-3), z, vec4<f32>(2.06390887954e-2));
    r = fma(r, z, vec4<f32>(-5.37397155531e-2));
    r = fma(r, z, vec4<f32>(1.33314422036e-1));
    r = fma(r, z, vec4<f32>(-3.33332819422e-1));
    r = fma(r * z, a, a);
    let e = exp2_acc(a * 2.885390082);
    r = select(r, vec4<f32>(1.0) - vec4<f32>(2.0) / (e + vec4<f32>(1.0)), a >= vec4<f32>(0.625));
    r = select(r, -r, x < vec4<f32>(0.0));
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

// decode returns element i of a tensor from the word that holds it: type 0 is
// f32, 1 f16, 2 bf16.
fn decode(word: u32, i: u32, dtype: u32) -> f32 {
    let pair = unpack2x16float(word);
    let half = select(pair.x, pair.y, (i & 1u) == 1u);
    let brain = bitcast<f32>((word >> ((i & 1u) * 16u)) << 16u);
    return select(select(brain, half, dtype == 1u), bitcast<f32>(word), dtype == 0u);
}

fn load_bias(i: u32) -> f32 {
    return decode(bias[select(i >> 1u, i, p.bias_type == 1u)], i, p.bias_type - 1u);
}

// bounded is a bias as it is added: finite ones are bounded to 2^127, so that log2(e)
// times it is finite. Looks at the bits, as comparisons may be assumed to meet no NaN.
fn bounded(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    return select(x, bitcast<f32>((bits & 0x80000000u) | 0x7f000000u), size > 0x7f000000u && size < 0x7f800000u);
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
    let i = i32(p.row0 + row);
    let start = i + p.lo;
    var to = i + p.hi;
    if ((p.flags & HAS_KLEN) != 0u) {
        to = min(to, p.klen[b / 4u][b % 4u]);
    }
    let s_at = p.s.base + b * p.s.b + h * p.s.h + row * p.s.s;
    let mask_at = p.mask.base + b * p.mask.b + h * p.mask.h + row * p.mask.s;
    let bias_at = p.bias.base + b * p.bias.b + h * p.bias.h + row * p.bias.s;
    let state_at = id * 128u;
    let keep = (p.flags & KEEP) != 0u;

    var m = LOWEST;
    if ((p.flags & SCORES) != 0u) {
        if (keep && p.key0 != 0u) {
            m = state[state_at + t];
        }
        for (var j = t; j < p.keys; j += 64u) {
            let key = i32(p.key0 + j);
            var seen = key >= start && key < to;
            if ((p.flags & HAS_MASK) != 0u) {
                let x = mask_at + j * p.mask.d;
                seen = seen && ((mask[x >> 2u] >> ((x & 3u) * 8u)) & 0xffu) != 0u;
            }
            let at = s_at + j * p.s.d;
            var x = bitcast<f32>(s[at]) * p.scale;
            if ((p.flags & HAS_SOFTCAP) != 0u) {
                x = p.softcap * tanh_acc(vec4<f32>(x / p.softcap)).x;
            }
            if (p.bias_type != 0u) {
                let y = load_bias(bias_at + j * p.bias.d);
                x = x + bounded(y);
                seen = seen && bitcast<u32>(y) != MINUS_INF;
            }
            if (seen) {
                m = max(m, x);
            }
            s[at] = select(UNSEEN, bitcast<u32>(x), seen);
        }
        if (keep) {
            state[state_at + t] = m;
        }
    } else {
        m = state[state_at + t];
    }
    if ((p.flags & (WEIGHTS | DIVIDE)) == 0u) {
        return;
    }

    // The row's maximum; the order does not matter.
    part[t] = m;
    workgroupBarrier();
    for (var x = 0u; x < 64u; x++) {
        m = max(m, part[x]);
    }
    var l = 0.0;
    if ((p.flags & WEIGHTS) != 0u) {
        if (keep && p.key0 != 0u) {
            l = state[state_at + 64u + t];
        }
        for (var j = t; j < p.keys; j += 64u) {
            let at = s_at + j * p.s.d;
            let x = s[at];
            var e = HIDDEN;
            if (x != UNSEEN) {
                e = exp2_acc(vec4<f32>((bitcast<f32>(x) - m) * LOG2E)).x;
                l = l + e;
            }
            s[at] = bitcast<u32>(e);
        }
        if (keep) {
            state[state_at + 64u + t] = l;
        }
    } else {
        l = state[state_at + 64u + t];
    }
    if ((p.flags & DIVIDE) == 0u) {
        return;
    }

    // The row's sum, in a fixed order.
    workgroupBarrier();
    part[t] = l;
    workgroupBarrier();
    var sum = 0.0;
    for (var x = 0u; x < 64u; x++) {
        sum = sum + part[x];
    }
    let empty = bitcast<u32>(sum) == 0u;
    let inverse = 1.0 / select(sum, 1.0, empty);
    for (var j = t; j < p.keys; j += 64u) {
        let at = s_at + j * p.s.d;
        let x = s[at];
        s[at] = bitcast<u32>(select(bitcast<f32>(x) * inverse, 0.0, empty || x == HIDDEN_BITS));
    }
    if (t == 0u && (p.flags & WANT_LSE) != 0u) {
        let value = m + log_acc(select(sum, 1.0, empty));
        lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s] =
            select(value, bitcast<f32>(MINUS_INF), empty);
    }
}
