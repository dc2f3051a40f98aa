// Fused attention with register tiles: the results of attention.wgsl, computed in tiles of 8x8 in both products
// instead of 4x4. It is a rung of this ladder, which "attn bench --ladder --backend gpu" measures. A word is one
// that is read from workgroup memory, and the peak is that of float32 multiply-adds; docs/gpu.md and docs/results
// have the figures.
//
//   - Stages: matmul.wgsl and softmax.wgsl. QKᵀ, softmax and PV are kernels of their own, and all scores go through
//     the device's memory.
//   - Tiled: attention.wgsl. A thread has 4x4 results, of tiles of keys that threads share in workgroup memory.
//     That is 2 multiply-adds a word: reads of that memory bound the time.
//   - Registers: this kernel. A thread has 8x8 results, and the loads of neighbouring threads merge, so that
//     multiply-adds bound the time: 4 a word, and 31.6 TFLOP/s on an H200 with D=64, 49% of the peak.
//   - Matrices: matrix.wgsl. Subgroups multiply matrices of f16 on units of their own, in low precision: 122
//     TFLOP/s in f16 on an H100 with D=64 and S=16,384, 19% of what products in registers reach.
//
// A workgroup computes a block of query rows of one head:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       o = Σ p_j·v_j / Σ p_j            lse = m + log Σ p_j
//
// A sink adds to Σ p_j only, and dropout affects Σ p_j·v_j only.
//
// Thread (tx, ty) of TX x TY has RV vec4 of rows, KT keys of a tile, and CV vec4 of columns in each of VP
// turns:
//
//                keys TX·j + tx            columns 4·(TX·i + tx) + 0..3
//            ┌──────┬──────┬─ TX ─┐        ┌──────┬─ TX ─┐
//     rows   │ 8x8  │      │      │        │ 8x8  │      │
//   8·ty + r ├──────┼ S,P  ┼      │        ├──────┼ O    │
//            └──────┴──────┴─ TY ─┘        └──────┴─ TY ─┘
//
// For 4 depths of QKᵀ a thread reads 8 vec4 of q and 8 of k and does 256 multiply-adds; for one key of PV it
// reads 2 vec4 of weights (of 4 rows each) and 2 of v and does 64. Both are 4 multiply-adds a word. A thread
// reads one row of the array a (q of its rows, later their weights) and one row of b (k of its keys, later v of
// its columns), at constant places once the loops are unrolled. The length of a row in vec4 is odd, which puts
// lanes on different banks. Neighbouring threads form pairs: 2i and 2i + 1 have the same tx, 2i and 2i + 2 the
// same ty, and 16-byte loads of the same words by neighbours merge for both operands. TY is even.
//
// The order of operations for a row, which decode.wgsl follows too. Prefill and decoding agree to the bit,
// whatever other rows the block has:
//
//   - max(D, Dv) puts a head into a class: 32, 64, 80, 96, 128 or 256. The class fixes the keys of a tile, BC =
//     KT·TX = 32, 64, 80, 96, 128 or 64, and TX = BC/8 (BC/4 for 256). Variants of a class differ only in RV,
//     TY and in how much they stage at once.
//   - Tiles of BC keys begin at multiples of BC, and splits of SPLIT keys at multiples of SPLIT, which is the
//     multiple of BC nearest to 256.
//   - x = Σ q_d·k_d by fma in ascending order of d, and with softcap tanh(x·scale/cap). The unit is
//     log2(e)·scale, or log2(e)·cap. A score is x·unit, in units of log 2. With slopes or a bias it is fma(x,
//     unit, y·log2(e)) and the unit becomes 1; y is the bias plus the relative bias, then fma(-slope, distance,
//     y). All sums of products are explicit fma, because a compiler may or may not fuse others.
//   - A tile: m = max(m, x·unit), from LOWEST; p = exp2_down(fma(x, unit, -m)); r = exp2_down(m before - m);
//     l_c = fma(l_c, r, Σ p over keys j ≡ c mod TX, ascending); o = o·r, then o = fma(p_j, v_j, o) in ascending
//     order of j. Hidden keys are skipped. A tile that the row does not see changes no bit.
//   - At its end a split joins the total. The first split in which the row sees a key, by position, is copied,
//     and splits in which it sees none are skipped. For others, with m = max(m_t, m_s), a = exp2_down(m_t - m),
//     b = exp2_down(m_s - m): o = fma(o_s, b, o_t·a), l_c = fma(l_cs, b, l_ct·a).
//   - Dropout hides weights after they were summed.
//   - At the end l = Σ l_c in ascending order, and a = 1. With a sink, in units of log 2, m = max(m, sink), a =
//     exp2_down(m before - m), l = fma(l, a, exp2_down(sink - m)). o = o·(1/l·(keep·a)), lse = fma(m, ln 2, log
//     l). keep is 1/(1-P) for dropout, else 1.
//
// State holds the registers (o, l, m) of each thread of each workgroup: first the totals of the finished
// splits, then, when keys come in chunks, those of the unfinished split at the end of the chunk. Cutting the
// keys changes no bit.
//
// Elements of q8 take part as scale·integer, rounded to float32; those of q4 as scale·(integer - 8), exactly.
//
// Hidden keys never take part. Their scores are not read, and their weight is a marker, hidden_weight(). The
// product with V multiplies it like any weight as long as the staged values are finite, and skips it otherwise
// (0·NaN is NaN). Products of 0 can change the sign of a sum that is 0: o has +0 there.
//
// QD = 0 stages weights only, all of a tile at once, and reads q, k and v where they are used. It is for drivers
// that execute threads on a processor: a read of workgroup memory costs them as much as one of a buffer.
//
// Workgroup memory: 16·(TY·SA + TX·SB + MN) + 4 bytes, 4 more with a score mod.

