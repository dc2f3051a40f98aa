// Gradients of fused attention, without atomics. With P = exp(min(s - LSE, 0)) and D = rowsum(dO ∘ O) - dLSE, which
// delta.wgsl computes:
//
//     dS = P ∘ (keep·dP - D)    dP = dO·Vᵀ    dX = scale · dS ∘ (1 - tanh²)
//     dV = (keep·P)ᵀ·dO         dK = dXᵀ·Q    dQ = dX·K
//
// OF chooses the results: dV and dK, which share P (Dao 2023), dQ, or dS. A workgroup owns 8·TY rows of the
// results, keys of one key head for dV and dK, else rows of one query head, and loops over tiles of 4·TX others:
// the rows that see one of its keys, or the keys that one of its rows sees. For each tile it takes the query heads
// that share the key head in turn. Every sum is a chain of fma in that order. Tiles of rows begin at multiples of
// 4·TX of the call, so that the chunks of a cut change no bit. For dS a workgroup computes one tile.
//
// Thread (tx, ty) of TX x TY has 8 owned rows or keys, 4 others of a tile, and 8 columns. One half of the lanes
// has the columns of dV, whose weights are keep·P, the other half those of dK, whose weights are dX:
//
//                others KA·tx + KB·j       columns 4·(LANES·i + lane) + 0..3
//            ┌──────┬──────┬─ TX ─┐        ┌──────┬LANES ┬──────┬─ TX ─┐
//     owned  │ 8x4  │      │      │        │ 8x8  │      │      │      │
//   8·ty + r ├──────┼ S,dP ┼      │        ├──────┼  dV  ┼──────┼  dK  ┤
//            └──────┴──────┴─ TY ─┘        └──────┴──────┴──────┴─ TY ─┘
//
// The products are those of flash.wgsl, with the owned in place of its rows. What a stage reads is loaded while
// the stage before is multiplied. Results with more than 8·LANES columns take several workgroups, which compute
// the weights again.
//
// The sums are state, in float32: rows of p.splits vec4, of dV and then of dK. convert.wgsl rounds them to their
// type. dS is [row][key] in state.
//
// Hidden pairs never take part, as in flash.wgsl. Rows whose LSE is -Inf are hidden.
//
// Workgroup memory: 16·(TY·SA + TX·SB) + 8·TILE_ROWS + 8 bytes.

// The binding g is dO, with the strides o. The binding rows has D and LSE of each row, with the strides s.

const Q2: u32 = VEC * min(IN, 1u); // 1: q is bound as fours of 16-bit elements
const KV2: u32 = VEC * min(KV, 1u); // the same for k and v
const G2: u32 = VEC * min(DO, 1u); // the same for dO
const KEYS: u32 = 1u - min(OF, 1u); // 1: the workgroup owns keys, for dV and dK
const LANES: u32 = TX / (1u + KEYS); // along the columns of a result
const RV: u32 = 2u; // of the owned, see common/tiles.wgsl
const ROWS: u32 = 8u;
const KT: u32 = 4u; // others
const CV: u32 = 2u;
const COLS: u32 = CV;
const THREADS: u32 = TX * TY;
const KA: u32 = 1u + OF / 2u * 3u; // others of a thread are KA·tx + KB·j
@if(OF == 2u) const KB: u32 = 1u;
@else const KB: u32 = TX;
const STAGED: u32 = 16u - 8u * max(KEYS, TX % 4u / 2u); // others of a step of the product with them, a divisor of OTHERS
const SA: u32 = 1u + max(8u * QD, 32u); // length of a row of a, odd
const SB: u32 = 1u + max(4u * QD, 2u * STAGED); // length of a row of b, odd
const OWNED: u32 = 8u * TY;
const OTHERS: u32 = KT * TX;
const STEPS: u32 = OTHERS / STAGED;
const TILE_ROWS: u32 = OWNED + (OTHERS - OWNED) * KEYS;
const TILE_KEYS: u32 = OWNED + OTHERS - TILE_ROWS;
const QN: u32 = (OWNED * QD + THREADS - 1u) / THREADS; // vec4 of the owned that a thread stages
const KN: u32 = (OTHERS * QD + THREADS - 1u) / THREADS; // the same for the others
const RN: u32 = QN + (KN - QN) * KEYS; // of q and dO
const JN: u32 = KN + (QN - KN) * KEYS; // of k and v
const WIDE: u32 = 2u * LANES; // vec4 of columns of a result
const VN: u32 = (STAGED * WIDE + THREADS - 1u) / THREADS; // the same for a step and a result
const LOADED: u32 = max(max(QN, KN), VN);

