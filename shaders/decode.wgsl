// Decoding: few query rows over many keys. A workgroup computes one split of the keys,
// SPLIT of them from a multiple of SPLIT on, for up to ROWS query rows that read the same
// key head. It leaves a partial result in state, which splitmerge.wgsl completes:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       O = Σ p_j·v_j       l_c = Σ p_j over j ≡ c mod TX
//
// with scores, m and the exponential in units of log 2. It adds to attention.wgsl: all
// query heads of a group in one workgroup, so that K and V are read once; loads of 16
// bytes, neighbours by neighbouring threads; loads of the next chunk that overlap the
// computation of this one; and 16-bit elements and integers that stay as they are in
// workgroup memory and are converted in registers.
//
// Elements of q8 take part as scale·integer, rounded to float32.
//
// Key tiles of BC begin at multiples of BC. A tile that no row of the workgroup sees is
// skipped, and one that all rows see entirely is not checked key by key. A tile goes
// through workgroup memory in chunks of at most 8 KiB (a granule is 16 bytes):
//
//               GRAN granules                        JC keys, all columns
//            ┌──────────────────────────┐           ┌──────────────────┐
//     BC     │ K as stored, granules of │    V      │ VG granules each │
//     keys   │ a key permuted by place  │           └──────────────────┘
//            │                          │
//            └──────────────────────────┘
//
// In the scores a thread has two keys and QROWS rows: KT = BC/2 threads side by side,
// QSLOTS of these groups over the rows. In the softmax it has one class of keys of a row.
// In the output it has a vec4 of columns and PROWS rows: QUADS threads side by side,
// PSLOTS groups over the rows.
//
// The operations on a row and their order are those of flash.wgsl: both yield the same
// bits for a row. Dots go along d, the maximum tile by tile, O along the keys of a split,
// and l in TX parts. All sums of products are explicit fma, because a compiler may or may
// not fuse others: a score is x·unit() in the maximum and fma(x, unit(), -m) in the
// exponential.
//
// Loops marked 'unroll' index registers, and loops marked 'unroll deep' save the index
// arithmetic of workgroup memory when unrolled, see flash.wgsl.
//
// The file is long because it loads its operands in every type and layout, ahead of their
// use, and has every option.
//
// Workgroup memory: kv 8,192 + qs 2,048 + ps 4,096 + part 512 + rescales 32 + scales 512
// = 15,392 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: loops stay loops, 1: 'unroll' is unrolled, 2: 'unroll deep' too
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // type of k and v: the same, or 4 q8
const PAGED: u32 = 0u; // 1: k and v are pools of pages, see common/pages.wgsl
const WIDE: u32 = 1u; // 1: k and v can be read 16 bytes at a time
const BOTH: u32 = 0u; // 1: blocks and relative are bound, see common/options.wgsl
const EXTRA: u32 = 1u; // 0: the call has no slopes, block mask, relative bias or dropout
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
const KT: u32 = 32u; // BC / 2
const QSLOTS: u32 = 4u; // groups of KT threads that share the rows
const QROWS: u32 = 1u; // rows of a thread in the scores
const VLOADS: u32 = 4u; // loads of a thread for a chunk of V
const VG: u32 = 16u; // granules of a value
const JC: u32 = 32u; // values in a chunk
const VCHUNKS: u32 = 2u; // BC / JC
const PSLOTS: u32 = 8u; // groups of QUADS threads that share the rows
const PROWS: u32 = 1u; // rows of a thread in the output
const WIDTH: u32 = 21u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<u32>;
@group(0) @binding(5) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(6) var<uniform> p: AttentionParams;
@group(0) @binding(7) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(8) var<storage, read> relative: array<u32>; // BOTH
@group(0) @binding(9) var<storage, read> table: array<u32>; // PAGED

var<workgroup> kv: array<vec4<u32>, 512>; // a chunk of K or V
var<workgroup> qs: array<vec4<f32>, 128>; // [row][depth/4] of the chunk
var<workgroup> ps: array<vec4<f32>, 256>; // [row][key/4]: dots, then weights
var<workgroup> part: array<f32, 128>; // [row][class]: maxima
var<workgroup> rescales: array<f32, 8>; // [row]
var<workgroup> scales: array<f32, 128>; // [key]: of q8, first of K, then of V

