// What the options of a call do to a score: masks, biases and slopes. Kernels that call these functions have
// the bindings mask and bias. The block mask is in mask, and the relative bias in bias, unless the call has both
// operands of a kind. Then BOTH = 2 has the block mask in bias or the relative bias in mask, if the other kind is
// absent, and BOTH = 1 has the bindings blocks and relative. EXTRA = 0 leaves out block masks, relative biases and slopes.

@if(BOTH == 1u) @binding var<storage, read> blocks: array<u32>;
@if(BOTH == 1u) @binding var<storage, read> relative: array<u32>;

const HIDDEN_BITS: u32 = 0x80000000u; // of hidden_weight
const MOST_BLOCKS: u32 = 64u; // mask blocks that are read at most to skip a tile
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // the bits of 2^126

// hidden_weight returns -0, which marks a hidden key among weights: these never have a sign. It is computed from
// its bits, because a compiler may drop the sign of a constant zero.
fn hidden_weight() -> f32 {
    let bits = HIDDEN_BITS;
    return bitcast<f32>(bits);
}

fn load_bias(i: u32) -> f32 {
    return decode(bias[select(i >> 1u, i, p.bias_type == 1u)], i, p.bias_type - 1u);
}

fn load_relative(i: u32) -> f32 {
    let at = select(i >> 1u, i, p.relative_type == 1u);
    @if(BOTH == 0u) let word = bias[at];
    @if(BOTH == 1u) let word = relative[at];
    @if(BOTH == 2u) let word = mask[at];
    return decode(word, i, p.relative_type - 1u);
}

// unmasked reports whether the mask shows its element i.
fn unmasked(i: u32) -> bool {
    return ((mask[i >> 2u] >> ((i & 3u) * 8u)) & 0xffu) != 0u;
}

// block returns 0 when the block mask hides its element i.
fn block(i: u32) -> u32 {
    @if(BOTH == 0u) let word = mask[i >> 2u];
    @if(BOTH == 1u) let word = blocks[i >> 2u];
    @if(BOTH == 2u) let word = bias[i >> 2u];
    return (word >> ((i & 3u) * 8u)) & 0xffu;
}

// blocks_seen reads the block mask for some rows of the box from r0 on and the keys of a tile up to end. It
// returns 0 when the mask hides all pairs, 2 when it shows all, and 1 for both kinds or when there are too many
// mask blocks to read.
fn blocks_seen(batch: u32, head: u32, r0: u32, rows: u32, tile: u32, keys: u32, end: u32) -> u32 {
    let q0 = (p.row0 + r0) / p.block_q;
    let nq = (p.row0 + min(r0 + rows, p.rows) - 1u) / p.block_q - q0 + 1u;
    let k0 = tile / p.block_k;
    let nk = (min(tile + keys, end) - 1u) / p.block_k - k0 + 1u;
    @if(LISTED == 1u) let many = true;
    @else let many = nq * nk > MOST_BLOCKS;
    if (many) { return 1u; }
    let at = p.blocked.base + batch * p.blocked.b + head * p.blocked.h;
    var some = 0u;
    var all = 1u;
    for (var n = 0u; n < nq * nk; n++) {
        let one = min(block(at + (q0 + n / nk) * p.blocked.s + (k0 + n % nk) * p.blocked.d), 1u);
        some = some | one;
        all = all & one;
    }
    return some + all;
}

// tile_seen reports whether the block mask shows any of so many keys of a tile up to end to any of the rows first to last
// that read a key head. It returns true when there are too many mask blocks to read. h0 is the first query head
// of the key head.
fn tile_seen(b: u32, h0: u32, first: u32, last: u32, tile: u32, keys: u32, end: u32) -> bool {
    if (LISTED == 1u || (p.flags & HAS_BLOCKS) == 0u) { return true; }
    let k0 = tile / p.block_k;
    let nk = (min(tile + keys, end) - 1u) / p.block_k - k0 + 1u;
    if ((last - first + 1u) * nk > MOST_BLOCKS) { return true; }
    var any = 0u;
    for (var n = 0u; n < (last - first + 1u) * nk; n++) {
        let row = first + n / nk;
        any = any | block(p.blocked.base + b * p.blocked.b + (h0 + row / p.rows) * p.blocked.h
            + (p.row0 + row % p.rows) / p.block_q * p.blocked.s + (k0 + n % nk) * p.blocked.d);
    }
    return any != 0u;
}

