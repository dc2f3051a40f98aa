// Decoding: few query rows over many keys. A workgroup computes one split of the keys, SPLIT of them from a
// multiple of SPLIT on, for up to ROWS query rows that read the same key head. It leaves a partial result in
// state, which splitmerge.wgsl completes:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       O = Σ p_j·v_j       l_c = Σ p_j over j ≡ c mod TX
//
// with scores, m and the exponential in units of log 2. It adds to attention.wgsl: all query heads of a group
// in one workgroup, so that K and V are read once; loads ahead of their use; and 16-bit elements and integers
// that stay as they are until a thread uses them.
//
// Key tiles of BC begin at multiples of BC. A tile that no row of the workgroup sees is skipped, and one that
// all rows see entirely is not checked key by key.
//
// A thread computes the scores of a key of a tile with all rows, then weights of a row with four neighbouring
// keys, and COLS columns of the output for all rows. Where SIDES is 2, a thread has twice the columns of half of
// the rows, which reads fewer weights:
//
//                thread t: key t                  column t + THREADS·x
//            ┌──────┬──────────────────┐        ┌──────┬────────────┐
//    ROWS    │ S,P  │                  │        │  O   │            │
//            └──────┴──────────────────┘        └──────┴────────────┘
//
// Q stays in workgroup memory. Stages of K, of four granules (16 bytes) of each key, go through it:
// neighbouring threads load neighbouring granules, and a thread computes with its key. A key's granules are
// permuted by place. The scores take the place of the last stage. Values of q8, q4, f8 and of 16-bit elements in
// aligned rows go through workgroup memory: a thread loads 4 bytes of four keys, or 16 bytes of two, and
// transposes them. Then a word holds a column of PACK keys. Other values are loaded by the threads that need
// them, whose neighbours load the neighbouring columns.
//
// No load of K or V is conditional. The next stage of K and the next AHEAD values are under way while a thread
// computes with those before. Keys after the last key that any row sees are replaced by that one, which may be
// loaded again. Whatever hidden keys hold, even NaN, select drops it.
//
// The operations on a row and their order are those of flash.wgsl: both yield the same bits for a row.
//
// Workgroup memory: 16·(KN + GN·WN + STAGES·QN + PN + SV·SG) + 32 + 8·RN bytes.

const EL: u32 = 4u * (1u + min(KV, 1u) + KV / 4u * 2u); // elements in 16 bytes: 4, 8 or 16
const SCALES: u32 = KV / 4u * (max(KV, 3u) - 3u) * (1u - KV / 6u); // of a key in a stage: 1 of q8, 2 of q4, else 0
const KUNIT: u32 = 1u + WIDE * (EL - 1u); // elements that a position in k counts
const VWIDE: u32 = WIDE * (EL / 8u); // 1: v is read 16 bytes at a time
const UNIT: u32 = 1u + VWIDE * (EL - 1u); // elements that a position in v counts
const PACK: u32 = 1u + VWIDE + EL / 16u * 3u; // keys of a word of staged, 1 if values are not staged
const STAGED: u32 = min(PACK - 1u, 1u);
const THREADS: u32 = (BC + 31u) / 32u * 32u;
const QN: u32 = EL * ROWS; // vec4 of q for a stage
const KN: u32 = 4u * BC; // granules of a stage of K
const KLOADS: u32 = (KN + THREADS - 1u) / THREADS;
const COLS: u32 = (4u * QUADS + THREADS / SIDES - 1u) / (THREADS / SIDES); // columns of a thread
const ACC: u32 = ROWS / SIDES * COLS;
const TWICE: u32 = VWIDE + SCALES / 2u; // 1: a load of values is for 8 columns
const LN: u32 = max(STAGED * QUADS / (1u + TWICE), 1u); // loads of a row of staged values
@if(STAGED == 1u) const LINES: u32 = (AHEAD / PACK * LN + THREADS - 1u) / THREADS; // loads of a thread
@else const LINES: u32 = COLS;
@if(STAGED == 1u) const VN: u32 = LINES * (4u + 4u * TWICE); // words that a thread loads ahead
@else const VN: u32 = AHEAD * COLS;
const GN: u32 = max(STAGED * (LINES * THREADS + LN - 1u) / LN, 1u);
const WN: u32 = max(STAGED * QUADS, 1u);
const PN: u32 = ROWS * BC / 16u;
const VB: u32 = max(SCALES / 2u * ((QUADS + 7u) / 8u), 1u); // blocks of q4 of a row of values
const SN: u32 = max(min(SCALES, 1u) * BC / AHEAD, 1u);
const SV: u32 = SN * VB;
const SG: u32 = max(min(SCALES, 1u) * AHEAD / 4u, 1u);
const RN: u32 = max(PAGED * 2u * BC, 1u);
const SQ: u32 = (ROWS * BC / 4u + THREADS - 1u) / THREADS; // vec4 of keys of a thread in the softmax
const WIDTH: u32 = QUADS + 5u; // vec4 of a row's state for one split: QUADS of O, 4 of l, m

