// The softmax stage, in place, one row of scores a workgroup:
//
//     s_j = scale · s_j        s_j = cap · tanh(s_j / cap)        s_j = s_j + bias_j - slope·|i - j|
//     w_j = exp(s_j - max s) / Σ exp(s - max s)     over the keys that the row sees
//
// in which a sink takes part in the sum alone, and dropout in what is written alone,
// in two phases over the row, thread t taking every 64th key, four at once:
//
//     1  read the scores       maximum of a thread's scores so far, and sum of its
//                              weights by it (Milakov & Gimelshein 2018)
//     2  write w, 0 where hidden                     and the row's log-sum-exp
//
// A row of up to ROW keys stays in workgroup memory between the two (HELD = 1), so that
// each score is read once and written once. A longer one is read again, and its scores
// are computed again, by the same operations: the results are the same, to the bit.
//
// A row that is longer than a binding comes in pieces along the keys, all of them
// once for each phase, with the threads' maxima and sums kept in state; pieces
// start at multiples of 256, so that the result does not depend on the cut.
//
// Workgroup memory as it stands: 4·ROW + 256 = 4,352 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: no loop is unrolled, 1: those over registers
const BOTH: u32 = 0u; // 1: a mask and one of blocks, or a bias and one by distance, which else share a binding
const HELD: u32 = 1u; // 1: a row is at most ROW keys, in one piece
const ROW: u32 = 1024u; // a multiple of 256

const LOWEST: f32 = -3.4028234e38;
const LOG2E: f32 = 1.4426950408889634;
const MINUS_INF: u32 = 0xff800000u;
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // of 2^126
// The bits of a hidden score: a NaN that no arithmetic makes. -Inf would not do, as
// it can be a visible score, and so can every other number.
const UNSEEN: u32 = 0xffc5a3d1u;

// Bits of Params.flags; the first two are the phases to run, none of them to write the
// scores themselves, -Inf where hidden.
const SUMS: u32 = 1u;
const WEIGHTS: u32 = 2u;
const KEEP: u32 = 4u; // the row comes in pieces: go on from state, leave state
const WANT_LSE: u32 = 8u;
const HAS_KLEN: u32 = 16u;
const HAS_MASK: u32 = 32u;
const HAS_SOFTCAP: u32 = 64u;
const HAS_SLOPES: u32 = 128u;
const HAS_SINKS: u32 = 256u;
const HAS_BLOCKS: u32 = 512u;
const HAS_DROPOUT: u32 = 1024u;

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

// Options are those that few calls have.
struct Options {
    offset: i32, // row i stands at key i + offset
    slope_b: u32, // slopes of a batch in the table, 0 when all share theirs
    relative_type: u32, // as bias_type, of the bias by distance
    block_q: u32, // rows and keys of a block of the mask
    block_k: u32,
    threshold: u32, // the random word from which on dropout keeps a weight
    seed0: u32,
    seed1: u32,
    batch0: u32, // what batch, head, row and key 0 of the piece count as in dropout
    head0: u32,
    row0: u32,
    key0: u32,
    keep: f32, // what dropout multiplies weights by, else 1
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
    key0: u32, // number of the first, a multiple of 256
    scale: f32,
    softcap: f32,
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen)
    hi: i32,
    flags: u32, // see above
    bias_type: u32, // 0: no bias, else 1 + its type: 0 f32, 1 f16, 2 bf16
    pad0: u32,
    pad1: u32,
    pad2: u32,
    more: Options,
    s: Strides,
    lse: Strides,
    mask: Strides,
    bias: Strides,
    blocked: Strides, // of a mask of blocks, by their numbers
    relative: Strides, // of a bias by distance: s is minus d
    klen: array<vec4<i32>, 16>, // of up to 64 batches
    slopes: array<vec4<f32>, 16>, // of up to 64 heads, batch by batch where slope_b says so
    sinks: array<vec4<f32>, 16>, // of up to 64 heads, -Inf where there is none
}

