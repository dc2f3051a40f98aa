// Fused attention with the online softmax (Milakov & Gimelshein 2018, Dao et al. 2022). A workgroup computes a
// block of 32 query rows of one head:
//
//     s_j = scale · q·k_j      s_j = cap · tanh(s_j / cap)      s_j = s_j + bias_j - slope·|i - j|
//     p_j = exp(s_j - m)       o = Σ p_j·v_j / Σ p_j            lse = m + log Σ p_j
//
// A sink adds to Σ p_j only, and dropout affects Σ p_j·v_j only. This is the plain kernel: the oracle of
// flash.wgsl, and its substitute on devices with too little memory for it.
//
// Key tiles of 32 begin at multiples of 32; a tile that no row of the block sees is skipped. Thread (tx, ty) of
// 8 x 8 has rows 4·ty + r and
//
//                 keys 4·tx + c             columns 32·i + 4·tx + c
//            ┌──────┬──────┬─ 8 ─┐        ┌──────┬─ 8 ─┐
//     rows   │ 4x4  │      │     │        │ 4x4  │     │   · DVB blocks of 32
//     4·ty+r ├──────┼ S,P  ┼     │        ├──────┼ O   │
//            └──────┴──────┴─────┘        └──────┴─────┘
//
// in registers: S from stages of 32 depths of Q and K, O from the tile of P and stages of 32 columns of V. Each
// thread sums the weights of its own keys; the end adds these up.
//
// A chunk of the keys that is not the last leaves (o, l, m) in state, and the next chunk continues from there:
// cutting the keys changes no bit. Neither does the place of a row in its block, so that prefill and decoding
// agree to the bit.
//
// Hidden keys never take part. Their scores are not read, and their weight is the marker HIDDEN, which the
// product with V skips (0·NaN is NaN).
//
// Workgroup memory: qs 4,608 + kv 4,608 + ps 4,608 + part 1,024 = 14,848 bytes.

const ACC: u32 = 4u * DVB; // of the output

@binding var<storage, read> q: array<u32>;
@binding var<storage, read> k: array<u32>;
@binding var<storage, read> v: array<u32>;
@binding var<storage, read> mask: array<u32>;
@binding var<storage, read> bias: array<u32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> lse: array<f32>;
@binding var<storage, read_write> state: array<f32>;
@binding var<uniform> p: AttentionParams;

// Rows of 8 vec4 are padded to 9, which puts lanes on different banks.
var<workgroup> qs: array<vec4<f32>, 288>; // [row][depth/4]
var<workgroup> kv: array<vec4<f32>, 288>; // K as [depth][key/4], V as [key][column/4]
var<workgroup> ps: array<vec4<f32>, 288>; // [row][key/4]
var<workgroup> part: array<f32, 256>; // [tx][row]: maxima, and sums at the end

// load_$x returns element d of the row that begins at element at.
@each($x: k, v)
fn load_$x(at: u32, d: u32) -> f32 {
    if (KV == 4u) { return bitcast<f32>($x[at]) * integer($x[at + 1u + d / 4u], d); }
    let i = at + d * p.$x.d;
    return decode($x[select(i >> 1u, i, KV == 0u)], i, KV);
}

// stage_q copies 32 depths from d0 of the block's rows to qs, with zeros beyond the end.
fn stage_q(t: u32, at: u32, r0: u32, d0: u32) {
    let quad = t % 8u;
    for (var i = 0u; i < 4u; i++) {
        let row = t / 8u + 8u * i;
        var x = vec4<f32>(0.0);
        if (r0 + row < p.rows) {
            let start = at + (r0 + row) * p.q.s;
            let d = d0 + 4u * quad;
            @unroll(always) for (var e = 0u; e < 4u; e++) {
                if (d + e < p.dim) { x[e] = load_q(start + (d + e) * p.q.d); }
            }
        }
        qs[row * 9u + quad] = x;
    }
}

// stage_k copies 32 depths from d0 of the tile's keys to kv, transposed. The tile begins at key j0 of the
// chunk.
fn stage_k(t: u32, at: u32, b: u32, j0: u32, d0: u32) {
    let depth = t % 32u;
    let d = d0 + depth;
    for (var i = 0u; i < 4u; i++) {
        let quad = t / 32u + 2u * i;
        let j = j0 + 4u * quad;
        var x = vec4<f32>(0.0);
        if (d < p.dim) {
            @unroll(always) for (var e = 0u; e < 4u; e++) {
                if (j + e < p.keys) { x[e] = load_k(k_row(at, b, j + e), d); }
            }
        }
        kv[depth * 9u + quad] = x;
    }
}