@binding var<storage, read> q: array<u32>;
@each($x $FOURS: k WIDE, v VWIDE)
@if($FOURS == 1u) @binding var<storage, read> $x: array<vec4<u32>>;
@else @binding var<storage, read> $x: array<u32>;
@binding var<storage, read> mask, bias: array<u32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

var<workgroup> kv: array<vec4<u32>, KN>; // a stage of K, then [row][key/4]: dots, then weights
var<workgroup> staged: array<array<vec4<u32>, WN>, GN>; // values: [key/PACK][column/4], see column_at
var<workgroup> qs: array<array<vec4<f32>, QN>, STAGES>; // [stage][depth/4][row]
var<workgroup> part: array<vec4<f32>, PN>; // [row][key/16]: maxima
var<workgroup> scales: array<array<vec4<f32>, SG>, SV>; // [block][key/AHEAD][key/4]: of values of q8 and q4
var<workgroup> rescales: array<f32, 8>; // [row]
var<workgroup> rows_k, rows_v: array<u32, RN>; // [tile % 2][key]: where keys and values of pages begin

// Scores of a row with four neighbouring keys.
struct Scores {
    x: vec4<f32>, // before their unit
    s: vec4<f32>, // x·unit() in units of log 2, LOWEST where hidden
    seen: vec4<bool>,
}

// unit returns the factor of Scores.x. It stays a factor: score minus maximum is one fma everywhere.
fn unit() -> f32 {
    return select(p.unit, 1.0, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
}

// score turns the dot products of a row of the box with keys from j of the chunk into scores.
fn score(dots: vec4<f32>, b: u32, h: u32, row: u32, j: u32, cap: i32, offset: i32, check: bool) -> Scores {
    var r: Scores;
    r.x = dots;
    @if(MOD == 1u) r.x = modified(dots * p.scale, b, h, vec4<u32>(row), vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u));
    @if(MOD == 1u) let shown = !mod_hides(r.x);
    if ((p.flags & HAS_SOFTCAP) != 0u) { r.x = capped(r.x); }
    r.seen = vec4<bool>(true);
    let i = i32(p.row0 + row) + offset;
    let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, 1, 2, 3);
    @if(EXTRA == 1u) if ((p.flags & (HAS_BIAS | HAS_SLOPES)) == HAS_SLOPES) {
        let at = vec4<u32>(key_of(b, j), key_of(b, j + 1u), key_of(b, j + 2u), key_of(b, j + 3u));
        let away = vec4<f32>(abs(vec4<i32>(i + p.offset) - vec4<i32>(at + vec4<u32>(p.key0))));
        r.x = fma(r.x, vec4<f32>(p.unit), fma(vec4<f32>(-slope_of(b, h)), away, vec4<f32>(0.0)) * LOG2E);
    }
    if (check) {
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        @if(MOD == 1u) r.seen = r.seen & shown;
        let biased = (p.flags & HAS_BIAS) != 0u;
        let w = added(r.seen, b, h, row, j, 1u, biased);
        r.seen = w.seen;
        if (biased) { r.x = fma(r.x, vec4<f32>(p.unit), w.y * LOG2E); }
    }
    r.s = select(vec4<f32>(LOWEST), r.x * unit(), r.seen);
    return r;
}

// The parts of main, in the order of the formula. Those that load keys and values are in decode/keys.wgsl and values.wgsl.

// skip_tiles moves next to the first tile that a row sees.
@inline fn skip_tiles() {
    while (next < end && !tile_seen(b, h0, first, last, u32(next), BC, u32(end))) { next += i32(BC); }
}