// bounded clamps a finite bias to the number with the bits limit, which keeps log2(e) times a sum of biases
// finite. It compares bits, because a compiler may assume that no comparison meets a NaN.
fn bounded(x: f32, limit: u32) -> f32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    return select(x, bitcast<f32>((bits & 0x80000000u) | limit), size > limit && size < 0x7f800000u);
}

// slope_of returns the slope of a head; batch and head count from the first of the box.
fn slope_of(batch: u32, head: u32) -> f32 {
    let n = batch * p.slope_b + head;
    return p.slopes[n / 4u][n % 4u];
}

// biases returns the sum of the biases of a score of head h in batch b, given their positions and the distance
// that slopes measure, or -Inf where one of them hides the key.
fn biases(bias_at: u32, relative_at: u32, b: u32, h: u32, away: i32) -> f32 {
    var y = 0.0;
    var hidden = false;
    if (p.bias_type != 0u) {
        let x = load_bias(bias_at);
        hidden = bitcast<u32>(x) == MINUS_INF;
        y = bounded(x, MAX_BIAS);
    }
    @if(EXTRA == 1u) {
        if (p.relative_type != 0u) {
            let x = load_relative(relative_at);
            hidden = hidden || bitcast<u32>(x) == MINUS_INF;
            y = bounded(y + bounded(x, MAX_RELATIVE), MAX_BIAS);
        }
        if ((p.flags & HAS_SLOPES) != 0u) {
            y = bounded(fma(-slope_of(b, h), f32(abs(away)), y), MAX_BIAS);
        }
    }
    return select(y, negative_infinity(), hidden);
}

// Added is what the options of a call do to the scores of a row with four keys.
struct Added {
    y: vec4<f32>, // biases
    seen: vec4<bool>,
}

// added applies masks and, with biased, biases to a row of the box and the keys j, j + step, j + 2·step and j +
// 3·step of the chunk that are seen so far.
fn added(seen: vec4<bool>, b: u32, h: u32, row: u32, j: u32, step: u32, biased: bool) -> Added {
    var r = Added(vec4<f32>(0.0), seen);
    if ((p.flags & HAS_MASK) != 0u) {
        let at = p.mask.base + b * p.mask.b + h * p.mask.h + row * p.mask.s;
        @unroll for (var c = 0u; c < 4u; c++) {
            if (r.seen[c]) { r.seen[c] = unmasked(at + key_of(b, j + c * step) * p.mask.d); }
        }
    }
    @if(EXTRA == 1u) if ((p.flags & HAS_BLOCKS) != 0u) {
        let at = p.blocked.base + b * p.blocked.b + h * p.blocked.h + (p.row0 + row) / p.block_q * p.blocked.s;
        @unroll for (var c = 0u; c < 4u; c++) {
            if (r.seen[c]) {
                r.seen[c] = block(at + (p.key0 + key_of(b, j + c * step)) / p.block_k * p.blocked.d) != 0u;
            }
        }
    }
    if (biased) {
        @each($x: bias, relative) let $x_at = p.$x.base + b * p.$x.b + h * p.$x.h + row * p.$x.s;
        let i = i32(p.row0 + row) + p.offset + offset_of(b);
        @unroll for (var c = 0u; c < 4u; c++) {
            if (r.seen[c]) {
                let n = key_of(b, j + c * step);
                r.y[c] = biases(bias_at + n * p.bias.d, relative_at + n * p.relative.d, b, h, i - i32(p.key0 + n));
                r.seen[c] = bitcast<u32>(r.y[c]) != MINUS_INF;
            }
        }
    }
    return r;
}

// add_seen returns sum + w·x, or sum where w is the marker of a hidden key.
fn add_seen(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return select(fma(vec4<f32>(w), x, sum), sum, bitcast<u32>(w) == HIDDEN_BITS);
}
