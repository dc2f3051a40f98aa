// The chunks of linear.wgsl on matrix units, with decays of heads or none. A, R, E_ij and E_i are those there, S is the state before
// 16 tokens, and E_j that of the last token in E·d:
//
//     P_ij = E_ij·query_i·key_jᵀ, j <= i    o_i = scale·(E_i·query_i·S + P_i·d)    S = E_15·S + keyᵀ·(E·d)
//
// Lanes compute what is not a product of keys, queries, S, P or d. A tile has rows of 4·QUADS elements of f16, high parts before low ones:
//
//     0..15   keys                      part = [ key   ]·[ keyᵀ  S ] = [ A  R ] before their factors,
//     16..31  queries, then P, d, E·d          [ query ]               [ P  Y ] Y = query·S
//     32..47  columns of S, then what is added to them, in f32
//
// Rows of keys, queries and P, and columns of S and d, are multiplied by powers of two that bring the largest element to [2^14, 2^15), and
// split: x = high + low/2^11, with 22 bits, and an error of 2^-39 of the largest element. A product is
// high·high + (high·low + low·high)/2^11. With LOW = 0 keys and queries have 16 bits, and no low parts. P lacks the power of
// two of its key, which d has.
//
// Chunks that this does not suit are computed token after token: those with a number that is not finite, as 0·NaN would reach other tokens,
// or above 2^60, those in which a column of the state, or what is left of it, is below 2^-16 of a d of the chunk, and those with an
// E_ij above 2^16.
//
// Workgroup memory: tile 384·STRIDE bytes, part 4.5 KiB, values 1 KiB, rows 256·ROWS bytes, and 712 bytes. That is 32 KiB for K = 128.

const CHUNKS: u32 = 1u;
const BANDS: u32 = 8u; // of a column
const COLUMNS: u32 = 16u;
const THREADS: u32 = BANDS * COLUMNS;
const SUBGROUPS: u32 = THREADS / LANES;
const QUADS: u32 = BANDS * ROWS; // fours of a row
const DEPTH: u32 = 4u * QUADS;
const STRIDE: u32 = max(2u * QUADS, 24u) + 2u; // of a row of the tile
const WIDTH: u32 = 36u; // of a row of part
const HUGE: u32 = 0x5d800000u; // the bits of 2^60

@binding var<storage, read> query, key, value, decay, beta: array<u32>;
@binding var<storage, read> past: array<f32>;
@binding var<storage, read_write> o: Words;
@binding var<storage, read_write> present: array<f32>;
@binding var<uniform> p: LinearParams;

var<workgroup> tile: array<vec2<u32>, 48u * STRIDE>;
var<workgroup> part: array<f32, 32u * WIDTH>; // the first products, then those of P and d; sums of steps
var<workgroup> rows: array<vec4<f32>, 2u * QUADS>; // of a token of steps
var<workgroup> values: array<f32, 256>; // then R, then d
var<workgroup> factors: array<vec2<f32>, 16>; // exp decay of a head, and beta
var<workgroup> logs, fades, rests: array<f32, 16>; // decay of a head; E_i; E_ji of the last i
var<workgroup> downs: array<vec2<f32>, 16>; // of columns of d and E·d
var<workgroup> tops: array<atomic<u32>, 64>; // bits of the largest element of rows of the tile, and of P
var<workgroup> odd: u32; // 1: the chunk is computed token after token

// up returns the power of two that brings the largest element to [2^14, 2^15), and down what takes it away.
fn up(top: u32) -> f32 { return power_of_two(268u - clamp(top >> 23u, 27u, 187u)); }
fn down(top: u32) -> f32 { return select(power_of_two(clamp(top >> 23u, 27u, 187u) - 14u), 0.0, top == 0u); }
fn down_of(row: u32) -> f32 { return down(atomicLoad(&tops[row])); }

// split stores x times a power of two at at, and its low part some fours after it. Parts that f16 does not hold as normal
// numbers are 0.
fn split(at: u32, low: u32, x: vec4<f32>, factor: f32) {
    let y = x * factor;
    var high = (bitcast<vec4<u32>>(y) + vec4<u32>(0x1000u)) & vec4<u32>(0xffffe000u);
    high = select(vec4<u32>(0u), high, abs(y) >= vec4<f32>(0.00006103515625));
    tile[at] = halves_of(bitcast<vec4<f32>>(high));
    tile[at + low] = halves_of((y - bitcast<vec4<f32>>(high)) * 2048.0);
}

