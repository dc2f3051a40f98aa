// Linear attention (Katharopoulos et al. 2020; Yang et al. 2024). For each state, with row vectors of a token:
//
//     S = diag(exp decay)·S    d = beta·(value - Sᵀkey)    S = S + keyᵀd    o = scale·query·S
//
// A workgroup has 16 columns of a state in registers. Thread (lane, column) has rows [lane·4·ROWS, (lane+1)·4·ROWS) of its
// column. Sums over rows add up the parts of the lanes in workgroup memory. Rows beyond K are zeros.
//
// The rows of some tokens are staged together: of each token its key, exponentials of decays of channels, and queries. If the
// queries of all outputs of a state do not fit, tokens are staged one at a time, and queries in turns.
//
// CHUNKS = 0 computes token after token. There are 8 lanes, and each sum takes a barrier.
//
// CHUNKS = 1 first computes the d of up to 16 tokens together, where E_ij is the exponential of the decays of the tokens after j
// up to i, and E_i that of all up to i:
//
//     A_ij = beta_i·key_i·(E_ij·key_j)ᵀ for j < i    [16, 16]
//     R_i  = beta_i·(value_i - key_i·(E_i·S))        [16, 16 columns]
//     (I + A)·d = R                                  forward substitution, a thread for each column
//
// Without the delta rule d = value. Then the state follows the tokens without barriers and leaves the parts of all outputs of a
// query head. There are 4 lanes. Thread (lane, j) computes A_ij for all i, in the way in which it computes the products of keys and
// column j of S. Decays of heads are exponentials of sums. Those of channels multiply key_j, or S, from token to token. Nothing
// divides by an exponential, so decays of any size and sign are right. Nothing multiplies a token by 0 to hide it from an
// earlier one, so NaN stays where it is.
//
// Operations of a token and state with the delta rule and one output: 7·K·V token after token, and 9·K·V in chunks, or 11·K·V
// with decays of channels. 2 or 3 of them are A, which each block of columns computes again. Chunks of 64 that compute A once
// would take 64·(5·K + 3·V) + 6·K·V, which is 10·K·V for K = V = 128. Each further output takes 2·K·V token after token, and
// 5·K·V in chunks, which compute the states again. 16 tokens take at least 17 + 16·group barriers token after token,
// 5 + 2·group in a chunk, and 2·group in one without the delta rule. Each state has V/16 workgroups: 32 states with V = 128
// are 256 workgroups of 64 threads.
//
// Workgroup memory, token after token: rows 12 KiB, part 1 KiB, values 1 KiB, factors 128 bytes. In chunks: rows 3 KiB·ROWS,
// part 4 KiB, values 1 KiB, inner 1 KiB, factors 128 bytes, logs 64 bytes. That is 30 KiB for K = 128.

@ranged struct LinearParams {
    blocks: u32, // of 16 columns
    heads: u32, // states of a batch
    head0: u32, // index in the call of the box's first output head
    group: u32, // output heads of a state
    query_group: u32, // output heads that share a query head
    key_group: u32, // output heads that share a key head
    tokens: u32,
    dim: u32, // K
    vdim: u32, // columns of the box
    held: u32, // tokens that are staged together, at most 16
    slots: u32, // rows of a token that are staged
    queries: u32, // of them, those of queries
    decayed: u32, // 1: decays of heads, 2: of channels
    delta: u32, // 1: the delta rule
    starts: u32, // with the state in 1: past, 2: present; 0: with zeros
    leaves: u32, // 1: present is written
    query_type: u32, // type of query: 0 f32, 1 f16, 2 bf16
    key_type, value_type, decay_type, beta_type: u32,
    out_type: u32, // type of o
    scale: f32,
    query, key, value, decay, beta, past, o, present: Strides,
}

@binding var<storage, read> query, key, value, decay, beta: array<u32>;
@binding var<storage, read> past: array<f32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> present: array<f32>;
@binding var<uniform> p: LinearParams;