@each($x $TWO: q Q2, k KV2, v KV2, g G2)
@if($TWO == 1u) @binding var<storage, read> $x: array<vec2<u32>>;
@else @binding var<storage, read> $x: array<vec4<u32>>;
@binding var<storage, read> rows: array<f32>;
@binding var<storage, read> mask, bias: array<u32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

var<workgroup> a: array<array<vec4<f32>, SA>, TY>; // the owned [row][depth/4], weights [result][other][owned/4]
var<workgroup> b: array<array<vec4<f32>, SB>, TX>; // others [other][depth/4], [other][column/4]
var<workgroup> info: array<vec2<f32>, TILE_ROWS>; // LSE in units of log 2, and D, of the rows of the tile
// dead is the last tile with a row whose LSE is -Inf, special the last round in which the others had a NaN or an infinity.
var<workgroup> dead, special: atomic<u32>;

// row_$x returns where row i of the part of $x that begins at element at, or its last row, begins.
@each($x $s $n: q q rows, g o rows, k k keys, v v keys)
fn row_$x(at: u32, i: u32) -> u32 { return at + min(i, p.$n - 1u) * p.$s.s; }

@each($x $s: q q, g o, k k, v v)
fn four_$x(row: u32, d: u32, end: u32) -> vec4<u32> { return stored_$x(row, d, end, p.$s.d); }

// The parts of main, in the order of the formula.

// tiles_of_owner declares the key head of the workgroup, and from which row or key to which it runs over tiles,
// begin and end.
@inline fn tiles_of_owner() {
    let kv_head = (p.head0 + first_head) / p.group - p.head0 / p.group;
    @each($x: k, v) let $x_at = p.$x.base + batch * p.$x.b + kv_head * p.$x.h;
    let cap = key_end(batch, p.key0 + p.keys);
    let offset = offset_of(batch);
    let others = i32(OTHERS);
    var begin = 0;
    var end = 0;
    if (KEYS == 1u) {
        let j_first = i32(p.key0 + own);
        let j_end = min(j_first + i32(OWNED), cap);
        begin = max(j_first - p.hi - offset + 1, i32(p.row0)) / others * others; // tiles order the sums over heads
        begin = max(begin, i32(p.row0));
        end = min(j_end - p.lo - offset, i32(p.row0 + p.rows));
        if (j_first >= j_end) { end = begin; }
    } else {
        let i_first = i32(p.row0 + own) + offset;
        let i_last = i32(p.row0 + min(own + OWNED, p.rows)) - 1 + offset;
        begin = max(i_first + p.lo, i32(p.key0));
        end = min(i_last + p.hi, cap);
        @if(OF == 2u) {
            let j_first = i32(p.key0 + part * OTHERS);
            end = select(min(end, j_first + others), j_first, begin >= j_first + others);
            begin = j_first;
        }
    }
}

// stage_info puts D and LSE of the rows of the tile into info. Rows after the last are as if they saw nothing.
@inline fn stage_info() {
    for (var x = t; x < TILE_ROWS; x += THREADS) {
        let row_at = p.s.base + batch * p.s.b + head * p.s.h + min(r0 + x, p.rows - 1u) * p.s.s;
        let lse = select(negative_infinity(), rows[row_at + p.s.d], r0 + x < p.rows);
        if (bitcast<u32>(lse) == MINUS_INF) { atomicStore(&dead, tiles); }
        info[x] = vec2<f32>(lse * LOG2E, rows[row_at]);
    }
}

// begin declares in_$x, vec4 of $x as stored, and at_$x, the $count rows from $first on that the thread stages for
// the scores. It loads their first depths.
@inline fn begin($x, $count, $first, $depth) {
    var in_$x: array<vec4<u32>, LOADED>;
    var at_$x: array<u32, $count>;
    @unroll for (var n = 0u; n < $count; n++) { at_$x[n] = row_$x($x_at, $first + (t + THREADS * n) / QD); }
    @inline load_depths($x, $count, 0u, $depth);
}

@inline fn load_depths($x, $count, $from, $depth) {
    @unroll for (var n = 0u; n < $count; n++) { in_$x[n] = four_$x(at_$x[n], $from + 4u * ((t + THREADS * n) % QD), $depth); }
}

