// Decoding: few query rows over many keys. One workgroup takes one split of the keys,
// SPLIT of them from a multiple of SPLIT on, for up to ROWS query rows that read the
// same key head, and leaves in state what splitmerge.wgsl makes the result of:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       O = Σ p_j·v_j       l_c = Σ p_j over j ≡ c mod TX
//
// with scores, m and the exponential in units of log 2. Over the plain kernel
// (attention.wgsl) it adds: all query heads of a group in one workgroup, so that K and V
// are read once; 16 bytes a load, of neighbours by neighbours; the loads of the next
// chunk on their way while this one is computed; and 16-bit elements and integers that
// stay so in workgroup memory and are converted in registers.
//
// A row of q8 is words, its scale and then four integers in each. What takes part is
// scale·integer, rounded, so that the bits are those of such numbers in float32.
//
// Key tiles of BC lie at multiples of BC. A tile is passed over when no row of the
// workgroup sees any of it, and checked key by key unless all rows see all of it.
// A tile goes through workgroup memory in chunks of at most 8 KiB:
//
//               GRAN granules of 16 bytes            JC keys, all columns
//            ┌──────────────────────────┐           ┌──────────────────┐
//     BC     │ K as it is, the granules │    V      │ VG granules each │
//     keys   │ of a key in an order     │           └──────────────────┘
//            │ that key decides         │
//            └──────────────────────────┘
//
// In the scores a thread has two keys and QROWS rows, KT = BC/2 threads beside one
// another and QSLOTS of these above one another; in the softmax one class of keys of a
// row; in the output a vec4 of columns and PROWS rows, QUADS beside one another and
// PSLOTS above one another.
//
// The operations on a row and their order are those of the prefill kernel, so that a
// row comes out with the same bits from both: dots along d, the maximum tile by tile, O
// along the keys of a split, l in TX parts. No rounded product is added to anything
// but by fma, as a compiler may join the two or not: a score is x·unit() in the maximum
// and fma(x, unit(), -m) in the exponential.
//
// A loop marked 'unroll' may only be unrolled by hand, see Specialise: it indexes
// registers, or reads workgroup memory in an order that then needs no arithmetic.
//
// Workgroup memory: kv 8,192 + qs 2,048 + ps 4,096 + part 512 + rescales 32 + scales 512
// = 15,392 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: no loop is unrolled, 1: those over registers, 2: all that are marked
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // of k and v: as q's, or 4 q8
const PAGED: u32 = 0u; // 1: k and v are pools of pages, which table has batch by batch
const WIDE: u32 = 1u; // 1 when k and v can be read 16 bytes at a time
const BOTH: u32 = 0u; // 1: a mask and one of blocks, or a bias and one by distance, which else share a binding
const EXTRA: u32 = 1u; // 1: there may be slopes, a mask of blocks, a bias by distance or dropout
const EL: u32 = 4u; // elements in 16 bytes
const ROWS: u32 = 4u; // query rows of a workgroup
const SPLIT: u32 = 1024u; // keys of a workgroup
const BC: u32 = 64u; // keys of a tile
const TX: u32 = 8u; // classes of keys
const TQ: u32 = 2u; // BC / TX / 4
const QUADS: u32 = 16u; // vec4 columns of the output
const GRAN: u32 = 8u; // granules of K in a chunk, 4 or 8
const QG: u32 = 8u; // vec4 of q in a chunk: GRAN · EL / 4
const SHIFT: u32 = 0u; // 1 where GRAN is 4, else 0
const KLOADS: u32 = 4u; // loads of a thread for a chunk of K
const KT: u32 = 32u;
const QSLOTS: u32 = 4u;
const QROWS: u32 = 1u;
const VLOADS: u32 = 4u; // and of V
const VG: u32 = 16u; // granules of a value
const JC: u32 = 32u; // values in a chunk
const VCHUNKS: u32 = 2u; // BC / JC
const PSLOTS: u32 = 8u;
const PROWS: u32 = 1u;
const WIDTH: u32 = 21u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m

const LOWEST: f32 = -3.4028234e38; // the running maximum before any key
const LOG2E: f32 = 1.4426950408889634;
const HIDDEN: f32 = -1.0; // a weight is never negative
const HIDDEN_BITS: u32 = 0xbf800000u;
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // of 2^126
const MOST_BLOCKS: u32 = 64u; // that are looked at before a tile is computed

