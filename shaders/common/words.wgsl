// Words that hold several elements.

// halves sets $r to the four 16-bit elements of two words, if $TYPE is 1 or 2.
@inline fn halves($r, $a, $b, $TYPE) {
    @if($TYPE == 1u) $r = vec4<f32>(unpack2x16float($a), unpack2x16float($b));
    @if($TYPE == 2u) {
        let bits = vec4<u32>($a << 16u, $a & 0xffff0000u, $b << 16u, $b & 0xffff0000u);
        $r = bitcast<vec4<f32>>(bits);
    }
}

// integers returns the four integers of a word of q8.
fn integers(w: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(w << 24u), bitcast<i32>(w << 16u), bitcast<i32>(w << 8u), bitcast<i32>(w)) >> vec4<u32>(24u));
}

// eighths returns the four e4m3fn numbers of a word. With the bits of a code in those of an f32, its exponents
// differ by 120. Below 2^-6 steps are twice as wide as that makes them, so that y becomes 2y - 2^-6, which is less
// than y there and nowhere else. No step needs subnormal numbers, which devices may treat as 0.
fn eighths(w: u32) -> vec4<f32> {
    let x = vec4<u32>(w << 24u, w << 16u, w << 8u, w);
    let m = (x & vec4<u32>(0x7f000000u)) >> vec4<u32>(4u);
    let y = bitcast<vec4<f32>>(m + vec4<u32>(0x3c000000u));
    let n = bitcast<vec4<u32>>(min(y, y * 2.0 - vec4<f32>(0.015625)));
    let size = select(n, vec4<u32>(0x7fc00000u), m == vec4<u32>(0x07f00000u));
    return bitcast<vec4<f32>>(size | (x & vec4<u32>(0x80000000u)));
}

// encode8 rounds x to e4m3fn, to nearest even. Larger numbers become 448.
fn encode8(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let a = bits & 0x7fffffffu;
    // Below 2^-6 steps are 2^-9, as those of f32 are from 2^14 on.
    var n = select((a - 0x3c000000u + 0x7ffffu + ((a >> 20u) & 1u)) >> 20u, bitcast<u32>(bitcast<f32>(a) + 16384.0) - 0x46800000u, a < 0x3c800000u);
    n = select(n, 0x7eu, a >= 0x43e00000u);
    n = select(n, 0x7fu, a > 0x7f800000u);
    return n | ((bits >> 24u) & 0x80u);
}

// aligned returns 16-bit elements i and i + 1, given the words that hold them.
fn aligned(low: u32, high: u32, i: u32) -> u32 {
    return select(low, (low >> 16u) | (high << 16u), i % 2u == 1u);
}

// nibbles returns 16·(n - 8) as words of q8, for the integers n of q4 in four bytes, those of element d and later ones.
fn nibbles(bytes: vec4<u32>, d: u32) -> vec4<u32> {
    let shift = vec4<u32>(4u - d % 32u / 16u * 4u);
    return ((bytes << shift) & vec4<u32>(0xf0f0f0f0u)) ^ vec4<u32>(0x80808080u);
}

// scale4 returns a sixteenth of the scale of q4 in 16-bit element i, given the word that holds it.
fn scale4(w: u32, i: u32) -> f32 { return unpack2x16float(w >> (16u * (i % 2u))).x * 0.0625; }

// integer returns integer d of a row of q8, given the word that holds it.
fn integer(w: u32, d: u32) -> f32 {
    return f32(bitcast<i32>(w << (24u - 8u * (d & 3u))) >> 24u);
}

// transposed_halves returns the words of columns 2n to 2n + 3, given words n and n + 1 of two keys.
fn transposed_halves(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
    let even = (a & vec2<u32>(0xffffu)) | (b << vec2<u32>(16u));
    let odd = (a >> vec2<u32>(16u)) | (b & vec2<u32>(0xffff0000u));
    return vec4<u32>(even.x, odd.x, even.y, odd.y);
}

// transposed returns words whose bytes are byte 0, 1, 2 and 3 of the four words.
fn transposed(w: vec4<u32>) -> vec4<u32> {
    let even = (w.xz & vec2<u32>(0x00ff00ffu)) | ((w.yw & vec2<u32>(0x00ff00ffu)) << vec2<u32>(8u));
    let odd = ((w.xz >> vec2<u32>(8u)) & vec2<u32>(0x00ff00ffu)) | (w.yw & vec2<u32>(0xff00ff00u));
    return vec4<u32>((even.x & 0xffffu) | (even.y << 16u), (odd.x & 0xffffu) | (odd.y << 16u),
        (even.x >> 16u) | (even.y & 0xffff0000u), (odd.x >> 16u) | (odd.y & 0xffff0000u));
}

// encode16 rounds x to f16 (type 1) or bf16 (type 2), to nearest, ties to even. pack2x16float may round either
// way.
fn encode16(x: f32, dtype: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    let nan = a > 0x7f800000u;
    let brain = select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, nan);
    var half = (a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u;
    // Below 2^-14 f16 is subnormal, in steps of 2^-24. Adding 1/2 puts the step of the sum at 2^-24: the
    // addition rounds, and the low bits count the steps.
    half = select(half, bitcast<u32>(bitcast<f32>(a) + 0.5) - 0x3f000000u, a < 0x38800000u);
    half = select(half, 0x7c00u, a >= 0x477ff000u); // 65520 and above round to infinity
    half = select(half, 0x7e00u, nan);
    return select(sign | half, brain, dtype == 2u);
}