const Q2: u32 = VEC * min(IN, 1u); // 1: q is bound as fours of 16-bit elements
const KV2: u32 = VEC * min(1u - KV / 4u, min(KV, 1u)); // the same for k and v
const PAIRED: u32 = min(MASKS + BLOCKED + BIASES + SLOPED + CAPPED + DROPS, 1u); // 0: the call has none of the options
const THREADS: u32 = TX * TY;
const STAGED: u32 = JJ * TX; // keys of a step of PV
const SA: u32 = 1u + max(4u * RV * QD, max(STAGED * RV, TX * max(RV, ER))); // length of a row of a, odd
const SB: u32 = 1u + min(QD, 1u) * max(KT * QD, STAGED * CV); // length of a row of b, odd
const S4: u32 = RV * KT; // vec4 of scores of a thread
const ROWS: u32 = 4u * RV;
const COLS: u32 = CV * VP;
const O4: u32 = ROWS * COLS; // vec4 of the output of a thread
const KEEP: u32 = O4 + 2u * RV; // vec4 of state of a thread
const QN: u32 = (TY * ROWS * QD + THREADS - 1u) / THREADS; // vec4 of q that a thread stages
const KN: u32 = (TX * KT * QD + THREADS - 1u) / THREADS; // the same for k
const VN: u32 = min(QD, 1u) * ((STAGED * TX * CV + THREADS - 1u) / THREADS); // the same for v
const STEPS: u32 = KT / JJ;
const MW: u32 = (KT + 32u / TX - 1u) / (32u / TX); // words of a row of the mask
const MN: u32 = max(min(MASKS, 1u) * TY * RV * MW, 1u);
const MARKS: u32 = (TY * ROWS * MW + THREADS - 1u) / THREADS; // words of the mask that a thread stages

