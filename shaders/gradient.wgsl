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

// The parts of main, in the order of the formula.

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
    let dropped_keys = (vec4<u32>(drops >> (4u * n)) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
    @inline derivatives();
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
    @inline owner_of_id();

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
    @inline what_is_paired();
    if (t == 0u) { @each($x: dead, special) atomicStore(&$x, 0u); }
    workgroupBarrier();
    var tiles = 0u; // that the workgroup has begun
    var round = 0u; // counts what is staged of the others
    for (var at = begin; at < end; at += others) {
        for (var member = 0u; member < members; member++) {
            @inline tile_of_member();
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

                @inline check_of_tile();
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
