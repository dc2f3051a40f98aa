// Fused attention with the online softmax (Milakov & Gimelshein 2018, Dao et al.
// 2022), for one block of 32 query rows of one head a workgroup:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       o = Σ p_j·v_j / Σ p_j            lse = m + log Σ p_j
//
// in which a sink takes part in the sums Σ p_j alone, and dropout in Σ p_j·v_j alone.
// Key tiles of 32 lie at multiples of 32; tiles that no row of the block sees are
// passed over. A thread (tx, ty) of 8 x 8 has the rows 4·ty+r and
//
//                 keys 4·tx+c               columns 32·i + 4·tx+c
//            ┌──────┬──────┬─ 8 ─┐        ┌──────┬─ 8 ─┐
//     rows   │ 4x4  │      │     │        │ 4x4  │     │   · DVB blocks of 32
//     4·ty+r ├──────┼ S,P  ┼     │        ├──────┼ O   │
//            └──────┴──────┴─────┘        └──────┴─────┘
//
// in registers: S from chunks of 32 depths of Q and K, O from the tile of P and
// chunks of 32 columns of V. Each thread keeps its own part of the row sum; the
// parts meet at the end.
//
// A call may come in pieces along the keys: unless it is the last, a piece leaves
// (o, l, m) as they are in state, and the next one goes on from there, so that the
// result does not depend on how the keys were cut, to the bit. Nor does it depend
// on where in its block a row lies: prefill and decode give the same bits.
//
// A row of q8 is words, its scale and then four integers in each.
//
// What is hidden never takes part: its score is not looked at, and its weight is
// the marker HIDDEN, for which the product with V is passed over (0·NaN is NaN).
//
// Workgroup memory: qs 4,608 + kv 4,608 + ps 4,608 + part 1,024 = 14,848 bytes.

// Rewritten for each variant:
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // of k and v: as q's, or 4 q8
const PAGED: u32 = 0u; // 1: k and v are pools of pages, which table has batch by batch
const BOTH: u32 = 0u; // 1: a mask and one of blocks, or a bias and one by distance, which else share a binding
const DVB: u32 = 2u; // blocks of 32 output columns
const ACC: u32 = 8u; // 4 · DVB

const LOWEST: f32 = -3.4028234e38; // the running maximum before any key
const LOG2E: f32 = 1.4426950408889634;
const HIDDEN: f32 = -1.0; // a weight is never negative
const HIDDEN_BITS: u32 = 0xbf800000u;
const MOST_BLOCKS: u32 = 64u; // that are looked at before a tile is computed
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // of 2^126

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
    key0: u32, // number of the first, a multiple of 32
    dim: u32, // D
    vdim: u32, // Dv
    scale: f32,
    softcap: f32,
    lo: i32, // row i sees key j when i + lo <= j < min(i + hi, klen)
    hi: i32,
    flags: u32, // see below
    bias_type: u32, // 0: no bias, else 1 + its type
    out_type: u32, // type of o
    pad0: u32,
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
    sinks: array<vec4<f32>, 16>, // of up to 64 heads, -Inf where there is none
    page: u32, // keys of a page
    pages: u32, // of a batch in the table
    table_at: u32, // where the first batch's begin
    page_bits: u32, // page is 2 to the power of that; 32 when it is none
}

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<u32>;
@group(0) @binding(2) var<storage, read> v: array<u32>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<u32>;
@group(0) @binding(5) var<storage, read_write> o: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;
@group(0) @binding(7) var<storage, read_write> state: array<f32>;
@group(0) @binding(8) var<uniform> p: Params;
@group(0) @binding(9) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(10) var<storage, read> relative: array<u32>; // BOTH
@group(0) @binding(11) var<storage, read> table: array<u32>; // PAGED

// Rows of 8 vec4 are padded to 9, which keeps lanes on different banks.
var<workgroup> qs: array<vec4<f32>, 288>; // [row][depth/4]
var<workgroup> kv: array<vec4<f32>, 288>; // K as [depth][key/4], V as [key][column/4]
var<workgroup> ps: array<vec4<f32>, 288>; // [row][key/4]
var<workgroup> part: array<f32, 256>; // [tx][row]: maxima, and sums at the end

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