// scores sets the part of s from element $s on to the products of what is owned, a head of $own, with the
// others, a head of $other. On hardware it has one row of a in registers at a time, unlike dots: that is faster
// there and slower on software drivers.
@inline fn scores($s, $own, $other, $depth) {
    for (var d0 = 0u; d0 < $depth; d0 += 4u * QD) {
        workgroupBarrier();
        @inline stage_rows(value_$own, in_$own);
        @unroll for (var n = 0u; n < KN; n++) {
            let x = t + THREADS * n;
            if (KN * THREADS == OTHERS * QD || x < OTHERS * QD) {
                let other = x / QD;
                b[other / KA % TX][other / KB % 4u * QD + x % QD] = value_$other(in_$other[n]);
            }
        }
        workgroupBarrier();
        if (d0 + 4u * QD < $depth) {
            @inline load_depths($own, QN, d0 + 4u * QD, $depth);
            @inline load_depths($other, KN, d0 + 4u * QD, $depth);
        }
        @if(EXPAND == 1u) { @inline dots($s); }
        @else @unroll(deep) for (var d = 0u; d < QD; d++) {
            var x: array<vec4<f32>, KT>;
            @unroll for (var j = 0u; j < KT; j++) { x[j] = b[tx][j * QD + d]; }
            @unroll for (var r = 0u; r < ROWS; r++) {
                let w = a[ty][r * QD + d];
                @unroll for (var j = 0u; j < KT; j++) { s[$s + j * RV + r / 4u][r % 4u] = dot4(w, x[j], s[$s + j * RV + r / 4u][r % 4u]); }
            }
        }
    }
}

// find_dropped sets bit 4·n + c of drops where dropout takes pair c of the n-th four.
@inline fn find_dropped() {
    if ((p.flags & HAS_DROPOUT) != 0u) {
        for (var x = 0u; x < 32u; x++) {
            let n = x / 4u;
            let c = x % 4u;
            let row = select(r0 + 8u * ty + n, r0 + KA * tx + KB * (n / 2u), KEYS == 1u);
            let j = select(j0 + KA * tx + KB * c, j0 + 8u * ty + 4u * (n % 2u) + c, KEYS == 1u);
            if (dropped(batch, head, row, j)) { drops |= 1u << x; }
        }
    }
}