// stage_q fills qs, with zeros beyond the rows and the head size.
@inline fn stage_q() {
    for (var x = t; x < STAGES * QN; x += THREADS) {
        let row = min(first + x % ROWS, last);
        let at = p.q.base + b * p.q.b + (h0 + row / p.rows) * p.q.h + (row % p.rows) * p.q.s;
        var r = vec4<f32>(0.0);
        @unroll for (var c = 0u; c < 4u; c++) {
            let d = x / ROWS * 4u + c;
            r[c] = select(0.0, load_q(at + min(d, p.dim - 1u) * p.q.d), d < p.dim && first + x % ROWS <= last);
        }
        qs[x / QN][x % QN] = r;
    }
}

// scores puts the dot products of the thread's key with all rows into kv, while the next stage is loaded.
@inline fn scores() {
    var dots: array<f32, ROWS>;
    @unroll for (var i = 0u; i < ROWS; i++) { dots[i] = 0.0; }
    for (var d0 = 0u; d0 < p.dim; d0 += 4u * EL) {
        let ends = d0 + 4u * EL >= p.dim;
        let from_turn = select(turn, 1u - turn, ends);
        let from_depth = select(d0 + 4u * EL, 0u, ends);
        workgroupBarrier();
        stage(t, next_stage);
        workgroupBarrier();
        var limit = k_limit;
        if (THREADS > BC) { // keys of later tiles are not loaded yet
            let j = select(j0, j1, ends);
            limit = min(limit, k_at / KUNIT + (j + BC - 1u) * k_step);
        }
        next_stage = fetch(t, select(k_start, k_next, ends), limit, from_turn, from_depth);
        @if(KV == 5u) {
            key_scale = next_scale;
            @unroll for (var e = 0u; e < 2u; e++) {
                let n = min(from_depth / 32u + e, p.dim / 32u - 1u);
                let j = select(j0, j1, ends);
                @inline load_scale(next_scale[e], k, key_at, k_at, j, k_step, from_turn, n);
            }
        }
        // In no branch, because RADV moves loads behind branches.
        @unroll(deep) for (var g = 0u; g < 4u; g++) {
            if (FULL == 1u || d0 + g * EL < p.dim) {
                let n = d0 / (4u * EL);
                var scale = key_scale.x;
                @if(KV == 5u) scale = select(key_scale.x, key_scale.y, g > 1u);
                let x = kv[place(min(t, BC - 1u), g)];
                @unroll for (var e = 0u; e < EL / 4u; e++) {
                    if (KV < 4u || FULL == 1u || d0 + g * EL + 4u * e < p.dim) {
                        var y = bitcast<vec4<f32>>(x);
                        @if(EL == 8u) {
                            let word = x[2u * e];
                            let word1 = x[2u * e + 1u];
                            @inline halves(y, word, word1, KV);
                        }
                        @if(KV == 6u) y = eighths(x[e]);
                        @if(SCALES != 0u) y = integers(x[e]) * scale;
                        @unroll for (var i = 0u; i < ROWS; i++) {
                            dots[i] = dot4(qs[n][(g * (EL / 4u) + e) * ROWS + i], y, dots[i]);
                        }
                    }
                }
            }
        }
    }
    k_start = k_next;
    workgroupBarrier();
    if (t < BC) {
        @unroll for (var i = 0u; i < ROWS; i++) {
            let dot = dots[i];
            kv[(i * BC + t) / 4u][t % 4u] = bitcast<u32>(dot);
        }
    }
    workgroupBarrier();
}

// weights replaces the scores in kv by weights, updates m, and puts 2^(m before - m) into rescales.
@inline fn weights() {
    var s: array<Scores, SQ>;
    @unroll for (var i = 0u; i < SQ; i++) {
        let x = t + THREADS * i;
        let row = first + x / (BC / 4u);
        if (x < ROWS * BC / 4u && row <= last) {
            let bits = kv[x];
            s[i] = score(bitcast<vec4<f32>>(bits), b, h0 + row / p.rows, row % p.rows, j0 + 4u * (x % (BC / 4u)), cap, offset, check);
            part[x / 4u][x % 4u] = max(m[i], largest(s[i].s));
        }
    }
    workgroupBarrier();
    @unroll for (var i = 0u; i < SQ; i++) {
        let x = t + THREADS * i;
        let row = x / (BC / 4u);
        if (x < ROWS * BC / 4u && first + row <= last) {
            var tops = vec4<f32>(m[i]);
            @unroll(deep) for (var c = 0u; c < BC / 16u; c++) {
                tops = max(tops, part[row * (BC / 16u) + c]);
            }
            let top = largest(tops);
            let rescale = exp2_down(vec4<f32>(m[i] - top)).x;
            m[i] = top;
            let e = exp2_down(fma(s[i].x, vec4<f32>(unit()), vec4<f32>(-top)));
            let w = select(vec4<f32>(hidden_weight()), e, s[i].seen);
            kv[x] = bitcast<vec4<u32>>(w);
            if (x % (BC / 4u) == 0u) { rescales[row] = rescale; }
        }
    }
}

