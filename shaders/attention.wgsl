// Fused attention, one workgroup for a block of 32 query rows of one head:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       o = Σ p_j·v_j / Σ p_j            lse = m + log Σ p_j
//
// A sink adds to Σ p_j only, and dropout affects Σ p_j·v_j only. This is the plain kernel: the oracle of
// flash.wgsl, and its substitute on devices with too little memory for it.
//
// Key tiles of 32 begin at multiples of 32; a tile that no row of the block sees is skipped. Thread (tx, ty) of
// 8 x 8 has rows 4·ty + r and, in registers,
//
//                 keys tx + 8·j             columns 32·i + 4·tx + c
//            ┌──────┬──────┬─ 8 ─┐        ┌──────┬─ 8 ─┐
//     rows   │ 4x4  │      │     │        │ 4x4  │     │   · DVB blocks of 32
//     4·ty+r ├──────┼ S,P  ┼     │        ├──────┼ O   │
//            └──────┴──────┴─────┘        └──────┴─────┘
//
// S from stages of 32 depths of Q and K, O from the tile of P and stages of 32 columns of V.
//
// A chunk of the keys that is not the last leaves its registers in state, and the next chunk continues from
// there: cutting the keys changes no bit. Neither does the place of a row in its block. The product with V
// skips the weights of hidden keys, hidden_weight() (0·NaN is NaN).
//
// Workgroup memory: a 4,224 + b 4,224 = 8,448 bytes.

const TX: u32 = 8u;
const TY: u32 = 8u;
const THREADS: u32 = 64u;
const RV: u32 = 1u; // see common/tiles.wgsl
const ROWS: u32 = 4u;
const KT: u32 = 4u;
const QD: u32 = 8u; // vec4 of a stage
const JJ: u32 = KT;
const STAGED: u32 = KT * TX;
const STEPS: u32 = 1u;
const CV: u32 = 1u;
const COLS: u32 = DVB;
const O4: u32 = ROWS * DVB;
const ER: u32 = ROWS;
const OUT16: u32 = 1u;

@binding var<storage, read> q, k, v, mask, bias: array<u32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> lse: array<f32>;
@binding var<storage, read_write> state: array<vec4<f32>>;
@binding var<uniform> p: AttentionParams;

// Rows of 32 vec4 are padded to 33, which puts lanes on different banks.
var<workgroup> a: array<array<vec4<f32>, 33>, TY>; // q [row][depth/4], p [key]
var<workgroup> b: array<array<vec4<f32>, 33>, TX>; // k [key/8][depth/4], v [key]

// load_$x returns element d of the row that begins at element at.
@each($x: k, v)
fn load_$x(at: u32, d: u32) -> f32 {
    if (KV == 4u) { return bitcast<f32>($x[at]) * integer($x[at + 1u + d / 4u], d); }
    if (KV == 5u) { return nibble_$x(at, d); }
    if (KV == 6u) { return eighths($x[at + d / 4u] >> (8u * (d & 3u))).x; }
    let i = at + d * p.$x.d;
    return decode($x[select(i >> 1u, i, KV == 0u)], i, KV);
}

// The parts of main, in the order of the formula.

// skip_tiles moves tile to the next one of which the block mask shows a pair. It is a loop of its own, because
// a software driver executes the rest of a loop body after a continue.
@inline fn skip_tiles() {
    while (tile < end && blocks_seen(batch, head, r0, 32u, u32(tile), 32u, u32(end)) == 0u) { tile += 32; }
    if (tile >= end) { break; }
}

// scores adds the products of 32 depths to s. Rows, keys and depths beyond the end count as zeros.
@inline fn scores() {
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let n = t / 8u + 8u * i; // of the block's rows and of the tile's keys
        let d = d0 + 4u * (t % 8u);
        var x = vec4<f32>(0.0);
        var y = vec4<f32>(0.0);
        @unroll for (var e = 0u; e < 4u; e++) {
            if (d + e < p.dim && r0 + n < p.rows) { x[e] = load_q(q_at + (r0 + n) * p.q.s + (d + e) * p.q.d); }
            if (d + e < p.dim && j0 + n < p.keys) { y[e] = load_k(k_row(k_at, batch, j0 + n), d + e); }
        }
        a[n / 4u][n % 4u * QD + t % 8u] = x;
        b[n % 8u][n / 8u * QD + t % 8u] = y;
    }
    workgroupBarrier();
    @inline dots(0u);
}

