// Fused attention, register-tiled: what attention.wgsl computes, with tiles of 8x8
// in both products where that has 4x4, so that the fused multiply-adds bound it and
// not the reads of workgroup memory. One block of query rows of one head a workgroup:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       o = Σ p_j·v_j / Σ p_j            lse = m + log Σ p_j
//
// in which a sink takes part in the sums Σ p_j alone, and dropout in Σ p_j·v_j alone.
//
// A thread (tx, ty) of TX x TY has RV vec4 of rows, KT keys of a tile and CV vec4 of
// columns (a turn):
//
//                keys TX·j + tx            columns 4·(TX·i + tx) + 0..3
//            ┌──────┬──────┬─ TX ─┐        ┌──────┬─ TX ─┐
//     rows   │ 8x8  │      │      │        │ 8x8  │      │
//   8·ty + r ├──────┼ S,P  ┼      │        ├──────┼ O    │
//            └──────┴──────┴─ TY ─┘        └──────┴─ TY ─┘
//
// In QKᵀ it reads, for 4 depths, 8 vec4 of q and 8 of k and does 256 multiply-adds;
// in PV, for one key, 2 vec4 of weights (of 4 rows each), 2 of v and 64: 4 for each
// word in both. What a thread reads lies in one row of a (its rows' q, later their
// weights) and one of b (its keys' k, later its columns' v), at places that are
// constants once the loops are unrolled. Rows have an odd length in vec4, which keeps
// lanes on different banks.
//
// A loop marked 'unroll' may only be unrolled by hand (EXPAND = 1, see Specialise), as
// it indexes registers; 'unroll deep' (EXPAND = 2) saves the index arithmetic of
// workgroup memory. As it stands every loop is one: slow, and the oracle of both. The
// results are the same, to the bit.
//
// The order of operations for a row, which decode.wgsl follows too, so that both give
// the same bits, whatever else is in the block:
//
//   - Heads fall into classes by max(D, Dv): 32, 64, 80, 96, 128, 256. The class fixes
//     the keys of a tile BC = KT·TX = 32, 64, 80, 96, 128, 64, and TX = BC/8, for 256
//     BC/4. Nothing else may: variants differ in RV, TY and what is staged at once.
//   - Tiles of BC keys lie at multiples of BC, splits of SPLIT keys at multiples of
//     that: the multiple of BC next to 1024.
//   - x = Σ q_d·k_d by fma from d = 0 on. With softcap x = tanh(x·scale/cap). The unit
//     is log2 e times scale, or cap: a score is x·unit in units of log2, with a bias
//     fma(x, unit, y·log2 e), of which the unit is 1: y is the bias and the bias by
//     distance, then fma(-slope, distance, y). No rounded product is added to anything but
//     by fma, as a compiler may join the two or not.
//   - A tile: m = max(m, x·unit), from LOWEST; p = exp2_down(fma(x, unit, -m));
//     r = exp2_down(m before - m); l_c = fma(l_c, r, Σ p of the keys j ≡ c mod TX in
//     ascending order); o = o·r, then o = fma(p_j, v_j, o) in ascending order. Hidden
//     keys are passed over. A tile that the row does not see changes no bit.
//   - A split that ends goes into the total: the first that the row sees (by the
//     visibility rule alone) is copied, one that it does not see is left out, else
//     with m = max(m_t, m_s), a = exp2_down(m_t - m), b = exp2_down(m_s - m):
//     o = fma(o_s, b, o_t·a), l_c = fma(l_cs, b, l_ct·a).
//   - Dropout takes weights after they were summed.
//   - At the end l = Σ l_c in ascending order; a sink, in units of log2, comes to it with
//     m = max(m, sink), a = exp2_down(m before - m): l = fma(l, a, exp2_down(sink - m)),
//     else a = 1; o = o·(1/l·(keep·a)), lse = fma(m, ln 2, log l). keep is 1/(1-P) of
//     dropout, else 1.
//
// State holds, for each thread of each workgroup, its registers (o, l, m): first the
// totals of the splits before, then, when keys come in pieces, what the last split had
// come to when the piece ended. So the result does not depend on how keys were cut.
//
// A row of q8 is words, its scale and then four integers in each. What takes part is
// scale·integer, rounded, so that the bits are those of such numbers in float32.
//
// What is hidden never takes part: its score is not looked at, and its weight is the
// marker HIDDEN, for which the product with V is passed over (0·NaN is NaN).
//
// Workgroup memory as it stands: 16·(TY·SA + TX·SB) = 12,672 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: no loop is unrolled, 1: those over registers, 2: all that are marked
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // of k and v: as q's, or 4 q8
const PAGED: u32 = 0u; // 1: k and v are pools of pages, which table has batch by batch
const OUT16: u32 = 0u; // 1: o takes 16-bit elements, put is then attention.wgsl's
const VEC: u32 = 0u; // 1: q, k and v (but of q8) have neighbours along D side by side, rows in multiples of 4
const BOTH: u32 = 0u; // 1: a mask and one of blocks, or a bias and one by distance, which else share a binding
const PAIRED: u32 = 1u; // 1: there may be softcap, mask, bias, slopes or dropout
const TX: u32 = 8u;
const TY: u32 = 16u;
const THREADS: u32 = 128u; // TX · TY
const RV: u32 = 2u; // vec4 of rows a thread
const KT: u32 = 8u; // keys of a tile a thread, even
const CV: u32 = 2u; // vec4 of columns a thread and turn
const VP: u32 = 1u; // turns over the columns
const QD: u32 = 4u; // vec4 of depths staged at once
const JJ: u32 = 2u; // keys a thread staged at once
const ER: u32 = 4u; // rows a thread written at once
const SA: u32 = 33u; // length of a row of a: 1 + max(4·RV·QD, JJ·TX·RV, TX·max(RV, ER))
const SB: u32 = 33u; // of b: 1 + max(KT·QD, JJ·TX·CV)
const S4: u32 = 16u; // RV · KT
const ROWS: u32 = 8u; // 4 · RV
const COLS: u32 = 2u; // CV · VP
const O4: u32 = 16u; // ROWS · COLS
const KEEP: u32 = 20u; // O4 + 2·RV, vec4 of state a thread
const QN: u32 = 4u; // vec4 of q that a thread stages: TY·ROWS·QD / THREADS, rounded up
const KN: u32 = 2u; // of k: TX·KT·QD / THREADS, rounded up
const VN: u32 = 2u; // of v: JJ·TX·TX·CV / THREADS, rounded up
const STEPS: u32 = 4u; // KT / JJ
const SPLIT: u32 = 1024u; // keys of a split