// multiply declares the product of M rows from tile[a] on and N columns from tile[c] on, of $DEPTH terms in $QUADS fours. $STEP is the
// distance of fours in a, and $LOW that of its low parts. With these there are $TERMS: 0, $DEPTH if c alone has them, or 2·$DEPTH.
@inline fn multiply($order, $DEPTH, $QUADS, $STEP, $LOW, $TERMS) {
    var product = Result();
    for (var i = 0u; i < $TERMS; i += K) {
        let x = subgroupMatrixLoad<Left, $order>(&tile, a + i % $DEPTH / 4u * $STEP + i / $DEPTH * $LOW, STRIDE);
        product = subgroupMatrixMultiplyAccumulate(x, subgroupMatrixLoad<Right, col_major>(&tile, c + (i / 4u + $QUADS) % (2u * $QUADS), STRIDE), product);
    }
    product = subgroupMatrixScalarMultiply(product, 0.00048828125);
    for (var i = 0u; i < $DEPTH; i += K) {
        let x = subgroupMatrixLoad<Left, $order>(&tile, a + i / 4u * $STEP, STRIDE);
        product = subgroupMatrixMultiplyAccumulate(x, subgroupMatrixLoad<Right, col_major>(&tile, c + i / 4u, STRIDE), product);
    }
}

// operands stages n keys, the queries of output head g, and the state, each element split.
@inline fn operands() {
    workgroupBarrier();
    if (t < 64u) { atomicStore(&tops[t], 0u); }
    if (t == 0u) { odd = 0u; }
    @inline take_tokens();
    workgroupBarrier();
    var x: array<vec4<f32>, 2u * ROWS>; // of keys, then of queries
    @unroll for (var r = 0u; r < 2u * ROWS; r++) {
        let i = (t + THREADS * r) / QUADS;
        let d = (t + THREADS * r) % QUADS * 4u;
        x[r] = vec4<f32>();
        if (i < n) { x[r] = quad_key(row_key(b, p.head0 + h * p.group, token + i), d); }
        if (i - 16u < n) { x[r] = quad_query(row_query(b, p.head0 + h * p.group + g, token + i - 16u), d); }
        atomicMax(&tops[i], greatest(x[r]));
    }
    @unroll for (var r = 0u; r < ROWS; r++) { atomicMax(&tops[32u + t % COLUMNS], greatest(s[r])); }
    workgroupBarrier();
    @unroll for (var r = 0u; r < 2u * ROWS; r++) {
        let i = (t + THREADS * r) / QUADS;
        split(i * STRIDE + (t + THREADS * r) % QUADS, QUADS, x[r], up(atomicLoad(&tops[i])));
    }
    let row = 32u + t % COLUMNS;
    @unroll for (var r = 0u; r < ROWS; r++) { split(row * STRIDE + band * ROWS + r, QUADS, s[r], up(atomicLoad(&tops[row]))); }
    if (t < 16u) {
        fades[t] = faded(0u, min(t + 1u, n));
        rests[t] = faded(t + 1u, n);
        if (t < n && greatest(vec4<f32>(fades[t], rests[t], factors[t])) >= HUGE) { odd = 1u; }
    }
    if (t < 48u && atomicLoad(&tops[t]) >= HUGE) { odd = 1u; }
    workgroupBarrier();
}

// products stores A, R, P and Y before their factors.
@inline fn products() {
    for (var m = subgroup; m < 32u / M * (32u / N); m += SUBGROUPS) {
        let row = m / (32u / N) * M;
        let column = m % (32u / N) * N;
        let a = row * STRIDE;
        let c = (column + column / 16u * 16u) * STRIDE;
        let lows = DEPTH * max(2u * LOW, column / 16u); // keys and queries of 16 bits have no low part
        @inline multiply(row_major, DEPTH, QUADS, 1u, QUADS, lows);
        subgroupMatrixStore<row_major>(&part, row * WIDTH + column, product, WIDTH);
    }
    workgroupBarrier();
}

// weigh replaces A and P in part, and values by R. What it leaves for tokens after the last has keys of 0 as factors.
@inline fn weigh() {
    @unroll for (var e = 0u; e < 2u; e++) {
        let i = t / 16u + 8u * e;
        let j = t % 16u;
        let at = i * WIDTH + j;
        var f = 0.0;
        if (j <= i) { f = faded(j + 1u, i + 1u); }
        if (i < n && f > 65536.0) { odd = 1u; }
        let x = f * (part[at + 16u * WIDTH] * down_of(16u + i));
        part[at + 16u * WIDTH] = x;
        atomicMax(&tops[48u + i], greatest(vec4<f32>(x)));
        part[at] = factors[i].y * f * (part[at] * down_of(i) * down_of(j));
        if (p.delta == 1u) { values[16u * i + j] = factors[i].y * (values[16u * i + j] - fades[i] * (part[at + 16u] * down_of(i) * down_of(32u + j))); }
    }
    workgroupBarrier();
}

