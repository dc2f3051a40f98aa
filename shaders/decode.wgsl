// Decoding: few query rows over many keys. A workgroup computes one split of the keys,
// SPLIT of them from a multiple of SPLIT on, for up to ROWS query rows that read the same
// key head. It leaves a partial result in state, which splitmerge.wgsl completes:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       O = Σ p_j·v_j       l_c = Σ p_j over j ≡ c mod TX
//
// with scores, m and the exponential in units of log 2. It adds to attention.wgsl: all
// query heads of a group in one workgroup, so that K and V are read once; loads ahead of
// their use; and 16-bit elements and integers that stay as they are until a thread uses
// them.
//
// Elements of q8 take part as scale·integer, rounded to float32.
//
// Key tiles of BC begin at multiples of BC. A tile that no row of the workgroup sees is
// skipped, and one that all rows see entirely is not checked key by key.
//
// A thread computes the scores of one key of a tile with all rows, then weights of a row
// with four neighbouring keys, and COLS columns of the output for all rows:
//
//                thread t: key t                  column t + THREADS·x
//            ┌──────┬──────────────────┐        ┌──────┬────────────┐
//    ROWS    │ S,P  │                  │        │  O   │            │
//            └──────┴──────────────────┘        └──────┴────────────┘
//
// Q stays in workgroup memory. Chunks of K, of four granules (16 bytes) of each key, go
// through it: neighbouring threads load neighbouring granules, and a thread computes with
// its key. A key's granules are permuted by place. The scores take the place of the last
// chunk. Values never go through it, because each is needed by one thread, whose
// neighbours load the neighbouring columns.
//
// No load of K or V is conditional. The next chunk of K and the next AHEAD values are under
// way while a thread computes with those before. Keys after the last key that any row sees
// are replaced by that one, which may be loaded again. Whatever hidden keys hold, even NaN,
// select drops it.
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
// Workgroup memory as it stands: 16·(KN + CHUNKS·QN + PN + SN) + 32 + 8·RN = 5,432 bytes.

// Rewritten for each variant:
const EXPAND: u32 = 0u; // 0: loops stay loops, 1: 'unroll' is unrolled, 2: 'unroll deep' too
const IN: u32 = 0u; // type of q: 0 f32, 1 f16, 2 bf16
const KV: u32 = 0u; // type of k and v: the same, or 4 q8
const PAGED: u32 = 0u; // 1: k and v are pools of pages, see common/pages.wgsl
const WIDE: u32 = 1u; // 1: k can be read 16 bytes at a time
const FULL: u32 = 0u; // 1: the head size of q and k fills its chunks
const BOTH: u32 = 0u; // 1: blocks and relative are bound, see common/options.wgsl
const EXTRA: u32 = 1u; // 0: the call has no slopes, block mask, relative bias or dropout
const EL: u32 = 4u; // elements in 16 bytes
const UNIT: u32 = 1u; // 2: v is 16-bit and WIDE, so that positions can count words
const THREADS: u32 = 64u; // BC, rounded up to a multiple of 32
const ROWS: u32 = 4u; // query rows of a workgroup
const SPLIT: u32 = 256u; // keys of a workgroup
const BC: u32 = 64u; // keys of a tile
const TX: u32 = 8u; // classes of keys
const CHUNKS: u32 = 4u; // of K in a tile: D / (4 · EL), rounded up
const QN: u32 = 16u; // vec4 of q for a chunk: EL · ROWS
const KN: u32 = 256u; // granules of a chunk of K: 4 · BC
const PN: u32 = 16u; // ROWS · BC / 16
const SN: u32 = 1u; // BC / 4 for q8, else 1
const RN: u32 = 1u; // 2 · BC for pages, else 1
const KLOADS: u32 = 4u; // KN / THREADS, rounded up
const SQ: u32 = 1u; // vec4 of keys of a thread in the softmax
const COLS: u32 = 1u; // columns of a thread
const AHEAD: u32 = 16u; // keys whose values are loaded ahead of their use, a divisor of BC
const VN: u32 = 16u; // AHEAD · COLS
const ACC: u32 = 4u; // ROWS · COLS
const QUADS: u32 = 16u; // vec4 columns of the output
const WIDTH: u32 = 21u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>; // WIDE
@group(0) @binding(1) var<storage, read> k: array<u32>; // !WIDE
@group(0) @binding(2) var<storage, read> v: array<u32>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<u32>;
@group(0) @binding(5) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(6) var<uniform> p: AttentionParams;
@group(0) @binding(7) var<storage, read> blocks: array<u32>; // BOTH
@group(0) @binding(8) var<storage, read> relative: array<u32>; // BOTH
@group(0) @binding(9) var<storage, read> table: array<u32>; // PAGED