@each($x $TWO: q Q2, k KV2, v KV2)
@if($TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> mask, bias: array<u32>;
@if(OUT16 == 1u) @binding var<storage, read_write> o: Words;
@else @binding var<storage, read_write> o: array<u32>;
@binding var<storage, read_write> lse: array<f32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

// Used by the products with K and with V in turn, and for maxima, sums and outputs.
var<workgroup> a: array<array<vec4<f32>, SA>, TY>; // q [row][depth/4], p [key][row/4]
var<workgroup> b: array<array<vec4<f32>, SB>, TX>; // k [key][depth/4], v [key][column/4]
var<workgroup> shown: array<vec4<u32>, MN>; // [row/4][word]: bits of keys that a mask shows
var<workgroup> special: atomic<u32>; // the last round in which v had a NaN or an infinity
@if(MOD == 1u) var<workgroup> gaps: atomic<u32>; // 1 + the last tile in which the score mod hid a key

// next_v loads what is element x, in vec4, of a turn over the keys of a step of v, which begin at j. Keys and
// turns after the last are clamped, because steps are loaded ahead.
fn next_v(v_at: u32, batch: u32, j: u32, turn: u32, x: u32) -> vec4<u32> {
    let key = min(j + turn / VP * STAGED + x / (TX * CV), keys_of(batch) - 1u);
    return stored_v(v_row(v_at, batch, key), 4u * (turn % VP * (TX * CV) + x % (TX * CV)), p.vdim, p.v.d);
}

// The parts of main, in the order of the formula. Others are in common/tiles.wgsl and common/parts.wgsl. A thread has
// rows r0 + ty·ROWS + 4·h + 0..3 of the box, h < RV, and keys j0 + tx + TX·j of the chunk, j < KT.

// skip_tiles moves tile to the next one of which the block mask shows a pair, and sets mixed if it hides
// another. It is a loop of its own, because a software driver executes the rest of a loop body after a
// continue.
@inline fn skip_tiles() {
    if (has(BLOCKED, HAS_BLOCKS)) {
        var look = blocks_seen(batch, head, r0, TY * ROWS, u32(tile), TX * KT, u32(part_to));
        while (look == 0u && tile + tile_keys < part_to) {
            tile += tile_keys;
            look = blocks_seen(batch, head, r0, TY * ROWS, u32(tile), TX * KT, u32(part_to));
        }
        if (look == 0u) { break; }
        mixed = look == 1u;
    }
}

// stage_mask fills shown for the tile.
@inline fn stage_mask() {
    if (has(MASKS, HAS_MASK)) {
        let mask_at = p.mask.base + batch * p.mask.b + head * p.mask.h;
        @unroll for (var n = 0u; n < MARKS; n++) {
            let x = t + THREADS * n;
            if (MARKS * THREADS == TY * ROWS * MW || x < TY * ROWS * MW) {
                let row = x / MW;
                shown[row / 4u * MW + x % MW][row % 4u] =
                    marks(batch, mask_at + min(r0 + row, p.rows - 1u) * p.mask.s, j0 + 32u / TX * TX * (x % MW));
            }
        }
    }
}

// scores adds the products of 4·QD depths, from d0 on, to s.
@inline fn scores() {
    var q_loaded: array<vec4<u32>, QN>;
    var k_loaded: array<vec4<u32>, KN>;
    @unroll for (var n = 0u; n < QN; n++) {
        let x = t + THREADS * n;
        q_loaded[n] = stored_q(q_at + min(r0 + x / QD, rows - 1u) * p.q.s, d0 + 4u * (x % QD), p.dim, p.q.d);
    }
    @unroll for (var n = 0u; n < KN; n++) {
        let x = t + THREADS * n;
        k_loaded[n] = stored_k(k_row(k_at, batch, min(j0 + x / QD, keys - 1u)), d0 + 4u * (x % QD), p.dim, p.k.d);
    }
    workgroupBarrier();
    @inline stage_rows(value_q, q_loaded);
    @unroll for (var n = 0u; n < KN; n++) {
        let x = t + THREADS * n;
        if (KN * THREADS == TX * KT * QD || x < TX * KT * QD) {
            let key = x / QD;
            b[key % TX][(key / TX) * QD + x % QD] = value_k(k_loaded[n]);
        }
    }
    workgroupBarrier();
    @inline dots(0u);
}

// direct_scores adds the products of all depths to s.
@inline fn direct_scores() {
    var q_rows: array<u32, ROWS>;
    var k_rows: array<u32, KT>;
    @unroll for (var r = 0u; r < ROWS; r++) { q_rows[r] = q_at + min(r0 + ty * ROWS + r, rows - 1u) * p.q.s; }
    @unroll for (var j = 0u; j < KT; j++) { k_rows[j] = k_row(k_at, batch, min(j0 + tx + TX * j, keys - 1u)); }
    @if(MASKS != 0u) workgroupBarrier(); // of stage_mask
    for (var d = 0u; d < p.dim; d += 4u) {
        var x: array<vec4<f32>, ROWS>;
        @unroll for (var r = 0u; r < ROWS; r++) { x[r] = value_q(stored_q(q_rows[r], d, p.dim, p.q.d)); }
        var w: array<vec4<f32>, ROWS>; // [row/4][depth]
        @unroll for (var r = 0u; r < ROWS; r++) {
            w[r] = vec4<f32>(x[r / 4u * 4u][r % 4u], x[r / 4u * 4u + 1u][r % 4u],
                x[r / 4u * 4u + 2u][r % 4u], x[r / 4u * 4u + 3u][r % 4u]);
        }
        @unroll for (var j = 0u; j < KT; j++) {
            let y = value_k(stored_k(k_rows[j], d, p.dim, p.k.d));
            @unroll for (var h = 0u; h < RV; h++) {
                s[j * RV + h] = add(y.w, w[4u * h + 3u], add(y.z, w[4u * h + 2u],
                    add(y.y, w[4u * h + 1u], add(y.x, w[4u * h], s[j * RV + h]))));
            }
        }
    }
}

// direct_output adds the products of the weights and values of a step to the output, two keys at a time, because
// each iteration costs a software driver a copy of the sums.
@inline fn direct_output($add, $column) {
    for (var y = 0u; y < STAGED; y += 2u) {
        var w: array<vec4<f32>, RV>; // of the first key
        @unroll for (var h = 0u; h < RV; h++) { w[h] = a[ty][y * RV + h]; }
        var u: array<vec4<f32>, RV>; // of the second
        @unroll for (var h = 0u; h < RV; h++) { u[h] = a[ty][(y + 1u) * RV + h]; }
        let first = v_row(v_at, batch, min(j1 + y, keys - 1u));
        let second = v_row(v_at, batch, min(j1 + y + 1u, keys - 1u));
        @unroll for (var i = 0u; i < CV; i++) {
            let d = 4u * (TX * ($column + i) + tx);
            let x = value_v(stored_v(first, d, p.vdim, p.v.d));
            let z = value_v(stored_v(second, d, p.vdim, p.v.d));
            @unroll for (var r = 0u; r < ROWS; r++) {
                acc[r * COLS + $column + i] = $add(u[r / 4u][r % 4u], z,
                    $add(w[r / 4u][r % 4u], x, acc[r * COLS + $column + i]));
            }
        }
    }
}

// modify applies the score mod. A thread with a key that it hides sets check.
@inline fn modify() {
    var any = vec4<bool>(false);
    @unroll for (var h = 0u; h < RV; h++) {
        let row = vec4<u32>(r0 + ty * ROWS + 4u * h) + vec4<u32>(0u, 1u, 2u, 3u);
        @unroll for (var j = 0u; j < KT; j++) {
            s[j * RV + h] = modified(s[j * RV + h] * p.scale, batch, head, row, vec4<u32>(j0 + tx + TX * j));
            any = any | mod_hides(s[j * RV + h]);
        }
    }
    if (any.x || any.y || any.z || any.w) {
        check = true;
        atomicStore(&gaps, u32(tile) + 1u);
    }
}

// bounded_scores applies softcap, and slopes unless there is a bias.
@inline fn bounded_scores() {
    if (has(CAPPED, HAS_SOFTCAP)) {
        @unroll for (var i = 0u; i < S4; i++) { s[i] = capped(s[i]); }
    }
    if (has(SLOPED, HAS_SLOPES) && !has(BIASES, HAS_BIAS)) {
        let slope = vec4<f32>(slope_of(batch, head));
        @unroll for (var h = 0u; h < RV; h++) {
            @unroll for (var j = 0u; j < KT; j++) {
                let at = i32(p.row0 + r0 + ty * ROWS + 4u * h) + p.offset + offset - i32(p.key0 + key_of(batch, j0 + tx + TX * j));
                let away = vec4<f32>(abs(vec4<i32>(at) + vec4<i32>(0, 1, 2, 3)));
                s[j * RV + h] = fma(s[j * RV + h], vec4<f32>(p.unit), fma(-slope, away, vec4<f32>(0.0)) * LOG2E);
            }
        }
    }
}

// hide sets most to the largest score of each row, and in hidden_bits a bit for each hidden score. It applies the other
// options, unless all rows see all keys of the tile.
@inline fn hide() {
    hidden_bits[0] = 0u;
    hidden_bits[1] = 0u;
    if (check) {
        @unroll for (var h = 0u; h < RV; h++) {
            let row = r0 + ty * ROWS + 4u * h;
            let i = vec4<i32>(i32(p.row0 + row) + offset) + vec4<i32>(0, 1, 2, 3);
            let from_key = i + p.lo;
            let to_key = min(i + p.hi, vec4<i32>(cap));
            let pairs = pairs_of(batch, head, row);
            @unroll for (var j = 0u; j < KT; j++) {
                let key = vec4<i32>(tile + i32(tx + TX * j));
                var w = Scores(s[j * RV + h], (key < from_key) | (key >= to_key));
                @if(MOD == 1u) w.hidden = w.hidden | mod_hides(w.x);
                @if(MASKS != 0u) if (has(MASKS, HAS_MASK)) {
                    let bits = shown[(ty * RV + h) * MW + j / (32u / TX)] >> vec4<u32>(tx);
                    w.hidden = w.hidden | ((bits & vec4<u32>(1u << (j % (32u / TX) * TX))) == vec4<u32>(0u));
                }
                @if(PAIRED == 1u) w = paired(w, pairs, batch, head, row, min(j0 + tx + TX * j, p.keys - 1u));
                s[j * RV + h] = w.x;
                most[h] = max(most[h], select(w.x * unit, vec4<f32>(LOWEST), w.hidden));
                let bits = select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), w.hidden);
                hidden_bits[(j * RV + h) / 8u] |= (bits.x | bits.y | bits.z | bits.w) << (4u * ((j * RV + h) % 8u));
            }
        }
    } else {
        @unroll for (var h = 0u; h < RV; h++) {
            @unroll for (var j = 0u; j < KT; j++) { most[h] = max(most[h], s[j * RV + h] * unit); }
        }
    }
}