// solve splits P, and computes and splits d.
@inline fn solve() {
    if (t < 16u) {
        var d: array<f32, 16>;
        @unroll for (var i = 0u; i < 16u; i++) { d[i] = values[i * COLUMNS + t]; }
        if (p.delta == 1u) { @inline substitute(part, WIDTH); }
        var mass = bitcast<f32>(atomicLoad(&tops[32u + t])) * 0.00006103515625;
        var least = 1.0e38;
        var most = vec2<u32>(0u);
        var last: array<f32, 16>;
        @unroll for (var i = 0u; i < 16u; i++) {
            d[i] = d[i] * down_of(i);
            last[i] = 0.0;
            if (i < n) {
                last[i] = d[i] * rests[i];
                mass = max(mass * factors[i].x, abs(d[i]));
                if (mass > 0.0) { least = min(least, mass); }
            }
            most = max(most, vec2<u32>(greatest(vec4<f32>(d[i])), greatest(vec4<f32>(last[i]))));
        }
        if (max(most.x, most.y) >= HUGE || least < bitcast<f32>(most.x) * 0.0000152587890625) { odd = 1u; }
        @each($x $AT $top: d 8u x, last 16u y)
        @unroll for (var i = 0u; i < 4u; i++) {
            split((16u + t) * STRIDE + $AT + i, 4u, vec4<f32>($x[4u * i], $x[4u * i + 1u], $x[4u * i + 2u], $x[4u * i + 3u]), up(most.$top));
        }
        downs[t] = vec2<f32>(down(most.x), down(most.y));
    } else if (t >= 64u) {
        let i = t / 4u; // 16 rows after the first 16
        let top = atomicLoad(&tops[32u + i]);
        if (top >= HUGE) { odd = 1u; }
        let at = i * WIDTH + t % 4u * 4u;
        split(i * STRIDE + t % 4u, 4u, vec4<f32>(part[at], part[at + 1u], part[at + 2u], part[at + 3u]), up(top));
    }
    wrong = workgroupUniformLoad(&odd);
}

// finish writes the outputs, and computes the state after the last of them.
@inline fn finish() {
    let ends = g + 1u == p.group;
    for (var m = subgroup; m < 16u / M * (16u / N); m += SUBGROUPS) {
        let row = m / (16u / N) * M;
        let column = m % (16u / N) * N;
        let a = (16u + row) * STRIDE;
        let c = (16u + column) * STRIDE + 8u;
        @inline multiply(row_major, 16u, 4u, 1u, 4u, 32u);
        subgroupMatrixStore<row_major>(&part, row * WIDTH + column, product, WIDTH);
    }
    for (var m = subgroup; ends && m < DEPTH / M * (16u / N); m += SUBGROUPS) {
        let a = m / (16u / N) * (M / 4u);
        let column = m % (16u / N) * N;
        let c = (16u + column) * STRIDE + 16u;
        @inline multiply(col_major, 16u, 4u, 4u * STRIDE, QUADS, 16u + 16u * LOW);
        subgroupMatrixStore<col_major>(&tile, (32u + column) * STRIDE + 2u * a, product, STRIDE);
    }
    workgroupBarrier();
    @unroll for (var e = 0u; e < 2u; e++) {
        let i = t / 16u + 8u * e;
        if (i < n && lives) {
            let at = i * WIDTH + t % 16u;
            let y = fades[i] * (part[at + 16u * WIDTH + 16u] * down_of(16u + i) * down_of(32u + t % 16u));
            let x = part[at] * down_of(48u + i) * downs[t % 16u].x;
            put(p.o.base + b * p.o.b + (h * p.group + g) * p.o.h + (token + i) * p.o.s + column * p.o.d, p.scale * (x + y));
        }
    }
    if (ends) {
        @unroll for (var r = 0u; r < ROWS; r++) {
            let at = (32u + t % COLUMNS) * STRIDE + 2u * (band * ROWS + r);
            s[r] = fma(bitcast<vec4<f32>>(vec4<u32>(tile[at], tile[at + 1u])), vec4<f32>(downs[t % COLUMNS].y), s[r] * fades[15]);
        }
    }
}

@main(THREADS) {
    @inline first_state();
    var turn = 0u;
    var token = 0u;
    var alone = 0u; // tokens before it are computed one after the other
    while (token < p.tokens) {
        if (token < alone) {
            let n = 1u;
            workgroupBarrier();
            fill(b, h, 0u, token, n, 0u, t);
            @inline take_tokens();
            workgroupBarrier();
            @inline steps();
            token = token + n;
        } else {
            let n = min(16u, p.tokens - token);
            var wrong = 0u;
            for (var g = 0u; g < p.group && wrong == 0u; g++) {
                @inline operands();
                @inline products();
                @inline weigh();
                @inline solve();
                if (wrong == 0u) { @inline finish(); }
            }
            if (wrong == 0u) { token = token + n; }
            else { alone = token + n; }
        }
    }
    @inline last_state();
}
