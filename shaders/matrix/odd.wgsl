// Elements that matrices of f16 do not hold, and the rescaling of the output, where their products are added.
//
// Elements of bf16 become f16 by powers of two: 2^4 for keys, 2^8 for values, and one for each row of queries, whose
// largest element comes to [2^15, 2^16). That is exact for 33 exponents up to there. Other elements are odd, and 0 in the
// matrix. Lanes compute the scores of odd keys, and all scores of rows with odd queries, and add the products of odd
// values. Weights are multiplied by 2^7, so that the output has a factor of 2^15. When a row sees a value of 2^64 or
// more, lanes add all its products from then on, and matrices only zeros. The element with that value is then far: its
// factor is 2^-49. Other elements of the row keep theirs, because they may be small. The last bit of each says which
// factor it has.
//
// Keys and values of f8 next to bf16 get 2^4 and 2^7, with which all but NaN fit; next to f16 they are numbers of f16.
//
// For f32 the powers are 2^5, 2^7, [2^14, 2^15) and 2^6, and 29 exponents are not odd: their high parts are normal
// numbers of f16, see split.wgsl.

// Exponents, as bf16 and f32 have them: of the largest numbers, of the keys and values that come to these, of huge values.
const TOP: u32 = 141u + min(IN, 1u);
const K_TOP: u32 = 136u + 2u * min(IN, 1u);
const V_TOP: u32 = 134u + KV / 6u;
const HUGE: u32 = 191u;
const SPAN: u32 = 29u + 4u * min(IN, 1u); // exponents that are not odd
const W_UP: u32 = 6u + min(IN, 1u); // of the factor of weights
const UP: u32 = W_UP + TOP - V_TOP; // of that of the output

@if(IN != 1u) var<workgroup> tops: array<u32, TY * M>; // of rows of queries

// half_$x returns a part of the four elements that stored_$x returned, in f16. Those of bf16 and f32 are scaled, such
// that the exponent top comes to TOP, and odd ones are 0.
@each($x $TWO: q Q2, k KV2, v KV2)
fn half_$x(x: vec4<u32>, top: u32, part: u32) -> vec2<u32> {
    @if(IN != 1u) return halves_of(part_of(lifted(value_$x(x), top), part));
    @else @if($TWO == 1u) return x.xy;
    @else return halves_of(value_$x(x));
}

// unit_$x returns UNIT elements from d on of a row that begins at element at, as stored_$x does. halved_$x returns them in f16,
// and any_odd_$x reports whether any of them is odd.
@each($x: k, v)
fn unit_$x(at: u32, d: u32, end: u32, step: u32) -> vec4<u32> {
    @if(VEC == 2u) {
        if (FULL == 1u || d < end) { return $x[(at + d) >> 3u]; }
        return vec4<u32>(0u);
    } @else return stored_$x(at, d, end, step);
}
@each($x: k, v)
@if(VEC == 2u) fn halved_$x(x: vec4<u32>, top: u32, part: u32) -> vec4<u32> { return vec4<u32>(half_$x(x, top, part), half_$x(x.zwxy, top, part)); }
@else fn halved_$x(x: vec4<u32>, top: u32, part: u32) -> vec2<u32> { return half_$x(x, top, part); }
@each($x: k, v)
fn any_odd_$x(x: vec4<u32>, top: u32) -> bool {
    @if(VEC == 2u) return any(is_odd(value_$x(x), top) | is_odd(value_$x(x.zwxy), top));
    @else return any(is_odd(value_$x(x), top));
}

// any_huge reports whether any of UNIT values is 2^64 or more.
fn any_huge(x: vec4<u32>) -> bool {
    var most = magnitude(value_v(x));
    @if(VEC == 2u) most = max(most, magnitude(value_v(x.zwxy)));
    return any(most >= vec4<u32>(HUGE << 23u));
}

// part_of returns x, or a part of it where elements have two.
fn part_of(x: vec4<f32>, part: u32) -> vec4<f32> {
    @if(IN == 0u) {
        let high = rounded(x);
        if (part == 0u) { return high; }
        return (x - high) * 2048.0;
    } @else return x;
}

