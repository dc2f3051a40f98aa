// Copies a tensor, element by element, rounded to the type of o:
//
//     o[b, h, s, d] = src[b, h, s, d]
//
// and to q8, a row of D integers preceded by its scale (TO = 4):
//
//     scale = max|x|·(1/127)    n_i = x_i·(1/scale), rounded to nearest even
//
// and to q4, blocks of 32 elements (TO = 5), of which x_m is the largest in magnitude, the first of equals:
//
//     scale = x_m/-8, rounded to f16    n_i = min(15, ⌊x_i·(1/(x_m/-8)) + 8.5⌋)
//
// and to f8, words of four elements, each rounded to e4m3fn (TO = 6).
//
// All operations are rounded to nearest, on every device: the integers are those of package backend.
//
// Copies between equal types move bits. Otherwise a unit is an element, or two elements where pairs begin at
// words of o. A thread copies 4 units, neighbouring threads neighbouring units. A row that becomes q8 has 16
// threads, a block of q4 has one.
//
// Workgroup memory: tops 256 bytes.

@ranged struct ConvertParams {
    heads, rows: u32,
    units: u32, // of a row: elements, or pairs; words of q8 or f8, or blocks of q4
    all: u32, // units of the box, or its rows that become q8
    in_type: u32, // type of src
    out_type: u32, // type of o
    pairs: u32, // 1: units are pairs of elements
    adds: u32, // 1: adds src to o; both are f32
    pad_zero: u32, // 0, which compilers do not know
    src, o: Strides,
}

@binding var<storage, read> src: array<u32>;
@binding var<storage, read_write> o: Words;
@binding var<uniform> p: ConvertParams;

var<workgroup> tops: array<u32, 64>; // bits of each thread's largest |x|

