// Linear attention (Katharopoulos et al. 2020; Yang et al. 2024). For each state, with row vectors of a token:
//
//     S = diag(exp decay)·S    d = beta·(value - Sᵀkey)    S = S + keyᵀd    o = scale·query·S
//
// A workgroup has 16 columns of a state in registers. Thread (band, column) has rows [band·4·ROWS, (band+1)·4·ROWS) of its
// column. Sums over rows add up the parts of the bands in workgroup memory. Rows beyond K are zeros.
//
// The rows of some tokens are staged together: of each token its key, exponentials of decays of channels, and queries. If the
// queries of all outputs of a state do not fit, tokens are staged one at a time, and queries in turns.
//
// CHUNKS = 0 computes token after token. There are 8 bands, and each sum takes a barrier.
//
// CHUNKS = 1 first computes the d of up to 16 tokens together, where E_ij is the exponential of the decays of the tokens after j
// up to i, and E_i that of all up to i:
//
//     A_ij = beta_i·key_i·(E_ij·key_j)ᵀ for j < i    [16, 16]
//     R_i  = beta_i·(value_i - key_i·(E_i·S))        [16, 16 columns]
//     (I + A)·d = R                                  forward substitution, a thread for each column
//
// Without the delta rule d = value. Then the state follows the tokens without barriers and leaves the parts of all outputs of a
// query head. There are 4 bands. Thread (band, j) computes A_ij for all i, in the way in which it computes the products of keys and
// column j of S. Decays of heads are exponentials of sums. Those of channels multiply key_j, or S, from token to token. Nothing
// divides by an exponential, so decays of any size and sign are right. Nothing multiplies a token by 0 to hide it from an
// earlier one, so NaN stays where it is.
//
// Operations of a token and state with the delta rule and one output: 7·K·V token after token, and 9·K·V in chunks, or 11·K·V
// with decays of channels. 2 or 3 of them are A, which each block of columns computes again. Each further output takes 2·K·V token
// after token, and 5·K·V in chunks, which compute the states again. 16 tokens take at least 17 + 16·group barriers token after token,
// 5 + 2·group in a chunk, and 2·group in one without the delta rule. Each state has V/16 workgroups.
//
// Workgroup memory, token after token: rows 12 KiB, part 1 KiB, values 1 KiB, factors 128 bytes. In chunks: rows 3 KiB·ROWS,
// part 4 KiB, values 1 KiB, inner 1 KiB, factors 128 bytes, logs 64 bytes. That is 30 KiB for K = 128.

@binding var<storage, read> query, key, value, decay, beta: array<u32>;
@binding var<storage, read> past: array<f32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> present: array<f32>;
@binding var<uniform> p: LinearParams;

const BANDS: u32 = 8u - 4u * CHUNKS;
const COLUMNS: u32 = 16u;
const THREADS: u32 = BANDS * COLUMNS;
const QUADS: u32 = BANDS * ROWS; // vec4 of a staged row
const PLANE: u32 = 16u * COLUMNS; // parts of a band in a chunk
const STAGED: u32 = (1u - CHUNKS) * 768u + CHUNKS * 48u * QUADS;
const PARTS: u32 = (1u - CHUNKS) * 2u * THREADS + CHUNKS * BANDS * PLANE; // of two sums in turns, or of a chunk

var<workgroup> rows: array<vec4<f32>, STAGED>;
var<workgroup> part: array<f32, PARTS>;
var<workgroup> values: array<f32, 256>; // in chunks then R, then d
var<workgroup> factors: array<vec2<f32>, 16>; // exp decay of a head, and beta
@if(CHUNKS == 1u) var<workgroup> logs: array<f32, 16>; // decay of a head
@if(CHUNKS == 1u) var<workgroup> inner: array<f32, PLANE>; // A

// total returns element e of the products whose parts are in part.
@if(CHUNKS == 1u) fn total(e: u32) -> f32 {
    var sum = 0.0;
    @unroll for (var l = 0u; l < BANDS; l++) { sum = sum + part[l * PLANE + e]; }
    return sum;
}

// sweep leaves the parts of the products of keys and y, which decays with tokens from $first on.
@inline fn sweep($first) {
    for (var i = 0u; i < n; i++) {
        let key_at = i * p.slots * QUADS + band * ROWS;
        if (p.decayed == 2u && i >= $first) {
            @unroll for (var r = 0u; r < ROWS; r++) { y[r] = y[r] * rows[key_at + QUADS + r]; }
        }
        var x = vec4<f32>();
        @unroll for (var r = 0u; r < ROWS; r++) { x = fma(rows[key_at + r], y[r], x); }
        part[band * PLANE + i * COLUMNS + t % COLUMNS] = (x.x + x.y) + (x.z + x.w);
    }
}

// solve replaces values by d.
@inline fn solve() {
    {
        let j = t % COLUMNS; // its key is y
        var y: array<vec4<f32>, ROWS>;
        @unroll for (var r = 0u; r < ROWS; r++) { y[r] = rows[j * p.slots * QUADS + band * ROWS + r]; }
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
        @inline substitute(inner, COLUMNS);
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
            let key_at = i * p.slots * QUADS + band * ROWS;
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
            part[band * PLANE + i * COLUMNS + t % COLUMNS] = (x.x + x.y) + (x.z + x.w);
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
    @inline first_state();
    @if(CHUNKS == 0u) var turn = 0u;
    for (var token = 0u; token < p.tokens; token += p.held) {
        let n = min(p.held, p.tokens - token);
        // The barrier of the last sums follows all reads of what was staged before.
        fill(b, h, 0u, token, n, 0u, t);
        @inline take_tokens();
        workgroupBarrier();
        @if(CHUNKS == 0u) { @inline steps(); }
        @else { @inline chunk(); }
    }
    @inline last_state();
}