// product_of returns the product of a query and a key, whose rows begin at i and j, in the order of their elements.
@if(IN != 1u) fn product_of(i: u32, j: u32) -> f32 {
    var sum = 0.0;
    for (var d = 0u; d < DEPTH; d += 4u) {
        sum = dot4(value_q(stored_q(i, d, p.dim, p.q.d)), value_k(stored_k(j, d, p.dim, p.k.d)), sum);
    }
    return sum;
}

// only_finite returns UNIT values of f16 or f8 with 0 for each that is a NaN or an infinity.
fn only_finite(x: vec4<u32>) -> vec4<u32> {
    @if(KV == 6u) {
        let nan = ((x & vec4<u32>(0x7f7f7f7fu)) + vec4<u32>(0x01010101u)) & vec4<u32>(0x80808080u);
        return x & ~((nan >> vec4<u32>(7u)) * 255u);
    } @else @if(VEC == 0u) return select(x, vec4<u32>(0u), (x & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u));
    @else {
        let low = select(vec4<u32>(0xffffu), vec4<u32>(0u), (x & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u));
        let high = select(vec4<u32>(0xffff0000u), vec4<u32>(0u), (x & vec4<u32>(0x7c000000u)) == vec4<u32>(0x7c000000u));
        return x & (low | high);
    }
}

// row_tops finds the largest exponent of each of the lane's rows of queries, and whether the row has odd elements.
@inline fn row_tops() {
    @unroll for (var h = 0u; h < EACH; h++) {
        let line = subgroup * M + lane / PER + h * STEP;
        let i = row_of_q(q_at, r0 + line, rows);
        var most = vec4<u32>(0u);
        for (var d = 0u; d < DEPTH; d += 4u) { most = max(most, magnitude(value_q(stored_q(i, d, p.dim, p.q.d)))); }
        top[h] = clamp(max(max(most.x, most.y), max(most.z, most.w)) >> 23u, 1u, 254u);
        for (var d = 0u; d < DEPTH; d += 4u) { odd_row[h] = odd_row[h] || any(is_odd(value_q(stored_q(i, d, p.dim, p.q.d)), top[h])); }
        if (lane % PER == 0u) { tops[line] = top[h]; }
    }
    workgroupBarrier();
}

// own_scores takes the powers of two from the scores of a row, and computes those with odd elements.
@inline fn own_scores() {
    // 2^(top - 146), in two factors because of its range
    let half = power_of_two((top[h] + 108u) / 2u);
    let rest = power_of_two(top[h] + 108u - (top[h] + 108u) / 2u);
    @unroll for (var g = 0u; g < FOURS; g++) { s[g] = s[g] * half * rest; }
    let own = select(odd_keys, 0xffffffffu, odd_row[h]);
    if (own != 0u) {
        @unroll for (var g = 0u; g < FOURS; g++) {
            for (var r = 0u; r < 4u; r++) {
                let key = 4u * (lane % PER + g * PER) + r;
                if (((own >> key) & 1u) != 0u) {
                    s[g][r] = product_of(row_of_q(q_at, number, rows), k_row(k_at, batch, min(j0 + key, keys - 1u)));
                }
            }
        }
    }
}

// weight_bits returns the weight of key n in a row of weights, an f16: -0 if the key is hidden. weight_of returns the number, of f32
// with its second part.
fn weight_bits(subgroup: u32, line: u32, n: u32) -> u32 { return (weights[subgroup][line * PS + n / 4u][n / 2u % 2u] >> (16u * (n % 2u))) & 0xffffu; }
fn weight_of(subgroup: u32, line: u32, n: u32) -> f32 {
    var weight = unpack2x16float(weight_bits(subgroup, line, n)).x;
    @if(IN == 0u) weight += unpack2x16float(weight_bits(subgroup, M + line, n)).x / 2048.0;
    return weight;
}

