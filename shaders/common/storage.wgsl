// Elements as they are stored. A type is 0 for f32, 1 for f16, 2 for bf16, 4 for q8, 5 for q4 and 6 for f8. Elements of 16
// bits lie two to a word. A row of q8 is its scale, an f32, followed by words of four signed integers each; element
// d is scale·integer d. A row of q4 is a sequence of blocks, of nine 16-bit elements each: a scale, an f16, and 32
// integers of 4 bits. The lower 4 bits of byte i are integer i, the upper ones integer 16 + i. An element is
// scale·(integer - 8). As blocks may begin in the middle of words, positions in q4 count 16-bit elements. A row of
// f8 is words of four numbers in e4m3fn each.
//
// Kernels that call put or put16 have a binding o: Words.

// Words are words that threads may share. The array is in a structure because of Metal: naga 0.18 and 0.19 take
// the address of the bounds check of an array's atomic element.
struct Words {
    data: array<atomic<u32>>,
}

// decode returns element i of a tensor of type 0, 1 or 2, given the word that holds it.
fn decode(word: u32, i: u32, dtype: u32) -> f32 {
    let pair = unpack2x16float(word);
    let half = select(pair.x, pair.y, (i & 1u) == 1u);
    let brain = bitcast<f32>((word >> ((i & 1u) * 16u)) << 16u);
    return select(select(brain, half, dtype == 1u), bitcast<f32>(word), dtype == 0u);
}

// load_$x returns element i of the binding $x: array<u32>, whose type is p.$x_type.
@each($x: beta, constant, decay, g, key, o, past, query, value, w, x)
fn load_$x(i: u32) -> f32 {
    return decode($x[select(i >> 1u, i, p.$x_type == 0u)], i, p.$x_type);
}

// load_out returns element i of o: Words.
fn load_out(i: u32) -> f32 {
    return decode(atomicLoad(&o.data[select(i >> 1u, i, p.out_type == 0u)]), i, p.out_type);
}

// begin_$x returns where a row of the box begins in $x.
@each($x: cosine, g, o, sine, src, terms, w, x)
fn begin_$x(row: u32) -> u32 {
    let h = (row / p.rows) % p.heads;
    return p.$x.base + (row / p.rows / p.heads) * p.$x.b + h * p.$x.h + (row % p.rows) * p.$x.s;
}

// load_q returns element i of the binding q: array<u32>, whose type is IN.
fn load_q(i: u32) -> f32 {
    return decode(q[select(i >> 1u, i, IN == 0u)], i, IN);
}

// scalar_$x returns element i of the binding $x: array<vec4<u32>>.
@each($x $TYPE: q IN, k KV, v KV, g DO, a A, w W)
fn scalar_$x(i: u32) -> f32 {
    let word = select(i >> 1u, i, $TYPE == 0u);
    return decode($x[word >> 2u][word & 3u], i, $TYPE);
}

// nibble_$x returns element d of the row of q4 at position at of the binding $x: array<u32>.
@each($x: k, v, src)
fn nibble_$x(at: u32, d: u32) -> f32 {
    let first = at + d / 32u * 9u;
    let i = first + 1u + d % 16u / 2u;
    let n = ($x[i >> 1u] >> (16u * (i % 2u) + 8u * (d % 2u) + d % 32u / 16u * 4u)) & 15u;
    return decode($x[first >> 1u], first, 1u) * (f32(n) - 8.0);
}

// stored_$x returns elements d to d + 3 of the row of $x that begins at element at, as $x holds them: the bits
// of four f32, two words of four 16-bit elements, or a word of integers and their scale. Elements beyond the end
// of the row are 0. Registers hold these until they are converted on their way to workgroup memory, so that
// loads wait for no conversion.
@each($x $TYPE $TWO $VEC: q IN Q2 VEC, k KV KV2 VEC, v KV KV2 VEC, g DO G2 VEC, a A A2 AVEC, w W W2 WVEC)
fn stored_$x(at: u32, d: u32, end: u32, step: u32) -> vec4<u32> {
    var x = vec4<u32>(0u);
    @if(max($VEC, $TYPE / 4u) == 0u) @unroll for (var e = 0u; e < 4u; e++) {
        if (d + e < end) { x[e] = bitcast<u32>(scalar_$x(at + (d + e) * step)); }
    } @else if (FULL == 1u || d < end) {
        @if($TYPE == 4u) {
            let i = at + 1u + d / 4u;
            x.x = $x[i >> 2u][i & 3u];
            x.y = $x[at >> 2u][at & 3u];
        } @else @if($TYPE == 6u) {
            x.x = $x[(at + d / 4u) >> 2u][(at + d / 4u) & 3u];
        } @else @if($TYPE == 5u) {
            let first = at + d / 32u * 9u;
            let i = first + 1u + d % 16u / 2u;
            x.x = nibbles(vec4<u32>(aligned($x[i >> 3u][(i >> 1u) & 3u], $x[(i + 1u) >> 3u][((i + 1u) >> 1u) & 3u], i)), d).x;
            x.y = bitcast<u32>(scale4($x[first >> 3u][(first >> 1u) & 3u], first));
        } @else @if($VEC == 1u) {
            let four = $x[(at + d) >> 2u];
            @if($TWO == 0u) x = four;
            @else x = vec4<u32>(four.x, four.y, 0u, 0u);
        } @else {
            let eight = $x[(at + d) >> 3u];
            let four = select(eight.xy, eight.zw, ((at + d) & 4u) != 0u);
            x = vec4<u32>(four, 0u, 0u);
        }
    }
    return x;
}

// value_$x returns the elements that stored_$x returned.
@each($x $TYPE $TWO: q IN Q2, k KV KV2, v KV KV2, g DO G2, a A A2, w W W2)
fn value_$x(x: vec4<u32>) -> vec4<f32> {
    var r = bitcast<vec4<f32>>(x);
    @if($TYPE == 6u) r = eighths(x.x);
    @else @if($TYPE / 4u == 1u) r = integers(x.x) * bitcast<f32>(x.y);
    @if($TWO == 1u) { @inline halves(r, x.x, x.y, $TYPE); }
    return r;
}

// put16 stores 16 bits as element i of o. Two rows may share a word, which another thread may be writing: put16
// flips the bits that change in its half atomically.
fn put16(i: u32, bits: u32) {
    let shift = (i & 1u) * 16u;
    let old = atomicLoad(&o.data[i >> 1u]) >> shift;
    atomicXor(&o.data[i >> 1u], ((old ^ bits) & 0xffffu) << shift);
}

// put stores x as element i of o, rounded to the type of o.
fn put(i: u32, x: f32) {
    if (p.out_type == 0u) {
        atomicStore(&o.data[i], bitcast<u32>(x));
    } else {
        put16(i, encode16(x, p.out_type));
    }
}
