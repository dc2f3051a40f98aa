// The second half of decoding: one row a workgroup puts together what decode.wgsl left
// of the splits of its keys, in ascending order (Dao 2023, Flash-Decoding):
//
//     m' = max(m, m_s)    a = 2^(m-m')    b = 2^(m_s-m')
//     O = b·O_s + a·O     l_c = b·l_s,c + a·l_c
//
// and finishes: o = O / Σ l_c, lse = m·log 2 + log Σ l_c, the sum over c ascending too, to
// which a sink comes last; dropout's factor is in o. The
// first split is taken as it is. Splits of which the row sees no key, judged by
// position alone, were not written and are not looked at; a row that sees no key at
// all gives zeros and -Inf.
//
// A thread has a vec4 of O or of l. Splits come in eights, so that their loads are on
// their way together.
//
// Workgroup memory: parts 64 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: no loop is unrolled, else those that are marked
const SPLIT: u32 = 1024u; // keys of a split
const TX: u32 = 8u; // classes of keys, the parts of l
const QUADS: u32 = 16u; // vec4 columns of the output
const WIDTH: u32 = 21u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m

const LOWEST: f32 = -3.4028234e38; // the maximum before any key
const LN2: f32 = 0.6931471805599453;

// Bits of Params.flags.
const WANT_LSE: u32 = 4u;
const HAS_KLEN: u32 = 8u;
const HAS_SINKS: u32 = 128u;

// Strides are in elements, base is the first element's index in its binding. The
// padding is what uniforms ask of structures inside structures.
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
    total: u32, // workgroups of the box: batches · kv heads · splits · blocks of rows
    blocks: u32, // blocks of ROWS rows of a key head
    heads: u32, // query heads in the box
    head0: u32, // number of the first
    group: u32, // query heads for each key head
    kvheads: u32, // key heads in the box
    rows: u32, // queries in the box
    row0: u32, // number of the first
    keys: u32, // keys in the piece
    key0: u32, // number of the first, a multiple of SPLIT
    parts: u32, // splits in the piece
    part0: u32, // of the box's splits, the piece's first
    splits: u32, // splits of the box
    dim: u32, // D
    vdim: u32, // Dv
    scale: f32,
    softcap: f32,
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen)
    hi: i32,
    flags: u32, // see above
    bias_type: u32, // 0: no bias, else 1 + its type
    out_type: u32, // type of o
    unit: f32, // log2(e) times softcap if there is one, else times scale
    more: Options,
    q: Strides,
    k: Strides,
    v: Strides,
    o: Strides,
    lse: Strides,
    mask: Strides,
    bias: Strides,
    blocked: Strides, // of a mask of blocks, by their numbers
    relative: Strides, // of a bias by distance: s is minus d
    klen: array<vec4<i32>, 16>, // of up to 64 batches
    slopes: array<vec4<f32>, 16>, // of up to 64 heads, batch by batch where slope_b says so
    sinks: array<vec4<f32>, 16>, // of up to 64 heads, in units of log2, -Inf where there is none
}

@group(0) @binding(0) var<storage, read> state: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> o: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> lse: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

var<workgroup> parts: array<vec4<f32>, 4>; // of l