// Bits of Params.flags.
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
    page: u32, // keys of a page
    pages: u32, // of a batch in the table
    table_at: u32, // where the first batch's begin
    page_bits: u32, // page is 2 to the power of that; 32 when it is none
}

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<u32>;
@group(0) @binding(5) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(6) var<uniform> p: Params;
@group(0) @binding(7) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(8) var<storage, read> relative: array<u32>; // BOTH
@group(0) @binding(9) var<storage, read> table: array<u32>; // PAGED

var<workgroup> kv: array<vec4<u32>, 512>; // a chunk of K or V
var<workgroup> qs: array<vec4<f32>, 128>; // [row][depth/4] of the chunk
var<workgroup> ps: array<vec4<f32>, 256>; // [row][key/4]: dots, then weights
var<workgroup> part: array<f32, 128>; // [row][class]: maxima
var<workgroup> rescales: array<f32, 8>; // [row]
var<workgroup> scales: array<f32, 128>; // of q8: [key], of K and then of V

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

// decode returns element i of a tensor from the word that holds it: type 0 is
// f32, 1 f16, 2 bf16.
fn decode(word: u32, i: u32, dtype: u32) -> f32 {
    let pair = unpack2x16float(word);
    let half = select(pair.x, pair.y, (i & 1u) == 1u);
    let brain = bitcast<f32>((word >> ((i & 1u) * 16u)) << 16u);
    return select(select(brain, half, dtype == 1u), bitcast<f32>(word), dtype == 0u);
}

fn load_q(i: u32) -> f32 {
    return decode(q[select(i >> 1u, i, IN == 0u)], i, IN);
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

// integers are the four in a word of q8.
fn integers(w: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(w << 24u), bitcast<i32>(w << 16u), bitcast<i32>(w << 8u), bitcast<i32>(w)) >> vec4<u32>(24u));
}

// low and high are the first and the last four elements of a granule; of four float32
// there is no high.
fn low(x: vec4<u32>) -> vec4<f32> {
    if (KV == 0u) {
        return bitcast<vec4<f32>>(x);
    }
    return pairs(x.x, x.y);
}

fn high(x: vec4<u32>) -> vec4<f32> {
    return pairs(x.z, x.w);
}