@group(0) @binding(0) var<storage, read> mask: array<u32>;
@group(0) @binding(1) var<storage, read> bias: array<u32>;
@group(0) @binding(2) var<storage, read_write> s: array<u32>;
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;
@group(0) @binding(6) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(7) var<storage, read> relative: array<u32>; // BOTH

var<workgroup> part: array<f32, 64>; // maxima, then sums
var<workgroup> row: array<u32, ROW>; // scores

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

fn load_relative(i: u32) -> f32 {
    let at = select(i >> 1u, i, p.more.relative_type == 1u);
    var word = 0u;
    if (BOTH == 0u) { // static
        word = bias[at];
    }
    if (BOTH == 1u) { // static
        word = relative[at];
    }
    return decode(word, i, p.more.relative_type - 1u);
}

// block is 0 when the mask of blocks hides its element i.
fn block(i: u32) -> u32 {
    var word = 0u;
    if (BOTH == 0u) { // static
        word = mask[i >> 2u];
    }
    if (BOTH == 1u) { // static
        word = blocks[i >> 2u];
    }
    return (word >> ((i & 3u) * 8u)) & 0xffu;
}

// bounded is a bias as it is added: finite ones are bounded to the number with the bits
// limit, so that log2(e) times what is added together is finite. Looks at the bits, as
// comparisons may be assumed to meet no NaN.
fn bounded(x: f32, limit: u32) -> f32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    return select(x, bitcast<f32>((bits & 0x80000000u) | limit), size > limit && size < 0x7f800000u);
}

// slope_of returns the slope of a head, both counted in the box.
fn slope_of(batch: u32, head: u32) -> f32 {
    let n = batch * p.more.slope_b + head;
    return p.slopes[n / 4u][n % 4u];
}

// mul_hi is the upper half of each product's 64 bits.
fn mul_hi(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    let x0 = x & vec2<u32>(0xffffu);
    let x1 = x >> vec2<u32>(16u);
    let y0 = y & vec2<u32>(0xffffu);
    let y1 = y >> vec2<u32>(16u);
    let mid = x1 * y0 + ((x0 * y0) >> vec2<u32>(16u));
    let low = x0 * y1 + (mid & vec2<u32>(0xffffu));
    return x1 * y1 + (mid >> vec2<u32>(16u)) + (low >> vec2<u32>(16u));
}

