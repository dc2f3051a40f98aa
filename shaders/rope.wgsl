// Rotary position embedding (Su et al. 2021). The first 2·pairs elements of each row are pairs (a, b), which
// turn by angles given as cosines and sines; the others are copied:
//
//     o_a = x_a·cos_i - x_b·sin_i    o_b = x_a·sin_i + x_b·cos_i
//
// Pair i is (i, i + pairs), or (2i, 2i+1) when interleaved. A unit is a pair or a copied element. A thread
// computes 4 units, neighbouring threads neighbouring units. In place there are only pairs.
//
// Workgroup memory: none.

@ranged struct RoPEParams {
    heads, rows, pairs: u32,
    units: u32, // of a row
    all: u32, // units of the box
    interleaved: u32,
    inverse: u32, // 1: by -sin
    x_type: u32, // type of x: 0 f32, 1 f16, 2 bf16
    out_type: u32, // type of o
    x, cosine, sine, o: Strides,
}

@binding var<storage, read> x: array<u32>;
@binding var<storage, read> cosine, sine: array<f32>;
@binding var<storage, read_write> o: Words;
@binding var<uniform> p: RoPEParams;

fn input(i: u32) -> f32 {
    if (INPLACE == 1u) { return load_out(i); }
    return load_x(i);
}

@main(64) {
    for (var k = 0u; k < 4u; k++) {
        let n = id * 256u + k * 64u + t;
        if (n >= p.all) { return; }
        let unit = n % p.units;
        let row = n / p.units;
        @each($x: x, o) let $x_at = begin_$x(row);
        let turns = unit < p.pairs;
        // The first element, and the second of a pair.
        var i = unit + p.pairs;
        var j = i;
        if (turns) {
            i = select(unit, 2u * unit, p.interleaved == 1u);
            j = select(unit + p.pairs, 2u * unit + 1u, p.interleaved == 1u);
        }
        let u = input(x_at + i * p.x.d);
        if (!turns) {
            put(o_at + i * p.o.d, u);
            continue;
        }
        let v = input(x_at + j * p.x.d);
        let c = cosine[begin_cosine(row) + unit * p.cosine.d];
        var s = sine[begin_sine(row) + unit * p.sine.d];
        s = select(s, -s, p.inverse == 1u);
        put(o_at + i * p.o.d, u * c - v * s);
        put(o_at + j * p.o.d, u * s + v * c);
    }
}