const LOWEST: f32 = -3.4028234e38; // the running maximum before any key
const LOG2E: f32 = 1.4426950408889634;
const LN2: f32 = 0.6931471805599453;
const HIDDEN: f32 = -1.0; // a weight is never negative
const HIDDEN_BITS: u32 = 0xbf800000u;
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // of 2^126
const MOST_BLOCKS: u32 = 64u; // that are looked at before a tile is computed

// Bits of Params.flags.
const GO_ON: u32 = 1u; // from state
const LEAVE: u32 = 2u; // state for the next piece
const WANT_LSE: u32 = 4u;
const HAS_KLEN: u32 = 8u;
const HAS_MASK: u32 = 16u;
const HAS_SOFTCAP: u32 = 32u;
const HAS_SLOPES: u32 = 64u;
const HAS_SINKS: u32 = 128u;
const HAS_BLOCKS: u32 = 256u;
const HAS_DROPOUT: u32 = 512u;
const HAS_BIAS: u32 = 1024u; // of either kind

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
    total: u32, // workgroups of the box: batches · heads · blocks
    blocks: u32, // query blocks
    heads: u32, // query heads in the box
    head0: u32, // number of the first
    group: u32, // query heads for each key head
    rows: u32, // queries in the box
    row0: u32, // number of the first
    keys: u32, // keys in the piece
    key0: u32, // number of the first, a multiple of BC
    dim: u32, // D
    vdim: u32, // Dv
    scale: f32,
    softcap: f32,
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen)
    hi: i32,
    flags: u32, // see above
    bias_type: u32, // 0: no bias, else 1 + its type
    out_type: u32, // type of o
    all_keys: u32, // keys of the call
    running: u32, // where in state what a piece leaves begins, in vec4
    unit: f32, // log2 e times softcap if there is one, else times scale
    pad0: u32,
    pad1: u32,
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
    sinks: array<vec4<f32>, 16>, // of up to 64 heads in units of log2, -Inf where there is none
    page: u32, // keys of a page
    pages: u32, // of a batch in the table
    table_at: u32, // where the first batch's begin
    page_bits: u32, // page is 2 to the power of that; 32 when it is none
}

@group(0) @binding(0) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<u32>;
@group(0) @binding(5) var<storage, read_write> o: array<u32>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;
@group(0) @binding(7) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> p: Params;
@group(0) @binding(9) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(10) var<storage, read> relative: array<u32>; // BOTH
@group(0) @binding(11) var<storage, read> table: array<u32>; // PAGED

// For the products with K and with V in turn, with maxima, sums and outputs between:
var<workgroup> a: array<array<vec4<f32>, SA>, TY>; // q [row][depth/4], p [key][row/4]
var<workgroup> b: array<array<vec4<f32>, SB>, TX>; // k [key][depth/4], v [key][column/4]

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

// put stores x as element i of o.
fn put(i: u32, x: f32) {
    o[i] = bitcast<u32>(x);
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

// load_q returns elements d to d+3 of the row that begins at element at, 0 beyond its
// end.
fn load_q(at: u32, d: u32) -> vec4<f32> {
    var x = vec4<f32>(0.0);
    if (VEC == 1u) { // static
        if (d < p.dim) {
            let i = at + d;
            if (IN == 0u) { // static
                x = bitcast<vec4<f32>>(q[i >> 2u]);
            }
            if (IN != 0u) { // static
                let lower = q[i >> 3u][(i >> 1u) & 3u];
                let upper = q[i >> 3u][((i >> 1u) & 3u) + 1u];
                x = vec4<f32>(decode(lower, 0u, IN), decode(lower, 1u, IN),
                    decode(upper, 0u, IN), decode(upper, 1u, IN));
            }
        }
    }
    if (VEC == 0u) { // static
        let i = at + d * p.q.d;
        if (d < p.dim) { x.x = scalar_q(i); }
        if (d + 1u < p.dim) { x.y = scalar_q(i + p.q.d); }
        if (d + 2u < p.dim) { x.z = scalar_q(i + 2u * p.q.d); }
        if (d + 3u < p.dim) { x.w = scalar_q(i + 3u * p.q.d); }
    }
    return x;
}

fn scalar_q(i: u32) -> f32 {
    let word = select(i >> 1u, i, IN == 0u);
    return decode(q[word >> 2u][word & 3u], i, IN);
}

// integers are the four in a word of q8.
fn integers(w: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(w << 24u), bitcast<i32>(w << 16u), bitcast<i32>(w << 8u), bitcast<i32>(w)) >> vec4<u32>(24u));
}