// philox is Philox4x32-10 (Salmon et al. 2011), as in package backend.
fn philox(counter: vec4<u32>, key: vec2<u32>) -> vec4<u32> {
    let m = vec2<u32>(0xd2511f53u, 0xcd9e8d57u);
    var c = counter;
    var k = key;
    for (var n = 0u; n < 10u; n++) {
        let high = mul_hi(c.xz, m);
        let low = c.xz * m;
        c = vec4<u32>(high.y ^ c.y ^ k.x, low.y, high.x ^ c.w ^ k.y, low.x);
        k = k + vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return c;
}

// dropped reports whether dropout takes the weight of a row and a key, counted as those
// of the box and the piece are.
fn dropped(batch: u32, head: u32, row: u32, j: u32) -> bool {
    let n = p.more.row0 + row;
    let x = philox(vec4<u32>(n / 4u, p.more.key0 + j, p.more.head0 + head, p.more.batch0 + batch), vec2<u32>(p.more.seed0, p.more.seed1));
    return x[n % 4u] < p.more.threshold;
}

// Row is where a row's operands begin, the keys that it sees by position, where it
// stands itself, and its slope.
struct Row {
    s: u32,
    mask: u32,
    bias: u32,
    blocks: u32,
    relative: u32,
    start: i32,
    to: i32,
    at: i32,
    slope: f32,
}

struct Scores {
    x: vec4<f32>,
    seen: vec4<bool>,
}

// scores returns those of keys j, j + 64, j + 128 and j + 192 of the piece. No product
// is added to anything but by fma, as a compiler may join the two or not.
fn scores(r: Row, j: u32) -> Scores {
    var w: Scores;
    var bias4 = vec4<f32>(0.0);
    for (var c = 0u; c < 4u; c++) { // unroll
        let n = j + 64u * c;
        let key = i32(p.key0 + n);
        w.seen[c] = n < p.keys && key >= r.start && key < r.to;
        w.x[c] = 0.0;
        if (n < p.keys) {
            w.x[c] = bitcast<f32>(s[r.s + n * p.s.d]);
            if ((p.flags & HAS_MASK) != 0u) {
                let x = r.mask + n * p.mask.d;
                w.seen[c] = w.seen[c] && ((mask[x >> 2u] >> ((x & 3u) * 8u)) & 0xffu) != 0u;
            }
            if ((p.flags & HAS_BLOCKS) != 0u) {
                w.seen[c] = w.seen[c] && block(r.blocks + (p.key0 + n) / p.more.block_k * p.blocked.d) != 0u;
            }
            if (p.bias_type != 0u) {
                let x = load_bias(r.bias + n * p.bias.d);
                w.seen[c] = w.seen[c] && bitcast<u32>(x) != MINUS_INF;
                bias4[c] = bounded(x, MAX_BIAS);
            }
            if (p.more.relative_type != 0u) {
                let x = load_relative(r.relative + n * p.relative.d);
                w.seen[c] = w.seen[c] && bitcast<u32>(x) != MINUS_INF;
                bias4[c] = bounded(bias4[c] + bounded(x, MAX_RELATIVE), MAX_BIAS);
            }
            if ((p.flags & HAS_SLOPES) != 0u) {
                bias4[c] = bounded(fma(-r.slope, f32(abs(r.at - key)), bias4[c]), MAX_BIAS);
            }
        }
    }
    var factor = p.scale;
    if ((p.flags & HAS_SOFTCAP) != 0u) {
        w.x = tanh_acc(w.x * p.scale / p.softcap);
        factor = p.softcap;
    }
    w.x = fma(w.x, vec4<f32>(factor), bias4);
    return w;
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
    let i = id % p.rows;
    let h = (id / p.rows) % p.heads;
    let b = id / p.rows / p.heads;
    var r: Row;
    r.s = p.s.base + b * p.s.b + h * p.s.h + i * p.s.s;
    r.mask = p.mask.base + b * p.mask.b + h * p.mask.h + i * p.mask.s;
    r.bias = p.bias.base + b * p.bias.b + h * p.bias.h + i * p.bias.s;
    r.at = i32(p.row0 + i) + p.more.offset;
    r.slope = 0.0;
    if ((p.flags & HAS_SLOPES) != 0u) {
        r.slope = slope_of(b, h);
    }
    r.blocks = 0u;
    if ((p.flags & HAS_BLOCKS) != 0u) {
        r.blocks = p.blocked.base + b * p.blocked.b + h * p.blocked.h + (p.row0 + i) / p.more.block_q * p.blocked.s;
    }
    r.relative = p.relative.base + b * p.relative.b + h * p.relative.h + i * p.relative.s;
    r.start = i32(p.row0 + i) + p.lo;
    r.to = i32(p.row0 + i) + p.hi;
    if ((p.flags & HAS_KLEN) != 0u) {
        r.to = min(r.to, p.klen[b / 4u][b % 4u]);
    }
    if ((p.flags & (SUMS | WEIGHTS)) == 0u) {
        for (var j = t; j < p.keys; j += 256u) {
            let w = scores(r, j);
            let x = select(vec4<u32>(MINUS_INF), bitcast<vec4<u32>>(w.x), w.seen);
            for (var c = 0u; c < 4u; c++) { // unroll
                if (j + 64u * c < p.keys) {
                    s[r.s + (j + 64u * c) * p.s.d] = x[c];
                }
            }
        }
        return;
    }
    let state_at = id * 128u;
    let keep = (p.flags & KEEP) != 0u;

    var m = LOWEST;
    var l = 0.0;
    if (keep && ((p.flags & SUMS) == 0u || p.key0 != 0u)) {
        m = state[state_at + t];
        l = state[state_at + 64u + t];
    }
    if ((p.flags & SUMS) != 0u) {
        for (var j = t; j < p.keys; j += 256u) {
            let w = scores(r, j);
            if (HELD == 1u) { // static
                let held = select(vec4<u32>(UNSEEN), bitcast<vec4<u32>>(w.x), w.seen);
                for (var c = 0u; c < 4u; c++) { // unroll
                    row[j + 64u * c] = held[c];
                }
            }
            let most = select(vec4<f32>(LOWEST), w.x, w.seen);
            let top = max(max(m, max(most.x, most.y)), max(most.z, most.w));
            let e = select(vec4<f32>(0.0), exp2_acc((w.x - vec4<f32>(top)) * LOG2E), w.seen);
            l = fma(l, exp2_acc(vec4<f32>((m - top) * LOG2E)).x, ((e.x + e.y) + e.z) + e.w);
            m = top;
        }
        if (keep) {
            state[state_at + t] = m;
            state[state_at + 64u + t] = l;
        }
    }
    if ((p.flags & WEIGHTS) == 0u) {
        return;
    }

    // The row's maximum, in any order, and its sum, in a fixed one.
    part[t] = m;
    workgroupBarrier();
    var top = LOWEST;
    for (var x = 0u; x < 64u; x++) {
        top = max(top, part[x]);
    }
    let sink = p.sinks[h / 4u][h % 4u];
    let sinks = (p.flags & HAS_SINKS) != 0u && bitcast<u32>(sink) != MINUS_INF;
    if (sinks) {
        top = max(top, sink);
    }
    workgroupBarrier();
    part[t] = l * exp2_acc(vec4<f32>((m - top) * LOG2E)).x;
    workgroupBarrier();
    var sum = 0.0;
    for (var x = 0u; x < 64u; x++) {
        sum = sum + part[x];
    }
    if (sinks) {
        sum = sum + exp2_acc(vec4<f32>((sink - top) * LOG2E)).x;
    }
    let empty = bitcast<u32>(sum) == 0u;
    let inverse = 1.0 / select(sum, 1.0, empty);
    for (var j = t; j < p.keys; j += 256u) {
        var w: Scores;
        if (HELD == 1u) { // static
            for (var c = 0u; c < 4u; c++) { // unroll
                let held = row[j + 64u * c];
                w.x[c] = bitcast<f32>(held);
                w.seen[c] = held != UNSEEN;
            }
        }
        if (HELD == 0u) { // static
            w = scores(r, j);
        }
        let e = exp2_acc((w.x - vec4<f32>(top)) * LOG2E) * inverse;
        var weight = select(vec4<f32>(0.0), e, w.seen & vec4<bool>(!empty));
        if ((p.flags & HAS_DROPOUT) != 0u) {
            // What is dropped is 0, or NaN where it was that.
            let none = select(vec4<f32>(0.0), weight, is_nan(weight));
            for (var c = 0u; c < 4u; c++) { // unroll
                if (dropped(b, h, i, j + 64u * c)) {
                    weight[c] = none[c];
                }
            }
            weight = weight * p.more.keep;
        }
        for (var c = 0u; c < 4u; c++) { // unroll
            if (j + 64u * c < p.keys) {
                s[r.s + (j + 64u * c) * p.s.d] = bitcast<u32>(weight[c]);
            }
        }
    }
    if (t == 0u && (p.flags & WANT_LSE) != 0u) {
        let value = top + log_acc(select(sum, 1.0, empty));
        lse[p.lse.base + b * p.lse.b + h * p.lse.h + i * p.lse.s] =
            select(value, bitcast<f32>(MINUS_INF), empty);
    }
}