fn load_q(i: u32) -> f32 {
    return decode(q[select(i >> 1u, i, IN == 0u)], i, IN);
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

// load_k returns element d of the row that begins at at.
fn load_k(at: u32, d: u32) -> f32 {
    if (KV == 4u) {
        return bitcast<f32>(k[at]) * integer(k[at + 1u + d / 4u], d);
    }
    let i = at + d * p.k.d;
    return decode(k[select(i >> 1u, i, KV == 0u)], i, KV);
}

fn load_v(at: u32, d: u32) -> f32 {
    if (KV == 4u) {
        return bitcast<f32>(v[at]) * integer(v[at + 1u + d / 4u], d);
    }
    let i = at + d * p.v.d;
    return decode(v[select(i >> 1u, i, KV == 0u)], i, KV);
}

// integer is number d of a row of q8, in the word that holds it.
fn integer(w: u32, d: u32) -> f32 {
    return f32(bitcast<i32>(w << (24u - 8u * (d & 3u))) >> 24u);
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

// stage_q puts depths from d0 of the block's rows into qs, zeros beyond the end.
fn stage_q(t: u32, at: u32, r0: u32, d0: u32) {
    let quad = t % 8u;
    for (var i = 0u; i < 4u; i++) {
        let row = t / 8u + 8u * i;
        var x = vec4<f32>(0.0);
        if (r0 + row < p.rows) {
            let start = at + (r0 + row) * p.q.s;
            let d = d0 + 4u * quad;
            if (d < p.dim) { x.x = load_q(start + d * p.q.d); }
            if (d + 1u < p.dim) { x.y = load_q(start + (d + 1u) * p.q.d); }
            if (d + 2u < p.dim) { x.z = load_q(start + (d + 2u) * p.q.d); }
            if (d + 3u < p.dim) { x.w = load_q(start + (d + 3u) * p.q.d); }
        }
        qs[row * 9u + quad] = x;
    }
}

// stage_k puts depths from d0 of the tile's keys into kv, transposed; j0 counts
// from the piece's first key.
fn stage_k(t: u32, at: u32, b: u32, j0: u32, d0: u32) {
    let depth = t % 32u;
    let d = d0 + depth;
    for (var i = 0u; i < 4u; i++) {
        let quad = t / 32u + 2u * i;
        let j = j0 + 4u * quad;
        var x = vec4<f32>(0.0);
        if (d < p.dim) {
            if (j < p.keys) { x.x = load_k(k_row(at, b, j), d); }
            if (j + 1u < p.keys) { x.y = load_k(k_row(at, b, j + 1u), d); }
            if (j + 2u < p.keys) { x.z = load_k(k_row(at, b, j + 2u), d); }
            if (j + 3u < p.keys) { x.w = load_k(k_row(at, b, j + 3u), d); }
        }
        kv[depth * 9u + quad] = x;
    }
}

// stage_v puts columns from c0 of the tile's values into kv.
fn stage_v(t: u32, at: u32, b: u32, j0: u32, c0: u32) {
    let quad = t % 8u;
    for (var i = 0u; i < 4u; i++) {
        let key = t / 8u + 8u * i;
        var x = vec4<f32>(0.0);
        if (j0 + key < p.keys) {
            let start = v_row(at, b, j0 + key);
            let c = c0 + 4u * quad;
            if (c < p.vdim) { x.x = load_v(start, c); }
            if (c + 1u < p.vdim) { x.y = load_v(start, c + 1u); }
            if (c + 2u < p.vdim) { x.z = load_v(start, c + 2u); }
            if (c + 3u < p.vdim) { x.w = load_v(start, c + 3u); }
        }
        kv[key * 9u + quad] = x;
    }
}

// score turns dot products of row (counted in the box) with keys j..j+3 (counted
// in the piece) into scores; hidden ones are LOWEST, seen says which are not.
struct Scores {
    s: vec4<f32>,
    seen: vec4<bool>,
}

fn score(dots: vec4<f32>, b: u32, h: u32, row: u32, j: u32, cap: i32, check: bool) -> Scores {
    var r: Scores;
    r.s = dots * p.scale;
    r.seen = vec4<bool>(true);
    if ((p.flags & HAS_SOFTCAP) != 0u) {
        r.s = p.softcap * tanh_acc(r.s / p.softcap);
    }
    if (check) {
        let i = i32(p.row0 + row);
        let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, 1, 2, 3);
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        if (row >= p.rows) {
            r.seen = vec4<bool>(false);
        }
        if ((p.flags & HAS_MASK) != 0u) {
            let at = p.mask.base + b * p.mask.b + h * p.mask.h + row * p.mask.s;
            for (var c = 0u; c < 4u; c++) {
                if (r.seen[c]) {
                    let x = at + (j + c) * p.mask.d;
                    r.seen[c] = ((mask[x >> 2u] >> ((x & 3u) * 8u)) & 0xffu) != 0u;
                }
            }
        }
        if ((p.flags & HAS_BLOCKS) != 0u) {
            let at = p.blocked.base + b * p.blocked.b + h * p.blocked.h + (p.row0 + row) / p.more.block_q * p.blocked.s;
            for (var c = 0u; c < 4u; c++) {
                if (r.seen[c]) {
                    r.seen[c] = block(at + (p.key0 + j + c) / p.more.block_k * p.blocked.d) != 0u;
                }
            }
        }
        if ((p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u) {
            for (var c = 0u; c < 4u; c++) {
                if (r.seen[c]) {
                    var y = 0.0;
                    if (p.bias_type != 0u) {
                        let x = load_bias(p.bias.base + b * p.bias.b + h * p.bias.h + row * p.bias.s + (j + c) * p.bias.d);
                        r.seen[c] = bitcast<u32>(x) != 0xff800000u; // -Inf hides
                        y = bounded(x, MAX_BIAS);
                    }
                    if (p.more.relative_type != 0u) {
                        let x = load_relative(p.relative.base + b * p.relative.b + h * p.relative.h + row * p.relative.s + (j + c) * p.relative.d);
                        r.seen[c] = r.seen[c] && bitcast<u32>(x) != 0xff800000u;
                        y = bounded(y + bounded(x, MAX_RELATIVE), MAX_BIAS);
                    }
                    if ((p.flags & HAS_SLOPES) != 0u) {
                        let away = abs(i + p.more.offset - i32(p.key0 + j + c));
                        y = bounded(fma(-slope_of(b, h), f32(away), y), MAX_BIAS);
                    }
                    r.s[c] = r.s[c] + y;
                }
            }
        }
        r.s = select(vec4<f32>(LOWEST), r.s, r.seen);
    }
    return r;
}

// tile_seen reports whether any row of the block from row r0 on (in the box) sees any
// block of keys that tile meets; true too when they are too many to be looked at.
fn tile_seen(b: u32, h: u32, r0: u32, tile: u32, end: u32) -> bool {
    let q0 = (p.row0 + r0) / p.more.block_q;
    let nq = (p.row0 + min(r0 + 32u, p.rows) - 1u) / p.more.block_q - q0 + 1u;
    let k0 = tile / p.more.block_k;
    let nk = (min(tile + 32u, end) - 1u) / p.more.block_k - k0 + 1u;
    if (nq * nk > MOST_BLOCKS) {
        return true;
    }
    let at = p.blocked.base + b * p.blocked.b + h * p.blocked.h;
    var any = 0u;
    for (var n = 0u; n < nq * nk; n++) {
        any = any | block(at + (q0 + n / nk) * p.blocked.s + (k0 + n % nk) * p.blocked.d);
    }
    return any != 0u;
}

fn largest(s: vec4<f32>) -> f32 {
    return max(max(s.x, s.y), max(s.z, s.w));
}

fn add(w: f32, v: vec4<f32>, acc: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(w), v, acc);
}

// add_seen is acc + w·v, but acc where w is the marker of a hidden key.
fn add_seen(w: f32, v: vec4<f32>, acc: vec4<f32>) -> vec4<f32> {
    return select(fma(vec4<f32>(w), v, acc), acc, bitcast<u32>(w) == HIDDEN_BITS);
}

@compute @workgroup_size(8, 8)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) t: u32,
) {
    let id = p.first + group.y * groups.x + group.x;
    if (id >= p.total) {
        return;
    }
    let tx = t % 8u;
    let ty = t / 8u;
    let r0 = (id % p.blocks) * 32u;
    let h = (id / p.blocks) % p.heads;
    let b = id / p.blocks / p.heads;
    let kh = (p.head0 + h) / p.group - p.head0 / p.group;
    let q_at = p.q.base + b * p.q.b + h * p.q.h;
    let k_at = p.k.base + select(b * p.k.b, 0u, PAGED == 1u) + kh * p.k.h;
    let v_at = p.v.base + select(b * p.v.b, 0u, PAGED == 1u) + kh * p.v.h;

    // The running maximum, this thread's part of the sum, and the output.
    var m = vec4<f32>(LOWEST);
    var l = vec4<f32>(0.0);
    var acc: array<vec4<f32>, ACC>; // [block][row]
    let width = DVB * 32u + 16u; // of a row's state: o, 8 parts of l, m
    let state_at = ((b * p.heads + h) * p.rows + r0 + 4u * ty) * width;
    for (var i = 0u; i < ACC; i++) {
        acc[i] = vec4<f32>(0.0);
    }
    if ((p.flags & GO_ON) != 0u) {
        for (var r = 0u; r < 4u; r++) {
            if (r0 + 4u * ty + r < p.rows) {
                let at = state_at + r * width;
                for (var i = 0u; i < DVB; i++) {
                    let c = at + 32u * i + 4u * tx;
                    acc[4u * i + r] = vec4<f32>(state[c], state[c + 1u], state[c + 2u], state[c + 3u]);
                }
                l[r] = state[at + 32u * DVB + tx];
                m[r] = state[at + 32u * DVB + 8u];
            }
        }
    }

    // The keys that any row of the block sees, and those that all of them see.
    let i_first = i32(p.row0 + r0);
    let i_last = i32(p.row0 + min(r0 + 32u, p.rows)) - 1;
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[b / 4u][b % 4u]);
    }
    let begin = max(i_first + p.lo, i32(p.key0));
    let end = min(i_last + p.hi, cap);
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);

    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;

    for (var tile = (begin / 32) * 32; tile < end; tile += 32) {
        if ((p.flags & HAS_BLOCKS) != 0u) {
            // In a loop of its own: a software driver goes through the rest of one that
            // it continues.
            while (tile < end && !tile_seen(b, h, r0, u32(tile), u32(end))) {
                tile += 32;
            }
            if (tile >= end) {
                break;
            }
        }
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + 32 > all_to;

        var s: array<vec4<f32>, 4>; // of the thread's rows
        for (var r = 0u; r < 4u; r++) {
            s[r] = vec4<f32>(0.0);
        }
        for (var d0 = 0u; d0 < p.dim; d0 += 32u) {
            workgroupBarrier();
            stage_q(t, q_at, r0, d0);
            stage_k(t, k_at, b, j0, d0);
            workgroupBarrier();
            for (var x = 0u; x < 8u; x++) {
                let b0 = kv[(4u * x) * 9u + tx];
                let b1 = kv[(4u * x + 1u) * 9u + tx];
                let b2 = kv[(4u * x + 2u) * 9u + tx];
                let b3 = kv[(4u * x + 3u) * 9u + tx];
                for (var r = 0u; r < 4u; r++) {
                    let a = qs[(4u * ty + r) * 9u + x];
                    s[r] = add(a.w, b3, add(a.z, b2, add(a.y, b1, add(a.x, b0, s[r]))));
                }
            }
        }

        var w: array<Scores, 4>;
        for (var r = 0u; r < 4u; r++) {
            w[r] = score(s[r], b, h, r0 + 4u * ty + r, j0 + 4u * tx, cap, check);
            part[tx * 32u + 4u * ty + r] = largest(w[r].s);
        }
        workgroupBarrier();
        var top = m;
        for (var x = 0u; x < 8u; x++) {
            let at = x * 32u + 4u * ty;
            top = max(top, vec4<f32>(part[at], part[at + 1u], part[at + 2u], part[at + 3u]));
        }
        let rescale = exp2_acc((m - top) * LOG2E);
        m = top;

        var sums = vec4<f32>(0.0);
        for (var r = 0u; r < 4u; r++) {
            let e = exp2_acc((w[r].s - vec4<f32>(m[r])) * LOG2E);
            sums[r] = dot(select(vec4<f32>(0.0), e, w[r].seen), vec4<f32>(1.0));
            ps[(4u * ty + r) * 9u + tx] = select(vec4<f32>(HIDDEN), e, w[r].seen);
            if ((p.flags & HAS_DROPOUT) != 0u) {
                for (var c = 0u; c < 4u; c++) {
                    if (dropped(b, h, r0 + 4u * ty + r, j0 + 4u * tx + c)) {
                        ps[(4u * ty + r) * 9u + tx][c] = HIDDEN;
                    }
                }
            }
        }
        l = fma(l, rescale, sums);

        for (var i = 0u; i < DVB; i++) {
            workgroupBarrier();
            stage_v(t, v_at, b, j0, 32u * i);
            workgroupBarrier();
            for (var r = 0u; r < 4u; r++) {
                acc[4u * i + r] = acc[4u * i + r] * rescale[r];
            }
            for (var x = 0u; x < 8u; x++) {
                let b0 = kv[(4u * x) * 9u + tx];
                let b1 = kv[(4u * x + 1u) * 9u + tx];
                let b2 = kv[(4u * x + 2u) * 9u + tx];
                let b3 = kv[(4u * x + 3u) * 9u + tx];
                for (var r = 0u; r < 4u; r++) {
                    let a = ps[(4u * ty + r) * 9u + x];
                    let sum = acc[4u * i + r];
                    if (check) {
                        acc[4u * i + r] = add_seen(a.w, b3, add_seen(a.z, b2, add_seen(a.y, b1, add_seen(a.x, b0, sum))));
                    } else {
                        acc[4u * i + r] = add(a.w, b3, add(a.z, b2, add(a.y, b1, add(a.x, b0, sum))));
                    }
                }
            }
        }
    }

    if ((p.flags & LEAVE) != 0u) {
        for (var r = 0u; r < 4u; r++) {
            if (r0 + 4u * ty + r < p.rows) {
                let at = state_at + r * width;
                for (var i = 0u; i < DVB; i++) {
                    let c = at + 32u * i + 4u * tx;
                    let x = acc[4u * i + r];
                    state[c] = x.x;
                    state[c + 1u] = x.y;
                    state[c + 2u] = x.z;
                    state[c + 3u] = x.w;
                }
                state[at + 32u * DVB + tx] = l[r];
                if (tx == 0u) {
                    state[at + 32u * DVB + 8u] = m[r];
                }
            }
        }
        return;
    }

    // The sums of all parts, in a fixed order.
    workgroupBarrier();
    part[tx * 32u + 4u * ty] = l.x;
    part[tx * 32u + 4u * ty + 1u] = l.y;
    part[tx * 32u + 4u * ty + 2u] = l.z;
    part[tx * 32u + 4u * ty + 3u] = l.w;
    workgroupBarrier();
    var sum = vec4<f32>(0.0);
    for (var x = 0u; x < 8u; x++) {
        let at = x * 32u + 4u * ty;
        sum = sum + vec4<f32>(part[at], part[at + 1u], part[at + 2u], part[at + 3u]);
    }
    // The sink joins the sum, which then is by the larger one of it and the maximum.
    var scale = vec4<f32>(p.more.keep);
    if ((p.flags & HAS_SINKS) != 0u) {
        let sink = p.sinks[h / 4u][h % 4u];
        if (bitcast<u32>(sink) != 0xff800000u) {
            let top = max(m, vec4<f32>(sink));
            let before = exp2_acc((m - top) * LOG2E);
            sum = fma(sum, before, exp2_acc((vec4<f32>(sink) - top) * LOG2E));
            scale = scale * before;
            m = top;
        }
    }
    let empty = bitcast<vec4<u32>>(sum) == vec4<u32>(0u);
    let safe = select(sum, vec4<f32>(1.0), empty);
    let inverse = select(vec4<f32>(1.0) / safe * scale, vec4<f32>(0.0), empty);
    if (tx == 0u && (p.flags & WANT_LSE) != 0u) {
        for (var r = 0u; r < 4u; r++) {
            let row = r0 + 4u * ty + r;
            if (row < p.rows) {
                lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s] =
                    select(m[r] + log_acc(safe[r]), bitcast<f32>(0xff800000u), empty[r]);
            }
        }
    }

    // The output goes through ps, so that neighbouring threads write neighbouring
    // columns.
    for (var i = 0u; i < DVB; i++) {
        workgroupBarrier();
        let none = vec4<f32>(0.0);
        ps[(4u * ty) * 9u + tx] = select(acc[4u * i] * inverse.x, none, empty.x);
        ps[(4u * ty + 1u) * 9u + tx] = select(acc[4u * i + 1u] * inverse.y, none, empty.y);
        ps[(4u * ty + 2u) * 9u + tx] = select(acc[4u * i + 2u] * inverse.z, none, empty.z);
        ps[(4u * ty + 3u) * 9u + tx] = select(acc[4u * i + 3u] * inverse.w, none, empty.w);
        workgroupBarrier();
        for (var x = t; x < 1024u; x += 64u) {
            let row = x / 32u;
            let c = x % 32u;
            if (r0 + row < p.rows && 32u * i + c < p.vdim) {
                let at = p.o.base + b * p.o.b + h * p.o.h + (r0 + row) * p.o.s + (32u * i + c) * p.o.d;
                put(at, ps[row * 9u + c / 4u][c % 4u]);
            }
        }
    }
}