// page_of is which of a batch's pages has a key of the call.
fn page_of(key: u32) -> u32 {
    if (p.page_bits == 32u) {
        return key / p.page;
    }
    return key >> (p.page_bits & 31u);
}

// k_row is where the row of key j of the piece begins, in a head that begins at at; of a
// pool at is the head's place in its first page.
fn k_row(at: u32, batch: u32, j: u32) -> u32 {
    var row = at;
    if (PAGED == 0u) { // static
        row = row + j * p.k.s;
    }
    if (PAGED == 1u) { // static
        let key = p.key0 + j;
        let n = page_of(key);
        row = row + table[p.table_at + batch * p.pages + n] * p.k.b + (key - n * p.page) * p.k.s;
    }
    return row;
}

fn v_row(at: u32, batch: u32, j: u32) -> u32 {
    var row = at;
    if (PAGED == 0u) { // static
        row = row + j * p.v.s;
    }
    if (PAGED == 1u) { // static
        let key = p.key0 + j;
        let n = page_of(key);
        row = row + table[p.table_at + batch * p.pages + n] * p.v.b + (key - n * p.page) * p.v.s;
    }
    return row;
}

fn load_k(at: u32, d: u32) -> vec4<f32> {
    var x = vec4<f32>(0.0);
    if (KV == 4u) { // static
        if (d < p.dim) {
            let i = at + 1u + d / 4u;
            x = integers(k[i >> 2u][i & 3u]) * bitcast<f32>(k[at >> 2u][at & 3u]);
        }
    }
    if (KV != 4u) { // static
        if (VEC == 1u) { // static
            if (d < p.dim) {
                let i = at + d;
                if (KV == 0u) { // static
                    x = bitcast<vec4<f32>>(k[i >> 2u]);
                }
                if (KV != 0u) { // static
                    let lower = k[i >> 3u][(i >> 1u) & 3u];
                    let upper = k[i >> 3u][((i >> 1u) & 3u) + 1u];
                    x = vec4<f32>(decode(lower, 0u, KV), decode(lower, 1u, KV),
                        decode(upper, 0u, KV), decode(upper, 1u, KV));
                }
            }
        }
        if (VEC == 0u) { // static
            let i = at + d * p.k.d;
            if (d < p.dim) { x.x = scalar_k(i); }
            if (d + 1u < p.dim) { x.y = scalar_k(i + p.k.d); }
            if (d + 2u < p.dim) { x.z = scalar_k(i + 2u * p.k.d); }
            if (d + 3u < p.dim) { x.w = scalar_k(i + 3u * p.k.d); }
        }
    }
    return x;
}

fn scalar_k(i: u32) -> f32 {
    let word = select(i >> 1u, i, KV == 0u);
    return decode(k[word >> 2u][word & 3u], i, KV);
}

fn load_v(at: u32, d: u32) -> vec4<f32> {
    var x = vec4<f32>(0.0);
    if (KV == 4u) { // static
        if (d < p.vdim) {
            let i = at + 1u + d / 4u;
            x = integers(v[i >> 2u][i & 3u]) * bitcast<f32>(v[at >> 2u][at & 3u]);
        }
    }
    if (KV != 4u) { // static
        if (VEC == 1u) { // static
            if (d < p.vdim) {
                let i = at + d;
                if (KV == 0u) { // static
                    x = bitcast<vec4<f32>>(v[i >> 2u]);
                }
                if (KV != 0u) { // static
                    let lower = v[i >> 3u][(i >> 1u) & 3u];
                    let upper = v[i >> 3u][((i >> 1u) & 3u) + 1u];
                    x = vec4<f32>(decode(lower, 0u, KV), decode(lower, 1u, KV),
                        decode(upper, 0u, KV), decode(upper, 1u, KV));
                }
            }
        }
        if (VEC == 0u) { // static
            let i = at + d * p.v.d;
            if (d < p.vdim) { x.x = scalar_v(i); }
            if (d + 1u < p.vdim) { x.y = scalar_v(i + p.v.d); }
            if (d + 2u < p.vdim) { x.z = scalar_v(i + 2u * p.v.d); }
            if (d + 3u < p.vdim) { x.w = scalar_v(i + 3u * p.v.d); }
        }
    }
    return x;
}

fn scalar_v(i: u32) -> f32 {
    let word = select(i >> 1u, i, KV == 0u);
    return decode(v[word >> 2u][word & 3u], i, KV);
}

// Scores are those of four rows with one key, before their unit.
struct Scores {
    x: vec4<f32>,
    hidden: vec4<bool>,
}

