// Fused attention on matrix units: the options and results of flash.wgsl in low precision. A subgroup takes products as
// matrices of f16 that add up in f32. In units of log 2,
//
//     s_j = unit · q·k_j, with the options      p_j = 2^(s_j - m)      o = Σ f16(p_j)·v_j / Σ p_j
//     lse = (m + log2 Σ p_j)·log 2
//
// A workgroup has TY subgroups, each with M query rows of one head, and goes through the keys, KEYS at a time. Its keys
// and values lie in workgroup memory, padded with zeros, so that any strides and head sizes become aligned matrices:
//
//              keys of a tile               columns
//            ┌─────┬─ KEYS ─┐             ┌─────┬─ COLUMNS ─┐
//     rows   │ MxN │        │      rows   │ MxN │           │
//     of a   ├─────┼  S     ┤      of a   ├─────┼  O        ┤
//   subgroup └─────┴── M ───┘   subgroup └─────┴──── M ────┘
//
// Queries, scores and the output are matrices in registers. WGSL has no access to their elements: scores pass
// through workgroup memory as f32, PER lanes have a row there, and weights come back as f16.
//
// What flash.wgsl does not have:
//
//   - m is a score of the row that is at most the largest so far, and at least that less SLACK. Only where a maximum
//     rises by more, the output passes through workgroup memory to be rescaled. Weights are 2^SLACK at most.
//   - A tile takes two barriers, in turns of products and of the softmax. Between them the keys of the next tile
//     and the values of this one are on their way in registers.
//   - Rows do not depend on each other: m, its sum (in PER parts) and the order of additions are those of a row alone.
//
// Weights of hidden keys are -0. Where a value of a tile is not finite (0·NaN is NaN), it is 0 in the matrix, and lanes
// add its products with the weights of visible keys while they rescale the output.
//
// matrix/odd.wgsl scales bf16 and f32 to f16, and has what lanes compute in place of matrices. matrix/split.wgsl has the
// products of f32.
//
// With SPLIT it is the first half of decoding on matrix units: rows are those of all query heads that read a key head, numbered as in
// decode.wgsl, and the results of a split of the keys are for splitmerge.wgsl, see matrix/decode.wgsl.
//
// State holds, for chunks of keys, the output of a workgroup by rows, then m, its sum and whether the row has met a huge
// value, for each lane.
//
// Workgroup memory: PARTS·2·UNIT·KEYS·(KS + VS) + TY·M·(16·SS + PARTS·8·PS) + 32 bytes, and 4·TY·M for bf16 and f32. Arrays have vectors,
// in which offsets and strides of matrices are counted. Each subgroup has its own arrays of scores and weights, so that
// offsets in them are constants: others get checks that hide from NVIDIA's compiler that they are aligned, and it then
// moves matrices by single elements.

const EXPAND: u32 = 2u; // loops of @unroll(deep) are unrolled
const PARTS: u32 = 2u - min(IN, 1u); // numbers of f16 for an element: 2 for f32
const Q2: u32 = min(VEC, min(IN, 1u)); // 1: q is bound as fours (VEC 1) or eights (VEC 2) of 16-bit elements
const KV2: u32 = Q2 * (1u - KV / 6u); // the same for k and v; those of f8 are bound as words of four
const UNIT: u32 = 4u * max(VEC, 1u); // elements of k and v that a thread loads at once
const THREADS: u32 = TY * LANES;
const ROWS: u32 = M; // query rows of a subgroup
const PER: u32 = max(LANES / M, 1u); // lanes of a row
const HALVINGS: u32 = PER / 2u - PER / 8u; // log2(PER)
const EACH: u32 = max(M / LANES, 1u); // rows of a lane
const STEP: u32 = LANES / PER; // distance of the rows of a lane
const FOURS: u32 = KEYS / (4u * PER); // vec4 of scores of a lane's row
const QI: u32 = DEPTH / K; // matrices along the depth
const SN: u32 = KEYS / N; // of the scores along the keys
const PI: u32 = KEYS / K; // of the weights along the keys
const ON: u32 = COLUMNS / N; // of the output along the columns
const TURNS: u32 = (COLUMNS + KEYS - 1u) / KEYS; // KEYS columns of the output pass through workgroup memory at once
const QTURNS: u32 = (DEPTH + KEYS - 1u) / KEYS; // the same for depths of the queries
const KN: u32 = (KEYS * DEPTH / UNIT + THREADS - 1u) / THREADS; // units of k that a thread stages
const VN: u32 = (KEYS * COLUMNS / UNIT + THREADS - 1u) / THREADS; // the same for v
// Lengths of rows in units and in fours. Strides of matrices are multiples of 16 bytes, and 16 bytes more put rows on different
// banks.
const KS: u32 = DEPTH / UNIT + 8u / UNIT;
const VS: u32 = COLUMNS / UNIT + 8u / UNIT;
const SS: u32 = KEYS / 4u + 2u;
const PS: u32 = KEYS / 4u + 2u;
const AREA: u32 = TY * M * COLUMNS / 4u + THREADS * EACH; // vec4 of state
const SLACK: f32 = 8.0;

