// A causal convolution of each channel along the tokens, and the state after it:
//
//     o_s = f(constant + Σ_i w_i·row_(s+i))    f is the identity or SiLU
//     o_j = row_(j+tail)
//
// Rows are those of past, or zeros, and then those of x. Where no token needs past, row s+i is row (i, s) of x, whose axes
// overlap. A thread has an element of o, and neighbours have neighbouring channels. In place past is in o, and a dispatch
// reads no row that it writes.
//
// Workgroup memory: none.

@ranged struct ConvParams {
    rows: u32, // of o
    row0: u32, // index of the first
    channels: u32,
    all: u32, // elements
    width: u32, // elements of w, 0 for a state
    before: u32, // rows of past, 0 where x overlaps
    tail: u32, // rows of x in a state
    starts: u32, // with rows 1: of past, 2: of o, 0: of zeros
    shifted: u32, // 1: there is a constant
    silu: u32, // 1: SiLU
    x_type: u32, // type of x: 0 f32, 1 f16, 2 bf16
    w_type, constant_type, past_type: u32,
    out_type: u32, // type of o
    x, w, constant, past, o: Strides,
}

@binding var<storage, read> x, w, constant, past: array<u32>;
@binding var<storage, read_write> o: Words;
@binding var<uniform> p: ConvParams;

// input returns channel c of row s + i.
fn input(b: u32, s: u32, i: u32, c: u32) -> f32 {
    let row = s + i;
    let at = p.x.base + b * p.x.b + c * p.x.d;
    var r = 0.0;
    if (p.before == 0u) {
        r = load_x(at + s * p.x.s + i * p.x.h);
    } else if (row >= p.before) {
        r = load_x(at + (row - p.before) * p.x.s);
    } else if (p.starts == 1u) {
        r = load_past(p.past.base + b * p.past.b + row * p.past.s + c * p.past.d);
    } else if (p.starts == 2u) {
        r = load_out(p.o.base + b * p.o.b + row * p.o.s + c * p.o.d);
    }
    return r;
}

@main(64) {
    let n = id * 64u + t;
    if (n >= p.all) { return; }
    let c = n % p.channels;
    let s = n / p.channels % p.rows;
    let b = n / p.channels / p.rows;
    let o_at = p.o.base + b * p.o.b + c * p.o.d;
    if (p.width == 0u) {
        put(o_at + (p.row0 + s) * p.o.s, input(b, p.row0 + s, p.tail, c));
        return;
    }
    var sum = 0.0;
    if (p.shifted == 1u) { sum = load_constant(p.constant.base + c * p.constant.d); }
    for (var i = 0u; i < p.width; i++) { sum = fma(input(b, p.row0 + s, i, c), load_w(p.w.base + i * p.w.s + c * p.w.d), sum); }
    if (p.silu == 1u) { sum = sum * sigmoid(sum).x; }
    put(o_at + s * p.o.s, sum);
}