@if(CHUNKS == 0u) const LANES: u32 = 8u;
@else const LANES: u32 = 4u;
const COLUMNS: u32 = 16u;
const THREADS: u32 = LANES * COLUMNS;
const QUADS: u32 = LANES * ROWS; // vec4 of a staged row
const PLANE: u32 = 16u * COLUMNS; // parts of a lane in a chunk
@if(CHUNKS == 0u) const STAGED: u32 = 768u;
@else const STAGED: u32 = 48u * QUADS;
@if(CHUNKS == 0u) const PARTS: u32 = 2u * THREADS; // of two sums in turns
@else const PARTS: u32 = LANES * PLANE;

var<workgroup> rows: array<vec4<f32>, STAGED>;
var<workgroup> part: array<f32, PARTS>;
var<workgroup> values: array<f32, 256>; // in chunks then R, then d
var<workgroup> factors: array<vec2<f32>, 16>; // exp decay of a head, and beta
@if(CHUNKS == 1u) var<workgroup> logs: array<f32, 16>; // decay of a head
@if(CHUNKS == 1u) var<workgroup> inner: array<f32, PLANE>; // A

// quad_$x returns elements d to d + 3 of the row of $x at at, and 0 for those beyond K.
@each($x: query, key, decay)
fn quad_$x(at: u32, d: u32) -> vec4<f32> {
    var x = vec4<f32>();
    @unroll for (var j = 0u; j < 4u; j++) {
        if (d + j < p.dim) { x[j] = load_$x(at + (d + j) * p.$x.d); }
    }
    return x;
}

// fill stages slots from slot on of n tokens. Queries are those of output heads from g on of state h.
fn fill(b: u32, h: u32, g: u32, token: u32, n: u32, slot: u32, t: u32) {
    let count = p.slots - slot;
    let queries = p.slots - p.queries; // their first slot
    for (var e = t; e < n * count * QUADS; e += THREADS) {
        let d = e % QUADS * 4u;
        let kind = slot + e / QUADS % count;
        let i = e / QUADS / count;
        let s = token + i;
        var x = vec4<f32>();
        if (kind >= queries) {
            let head = p.head0 + h * p.group + min(g + kind - queries, p.group - 1u);
            x = quad_query(p.query.base + b * p.query.b + (head / p.query_group - p.head0 / p.query_group) * p.query.h + s * p.query.s, d);
        } else if (kind == 0u) {
            let head = (p.head0 + h * p.group) / p.key_group - p.head0 / p.key_group;
            x = quad_key(p.key.base + b * p.key.b + head * p.key.h + s * p.key.s, d);
        } else {
            x = exp2_acc(quad_decay(p.decay.base + b * p.decay.b + h * p.decay.h + s * p.decay.s, d) * LOG2E);
        }
        rows[(i * p.slots + kind) * QUADS + e % QUADS] = x;
    }
}

// gathered returns the sum of the parts of a column. Two sums in turns have places of their own, so that no thread waits
// until others have read the one before.
@if(CHUNKS == 0u) fn gathered(x: vec4<f32>, turn: u32, t: u32) -> f32 {
    part[turn * THREADS + t] = (x.x + x.y) + (x.z + x.w);
    workgroupBarrier();
    var sum = 0.0;
    @unroll for (var l = 0u; l < LANES; l++) { sum = sum + part[turn * THREADS + l * COLUMNS + t % COLUMNS]; }
    return sum;
}

// steps computes n tokens one after the other.
@inline fn steps() {
    for (var i = 0u; i < n; i++) {
        let key_at = i * p.slots * QUADS + lane * ROWS;
        let query_at = key_at + (p.slots - p.queries) * QUADS;
        let f = factors[i];
        var d = values[i * COLUMNS + t % COLUMNS];
        if (p.decayed == 1u) {
            @unroll for (var r = 0u; r < ROWS; r++) { s[r] = s[r] * f.x; }
        }
        if (p.decayed == 2u) {
            @unroll for (var r = 0u; r < ROWS; r++) { s[r] = s[r] * rows[key_at + QUADS + r]; }
        }
        if (p.delta == 1u) {
            var x = vec4<f32>();
            @unroll for (var r = 0u; r < ROWS; r++) { x = fma(rows[key_at + r], s[r], x); }
            d = f.y * (d - gathered(x, turn, t));
            turn = 1u - turn;
        }
        @unroll for (var r = 0u; r < ROWS; r++) { s[r] = fma(rows[key_at + r], vec4<f32>(d), s[r]); }
        for (var g = 0u; g < p.group; g++) {
            if (g > 0u && g % p.queries == 0u) {
                fill(b, h, g, token + i, 1u, p.slots - p.queries, t);
                workgroupBarrier();
            }
            var x = vec4<f32>();
            @unroll for (var r = 0u; r < ROWS; r++) { x = fma(rows[query_at + g % p.queries * QUADS + r], s[r], x); }
            let sum = gathered(x, turn, t);
            turn = 1u - turn;
            if (lane == 0u && lives) {
                put(p.o.base + b * p.o.b + (h * p.group + g) * p.o.h + (token + i) * p.o.s + column * p.o.d, p.scale * sum);
            }
        }
    }
}