@each($x $TWO: q Q2, k KV2, v KV2)
@if(VEC * $TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> mask, bias: array<u32>;
@if(SPLIT == 0u) @if(OUT16 == 1u) @binding var<storage, read_write> o: Words;
@else @binding var<storage, read_write> o: array<u32>;
@if(SPLIT == 0u) @binding var<storage, read_write> lse: array<f32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

// Units of keys and values: [part][key][depth/UNIT] and [part][key][column/UNIT].
@each($x $XS: k KS, v VS)
@if(VEC == 2u) var<workgroup> tile_$x: array<vec4<u32>, PARTS * KEYS * $XS>;
@else var<workgroup> tile_$x: array<vec2<u32>, PARTS * KEYS * $XS>;
var<workgroup> scores: array<array<vec4<f32>, M * SS>, TY>; // [subgroup][row][key/4], and columns of the output
var<workgroup> weights: array<array<vec2<u32>, PARTS * M * PS>, TY>; // [subgroup][part][row][key/4], and depths of queries
// What threads want in this turn and in the one before: 0, or 1, and 2 more to rescale; and masks of keys for what they have
// staged: odd values, huge values, odd keys of the next tile.
var<workgroup> calls: array<atomic<u32>, 8>;

// row_of_q returns where a row of the workgroup's begins in q, at most the last of them.
fn row_of_q(q_at: u32, number: u32, rows: u32) -> u32 {
    let row = min(number, rows - 1u);
    @if(SPLIT == 0u) return q_at + row * p.q.s;
    @else return q_at + row / p.rows * p.q.h + row % p.rows * p.q.s;
}

// The parts of main, in the order of the formula.

// stage_q loads the queries of each subgroup, KEYS depths at once.
@inline fn stage_q() {
    for (var c = 0u; c < QTURNS; c++) {
        for (var x = t; x < TY * M * KEYS / 4u; x += THREADS) {
            let row = x / (KEYS / 4u);
            let d = 4u * (x % (KEYS / 4u));
            var row_top = 0u;
            @if(IN != 1u) row_top = tops[row];
            let four = stored_q(row_of_q(q_at, r0 + row, rows), c * KEYS + d, p.dim, p.q.d);
            @unroll for (var part = 0u; part < PARTS; part++) { weights[row / M][(part * M + row % M) * PS + d / 4u] = half_q(four, row_top, part); }
        }
        workgroupBarrier();
        @unroll for (var y = 0u; y < QTURNS; y++) {
            if (c == y) {
                @unroll for (var i = 0u; i < min(PI, QI - y * PI); i++) {
                    @unroll for (var part = 0u; part < PARTS; part++) {
                        query[part * QI + y * PI + i] = subgroupMatrixLoad<Left, row_major>(&weights[subgroup], part * M * PS + i * (K / 4u), PS);
                    }
                }
            }
        }
        workgroupBarrier();
    }
}

// load_$x and stage_$x move unit n of $x that the thread stages for the keys from $j on: first to $to, then to workgroup memory.
// Keys after the last are clamped.
@each($x $WIDTH $dim: k DEPTH dim, v COLUMNS vdim)
@inline fn load_$x($to, $j) {
    let at = t + THREADS * n;
    $to = unit_$x($x_row($x_at, batch, min($j + at / ($WIDTH / UNIT), keys - 1u)), UNIT * (at % ($WIDTH / UNIT)), p.$dim, p.$x.d);
}

@inline fn stage_k($from) {
    let x = t + THREADS * n;
    if (KN * THREADS == KEYS * DEPTH / UNIT || x < KEYS * DEPTH / UNIT) {
        @unroll for (var part = 0u; part < PARTS; part++) {
            tile_k[(part * KEYS + x / (DEPTH / UNIT)) * KS + x % (DEPTH / UNIT)] = halved_k($from, K_TOP, part);
        }
        @if(IN != 1u) if (any_odd_k($from, K_TOP)) { wants.w |= 1u << (x / (DEPTH / UNIT)); }
    }
}

@inline fn stage_v($from) {
    let x = t + THREADS * n;
    if (VN * THREADS == KEYS * COLUMNS / UNIT || x < KEYS * COLUMNS / UNIT) {
        let key = x / (COLUMNS / UNIT);
        @if(IN != 1u) {
            if (any_odd_v($from, V_TOP)) { wants.y |= 1u << key; }
            if (any_huge($from)) { wants.z |= 1u << key; }
        } @else if (check && any_odd_v($from, V_TOP)) {
            wants.y |= 1u << key;
            $from = only_finite($from);
        }
        @unroll for (var part = 0u; part < PARTS; part++) {
            tile_v[(part * KEYS + key) * VS + x % (COLUMNS / UNIT)] = halved_v($from, V_TOP, part);
        }
    }
}

// move_$x moves all units of $x that the thread stages, one after the other.
@each($x $COUNT: k KN, v VN)
@inline fn move_$x($j) {
    for (var n = 0u; n < $COUNT; n++) {
        var unit: vec4<u32>;
        @inline load_$x(unit, $j);
        @inline stage_$x(unit);
    }
}

// products stores the scores of the subgroup's rows and the tile's keys, before their unit.
@inline fn products() {
    var s: array<Result, SN>;
    @unroll for (var n = 0u; n < SN; n++) { s[n] = Result(); }
    @if(IN == 0u) { @inline low_scores(); }
    @unroll for (var i = 0u; i < QI; i++) {
        @unroll for (var n = 0u; n < SN; n++) {
            let x = subgroupMatrixLoad<Right, col_major>(&tile_k, n * N * KS + i * (K / UNIT), KS);
            s[n] = subgroupMatrixMultiplyAccumulate(query[i], x, s[n]);
        }
    }
    @unroll for (var n = 0u; n < SN; n++) { subgroupMatrixStore<row_major>(&scores[subgroup], n * (N / 4u), s[n], SS); }
}

// softmax replaces the scores of the lane's rows by weights, adds these to l, and declares rescale, the factors of the output.
@inline fn softmax() {
    var rescale: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        let line = lane / PER + h * STEP;
        let number = r0 + subgroup * M + line;
        @if(SPLIT == 0u) let row = number;
        @if(SPLIT != 0u) let row = min(number, last) % p.rows;
        @if(SPLIT != 0u) let head = h0 + min(number, last) / p.rows;
        var s, e: array<vec4<f32>, FOURS>;
        @unroll for (var g = 0u; g < FOURS; g++) { s[g] = scores[subgroup][line * SS + lane % PER + g * PER]; }
        @if(IN != 1u) { @inline own_scores(); }
        @inline options();
        var top = vec4<f32>(LOWEST);
        @unroll for (var g = 0u; g < FOURS; g++) { top = max(top, s[g]); }
        var most = largest(top);
        @unroll for (var y = 0u; y < HALVINGS; y++) { most = max(most, subgroupShuffleXor(most, 1u << y)); }
        rescale[h] = 1.0;
        if (most - m[h] > SLACK) { // m + SLACK may be rounded up
            rescale[h] = exp2_down(vec4<f32>(m[h] - most)).x;
            if (m[h] > LOWEST) { wants.x = 2u; }
            m[h] = most;
        }
        @unroll for (var g = 0u; g < FOURS; g++) {
            @if(EXP2 == 1u) e[g] = exp2(s[g] - m[h]);
            @else e[g] = exp2_down(s[g] - m[h]);
        }
        if (check) {
            @unroll for (var g = 0u; g < FOURS; g++) { e[g] = select(e[g], vec4<f32>(hidden_weight()), bitcast<vec4<u32>>(s[g]) == vec4<u32>(MINUS_INF)); }
        }
        var sum = vec4<f32>(0.0);
        @unroll for (var g = 0u; g < FOURS; g++) { sum += e[g]; }
        @if(PAIRED == 1u) if ((p.flags & HAS_DROPOUT) != 0u) {
            @unroll for (var g = 0u; g < FOURS; g++) {
                @unroll for (var r = 0u; r < 4u; r++) {
                    if (dropped(batch, head, row, j0 + 4u * (lane % PER + g * PER) + r)) { e[g][r] = hidden_weight(); }
                }
            }
        }
        @unroll for (var g = 0u; g < FOURS; g++) {
            @if(IN != 1u) e[g] = e[g] * power_of_two(127u + W_UP);
            @unroll for (var part = 0u; part < PARTS; part++) {
                weights[subgroup][(part * M + line) * PS + lane % PER + g * PER] = halves_of(part_of(e[g], part));
            }
        }
        l[h] = fma(l[h], rescale[h], (sum.x + sum.y) + (sum.z + sum.w));
    }
}

