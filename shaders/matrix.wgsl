// Fused attention on matrix units: the options and results of flash.wgsl for 16-bit operands, whose products a
// subgroup takes as matrices of f16 that add up in f32. In units of log 2,
//
//     s_j = unit · q·k_j, with the options      p_j = 2^(s_j - m)      o = Σ f16(p_j)·v_j / Σ p_j
//     lse = (m + log2 Σ p_j)·log 2
//
// A workgroup has TY subgroups, each with ROWS = M·TILES query rows of one head, and goes through the keys, KEYS at a
// time. Its keys and values lie in workgroup memory, padded with zeros, so that any strides and head sizes become aligned
// matrices:
//
//              keys of a tile               columns
//            ┌─────┬─ KEYS ─┐             ┌─────┬─ COLUMNS ─┐
//     rows   │ MxN │        │      rows   │ MxN │           │
//     of a   ├─────┼  S     ┤      of a   ├─────┼  O        ┤
//   subgroup └─────┴─ ROWS ─┘    subgroup └─────┴── ROWS ───┘
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
// matrix/odd.wgsl scales bf16 to f16, and has what lanes compute in place of matrices.
//
// State holds, for chunks of keys, the output of a workgroup by rows, then m, its sum and whether the row has met a huge
// value, for each lane.
//
// Workgroup memory: 8·KEYS·(KS + VS) + TY·ROWS·(16·SS + 8·PS) + 16·TY bytes, and 4·TY·ROWS for bf16. Arrays have
// vectors of four elements, in which offsets and strides of matrices are counted.
diagnostic(off, chromium.subgroup_matrix_uniformity);
diagnostic(off, subgroup_uniformity);
enable f16;
enable subgroups;
enable chromium_experimental_subgroup_matrix;

const Q2: u32 = VEC * min(IN, 1u); // 1: q is bound as fours of 16-bit elements
const KV2: u32 = VEC * min(KV, 1u); // the same for k and v
const THREADS: u32 = TY * LANES;
const ROWS: u32 = M * TILES; // query rows of a subgroup
const PER: u32 = max(LANES / ROWS, 1u); // lanes of a row
const EACH: u32 = max(ROWS / LANES, 1u); // rows of a lane
const STEP: u32 = LANES / PER; // distance of the rows of a lane
const FOURS: u32 = KEYS / (4u * PER); // vec4 of scores of a lane's row
const QI: u32 = DEPTH / K; // matrices along the depth
const SN: u32 = KEYS / N; // of the scores along the keys
const PI: u32 = KEYS / K; // of the weights along the keys
const ON: u32 = COLUMNS / N; // of the output along the columns
const TURNS: u32 = (COLUMNS + KEYS - 1u) / KEYS; // KEYS columns of the output pass through workgroup memory at once
const QTURNS: u32 = (DEPTH + KEYS - 1u) / KEYS; // the same for depths of the queries
const KN: u32 = (KEYS * DEPTH / 4u + THREADS - 1u) / THREADS; // vec4 of k that a thread stages
const VN: u32 = (KEYS * COLUMNS / 4u + THREADS - 1u) / THREADS; // the same for v
// Lengths of rows in fours. Strides of matrices are multiples of 16 bytes, and two fours more put rows on different banks.
const KS: u32 = DEPTH / 4u + 2u;
const VS: u32 = COLUMNS / 4u + 2u;
const SS: u32 = KEYS / 4u + 2u;
const PS: u32 = KEYS / 4u + 2u;
const AREA: u32 = TY * ROWS * COLUMNS / 4u + THREADS * EACH; // vec4 of state
const SLACK: f32 = 8.0;

// Types name columns first.
alias Left = subgroup_matrix_left<f16, K, M>;
alias Right = subgroup_matrix_right<f16, N, K>;
alias Result = subgroup_matrix_result<f32, N, M>;

