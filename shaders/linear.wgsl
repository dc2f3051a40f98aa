// Linear attention, token after token (Katharopoulos et al. 2020; Yang et al. 2024). For each state, with row vectors of a
// token:
//
//     S = diag(exp decay)·S    d = beta·(value - Sᵀkey)    S = S + keyᵀd    o = scale·query·S
//
// A workgroup has 16 columns of a state in registers. Thread (lane, column) has rows [lane·4·ROWS, (lane+1)·4·ROWS) of its
// column. Sums over rows add up the parts of 8 lanes in workgroup memory, with one barrier each. Rows beyond K are zeros.
//
// The rows of some tokens are staged together: of each token its key, exponentials of decays of channels, and queries. If the
// queries of all outputs of a state do not fit, tokens are staged one at a time, and queries in turns.
//
// Workgroup memory: rows 12 KiB, part 1 KiB, values 1 KiB, factors 128 bytes.

struct LinearParams {
    first: u32, // workgroups of the box that earlier dispatches ran
    total: u32, // workgroups of the box up to the end of this dispatch
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
    key_type: u32,
    value_type: u32,
    decay_type: u32,
    beta_type: u32,
    out_type: u32, // type of o
    scale: f32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
    query: Strides,
    key: Strides,
    value: Strides,
    decay: Strides,
    beta: Strides,
    past: Strides,
    o: Strides,
    present: Strides,
}

@binding var<storage, read> query: array<u32>;
@binding var<storage, read> key: array<u32>;
@binding var<storage, read> value: array<u32>;
@binding var<storage, read> decay: array<u32>;
@binding var<storage, read> beta: array<u32>;
@binding var<storage, read> past: array<f32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> present: array<f32>;
@binding var<uniform> p: LinearParams;

const LANES: u32 = 8u;
const COLUMNS: u32 = 16u;
const THREADS: u32 = LANES * COLUMNS;
const QUADS: u32 = LANES * ROWS; // vec4 of a staged row

var<workgroup> rows: array<vec4<f32>, 768>;
var<workgroup> part: array<f32, 256>; // of two sums in turns
var<workgroup> values: array<f32, 256>;
var<workgroup> factors: array<vec2<f32>, 16>; // exp decay of a head, and beta

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
fn gathered(x: vec4<f32>, turn: u32, t: u32) -> f32 {
    part[turn * THREADS + t] = (x.x + x.y) + (x.z + x.w);
    workgroupBarrier();
    var sum = 0.0;
    @unroll for (var l = 0u; l < LANES; l++) { sum = sum + part[turn * THREADS + l * COLUMNS + t % COLUMNS]; }
    return sum;
}

@main(THREADS) {
    let column = id % p.blocks * COLUMNS + t % COLUMNS;
    let h = id / p.blocks % p.heads;
    let b = id / p.blocks / p.heads;
    let lane = t / COLUMNS;
    let lives = column < p.vdim;
    let first_row = lane * ROWS * 4u;
    let past_at = p.past.base + b * p.past.b + h * p.past.h + column * p.past.d;
    let present_at = p.present.base + b * p.present.b + h * p.present.h + column * p.present.d;
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
    var turn = 0u;
    for (var token = 0u; token < p.tokens; token += p.held) {
        let n = min(p.held, p.tokens - token);
        // The barrier of the last sum follows all reads of what was staged before.
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
                f.x = exp2_acc(vec4<f32>(load_decay(p.decay.base + b * p.decay.b + h * p.decay.h + (token + t) * p.decay.s) * LOG2E)).x;
            }
            if (p.delta == 1u) { f.y = load_beta(p.beta.base + b * p.beta.b + h * p.beta.h + (token + t) * p.beta.s); }
            factors[t] = f;
        }
        workgroupBarrier();
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
    if (p.leaves == 0u || !lives) { return; }
    @unroll for (var r = 0u; r < ROWS; r++) {
        @unroll for (var j = 0u; j < 4u; j++) {
            let d = first_row + 4u * r + j;
            if (d < p.dim) { present[present_at + d * p.present.s] = s[r][j]; }
        }
    }
}