// low and high return the first and the last four elements of a granule. A granule of
// float32 has only four.
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

// $x_bits returns the bits of element i.
// each $x: k, v
fn $x_bits(i: u32) -> u32 {
    if (KV == 0u) {
        return $x[i >> 2u][i & 3u];
    }
    return ($x[i >> 3u][(i >> 1u) & 3u] >> ((i & 1u) * 16u)) & 0xffffu;
}

// within returns a granule with the given bits as element e and zeros elsewhere.
fn within(bits: u32, e: u32) -> vec4<u32> {
    let word = select(e >> 1u, e, KV == 0u);
    let shift = select((e & 1u) * 16u, 0u, KV == 0u);
    return select(vec4<u32>(0u), vec4<u32>(bits << shift), vec4<u32>(word) == vec4<u32>(0u, 1u, 2u, 3u));
}

// load_$x returns load x of a chunk of $KEYS keys, from key j0 of the piece on: a granule of
// key x / $GRAN, from element d0 on, with zeros beyond the end.
// each $x $KEYS $GRAN $dim: k BC GRAN dim, v JC VG vdim
fn load_$x(x: u32, at: u32, b: u32, j0: u32, d0: u32) -> vec4<u32> {
    let j = j0 + x / $GRAN;
    let d = d0 + (x % $GRAN) * EL;
    var r = vec4<u32>(0u);
    if (x < $KEYS * $GRAN && j < p.keys && d < p.$dim) {
        let start = $x_row(at, b, j);
        if (KV == 4u) {
            for (var e = 0u; e < 4u; e++) { // unroll
                let i = start + 1u + d / 4u + e;
                if (d + 4u * e < p.$dim) {
                    r[e] = $x[i >> 2u][i & 3u];
                }
            }
        } else if (WIDE == 1u) {
            r = $x[(start + d) / EL];
        } else {
            for (var e = 0u; e < min(EL, p.$dim - d); e++) {
                r = r | within($x_bits(start + (d + e) * p.$x.d), e);
            }
        }
    }
    return r;
}

// Ahead holds what a thread has loaded of the next chunk.
struct Ahead {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    q: vec4<f32>,
    scale: f32, // of key t of the tile
}

// fetch_k loads depths from d0 of the keys of a tile, and of the row of q at q_at.
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

// fetch_v loads values from key j0 on. begins marks the first chunk of a tile.
fn fetch_v(t: u32, at: u32, b: u32, j0: u32, begins: bool) -> Ahead {
    var r: Ahead;
    if (KV == 4u) { // static
        if (begins && t < BC && j0 + t < p.keys) {
            let i = v_row(at, b, j0 + t);
            r.scale = bitcast<f32>(v[i >> 2u][i & 3u]);
        }
    }
    r.a = load_v(t, at, b, j0, 0u);
    if (VLOADS > 1u) { r.b = load_v(t + 128u, at, b, j0, 0u); }
    if (VLOADS > 2u) { r.c = load_v(t + 256u, at, b, j0, 0u); }
    if (VLOADS > 3u) { r.d = load_v(t + 384u, at, b, j0, 0u); }
    return r;
}

// place returns where granule g of a key lies in kv. Lanes with neighbouring keys and the
// same g use different banks, and so do lanes with the same key and different g.
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

// value returns four columns of value j of the chunk, the value of key of the tile.
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

// dot4 adds four depths to the dot products of two keys, in ascending order.
fn dot4(a: vec4<f32>, k0: vec4<f32>, k1: vec4<f32>, sum: vec2<f32>) -> vec2<f32> {
    var r = fma(vec2<f32>(a.x), vec2<f32>(k0.x, k1.x), sum);
    r = fma(vec2<f32>(a.y), vec2<f32>(k0.y, k1.y), r);
    r = fma(vec2<f32>(a.z), vec2<f32>(k0.z, k1.z), r);
    return fma(vec2<f32>(a.w), vec2<f32>(k0.w, k1.w), r);
}

// Scores of a row with keys j, j+TX, j+2·TX and j+3·TX.
struct Scores {
    x: vec4<f32>, // before their unit
    s: vec4<f32>, // x·unit() in units of log 2, LOWEST where hidden
    seen: vec4<bool>,
}