// options applies the unit and the options to the scores of a row. Hidden keys become -Inf.
@inline fn options() {
    @if(MOD == 1u) {
        @unroll for (var g = 0u; g < FOURS; g++) {
            let j = vec4<u32>(j0 + 4u * (lane % PER + g * PER)) + vec4<u32>(0u, 1u, 2u, 3u);
            s[g] = modified(s[g] * p.scale, batch, head, vec4<u32>(row), j);
        }
    }
    @if(PAIRED == 1u) if ((p.flags & HAS_SOFTCAP) != 0u) {
        @unroll for (var g = 0u; g < FOURS; g++) { s[g] = capped(s[g]); }
    }
    if (check) {
        let i = i32(p.row0 + row) + offset;
        @unroll for (var g = 0u; g < FOURS; g++) {
            let c = 4u * (lane % PER + g * PER);
            let key = vec4<i32>(tile + i32(c)) + vec4<i32>(0, 1, 2, 3);
            var shown = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
            @if(MOD == 1u) shown = shown & !mod_hides(s[g]);
            @if(PAIRED == 1u) {
                if (row >= rows) { shown = vec4<bool>(false); }
                let w = added(shown, batch, head, row, j0 + c, 1u, biased);
                shown = w.seen;
                s[g] = fma(s[g], vec4<f32>(p.unit), w.y * LOG2E);
            } @else s[g] = s[g] * p.unit;
            s[g] = select(vec4<f32>(negative_infinity()), s[g], shown);
        }
    } else {
        @unroll for (var g = 0u; g < FOURS; g++) { s[g] = s[g] * p.unit; }
    }
}