// stage_v copies 32 columns from c0 of the tile's values to kv.
fn stage_v(t: u32, at: u32, b: u32, j0: u32, c0: u32) {
    let quad = t % 8u;
    for (var i = 0u; i < 4u; i++) {
        let key = t / 8u + 8u * i;
        var x = vec4<f32>(0.0);
        if (j0 + key < p.keys) {
            let start = v_row(at, b, j0 + key);
            let c = c0 + 4u * quad;
            @unroll(always) for (var e = 0u; e < 4u; e++) {
                if (c + e < p.vdim) { x[e] = load_v(start, c + e); }
            }
        }
        kv[key * 9u + quad] = x;
    }
}

// Scores of a row with four keys; those that are not seen are LOWEST.
struct Scores {
    s: vec4<f32>,
    seen: vec4<bool>,
}

// score turns the dot products of a row of the box with keys j to j + 3 of the chunk into scores.
fn score(dots: vec4<f32>, b: u32, h: u32, row: u32, j: u32, cap: i32, check: bool) -> Scores {
    var r: Scores;
    r.s = dots * p.scale;
    r.seen = vec4<bool>(true);
    if ((p.flags & HAS_SOFTCAP) != 0u) { r.s = p.softcap * tanh_acc(r.s / p.softcap); }
    if (check) {
        let i = i32(p.row0 + row);
        let key = vec4<i32>(i32(p.key0 + j)) + vec4<i32>(0, 1, 2, 3);
        r.seen = (key >= vec4<i32>(i + p.lo)) & (key < vec4<i32>(min(i + p.hi, cap)));
        if (row >= p.rows) { r.seen = vec4<bool>(false); }
        let w = added(r.seen, b, h, row, j, 1u, (p.flags & (HAS_BIAS | HAS_SLOPES)) != 0u);
        r.seen = w.seen;
        r.s = r.s + w.y;
        r.s = select(vec4<f32>(LOWEST), r.s, r.seen);
    }
    return r;
}

// The parts of main, in the order of the formula.

// load_state continues from the state that an earlier chunk left.
@inline fn load_state() {
    @unroll for (var r = 0u; r < 4u; r++) {
        if (r0 + 4u * ty + r < p.rows) {
            let at = state_at + r * width;
            @unroll for (var i = 0u; i < DVB; i++) {
                let c = at + 32u * i + 4u * tx;
                acc[4u * i + r] = vec4<f32>(state[c], state[c + 1u], state[c + 2u], state[c + 3u]);
            }
            l[r] = state[at + 32u * DVB + tx];
            m[r] = state[at + 32u * DVB + 8u];
        }
    }
}

// visible_keys declares the keys that any row of the block sees, begin to end, and those that all of them see,
// all_from to all_to.
@inline fn visible_keys() {
    let i_first = i32(p.row0 + r0);
    let i_last = i32(p.row0 + min(r0 + 32u, p.rows)) - 1;
    var cap = i32(p.key0 + p.keys);
    if ((p.flags & HAS_KLEN) != 0u) { cap = min(cap, p.klen[b / 4u][b % 4u]); }
    let begin = max(i_first + p.lo, i32(p.key0));
    let end = min(i_last + p.hi, cap);
    let all_from = i_last + p.lo;
    let all_to = min(i_first + p.hi, cap);
}

// skip_tiles moves tile to the next one of which the block mask shows a pair. It is a loop of its own, because
// a software driver executes the rest of a loop body after a continue.
@inline fn skip_tiles() {
    while (tile < end && blocks_seen(b, h, r0, 32u, u32(tile), 32u, u32(end)) == 0u) { tile += 32; }
    if (tile >= end) { break; }
}

// scores adds the products of 32 depths to s.
@inline fn scores() {
    workgroupBarrier();
    stage_q(t, q_at, r0, d0);
    stage_k(t, k_at, b, j0, d0);
    workgroupBarrier();
    for (var x = 0u; x < 8u; x++) {
        let b0 = kv[(4u * x) * 9u + tx];
        let b1 = kv[(4u * x + 1u) * 9u + tx];
        let b2 = kv[(4u * x + 2u) * 9u + tx];
        let b3 = kv[(4u * x + 3u) * 9u + tx];
        @unroll for (var r = 0u; r < 4u; r++) {
            let a = qs[(4u * ty + r) * 9u + x];
            s[r] = add(a.w, b3, add(a.z, b2, add(a.y, b1, add(a.x, b0, s[r]))));
        }
    }
}