// unit returns the factor of Scores.x. It stays a separate factor, so that score minus
// maximum is one fma everywhere.
fn unit() -> f32 {
    return select(p.unit, 1.0, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
}

// score turns the dot products of a row of the box with keys from j of the piece into
// scores.
fn score(dots: vec4<f32>, b: u32, h: u32, row: u32, j: u32, cap: i32, check: bool) -> Scores {
    var r: Scores;
    r.x = dots;
    if ((p.flags & HAS_SOFTCAP) != 0u) {
        r.x = tanh_acc(dots * p.scale / p.softcap);
    }
    r.seen = vec4<bool>(true);
    let i = i32(p.row0 + row);
    let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, i32(TX), i32(2u * TX), i32(3u * TX));
    if (EXTRA == 1u) { // static
        if ((p.flags & (HAS_BIAS | HAS_SLOPES)) == HAS_SLOPES) {
            let away = vec4<f32>(abs(vec4<i32>(i + p.offset) - key));
            r.x = fma(r.x, vec4<f32>(p.unit), fma(vec4<f32>(-slope_of(b, h)), away, vec4<f32>(0.0)) * LOG2E);
        }
    }
    if (check) {
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        let biased = (p.flags & HAS_BIAS) != 0u;
        let w = added(r.seen, b, h, row, j, TX, biased);
        r.seen = w.seen;
        if (biased) {
            r.x = fma(r.x, vec4<f32>(p.unit), w.y * LOG2E);
        }
    }
    r.s = select(vec4<f32>(LOWEST), r.x * unit(), r.seen);
    return r;
}

// tile_seen reports whether the block mask shows any key of a tile up to end to any of the
// rows first to last that read a key head. It returns true when there are too many mask
// blocks to read. h0 is the first query head of the key head.
fn tile_seen(b: u32, h0: u32, first: u32, last: u32, tile: u32, end: u32) -> bool {
    if ((p.flags & HAS_BLOCKS) == 0u) {
        return true;
    }
    let k0 = tile / p.block_k;
    let nk = (min(tile + BC, end) - 1u) / p.block_k - k0 + 1u;
    if ((last - first + 1u) * nk > MOST_BLOCKS) {
        return true;
    }
    var any = 0u;
    for (var n = 0u; n < (last - first + 1u) * nk; n++) {
        let row = first + n / nk;
        any = any | block(p.blocked.base + b * p.blocked.b + (h0 + row / p.rows) * p.blocked.h
            + (p.row0 + row % p.rows) / p.block_q * p.blocked.s + (k0 + n % nk) * p.blocked.d);
    }
    return any != 0u;
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
    // The rows that read key head kh are numbered head by head. The workgroup has those
    // from first on.
    let first = (id % p.blocks) * ROWS;
    let split = (id / p.blocks) % p.parts;
    let kh = (id / p.blocks / p.parts) % p.kv_heads;
    let b = id / p.blocks / p.parts / p.kv_heads;
    let number = p.head0 / p.group + kh;
    let h0 = max(number * p.group, p.head0) - p.head0;
    let h1 = min((number + 1u) * p.group, p.head0 + p.heads) - p.head0;
    let rows = (h1 - h0) * p.rows;
    if (first >= rows) {
        return;
    }
    let last = min(first + ROWS, rows) - 1u;
    let k_batch = select(b * p.k.b, 0u, PAGED == 1u);
    let v_batch = select(b * p.v.b, 0u, PAGED == 1u);
    let k_at = p.k.base + k_batch + kh * p.k.h;
    let v_at = p.v.base + v_batch + kh * p.v.h;

    // The keys of the split that any of the rows sees, and those that all of them see.
    let several = first / p.rows != last / p.rows;
    let row_first = select(first % p.rows, 0u, several);
    let row_last = select(last % p.rows, p.rows - 1u, several);
    let i_first = i32(p.row0 + row_first);
    let i_last = i32(p.row0 + row_last);
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
        return; // splitmerge.wgsl does not read this state
    }
    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_DROPOUT)) != 0u;

    // The share of this thread in each step.
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

    var next = (begin / i32(BC)) * i32(BC); // the next tile that some row sees
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