// options replaces s by scores with the options applied, in units of log 2 and LOWEST where hidden, and declares
// seen and most.
@inline fn options() {
    var seen: array<vec4<bool>, 4>; // [row][key/8]
    var most: array<vec4<f32>, RV>;
    @unroll for (var r = 0u; r < 4u; r++) {
        let row = r0 + 4u * ty + r;
        var x = vec4<f32>(s[0u][r], s[1u][r], s[2u][r], s[3u][r]) * p.scale;
        var shown = vec4<bool>(true);
        @if(MOD == 1u) {
            x = modified(x, batch, head, vec4<u32>(row), vec4<u32>(j0 + tx) + vec4<u32>(0u, 8u, 16u, 24u));
            shown = !mod_hides(x);
        }
        if ((p.flags & HAS_SOFTCAP) != 0u) { x = p.softcap * tanh_acc(x / p.softcap); }
        if (check) {
            let i = i32(p.row0 + row) + offset;
            let key = vec4<i32>(tile + i32(tx)) + vec4<i32>(0, 8, 16, 24);
            shown = shown & (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
            if (row >= p.rows) { shown = vec4<bool>(false); }
            let w = added(shown, batch, head, row, j0 + tx, 8u, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
            shown = w.seen;
            x = x + w.y;
        }
        x = select(vec4<f32>(LOWEST), x * LOG2E, shown);
        seen[r] = shown;
        most[0u][r] = largest(x);
        @unroll for (var j = 0u; j < 4u; j++) { s[j][r] = x[j]; }
    }
}

// weights replaces s by weights, adds these to l, and rescales l and the output.
@inline fn weights() {
    var sum = vec4<f32>(0.0);
    @unroll for (var j = 0u; j < 4u; j++) {
        s[j] = exp2_down(s[j] - m[0u]);
        @unroll for (var r = 0u; r < 4u; r++) {
            if (!seen[r][j]) { s[j][r] = hidden_weight(); }
        }
        sum = sum + s[j];
        @if(LOW == 1u) s[j] = rounded(s[j]);
        if ((p.flags & HAS_DROPOUT) != 0u) {
            @unroll for (var r = 0u; r < 4u; r++) {
                if (dropped(batch, head, r0 + 4u * ty + r, j0 + tx + 8u * j)) { s[j][r] = hidden_weight(); }
            }
        }
    }
    l[0u] = fma(l[0u], rescale[0u], sum);
    @unroll for (var i = 0u; i < O4; i++) { acc[i] = acc[i] * rescale[0u][i / DVB]; }
}

// stage_v copies 32 columns of the tile's values to b.
@inline fn stage_v() {
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let n = t / 8u + 8u * i;
        let column = 32u * turn + 4u * (t % 8u);
        var x = vec4<f32>(0.0);
        @unroll for (var e = 0u; e < 4u; e++) {
            if (column + e < p.vdim && j0 + n < p.keys) { x[e] = load_v(v_row(v_at, batch, j0 + n), column + e); }
        }
        b[t % 8u][n] = x;
    }
    workgroupBarrier();
}

@main(THREADS) {
    let tx = t % 8u;
    let ty = t / 8u;
    let r0 = (id % p.blocks) * 32u;
    let head = (id / p.blocks) % p.heads;
    let batch = id / p.blocks / p.heads;
    @inline heads(batch, head, kv_head);
    let state_at = id * ((O4 + 2u * RV) * THREADS) + t;

    @inline registers();
    if ((p.flags & GO_ON) != 0u) { @inline load_state(state_at); }
    @inline visible_keys();
    var paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;
    @if(MOD == 1u) paired = true;

    for (var tile = (begin / 32) * 32; tile < end; tile += 32) {
        if ((p.flags & HAS_BLOCKS) != 0u) { @inline skip_tiles(); }
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + 32 > all_to;

        var s: array<vec4<f32>, KT>;
        @unroll for (var j = 0u; j < KT; j++) { s[j] = vec4<f32>(0.0); }
        for (var d0 = 0u; d0 < p.dim; d0 += 32u) { @inline scores(); }
        @inline options();
        @inline maxima();
        @inline weights();

        let c = 0u; // the only step
        workgroupBarrier();
        @inline stage_weights();
        @unroll for (var turn = 0u; turn < DVB; turn++) {
            @inline stage_v();
            if (check) { @inline output(add_seen, turn, 0u); } else { @inline output(add, turn, 0u); }
        }
    }
    if ((p.flags & LEAVE) != 0u) {
        @inline save_state(state_at);
        return;
    }
    @inline totals();
    @inline write_output();
}