// output adds the products of weights and values to the output.
@inline fn output_products() {
    @if(IN == 0u) { @inline low_output(); }
    @unroll for (var i = 0u; i < PI; i++) {
        let w = subgroupMatrixLoad<Left, row_major>(&weights[subgroup], i * (K / 4u), PS);
        @unroll for (var n = 0u; n < ON; n++) {
            let x = subgroupMatrixLoad<Right, row_major>(&tile_v, i * K * VS + n * (N / UNIT), VS);
            acc[n] = subgroupMatrixMultiplyAccumulate(w, x, acc[n]);
        }
    }
}

// load_state and save_state move the output, m and l from and to state.
@inline fn load_state_matrices() {
    @unroll for (var n = 0u; n < ON; n++) {
        acc[n] = subgroupMatrixLoad<Result, row_major>(&state, state_at + subgroup * M * (COLUMNS / 4u) + n * (N / 4u), COLUMNS / 4u);
    }
    @unroll for (var h = 0u; h < EACH; h++) {
        let ml = state[state_at + TY * M * COLUMNS / 4u + h * THREADS + subgroup * LANES + lane];
        m[h] = ml.x;
        l[h] = ml.y;
        @if(IN != 1u) huge_row[h] = ml.z != 0.0;
    }
}

@inline fn save_state_matrices() {
    @unroll for (var n = 0u; n < ON; n++) {
        subgroupMatrixStore<row_major>(&state, state_at + subgroup * M * (COLUMNS / 4u) + n * (N / 4u), acc[n], COLUMNS / 4u);
    }
    @unroll for (var h = 0u; h < EACH; h++) {
        var huge = 0.0;
        @if(IN != 1u) huge = select(0.0, 1.0, huge_row[h]);
        state[state_at + TY * M * COLUMNS / 4u + h * THREADS + subgroup * LANES + lane] = vec4<f32>(m[h], l[h], huge, 0.0);
    }
}