// maxima declares w, the scores with the options applied, and rescale, e^(m before - m), and updates m.
@inline fn maxima() {
    var w: array<Scores, 4>;
    @unroll for (var r = 0u; r < 4u; r++) {
        w[r] = score(s[r], b, h, r0 + 4u * ty + r, j0 + 4u * tx, cap, check);
        part[tx * 32u + 4u * ty + r] = largest(w[r].s);
    }
    workgroupBarrier();
    var top = m;
    for (var x = 0u; x < 8u; x++) {
        let at = x * 32u + 4u * ty;
        top = max(top, vec4<f32>(part[at], part[at + 1u], part[at + 2u], part[at + 3u]));
    }
    let rescale = exp2_acc((m - top) * LOG2E);
    m = top;
}

// weights puts the weights into ps and adds them to l.
@inline fn weights() {
    var sums = vec4<f32>(0.0);
    @unroll for (var r = 0u; r < 4u; r++) {
        let e = exp2_acc((w[r].s - vec4<f32>(m[r])) * LOG2E);
        sums[r] = dot(select(vec4<f32>(0.0), e, w[r].seen), vec4<f32>(1.0));
        ps[(4u * ty + r) * 9u + tx] = select(vec4<f32>(HIDDEN), e, w[r].seen);
        if ((p.flags & HAS_DROPOUT) != 0u) {
            for (var c = 0u; c < 4u; c++) {
                if (dropped(b, h, r0 + 4u * ty + r, j0 + 4u * tx + c)) {
                    ps[(4u * ty + r) * 9u + tx][c] = HIDDEN;
                }
            }
        }
    }
    l = fma(l, rescale, sums);
}

// output adds the products of the weights with 32 columns of v.
@inline fn output() {
    workgroupBarrier();
    stage_v(t, v_at, b, j0, 32u * i);
    workgroupBarrier();
    @unroll for (var r = 0u; r < 4u; r++) { acc[4u * i + r] = acc[4u * i + r] * rescale[r]; }
    for (var x = 0u; x < 8u; x++) {
        let b0 = kv[(4u * x) * 9u + tx];
        let b1 = kv[(4u * x + 1u) * 9u + tx];
        let b2 = kv[(4u * x + 2u) * 9u + tx];
        let b3 = kv[(4u * x + 3u) * 9u + tx];
        @unroll for (var r = 0u; r < 4u; r++) {
            let a = ps[(4u * ty + r) * 9u + x];
            let sum = acc[4u * i + r];
            if (check) {
                acc[4u * i + r] = add_seen(a.w, b3, add_seen(a.z, b2, add_seen(a.y, b1, add_seen(a.x, b0, sum))));
            } else {
                acc[4u * i + r] = add(a.w, b3, add(a.z, b2, add(a.y, b1, add(a.x, b0, sum))));
            }
        }
    }
}

// save_state leaves the state for the next chunk.
@inline fn save_state() {
    @unroll for (var r = 0u; r < 4u; r++) {
        if (r0 + 4u * ty + r < p.rows) {
            let at = state_at + r * width;
            @unroll for (var i = 0u; i < DVB; i++) {
                let c = at + 32u * i + 4u * tx;
                let x = acc[4u * i + r];
                state[c] = x.x;
                state[c + 1u] = x.y;
                state[c + 2u] = x.z;
                state[c + 3u] = x.w;
            }
            state[at + 32u * DVB + tx] = l[r];
            if (tx == 0u) { state[at + 32u * DVB + 8u] = m[r]; }
        }
    }
}

