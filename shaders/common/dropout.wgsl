// The random numbers of dropout.

// mul_hi returns the upper half of each 64-bit product.
fn mul_hi(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    let x0 = x & vec2<u32>(0xffffu);
    let x1 = x >> vec2<u32>(16u);
    let y0 = y & vec2<u32>(0xffffu);
    let y1 = y >> vec2<u32>(16u);
    let mid = x1 * y0 + ((x0 * y0) >> vec2<u32>(16u));
    let low = x0 * y1 + (mid & vec2<u32>(0xffffu));
    return x1 * y1 + (mid >> vec2<u32>(16u)) + (low >> vec2<u32>(16u));
}

// philox is Philox4x32-10 (Salmon et al. 2011), as in package backend.
fn philox(counter: vec4<u32>, key: vec2<u32>) -> vec4<u32> {
    let m = vec2<u32>(0xd2511f53u, 0xcd9e8d57u);
    var c = counter;
    var k = key;
    for (var n = 0u; n < 10u; n++) {
        let high = mul_hi(c.xz, m);
        let low = c.xz * m;
        c = vec4<u32>(high.y ^ c.y ^ k.x, low.y, high.x ^ c.w ^ k.y, low.x);
        k = k + vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return c;
}

// dropped reports whether dropout drops the weight of a row of the box and key j of the chunk.
fn dropped(batch: u32, head: u32, row: u32, j: u32) -> bool {
    let n = p.drop_row + row;
    let x = philox(vec4<u32>(n / 4u, p.drop_key + key_of(batch, j), p.drop_head + head, p.drop_batch + batch), vec2<u32>(p.seed0, p.seed1));
    let two = select(x.xy, x.zw, (n & 2u) != 0u);
    let drawn = select(two.x, two.y, (n & 1u) != 0u);
    return drawn < p.threshold;
}

// without_dropped returns the weights of four rows of the box, from row on, with key j of the chunk, marked as
// hidden where dropout takes them.
fn without_dropped(weights: vec4<f32>, batch: u32, head: u32, row: u32, j: u32) -> vec4<f32> {
    let n = p.drop_row + row;
    let seed = vec2<u32>(p.seed0, p.seed1);
    let counter = vec4<u32>(n / 4u, p.drop_key + key_of(batch, j), p.drop_head + head, p.drop_batch + batch);
    // A counter yields the words of four rows that begin at a multiple of 4.
    var x = philox(counter, seed);
    if ((n & 3u) != 0u) {
        let y = philox(counter + vec4<u32>(1u, 0u, 0u, 0u), seed);
        if ((n & 3u) == 1u) {
            x = vec4<u32>(x.y, x.z, x.w, y.x);
        } else if ((n & 3u) == 2u) {
            x = vec4<u32>(x.z, x.w, y.x, y.y);
        } else {
            x = vec4<u32>(x.w, y.x, y.y, y.z);
        }
    }
    return select(weights, vec4<f32>(hidden_weight()), x < vec4<u32>(p.threshold));
}