// pairs converts four 16-bit elements.
fn pairs(a: u32, b: u32) -> vec4<f32> {
    if (KV == 1u) {
        return vec4<f32>(unpack2x16float(a), unpack2x16float(b));
    }
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

// k_bits and v_bits are the bits of one element.
fn k_bits(i: u32) -> u32 {
    if (KV == 0u) {
        return k[i >> 2u][i & 3u];
    }
    return (k[i >> 3u][(i >> 1u) & 3u] >> ((i & 1u) * 16u)) & 0xffffu;
}

fn v_bits(i: u32) -> u32 {
    if (KV == 0u) {
        return v[i >> 2u][i & 3u];
    }
    return (v[i >> 3u][(i >> 1u) & 3u] >> ((i & 1u) * 16u)) & 0xffffu;
}

// within puts bits at element e of a granule.
fn within(bits: u32, e: u32) -> vec4<u32> {
    let word = select(e >> 1u, e, KV == 0u);
    let shift = select((e & 1u) * 16u, 0u, KV == 0u);
    return select(vec4<u32>(0u), vec4<u32>(bits << shift), vec4<u32>(word) == vec4<u32>(0u, 1u, 2u, 3u));
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

// load_k returns load x of a chunk: a granule of key x / GRAN of the tile, from depth
// d0 on, zeros beyond the end. j0 counts from the piece's first key.
fn load_k(x: u32, at: u32, b: u32, j0: u32, d0: u32) -> vec4<u32> {
    let j = j0 + x / GRAN;
    let d = d0 + (x % GRAN) * EL;
    var r = vec4<u32>(0u);
    if (x < BC * GRAN && j < p.keys && d < p.dim) {
        let start = k_row(at, b, j);
        if (KV == 4u) {
            for (var e = 0u; e < 4u; e++) { // unroll
                let i = start + 1u + d / 4u + e;
                if (d + 4u * e < p.dim) {
                    r[e] = k[i >> 2u][i & 3u];
                }
            }
        } else if (WIDE == 1u) {
            r = k[(start + d) / EL];
        } else {
            for (var e = 0u; e < min(EL, p.dim - d); e++) {
                r = r | within(k_bits(start + (d + e) * p.k.d), e);
            }
        }
    }
    return r;
}

// load_v returns load x of the chunk that begins with key j0.
fn load_v(x: u32, at: u32, b: u32, j0: u32) -> vec4<u32> {
    let j = j0 + x / VG;
    let c = (x % VG) * EL;
    var r = vec4<u32>(0u);
    if (x < JC * VG && j < p.keys && c < p.vdim) {
        let start = v_row(at, b, j);
        if (KV == 4u) {
            for (var e = 0u; e < 4u; e++) { // unroll
                let i = start + 1u + c / 4u + e;
                if (c + 4u * e < p.vdim) {
                    r[e] = v[i >> 2u][i & 3u];
                }
            }
        } else if (WIDE == 1u) {
            r = v[(start + c) / EL];
        } else {
            for (var e = 0u; e < min(EL, p.vdim - c); e++) {
                r = r | within(v_bits(start + (c + e) * p.v.d), e);
            }
        }
    }
    return r;
}

// Ahead is what a thread has loaded of the next chunk.
struct Ahead {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    q: vec4<f32>,
    scale: f32, // of key t of the tile
}

// fetch_k loads depths from d0 of a tile's keys, and of the row of q that is at q_at.
fn fetch_k(t: u32, at: u32, b: u32, j0: u32, d0: u32, q_at: u32, has_q: bool) -> Ahead {
    var r: Ahead;
    r.a = load_k(t, at, b, j0, d0);
    if (KLOADS > 1u) { r.b = load_k(t + 128u, at, b, j0, d0); }
    if (KLOADS > 2u) { r.c = load_k(t + 256u, at, b, j0, d0); }
    if (KLOADS > 3u) { r.d = load_k(t + 384u, at, b, j0, d0); }
    if (KV == 4u) { // static
        if (d0 == 0u && t < BC && j0 + t < p.keys) {
            let i = k_row(at, b, j0 + t);
            r.scale = bitcast<f32>(k[i >> 2u][i & 3u]);
        }
    }
    let d = d0 + 4u * (t % QG);
    if (has_q) {
        if (d < p.dim) { r.q.x = load_q(q_at + d * p.q.d); }
        if (d + 1u < p.dim) { r.q.y = load_q(q_at + (d + 1u) * p.q.d); }
        if (d + 2u < p.dim) { r.q.z = load_q(q_at + (d + 2u) * p.q.d); }
        if (d + 3u < p.dim) { r.q.w = load_q(q_at + (d + 3u) * p.q.d); }
    }
    return r;
}

// fetch_v loads values from j0 on; they are the tile's first where begins says so.
fn fetch_v(t: u32, at: u32, b: u32, j0: u32, begins: bool) -> Ahead {
    var r: Ahead;
    if (KV == 4u) { // static
        if (begins && t < BC && j0 + t < p.keys) {
            let i = v_row(at, b, j0 + t);
            r.scale = bitcast<f32>(v[i >> 2u][i & 3u]);
        }
    }
    r.a = load_v(t, at, b, j0);
    if (VLOADS > 1u) { r.b = load_v(t + 128u, at, b, j0); }
    if (VLOADS > 2u) { r.c = load_v(t + 256u, at, b, j0); }
    if (VLOADS > 3u) { r.d = load_v(t + 384u, at, b, j0); }
    return r;
}

// place is where granule g of a key lies: lanes with neighbouring keys and the same g
// meet different banks, as do lanes with the same key and different g.
fn place(key: u32, g: u32) -> u32 {
    return key * GRAN + (g ^ ((key >> SHIFT) & (GRAN - 1u)));
}

fn store_k(x: u32, r: vec4<u32>) {
    if (x < BC * GRAN) {
        kv[place(x / GRAN, x % GRAN)] = r;
    }
}

fn store_v(x: u32, r: vec4<u32>) {
    if (x < JC * VG) {
        kv[x] = r;
    }
}

// value returns four columns of value j of the chunk, which is number key of the tile.
fn value(j: u32, key: u32, quad: u32) -> vec4<f32> {
    var r: vec4<f32>;
    if (KV == 0u) { // static
        r = low(kv[j * VG + quad]);
    }
    if (EL == 8u) { // static
        let x = kv[j * VG + quad / 2u];
        r = pairs(select(x.x, x.z, (quad & 1u) == 1u), select(x.y, x.w, (quad & 1u) == 1u));
    }
    if (KV == 4u) { // static
        r = integers(kv[j * VG + quad / 4u][quad % 4u]) * scales[key];
    }
    return r;
}

// dot4 goes on with the dots of two keys over four depths, in order.
fn dot4(a: vec4<f32>, k0: vec4<f32>, k1: vec4<f32>, sum: vec2<f32>) -> vec2<f32> {
    var r = fma(vec2<f32>(a.x), vec2<f32>(k0.x, k1.x), sum);
    r = fma(vec2<f32>(a.y), vec2<f32>(k0.y, k1.y), r);
    r = fma(vec2<f32>(a.z), vec2<f32>(k0.z, k1.z), r);
    return fma(vec2<f32>(a.w), vec2<f32>(k0.w, k1.w), r);
}

// Scores are those of a row with keys j, j+TX, j+2·TX and j+3·TX, in units of log 2:
// x times unit(), and LOWEST where hidden; seen says which are not.
struct Scores {
    x: vec4<f32>,
    s: vec4<f32>,
    seen: vec4<bool>,
}

// unit is what turns Scores.x into a score. It stays apart so that score minus maximum
// is one fma everywhere.
fn unit() -> f32 {
    return select(p.unit, 1.0, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
}

// score takes dot products; j counts in the piece.
fn score(dots: vec4<f32>, b: u32, h: u32, row: u32, j: u32, cap: i32, check: bool) -> Scores {
    var r: Scores;
    r.x = dots;
    if ((p.flags & HAS_SOFTCAP) != 0u) {
        r.x = tanh_acc(dots * p.scale / p.softcap);
    }
    r.seen = vec4<bool>(true);
    let i = i32(p.row0 + row);
    let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, i32(TX), i32(2u * TX), i32(3u * TX));
    var slope = 0.0;
    var away = vec4<f32>(0.0);
    if (EXTRA == 1u) { // static
        if ((p.flags & HAS_SLOPES) != 0u) {
            slope = slope_of(b, h);
            away = vec4<f32>(abs(vec4<i32>(i + p.more.offset) - key));
            if ((p.flags & HAS_BIAS) == 0u) {
                r.x = fma(r.x, vec4<f32>(p.unit), fma(vec4<f32>(-slope), away, vec4<f32>(0.0)) * LOG2E);
            }
        }
    }
    if (check) {
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        if ((p.flags & HAS_MASK) != 0u) {
            let at = p.mask.base + b * p.mask.b + h * p.mask.h + row * p.mask.s;
            for (var c = 0u; c < 4u; c++) { // unroll
                if (r.seen[c]) {
                    let x = at + (j + c * TX) * p.mask.d;
                    r.seen[c] = ((mask[x >> 2u] >> ((x & 3u) * 8u)) & 0xffu) != 0u;
                }
            }
        }
        if (EXTRA == 1u) { // static
            if ((p.flags & HAS_BLOCKS) != 0u) {
                let at = p.blocked.base + b * p.blocked.b + h * p.blocked.h + (p.row0 + row) / p.more.block_q * p.blocked.s;
                for (var c = 0u; c < 4u; c++) { // unroll
                    if (r.seen[c]) {
                        r.seen[c] = block(at + (p.key0 + j + c * TX) / p.more.block_k * p.blocked.d) != 0u;
                    }
                }
            }
        }
        if ((p.flags & HAS_BIAS) != 0u) {
            for (var c = 0u; c < 4u; c++) { // unroll
                if (r.seen[c]) {
                    var y = 0.0;
                    if (p.bias_type != 0u) {
                        let x = load_bias(p.bias.base + b * p.bias.b + h * p.bias.h + row * p.bias.s + (j + c * TX) * p.bias.d);
                        r.seen[c] = bitcast<u32>(x) != 0xff800000u; // -Inf hides
                        y = bounded(x, MAX_BIAS);
                    }
                    if (EXTRA == 1u) { // static
                        if (p.more.relative_type != 0u) {
                            let x = load_relative(p.relative.base + b * p.relative.b + h * p.relative.h + row * p.relative.s + (j + c * TX) * p.relative.d);
                            r.seen[c] = r.seen[c] && bitcast<u32>(x) != 0xff800000u;
                            y = bounded(y + bounded(x, MAX_RELATIVE), MAX_BIAS);
                        }
                        if ((p.flags & HAS_SLOPES) != 0u) {
                            y = bounded(fma(-slope, away[c], y), MAX_BIAS);
                        }
                    }
                    r.x[c] = fma(r.x[c], p.unit, y * LOG2E);
                }
            }
        }
    }
    r.s = select(vec4<f32>(LOWEST), r.x * unit(), r.seen);
    return r;
}

// tile_seen reports whether the rows first to last of those that read a key head see any
// block of keys that a tile up to end meets; true too when they are too many to be looked
// at. h0 is the first of the query heads.
fn tile_seen(b: u32, h0: u32, first: u32, last: u32, tile: u32, end: u32) -> bool {
    if ((p.flags & HAS_BLOCKS) == 0u) {
        return true;
    }
    let k0 = tile / p.more.block_k;
    let nk = (min(tile + BC, end) - 1u) / p.more.block_k - k0 + 1u;
    if ((last - first + 1u) * nk > MOST_BLOCKS) {
        return true;
    }
    var any = 0u;
    for (var n = 0u; n < (last - first + 1u) * nk; n++) {
        let row = first + n / nk;
        any = any | block(p.blocked.base + b * p.blocked.b + (h0 + row / p.rows) * p.blocked.h
            + (p.row0 + row % p.rows) / p.more.block_q * p.blocked.s + (k0 + n % nk) * p.blocked.d);
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
    // The workgroup's rows are those from first on of all the rows that read key head
    // kh, head by head.
    let first = (id % p.blocks) * ROWS;
    let split = (id / p.blocks) % p.parts;
    let kh = (id / p.blocks / p.parts) % p.kvheads;
    let b = id / p.blocks / p.parts / p.kvheads;
    let number = p.head0 / p.group + kh;
    let h0 = max(number * p.group, p.head0) - p.head0;
    let h1 = min((number + 1u) * p.group, p.head0 + p.heads) - p.head0;
    let rows = (h1 - h0) * p.rows;
    if (first >= rows) {
        return;
    }
    let last = min(first + ROWS, rows) - 1u;
    let k_at = p.k.base + select(b * p.k.b, 0u, PAGED == 1u) + kh * p.k.h;
    let v_at = p.v.base + select(b * p.v.b, 0u, PAGED == 1u) + kh * p.v.h;

    // The keys of the split that any of the rows sees, and those that all of them see.
    let several = first / p.rows != last / p.rows;
    let i_first = i32(p.row0 + select(first % p.rows, 0u, several));
    let i_last = i32(p.row0 + select(last % p.rows, p.rows - 1u, several));
    let from_key = p.key0 + split * SPLIT;
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[b / 4u][b % 4u]);
    }
    let begin = max(i_first + p.lo, i32(from_key));
    let end = min(min(i_last + p.hi, cap), i32(from_key + SPLIT));
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
    if (begin >= end) {
        return; // splitmerge.wgsl does not look here
    }
    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_DROPOUT)) != 0u;

    // What this thread does of each step.
    let q_row = first + t / QG; // for loading q
    let has_q = t / QG < ROWS && q_row <= last;
    let q_at = p.q.base + b * p.q.b + (h0 + q_row / p.rows) * p.q.h + (q_row % p.rows) * p.q.s;
    let kx = t % KT; // in the scores
    let ky = t / KT;
    let c_row = t / TX; // in the softmax
    let c_part = t % TX;
    let in_softmax = c_row < ROWS && first + c_row <= last;
    let c_head = h0 + (first + c_row) / p.rows;
    let c_query = (first + c_row) % p.rows;
    let vx = t % QUADS; // in the output
    let vy = t / QUADS;

    var m = LOWEST; // of row c_row
    var l = 0.0; // of row c_row and part c_part
    var acc: array<vec4<f32>, PROWS>; // of rows vy + PSLOTS·i
    for (var i = 0u; i < PROWS; i++) { // unroll
        acc[i] = vec4<f32>(0.0);
    }

    var next = (begin / i32(BC)) * i32(BC); // tile that any row sees, or none
    if (EXTRA == 1u) { // static
        while (next < end && !tile_seen(b, h0, first, last, u32(next), u32(end))) {
            next += i32(BC);
        }
    }
    var ahead: Ahead;
    if (next < end) {
        ahead = fetch_k(t, k_at, b, u32(next) - p.key0, 0u, q_at, has_q);
    }
    for (var tile = next; tile < end; tile = next) {
        next = tile + i32(BC);
        if (EXTRA == 1u) { // static
            while (next < end && !tile_seen(b, h0, first, last, u32(next), u32(end))) {
                next += i32(BC);
            }
        }
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + i32(BC) > all_to;

        var dots: array<vec2<f32>, QROWS>; // of keys kx and kx + KT with rows ky + QSLOTS·i
        for (var i = 0u; i < QROWS; i++) { // unroll
            dots[i] = vec2<f32>(0.0);
        }
        for (var d0 = 0u; d0 < p.dim; d0 += GRAN * EL) {
            workgroupBarrier();
            store_k(t, ahead.a);
            if (KLOADS > 1u) { store_k(t + 128u, ahead.b); }
            if (KLOADS > 2u) { store_k(t + 256u, ahead.c); }
            if (KLOADS > 3u) { store_k(t + 384u, ahead.d); }
            if (t < ROWS * QG) {
                qs[t] = ahead.q;
            }
            if (KV == 4u) { // static
                if (d0 == 0u && t < BC) {
                    scales[t] = ahead.scale;
                }
            }
            workgroupBarrier();
            if (d0 + GRAN * EL < p.dim) {
                ahead = fetch_k(t, k_at, b, j0, d0 + GRAN * EL, q_at, has_q);
            } else {
                ahead = fetch_v(t, v_at, b, j0, true);
            }
            if (ky < QSLOTS) {
                for (var g = 0u; g < GRAN; g++) { // unroll deep
                    if (d0 + g * EL < p.dim) {
                        let x0 = kv[place(kx, g)];
                        let x1 = kv[place(kx + KT, g)];
                        for (var i = 0u; i < QROWS; i++) { // unroll
                            let at = (ky + QSLOTS * i) * QG + g * (EL / 4u);
                            if (KV != 4u) { // static
                                dots[i] = dot4(qs[at], low(x0), low(x1), dots[i]);
                            }
                            if (EL == 8u) { // static
                                dots[i] = dot4(qs[at + 1u], high(x0), high(x1), dots[i]);
                            }
                            if (KV == 4u) { // static
                                for (var e = 0u; e < 4u; e++) { // unroll
                                    dots[i] = dot4(qs[at + e], integers(x0[e]) * scales[kx], integers(x1[e]) * scales[kx + KT], dots[i]);
                                }
                            }
                        }
                    }
                }
            }
        }
        if (ky < QSLOTS) {
            for (var i = 0u; i < QROWS; i++) { // unroll
                let at = (ky + QSLOTS * i) * BC + kx;
                ps[at / 4u][at % 4u] = dots[i].x;
                ps[(at + KT) / 4u][(at + KT) % 4u] = dots[i].y;
            }
        }
        workgroupBarrier();

        var s: array<Scores, TQ>;
        if (in_softmax) {
            var top = m;
            for (var i = 0u; i < TQ; i++) { // unroll
                let key = c_part + 4u * TX * i;
                let at = c_row * BC + key;
                let x = vec4<f32>(
                    ps[at / 4u][at % 4u],
                    ps[(at + TX) / 4u][(at + TX) % 4u],
                    ps[(at + 2u * TX) / 4u][(at + 2u * TX) % 4u],
                    ps[(at + 3u * TX) / 4u][(at + 3u * TX) % 4u],
                );
                s[i] = score(x, b, c_head, c_query, j0 + key, cap, check);
                top = max(top, largest(s[i].s));
            }
            part[t] = top;
        }
        workgroupBarrier();
        if (in_softmax) {
            var top = m;
            for (var c = 0u; c < TX; c++) { // unroll deep
                top = max(top, part[c_row * TX + c]);
            }
            let rescale = exp2_down(vec4<f32>(m - top)).x;
            m = top;
            var sum = 0.0;
            for (var i = 0u; i < TQ; i++) { // unroll
                let e = exp2_down(fma(s[i].x, vec4<f32>(unit()), vec4<f32>(-m)));
                let w = select(vec4<f32>(HIDDEN), e, s[i].seen);
                let add = select(vec4<f32>(0.0), e, s[i].seen);
                sum = (((sum + add.x) + add.y) + add.z) + add.w;
                let at = c_row * BC + c_part + 4u * TX * i;
                ps[at / 4u][at % 4u] = w.x;
                ps[(at + TX) / 4u][(at + TX) % 4u] = w.y;
                ps[(at + 2u * TX) / 4u][(at + 2u * TX) % 4u] = w.z;
                ps[(at + 3u * TX) / 4u][(at + 3u * TX) % 4u] = w.w;
            }
            if (EXTRA == 1u) { // static
                if ((p.flags & HAS_DROPOUT) != 0u) {
                    for (var n = 0u; n < BC / TX; n++) {
                        let key = c_part + TX * n;
                        if (dropped(b, c_head, c_query, j0 + key)) {
                            ps[(c_row * BC + key) / 4u][(c_row * BC + key) % 4u] = HIDDEN;
                        }
                    }
                }
            }
            l = fma(l, rescale, sum);
            if (c_part == 0u) {
                rescales[c_row] = rescale;
            }
        }

        for (var c = 0u; c < VCHUNKS; c++) {
            workgroupBarrier();
            if (KV == 4u) { // static
                if (c == 0u && t < BC) {
                    scales[t] = ahead.scale;
                }
            }
            store_v(t, ahead.a);
            if (VLOADS > 1u) { store_v(t + 128u, ahead.b); }
            if (VLOADS > 2u) { store_v(t + 256u, ahead.c); }
            if (VLOADS > 3u) { store_v(t + 384u, ahead.d); }
            workgroupBarrier();
            if (c + 1u < VCHUNKS) {
                ahead = fetch_v(t, v_at, b, j0 + (c + 1u) * JC, false);
            } else if (next < end) {
                ahead = fetch_k(t, k_at, b, u32(next) - p.key0, 0u, q_at, has_q);
            }
            if (vy < PSLOTS) {
                if (c == 0u) {
                    for (var i = 0u; i < PROWS; i++) { // unroll
                        acc[i] = acc[i] * rescales[vy + PSLOTS * i];
                    }
                }
                for (var y = 0u; y < JC / 4u; y++) { // unroll deep
                    let v0 = value(4u * y, c * JC + 4u * y, vx);
                    let v1 = value(4u * y + 1u, c * JC + 4u * y + 1u, vx);
                    let v2 = value(4u * y + 2u, c * JC + 4u * y + 2u, vx);
                    let v3 = value(4u * y + 3u, c * JC + 4u * y + 3u, vx);
                    for (var i = 0u; i < PROWS; i++) { // unroll
                        let w = ps[((vy + PSLOTS * i) * BC + c * JC) / 4u + y];
                        if (check) {
                            acc[i] = add_seen(w.w, v3, add_seen(w.z, v2, add_seen(w.y, v1, add_seen(w.x, v0, acc[i]))));
                        } else {
                            acc[i] = add(w.w, v3, add(w.z, v2, add(w.y, v1, add(w.x, v0, acc[i]))));
                        }
                    }
                }
            }
        }
    }

    // The state of a row: O, the parts of l, m.
    let head_rows = (b * p.heads + h0) * p.rows + first;
    let at = p.part0 + split;
    if (vy < PSLOTS) {
        for (var i = 0u; i < PROWS; i++) { // unroll
            let row = vy + PSLOTS * i;
            if (first + row <= last) {
                state[((head_rows + row) * p.splits + at) * WIDTH + vx] = acc[i];
            }
        }
    }
    if (in_softmax) {
        let end_of_o = ((head_rows + c_row) * p.splits + at) * WIDTH + QUADS;
        state[end_of_o + c_part / 4u][c_part % 4u] = l;
        if (c_part == 0u) {
            state[end_of_o + 4u].x = m;
        }
    }
}