// total returns element e of the products whose parts are in part.
@if(CHUNKS == 1u) fn total(e: u32) -> f32 {
    var sum = 0.0;
    @unroll for (var l = 0u; l < LANES; l++) { sum = sum + part[l * PLANE + e]; }
    return sum;
}

// faded returns the exponential of the sum of the decays of a head of tokens from to end - 1 of a chunk. Its square root is
// computed, as exp2_acc may stop at 2^64. It is finite, so that its product with a state of zeros is 0.
@if(CHUNKS == 1u) fn faded(first: u32, end: u32) -> f32 {
    if (p.decayed != 1u) { return 1.0; }
    var sum = 0.0;
    for (var i = first; i < end; i++) { sum = sum + logs[i]; }
    let root = exp2_acc(vec4<f32>(min(sum * (0.5 * LOG2E), 63.0))).x;
    return root * root;
}

// sweep leaves the parts of the products of keys and y, which decays with tokens from $first on.
@inline fn sweep($first) {
    for (var i = 0u; i < n; i++) {
        let key_at = i * p.slots * QUADS + lane * ROWS;
        if (p.decayed == 2u && i >= $first) {
            @unroll for (var r = 0u; r < ROWS; r++) { y[r] = y[r] * rows[key_at + QUADS + r]; }
        }
        var x = vec4<f32>();
        @unroll for (var r = 0u; r < ROWS; r++) { x = fma(rows[key_at + r], y[r], x); }
        part[lane * PLANE + i * COLUMNS + t % COLUMNS] = (x.x + x.y) + (x.z + x.w);
    }
}

// solve replaces values by d.
@inline fn solve() {
    {
        let j = t % COLUMNS; // its key is y
        var y: array<vec4<f32>, ROWS>;
        @unroll for (var r = 0u; r < ROWS; r++) { y[r] = rows[j * p.slots * QUADS + lane * ROWS + r]; }
        @inline sweep(j + 1u);
    }
    workgroupBarrier();
    for (var first = 0u; first < n * COLUMNS; first += THREADS) {
        let e = first + t;
        let i = e / COLUMNS;
        let j = e % COLUMNS;
        if (j < i) { inner[e] = factors[i].y * faded(j + 1u, i + 1u) * total(e); }
    }
    workgroupBarrier();
    {
        var y = s;
        @inline sweep(0u);
    }
    workgroupBarrier();
    for (var first = 0u; first < n * COLUMNS; first += THREADS) {
        let e = first + t;
        let i = e / COLUMNS;
        values[e] = factors[i].y * (values[e] - faded(0u, i + 1u) * total(e));
    }
    workgroupBarrier();
    if (t < COLUMNS) {
        var d: array<f32, 16>;
        @unroll for (var i = 0u; i < 16u; i++) { d[i] = values[i * COLUMNS + t]; }
        @unroll for (var j = 0u; j < 15u; j++) {
            @unroll for (var i = 0u; i < 15u - j; i++) { d[j + 1u + i] = fma(-inner[(j + 1u + i) * COLUMNS + j], d[j], d[j + 1u + i]); }
        }
        @unroll for (var i = 0u; i < 16u; i++) { values[i * COLUMNS + t] = d[i]; }
    }
    workgroupBarrier();
}