// sums adds the weights of a row and class to l.
@inline fn sums() {
    var sum = 0.0;
    @unroll(deep) for (var n = 0u; n < BC / TX; n++) {
        let at = t / TX * BC + t % TX + TX * n;
        let bits = kv[at / 4u][at % 4u];
        let add = select(bitcast<f32>(bits), 0.0, bits == HIDDEN_BITS);
        sum = sum + add;
    }
    l = fma(l, rescales[t / TX], sum);
}

// drop hides the weights that dropout takes.
@inline fn drop() {
    workgroupBarrier();
    for (var x = t; x < ROWS * BC; x += THREADS) {
        let row = first + x / BC;
        if (row <= last && dropped(b, h0 + row / p.rows, row % p.rows, j0 + x % BC)) {
            kv[x / 4u][x % 4u] = HIDDEN_BITS;
        }
    }
    workgroupBarrier();
}

// output adds the products of the n-th four keys.
@inline fn output() {
    @unroll for (var i = 0u; i < ROWS / SIDES; i++) {
        let bits = kv[(row0 + i) * (BC / 4u) + j / 4u + n];
        var w = bitcast<vec4<f32>>(bits);
        @if(LOW == 1u) w = rounded(w);
        @unroll for (var x = 0u; x < COLS; x++) {
            @unroll for (var c = 0u; c < 4u; c++) {
                let sum = fma(w[c], y[x][c], acc[i * COLS + x]);
                @if(hide == 0u) {
                    acc[i * COLS + x] = sum;
                } @else {
                    acc[i * COLS + x] = select(sum, acc[i * COLS + x], bits[c] == HIDDEN_BITS);
                }
            }
        }
    }
}

// write_empty writes the state of rows that see no key.
@inline fn write_empty() {
    for (var row = first; row <= last; row++) {
        let at = (((b * p.heads + h0) * p.rows + row) * p.splits + p.part0 + split) * WIDTH;
        for (var x = t; x < WIDTH; x += THREADS) { state[at + x] = vec4<f32>(select(0.0, LOWEST, x == WIDTH - 1u)); }
    }
}

// write writes the state of the rows: O, the parts of l, m.
@inline fn write() {
    let at = (((b * p.heads + h0) * p.rows + first) * p.splits + p.part0 + split) * WIDTH;
    @unroll for (var i = 0u; i < ROWS / SIDES; i++) {
        @unroll for (var x = 0u; x < COLS; x++) {
            let w = t % (THREADS / SIDES) + THREADS / SIDES * x;
            if (first + row0 + i <= last && w < 4u * QUADS) {
                state[at + (row0 + i) * p.splits * WIDTH + column_at(w) / 4u][w % 4u] = acc[i * COLS + x];
            }
        }
    }
    if (t < ROWS * TX && first + t / TX <= last) {
        state[at + t / TX * p.splits * WIDTH + QUADS + t % TX / 4u][t % TX % 4u] = l;
    }
    @unroll for (var i = 0u; i < SQ; i++) {
        let x = t + THREADS * i;
        if (x < ROWS * BC / 4u && x % (BC / 4u) == 0u && first + x / (BC / 4u) <= last) {
            state[at + x / (BC / 4u) * p.splits * WIDTH + QUADS + 4u].x = m[i];
        }
    }
}