// distances are how far four rows from row on (in the box) stand from key j (in the
// piece).
fn distances(row: u32, j: u32) -> vec4<f32> {
    let at = i32(p.row0 + row) + p.more.offset - i32(p.key0 + j);
    return vec4<f32>(abs(vec4<i32>(at) + vec4<i32>(0, 1, 2, 3)));
}

// Pairs are where four rows of masks and biases begin.
struct Pairs {
    mask: vec4<u32>,
    blocks: vec4<u32>,
    bias: vec4<u32>,
    relative: vec4<u32>,
}

fn pairs_of(batch: u32, head: u32, row: u32) -> Pairs {
    let rows = vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u);
    var r: Pairs;
    r.mask = vec4<u32>(p.mask.base + batch * p.mask.b + head * p.mask.h) + rows * vec4<u32>(p.mask.s);
    r.bias = vec4<u32>(p.bias.base + batch * p.bias.b + head * p.bias.h) + rows * vec4<u32>(p.bias.s);
    r.relative = vec4<u32>(p.relative.base + batch * p.relative.b + head * p.relative.h) + rows * vec4<u32>(p.relative.s);
    r.blocks = vec4<u32>(0u);
    if ((p.flags & HAS_BLOCKS) != 0u) {
        r.blocks = vec4<u32>(p.blocked.base + batch * p.blocked.b + head * p.blocked.h)
            + (rows + vec4<u32>(p.row0)) / vec4<u32>(p.more.block_q) * vec4<u32>(p.blocked.s);
    }
    return r;
}

// paired applies masks, biases and slopes to the scores of four rows from row on (in the
// box), which begin at pairs, with key j (in the piece). Slopes without a bias hide
// nothing, and are in the scores.
fn paired(given: Scores, pairs: Pairs, batch: u32, head: u32, row: u32, j: u32) -> Scores {
    var w = given;
    if ((p.flags & HAS_MASK) != 0u) {
        for (var r = 0u; r < 4u; r++) { // unroll deep
            if (!w.hidden[r]) {
                let i = pairs.mask[r] + j * p.mask.d;
                w.hidden[r] = ((mask[i >> 2u] >> ((i & 3u) * 8u)) & 0xffu) == 0u;
            }
        }
    }
    if ((p.flags & HAS_BLOCKS) != 0u) {
        let column = (p.key0 + j) / p.more.block_k * p.blocked.d;
        for (var r = 0u; r < 4u; r++) { // unroll deep
            if (!w.hidden[r]) {
                w.hidden[r] = block(pairs.blocks[r] + column) == 0u;
            }
        }
    }
    if ((p.flags & HAS_BIAS) != 0u) {
        let away = distances(row, j);
        for (var r = 0u; r < 4u; r++) { // unroll deep
            if (!w.hidden[r]) {
                var y = 0.0;
                if (p.bias_type != 0u) {
                    let x = load_bias(pairs.bias[r] + j * p.bias.d);
                    w.hidden[r] = bitcast<u32>(x) == 0xff800000u; // -Inf hides
                    y = bounded(x, MAX_BIAS);
                }
                if (p.more.relative_type != 0u) {
                    let x = load_relative(pairs.relative[r] + j * p.relative.d);
                    w.hidden[r] = w.hidden[r] || bitcast<u32>(x) == 0xff800000u;
                    y = bounded(y + bounded(x, MAX_RELATIVE), MAX_BIAS);
                }
                if ((p.flags & HAS_SLOPES) != 0u) {
                    y = bounded(fma(-slope_of(batch, head), away[r], y), MAX_BIAS);
                }
                w.x[r] = fma(w.x[r], p.unit, y * LOG2E);
            }
        }
    }
    return w;
}

// blocks_seen looks at the blocks of the mask that rows from r0 on (in the box) and the
// keys of a tile up to end meet: 0 when nobody sees any of them, 2 when all are seen,
// else 1, also when they are too many to be looked at.
fn blocks_seen(batch: u32, head: u32, r0: u32, tile: u32, end: u32) -> u32 {
    let q0 = (p.row0 + r0) / p.more.block_q;
    let nq = (p.row0 + min(r0 + TY * ROWS, p.rows) - 1u) / p.more.block_q - q0 + 1u;
    let k0 = tile / p.more.block_k;
    let nk = (min(tile + TX * KT, end) - 1u) / p.more.block_k - k0 + 1u;
    if (nq * nk > MOST_BLOCKS) {
        return 1u;
    }
    let at = p.blocked.base + batch * p.blocked.b + head * p.blocked.h;
    var some = 0u;
    var all = 1u;
    for (var n = 0u; n < nq * nk; n++) {
        let one = min(block(at + (q0 + n / nk) * p.blocked.s + (k0 + n % nk) * p.blocked.d), 1u);
        some = some | one;
        all = all & one;
    }
    return some + all;
}