// weights replaces s by weights, adds these to l, and rescales l and the output.
@inline fn weights() {
    @unroll for (var h = 0u; h < RV; h++) {
        var sum = vec4<f32>(0.0);
        @unroll for (var j = 0u; j < KT; j++) {
            var e = exp2_down(fma(s[j * RV + h], vec4<f32>(unit), -m[h]));
            if (check) {
                let bits = hidden_bits[(j * RV + h) / 8u] >> (4u * ((j * RV + h) % 8u));
                let hidden = (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
                e = select(e, vec4<f32>(hidden_weight()), hidden);
            }
            sum = sum + e;
            @if(LOW == 1u) e = rounded(e);
            s[j * RV + h] = e;
        }
        l[h] = fma(l[h], rescale[h], sum);
    }
    @unroll for (var r = 0u; r < ROWS; r++) {
        @unroll for (var i = 0u; i < COLS; i++) {
            acc[r * COLS + i] = acc[r * COLS + i] * rescale[r / 4u][r % 4u];
        }
    }
}

// load_v loads the thread's values of a turn over the keys of a step, which begin at j.
@inline fn load_v($j, $turn) {
    @unroll for (var n = 0u; n < VN; n++) { v_loaded[n] = next_v(v_at, batch, $j, $turn, t + THREADS * n); }
}

// drop hides the staged weights that dropout takes.
@inline fn drop() {
    @if(PAIRED == 1u) if (has(DROPS, HAS_DROPOUT)) {
        for (var x = 0u; x < JJ * RV; x++) {
            let at = (x / RV * TX + tx) * RV + x % RV;
            a[ty][at] = without_dropped(a[ty][at], batch, head,
                r0 + ty * ROWS + 4u * (x % RV), j1 + x / RV * TX + tx);
        }
    }
}

// add_splits adds the total of the splits before, which is state, to the registers.
@inline fn add_splits() {
    let s0 = part * split_keys;
    var before, mine: array<vec4<f32>, RV>; // factors of the splits before and of this one
    var keep, fresh: array<vec4<bool>, RV>; // rows that see no key of this split, and none before it
    @unroll for (var h = 0u; h < RV; h++) {
        let i = vec4<i32>(i32(p.row0 + r0 + ty * ROWS + 4u * h) + offset) + vec4<i32>(0, 1, 2, 3);
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
    @unroll for (var r = 0u; r < ROWS; r++) {
        @unroll for (var i = 0u; i < COLS; i++) {
            let x = acc[r * COLS + i];
            let x_old = state[state_at + (r * COLS + i) * THREADS];
            let sum = fma(x, vec4<f32>(mine[r / 4u][r % 4u]), x_old * before[r / 4u][r % 4u]);
            acc[r * COLS + i] = select(select(sum, x, fresh[r / 4u][r % 4u]), x_old, keep[r / 4u][r % 4u]);
        }
    }
}

@main(THREADS) {
    let tx = (t / 2u) % TX;
    let ty = t / (2u * TX) * 2u + t % 2u;
    let r0 = block_of(id / p.batch_heads) * (TY * ROWS);
    let head = (id % p.batch_heads) % p.heads;
    let batch = (id % p.batch_heads) / p.heads;
    @inline heads(batch, head, kv_head);
    @if(PACKED == 1u) if (r0 >= rows) { return; }
    let state_at = id * (KEEP * THREADS) + t;

    @inline registers(); // of the split
    if ((p.flags & GO_ON) != 0u) { @inline load_state(p.running + state_at); }
    @inline visible_keys();

    // The split that the registers belong to, and the last split of the chunk.
    let tile_keys = i32(TX * KT);
    let split_keys = i32(SPLIT);
    let first_split = sees_from / split_keys;
    let from_split = max(min(i32(p.key0), sees_to) - 1, sees_from) / split_keys;
    var to_split = from_split;
    if (end > begin) { to_split = (end - 1) / split_keys; }
    let unit = select(p.unit, 1.0, has(BIASES, HAS_BIAS) || has(SLOPED, HAS_SLOPES));
    let paired_tiles = has(MASKS, HAS_MASK) || has(BIASES, HAS_BIAS) || has(DROPS, HAS_DROPOUT);

    var round = 0u; // counts what is staged of v
    if (t == 0u) { atomicStore(&special, 0u); }
    @if(MOD == 1u) if (t == 0u) { atomicStore(&gaps, 0u); }
    for (var part = from_split; part <= to_split; part++) {
        let part_from = max(begin, part * split_keys);
        let part_to = min(end, (part + 1) * split_keys);
        for (var tile = (part_from / tile_keys) * tile_keys; tile < part_to; tile += tile_keys) {
            var mixed = false; // the block mask hides some pairs of the tile, but not all
            @if(PAIRED == 1u) { @inline skip_tiles(); }
            let j0 = u32(tile) - p.key0;
            var check = paired_tiles || mixed || tile < all_from || tile + tile_keys > all_to;
            @if(MASKS != 0u) { @inline stage_mask(); }

            var s: array<vec4<f32>, S4>; // [key][row/4]
            @unroll for (var i = 0u; i < S4; i++) { s[i] = vec4<f32>(0.0); }
            @if(QD == 0u) { @inline direct_scores(); } @else for (var d0 = 0u; d0 < p.dim; d0 += 4u * QD) { @inline scores(); }
            @if(MOD == 1u) { @inline modify(); }
            @if(PAIRED == 1u) { @inline bounded_scores(); }

            var most: array<vec4<f32>, RV>;
            @unroll for (var h = 0u; h < RV; h++) { most[h] = vec4<f32>(LOWEST); }
            var hidden_bits: array<u32, 2>;
            @inline hide();
            @if(QD != 0u) var v_loaded: array<vec4<u32>, VN>;
            @if(AHEAD == 1u) { @inline load_v(j0, 0u); }
            @inline maxima();
            @if(MOD == 1u) check = check || atomicLoad(&gaps) == u32(tile) + 1u;
            @inline weights();

            for (var c = 0u; c < STEPS; c++) {
                @unroll for (var turn = 0u; turn < VP; turn++) {
                    let j1 = j0 + c * STAGED;
                    round += 1u;
                    @if(AHEAD == 0u) { @inline load_v(j1, turn); }
                    workgroupBarrier();
                    if (turn == 0u) {
                        @inline stage_weights();
                        @inline drop();
                    }
                    @inline stage_columns(value_v, v_loaded, TX, 0u);
                    workgroupBarrier();
                    @if(AHEAD == 1u) { @inline load_v(j1, turn + 1u); }
                    @if(QD == 0u) { if (check) { @inline direct_output(add_seen, turn * CV); } else { @inline direct_output(add, turn * CV); } }
                    @else if (check && atomicLoad(&special) == round) { @inline output(add_seen, turn * CV, 0u); } else { @inline output(add, turn * CV, 0u); }
                }
            }
        }

        // The end of a split, or of the chunk, unless the next chunk continues this split.
        let done = part < to_split || (p.flags & LEAVE) == 0u;
        if (done && part > first_split) { @inline add_splits(); }
        if (part < to_split) {
            @inline save_state(state_at);
            @inline clear();
        }
    }
    if ((p.flags & LEAVE) != 0u) {
        @inline save_state(p.running + state_at);
        return;
    }
    @inline totals();
    @inline write_output();
}