var<workgroup> kv: array<vec4<u32>, KN>; // a chunk of K, then [row][key/4]: dots, then weights
var<workgroup> qs: array<array<vec4<f32>, QN>, CHUNKS>; // [chunk][depth/4][row]
var<workgroup> part: array<vec4<f32>, PN>; // [row][key/16]: maxima
var<workgroup> scales: array<vec4<f32>, SN>; // [key/4]: of values of q8
var<workgroup> rescales: array<f32, 8>; // [row]
var<workgroup> rows_k: array<u32, RN>; // [tile % 2][key]: where keys of pages begin
var<workgroup> rows_v: array<u32, RN>; // the same for values

// pairs converts four 16-bit elements.
fn pairs(a: u32, b: u32) -> vec4<f32> {
    if (KV == 1u) {
        return vec4<f32>(unpack2x16float(a), unpack2x16float(b));
    }
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

// key_at returns where the row of a key of the piece, number in_tile of its tile, begins.
fn key_at(at: u32, b: u32, j: u32, turn: u32, in_tile: u32) -> u32 {
    var row = 0u;
    if (PAGED == 0u) { // static
        row = k_row(at, b, j);
    }
    if (PAGED == 1u) { // static
        row = rows_k[turn * BC + in_tile];
    }
    return row;
}

// value_at does so for values, in words where WIDE pairs them, given at in the same unit.
fn value_at(at: u32, j: u32, turn: u32, in_tile: u32) -> u32 {
    var row = 0u;
    if (PAGED == 0u) { // static
        row = at + j * (p.v.s / UNIT);
    }
    if (PAGED == 1u) { // static
        row = rows_v[turn * BC + in_tile];
    }
    return row;
}

// word_k returns word w of the row of k that begins at element at, as if its elements were
// contiguous, with zeros beyond the row's end.
fn word_k(at: u32, w: u32) -> u32 {
    var r = 0u;
    if (WIDE == 0u) { // static
        if (KV == 4u) { // static
            if (FULL == 1u) { // static
                r = k[at + 1u + w];
            }
            if (FULL == 0u) { // static
                r = k[at + 1u + min(w, (p.dim - 1u) / 4u)];
            }
        }
        if (KV == 0u) { // static
            r = select(0u, k[at + min(w, p.dim - 1u) * p.k.d], w < p.dim);
        }
        if (EL == 8u) { // static
            let i = at + min(2u * w, p.dim - 1u) * p.k.d;
            let i1 = at + min(2u * w + 1u, p.dim - 1u) * p.k.d;
            let lower = select(0u, (k[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu, 2u * w < p.dim);
            let upper = select(0u, (k[i1 >> 1u] >> ((i1 & 1u) * 16u)) << 16u, 2u * w + 1u < p.dim);
            r = lower | upper;
        }
    }
    return r;
}

// Chunk is what a thread loads of a chunk of K.
struct Chunk {
    x: array<vec4<u32>, KLOADS>,
    scale: f32, // of key t of the tile
}

// fetch returns the thread's part of the chunk with depths from d0 of the tile from key j0
// of the piece on. Keys after last are replaced by last, depths beyond the end by the last
// ones.
fn fetch(t: u32, at: u32, b: u32, j0: u32, last: u32, turn: u32, d0: u32) -> Chunk {
    var r: Chunk;
    for (var n = 0u; n < KLOADS; n++) { // unroll
        if (WIDE == 1u) { // static
            let in_tile = min((t + THREADS * n) / 4u, BC - 1u);
            var d = d0 + (t + THREADS * n) % 4u * EL;
            if (FULL == 0u) { // static
                d = min(d, p.dim - EL);
            }
            r.x[n] = k[(key_at(at, b, min(j0 + in_tile, last), turn, in_tile) + d) / EL];
        }
        if (WIDE == 0u) { // static
            for (var c = 0u; c < 4u; c++) { // unroll
                let in_tile = min((t + THREADS * (4u * n + c)) / 16u, BC - 1u);
                let row = key_at(at, b, min(j0 + in_tile, last), turn, in_tile);
                r.x[n][c] = word_k(row, d0 * 4u / EL + (t + THREADS * (4u * n + c)) % 16u);
            }
        }
    }
    if (KV == 4u) { // static
        let in_tile = min(t, BC - 1u);
        let scale = k[key_at(at, b, min(j0 + in_tile, last), turn, in_tile)];
        r.scale = bitcast<f32>(scale);
    }
    return r;
}

// place returns where granule g of a key lies in kv. Lanes with neighbouring keys and the
// same g use different banks, and so do lanes with the same key and different g.
fn place(key: u32, g: u32) -> u32 {
    return key * 4u + (g ^ ((key >> 1u) & 3u));
}

// stage puts a thread's part of a chunk into kv.
fn stage(t: u32, chunk: Chunk) {
    var r = chunk;
    for (var n = 0u; n < KLOADS; n++) { // unroll
        if (WIDE == 1u) { // static
            let x = t + THREADS * n;
            if (KN % THREADS == 0u || x < KN) {
                kv[place(x / 4u, x % 4u)] = r.x[n];
            }
        }
        if (WIDE == 0u) { // static
            for (var c = 0u; c < 4u; c++) { // unroll
                let x = t + THREADS * (4u * n + c);
                if (KN % THREADS == 0u || x < 4u * KN) {
                    kv[place(x / 16u, x / 4u % 4u)][x % 4u] = r.x[n][c];
                }
            }
        }
    }
}

// value_word returns the word with a column of the value that begins at value_at.
fn value_word(at: u32, column: u32) -> u32 {
    if (KV == 4u) {
        return v[at + 1u + column / 4u];
    }
    if (UNIT == 2u) {
        return v[at + column / 2u];
    }
    if (KV == 0u) {
        return v[at + column * p.v.d];
    }
    return v[(at + column * p.v.d) >> 1u];
}

// value returns what value_word holds of a column.
fn value(word: u32, at: u32, column: u32, scale: f32) -> f32 {
    if (KV == 0u) {
        return bitcast<f32>(word);
    }
    if (KV == 4u) {
        return integer(word, column) * scale;
    }
    let i = select(at + column * p.v.d, column, UNIT == 2u);
    let bits = word >> ((i & 1u) * 16u);
    if (KV == 1u) {
        return unpack2x16float(bits).x;
    }
    return bitcast<f32>(bits << 16u);
}

// dot4 adds four depths to a dot product, in ascending order.
fn dot4(a: vec4<f32>, x: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, x.w, fma(a.z, x.z, fma(a.y, x.y, fma(a.x, x.x, sum))));
}

// Scores of a row with four neighbouring keys.
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
    let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, 1, 2, 3);
    if (EXTRA == 1u) { // static
        if ((p.flags & (HAS_BIAS | HAS_SLOPES)) == HAS_SLOPES) {
            let away = vec4<f32>(abs(vec4<i32>(i + p.offset) - key));
            r.x = fma(r.x, vec4<f32>(p.unit), fma(vec4<f32>(-slope_of(b, h)), away, vec4<f32>(0.0)) * LOG2E);
        }
    }
    if (check) {
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        let biased = (p.flags & HAS_BIAS) != 0u;
        let w = added(r.seen, b, h, row, j, 1u, biased);
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
    let v_at = (p.v.base + v_batch + kh * p.v.h) / UNIT;

    // The keys of the split that any of the rows sees, and those that all of them see.
    let several = first / p.rows != last / p.rows;
    let row_first = select(first % p.rows, 0u, several);
    let row_last = select(last % p.rows, p.rows - 1u, several);
    let i_first = i32(p.row0 + row_first);
    let i_last = i32(p.row0 + row_last);
    let split_key = p.key0 + split * SPLIT;
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) {
        cap = min(cap, p.klen[b / 4u][b % 4u]);
    }
    let begin = max(i_first + p.lo, i32(split_key));
    let end = min(min(i_last + p.hi, cap), i32(split_key + SPLIT));
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
    if (begin >= end) {
        return; // splitmerge.wgsl does not read this state
    }
    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_DROPOUT)) != 0u;

    // Q, with zeros beyond the rows and the head size.
    for (var x = t; x < CHUNKS * QN; x += THREADS) {
        let row = min(first + x % ROWS, last);
        let at = p.q.base + b * p.q.b + (h0 + row / p.rows) * p.q.h + (row % p.rows) * p.q.s;
        var r = vec4<f32>(0.0);
        for (var c = 0u; c < 4u; c++) { // unroll
            let d = x / ROWS * 4u + c;
            r[c] = select(0.0, load_q(at + min(d, p.dim - 1u) * p.q.d), d < p.dim && first + x % ROWS <= last);
        }
        qs[x / QN][x % QN] = r;
    }

    var next = (begin / i32(BC)) * i32(BC); // the next tile that some row sees
    if (EXTRA == 1u) { // static
        while (next < end && !tile_seen(b, h0, first, last, u32(next), u32(end))) {
            next += i32(BC);
        }
    }
    let last_key = u32(end) - 1u - p.key0;
    var turn = 0u; // of rows_k and rows_v
    if (PAGED == 1u) { // static
        if (t < BC) {
            let j = min(u32(next) - p.key0 + t, last_key);
            rows_k[t] = k_row(k_at, b, j);
            rows_v[t] = v_row(v_at * UNIT, b, j) / UNIT;
        }
        workgroupBarrier();
    }
    var chunk = fetch(t, k_at, b, u32(next) - p.key0, last_key, turn, 0u);
    var columns: array<u32, COLS>;
    for (var x = 0u; x < COLS; x++) { // unroll
        columns[x] = min(t + THREADS * x, p.vdim - 1u);
    }
    var values: array<u32, VN>; // [key][column]: words of the next values
    for (var n = 0u; n < AHEAD; n++) { // unroll
        let at = value_at(v_at, min(u32(next) - p.key0 + n, last_key), turn, n);
        for (var x = 0u; x < COLS; x++) { // unroll
            values[n * COLS + x] = value_word(at, columns[x]);
        }
    }

    var m: array<f32, SQ>; // of the row of vec4 t + THREADS·i of the scores
    for (var i = 0u; i < SQ; i++) { // unroll
        m[i] = LOWEST;
    }
    var l = 0.0; // of row t / TX and class t % TX
    var acc: array<f32, ACC>; // [row][column]
    for (var i = 0u; i < ACC; i++) { // unroll
        acc[i] = 0.0;
    }

    for (var tile = next; tile < end; tile = next) {
        next = tile + i32(BC);
        if (EXTRA == 1u) { // static
            while (next < end && !tile_seen(b, h0, first, last, u32(next), u32(end))) {
                next += i32(BC);
            }
        }
        let j0 = u32(tile) - p.key0;
        let j1 = u32(next) - p.key0;
        let check = paired || tile < all_from || tile + i32(BC) > all_to;
        var value_scale = 0.0; // of key t
        if (KV == 4u) { // static
            let in_tile = min(t, BC - 1u);
            let bits = v[value_at(v_at, min(j0 + in_tile, last_key), turn, in_tile)];
            value_scale = bitcast<f32>(bits);
        }
        if (PAGED == 1u) { // static
            let j = min(j1 + min(t, BC - 1u), last_key);
            let next_k = k_row(k_at, b, j);
            let next_v = v_row(v_at * UNIT, b, j) / UNIT;
            workgroupBarrier();
            if (t < BC) {
                rows_k[(1u - turn) * BC + t] = next_k;
                rows_v[(1u - turn) * BC + t] = next_v;
            }
            workgroupBarrier();
        }

        var dots: array<f32, ROWS>; // of key t
        for (var i = 0u; i < ROWS; i++) { // unroll
            dots[i] = 0.0;
        }
        for (var d0 = 0u; d0 < p.dim; d0 += 4u * EL) {
            let ends = d0 + 4u * EL >= p.dim;
            let from_key = select(j0, j1, ends);
            let from_turn = select(turn, 1u - turn, ends);
            let from_depth = select(d0 + 4u * EL, 0u, ends);
            workgroupBarrier();
            stage(t, chunk);
            workgroupBarrier();
            let key_scale = chunk.scale;
            chunk = fetch(t, k_at, b, from_key, last_key, from_turn, from_depth);
            // In no branch, because RADV moves loads behind branches.
            for (var g = 0u; g < 4u; g++) { // unroll deep
                if (FULL == 1u || d0 + g * EL < p.dim) {
                    let x = kv[place(min(t, BC - 1u), g)];
                    let n = d0 / (4u * EL);
                    if (KV == 0u) { // static
                        let x0 = bitcast<vec4<f32>>(x);
                        for (var i = 0u; i < ROWS; i++) { // unroll
                            dots[i] = dot4(qs[n][g * (EL / 4u) * ROWS + i], x0, dots[i]);
                        }
                    }
                    if (EL == 8u) { // static
                        let x0 = pairs(x.x, x.y);
                        let x1 = pairs(x.z, x.w);
                        for (var i = 0u; i < ROWS; i++) { // unroll
                            dots[i] = dot4(qs[n][(g * (EL / 4u) + 1u) * ROWS + i], x1, dot4(qs[n][g * (EL / 4u) * ROWS + i], x0, dots[i]));
                        }
                    }
                    if (KV == 4u) { // static
                        for (var e = 0u; e < 4u; e++) { // unroll
                            if (FULL == 1u || d0 + g * EL + 4u * e < p.dim) {
                                let x0 = integers(x[e]) * key_scale;
                                for (var i = 0u; i < ROWS; i++) { // unroll
                                    dots[i] = dot4(qs[n][(g * (EL / 4u) + e) * ROWS + i], x0, dots[i]);
                                }
                            }
                        }
                    }
                }
            }
        }
        workgroupBarrier();
        if (t < BC) {
            for (var i = 0u; i < ROWS; i++) { // unroll
                let dot = dots[i];
                kv[(i * BC + t) / 4u][t % 4u] = bitcast<u32>(dot);
            }
        }
        workgroupBarrier();

        var s: array<Scores, SQ>;
        for (var i = 0u; i < SQ; i++) { // unroll
            let x = t + THREADS * i;
            let row = first + x / (BC / 4u);
            if (x < ROWS * BC / 4u && row <= last) {
                let bits = kv[x];
                s[i] = score(bitcast<vec4<f32>>(bits), b, h0 + row / p.rows, row % p.rows, j0 + 4u * (x % (BC / 4u)), cap, check);
                part[x / 4u][x % 4u] = max(m[i], largest(s[i].s));
            }
        }
        workgroupBarrier();
        for (var i = 0u; i < SQ; i++) { // unroll
            let x = t + THREADS * i;
            let row = x / (BC / 4u);
            if (x < ROWS * BC / 4u && first + row <= last) {
                var tops = vec4<f32>(m[i]);
                for (var c = 0u; c < BC / 16u; c++) { // unroll deep
                    tops = max(tops, part[row * (BC / 16u) + c]);
                }
                let top = largest(tops);
                let rescale = exp2_down(vec4<f32>(m[i] - top)).x;
                m[i] = top;
                let e = exp2_down(fma(s[i].x, vec4<f32>(unit()), vec4<f32>(-top)));
                let w = select(vec4<f32>(HIDDEN), e, s[i].seen);
                kv[x] = bitcast<vec4<u32>>(w);
                if (x % (BC / 4u) == 0u) {
                    rescales[row] = rescale;
                }
            }
        }
        if (KV == 4u) { // static
            if (t < BC) {
                scales[t / 4u][t % 4u] = value_scale;
            }
        }
        workgroupBarrier();
        if (t < ROWS * TX) {
            var sum = 0.0;
            for (var n = 0u; n < BC / TX; n++) { // unroll deep
                let at = t / TX * BC + t % TX + TX * n;
                let bits = kv[at / 4u][at % 4u];
                let add = select(bitcast<f32>(bits), 0.0, bits == HIDDEN_BITS);
                sum = sum + add;
            }
            l = fma(l, rescales[t / TX], sum);
        }
        if (EXTRA == 1u) { // static
            if ((p.flags & HAS_DROPOUT) != 0u) {
                workgroupBarrier();
                for (var x = t; x < ROWS * BC; x += THREADS) {
                    let row = first + x / BC;
                    if (row <= last && dropped(b, h0 + row / p.rows, row % p.rows, j0 + x % BC)) {
                        kv[x / 4u][x % 4u] = HIDDEN_BITS;
                    }
                }
                workgroupBarrier();
            }
        }

        for (var i = 0u; i < ROWS; i++) { // unroll
            for (var x = 0u; x < COLS; x++) { // unroll
                acc[i * COLS + x] = acc[i * COLS + x] * rescales[i];
            }
        }
        var stop = BC;
        if (EXPAND != 2u) { // static
            stop = min(BC, u32(end - tile)); // no row sees keys from there on
        }
        for (var hide = 0u; hide < 2u; hide++) { // unroll always
            if (check == (hide == 1u)) {
                for (var j = 0u; j < stop; j += AHEAD) {
                    let ends = j + AHEAD == BC;
                    let after = select(j0 + j + AHEAD, j1, ends);
                    let after_turn = select(turn, 1u - turn, ends);
                    let after_in = select(j + AHEAD, 0u, ends);
                    for (var n = 0u; n < AHEAD / 4u; n++) { // unroll
                        var scale = vec4<f32>(0.0);
                        if (KV == 4u) { // static
                            scale = scales[j / 4u + n];
                        }
                        var y: array<vec4<f32>, COLS>; // of four keys
                        for (var c = 0u; c < 4u; c++) { // unroll
                            let at = value_at(v_at, min(j0 + j + 4u * n + c, last_key), turn, j + 4u * n + c);
                            let at_after = value_at(v_at, min(after + 4u * n + c, last_key), after_turn, after_in + 4u * n + c);
                            for (var x = 0u; x < COLS; x++) { // unroll
                                y[x][c] = value(values[(4u * n + c) * COLS + x], at, columns[x], scale[c]);
                                values[(4u * n + c) * COLS + x] = value_word(at_after, columns[x]);
                            }
                        }
                        for (var i = 0u; i < ROWS; i++) { // unroll
                            let bits = kv[i * (BC / 4u) + j / 4u + n];
                            let w = bitcast<vec4<f32>>(bits);
                            for (var x = 0u; x < COLS; x++) { // unroll
                                for (var c = 0u; c < 4u; c++) { // unroll
                                    let sum = fma(w[c], y[x][c], acc[i * COLS + x]);
                                    if (hide == 0u) { // static
                                        acc[i * COLS + x] = sum;
                                    }
                                    if (hide == 1u) { // static
                                        acc[i * COLS + x] = select(sum, acc[i * COLS + x], bits[c] == HIDDEN_BITS);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        turn = 1u - turn;
    }

    // The state of a row: O, the parts of l, m.
    let head_rows = (b * p.heads + h0) * p.rows + first;
    let at = p.part0 + split;
    for (var i = 0u; i < ROWS; i++) { // unroll
        for (var x = 0u; x < COLS; x++) { // unroll
            let column = t + THREADS * x;
            if (first + i <= last && column < 4u * QUADS) {
                state[((head_rows + i) * p.splits + at) * WIDTH + column / 4u][column % 4u] = acc[i * COLS + x];
            }
        }
    }
    if (t < ROWS * TX && first + t / TX <= last) {
        state[((head_rows + t / TX) * p.splits + at) * WIDTH + QUADS + t % TX / 4u][t % TX % 4u] = l;
    }
    for (var i = 0u; i < SQ; i++) { // unroll
        let x = t + THREADS * i;
        if (x < ROWS * BC / 4u && x % (BC / 4u) == 0u && first + x / (BC / 4u) <= last) {
            state[((head_rows + x / (BC / 4u)) * p.splits + at) * WIDTH + QUADS + 4u].x = m[i];
        }
    }
}
