// Parts of linear attention, whose states lie in registers: thread (band, column) has ROWS fours of rows of its column.

// quad_$x returns elements d to d + 3 of the row of $x at at, and 0 for those beyond K.
@each($x: query, key, decay)
fn quad_$x(at: u32, d: u32) -> vec4<f32> {
    var x = vec4<f32>();
    @unroll for (var j = 0u; j < 4u; j++) {
        if (d + j < p.dim) { x[j] = load_$x(at + (d + j) * p.$x.d); }
    }
    return x;
}

// row_$x returns where the row of $x begins that token s of an output head reads.
@each($x: query, key)
fn row_$x(b: u32, head: u32, s: u32) -> u32 {
    return p.$x.base + b * p.$x.b + (head / p.$x_group - p.head0 / p.$x_group) * p.$x.h + s * p.$x.s;
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
            x = quad_query(row_query(b, p.head0 + h * p.group + min(g + kind - queries, p.group - 1u), s), d);
        } else if (kind == 0u) {
            x = quad_key(row_key(b, p.head0 + h * p.group, s), d);
        } else {
            x = exp2_acc(quad_decay(p.decay.base + b * p.decay.b + h * p.decay.h + s * p.decay.s, d) * LOG2E);
        }
        rows[(i * p.slots + kind) * QUADS + e % QUADS] = x;
    }
}

// column_sum returns the sum of the parts of a column. Two sums in turns have places of their own, so that no thread waits
// until others have read the one before.
fn column_sum(x: vec4<f32>, turn: u32, t: u32) -> f32 {
    part[turn * THREADS + t] = (x.x + x.y) + (x.z + x.w);
    workgroupBarrier();
    var sum = 0.0;
    @unroll for (var l = 0u; l < BANDS; l++) { sum = sum + part[turn * THREADS + l * COLUMNS + t % COLUMNS]; }
    return sum;
}

// steps computes n tokens one after the other.
@inline fn steps() {
    for (var i = 0u; i < n; i++) {
        let key_at = i * p.slots * QUADS + band * ROWS;
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
            d = f.y * (d - column_sum(x, turn, t));
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
            let sum = column_sum(x, turn, t);
            turn = 1u - turn;
            if (band == 0u && lives) {
                put(p.o.base + b * p.o.b + (h * p.group + g) * p.o.h + (token + i) * p.o.s + column * p.o.d, p.scale * sum);
            }
        }
    }
}

// faded returns the exponential of the sum of the decays of a head of tokens from to end - 1 of a chunk. Its square root is
// computed, as exp2_acc may stop at 2^64. It is finite, so that its product with a state of zeros is 0.
fn faded(first: u32, end: u32) -> f32 {
    if (p.decayed != 1u) { return 1.0; }
    var sum = 0.0;
    for (var i = first; i < end; i++) { sum = sum + logs[i]; }
    let root = exp2_acc(vec4<f32>(min(sum * (0.5 * LOG2E), 63.0))).x;
    return root * root;
}

// first_state declares what a thread has of a state.
@inline fn first_state() {
    let column = id % p.blocks * COLUMNS + t % COLUMNS;
    let h = id / p.blocks % p.heads;
    let b = id / p.blocks / p.heads;
    let band = t / COLUMNS;
    let lives = column < p.vdim;
    let first_row = band * ROWS * 4u;
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
}

// take_tokens stages the values, the decays of a head and beta of n tokens.
@inline fn take_tokens() {
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
}

// last_state writes the state.
@inline fn last_state() {
    if (p.leaves == 0u || !lives) { return; }
    @unroll for (var r = 0u; r < ROWS; r++) {
        @unroll for (var j = 0u; j < 4u; j++) {
            let d = first_row + 4u * r + j;
            if (d < p.dim) { present[present_at + d * p.present.s] = s[r][j]; }
        }
    }
}

// substitute replaces R by d, a thread for each column. A has rows of $WIDTH.
@inline fn substitute($A, $WIDTH) {
    @unroll for (var j = 0u; j < 15u; j++) {
        @unroll for (var i = 0u; i < 15u - j; i++) { d[j + 1u + i] = fma(-$A[(j + 1u + i) * $WIDTH + j], d[j], d[j + 1u + i]); }
    }
}