// weights replaces the scores of a row with four keys, the n-th of the thread, by keep·P, if the workgroup owns
// keys, and dX, or by dS.
@inline fn weights() {
    var row = 8u * ty + n;
    var j = j0 + KA * tx;
    var step = KB;
    var x = vec4<f32>(s[n / 4u][n % 4u], s[2u + n / 4u][n % 4u], s[4u + n / 4u][n % 4u], s[6u + n / 4u][n % 4u]);
    var u = vec4<f32>(s[8u + n / 4u][n % 4u], s[10u + n / 4u][n % 4u], s[12u + n / 4u][n % 4u], s[14u + n / 4u][n % 4u]);
    @if(KEYS == 1u) {
        row = KA * tx + KB * (n / 2u);
        j = j0 + 8u * ty + 4u * (n % 2u);
        step = 1u;
        x = s[n];
        u = s[8u + n];
    }
    let lse = info[row].x;
    var hidden = vec4<bool>(false);
    var more = vec4<f32>(0.0);
    if (check) {
        let i = i32(p.row0 + r0 + row) + offset;
        let at_key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(i32(step)) * vec4<i32>(0, 1, 2, 3);
        var seen = (at_key >= vec4<i32>(i + p.lo)) & (at_key < vec4<i32>(min(i + p.hi, cap)));
        if (bitcast<u32>(lse) == MINUS_INF) { seen = vec4<bool>(false); }
        @if(PAIRED == 1u) {
            let options = added(seen, batch, head, r0 + row, j, step, biased);
            seen = options.seen;
            more = options.y;
        }
        hidden = !seen;
    }
    var slope = vec4<f32>(p.scale);
    @if(MOD == 1u) {
        let at_row = vec4<u32>(r0 + row);
        let at_j = vec4<u32>(j) + vec4<u32>(step) * vec4<u32>(0u, 1u, 2u, 3u);
        slope = derived(x * p.scale, batch, head, at_row, at_j) * p.scale;
        x = modified(x * p.scale, batch, head, at_row, at_j);
        hidden = hidden | mod_hides(x);
    }
    var z = fma(x, vec4<f32>(p.unit), vec4<f32>(-lse));
    @if(PAIRED == 1u) {
        if ((p.flags & HAS_SOFTCAP) != 0u) {
            x = capped(x);
            slope = fma(-x, x, vec4<f32>(1.0)) * slope;
            z = fma(x, vec4<f32>(p.unit), vec4<f32>(-lse));
        }
        if (biased) { z = fma(x, vec4<f32>(p.unit), more * LOG2E) - lse; }
    }
    // A probability is at most 1, however much a large score is off. exp2_own needs no bound then.
    @if(EXP2 == 1u) let e = exp2(min(z, vec4<f32>(0.0)));
    @else let e = exp2_down(min(z, vec4<f32>(0.0)));
    let dropped_keys = (vec4<u32>(drops >> (4u * n)) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
    let d = vec4<f32>(info[row].y);
    var dp = u - d;
    @if(PAIRED == 1u) dp = select(fma(u, vec4<f32>(p.keep), -d), -d, dropped_keys);
    var y = e * dp;
    @if(OF != 2u) y = y * slope;
    var w = e;
    @if(PAIRED == 1u) w = e * p.keep;
    if (check) {
        @if(OF == 2u) y = select(y, vec4<f32>(0.0), hidden);
        @else y = select(y, vec4<f32>(hidden_weight()), hidden);
        w = select(w, vec4<f32>(hidden_weight()), hidden | dropped_keys);
    }
    @if(KEYS == 1u) {
        s[n] = w;
        s[8u + n] = y;
    } @else {
        s[n / 4u][n % 4u] = y.x;
        s[2u + n / 4u][n % 4u] = y.y;
        s[4u + n / 4u][n % 4u] = y.z;
        s[6u + n / 4u][n % 4u] = y.w;
    }
}

// load_columns loads the others of step $step, a head of $x with rows of $size elements.
@inline fn load_columns($x, $step, $size) {
    @unroll for (var n = 0u; n < VN; n++) {
        let x = t + THREADS * n;
        in_$x[n] = four_$x(row_$x($x_at, other0 + ($step) * STAGED + x / WIDE), 4u * (part * WIDE + x % WIDE), $size);
    }
}

@inline fn load_step($step) {
    @if(KEYS == 1u) {
        @each($x $length: g vdim, q dim) @inline load_columns($x, $step, p.$length);
    } @else {
        @inline load_columns(k, $step, p.dim);
    }
}

// stage_step stages the others of step c, which in_$x has, and their weights for the result of number $result.
@inline fn stage_step($x, $result) {
    @unroll for (var j = 0u; j < 4u; j++) {
        let at = tx + TX * j - c * STAGED; // beyond STAGED if the other is not of this step
        if (at < STAGED) {
            @unroll for (var h = 0u; h < RV; h++) { a[ty][($result * STAGED + at) * RV + h] = s[$result * 8u + j * RV + h]; }
        }
    }
    @inline stage_columns(value_$x, in_$x, LANES, $result * LANES);
}

// write writes the sums, or dS, to state.
@inline fn write() {
    @if(OF == 2u) {
        @unroll for (var r = 0u; r < 8u; r++) {
            if (own + 8u * ty + r < p.rows && part * OTHERS + 4u * tx < p.keys) {
                state[(own + 8u * ty + r) * p.splits + p.part0 + part * TX + tx] =
                    vec4<f32>(s[r / 4u][r % 4u], s[2u + r / 4u][r % 4u], s[4u + r / 4u][r % 4u], s[6u + r / 4u][r % 4u]);
            }
        }
    } @else {
        @unroll for (var r = 0u; r < 8u; r++) {
            if (own + 8u * ty + r < length) {
                state[state_at + r * p.splits] = unsigned_zeros(acc[2u * r]);
                state[state_at + r * p.splits + LANES] = unsigned_zeros(acc[2u * r + 1u]);
            }
        }
    }
}

@main(THREADS) {
    let tx = (t / 2u) % TX;
    let ty = t / (2u * TX) * 2u + t % 2u;
    let part = id % p.parts; // of the columns of the result, or the tile of keys of dS
    let owner = id / p.parts % p.batch_heads; // the head and batch that this workgroup owns
    // In a causal call the first keys and the last rows see most: they come first.
    var own = id / p.parts / p.batch_heads;
    if (KEYS == 0u) { own = p.blocks - 1u - own; }
    own = own * OWNED;

    // The query heads of the workgroup.
    let zero = select(p.key0, p.row0, KEYS == 1u); // index in the call of the first other
    let owners = select(p.heads, p.kv_heads, KEYS == 1u);
    let members = select(1u, p.group, KEYS == 1u);
    let batch = owner / owners;
    let first_head = owner % owners * members;
    let length = select(p.rows, p.keys, KEYS == 1u); // rows, or keys, that workgroups own in a head
    @inline tiles_of_owner();

    var acc: array<vec4<f32>, 16>; // [owned][column/4]
    var s: array<vec4<f32>, 16>; // [other][owned/4] of q·k and of dO·v, then the weights
    @unroll for (var i = 0u; i < 16u; i++) {
        acc[i] = vec4<f32>(0.0);
        s[i] = vec4<f32>(0.0);
    }
    let result = tx / LANES;
    let state_at = ((result * p.batch_heads + owner) * length + own + 8u * ty) * p.splits + part * WIDE + tx % LANES;
    @if(OF != 2u) if ((p.flags & GO_ON) != 0u) {
        @unroll for (var r = 0u; r < 8u; r++) {
            if (own + 8u * ty + r < length) {
                acc[2u * r] = state[state_at + r * p.splits];
                acc[2u * r + 1u] = state[state_at + r * p.splits + LANES];
            }
        }
    }
    var paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;
    let biased = (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u;

    if (t == 0u) { @each($x: dead, special) atomicStore(&$x, 0u); }
    workgroupBarrier();
    var tiles = 0u; // that the workgroup has begun
    var round = 0u; // counts what is staged of the others
    for (var at = begin; at < end; at += others) {
        for (var member = 0u; member < members; member++) {
            let head = first_head + member;
            let other0 = u32(at) - zero;
            let r0 = select(own, other0, KEYS == 1u);
            let j0 = select(other0, own, KEYS == 1u);
            let i_first = i32(p.row0 + r0) + offset;
            let i_last = i32(p.row0 + min(r0 + TILE_ROWS, p.rows)) - 1 + offset;
            let key = i32(p.key0 + j0);
            var look = 2u;
            @if(PAIRED == 1u) if ((p.flags & HAS_BLOCKS) != 0u) {
                look = blocks_seen(batch, head, r0, TILE_ROWS, u32(key), TILE_KEYS, u32(cap));
            }
            if (look != 0u) {
                tiles += 1u;
                let q_at = p.q.base + batch * p.q.b + head * p.q.h;
                let g_at = p.o.base + batch * p.o.b + head * p.o.h;
                @inline stage_info();

                @unroll for (var i = 0u; i < 16u; i++) { s[i] = vec4<f32>(0.0); }
                @each($x $count $first $depth: q RN r0 dim, k JN j0 dim, g RN r0 vdim, v JN j0 vdim)
                @inline begin($x, $count, $first, p.$depth);
                @if(KEYS == 1u) {
                    @inline scores(0u, k, q, p.dim);
                    @inline scores(8u, v, g, p.vdim);
                } @else {
                    @inline scores(0u, q, k, p.dim);
                    @inline scores(8u, g, v, p.vdim);
                }

                let check = paired || key < i_last + p.lo || key + i32(TILE_KEYS) > min(i_first + p.hi, cap) || atomicLoad(&dead) == tiles;
                @if(OF != 2u) { @inline load_step(0u); }
                var drops = 0u;
                @if(PAIRED == 1u) { @inline find_dropped(); }
                @unroll(deep) for (var n = 0u; n < 8u; n++) { @inline weights(); }
                @if(OF != 2u) for (var c = 0u; c < STEPS; c++) {
                    round += 1u;
                    workgroupBarrier();
                    @if(KEYS == 1u) {
                        { @inline stage_step(g, 0u); }
                        { @inline stage_step(q, 1u); }
                    } @else {
                        @inline stage_step(k, 0u);
                    }
                    workgroupBarrier();
                    if (c + 1u < STEPS) { @inline load_step(c + 1u); }
                    if (check && atomicLoad(&special) == round) { @inline output(add_seen, 0u, result * (STAGED * RV)); } else { @inline output(add, 0u, result * (STAGED * RV)); }
                }
            }
        }
    }
    @inline write();
}