// sums adds l over all threads of a row, in a fixed order, writes the log-sum-exp, and declares inverse, the
// factor of the output, and empty, the rows that see no key.
@inline fn sums() {
    workgroupBarrier();
    part[tx * 32u + 4u * ty] = l.x;
    part[tx * 32u + 4u * ty + 1u] = l.y;
    part[tx * 32u + 4u * ty + 2u] = l.z;
    part[tx * 32u + 4u * ty + 3u] = l.w;
    workgroupBarrier();
    var sum = vec4<f32>(0.0);
    for (var x = 0u; x < 8u; x++) {
        let at = x * 32u + 4u * ty;
        sum = sum + vec4<f32>(part[at], part[at + 1u], part[at + 2u], part[at + 3u]);
    }
    // A sink rescales the sum to the larger of the sink and the maximum.
    var scale = vec4<f32>(p.keep);
    if ((p.flags & HAS_SINKS) != 0u) {
        let sink = p.sinks[h / 4u][h % 4u];
        if (bitcast<u32>(sink) != MINUS_INF) {
            let top = max(m, vec4<f32>(sink));
            let before = exp2_acc((m - top) * LOG2E);
            sum = fma(sum, before, exp2_acc((vec4<f32>(sink) - top) * LOG2E));
            scale = scale * before;
            m = top;
        }
    }
    let empty = bitcast<vec4<u32>>(sum) == vec4<u32>(0u);
    let safe = select(sum, vec4<f32>(1.0), empty);
    let inverse = select(vec4<f32>(1.0) / safe * scale, vec4<f32>(0.0), empty);
    if (tx == 0u && (p.flags & WANT_LSE) != 0u) {
        @unroll for (var r = 0u; r < 4u; r++) {
            let row = r0 + 4u * ty + r;
            if (row < p.rows) {
                lse[p.lse.base + b * p.lse.b + h * p.lse.h + row * p.lse.s] =
                    select(m[r] + log_acc(safe[r]), negative_infinity(), empty[r]);
            }
        }
    }
}

// write writes 32 columns of the output through ps: neighbouring threads write neighbouring columns.
@inline fn write() {
    workgroupBarrier();
    let none = vec4<f32>(0.0);
    ps[(4u * ty) * 9u + tx] = select(acc[4u * i] * inverse.x, none, empty.x);
    ps[(4u * ty + 1u) * 9u + tx] = select(acc[4u * i + 1u] * inverse.y, none, empty.y);
    ps[(4u * ty + 2u) * 9u + tx] = select(acc[4u * i + 2u] * inverse.z, none, empty.z);
    ps[(4u * ty + 3u) * 9u + tx] = select(acc[4u * i + 3u] * inverse.w, none, empty.w);
    workgroupBarrier();
    for (var x = t; x < 1024u; x += 64u) {
        let row = x / 32u;
        let c = x % 32u;
        if (r0 + row < p.rows && 32u * i + c < p.vdim) {
            let at = p.o.base + b * p.o.b + h * p.o.h + (r0 + row) * p.o.s + (32u * i + c) * p.o.d;
            put(at, ps[row * 9u + c / 4u][c % 4u]);
        }
    }
}

@main(64) {
    let tx = t % 8u;
    let ty = t / 8u;
    let r0 = (id % p.blocks) * 32u;
    let h = (id / p.blocks) % p.heads;
    let b = id / p.blocks / p.heads;
    @inline heads(b, h, kh);

    // The running maximum, this thread's part of the sum, and the output.
    var m = vec4<f32>(LOWEST);
    var l = vec4<f32>(0.0);
    var acc: array<vec4<f32>, ACC>; // [block][row]
    let width = DVB * 32u + 16u; // of a row's state: o, 8 parts of l, m
    let state_at = ((b * p.heads + h) * p.rows + r0 + 4u * ty) * width;
    @unroll for (var i = 0u; i < ACC; i++) { acc[i] = vec4<f32>(0.0); }
    if ((p.flags & GO_ON) != 0u) { @inline load_state(); }

    @inline visible_keys();

    let paired = (p.flags & (HAS_MASK | HAS_BLOCKS | HAS_BIAS | HAS_SLOPES | HAS_DROPOUT)) != 0u;

    for (var tile = (begin / 32) * 32; tile < end; tile += 32) {
        if ((p.flags & HAS_BLOCKS) != 0u) { @inline skip_tiles(); }
        let j0 = u32(tile) - p.key0;
        let check = paired || tile < all_from || tile + 32 > all_to;

        var s: array<vec4<f32>, 4>; // of the thread's rows
        @unroll for (var r = 0u; r < 4u; r++) { s[r] = vec4<f32>(0.0); }
        for (var d0 = 0u; d0 < p.dim; d0 += 32u) { @inline scores(); }

        @inline maxima();
        @inline weights();

        @unroll for (var i = 0u; i < DVB; i++) { @inline output(); }
    }

    if ((p.flags & LEAVE) != 0u) {
        @inline save_state();
        return;
    }

    @inline sums();
    @unroll for (var i = 0u; i < DVB; i++) { @inline write(); }
}