// exp2_down is 2^x to 4 ulp for differences x from a maximum: exp2_acc with one term
// less (1 + f·g(f), g the minimax polynomial for which 2^f is off by 1.6·2^-24 at
// most), 0 below -126, and exactly 1 for 0. They may round to above 0, for scores of
// 2^30 and more far above: up to 64 this is 2^x, then at most 2^65, which is finite.
// The bits of x are compared, as a compiler may assume that comparisons meet no NaN;
// a NaN comes through f.
fn exp2_down(x: vec4<f32>) -> vec4<f32> {
    let n = floor(max(x, vec4<f32>(-126.0)) + vec4<f32>(0.5));
    let f = x - n;
    var r = fma(vec4<f32>(1.3264727e-3), f, vec4<f32>(9.6715126e-3));
    r = fma(r, f, vec4<f32>(5.5507337e-2));
    r = fma(r, f, vec4<f32>(2.4022242e-1));
    r = fma(r, f, vec4<f32>(6.9314698e-1));
    r = fma(r, f, vec4<f32>(1.0));
    r = r * bitcast<vec4<f32>>((vec4<i32>(min(n, vec4<f32>(64.0))) + vec4<i32>(127)) << vec4<u32>(23u));
    let below = bitcast<vec4<u32>>(x) - vec4<u32>(0xc2fc0001u); // 0: next below -126
    return select(r, vec4<f32>(0.0), below <= vec4<u32>(0x3c83ffffu)); // -Inf
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

// encode16 rounds x to f16 (type 1) or bf16 (type 2), to nearest, ties to even.
// pack2x16float may round either way, so it is not used.
fn encode16(x: f32, dtype: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    let nan = a > 0x7f800000u;
    let brain = select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, nan);
    var half = (a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u;
    // Below 2^-14 f16 is subnormal, in steps of 2^-24. Adding 1/2 puts the step of
    // the sum at 2^-24, so that the addition rounds; the low bits count the steps.
    half = select(half, bitcast<u32>(bitcast<f32>(a) + 0.5) - 0x3f000000u, a < 0x38800000u);
    half = select(half, 0x7c00u, a >= 0x477ff000u); // 65520 and over round to infinity
    half = select(half, 0x7e00u, nan);
    return select(sign | half, brain, dtype == 2u);
}

// put stores x as element i of o. Two rows may share a word when elements take
// 16 bits, so the bits that change are flipped atomically: nobody else writes this
// half of the word, and the other half is left alone whatever it is by then.
fn put(i: u32, x: f32) {
    if (p.out_type == 0u) {
        atomicStore(&o[i], bitcast<u32>(x));
    } else {
        let shift = (i & 1u) * 16u;
        let old = atomicLoad(&o[i >> 1u]) >> shift;
        atomicXor(&o[i >> 1u], ((old ^ encode16(x, p.out_type)) & 0xffffu) << shift);
    }
}

@compute @workgroup_size(128)
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

    // The splits of which the row sees a key.
    let i = i32(p.row0 + row);
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[b / 4u][b % 4u]);
    }
    let from_key = max(i + p.lo, i32(p.key0));
    let to_key = min(i + p.hi, cap);
    var s0 = 0u;
    var s1 = 0u;
    if (from_key < to_key) {
        s0 = (u32(from_key) - p.key0) / SPLIT;
        s1 = (u32(to_key) - 1u - p.key0) / SPLIT + 1u;
    }

    var m = LOWEST;
    var sum = vec4<f32>(0.0); // of O or l
    let quad = min(t, QUADS + 3u);
    for (var s = s0; s < s1; s += 8u) {
        var xs: array<vec4<f32>, 8>;
        var ms: array<f32, 8>;
        for (var n = 0u; n < 8u; n++) { // unroll
            let at = (id * p.splits + min(s + n, s1 - 1u)) * WIDTH;
            xs[n] = state[at + quad];
            ms[n] = state[at + WIDTH - 1u].x;
        }
        for (var n = 0u; n < 8u; n++) { // unroll
            if (s + n == s0) {
                sum = xs[n];
                m = ms[n];
            } else if (s + n < s1) {
                let top = max(m, ms[n]);
                let e = exp2_down(vec4<f32>(m - top, ms[n] - top, 0.0, 0.0));
                sum = fma(vec4<f32>(e.y), xs[n], sum * e.x);
                m = top;
            }
        }
    }

    if (t >= QUADS && t < QUADS + 4u) {
        parts[t - QUADS] = sum;
    }
    workgroupBarrier();
    var l = 0.0;
    for (var c = 0u; c < TX; c++) {
        l = l + parts[c / 4u][c % 4u];
    }
    var scale = p.more.keep;
    if ((p.flags & HAS_SINKS) != 0u) {
        let sink = p.sinks[h / 4u][h % 4u];
        if (bitcast<u32>(sink) != 0xff800000u) { // -Inf
            let top = max(m, sink);
            let e = exp2_down(vec4<f32>(m - top, sink - top, 0.0, 0.0));
            l = fma(l, e.x, e.y);
            scale = scale * e.x;
            m = top;
        }
    }
    let empty = bitcast<u32>(l) == 0u;
    let safe = select(l, 1.0, empty);
    let inverse = 1.0 / safe * scale;
    if (t == 0u && (p.flags & WANT_LSE) != 0u) {
        lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s] =
            select(fma(m, LN2, log_acc(safe)), bitcast<f32>(0xff800000u), empty);
    }
    if (t < QUADS) {
        let x = select(sum * inverse, vec4<f32>(0.0), empty);
        let at = p.o.base + b * p.o.b + h * p.o.h + row * p.o.s;
        for (var c = 0u; c < 4u; c++) { // unroll
            if (4u * t + c < p.vdim) {
                put(at + (4u * t + c) * p.o.d, x[c]);
            }
        }
    }
}
