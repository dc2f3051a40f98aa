// What the options of a call do to a score: masks, biases and slopes. Kernels that call
// these functions have the bindings mask and bias. A variant with BOTH = 1 also has
// blocks and relative; without it the block mask is in mask, or the relative bias in bias.

const HIDDEN: f32 = -1.0; // marks a hidden key among weights, which are never negative
const HIDDEN_BITS: u32 = 0xbf800000u;
const MOST_BLOCKS: u32 = 64u; // mask blocks that are read at most to skip a tile
const MAX_BIAS: u32 = 0x7f000000u; // the bits of 2^127, see bounded
const MAX_RELATIVE: u32 = 0x7e800000u; // the bits of 2^126

fn load_bias(i: u32) -> f32 {
    return decode(bias[select(i >> 1u, i, p.bias_type == 1u)], i, p.bias_type - 1u);
}

fn load_relative(i: u32) -> f32 {
    let at = select(i >> 1u, i, p.relative_type == 1u);
    var word = 0u;
    if (BOTH == 0u) { // static
        word = bias[at];
    }
    if (BOTH == 1u) { // static
        word = relative[at];
    }
    return decode(word, i, p.relative_type - 1u);
}

// unmasked reports whether the mask shows its element i.
fn unmasked(i: u32) -> bool {
    return ((mask[i >> 2u] >> ((i & 3u) * 8u)) & 0xffu) != 0u;
}

// block returns 0 when the block mask hides its element i.
fn block(i: u32) -> u32 {
    var word = 0u;
    if (BOTH == 0u) { // static
        word = mask[i >> 2u];
    }
    if (BOTH == 1u) { // static
        word = blocks[i >> 2u];
    }
    return (word >> ((i & 3u) * 8u)) & 0xffu;
}

// bounded clamps a finite bias to the number with the bits limit, which keeps log2(e)
// times a sum of biases finite. It compares bits, because a compiler may assume that no
// comparison meets a NaN.
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

// add_seen returns sum + w·x, or sum where w is the marker of a hidden key.
fn add_seen(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return select(fma(vec4<f32>(w), x, sum), sum, bitcast<u32>(w) == HIDDEN_BITS);
}