// row_totals writes the log-sum-exp of the lane's rows and declares inverse, the factors of the output.
@inline fn row_totals() {
    var inverse: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        var sum = l[h];
        @unroll for (var y = 0u; y < HALVINGS; y++) { sum += subgroupShuffleXor(sum, 1u << y); }
        @inline add_sink(sum, m[h], head);
        let empty = (bitcast<u32>(sum) & 0x7fffffffu) == 0u;
        let safe = select(sum, 1.0, empty);
        inverse[h] = select(1.0 / safe * scale, 0.0, empty);
        let row = r0 + subgroup * M + lane / PER + h * STEP;
        if ((p.flags & WANT_LSE) != 0u && lane % PER == 0u && row < rows) {
            lse[lse_at + row * p.lse.s] = select(fma(m[h], LN2, log_acc(safe)), negative_infinity(), empty);
        }
    }
}

// write_rows writes the output: neighbouring lanes write neighbouring columns.
@inline fn write_rows() {
    for (var c = 0u; c < TURNS; c++) {
        @inline store_columns(acc, ON);
        @unroll for (var h = 0u; h < EACH; h++) {
            let line = lane / PER + h * STEP;
            for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                var y = scores[subgroup][line * SS + x];
                @if(IN != 1u) {
                    let far = far_of(y, huge_row[h]);
                    y = unsigned_zeros(near(y, far)) * either_power(127u - UP, 127u, far);
                    y = y * inverse[h] * either_power(127u, 191u - UP, far); // last, as it may overflow before
                } @else y = unsigned_zeros(y) * inverse[h];
                scores[subgroup][line * SS + x] = y;
            }
        }
        workgroupBarrier();
        for (var x = t; x < TY * M * KEYS / 2u; x += THREADS) {
            let row = r0 + x / (KEYS / 2u);
            let y = x % (KEYS / 2u) * 2u;
            let d = c * KEYS + y;
            if (row < rows && d < p.vdim) {
                let to = o_at + row * p.o.s + d * p.o.d;
                let four = scores[x / (KEYS / 2u) / M][x / (KEYS / 2u) % M * SS + y / 4u];
                let pair = select(four.xy, four.zw, y % 4u != 0u);
                @if(OUT16 == 0u) {
                    o[to] = bitcast<u32>(pair.x);
                    if (d + 1u < p.vdim) { o[to + p.o.d] = bitcast<u32>(pair.y); }
                } @else {
                    if (p.o.d == 1u && to % 2u == 0u && d + 1u < p.vdim) { // a whole word
                        atomicStore(&o.data[to / 2u], encode16(pair.x, p.out_type) | (encode16(pair.y, p.out_type) << 16u));
                    } else {
                        put16(to, encode16(pair.x, p.out_type));
                        if (d + 1u < p.vdim) { put16(to + p.o.d, encode16(pair.y, p.out_type)); }
                    }
                }
            }
        }
        workgroupBarrier();
    }
}

// vote sets called to what any thread of the workgroup wants. It is a barrier.
@inline fn vote() {
    turn = 4u - turn;
    if (t < 4u) { atomicStore(&calls[4u - turn + t], 0u); }
    if (any(wants != vec4<u32>())) {
        atomicOr(&calls[turn], wants.x | 1u);
        @unroll for (var y = 0u; y < 3u; y++) { atomicOr(&calls[turn + 1u + y], wants[1u + y]); }
    }
    called = vec4<u32>(workgroupUniformLoad(&calls[turn]), 0u, 0u, 0u);
    if (called.x != 0u) {
        @unroll for (var y = 0u; y < 3u; y++) { called[1u + y] = workgroupUniformLoad(&calls[turn + 1u + y]); }
    }
}

// skip_tiles moves $tile to the next one of which the block mask shows a pair.
@inline fn skip_tiles($tile) {
    @if(PAIRED == 1u) if ((p.flags & HAS_BLOCKS) != 0u) {
        @if(SPLIT == 0u) while ($tile < end && blocks_seen(batch, head, r0, TY * M, u32($tile), KEYS, u32(end)) == 0u) { $tile += i32(KEYS); }
        @else while ($tile < end && !tile_seen(batch, h0, r0, last, u32($tile), KEYS, u32(end))) { $tile += i32(KEYS); }
    }
}