// chunk computes n tokens together.
@inline fn chunk() {
    if (p.delta == 1u) { @inline solve(); }
    var y: array<vec4<f32>, ROWS>;
    for (var g = 0u; g < p.group; g++) {
        if (g > 0u) {
            fill(b, h, g, token, n, p.slots - p.queries, t);
            workgroupBarrier();
        }
        y = s;
        for (var i = 0u; i < n; i++) {
            let key_at = i * p.slots * QUADS + lane * ROWS;
            let query_at = key_at + (p.slots - p.queries) * QUADS;
            let f = factors[i].x;
            let d = vec4<f32>(values[i * COLUMNS + t % COLUMNS]);
            if (p.decayed == 1u) {
                @unroll for (var r = 0u; r < ROWS; r++) { y[r] = y[r] * f; }
            }
            if (p.decayed == 2u) {
                @unroll for (var r = 0u; r < ROWS; r++) { y[r] = y[r] * rows[key_at + QUADS + r]; }
            }
            var x = vec4<f32>();
            @unroll for (var r = 0u; r < ROWS; r++) {
                y[r] = fma(rows[key_at + r], d, y[r]);
                x = fma(rows[query_at + r], y[r], x);
            }
            part[lane * PLANE + i * COLUMNS + t % COLUMNS] = (x.x + x.y) + (x.z + x.w);
        }
        workgroupBarrier();
        // All threads take each turn. Otherwise, as gogpu compiles it, Mesa's software driver loses those of the last turn.
        for (var first = 0u; first < n * COLUMNS; first += THREADS) {
            let e = first + t;
            let c = id % p.blocks * COLUMNS + e % COLUMNS;
            if (e < n * COLUMNS && c < p.vdim) {
                put(p.o.base + b * p.o.b + (h * p.group + g) * p.o.h + (token + e / COLUMNS) * p.o.s + c * p.o.d, p.scale * total(e));
            }
        }
    }
    s = y;
}

@main(THREADS) {
    let column = id % p.blocks * COLUMNS + t % COLUMNS;
    let h = id / p.blocks % p.heads;
    let b = id / p.blocks / p.heads;
    let lane = t / COLUMNS;
    let lives = column < p.vdim;
    let first_row = lane * ROWS * 4u;
    @each($x: past, present) let $x_at = p.$x.base + b * p.$x.b + h * p.$x.h + column * p.$x.d;
    var s: array<vec4<f32>, ROWS>;
    @unroll for (var r = 0u; r < ROWS; r++) {
        var x = vec4<f32>();
        @unroll for (var j = 0u; j < 4u; j++) {
            let d = first_row + 4u * r + j;
            if (lives && d < p.dim && p.starts == 1u) { x[j] = past[past_at + d * p.past.s]; }
            if (lives && d < p.dim && p.starts == 2u) { x[j] = present[present_at + d * p.present.s]; }
        }
        s[r] = x;
    }
    @if(CHUNKS == 0u) var turn = 0u;
    for (var token = 0u; token < p.tokens; token += p.held) {
        let n = min(p.held, p.tokens - token);
        // The barrier of the last sums follows all reads of what was staged before.
        fill(b, h, 0u, token, n, 0u, t);
        for (var e = t; e < n * COLUMNS; e += THREADS) {
            let c = id % p.blocks * COLUMNS + e % COLUMNS;
            var x = 0.0;
            if (c < p.vdim) { x = load_value(p.value.base + b * p.value.b + h * p.value.h + (token + e / COLUMNS) * p.value.s + c * p.value.d); }
            values[e] = x;
        }
        if (t < n) {
            var f = vec2<f32>(1.0);
            if (p.decayed == 1u) {
                let g = load_decay(p.decay.base + b * p.decay.b + h * p.decay.h + (token + t) * p.decay.s);
                f.x = exp2_acc(vec4<f32>(g * LOG2E)).x;
                @if(CHUNKS == 1u) logs[t] = g;
            }
            if (p.delta == 1u) { f.y = load_beta(p.beta.base + b * p.beta.b + h * p.beta.h + (token + t) * p.beta.s); }
            factors[t] = f;
        }
        workgroupBarrier();
        @if(CHUNKS == 0u) { @inline steps(); }
        @else { @inline chunk(); }
    }
    if (p.leaves == 0u || !lives) { return; }
    @unroll for (var r = 0u; r < ROWS; r++) {
        @unroll for (var j = 0u; j < 4u; j++) {
            let d = first_row + 4u * r + j;
            if (d < p.dim) { present[present_at + d * p.present.s] = s[r][j]; }
        }
    }
}