// far_of reports which elements of an output row are far. near returns elements without the bit that says so. marked sets
// the bit, and rounds to the bits before it. Zeros, NaN and infinities need no factor.
fn far_of(y: vec4<f32>, huge: bool) -> vec4<bool> { return vec4<bool>(huge) & ((bitcast<vec4<u32>>(y) & vec4<u32>(1u)) != vec4<u32>(0u)); }
fn near(y: vec4<f32>, far: vec4<bool>) -> vec4<f32> { return bitcast<vec4<f32>>(bitcast<vec4<u32>>(y) - select(vec4<u32>(0u), vec4<u32>(1u), far)); }
fn marked(y: vec4<f32>, far: vec4<bool>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(y);
    let exponent = bits & vec4<u32>(0x7f800000u);
    let even = (bits + ((bits >> vec4<u32>(1u)) & vec4<u32>(1u))) & vec4<u32>(0xfffffffeu);
    let last = select(vec4<u32>(0u), vec4<u32>(1u), far & (exponent != vec4<u32>(0u)));
    return bitcast<vec4<f32>>(select(even | last, bits, exponent == vec4<u32>(0x7f800000u)));
}

// either_power returns 2^(a - 127), and 2^(b - 127) where elements are far.
fn either_power(a: u32, b: u32, far: vec4<bool>) -> vec4<f32> { return select(vec4<f32>(power_of_two(a)), vec4<f32>(power_of_two(b)), far); }

// rescale_output rescales the output and adds the products of odd values, and of all values in rows that have met a
// huge one.
@inline fn rescale_output() {
    @if(IN != 1u) let huge_before = huge_row;
    @if(IN != 1u) @unroll for (var h = 0u; h < EACH; h++) {
        for (var rest = called.z; rest != 0u && !huge_row[h]; rest &= rest - 1u) {
            if (weight_of(subgroup, lane / PER + h * STEP, firstTrailingBit(rest)) != 0.0) { huge_row[h] = true; }
        }
    }
    for (var c = 0u; c < TURNS; c++) {
        @inline store_columns(acc, ON);
        @unroll for (var h = 0u; h < EACH; h++) {
            let line = lane / PER + h * STEP;
            for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                var y = scores[subgroup][line * SS + x];
                var alone = false;
                var far = vec4<bool>(false);
                @if(IN != 1u) {
                    alone = huge_row[h];
                    far = far_of(y, huge_before[h]);
                    y = near(y, far);
                }
                y = y * rescale[h];
                for (var rest = select(called.y, 0xffffffffu >> (32u - KEYS), alone); rest != 0u; rest &= rest - 1u) {
                    let n = firstTrailingBit(rest);
                    if (weight_bits(subgroup, line, n) != HIDDEN_BITS >> 16u) {
                        let z = value_v(stored_v(v_row(v_at, batch, min(j0 + n, keys - 1u)), min(c * KEYS + 4u * x, COLUMNS - 4u), p.vdim, p.v.d));
                        let weight = weight_of(subgroup, line, n);
                        var factor = vec4<f32>(1.0);
                        @if(IN != 1u) {
                            let becomes_far = (magnitude(z) >= vec4<u32>(HUGE << 23u)) & !far & vec4<bool>(weight != 0.0);
                            y = y * either_power(127u, 63u, becomes_far);
                            far = far | becomes_far;
                            factor = either_power(127u + TOP - V_TOP, 63u + TOP - V_TOP, far);
                        }
                        y = select(y, y + weight * factor * z, is_odd(z, V_TOP) | vec4<bool>(alone));
                    }
                }
                @if(IN != 1u) if (alone) { y = marked(y, far); }
                scores[subgroup][line * SS + x] = y;
            }
        }
        @inline load_columns(acc, ON);
    }
    @if(IN != 1u) {
        @unroll for (var h = 0u; h < EACH; h++) {
            if (huge_row[h]) {
                for (var x = lane % PER; x < KEYS / 4u; x += PER) {
                    @unroll for (var part = 0u; part < PARTS; part++) { weights[subgroup][(part * M + lane / PER + h * STEP) * PS + x] = vec2<u32>(0u); }
                }
            }
        }
        workgroupBarrier();
    }
}