// attend goes through the keys from begin to end.
@inline fn attend() {
    @each($x $T: top u32, odd_row bool, huge_row bool) @if(IN != 1u) var $x: array<$T, EACH>;
    @if(IN != 1u) { @inline row_tops(); }
    var query: array<Left, PARTS * QI>;
    @inline stage_q();
    var acc: array<Result, ON>;
    var m, l: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        m[h] = LOWEST;
        l[h] = 0.0;
    }
    @if(SPLIT == 0u) if ((p.flags & GO_ON) != 0u) { @inline load_state_matrices(); }
    var paired = false;
    @if(PAIRED == 1u) paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;
    @if(PAIRED == 1u) let biased = (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u;

    var tile = begin / i32(KEYS) * i32(KEYS);
    @inline skip_tiles(tile);
    var wants = vec4<u32>();
    var called = vec4<u32>();
    var turn = 0u;
    if (tile < end) {
        let j = u32(tile) - p.key0;
        @if(AHEAD * SPLIT == 0u) { @inline move_k(j); }
        @else { // all at once, as a split has few tiles
            var first: array<vec4<u32>, KN>;
            @unroll for (var n = 0u; n < KN; n++) { @inline load_k(first[n], j); }
            @unroll for (var n = 0u; n < KN; n++) { @inline stage_k(first[n]); }
        }
    }
    @if(IN != 1u) {
        @unroll for (var h = 0u; h < EACH; h++) { wants.z |= select(0u, 1u, huge_row[h]); }
        @inline vote();
    } @else workgroupBarrier();
    @if(IN != 1u) var huge = called.z != 0u;
    while (tile < end) {
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + i32(KEYS) > all_to;
        var next = tile + i32(KEYS);
        @inline skip_tiles(next);
        let j1 = u32(next) - p.key0;
        @each($x $COUNT: k KN, v VN) @if(AHEAD == 1u) var $x_loaded: array<vec4<u32>, $COUNT>;
        @each($x $COUNT $j: v VN j0, k KN j1) @if(AHEAD == 1u) @unroll for (var n = 0u; n < $COUNT; n++) { @inline load_$x($x_loaded[n], $j); }
        @inline products();
        workgroupBarrier();

        @if(IN != 1u) let odd_keys = called.w;
        wants = vec4<u32>();
        @inline softmax();
        @if(AHEAD == 1u) {
            @each($x $COUNT: v VN, k KN) @unroll for (var n = 0u; n < $COUNT; n++) { @inline stage_$x($x_loaded[n]); }
        } @else {
            @inline move_v(j0);
            @inline move_k(j1);
        }
        @inline vote();
        var anew = ((called.x & 2u) | called.y) != 0u;
        @if(IN != 1u) {
            huge = huge || called.z != 0u;
            anew = anew || huge;
        }
        if (anew) { @inline rescale_output(); }
        @inline output_products();
        tile = next;
    }
}

@if(SPLIT == 0u) @main(THREADS) {
    let r0 = block_of(id / p.batch_heads) * (TY * M);
    let head = (id % p.batch_heads) % p.heads;
    let batch = (id % p.batch_heads) / p.heads;
    @inline heads(batch, head, kv_head);
    @if(PACKED == 1u) if (r0 >= rows) { return; }

    let state_at = id * AREA;
    @inline visible_keys();
    @inline attend();
    if ((p.flags & LEAVE) != 0u) {
        @inline save_state_matrices();
        return;
    }
    @inline row_totals();
    @inline write_rows();
} @else @main(THREADS) {
    @inline rows_of_split(batch, r0, (TY * M));
    @inline keys_of_split(batch, r0);
    @if(LISTED == 0u) if (begin >= end) { return; } // else there may be a count, see decode.wgsl
    let keys = u32(end) - p.key0;
    let q_at = p.q.base + batch * p.q.b + h0 * p.q.h;
    @each($x: k, v) let $x_at = p.$x.base + $x_batch + kh * p.$x.h;
    @inline attend();
    @inline write_split();
}