// load returns the bits of element d of the row that begins at element at.
fn load(at: u32, d: u32) -> u32 {
    if (p.in_type == 6u) { return bitcast<u32>(eighths(src[at + d / 4u] >> (8u * (d & 3u))).x); }
    if (p.in_type == 5u) { return bitcast<u32>(nibble_src(at, d)); }
    if (p.in_type == 4u) {
        return bitcast<u32>(bitcast<f32>(src[at]) * integer(src[at + 1u + d / 4u], d));
    }
    let i = at + d * p.src.d;
    if (p.in_type == 0u) { return src[i]; }
    return (src[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu;
}

// value returns the number whose bits load returned, which are those of an f32 for q8, q4 and f8.
fn value(bits: u32) -> f32 { return decode(bits, 0u, select(p.in_type, 0u, p.in_type > 2u)); }

// converted returns the bits of the number in the type of o.
fn converted(bits: u32) -> u32 {
    if (p.in_type == p.out_type) { return bits; }
    if (p.out_type == 0u) { return bitcast<u32>(value(bits)); }
    return encode16(value(bits), p.out_type);
}

// reciprocal returns 1/x, rounded to nearest, for 2^-126 <= |x| < 2^126. WGSL's division may be off by 2.5 ulp.
fn reciprocal(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let m = (bits & 0x7fffffu) | 0x800000u; // |x| is m times a power of two; 1/x is the integer next to 2^47/m times another
    let near = u32(16777216.0 / bitcast<f32>((bits & 0x7fffffu) | 0x3f800000u)); // off by less than 8
    let n = near + (m * 8u + m / 2u - m * near) / m - 8u; // the remainder 2^47 - m·near fits 32 bits
    return bitcast<f32>(((bits & 0x80000000u) | (bitcast<u32>(f32(n)) + 0x33800000u)) - (bits & 0x7f800000u));
}

// quantise writes a row of q8. A row with NaN or Inf gets a NaN as its scale, and a row of numbers that are all
// below 2^-118 becomes zeros.
fn quantise(row: u32, t: u32) {
    let lane = t % 16u;
    let at = begin_src(row);
    var top = 0u;
    if (row < p.all) {
        for (var i = lane; i < p.units; i += 16u) {
            for (var e = 0u; e < 4u; e++) {
                // As bits, which are largest for NaN.
                top = max(top, bitcast<u32>(value(load(at, 4u * i + e))) & 0x7fffffffu);
            }
        }
    }
    tops[t] = top;
    workgroupBarrier();
    for (var i = 0u; i < 16u; i++) { top = max(top, tops[t - lane + i]); }
    if (row >= p.all) { return; }
    let to = begin_o(row);
    let bad = top >= 0x7f800000u;
    let zero = bad || top < 0x04800000u; // 2^-118
    let largest = select(bitcast<f32>(top), 1.0, zero);
    let scale = largest * 0.007874015748031496;
    let by = reciprocal(scale);
    for (var i = lane; i < p.units; i += 16u) {
        var w = 0u;
        for (var e = 0u; e < 4u; e++) {
            let n = i32(round(value(load(at, 4u * i + e)) * by));
            w = w | ((bitcast<u32>(n) & 0xffu) << (8u * e));
        }
        atomicStore(&o.data[to + 1u + i], select(w, 0u, zero));
    }
    if (lane == 0u) {
        atomicStore(&o.data[to], select(select(bitcast<u32>(scale), 0u, zero), 0x7fc00000u, bad));
    }
}

// quantise_block writes block n of q4. One with NaN or Inf, or whose scale is too large for an f16, gets a NaN as its
// scale, and one whose scale rounds to 0 becomes zeros.
fn quantise_block(n: u32) {
    if (n >= p.all) { return; }
    let at = begin_src(n / p.units);
    let first = n % p.units * 32u;
    let to = begin_o(n / p.units) + n % p.units * 9u;
    var most = 0u; // bits of x_m
    for (var e = 0u; e < 32u; e++) {
        let x = bitcast<u32>(value(load(at, first + e)));
        if ((x & 0x7fffffffu) > (most & 0x7fffffffu)) { most = x; }
    }
    let scale = encode16(bitcast<f32>(most) * -0.125, 1u);
    let bad = (scale & 0x7fffu) >= 0x7c00u;
    let empty = bad || (scale & 0x7fffu) == 0u;
    put16(to, select(select(scale, 0u, empty), 0x7e00u, bad));
    let divisor = select(bitcast<f32>(most) * -0.125, 1.0, empty);
    let by = reciprocal(divisor);
    @unroll for (var i = 0u; i < 8u; i++) { // llvmpipe of Mesa 22 loads wrong words in a loop
        var w = 0u;
        for (var e = 0u; e < 4u; e++) {
            let x = value(load(at, first + 2u * i + e / 2u + e % 2u * 16u));
            let product = bitcast<f32>(bitcast<u32>(x * by) + p.pad_zero); // which keeps compilers from an fma
            w |= min(15u, u32(product + 8.5)) << (4u * e);
        }
        put16(to + 1u + i, select(w, 0x8888u, empty));
    }
}

@main(64) {
    if (TO == 4u) {
        quantise(id * 4u + t / 16u, t);
        return;
    }
    if (TO == 5u) {
        quantise_block(id * 64u + t);
        return;
    }
    for (var k = 0u; k < 4u; k++) {
        let n = id * 256u + k * 64u + t;
        if (n >= p.all) { return; }
        let from_row = begin_src(n / p.units);
        let to = begin_o(n / p.units);
        let unit = n % p.units;
        if (TO == 6u) {
            var w = 0u;
            for (var e = 0u; e < 4u; e++) {
                w = w | (encode8(value(load(from_row, 4u * unit + e))) << (8u * e));
            }
            atomicStore(&o.data[to + unit], w);
            continue;
        }
        if (p.pairs == 1u) {
            let lower = converted(load(from_row, 2u * unit));
            let upper = converted(load(from_row, 2u * unit + 1u));
            atomicStore(&o.data[(to >> 1u) + unit], lower | (upper << 16u));
            continue;
        }
        let i = to + unit * p.o.d;
        var bits = converted(load(from_row, unit));
        if (p.adds == 1u) {
            bits = bitcast<u32>(bitcast<f32>(atomicLoad(&o.data[i])) + bitcast<f32>(bits));
        }
        if (p.out_type == 0u) {
            atomicStore(&o.data[i], bits);
        } else {
            put16(i, bits);
        }
    }
}