// without_dropped are the weights of four rows from row on (in the box) with key j (in
// the piece), hidden where dropout takes them.
fn without_dropped(weights: vec4<f32>, batch: u32, head: u32, row: u32, j: u32) -> vec4<f32> {
    let n = p.more.row0 + row;
    let seed = vec2<u32>(p.more.seed0, p.more.seed1);
    let counter = vec4<u32>(n / 4u, p.more.key0 + j, p.more.head0 + head, p.more.batch0 + batch);
    // A counter has the words of four rows, which may be the last of these and the first
    // of the next ones.
    var x = philox(counter, seed);
    if ((n & 3u) != 0u) {
        let y = philox(counter + vec4<u32>(1u, 0u, 0u, 0u), seed);
        if ((n & 3u) == 1u) {
            x = vec4<u32>(x.y, x.z, x.w, y.x);
        } else if ((n & 3u) == 2u) {
            x = vec4<u32>(x.z, x.w, y.x, y.y);
        } else {
            x = vec4<u32>(x.w, y.x, y.y, y.z);
        }
    }
    return select(weights, vec4<f32>(HIDDEN), x < vec4<u32>(p.more.threshold));
}

fn add(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(w), x, sum);
}

// add_seen is sum + w·x, but sum where w is the marker of a hidden key.
fn add_seen(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return select(fma(vec4<f32>(w), x, sum), sum, bitcast<u32>(w) == HIDDEN_BITS);
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
    let tx = t % TX;
    let ty = t / TX;
    let r0 = (id % p.blocks) * (TY * ROWS);
    let head = (id / p.blocks) % p.heads;
    let batch = id / p.blocks / p.heads;
    let kv_head = (p.head0 + head) / p.group - p.head0 / p.group;
    let q_at = p.q.base + batch * p.q.b + head * p.q.h;
    let k_at = p.k.base + select(batch * p.k.b, 0u, PAGED == 1u) + kv_head * p.k.h;
    let v_at = p.v.base + select(batch * p.v.b, 0u, PAGED == 1u) + kv_head * p.v.h;
    let state_at = id * (KEEP * THREADS) + t;

    // The split's running maximum, this thread's part of its sum, and its output.
    var m: array<vec4<f32>, RV>;
    var l: array<vec4<f32>, RV>;
    var acc: array<vec4<f32>, O4>; // [row][column]
    for (var h = 0u; h < RV; h++) { // unroll
        m[h] = vec4<f32>(LOWEST);
        l[h] = vec4<f32>(0.0);
    }
    for (var i = 0u; i < O4; i++) { // unroll
        acc[i] = vec4<f32>(0.0);
    }
    if ((p.flags & GO_ON) != 0u) {
        let from_at = p.running + state_at;
        for (var i = 0u; i < O4; i++) { // unroll
            acc[i] = state[from_at + i * THREADS];
        }
        for (var h = 0u; h < RV; h++) { // unroll
            l[h] = state[from_at + (O4 + h) * THREADS];
            m[h] = state[from_at + (O4 + RV + h) * THREADS];
        }
    }

    // The keys that any row of the block sees, and those that all of them see.
    let i_first = i32(p.row0 + r0);
    let i_last = i32(p.row0 + min(r0 + TY * ROWS, p.rows)) - 1;
    var cap = i32(p.all_keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[batch / 4u][batch % 4u]);
    }
    let sees_from = max(i_first + p.lo, 0);
    let sees_to = min(i_last + p.hi, cap);
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
    // Of them, those in the piece.
    let begin = max(sees_from, i32(p.key0));
    let end = min(sees_to, i32(p.key0 + p.keys));

    // The split that the registers are of, and the last one of the piece.
    let tile_keys = i32(TX * KT);
    let split_keys = i32(SPLIT);
    let first_split = sees_from / split_keys;
    let from_split = max(min(i32(p.key0), sees_to) - 1, sees_from) / split_keys;
    var to_split = from_split;
    if (end > begin) {
        to_split = (end - 1) / split_keys;
    }
    let unit = select(p.unit, 1.0, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
    let paired_tiles = (p.flags & (HAS_MASK | HAS_BIAS | HAS_DROPOUT)) != 0u;

    for (var part = from_split; part <= to_split; part++) {
        let part_from = max(begin, part * split_keys);
        let part_to = min(end, (part + 1) * split_keys);
        for (var tile = (part_from / tile_keys) * tile_keys; tile < part_to; tile += tile_keys) {
            var mixed = false; // whether blocks of the mask hide a part of the tile
            if (PAIRED == 1u) { // static
                if ((p.flags & HAS_BLOCKS) != 0u) {
                    // On to the next tile of which anything is seen, in a loop of its own:
                    // a software driver goes through the rest of a loop that it continues.
                    var look = blocks_seen(batch, head, r0, u32(tile), u32(part_to));
                    while (look == 0u && tile + tile_keys < part_to) {
                        tile += tile_keys;
                        look = blocks_seen(batch, head, r0, u32(tile), u32(part_to));
                    }
                    if (look == 0u) {
                        break;
                    }
                    mixed = look == 1u;
                }
            }
            let j0 = u32(tile) - p.key0;
            let check = paired_tiles || mixed || tile < all_from || tile + tile_keys > all_to;

            var s: array<vec4<f32>, S4>; // [key][row/4]
            for (var i = 0u; i < S4; i++) { // unroll
                s[i] = vec4<f32>(0.0);
            }
            for (var d0 = 0u; d0 < p.dim; d0 += 4u * QD) {
                var qr: array<vec4<f32>, QN>;
                var kr: array<vec4<f32>, KN>;
                for (var n = 0u; n < QN; n++) { // unroll
                    let x = t + THREADS * n;
                    qr[n] = load_q(q_at + min(r0 + x / QD, p.rows - 1u) * p.q.s, d0 + 4u * (x % QD));
                }
                for (var n = 0u; n < KN; n++) { // unroll
                    let x = t + THREADS * n;
                    kr[n] = load_k(k_row(k_at, batch, min(j0 + x / QD, p.keys - 1u)), d0 + 4u * (x % QD));
                }
                workgroupBarrier();
                for (var n = 0u; n < QN; n++) { // unroll
                    let x = t + THREADS * n;
                    if (x < TY * ROWS * QD) {
                        a[x / (QD * ROWS)][x % (QD * ROWS)] = qr[n];
                    }
                }
                for (var n = 0u; n < KN; n++) { // unroll
                    let x = t + THREADS * n;
                    if (x < TX * KT * QD) {
                        let key = x / QD;
                        b[key % TX][(key / TX) * QD + x % QD] = kr[n];
                    }
                }
                workgroupBarrier();
                for (var d = 0u; d < QD; d++) { // unroll deep
                    // Four rows of four depths, turned: four depths of four rows.
                    var w: array<vec4<f32>, ROWS>; // [row/4][depth]
                    for (var h = 0u; h < RV; h++) { // unroll
                        let w0 = a[ty][(4u * h) * QD + d];
                        let w1 = a[ty][(4u * h + 1u) * QD + d];
                        let w2 = a[ty][(4u * h + 2u) * QD + d];
                        let w3 = a[ty][(4u * h + 3u) * QD + d];
                        w[4u * h] = vec4<f32>(w0.x, w1.x, w2.x, w3.x);
                        w[4u * h + 1u] = vec4<f32>(w0.y, w1.y, w2.y, w3.y);
                        w[4u * h + 2u] = vec4<f32>(w0.z, w1.z, w2.z, w3.z);
                        w[4u * h + 3u] = vec4<f32>(w0.w, w1.w, w2.w, w3.w);
                    }
                    for (var j = 0u; j < KT; j++) { // unroll
                        let x = b[tx][j * QD + d];
                        for (var h = 0u; h < RV; h++) { // unroll
                            s[j * RV + h] = add(x.w, w[4u * h + 3u], add(x.z, w[4u * h + 2u],
                                add(x.y, w[4u * h + 1u], add(x.x, w[4u * h], s[j * RV + h]))));
                        }
                    }
                }
            }

            if (PAIRED == 1u) { // static
                if ((p.flags & HAS_SOFTCAP) != 0u) {
                    for (var i = 0u; i < S4; i++) { // unroll
                        s[i] = tanh_acc(s[i] * p.scale / p.softcap);
                    }
                }
                if ((p.flags & (HAS_BIAS | HAS_SLOPES)) == HAS_SLOPES) {
                    let slope = vec4<f32>(slope_of(batch, head));
                    for (var h = 0u; h < RV; h++) { // unroll
                        for (var j = 0u; j < KT; j++) { // unroll
                            let away = distances(r0 + ty * ROWS + 4u * h, j0 + tx + TX * j);
                            s[j * RV + h] = fma(s[j * RV + h], vec4<f32>(p.unit), fma(-slope, away, vec4<f32>(0.0)) * LOG2E);
                        }
                    }
                }
            }

            // The largest score of each row; what is hidden is one bit each.
            var most: array<vec4<f32>, RV>;
            for (var h = 0u; h < RV; h++) { // unroll
                most[h] = vec4<f32>(LOWEST);
            }
            var hid: array<u32, 2>;
            if (check) {
                hid[0] = 0u;
                hid[1] = 0u;
                for (var h = 0u; h < RV; h++) { // unroll
                    let row = r0 + ty * ROWS + 4u * h;
                    let i = vec4<i32>(i32(p.row0 + row)) + vec4<i32>(0, 1, 2, 3);
                    let from_key = i + p.lo;
                    let to_key = min(i + p.hi, vec4<i32>(cap));
                    let pairs = pairs_of(batch, head, row);
                    for (var j = 0u; j < KT; j++) { // unroll
                        let key = vec4<i32>(tile + i32(tx + TX * j));
                        var w = Scores(s[j * RV + h], (key < from_key) | (key >= to_key));
                        if (PAIRED == 1u) { // static
                            w.hidden = w.hidden | (vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u) >= vec4<u32>(p.rows));
                            w = paired(w, pairs, batch, head, row, j0 + tx + TX * j);
                        }
                        s[j * RV + h] = w.x;
                        most[h] = max(most[h], select(w.x * unit, vec4<f32>(LOWEST), w.hidden));
                        let bits = select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), w.hidden);
                        hid[(j * RV + h) / 8u] |= (bits.x | bits.y | bits.z | bits.w) << (4u * ((j * RV + h) % 8u));
                    }
                }
            } else {
                for (var h = 0u; h < RV; h++) { // unroll
                    for (var j = 0u; j < KT; j++) { // unroll
                        most[h] = max(most[h], s[j * RV + h] * unit);
                    }
                }
            }

            // The rows' maxima over all threads.
            workgroupBarrier();
            for (var h = 0u; h < RV; h++) { // unroll
                a[ty][tx * RV + h] = most[h];
            }
            workgroupBarrier();
            var rescale: array<vec4<f32>, RV>;
            for (var h = 0u; h < RV; h++) { // unroll
                var top = m[h];
                for (var x = 0u; x < TX; x++) { // unroll deep
                    top = max(top, a[ty][x * RV + h]);
                }
                rescale[h] = exp2_down(m[h] - top);
                m[h] = top;
            }

            // Weights, and their sum over the thread's keys.
            for (var h = 0u; h < RV; h++) { // unroll
                var sum = vec4<f32>(0.0);
                for (var j = 0u; j < KT; j++) { // unroll
                    var e = exp2_down(fma(s[j * RV + h], vec4<f32>(unit), -m[h]));
                    if (check) {
                        let bits = hid[(j * RV + h) / 8u] >> (4u * ((j * RV + h) % 8u));
                        let hidden = (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
                        sum = sum + select(e, vec4<f32>(0.0), hidden);
                        e = select(e, vec4<f32>(HIDDEN), hidden);
                    } else {
                        sum = sum + e;
                    }
                    s[j * RV + h] = e;
                }
                l[h] = fma(l[h], rescale[h], sum);
            }
            for (var r = 0u; r < ROWS; r++) { // unroll
                for (var i = 0u; i < COLS; i++) { // unroll
                    acc[r * COLS + i] = acc[r * COLS + i] * rescale[r / 4u][r % 4u];
                }
            }

            for (var c = 0u; c < STEPS; c++) {
                for (var turn = 0u; turn < VP; turn++) { // unroll
                    let j1 = j0 + c * (JJ * TX);
                    var vr: array<vec4<f32>, VN>;
                    for (var n = 0u; n < VN; n++) { // unroll
                        let x = t + THREADS * n;
                        let column = 4u * (turn * (TX * CV) + x % (TX * CV));
                        vr[n] = load_v(v_row(v_at, batch, min(j1 + x / (TX * CV), p.keys - 1u)), column);
                    }
                    workgroupBarrier();
                    if (turn == 0u) {
                        for (var y = 0u; y < STEPS; y++) { // unroll
                            if (c == y) {
                                for (var j = 0u; j < JJ; j++) { // unroll
                                    for (var h = 0u; h < RV; h++) { // unroll
                                        a[ty][(j * TX + tx) * RV + h] = s[(y * JJ + j) * RV + h];
                                    }
                                }
                            }
                        }
                        if (PAIRED == 1u) { // static
                            if ((p.flags & HAS_DROPOUT) != 0u) {
                                for (var x = 0u; x < JJ * RV; x++) {
                                    let at = (x / RV * TX + tx) * RV + x % RV;
                                    a[ty][at] = without_dropped(a[ty][at], batch, head,
                                        r0 + ty * ROWS + 4u * (x % RV), j1 + x / RV * TX + tx);
                                }
                            }
                        }
                    }
                    for (var n = 0u; n < VN; n++) { // unroll
                        let x = t + THREADS * n;
                        if (x < JJ * TX * TX * CV) {
                            let quad = x % (TX * CV);
                            b[quad % TX][(x / (TX * CV)) * CV + quad / TX] = vr[n];
                        }
                    }
                    workgroupBarrier();
                    if (check) {
                        for (var y = 0u; y < JJ * TX; y++) { // unroll deep
                            var w: array<vec4<f32>, RV>;
                            for (var h = 0u; h < RV; h++) { // unroll
                                w[h] = a[ty][y * RV + h];
                            }
                            for (var i = 0u; i < CV; i++) { // unroll
                                let x = b[tx][y * CV + i];
                                for (var r = 0u; r < ROWS; r++) { // unroll
                                    acc[r * COLS + turn * CV + i] = add_seen(w[r / 4u][r % 4u], x, acc[r * COLS + turn * CV + i]);
                                }
                            }
                        }
                    } else {
                        for (var y = 0u; y < JJ * TX; y++) { // unroll deep
                            var w: array<vec4<f32>, RV>;
                            for (var h = 0u; h < RV; h++) { // unroll
                                w[h] = a[ty][y * RV + h];
                            }
                            for (var i = 0u; i < CV; i++) { // unroll
                                let x = b[tx][y * CV + i];
                                for (var r = 0u; r < ROWS; r++) { // unroll
                                    acc[r * COLS + turn * CV + i] = add(w[r / 4u][r % 4u], x, acc[r * COLS + turn * CV + i]);
                                }
                            }
                        }
                    }
                }
            }
        }

        // The end of a split, or of the piece: what the splits before had comes to it,
        // unless a next piece goes on with this one.
        let done = part < to_split || (p.flags & LEAVE) == 0u;
        if (done && part > first_split) {
            let s0 = part * split_keys;
            var before: array<vec4<f32>, RV>; // factors of the splits before,
            var mine: array<vec4<f32>, RV>; // of this one,
            var keep: array<vec4<bool>, RV>; // rows that this one leaves as they were,
            var fresh: array<vec4<bool>, RV>; // and rows of which it is the first
            for (var h = 0u; h < RV; h++) { // unroll
                let i = vec4<i32>(i32(p.row0 + r0 + ty * ROWS + 4u * h)) + vec4<i32>(0, 1, 2, 3);
                let from_key = max(i + p.lo, vec4<i32>(0));
                keep[h] = (from_key >= vec4<i32>(s0 + split_keys)) | (min(i + p.hi, vec4<i32>(cap)) <= vec4<i32>(s0));
                fresh[h] = from_key >= vec4<i32>(s0);
                let l_old = state[state_at + (O4 + h) * THREADS];
                let m_old = state[state_at + (O4 + RV + h) * THREADS];
                let top = max(m_old, m[h]);
                before[h] = exp2_down(m_old - top);
                mine[h] = exp2_down(m[h] - top);
                let sum = fma(l[h], mine[h], l_old * before[h]);
                l[h] = select(select(sum, l[h], fresh[h]), l_old, keep[h]);
                m[h] = select(select(top, m[h], fresh[h]), m_old, keep[h]);
            }
            for (var r = 0u; r < ROWS; r++) { // unroll
                for (var i = 0u; i < COLS; i++) { // unroll
                    let x = acc[r * COLS + i];
                    let x_old = state[state_at + (r * COLS + i) * THREADS];
                    let sum = fma(x, vec4<f32>(mine[r / 4u][r % 4u]), x_old * before[r / 4u][r % 4u]);
                    acc[r * COLS + i] = select(select(sum, x, fresh[r / 4u][r % 4u]), x_old, keep[r / 4u][r % 4u]);
                }
            }
        }
        if (part < to_split) {
            for (var i = 0u; i < O4; i++) { // unroll
                state[state_at + i * THREADS] = acc[i];
                acc[i] = vec4<f32>(0.0);
            }
            for (var h = 0u; h < RV; h++) { // unroll
                state[state_at + (O4 + h) * THREADS] = l[h];
                state[state_at + (O4 + RV + h) * THREADS] = m[h];
                l[h] = vec4<f32>(0.0);
                m[h] = vec4<f32>(LOWEST);
            }
        }
    }

    if ((p.flags & LEAVE) != 0u) {
        let to_at = p.running + state_at;
        for (var i = 0u; i < O4; i++) { // unroll
            state[to_at + i * THREADS] = acc[i];
        }
        for (var h = 0u; h < RV; h++) { // unroll
            state[to_at + (O4 + h) * THREADS] = l[h];
            state[to_at + (O4 + RV + h) * THREADS] = m[h];
        }
        return;
    }

    // The sums of all parts, in a fixed order.
    workgroupBarrier();
    for (var h = 0u; h < RV; h++) { // unroll
        a[ty][tx * RV + h] = l[h];
    }
    workgroupBarrier();
    var inverse: array<vec4<f32>, RV>;
    var empty: array<vec4<bool>, RV>;
    for (var h = 0u; h < RV; h++) { // unroll
        var sum = vec4<f32>(0.0);
        for (var x = 0u; x < TX; x++) { // unroll deep
            sum = sum + a[ty][x * RV + h];
        }
        var scale = vec4<f32>(p.more.keep);
        if ((p.flags & HAS_SINKS) != 0u) {
            let sink = p.sinks[head / 4u][head % 4u];
            if (bitcast<u32>(sink) != 0xff800000u) { // -Inf
                let top = max(m[h], vec4<f32>(sink));
                let before = exp2_down(m[h] - top);
                sum = fma(sum, before, exp2_down(vec4<f32>(sink) - top));
                scale = scale * before;
                m[h] = top;
            }
        }
        empty[h] = bitcast<vec4<u32>>(sum) == vec4<u32>(0u);
        let safe = select(sum, vec4<f32>(1.0), empty[h]);
        inverse[h] = vec4<f32>(1.0) / safe * scale;
        if (tx == 0u && (p.flags & WANT_LSE) != 0u) {
            for (var r = 0u; r < 4u; r++) { // unroll
                let row = r0 + ty * ROWS + 4u * h + r;
                if (row < p.rows) {
                    lse[p.lse.base + batch * p.lse.b + head * p.lse.h + row * p.lse.s] =
                        select(fma(m[h][r], LN2, log_acc(safe[r])), bitcast<f32>(0xff800000u), empty[h][r]);
                }
            }
        }
    }

    // The output goes through a, ER rows of a thread at once, so that neighbouring
    // threads write neighbouring columns.
    let o_at = p.o.base + batch * p.o.b + head * p.o.h;
    for (var i = 0u; i < COLS; i++) { // unroll
        for (var y = 0u; y < ROWS / ER; y++) { // unroll
            workgroupBarrier();
            for (var e = 0u; e < ER; e++) { // unroll
                a[ty][e * TX + tx] = select(
                    acc[(y * ER + e) * COLS + i] * inverse[(y * ER + e) / 4u][(y * ER + e) % 4u],
                    vec4<f32>(0.0), empty[(y * ER + e) / 4u][(y * ER + e) % 4u]);
            }
            workgroupBarrier();
            for (var x = t; x < 4u * ER * THREADS; x += THREADS) {
                let c = x % (4u * TX);
                let e = (x / (4u * TX)) % ER;
                let row = r0 + (x / (4u * TX * ER)) * ROWS + y * ER + e;
                if (row < p.rows && 4u * TX * i + c < p.vdim) {
                    put(o_at + row * p.o.s + (4u * TX * i + c) * p.o.d, a[x / (4u * TX * ER)][e * TX + c / 4u][c % 4u]);
                }
            }
        }
    }
}