@each($x $TWO: q Q2, k KV2, v KV2)
@if($TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> mask: array<u32>;
@binding var<storage, read> bias: array<u32>;
@if(OUT16 == 1u) @binding var<storage, read_write> o: Words;
@else @binding var<storage, read_write> o: array<u32>;
@binding var<storage, read_write> lse: array<f32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

var<workgroup> tile_k: array<vec2<u32>, KEYS * KS>; // [key][depth/4]
var<workgroup> tile_v: array<vec2<u32>, KEYS * VS>; // [key][column/4]
var<workgroup> scores: array<vec4<f32>, TY * ROWS * SS>; // [row][key/4], and columns of the output
var<workgroup> weights: array<vec2<u32>, TY * ROWS * PS>; // [row][key/4], and depths of queries
// 1 if a subgroup rescales, and masks of keys for what it has staged: odd values, huge values, odd keys of the next tile.
var<workgroup> calls: array<vec4<u32>, TY>;

// The parts of main, in the order of the formula.

// stage_q loads the queries of each subgroup, KEYS depths at once.
@inline fn stage_q() {
    for (var c = 0u; c < QTURNS; c++) {
        for (var x = t; x < TY * ROWS * KEYS / 4u; x += THREADS) {
            let row = x / (KEYS / 4u);
            let d = 4u * (x % (KEYS / 4u));
            var row_top = 0u;
            @if(IN == 2u) row_top = tops[row];
            weights[row * PS + d / 4u] = half_q(stored_q(q_at + min(r0 + row, p.rows - 1u) * p.q.s, c * KEYS + d, p.dim, p.q.d), row_top);
        }
        workgroupBarrier();
        @unroll for (var y = 0u; y < QTURNS; y++) {
            if (c == y) {
                @unroll for (var i = 0u; i < min(PI, QI - y * PI); i++) {
                    @unroll for (var h = 0u; h < TILES; h++) {
                        query[h * QI + y * PI + i] = subgroupMatrixLoad<Left, row_major>(&weights, (subgroup * ROWS + h * M) * PS + i * (K / 4u), PS);
                    }
                }
            }
        }
        workgroupBarrier();
    }
}

// load_$x and stage_$x move vec4 n of $x that the thread stages for the keys from $j on: first to $to, then to workgroup memory.
// Keys after the last are clamped.
@each($x $WIDTH $dim: k DEPTH dim, v COLUMNS vdim)
@inline fn load_$x($to, $j) {
    let at = t + THREADS * n;
    $to = stored_$x($x_row($x_at, batch, min($j + at / ($WIDTH / 4u), p.keys - 1u)), 4u * (at % ($WIDTH / 4u)), p.$dim, p.$x.d);
}

@inline fn stage_k($from) {
    let x = t + THREADS * n;
    if (KN * THREADS == KEYS * DEPTH / 4u || x < KEYS * DEPTH / 4u) {
        tile_k[x / (DEPTH / 4u) * KS + x % (DEPTH / 4u)] = half_k($from, K_TOP);
        @if(IN == 2u) if (any(odd(value_k($from), K_TOP))) { wants.w |= 1u << (x / (DEPTH / 4u)); }
    }
}

@inline fn stage_v($from) {
    let x = t + THREADS * n;
    if (VN * THREADS == KEYS * COLUMNS / 4u || x < KEYS * COLUMNS / 4u) {
        var y = half_v($from, V_TOP);
        let key = x / (COLUMNS / 4u);
        @if(IN == 2u) {
            let z = value_v($from);
            if (any(odd(z, V_TOP))) { wants.y |= 1u << key; }
            if (any(magnitude(z) >= vec4<u32>(HUGE << 23u))) { wants.z |= 1u << key; }
        } @else if (check) {
            let whole = y;
            y = finite_halves(whole);
            if (any(y != whole)) { wants.y |= 1u << key; }
        }
        tile_v[key * VS + x % (COLUMNS / 4u)] = y;
    }
}

// products stores the scores of the subgroup's rows and the tile's keys, before their unit.
@inline fn products() {
    var s: array<Result, TILES * SN>;
    @unroll for (var n = 0u; n < TILES * SN; n++) { s[n] = Result(); }
    @unroll for (var i = 0u; i < QI; i++) {
        @unroll for (var n = 0u; n < SN; n++) {
            let x = subgroupMatrixLoad<Right, col_major>(&tile_k, n * N * KS + i * (K / 4u), KS);
            @unroll for (var h = 0u; h < TILES; h++) { s[h * SN + n] = subgroupMatrixMultiplyAccumulate(query[h * QI + i], x, s[h * SN + n]); }
        }
    }
    @unroll for (var h = 0u; h < TILES; h++) {
        @unroll for (var n = 0u; n < SN; n++) { subgroupMatrixStore<row_major>(&scores, (subgroup * ROWS + h * M) * SS + n * (N / 4u), s[h * SN + n], SS); }
    }
}

// softmax replaces the scores of the lane's rows by weights, adds these to l, and declares rescale, the factors of the output.
@inline fn softmax() {
    var rescale: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        let line = subgroup * ROWS + lane / PER + h * STEP;
        let row = r0 + line;
        var s: array<vec4<f32>, FOURS>;
        @unroll for (var g = 0u; g < FOURS; g++) { s[g] = scores[line * SS + lane % PER + g * PER]; }
        @if(IN == 2u) { @inline own_scores(); }
        @inline options();
        var top = vec4<f32>(LOWEST);
        @unroll for (var g = 0u; g < FOURS; g++) { top = max(top, s[g]); }
        var most = largest(top);
        for (var apart = 1u; apart < PER; apart = apart * 2u) { most = max(most, subgroupShuffleXor(most, apart)); }
        rescale[h] = 1.0;
        if (most - m[h] > SLACK) { // m + SLACK may be rounded up
            rescale[h] = exp2_down(vec4<f32>(m[h] - most)).x;
            if (m[h] > LOWEST) { wants.x = 1u; }
            m[h] = most;
        }
        var sum = vec4<f32>(0.0);
        @unroll for (var g = 0u; g < FOURS; g++) {
            var e: vec4<f32>;
            @if(EXP2 == 1u) e = exp2(s[g] - m[h]);
            @else e = exp2_down(s[g] - m[h]);
            if (check) { e = select(e, vec4<f32>(hidden_weight()), bitcast<vec4<u32>>(s[g]) == vec4<u32>(MINUS_INF)); }
            sum += e;
            @if(PAIRED == 1u) if ((p.flags & HAS_DROPOUT) != 0u) {
                @unroll for (var r = 0u; r < 4u; r++) {
                    if (dropped(batch, head, row, j0 + 4u * (lane % PER + g * PER) + r)) { e[r] = hidden_weight(); }
                }
            }
            @if(IN == 2u) e = e * 128.0;
            weights[line * PS + lane % PER + g * PER] = halves_of(e);
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
        let i = i32(p.row0 + row);
        @unroll for (var g = 0u; g < FOURS; g++) {
            let c = 4u * (lane % PER + g * PER);
            let key = vec4<i32>(tile + i32(c)) + vec4<i32>(0, 1, 2, 3);
            var shown = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
            @if(MOD == 1u) shown = shown & !mod_hides(s[g]);
            @if(PAIRED == 1u) {
                if (row >= p.rows) { shown = vec4<bool>(false); }
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

// store_columns and load_columns move turn c of the output to and from workgroup memory.
@inline fn store_columns() {
    @unroll for (var y = 0u; y < TURNS; y++) {
        if (c == y) {
            @unroll for (var n = 0u; n < min(SN, ON - y * SN); n++) {
                @unroll for (var h = 0u; h < TILES; h++) {
                    subgroupMatrixStore<row_major>(&scores, (subgroup * ROWS + h * M) * SS + n * (N / 4u), acc[h * ON + y * SN + n], SS);
                }
            }
        }
    }
    workgroupBarrier();
}

@inline fn load_columns() {
    workgroupBarrier();
    @unroll for (var y = 0u; y < TURNS; y++) {
        if (c == y) {
            @unroll for (var n = 0u; n < min(SN, ON - y * SN); n++) {
                @unroll for (var h = 0u; h < TILES; h++) {
                    acc[h * ON + y * SN + n] = subgroupMatrixLoad<Result, row_major>(&scores, (subgroup * ROWS + h * M) * SS + n * (N / 4u), SS);
                }
            }
        }
    }
    workgroupBarrier();
}

// output adds the products of weights and values to the output.
@inline fn output_products() {
    @unroll for (var i = 0u; i < PI; i++) {
        var w: array<Left, TILES>;
        @unroll for (var h = 0u; h < TILES; h++) { w[h] = subgroupMatrixLoad<Left, row_major>(&weights, (subgroup * ROWS + h * M) * PS + i * (K / 4u), PS); }
        @unroll for (var n = 0u; n < ON; n++) {
            let x = subgroupMatrixLoad<Right, row_major>(&tile_v, i * K * VS + n * (N / 4u), VS);
            @unroll for (var h = 0u; h < TILES; h++) { acc[h * ON + n] = subgroupMatrixMultiplyAccumulate(w[h], x, acc[h * ON + n]); }
        }
    }
}

// load_state and save_state move the output, m and l from and to state.
@inline fn load_state_matrices() {
    @unroll for (var h = 0u; h < TILES; h++) {
        @unroll for (var n = 0u; n < ON; n++) {
            acc[h * ON + n] = subgroupMatrixLoad<Result, row_major>(&state, state_at + (subgroup * ROWS + h * M) * (COLUMNS / 4u) + n * (N / 4u), COLUMNS / 4u);
        }
    }
    @unroll for (var h = 0u; h < EACH; h++) {
        let ml = state[state_at + TY * ROWS * COLUMNS / 4u + h * THREADS + subgroup * LANES + lane];
        m[h] = ml.x;
        l[h] = ml.y;
        @if(IN == 2u) huge_row[h] = ml.z != 0.0;
    }
}

@inline fn save_state_matrices() {
    @unroll for (var h = 0u; h < TILES; h++) {
        @unroll for (var n = 0u; n < ON; n++) {
            subgroupMatrixStore<row_major>(&state, state_at + (subgroup * ROWS + h * M) * (COLUMNS / 4u) + n * (N / 4u), acc[h * ON + n], COLUMNS / 4u);
        }
    }
    @unroll for (var h = 0u; h < EACH; h++) {
        var huge = 0.0;
        @if(IN == 2u) huge = select(0.0, 1.0, huge_row[h]);
        state[state_at + TY * ROWS * COLUMNS / 4u + h * THREADS + subgroup * LANES + lane] = vec4<f32>(m[h], l[h], huge, 0.0);
    }
}

// row_totals writes the log-sum-exp of the lane's rows and declares inverse, the factors of the output.
@inline fn row_totals() {
    var inverse: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        var sum = l[h];
        for (var apart = 1u; apart < PER; apart = apart * 2u) { sum += subgroupShuffleXor(sum, apart); }
        var scale = p.keep;
        if ((p.flags & HAS_SINKS) != 0u) {
            let sink = p.sinks[head / 4u][head % 4u];
            if (bitcast<u32>(sink) != MINUS_INF) {
                let top = max(m[h], sink);
                let parts = exp2_down(vec4<f32>(m[h] - top, sink - top, 0.0, 0.0));
                sum = fma(sum, parts.x, parts.y);
                scale = scale * parts.x;
                m[h] = top;
            }
        }
        let empty = (bitcast<u32>(sum) & 0x7fffffffu) == 0u;
        let safe = select(sum, 1.0, empty);
        inverse[h] = select(1.0 / safe * scale, 0.0, empty);
        let row = r0 + subgroup * ROWS + lane / PER + h * STEP;
        if ((p.flags & WANT_LSE) != 0u && lane % PER == 0u && row < p.rows) {
            lse[p.lse.base + batch * p.lse.b + head * p.lse.h + row * p.lse.s] = select(fma(m[h], LN2, log_acc(safe)), negative_infinity(), empty);
        }
    }
}

// write_rows writes the output: neighbouring lanes write neighbouring columns.
@inline fn write_rows() {
    for (var c = 0u; c < TURNS; c++) {
        @inline store_columns();
        @unroll for (var h = 0u; h < EACH; h++) {
            let line = subgroup * ROWS + lane / PER + h * STEP;
            for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                var y = unsigned_zeros(scores[line * SS + x]);
                @if(IN == 2u) y = y * power_of_two(select(112u, 127u, huge_row[h]));
                y = y * inverse[h];
                @if(IN == 2u) y = y * power_of_two(select(127u, 176u, huge_row[h])); // last, as it may overflow before
                scores[line * SS + x] = y;
            }
        }
        workgroupBarrier();
        for (var x = t; x < TY * ROWS * KEYS; x += THREADS) {
            let row = r0 + x / KEYS;
            let d = c * KEYS + x % KEYS;
            if (row < p.rows && d < p.vdim) {
                let to = p.o.base + batch * p.o.b + head * p.o.h + row * p.o.s + d * p.o.d;
                let result = scores[x / KEYS * SS + x % KEYS / 4u][x % 4u];
                @if(OUT16 == 0u) o[to] = bitcast<u32>(result);
                @else put(to, result);
            }
        }
        workgroupBarrier();
    }
}

// vote sets called to what any thread of the workgroup wants. It is a barrier.
@inline fn vote() {
    let wanted = subgroupOr(wants);
    if (lane == 0u) { calls[subgroup] = wanted; }
    let all = workgroupUniformLoad(&calls);
    called = vec4<u32>();
    @unroll for (var y = 0u; y < TY; y++) { called |= all[y]; }
}

// skip_tiles moves $tile to the next one of which the block mask shows a pair.
@inline fn skip_tiles($tile) {
    @if(PAIRED == 1u) if ((p.flags & HAS_BLOCKS) != 0u) {
        while ($tile < end && blocks_seen(batch, head, r0, TY * ROWS, u32($tile), KEYS, u32(end)) == 0u) { $tile += i32(KEYS); }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) t: u32,
    @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let id = p.first + group.y * groups.x + group.x;
    if (id >= p.total) { return; }
    let r0 = block_of(id / p.batch_heads) * (TY * ROWS);
    let head = (id % p.batch_heads) % p.heads;
    let batch = (id % p.batch_heads) / p.heads;
    @inline heads(batch, head, kv_head);

    let state_at = id * AREA;

    @if(IN == 2u) var top: array<u32, EACH>;
    @if(IN == 2u) var odd_row: array<bool, EACH>;
    @if(IN == 2u) var huge_row: array<bool, EACH>;
    @if(IN == 2u) { @inline row_tops(); }
    var query: array<Left, TILES * QI>;
    @inline stage_q();
    var acc: array<Result, TILES * ON>;
    var m: array<f32, EACH>;
    var l: array<f32, EACH>;
    @unroll for (var h = 0u; h < EACH; h++) {
        m[h] = LOWEST;
        l[h] = 0.0;
    }
    if ((p.flags & GO_ON) != 0u) { @inline load_state_matrices(); }
    @inline visible_keys();
    var paired = false;
    @if(PAIRED == 1u) paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;
    @if(PAIRED == 1u) let biased = (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u;

    var tile = begin / i32(KEYS) * i32(KEYS);
    @inline skip_tiles(tile);
    var wants = vec4<u32>();
    var called = vec4<u32>();
    if (tile < end) {
        for (var n = 0u; n < KN; n++) {
            var z: vec4<u32>;
            @inline load_k(z, u32(tile) - p.key0);
            @inline stage_k(z);
        }
    }
    @if(IN == 2u) {
        @unroll for (var h = 0u; h < EACH; h++) { wants.z |= select(0u, 1u, huge_row[h]); }
        @inline vote();
    } @else workgroupBarrier();
    @if(IN == 2u) var huge = called.z != 0u;
    while (tile < end) {
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + i32(KEYS) > all_to;
        var next = tile + i32(KEYS);
        @inline skip_tiles(next);
        let j1 = u32(next) - p.key0;
        @if(AHEAD == 1u) var kr: array<vec4<u32>, KN>;
        @if(AHEAD == 1u) var vr: array<vec4<u32>, VN>;
        @if(AHEAD == 1u) @unroll for (var n = 0u; n < VN; n++) { @inline load_v(vr[n], j0); }
        @if(AHEAD == 1u) @unroll for (var n = 0u; n < KN; n++) { @inline load_k(kr[n], j1); }
        @inline products();
        workgroupBarrier();

        @if(IN == 2u) let odd_keys = called.w;
        wants = vec4<u32>();
        @inline softmax();
        @if(AHEAD == 1u) {
            @unroll for (var n = 0u; n < VN; n++) { @inline stage_v(vr[n]); }
            @unroll for (var n = 0u; n < KN; n++) { @inline stage_k(kr[n]); }
        } @else {
            for (var n = 0u; n < VN; n++) {
                var z: vec4<u32>;
                @inline load_v(z, j0);
                @inline stage_v(z);
            }
            for (var n = 0u; n < KN; n++) {
                var z: vec4<u32>;
                @inline load_k(z, j1);
                @inline stage_k(z);
            }
        }
        @inline vote();
        var anew = (called.x | called.y) != 0u;
        @if(IN == 2u) {
            huge = huge || called.z != 0u;
            anew = anew || huge;
        }
        if (anew) { @inline rescale_output(); }
        @inline output_products();
        tile = next;
    }
    if ((p.flags & LEAVE) != 0u) {
        @inline save_state_matrices();
        return;
    }
    @inline row_totals();
    @inline write_rows();
}