@main(THREADS) {
    @inline rows_of_split(b, first, ROWS);
    let k_at = p.k.base + k_batch + kh * p.k.h;
    let v_at = (p.v.base + v_batch + kh * p.v.h) / UNIT;

    @inline keys_of_split(b, first);
    if (begin >= end) { // splitmerge.wgsl finds splits by the positions of keys, and does not know the counts of lists
        @if(LISTED == 1u) if ((p.flags & HAS_COUNTS) != 0u) { @inline write_empty(); }
        return;
    }
    var paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;

    @inline stage_q();

    var next = (begin / i32(BC)) * i32(BC); // the next tile that some row sees
    @if(EXTRA == 1u) { @inline skip_tiles(); }
    let last_key = u32(end) - 1u - p.key0;
    var turn = 0u; // of rows_k and rows_v
    let tile_start = u32(next) - p.key0;
    @if(PAGED == 1u) { @inline look_up_rows(tile_start, turn); }
    @inline first_keys();
    @inline first_values();

    var row0 = 0u; // of the thread's rows of the output
    @if(SIDES != 1u) row0 = t / (THREADS / SIDES) % SIDES * (ROWS / SIDES);
    var m: array<f32, SQ>; // of the row of vec4 t + THREADS·i of the scores
    @unroll for (var i = 0u; i < SQ; i++) { m[i] = LOWEST; }
    var l = 0.0; // of row t / TX and class t % TX
    var acc: array<f32, ACC>; // [row][column], rows from row0 on
    @unroll for (var i = 0u; i < ACC; i++) { acc[i] = 0.0; }

    for (var tile = next; tile < end; tile = next) {
        next = tile + i32(BC);
        @if(EXTRA == 1u) { @inline skip_tiles(); }
        let j0 = u32(tile) - p.key0;
        let j1 = u32(next) - p.key0;
        let check = paired || tile < all_from || tile + i32(BC) > all_to;
        var value_scale: array<f32, VB>; // of key t
        @if(KV == 4u) { @inline load_scale(value_scale[0u], v, value_at, v_at, j0, v_step, turn, 0u); }
        @if(PAGED == 1u) { @inline look_up_rows(j1, (1u - turn)); }

        // With EXTRA tiles are skipped. Else the next tile begins where this one ends.
        var k_next = k_start + BC * k_step;
        @if(EXTRA == 1u) k_next = k_at / KUNIT + (j1 + key_of_line) * k_step;
        var key_scale = next_scale;
        @if(KV == 4u) { @inline load_scale(next_scale.x, k, key_at, k_at, j1, k_step, 1u - turn, 0u); }

        @inline scores();
        @if(KV == 5u) @unroll for (var e = 0u; e < VB; e++) { // not before, to save registers
            let n = min(e, (p.vdim - 1u) / 32u);
            @inline load_scale(value_scale[e], v, value_at, v_at, j0, v_step, turn, n);
        }
        @inline weights();
        @if(SCALES != 0u) @unroll for (var e = 0u; e < VB; e++) {
            if (t < BC) { scales[e * SN + t / AHEAD][t % AHEAD / 4u][t % 4u] = value_scale[e]; }
        }
        workgroupBarrier();
        if (t < ROWS * TX) { @inline sums(); }
        @if(EXTRA == 1u) if ((p.flags & HAS_DROPOUT) != 0u) { @inline drop(); }

        @unroll for (var i = 0u; i < ROWS / SIDES; i++) {
            @unroll for (var x = 0u; x < COLS; x++) {
                acc[i * COLS + x] = acc[i * COLS + x] * rescales[row0 + i];
            }
        }
        var stop = BC;
        @if(EXPAND != 2u) {
            stop = min(BC, u32(end - tile)); // no row sees keys from there on
        }
        var v_next: array<u32, LINES>; // of v_start
        @if(EXTRA == 1u) @unroll for (var x = 0u; x < LINES; x++) {
            var key_of_value = 0u;
            @if(PACK != 1u) key_of_value = (t + THREADS * x) / LN * PACK;
            v_next[x] = v_at + lines[x] + (j1 + key_of_value) * v_step;
        }
        @unroll for (var hide = 0u; hide < 2u; hide++) {
            if (check == (hide == 1u)) {
                for (var j = 0u; j < stop; j += AHEAD) {
                    let ends = j + AHEAD == BC;
                    let after_turn = select(turn, 1u - turn, ends);
                    let after_in = select(j + AHEAD, 0u, ends);
                    var v_here = v_start; // naga 0.13 indexes no array that is a let by a variable
                    @unroll for (var x = 0u; x < LINES; x++) {
                        v_start[x] = v_start[x] + AHEAD * v_step;
                        @if(EXTRA == 1u) v_start[x] = select(v_start[x], v_next[x], ends);
                    }
                    @if(PACK != 1u) { @inline stage_values(); }
                    @unroll for (var n = 0u; n < AHEAD / 4u; n++) {
                        @inline four_values();
                        @inline output();
                    }
                }
            }
        }
        turn = 1u - turn;
    }

    @inline write();
}
